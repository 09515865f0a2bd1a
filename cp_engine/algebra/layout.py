"""Layout: which positions of each dim every rank holds.

A rank is its index in row-major order of the mesh axes, major first. The dim `heads` counts q's heads for every tensor: the
k and v heads that a rank holds are the image of those q heads under GQA (head h uses kv head h // group).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeAlias

from cp_engine.algebra.index_set import IndexSet, Run, shares, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes, major first; rank = row-major index of its coordinate."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def size(self, axes: Sequence[str]) -> int:
        """Number of ranks that differ only in these axes."""
        return prod(self.sizes[self.axes.index(a)] for a in axes)

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks that differ only in `axes`, numbered with the first of `axes` as the major one."""
        strides = [prod(self.sizes[i + 1 :]) for i in range(len(self.axes))]
        where = [self.axes.index(a) for a in axes]
        rest = [i for i in range(len(self.axes)) if i not in where]

        def ranks(dims: list[int]) -> list[int]:
            spans = [range(self.sizes[i]) for i in dims]
            return [
                sum(c * strides[i] for c, i in zip(coordinate, dims, strict=True)) for coordinate in product(*spans)
            ]

        inner = ranks(where)
        return [tuple(base + r for r in inner) for base in ranks(rest)]

    def coordinate(self, rank: int) -> str:
        """A rank as a person reads it, such as `ring=1 heads=0`."""
        parts, left = [], rank
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            left, c = divmod(left, size)
            parts.append(f"{axis}={c}")
        return " ".join(reversed(parts)) or "the only rank"


Deal: TypeAlias = Callable[[IndexSet, int], list[IndexSet]]
"""How positions that a group holds in common are dealt to that many ranks; the shares partition them."""


def contiguous(held: IndexSet, ranks: int) -> list[IndexSet]:
    """Equal shares in local order; the first ranks hold one more when there is a remainder."""
    return [held.part(first, count) for first, count in shares(held.count, ranks)]


def cut(mesh: Mesh, held: Sequence[IndexSet], axes: Sequence[str], deal: Deal) -> tuple[IndexSet, ...]:
    """Each rank's share of what its group along `axes` holds in common.

    Raises:
        ValueError: the ranks of a group hold different positions, so that there is nothing to share.
    """
    out = list(held)
    dealt: dict[IndexSet, list[IndexSet]] = {}
    for group in mesh.groups(axes):
        common = held[group[0]]
        for rank in group:
            if held[rank] != common:
                raise ValueError(
                    f"rank {group[0]} holds {common} and rank {rank} holds {held[rank]}: not the same to share"
                )
        if common not in dealt:
            dealt[common] = deal(common, len(group))
        for rank, share in zip(group, dealt[common], strict=True):
            out[rank] = share
    return tuple(out)


def cut_by(mesh: Mesh, held: Sequence[IndexSet]) -> tuple[str, ...]:
    """The axes along which ranks hold different positions."""
    return tuple(a for a in mesh.axes if any(len({held[r] for r in group}) > 1 for group in mesh.groups((a,))))


def joined(mesh: Mesh, held: Sequence[IndexSet], axes: Sequence[str]) -> tuple[IndexSet, ...]:
    """What each rank holds after its group along `axes` has put everything together.

    Raises:
        ValueError: two ranks of a group hold the same position, so that it would be there twice.
    """
    out = list(held)
    for group in mesh.groups(axes):
        try:
            together = union([held[r] for r in group], held[group[0]].size)
        except ValueError as error:
            raise ValueError(str(error)) from None
        for rank in group:
            out[rank] = together
    return tuple(out)


@dataclass(frozen=True)
class Layout:
    """Per rank, the positions held of the sequence and the q heads served.

    Args:
        sequence: one IndexSet per rank.
        heads: one IndexSet per rank, in q's heads.
    """

    sequence: tuple[IndexSet, ...]
    heads: tuple[IndexSet, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.sequence, self.heads))

    def __hash__(self) -> int:
        return self._hash

    def of(self, dim: str) -> tuple[IndexSet, ...]:
        """The sets of one dim, `sequence` or `heads`."""
        return self.sequence if dim == "sequence" else self.heads

    def replaced(self, dim: str, sets: tuple[IndexSet, ...]) -> "Layout":
        """The same layout with other sets in one dim."""
        return Layout(sets, self.heads) if dim == "sequence" else Layout(self.sequence, sets)


def image(heads: IndexSet, group: int) -> IndexSet:
    """The kv heads that serve some q heads, `group` q heads to one kv head."""
    if group == 1:
        return heads
    served = [Run(r.start // group, r.last // group - r.start // group + 1) for r in heads.runs if r.step == 1]
    served += [Run(h // group, 1) for r in heads.runs if r.step > 1 for h in range(r.start, r.stop, r.step)]
    runs: list[Run] = []
    for r in sorted(served, key=lambda r: r.start):
        if runs and r.start <= runs[-1].stop:
            runs[-1] = Run(runs[-1].start, max(runs[-1].stop, r.stop) - runs[-1].start)
        else:
            runs.append(r)
    return IndexSet(tuple(runs), heads.size // group)
