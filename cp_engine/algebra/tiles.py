"""Tiles: the queries and keys that a rank holds, with the mask, as a short list of kernel calls.

    full      every pair of the tile is visible
    causal    a square tile in which key j is visible to query i iff j <= i: the flag of every kernel
    partial   an explicit band low <= i - j <= high over at most ROWS queries, so that nothing sequence x sequence is built

A kernel that can do more in one call gets them joined (`in_fewer_calls`):

    right_down   queries that see every key before a causal square, and the square: key j of m iff j <= i + m - n
    packed       such tiles of one rank side by side, one per document

Lowering goes by index difference: two stripes of one step see each other as a causal square, whatever their positions are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

import numpy as np

from cp_engine.algebra.band import Band, classes
from cp_engine.algebra.index_set import IndexSet, Run
from cp_engine.algebra.mask import Mask

ROWS = 128
"""Queries of one partial tile: a mask of ROWS x keys is small beside the tensors, and a kernel still fills its vector units."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel call.

    Args:
        q, k: local indices of its queries and keys.
        kind: `full`, `causal` or `partial`; of joined tiles `right_down` or `packed`.
        low, high: for `partial`, the visible range of i - j.
        is_first: whether its queries have no result yet, so that it writes instead of merging.
        block: which of the key blocks it attends to, where keys arrive one block after the other.
        parts: for `packed`, the queries and keys of each document.
    """

    q: Run
    k: Run
    kind: str
    low: int = 0
    high: int = 0
    is_first: bool = False
    block: int = 0
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def pairs(self) -> int:
        """Pairs that the kernel looks at, visible or not, for one head."""
        if self.kind in ("causal", "right_down", "packed"):
            parts = self.parts or ((self.q.count, self.k.count),)
            return sum(n * (n + 1) // 2 + n * (m - n) for n, m in parts)
        return self.q.count * self.k.count

    @property
    def has_blind_queries(self) -> bool:
        """Whether some query of the tile sees none of its keys; known from numbers, so that no device has to be asked."""
        return self.kind == "partial" and (self.low > 0 or self.high < self.q.count - self.k.count)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of one rank.

    Args:
        tiles: in the order in which they run.
        is_complete: whether the first tiles write every query; else the result starts as 0 with lse -inf.
    """

    tiles: tuple[Tile, ...]
    is_complete: bool


def tiling(queries: IndexSet, keys: IndexSet, mask: Mask) -> Tiling:
    """The kernel calls that compute every visible pair between two sets of positions once.

    Args:
        queries: positions of the local queries, in local order.
        keys: positions of the local keys, in local order.
        mask: what is visible.

    Returns:
        The tiles; empty ones are left out.
    """
    return tiling_of_blocks(queries, (keys,), mask)


def tiling_of_blocks(queries: IndexSet, blocks: Sequence[IndexSet], mask: Mask) -> Tiling:
    """The same for keys that arrive block by block: tiles in the order of the blocks, over one result.

    Args:
        queries: positions of the local queries, in local order.
        blocks: positions of the keys of each block, in its local order; no position is in two blocks.
        mask: what is visible.

    Returns:
        The tiles; a block that nobody sees has none.
    """
    written = np.zeros(queries.count, dtype=bool)
    tiles, is_complete = [], True
    for block, keys in enumerate(blocks):
        found: list[Tile] = []
        for band in mask.bands:
            found += _whole(queries, keys, band) or [
                t for q, k in _aligned(queries, keys, band) for t in _pieces(*q, *k, band)
            ]
        for t in _coalesced(found):
            rows = written[t.q.slice()]
            is_first = not rows.any()
            is_complete &= is_first or bool(rows.all())  # a tile over rows in both states merges with lse -inf
            rows[:] = True
            tiles.append(replace(t, is_first=is_first, block=block))
    return Tiling(tuple(tiles), is_complete and bool(written.all()))


def in_fewer_calls(tiling: Tiling, kinds: Sequence[str]) -> Tiling:
    """The same pairs in fewer calls, for a kernel that takes joined tiles.

    Args:
        tiling: as `tiling_of_blocks` makes it.
        kinds: of joined tiles, `right_down` and `packed`.
    """
    tiles: list[Tile] = []
    for tile in tiling.tiles:
        before = tiles[-1] if tiles else None
        if "right_down" in kinds and before is not None and _is_square_behind(before, tile):
            keys = Run(before.k.start, before.k.count + tile.k.count)
            tiles[-1] = replace(before, k=keys, kind="right_down")
        else:
            tiles.append(tile)
    if "packed" not in kinds:
        return replace(tiling, tiles=tuple(tiles))
    packed: list[Tile] = []
    for tile in tiles:
        before = packed[-1] if packed else None
        if before is not None and _are_documents(before, tile):
            sizes = (before.parts or ((before.q.count, before.k.count),)) + ((tile.q.count, tile.k.count),)
            q, k = (Run(a.start, a.count + b.count) for a, b in ((before.q, tile.q), (before.k, tile.k)))
            packed[-1] = replace(before, q=q, k=k, kind="packed", parts=sizes)
        else:
            packed.append(tile)
    return replace(tiling, tiles=tuple(packed))


def _is_square_behind(full: Tile, square: Tile) -> bool:
    """Whether a causal square continues the keys of a full tile over the same queries."""
    kinds = (full.kind, square.kind, full.block) == ("full", "causal", square.block)
    return kinds and full.q == square.q and _follows(full.k, square.k) and full.q.step == 1


