"""Memory: what one rank allocates in a call, found by running its program on tensors without data, before any process exists.

The program is the one that runs: packing, overlap, tiles and what is kept for backward are its own, and nothing is described twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_engine.algebra.tensors import parameter, size_of
from cp_engine.exchange.channel import Pending
from cp_engine.exchange.target import Target
from cp_engine.plan.ir import Plan
from cp_engine.runtime.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that one rank holds at once beside the tensors that the call brings, in bytes.

    Args:
        rank: which one it is; the one whose steps make most.
        forward: while it runs forward.
        backward: while it runs backward, with what forward keeps for it.
        kept: from forward until backward.
    """

    rank: int
    forward: int
    backward: int
    kept: int


def peak(plan: Plan, device: str = "cpu") -> Peak:
    """Runs forward and backward of one rank without data and without peers.

    Args:
        plan: of one call.
        device: device type for which kernels are chosen; what they allocate inside is not seen.

    Returns:
        The rank's peak.
    """
    rank = max(range(plan.degree), key=lambda r: sum(c.buffer_bytes[r] for c in plan.costs))
    program = Program(plan, _alone(plan, rank, device))
    dtype = getattr(torch, plan.shape.dtype)
    inputs = {n: [torch.empty(s, dtype=dtype, device="meta")] for n, s in sizes_of(plan, rank).items()}
    scale = plan.shape.head_dim**-0.5
    with _Live() as live:
        record = program.forward(dict(inputs), scale)
        forward, kept = live.peak, live.held()
        live.peak = kept
        douts = [x.new_empty(x.shape) for x in record.outs]
        given = sum(x.nbytes for x in douts)
        grads = program.backward(douts, record.saved, record.sizes, scale)
        backward = live.peak - given
    del grads
    return Peak(rank=rank, forward=forward, backward=backward, kept=kept)


def _alone(plan: Plan, rank: int, device: str) -> Target:
    heads = _Nobody(rank) if plan.shape.head_ranks > 1 else None
    return Target(ranks=(rank,), device=device, communicator=_Nobody(rank), heads=heads)


def sizes_of(plan: Plan, rank: int) -> Mapping[str, tuple[int, ...]]:
    """The size of every tensor and parameter that a call brings to one rank."""
    shape, local = plan.shape, plan.entry.sequence[rank].count
    tensors = {n: size_of(shape, n, local) for n in plan.inputs}
    return {**tensors, **{n: parameter(n).size(shape) for n in plan.parameters}}


class _Nobody:
    """A communicator whose peers send nothing: buffers have their size, and no data."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def channel(self, group: tuple[int, ...]) -> "_Silence":
        return _Silence(len(group))

    def agree(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        return list(numbers)


class _Silence:
    """One group of nobody."""

    def __init__(self, members: int) -> None:
        self.members = members

    def all_to_all(self, send: Tensor, sent: list[int], received: list[int]) -> Pending:
        return Pending(send.new_empty(sum(received)), kept=send)

    def all_to_all_even(self, send: Tensor) -> Pending:
        return Pending(send.new_empty(send.shape), kept=send)

    def all_gather(self, send: Tensor) -> Pending:
        return Pending(send.new_empty(self.members * send.numel()), kept=send)

    def shift(self, send: Tensor, to: int, source: int, received: int, tag: int) -> Pending:
        return Pending(send.new_empty(received), kept=send)


class _Live(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for more than a second, to keep it from compiling this class."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.held())
        return out

    def held(self) -> int:
        """Bytes that live now."""
        for key in [key for key, (ref, _) in self._sizes.items() if ref.expired()]:
            del self._sizes[key]
        return sum(size for _, size in self._sizes.values())
