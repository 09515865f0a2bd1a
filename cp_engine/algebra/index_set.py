"""IndexSet: which positions of one dim a rank holds, as ordered arithmetic ranges over the global size.

    contiguous  0..8 on rank 0 of 2      [0:8]
    zigzag      S=16 on rank 0 of 2      [0:4] [12:16]
    striped     S=16 on rank 1 of 2      [1:16:2]

Order matters: local index i is the i-th position. Padding is the size of a buffer and never a position.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd


@dataclass(frozen=True, slots=True)
class Run:
    """`count` positions `start, start + step, ...`; step is 1 when count is below 2."""

    start: int
    count: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.step

    @property
    def stop(self) -> int:
        return self.last + 1

    def part(self, first: int, count: int) -> "Run":
        """`count` members from local index `first` on."""
        return run(self.start + first * self.step, count, self.step)

    def slice(self) -> slice:
        """The members as a slice of a dim."""
        return slice(self.start, self.stop, self.step)

    def __str__(self) -> str:
        return f"{self.start}..{self.stop}" + (f" step {self.step}" if self.step > 1 else "")


def run(start: int, count: int, step: int = 1) -> Run:
    """A normalised Run."""
    return Run(start, count, step if count > 1 else 1)


def intersect(a: Run, b: Run) -> Run | None:
    """The positions in both runs, ascending, by the Chinese remainder theorem; None when there are none."""
    if a.step == b.step == 1:  # by far the most frequent case
        low, high = max(a.start, b.start), min(a.start + a.count, b.start + b.count)
        return Run(low, high - low) if low < high else None
    g = gcd(a.step, b.step)
    if (b.start - a.start) % g:
        return None
    step = a.step // g * b.step
    offset = (b.start - a.start) // g * pow(a.step // g, -1, b.step // g) % (b.step // g) if b.step > g else 0
    first = a.start + a.step * offset
    low, high = max(a.start, b.start), min(a.last, b.last)
    first += max(0, -(-(low - first) // step)) * step
    return run(first, (high - first) // step + 1, step) if first <= high else None


@dataclass(frozen=True)
class IndexSet:
    """The positions of one dim that a rank holds.

    Args:
        runs: ascending, non-overlapping runs in local order.
        size: the global size of the dim.
    """

    runs: tuple[Run, ...]
    size: int

    @cached_property
    def count(self) -> int:
        """How many positions are held."""
        return sum(r.count for r in self.runs)

    @cached_property
    def _hash(self) -> int:
        return hash((self.runs, self.size))

    def __hash__(self) -> int:
        return self._hash  # sets are cache keys of the proof: hash 1,024 runs once

    def __iter__(self) -> Iterator[int]:
        for r in self.runs:
            yield from range(r.start, r.stop, r.step)

    def __str__(self) -> str:
        shown = " ".join(map(str, self.runs[:3])) + (f" and {len(self.runs) - 3} more" if len(self.runs) > 3 else "")
        return shown or "nothing"

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The local index at which each run begins."""
        total, out = 0, []
        for r in self.runs:
            out.append(total)
            total += r.count
        return tuple(out)

    @cached_property
    def is_ascending(self) -> bool:
        """Whether the local order is the global order."""
        return all(a.last < b.start for a, b in pairwise(self.runs))

    def slots(self, wanted: Run) -> list[tuple[Run, Run]]:
        """Where members of a run of positions lie: pairs of (positions, local indices), in local order."""
        out = []
        for r, offset in zip(self.runs, self.offsets, strict=True):
            common = intersect(r, wanted)
            if common is not None:
                out.append(
                    (common, run(offset + (common.start - r.start) // r.step, common.count, common.step // r.step or 1))
                )
        return out

    def common(self, other: "IndexSet") -> list[tuple[Run, Run]]:
        """The positions that two sets share, as pairs of (local indices here, local indices there)."""
        if self.runs == other.runs:
            return [(Run(0, self.count), Run(0, self.count))] if self.count else []
        pairs = []
        for r, offset in zip(self.runs, self.offsets, strict=True):
            for positions, there in other.slots(r):
                here = run(
                    offset + (positions.start - r.start) // r.step, positions.count, positions.step // r.step or 1
                )
                pairs.append((here, there))
        return pairs

    def count_common(self, other: "IndexSet") -> int:
        """How many positions two sets share."""
        if self.runs == other.runs:
            return self.count
        return sum(c.count for a in self.runs for b in other.runs if (c := intersect(a, b)) is not None)

    def part(self, first: int, count: int) -> "IndexSet":
        """The members at local indices `first .. first + count`, in local order."""
        runs, skip = [], first
        for r in self.runs:
            take = min(r.count - skip, count)
            if take > 0:
                runs.append(r.part(skip, take))
                count -= take
            skip = max(0, skip - r.count)
        return IndexSet(tuple(runs), self.size)

    def every(self, step: int, first: int) -> "IndexSet":
        """The members at local indices `first, first + step, ...`, in local order."""
        runs = []
        for r, offset in zip(self.runs, self.offsets, strict=True):
            skip = (first - offset) % step
            if skip < r.count:
                runs.append(run(r.start + skip * r.step, (r.count - skip - 1) // step + 1, r.step * step))
        return IndexSet(tuple(runs), self.size)


def whole(size: int) -> IndexSet:
    """All positions of a dim."""
    return IndexSet((Run(0, size),) if size else (), size)


def shares(count: int, ranks: int) -> list[tuple[int, int]]:
    """(first, count) of each rank's contiguous share; the first ranks hold one more when there is a remainder."""
    base, extra = divmod(count, ranks)
    return [(r * base + min(r, extra), base + (r < extra)) for r in range(ranks)]


def union(sets: Iterable[IndexSet], size: int) -> IndexSet:
    """All positions of some sets, sorted by their first position.

    Runs that continue each other become one, and stripes that together fill an interval become that interval; stripes that do
    not fill one stay stripes.

    Args:
        sets: what the ranks hold.
        size: the global size of the dim.

    Returns:
        The union.

    Raises:
        ValueError: sets overlap, so that a position would be held twice.
    """
    chains: dict[tuple[int, int], list[Run]] = {}
    for r in sorted((r for s in sets for r in s.runs), key=lambda r: r.start):
        chain = chains.setdefault((r.step, r.start % r.step), [])
        if chain and r.start <= chain[-1].last:
            raise ValueError(f"{chain[-1]} and {r} overlap")
        if chain and r.start == chain[-1].last + r.step:
            chain[-1] = run(chain[-1].start, chain[-1].count + r.count, r.step)
        else:
            chain.append(r)
    clusters: list[list[Run]] = []  # runs whose extents overlap
    last = -1
    for r in sorted((r for chain in chains.values() for r in chain), key=lambda r: r.start):
        if r.start > last:
            clusters.append([])
        clusters[-1].append(r)
        last = max(last, r.last)
    out: list[Run] = []
    for cluster in clusters:
        for r in _filled(cluster):
            if out and out[-1].step == r.step == 1 and out[-1].stop == r.start:
                out[-1] = Run(out[-1].start, out[-1].count + r.count)
            else:
                out.append(r)
    return IndexSet(tuple(out), size)


def _filled(cluster: list[Run]) -> list[Run]:
    """One run where the runs of a cluster fill an interval, else the runs themselves."""
    for a in cluster if len({r.step for r in cluster}) > 1 else ():
        for b in cluster:  # runs of one step were compared by residue before
            if a.step < b.step and intersect(a, b) is not None:
                raise ValueError(f"{a} and {b} overlap")
    start, last = cluster[0].start, max(r.last for r in cluster)
    return [Run(start, last - start + 1)] if sum(r.count for r in cluster) == last - start + 1 else cluster