def _are_documents(before: Tile, tile: Tile) -> bool:
    """Whether two causal tiles lie side by side, with other queries and other keys; one query that sees all keys is causal."""
    kinds = all(
        t.kind in ("causal", "right_down")
        or (t.kind == "full" and t.q.count == 1)
        or (t.kind == "packed" and t is before)
        for t in (before, tile)
    )
    same = (before.block, before.is_first) == (tile.block, tile.is_first)
    return kinds and same and _follows(before.q, tile.q) and _follows(before.k, tile.k)


def _inside(positions: IndexSet, window: Run) -> tuple[list[tuple[Run, Run]], Run | None]:
    """The members inside a window as (positions, local) runs, and the one local run that holds them all if there is one."""
    slots = positions.slots(window) if window.count else []
    total = sum(local.count for _, local in slots)
    solid = all(local.step == 1 for _, local in slots) and all(a.stop == b.start for (_, a), (_, b) in pairwise(slots))
    return slots, Run(slots[0][1].start, total) if slots and solid else None


def _whole(queries: IndexSet, keys: IndexSet, band: Band) -> list[Tile]:
    """One tile for the whole band, where there is one: no bound at all, or the same positions in ascending order."""
    (q, q_run), (k, k_run) = _inside(queries, band.queries()), _inside(keys, band.keys())
    if q_run is None or k_run is None:
        return []
    widest = max(band.q1, band.k1)
    if band.low <= -widest and band.high >= widest:
        return [Tile(q_run, k_run, "full")]
    if band.low == 0 and band.high >= widest and queries.is_ascending and [p for p, _ in q] == [p for p, _ in k]:
        return [Tile(q_run, k_run, "causal")]
    return []


def _aligned(queries: IndexSet, keys: IndexSet, band: Band) -> list[tuple[tuple[Run, Run], tuple[Run, Run]]]:
    """Pairs of (positions, local) runs of queries and keys whose positions have one step."""
    out = []
    for q, q_local in _inside(queries, band.queries())[0]:
        for k, k_local in _inside(keys, band.keys())[0]:
            step = lcm(q.step if q.count > 1 else 1, k.step if k.count > 1 else 1)
            for a, a_local in zip(classes(q, step), classes(q_local, step // q.step * q_local.step), strict=True):
                for b, b_local in zip(classes(k, step), classes(k_local, step // k.step * k_local.step), strict=True):
                    out.append(((Run(a.start, a.count, step), a_local), (Run(b.start, b.count, step), b_local)))
    return out


def _pieces(q: Run, q_local: Run, k: Run, k_local: Run, band: Band) -> list[Tile]:
    """The tiles of two runs of one step, by index difference."""
    ahead = q.start - k.start
    low = -((ahead - band.low) // q.step)  # visible iff low <= i - j <= high
    high = (band.high - ahead) // q.step
    n, m = q.count, k.count
    first, last = max(0, low), min(n, m + high)  # queries that see any key
    if first >= last or low > high:
        return []
    if high >= last - 1:  # no upper bound in sight: keys 0 .. i - low
        return [
            Tile(q_local.part(a, c), k_local.part(b, d), kind) for a, c, b, d, kind in _staircase(first, last, m, low)
        ]
    tiles = []
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        k0, k1 = max(0, start - high), min(m, stop - 1 - low + 1)
        if k0 < k1:
            tiles.append(
                _block(
                    q_local.part(start, stop - start), k_local.part(k0, k1 - k0), low - start + k0, high - start + k0
                )
            )
    return tiles


def _staircase(first: int, last: int, m: int, low: int) -> list[tuple[int, int, int, int, str]]:
    """Queries first..last that see keys 0 .. i - low: (query, count, key, count, kind) of at most three tiles."""
    seen_by_all = min(m, first - low)  # keys before the diagonal
    side = min(last - first, m - seen_by_all)
    tiles = []
    if side:
        if seen_by_all:
            tiles.append((first, side, 0, seen_by_all, "full"))
        tiles.append((first, side, seen_by_all, side, "causal"))
    if first + side < last:
        tiles.append((first + side, last - first - side, 0, m, "full"))
    return tiles


def _block(q: Run, k: Run, low: int, high: int) -> Tile:
    """A tile of a band, as the simplest kind that it is."""
    if low <= 1 - k.count and high >= q.count - 1:
        return Tile(q, k, "full")
    return Tile(q, k, "partial", low, high)


def _coalesced(tiles: list[Tile]) -> list[Tile]:
    """Full tiles that lie side by side as one call: first those over the same queries, then those over the same keys."""
    out: list[Tile] = []
    for t in tiles:
        before = out[-1] if out else t
        if before.kind == t.kind == "full" and before.q == t.q and _follows(before.k, t.k):
            out[-1] = Tile(t.q, Run(before.k.start, before.k.count + t.k.count), "full")
        else:
            out.append(t)
    tiles, out = out, []
    for t in tiles:
        before = out[-1] if out else t
        if before.kind == t.kind == "full" and before.k == t.k and _follows(before.q, t.q):
            out[-1] = Tile(Run(before.q.start, before.q.count + t.q.count), t.k, "full")
        else:
            out.append(t)
    return out


def _follows(a: Run, b: Run) -> bool:
    return a.step == b.step == 1 and a.stop == b.start
