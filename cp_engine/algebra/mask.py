"""Mask: what a query may see, as disjoint bands of (query, key) positions (`cp_engine.algebra.band`).

    full      one band, no bound on q - k          causal    one band, 0 <= q - k
    window    one band, -right <= q - k <= left    prefix    keys of the prefix for all queries, the rest causal
    document  a square per document                block     a square per block of equally many tokens
    both      what all of several masks show

The squares of documents and blocks are causal unless `causal` is false.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from cp_engine.algebra.band import Band, fewest, overlap
from cp_engine.algebra.index_set import IndexSet, Run, intersect, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Disjoint bands over one sequence.

    Args:
        kind: what a user calls it, such as `causal`; only for people, see `same_as`.
        bands: disjoint bands; an empty list sees nothing.
        size: global sequence length in tokens.
    """

    kind: str
    bands: tuple[Band, ...]
    size: int

    def count(self, queries: IndexSet, keys: IndexSet) -> int:
        """How many (query, key) pairs are visible between two sets of positions."""
        return sum(
            band.count(q, k)
            for band in self.bands
            for q in _clip(queries, band.queries())
            for k in _clip(keys, band.keys())
        )

    def needed(self, queries: IndexSet, keys: IndexSet) -> IndexSet:
        """The keys that at least one of the queries may see, as whole ranges between the first and last key of each run."""
        wanted: list[Run] = []
        for band in self.bands:
            for q in _clip(queries, band.queries()):
                low, high = max(band.k0, q.start - band.high), min(band.k1, q.last - band.low + 1)
                if low < high:
                    wanted.append(Run(low, high - low))
        runs: list[Run] = []
        for w in sorted(wanted, key=lambda r: r.start):  # overlapping wishes become one range
            if runs and w.start <= runs[-1].stop:
                runs[-1] = Run(runs[-1].start, max(runs[-1].stop, w.stop) - runs[-1].start)
            else:
                runs.append(w)
        held = [(w, k) for k in keys.runs for w in runs]
        return union([IndexSet((c,), self.size) for w, k in held if (c := intersect(w, k)) is not None], self.size)

    def same_as(self, other: "Mask") -> bool:
        """Whether both show the same pairs, whatever they are called."""
        if self.size != other.size or self.bands == other.bands:
            return self.size == other.size
        return self.is_within(other) and other.is_within(self)

    def is_within(self, other: "Mask") -> bool:
        """Whether the other shows every pair that this one shows."""
        return self.pairs() == intersection(self, other).pairs()

    def pairs(self) -> int:
        """How many pairs are visible."""
        return sum(band.pairs() for band in self.bands)


def intersection(a: Mask, b: Mask) -> Mask:
    """The mask of the pairs that two masks of one size show both."""
    assert a.size == b.size, f"masks over {a.size} and {b.size} positions"
    others = sorted(b.bands, key=lambda band: band.q0)
    reach = list(accumulate((band.q1 for band in others), max))  # a thousand documents meet few blocks each
    found = []
    for band in a.bands:
        for other in others[bisect_right(reach, band.q0) :]:
            if other.q0 >= band.q1:
                break
            found.append(overlap(band, other))
    return Mask(kind=f"{a.kind} and {b.kind}", bands=fewest(found, a.size), size=a.size)


def _clip(positions: IndexSet, window: Run) -> list[Run]:
    if not window.count:
        return []
    return [c for r in positions.runs if (c := intersect(r, window)) is not None]


# ------------------------------------------------------------------ the kinds that a configuration can name
