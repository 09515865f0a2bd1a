"""Index sets against plain lists of positions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_engine.algebra.index_set import IndexSet, Run, intersect, run, shares, union, whole
from tests.helpers import index_set, index_sets, partitions, runs

SIZE = 40


def members(r: Run | None) -> list[int]:
    return [] if r is None else list(range(r.start, r.stop, r.step))


@given(runs(), runs())
def test_intersect_any_two_runs(a: Run, b: Run) -> None:
    common = intersect(a, b)
    assert members(common) == sorted(set(members(a)) & set(members(b)))
    assert common is None or common.count > 0


@given(runs(), st.data())
def test_run_part_any_window(r: Run, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, r.count - 1))
    count = data.draw(st.integers(1, r.count - first))
    assert members(r.part(first, count)) == members(r)[first : first + count]


@given(runs())
def test_run_slice_selects_its_members(r: Run) -> None:
    assert list(range(SIZE))[r.slice()] == members(r)


def test_run_of_one_position_has_step_one() -> None:
    assert run(5, 1, 4) == Run(5, 1, 1)


@pytest.mark.quick
@given(index_sets())
def test_offsets_and_count_are_local_indices(s: IndexSet) -> None:
    positions = list(s)
    assert s.count == len(positions)
    assert [positions[o] for o in s.offsets] == [r.start for r in s.runs]
    assert s.is_ascending == (positions == sorted(positions))


@given(index_sets(), runs())
def test_slots_any_window(s: IndexSet, window: Run) -> None:
    found = s.slots(window)
    local = list(s)
    wanted = [(i, p) for i, p in enumerate(local) if p in set(members(window))]
    pairs = [(i, p) for positions, index in found for i, p in zip(members(index), members(positions), strict=True)]
    assert pairs == wanted


@given(index_sets(), index_sets())
def test_common_any_two_sets(a: IndexSet, b: IndexSet) -> None:
    here, there = list(a), list(b)
    pairs = [(i, j) for x, y in a.common(b) for i, j in zip(members(x), members(y), strict=True)]
    assert sorted(pairs) == sorted((here.index(p), there.index(p)) for p in set(here) & set(there))
    assert a.count_common(b) == len(pairs)


@given(index_sets())
def test_common_with_itself_is_one_pair(s: IndexSet) -> None:
    assert s.common(s) == ([(Run(0, s.count), Run(0, s.count))] if s.count else [])


@given(index_sets(), st.integers(0, SIZE), st.integers(0, SIZE))
def test_part_any_window(s: IndexSet, first: int, count: int) -> None:
    assert list(s.part(first, count)) == list(s)[first : first + count]


@given(index_sets(), st.integers(1, 9), st.integers(0, 8))
def test_every_any_step(s: IndexSet, step: int, first: int) -> None:
    first %= step
    assert list(s.every(step, first)) == list(s)[first::step]


@given(partitions())
def test_union_of_disjoint_positions_holds_each_once(parts: list[list[int]]) -> None:
    together = union([index_set(p, SIZE) for p in parts], SIZE)
    assert sorted(together) == sorted(p for part in parts for p in part)
    assert [r.start for r in together.runs] == sorted(r.start for r in together.runs)


@given(st.lists(index_sets(most=2), min_size=2, max_size=3))
def test_union_of_any_sets_refuses_exactly_the_overlapping_ones(sets: list[IndexSet]) -> None:
    positions = [p for s in sets for p in s]
    if len(set(positions)) == len(positions):
        assert sorted(union(sets, SIZE)) == sorted(positions)
    else:
        with pytest.raises(ValueError, match="overlap"):
            union(sets, SIZE)


@given(partitions(), st.randoms(use_true_random=False))
def test_union_does_not_depend_on_the_order_of_its_parts(parts: list[list[int]], random: object) -> None:
    sets = [index_set(p, SIZE) for p in parts]
    shuffled = list(sets)
    random.shuffle(shuffled)
    assert union(sets, SIZE) == union(shuffled, SIZE)


@pytest.mark.parametrize(
    ("sets", "runs"),
    [
        ([[Run(0, 4)], [Run(4, 4)]], (Run(0, 8),)),  # neighbours become one
        ([[Run(4, 4)], [Run(0, 4)]], (Run(0, 8),)),
        ([[Run(0, 4, 2)], [Run(1, 4, 2)]], (Run(0, 8),)),  # stripes that fill an interval
        ([[Run(0, 2, 4)], [Run(1, 2, 4)]], (Run(0, 2, 4), Run(1, 2, 4))),  # stripes that do not
        ([[Run(0, 2), Run(6, 2)], [Run(2, 4)]], (Run(0, 8),)),  # zigzag
        ([[Run(0, 2, 2)], [Run(4, 2, 2)]], (Run(0, 4, 2),)),  # one stripe goes on
        ([[], [Run(3, 1)]], (Run(3, 1),)),
        ([[], []], ()),
    ],
)
def test_union_merges_runs(sets: list[list[Run]], runs: tuple[Run, ...]) -> None:
    assert union([IndexSet(tuple(s), 8) for s in sets], 8).runs == runs


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_first_ranks_hold_one_more(count: int, ranks: int) -> None:
    dealt = shares(count, ranks)
    assert [p for first, n in dealt for p in range(first, first + n)] == list(range(count))
    sizes = [n for _, n in dealt]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_whole_of_nothing_is_empty() -> None:
    assert whole(0).runs == ()
    assert list(whole(3)) == [0, 1, 2]


def test_text_names_ranges_and_what_is_left_out() -> None:
    assert str(IndexSet((Run(0, 4), Run(8, 3, 2)), 16)) == "0..4 8..13 step 2"
    assert str(index_set([1, 3, 5, 7, 9], 16)) == "1..2 3..4 5..6 and 2 more"
    assert str(IndexSet((), 16)) == "nothing"
