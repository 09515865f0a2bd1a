"""Transfer: one tensor's move from one layout to another, from which bytes, exchange and adjoint are derived."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from cp_engine.algebra.index_set import IndexSet, Run, union
from cp_engine.algebra.layout import Layout, image

Table: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True)
class Block:
    """A box of elements that moves: local indices of heads and sequence at its source and at its destination."""

    heads_from: Run
    heads_to: Run
    sequence_from: Run
    sequence_to: Run

    @property
    def rows(self) -> int:
        """Number of (head, position) pairs."""
        return self.heads_from.count * self.sequence_from.count

    def reversed(self) -> "Block":
        """The same box on its way back."""
        return Block(self.heads_to, self.heads_from, self.sequence_to, self.sequence_from)


@dataclass(frozen=True)
class Transfer:
    """One tensor's move from one layout to another inside groups of ranks; bytes, exchange and adjoint are derived from it.

    Args:
        tensor: its name.
        before: layout in which it is there.
        after: layout in which it is wanted.
        groups: ranks that exchange with each other.
        group_size: q heads per head of this tensor (1 for q and out).
        is_adjoint: the same blocks the other way round, summed where they meet.
    """

    tensor: str
    before: Layout
    after: Layout
    groups: tuple[tuple[int, ...], ...]
    group_size: int
    is_adjoint: bool = False

    @cached_property
    def adjoint(self) -> "Transfer":
        """The move that gradients make."""
        return replace(self, is_adjoint=not self.is_adjoint)

    @property
    def source(self) -> Layout:
        """The layout that it finds the tensor, or its gradient, in."""
        return self.after if self.is_adjoint else self.before

    @property
    def result(self) -> Layout:
        """The layout that it leaves the tensor, or its gradient, in."""
        return self.before if self.is_adjoint else self.after

    def blocks(self, source: int, destination: int) -> list[Block]:
        """What one rank sends another (or keeps), in an order that both sides agree on."""
        if self.is_adjoint:
            return [b.reversed() for b in self.adjoint.blocks(destination, source)]
        heads = self._head_pairs(source, destination)
        sequence = self.before.sequence[source].common(self.after.sequence[destination]) if heads else []
        return [Block(h_from, h_to, s_from, s_to) for h_from, h_to in heads for s_from, s_to in sequence]

    def _head_pairs(self, source: int, destination: int) -> list[tuple[Run, Run]]:
        have, want = self.before.heads[source], self.after.heads[destination]
        if self.group_size == 1:
            return have.common(want)
        mine, theirs = list(image(have, self.group_size)), list(image(want, self.group_size))
        pairs: list[tuple[Run, Run]] = []
        for head in self._taken(have, want):
            here, there = mine.index(head), theirs.index(head)
            before = pairs[-1] if pairs else None
            if before and (before[0].stop, before[1].stop) == (here, there):
                pairs[-1] = Run(before[0].start, before[0].count + 1), Run(before[1].start, before[1].count + 1)
            else:
                pairs.append((Run(here, 1), Run(there, 1)))
        return pairs

    def _taken(self, have: IndexSet, want: IndexSet) -> IndexSet:
        """The kv heads that a destination takes from a source: those whose first wanted q head the source serves."""
        g = self.group_size
        first: dict[int, int] = {}
        for r in want.runs:
            for head in range(r.start, r.stop, r.step):
                first.setdefault(head // g, head)
        held = set(have)
        kv = [h for h, head in first.items() if head in held]
        return union([IndexSet((Run(h, 1),), want.size // g) for h in sorted(kv)], want.size // g)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """Per group, (head, position) pairs that go from member i to member j; the diagonal stays where it is."""
        if self.is_adjoint:
            return tuple(t.T for t in self.adjoint.tables)
        sequence = [_table(self.before.sequence, self.after.sequence, g) for g in self.groups]
        heads = [_table(self.before.heads, self.after.heads, g, self._count_heads) for g in self.groups]
        return tuple(s * h for s, h in zip(sequence, heads, strict=True))

    @cached_property
    def moves_anything(self) -> bool:
        """Whether anything leaves any rank; equal on all ranks, so that all of them call a collective or none does."""
        return any(int(t.sum()) > int(t.trace()) for t in self.tables)

    def kv_count(self, heads: IndexSet) -> int:
        """Heads of this tensor that serve some q heads."""
        return image(heads, self.group_size).count

    def _count_heads(self, have: IndexSet, want: IndexSet) -> int:
        return have.count_common(want) if self.group_size == 1 else self._taken(have, want).count

    @cached_property
    def is_replicating(self) -> bool:
        """Whether an element may go to more than one rank, so that its gradient is a sum over ranks.

        Totals do not tell: where some elements go nowhere and others twice, as many arrive as were there.
        """
        for group in self.groups:
            wanted: dict[IndexSet, list[IndexSet]] = {}
            for rank in group:
                heads, sequence = image(self.after.heads[rank], self.group_size), self.after.sequence[rank]
                if heads.count and sequence.count:
                    wanted.setdefault(heads, []).append(sequence)
            try:
                union(wanted, self.after.heads[group[0]].size)  # overlapping heads: summed, though positions may differ
                for sets in wanted.values():
                    union(sets, sets[0].size)
            except ValueError:
                return True
        return False

    @cached_property
    def is_even_gather(self) -> bool:
        """Whether in every group each member sends all that it holds to every other member, in equal sizes."""
        return not self.is_adjoint and all(
            len({(self.after.sequence[r], self.after.heads[r]) for r in g}) == 1
            and int(t.min())
            == int(t.max())
            == self.before.sequence[g[0]].count * self.kv_count(self.before.heads[g[0]])
            > 0
            for g, t in zip(self.groups, self.tables, strict=True)
        )


def _table(
    before: Sequence[IndexSet],
    after: Sequence[IndexSet],
    group: tuple[int, ...],
    count: Callable[[IndexSet, IndexSet], int] | None = None,
) -> Table:
    """A count for every pair of members, computed once per distinct pair of sets; without `count`, of common positions."""
    have = {s: i for i, s in enumerate(dict.fromkeys(before[r] for r in group))}
    want = {s: i for i, s in enumerate(dict.fromkeys(after[r] for r in group))}
    if count is None and len(have) > 1 < len(want) and all(r.step == 1 for s in (*have, *want) for r in s.runs):
        small = _overlaps(list(have), list(want))
    else:
        count = count or IndexSet.count_common
        small = np.array([[count(a, b) for b in want] for a in have], dtype=np.int64)
    return small[np.ix_([have[before[r]] for r in group], [want[after[r]] for r in group])]


def _overlaps(have: list[IndexSet], want: list[IndexSet]) -> Table:
    """Common positions of every pair of sets of solid runs, all at once: 1,024 x 1,024 pairs are too many for a loop."""

    def bounds(sets: list[IndexSet]) -> tuple[Numbers, Numbers, Numbers]:
        runs = [(r.start, r.stop) for s in sets for r in (s.runs or (Run(0, 0),))]  # an empty set keeps its row
        first = np.cumsum([0, *(max(1, len(s.runs)) for s in sets[:-1])])
        starts, stops = np.array(runs, dtype=np.int64).T
        return starts, np.maximum(starts, stops), first

    (a0, a1, a), (b0, b1, b) = bounds(have), bounds(want)
    common = np.maximum(0, np.minimum(a1[:, None], b1) - np.maximum(a0[:, None], b0))
    table: Table = np.add.reduceat(np.add.reduceat(common, a, axis=0), b, axis=1)
    return table
