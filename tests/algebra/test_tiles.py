"""The lowering of attention to kernel calls, against single (query, key) pairs."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings

from cp_engine.algebra import tiles
from cp_engine.algebra.index_set import IndexSet, Run, whole
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.tiles import Tile, Tiling, tiling
from tests.helpers import index_sets, masks, sees

SIZE = 24
ROWS = 3
Config = dict[str, object]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial tiles of at most three queries, so that small sizes have several."""
    monkeypatch.setattr(tiles, "ROWS", ROWS)


any_call = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


def members(r: Run) -> range:
    return range(r.start, r.stop, r.step)


def seen_in(tile: Tile) -> list[tuple[int, int]]:
    """Local (query, key) pairs of a tile, from what its kind promises to a kernel."""
    pairs = []
    for i, q in enumerate(members(tile.q)):
        for j, k in enumerate(members(tile.k)):
            if tile.kind == "full" or (tile.kind == "causal" and j <= i):
                pairs.append((q, k))
            elif tile.kind == "partial" and tile.low <= i - j <= tile.high:
                pairs.append((q, k))
    return pairs


def interleaved(ranks: int, rank: int) -> IndexSet:
    return IndexSet((Run(rank, len(range(rank, SIZE, ranks)), ranks),), SIZE)


@any_call
@given(index_sets(SIZE), index_sets(SIZE), masks(SIZE))
@example(interleaved(3, 1), interleaved(3, 2), {"kind": "causal"})
@example(interleaved(2, 1), interleaved(3, 2), {"kind": "window", "left": 5, "right": 1})
def test_tiles_cover_each_visible_pair_once(queries: IndexSet, keys: IndexSet, mask: Config) -> None:
    found = Counter(p for t in tiling(queries, keys, mask_of(mask, SIZE)).tiles for p in seen_in(t))
    wanted = {(i, j) for i, q in enumerate(queries) for j, k in enumerate(keys) if sees(mask, q, k)}
    assert set(found) == wanted
    assert set(found.values()) <= {1}


@any_call
@given(index_sets(SIZE), index_sets(SIZE), masks(SIZE))
def test_tiles_are_what_kernels_take(queries: IndexSet, keys: IndexSet, mask: Config) -> None:
    for tile in tiling(queries, keys, mask_of(mask, SIZE)).tiles:
        assert tile.q.count and tile.k.count
        assert tile.q.stop <= queries.count and tile.k.stop <= keys.count
        assert tile.kind in ("full", "causal", "partial")
        assert tile.kind != "causal" or tile.q.count == tile.k.count
        assert tile.kind != "partial" or tile.q.count <= ROWS
        assert tile.pairs >= len(seen_in(tile)) > 0


@any_call
@given(index_sets(SIZE), index_sets(SIZE), masks(SIZE))
@example(whole(SIZE), IndexSet((Run(0, 4), Run(6, 4)), SIZE), {"kind": "window", "left": 4, "right": 0})
@example(whole(SIZE), IndexSet((Run(0, 4), Run(6, 18)), SIZE), {"kind": "window", "left": 4, "right": 0})
def test_first_tiles_write_and_later_ones_find_something_to_merge_with(
    queries: IndexSet, keys: IndexSet, mask: Config
) -> None:
    result = tiling(queries, keys, mask_of(mask, SIZE))
    written: set[int] = set()
    for tile in result.tiles:
        rows = set(members(tile.q))
        assert tile.is_first == (not rows & written)
        if result.is_complete and not tile.is_first:
            assert rows <= written  # nothing was prepared for the others
        written |= rows
    assert not result.is_complete or written == set(range(queries.count))


ZIGZAG = IndexSet((Run(0, 6), Run(18, 6)), SIZE)  # rank 0 of 2
INNER = IndexSet((Run(6, 12),), SIZE)  # rank 1 of 2
EVERYTHING = IndexSet((Run(0, SIZE),), SIZE)


NOTHING = IndexSet((), SIZE)


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_whole_sequence_is_one_call(kind: str) -> None:
    one = Tile(Run(0, SIZE), Run(0, SIZE), kind, is_first=True)
    assert tiling(EVERYTHING, EVERYTHING, mask_of(kind, SIZE)) == Tiling((one,), True)


@pytest.mark.parametrize(("queries", "keys"), [(NOTHING, EVERYTHING), (EVERYTHING, NOTHING), (NOTHING, NOTHING)])
def test_no_queries_or_no_keys_need_no_call(queries: IndexSet, keys: IndexSet) -> None:
    assert tiling(queries, keys, mask_of("causal", SIZE)).tiles == ()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("queries", "keys", "calls"),
    [
        # rank 1 of 2, contiguous, all keys: what is before it, then its own diagonal
        (IndexSet((Run(12, 12),), SIZE), EVERYTHING, [((0, 12), (0, 12), "full"), ((0, 12), (12, 12), "causal")]),
        (IndexSet((Run(0, 12),), SIZE), EVERYTHING, [((0, 12), (0, 12), "causal")]),
        # the same positions in ascending order: one causal call, gaps or not
        (ZIGZAG, ZIGZAG, [((0, 12), (0, 12), "causal")]),
        (interleaved(4, 1), interleaved(4, 1), [((0, 6), (0, 6), "causal")]),
        # tail of zigzag sees all of the middle, its head nothing of it
        (ZIGZAG, INNER, [((6, 6), (0, 12), "full")]),
        (INNER, ZIGZAG, [((0, 12), (0, 6), "full")]),
        # stripe against stripe: one causal call, without its diagonal for the later stripe
        (interleaved(4, 2), interleaved(4, 1), [((0, 6), (0, 6), "causal")]),
        (interleaved(4, 1), interleaved(4, 2), [((1, 5), (0, 5), "causal")]),
    ],
)
def test_causal_calls_of_known_orders(
    queries: IndexSet, keys: IndexSet, calls: list[tuple[tuple[int, int], tuple[int, int], str]]
) -> None:
    found = tiling(queries, keys, mask_of("causal", SIZE)).tiles
    assert [((t.q.start, t.q.count), (t.k.start, t.k.count), t.kind) for t in found] == calls


def test_window_never_builds_more_than_a_band_of_keys() -> None:
    found = tiling(EVERYTHING, EVERYTHING, mask_of({"kind": "window", "left": 4, "right": 0}, SIZE)).tiles
    assert len(found) == SIZE // ROWS
    assert max(t.k.count for t in found) == ROWS + 4


@pytest.mark.parametrize(("queries", "is_complete"), [(ZIGZAG, True), (INNER, True), (interleaved(3, 2), True)])
def test_tiling_is_complete_where_every_query_sees_something(queries: IndexSet, is_complete: bool) -> None:
    assert tiling(queries, queries, mask_of("causal", SIZE)).is_complete is is_complete


def test_tiling_is_incomplete_where_a_query_sees_nothing() -> None:
    assert not tiling(ZIGZAG, INNER, mask_of("causal", SIZE)).is_complete
