"""Recompute: what a forward pass leaves for its recompute, so that neither attention nor its traffic is repeated."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from cp_engine.exchange.operation import Saved
from cp_engine.exchange.target import Communicator

PART = 2**16
"""Words that are digested at a time: what a processor has near it."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MIXER = tuple(n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of SplitMix64, as signed numbers."""


@dataclass(frozen=True, slots=True)
class Record:
    """A forward pass that has run: its results, what backward needs, and how many tensors of that belong to each operation.

    Args:
        outs: per local rank, in the entry layout; behind them the losses, loss by loss.
        saved: operation by operation, head group by head group.
        sizes: tensors of each operation, in that order.
    """

    outs: tuple[Tensor, ...]
    saved: Saved
    sizes: tuple[int, ...]


@dataclass(slots=True)
class Memo:
    """Where a forward pass leaves its record, so that a recompute repeats neither attention nor its traffic.

    Args:
        record: set by the first pass; emptied by its backward.
        digests: [inputs] of every tensor of the call, by which a recompute finds the pass that it repeats.
        said: what else the call said, such as its scale.
        pass_number: of the pass among all of its engine, the same on every rank; 0 for a recompute.
        versions: of the record's tensors, by which it is seen that somebody changed one in place.
    """

    record: Record | None = None
    digests: Tensor | None = None
    said: tuple[object, ...] = ()
    pass_number: int = 0
    versions: tuple[int, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Whether there is a record, and what it holds is what the pass made."""
        return self.record is not None and self.versions == versions_of(self.record)


def versions_of(record: Record) -> tuple[int, ...]:
    """Autograd's count of changes in place, of every tensor that a record holds; of inference mode's, which have none, 0."""
    return tuple(0 if x.is_inference() else x._version for x in (*record.outs, *record.saved))


class Result(NamedTuple):
    """What an attention call gives.

    Args:
        out: [B, H, S_local, Dv].
        memo: what a recompute may use; None where the plan recomputes everything.
        losses: name -> this rank's share of a sum over queries.
    """

    out: Tensor
    memo: Memo | None = None
    losses: Mapping[str, Tensor] = MappingProxyType({})


def memo_of_pass(tensors: Iterable[Tensor], said: tuple[object, ...], pass_number: int) -> Memo:
    """Where a pass leaves its record.

    Args:
        tensors: of the call.
        said: what else the call says.
        pass_number: of the pass, the same on every rank.
    """
    return Memo(None, digests_of(tensors), said, pass_number)


def memo_of_recompute(
    tensors: Iterable[Tensor],
    said: tuple[object, ...],
    passed: Sequence[Memo],
    communicators: Sequence[Communicator | None],
) -> Memo:
    """The memo that the same call left on every rank; a new one where there is none.

    Args:
        tensors: of the call.
        said: what else the call says.
        passed: what the passes that it may repeat have left.
        communicators: of the ranks that must agree.
    """
    digests = digests_of(tensors)
    alike = [
        m
        for m in passed
        if m.is_intact and m.said == said and m.digests is not None and torch.equal(m.digests, digests)
    ]
    numbers = sorted(m.pass_number for m in alike)
    for others in communicators:
        if others is not None:  # a rank may have the same tokens in two passes, and others not; or have dropped one
            numbers = others.agree(numbers, digests.device)
    return next((m for m in alike if m.pass_number in numbers[:1]), Memo(None, digests, said))


def digests_of(tensors: Iterable[Tensor]) -> Tensor:
    """[tensors] int64: a digest of each."""
    return torch.stack([_digest(x.detach()) for x in tensors])


def _digest(x: Tensor) -> Tensor:
    """A digest that knows where numbers are; torch's own is the same for the same numbers in another order.

    The bits, eight bytes at a time and with their place, go through a mixer, and what comes out is summed.
    Source of the mixer's form and factors: Steele, Lea and Flood, OOPSLA 2014, figure 8 (SplitMix64).
    """
    flat, size = x.contiguous().flatten(), x.element_size()
    if flat.numel() * size % 8:
        words = flat.view(BITS[size]).to(torch.int64)
    else:
        words = (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)
    total = words.new_zeros(())
    places = torch.arange(1, min(PART, len(words)) + 1, device=x.device) * MIXER[0]
    for part in words.split(PART):
        mixed = part + places[: len(part)]
        for shift, factor in ((30, MIXER[1]), (27, MIXER[2]), (32, MIXER[0])):
            mixed.mul_(factor).bitwise_xor_(mixed >> shift)
        total = total * MIXER[0] + mixed.sum()
    return total
