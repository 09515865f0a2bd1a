"""What the ranks of a training job compare while they train: that they read the same text, hold the same weights and have a loss.

Importing this imports torchtitan, on CPU inside `cpu_shims`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torchtitan.distributed import ParallelDims

from cp_engine.errors import Problem, RankError

MIXED = 0x9E3779B97F4A7C15 - 2**64
"""An odd number whose multiples look drawn: 2**64 divided by the golden ratio. Source: Knuth, The Art of Computer Programming 3, 6.4."""
PIECE = 2**22
"""Elements that are looked at together: a digest needs 16 bytes for each of them."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WRAPPERS = re.compile(r"_(checkpoint_wrapped|fsdp_wrapped|orig)_mod(ule)?(\.|$)")
"""Of names, put there by what wraps a module."""


class Guard:
    """Compares one rank with the others, which all call the same methods.

    Args:
        dims: of the job.
        device: of the tensors that ranks exchange.
        source: the plan's name, for messages.
    """

    def __init__(self, dims: ParallelDims, device: torch.device, source: str) -> None:
        batch = dims.get_optional_mesh("batch")
        self._reader = 0 if batch is None else batch.get_local_rank()  # ranks with the same number read the same text
        self._stage = dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0
        self._replicas = dims.get_optional_mesh("dp_replicate")
        self._device, self._source = device, source

    def require_same_text(self, step: int, batch: Mapping[str, object], labels: Tensor) -> None:
        """Compares what the ranks read that are to read the same.

        Args:
            step: counted from 1.
            batch: whole, as the loader gave it.
            labels: [B, S].

        Raises:
            RankError: on every rank, where two of them read something else.
        """
        if dist.get_world_size() == 1:
            return
        read = digest([*(batch[name] for name in sorted(batch)), labels], self._device)
        rows = _gathered(torch.stack([torch.tensor(self._reader, device=self._device), read])).tolist()
        for reader in sorted({row[0] for row in rows}):
            ranks = [rank for rank, row in enumerate(rows) if row[0] == reader]
            if (odd := _odd_ones({rank: rows[rank][1] for rank in ranks})) is not None:
                what = f"of step {step} is not the same on the ranks {_listed(ranks)}, of which each attends to a part: {_odd(odd)}"
                rule = (
                    "rule",
                    "ranks that share a sequence read the same rows; a loader that draws does so with one seed",
                )
                raise RankError([Problem(key="data", what=what, details=(rule,))], self._source, odd[0])

    def require_same_weights(self, parts: Sequence[nn.Module]) -> None:
        """Compares the copies of each parameter that several ranks hold, once before training.

        Args:
            parts: of the model on this rank.

        Raises:
            RankError: on a rank whose copy, or whose peer's, is another one.
        """
        names = [(_plain(name), p) for part in parts for name, p in part.named_parameters()]
        for group, copies in self._copies(names).items():
            mine = torch.stack([digest([p], self._device) for _, p in copies])
            found = _gathered(mine, group)
            differing = (found != found[0]).any(0).nonzero().flatten().tolist()
            if differing:
                ranks, rows = dist.get_process_group_ranks(group), found.tolist()
                odd = _odd_ones({rank: tuple(row) for rank, row in zip(ranks, rows, strict=True)})
                assert odd is not None
                what = f"differ between the ranks {_listed(ranks)}, which hold copies of them: {_odd(odd)}"
                first = ("first", copies[differing[0]][0] + f", of {len(differing)}")
                rule = ("rule", "copies are drawn with one seed, or loaded from one checkpoint")
                raise RankError([Problem(key="weights", what=what, details=(first, rule))], self._source, odd[0])

    def require_finite(self, step: int, loss: Tensor, again: Callable[[], object], parts: Sequence[nn.Module]) -> None:
        """Ends the run where a loss is not finite, and says which rank and module had that first.

        Args:
            step: counted from 1.
            loss: of this rank's tokens; a scalar, a DTensor where tensor parallelism is.
            again: computes it once more.
            parts: of the model on this rank.

        Raises:
            RankError: on every rank.
        """
        mine = loss.full_tensor() if isinstance(loss, DTensor) else loss
        losses = _gathered(mine.detach().to(torch.float64).sum()[None]).flatten()
        if bool(losses.isfinite().all()):
            return
        bad = [rank for rank, x in enumerate(losses.tolist()) if not math.isfinite(x)]
        rank, where = self._first(again, parts)
        rank = bad[0] if rank is None else rank
        what = f"is {losses[bad[0]]:g} at step {step}; rank {rank} had it first"
        details = (("where", where), ("ranks", f"{_listed(bad)} of {len(losses)}"))
        raise RankError(
            [Problem(key="loss", what=what, details=details, tries=("launch.nonfinite=go_on",))], self._source, rank
        )

    def _first(self, again: Callable[[], object], parts: Sequence[nn.Module]) -> tuple[int | None, str]:
        """Which rank and module first had something that is not finite."""
        broken = [_plain(n) for part in parts for n, p in part.named_parameters() if not _is_finite([p])]
        held: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(held, broken)
        for rank, names in enumerate(held):
            if names:
                others = f" and {len(names) - 1} more" * (len(names) > 1)
                return rank, f"{names[0]}{others}: weights that the step before, or the checkpoint, left so"
        with torch.compiler.set_stance("force_eager"), watched(parts) as seen:
            again()
        found = [(0, 0, "")] * dist.get_world_size()
        dist.all_gather_object(found, (self._stage, *(seen[0] if seen else (2**62, ""))))
        rank = min(range(len(found)), key=lambda r: found[r][:2])
        return (rank, found[rank][2]) if found[rank][2] else (None, "the loss function, which is given finite numbers")

    def _copies(
        self, named: Sequence[tuple[str, nn.Parameter]]
    ) -> dict[dist.ProcessGroup, list[tuple[str, nn.Parameter]]]:
        """The parameters that each group of ranks holds copies of."""
        groups: dict[dist.ProcessGroup, list[tuple[str, nn.Parameter]]] = {}
        for name, p in named:
            if isinstance(p, DTensor):
                dims = [d for d, placement in enumerate(p.placements) if placement.is_replicate()]
                having = [p.device_mesh.get_group(d) for d in dims]
            else:  # DDP's
                having = [self._replicas.get_group()] if self._replicas is not None else []
            for group in having:
                if dist.get_world_size(group) > 1:
                    groups.setdefault(group, []).append((name, p))
        return groups


