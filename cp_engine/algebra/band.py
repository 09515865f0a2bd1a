"""Band: a diagonal strip of a rectangle of (query, key) positions; masks are made of them, and they are counted in closed form."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm

from cp_engine.algebra.index_set import Run, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Key k is visible to query q iff `q0 <= q < q1`, `k0 <= k < k1` and `low <= q - k <= high`."""

    q0: int
    q1: int
    k0: int
    k1: int
    low: int
    high: int

    def queries(self) -> Run:
        return Run(self.q0, self.q1 - self.q0)

    def keys(self) -> Run:
        return Run(self.k0, self.k1 - self.k0)

    def count(self, queries: Run, keys: Run) -> int:
        """How many pairs of two runs inside the rectangle are visible."""
        return _at_most(queries, keys, self.high) - _at_most(queries, keys, self.low - 1)

    def pairs(self) -> int:
        """How many pairs are visible."""
        if self.q0 >= self.q1 or self.k0 >= self.k1 or self.low > self.high:
            return 0
        return self.count(self.queries(), self.keys())


def overlap(a: Band, b: Band) -> Band:
    """The pairs of both; it may be empty."""
    return Band(
        q0=max(a.q0, b.q0),
        q1=min(a.q1, b.q1),
        k0=max(a.k0, b.k0),
        k1=min(a.k1, b.k1),
        low=max(a.low, b.low),
        high=min(a.high, b.high),
    )


def fewest(bands: Iterable[Band], size: int) -> tuple[Band, ...]:
    """The same pairs in fewer bands: none empty, neighbours joined, and bounds that nothing reaches as wide as the sequence.

    Lowering then recognises a whole or a causal square, whatever it was made from.
    """
    out: list[tuple[Band, int]] = []
    for band in sorted(bands, key=lambda b: (b.q0, b.k0)):
        pairs = band.pairs()
        if not pairs:
            continue
        last = replace(band, low=max(band.low, band.q0 - band.k1 + 1), high=min(band.high, band.q1 - 1 - band.k0))
        while out and (around := _around(out[-1][0], last)).pairs() == out[-1][1] + pairs:
            pairs += out.pop()[1]
            last = around
        out.append((last, pairs))
    return tuple(
        replace(
            b,
            low=-size if b.low <= b.q0 - b.k1 + 1 else b.low,
            high=size if b.high >= b.q1 - 1 - b.k0 else b.high,
        )
        for b, _ in out
    )


def _around(a: Band, b: Band) -> Band:
    """The smallest band that holds two bands."""
    return Band(
        q0=min(a.q0, b.q0),
        q1=max(a.q1, b.q1),
        k0=min(a.k0, b.k0),
        k1=max(a.k1, b.k1),
        low=min(a.low, b.low),
        high=max(a.high, b.high),
    )


def _at_most(q: Run, k: Run, bound: int) -> int:
    """How many pairs of members have q - k <= bound; closed form, no loop over positions."""
    if k.step == 1:
        # query i sees the keys from q_i - bound on: clip(top - q.step * i, 0, k.count) of them
        top = k.stop - (q.start - bound)
        whole = min(q.count, max(0, (top - k.count) // q.step + 1))
        some = min(q.count, max(whole, -(-top // q.step)))
        return whole * k.count + (some - whole) * top - q.step * (some * (some - 1) - whole * (whole - 1)) // 2
    if q.step == 1:  # the same pairs, mirrored: -k - -q <= bound
        return _at_most(run(-k.last, k.count, k.step), Run(-q.last, q.count), bound)
    if q.step == k.step:
        return _at_most(Run(0, q.count), Run(0, k.count), (bound - q.start + k.start) // q.step)
    step = lcm(q.step, k.step)
    return sum(_at_most(a, b, bound) for a in classes(q, step) for b in classes(k, step))


def classes(r: Run, step: int) -> list[Run]:
    """A run as interleaved runs of a coarser step."""
    n = step // r.step
    return [run(r.start + i * r.step, (r.count - i - 1) // n + 1, step) for i in range(min(n, r.count))]