def _gathered(row: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """A row of each rank."""
    size = dist.get_world_size(group)
    found = row.new_empty(size * len(row))
    dist.all_gather_into_tensor(found, row, group=group)
    return found.view(size, -1).cpu()


def digest(values: Iterable[object], device: torch.device) -> Tensor:
    """A number that is another one when an element, or its place, is.

    Args:
        values: tensors of any dtype; what else there is counts for nothing.
        device: of the result.

    Returns:
        int64 scalar; sums wrap around.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for i, x in enumerate(v for v in values if isinstance(v, Tensor)):
        local = (x.to_local() if isinstance(x, DTensor) else x).detach()
        local = torch.view_as_real(local) if local.is_complex() else local
        for j, piece in enumerate(local.to(device).contiguous().flatten().split(PIECE)):
            bits = piece.view(INTEGERS[piece.element_size()]).to(torch.int64)
            places = torch.arange(1, len(bits) + 1, device=device) + (i << 48) + j * PIECE
            total += ((bits + 1) * (places * MIXED)).sum()
    return total


@contextmanager
def watched(parts: Sequence[nn.Module]) -> Iterator[list[tuple[int, str]]]:
    """Looks at what every module returns inside the block; the first that is not finite is in the list, with its place in the order."""
    seen: list[tuple[int, str]] = []
    calls = 0

    def after(name: str) -> Callable[[nn.Module, object, object, object], None]:
        def look(module: nn.Module, inputs: object, keywords: object, output: object) -> None:
            nonlocal calls
            calls += 1
            if seen or _is_finite(tree_leaves(output)):
                return
            is_given = _is_finite(tree_leaves((inputs, keywords)))
            why = "its inputs and weights are finite" if is_given else "what it is given is not finite"
            seen.append((calls, f"{name or 'the model'} ({type(module).__name__.removeprefix('FSDP')}); {why}"))

        return look

    with ExitStack() as hooks:
        for part in parts:
            for name, module in part.named_modules():
                hooks.callback(module.register_forward_hook(after(_plain(name)), with_kwargs=True).remove)
        yield seen


def _is_finite(leaves: Iterable[object]) -> bool:
    locals_ = (x.to_local() if isinstance(x, DTensor) else x for x in leaves if isinstance(x, Tensor))
    return all(bool(x.isfinite().all()) for x in locals_ if x.is_floating_point() and x.numel())


def _odd_ones(values: Mapping[int, object]) -> list[int] | None:
    """The ranks that hold what fewest ranks hold; None where all hold the same."""
    holders: dict[object, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    return None if len(holders) == 1 else min(reversed(holders.values()), key=len)


def _odd(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)} {'have' if len(ranks) > 1 else 'has'} other ones"


def _listed(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:8]] + ["..."] * (len(ranks) > 8)
    return ", ".join(shown[:-1]) + " and " * (len(shown) > 1) + shown[-1]


def _plain(name: str) -> str:
    return WRAPPERS.sub("", name).rstrip(".")
