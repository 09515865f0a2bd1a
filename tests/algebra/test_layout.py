"""Where tokens and heads lie: orders against tables written by hand, GQA images, transfers against single elements."""

from collections import Counter
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_engine.algebra.index_set import IndexSet, Run, whole
from cp_engine.algebra.layout import Layout, Mesh, contiguous, cut, image, joined
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.transfer import Transfer
from cp_engine.job import explain
from cp_engine.job.verify import reference
from cp_engine.plan.cost import totals
from cp_engine.plan.token_layout import TokenLayout
from cp_engine.primitives.layouts import Balanced, Contiguous, Striped, Zigzag
from tests.helpers import assert_equals_reference, index_set, index_sets, masks, partitions, plan_of, small

ONE_AXIS = {n: Mesh(axes=("a",), sizes=(n,)) for n in (1, 2, 4)}
SQUARE = Mesh(axes=("a", "b"), sizes=(2, 2))
SQUARE_BA = Mesh(axes=("b", "a"), sizes=(2, 2))

# (order, mesh, sequence) -> positions of each rank, in local order; written by hand
TABLES: list[tuple[TokenLayout, Mesh, int, list[list[int]]]] = [
    (Contiguous(), ONE_AXIS[1], 4, [[0, 1, 2, 3]]),
    (Contiguous(), ONE_AXIS[2], 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (Contiguous(), ONE_AXIS[4], 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (Contiguous(), ONE_AXIS[2], 7, [[0, 1, 2, 3], [4, 5, 6]]),
    (Contiguous(), ONE_AXIS[4], 13, [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]),
    (Contiguous(), ONE_AXIS[4], 3, [[0], [1], [2], []]),
    (Zigzag(), ONE_AXIS[1], 4, [[0, 1, 2, 3]]),
    (Zigzag(), ONE_AXIS[2], 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    (Zigzag(), ONE_AXIS[4], 8, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    (Zigzag(), ONE_AXIS[2], 7, [[0, 1, 6], [2, 3, 4, 5]]),
    (Zigzag(), ONE_AXIS[4], 13, [[0, 1, 12], [2, 3, 11], [4, 5, 10], [6, 7, 8, 9]]),
    (Zigzag(), ONE_AXIS[4], 3, [[0], [1], [2], []]),
    (Striped(), ONE_AXIS[1], 4, [[0, 1, 2, 3]]),
    (Striped(), ONE_AXIS[2], 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (Striped(), ONE_AXIS[4], 8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (Striped(), ONE_AXIS[2], 7, [[0, 2, 4, 6], [1, 3, 5]]),
    (Striped(), ONE_AXIS[4], 13, [[0, 4, 8, 12], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
    (Striped(), ONE_AXIS[4], 3, [[0], [1], [2], []]),
    # two axes: `over` cuts first, the other axis then cuts what that leaves contiguously
    (Contiguous(over=("a",)), SQUARE, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (Contiguous(over=("b",)), SQUARE, 8, [[0, 1], [4, 5], [2, 3], [6, 7]]),
    (Zigzag(over=("a",)), SQUARE, 8, [[0, 1], [6, 7], [2, 3], [4, 5]]),
    (Zigzag(over=("a",)), SQUARE_BA, 8, [[0, 1], [2, 3], [6, 7], [4, 5]]),
    (Zigzag(over=("a",)), SQUARE, 13, [[0, 1, 2, 3], [10, 11, 12], [4, 5, 6], [7, 8, 9]]),
    (Striped(over=("a",)), SQUARE, 8, [[0, 2], [4, 6], [1, 3], [5, 7]]),
    (Striped(over=("a",)), SQUARE_BA, 8, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    # both axes, numbered by `over`, whatever the order of the mesh is
    (Zigzag(over=("a", "b")), SQUARE, 8, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    (Zigzag(over=("b", "a")), SQUARE, 8, [[0, 7], [2, 5], [1, 6], [3, 4]]),
    (Striped(over=("a", "b")), SQUARE_BA, 8, [[0, 4], [2, 6], [1, 5], [3, 7]]),
]


@pytest.mark.quick
@pytest.mark.parametrize(("order", "mesh", "size", "positions"), TABLES)
def test_positions_as_written_by_hand(order: TokenLayout, mesh: Mesh, size: int, positions: list[list[int]]) -> None:
    assert [list(s) for s in order.spread(mesh, size, mask_of("causal", size))] == positions


@given(
    st.sampled_from((Contiguous, Zigzag, Striped, Balanced)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
    st.integers(1, 60),
)
def test_positions_partition_the_sequence(
    kind: type[TokenLayout], sizes: list[int], data: st.DataObject, size: int
) -> None:
    mesh = Mesh(axes=tuple("abc"[: len(sizes)]), sizes=tuple(sizes))
    over = data.draw(st.none() | st.lists(st.sampled_from(mesh.axes), unique=True, min_size=1).map(tuple))
    spread = kind(over=over).spread(mesh, size, mask_of(data.draw(masks(size)), size))
    assert sorted(p for s in spread for p in s) == list(range(size))
    assert all(s.is_ascending for s in spread)


def test_no_token_is_dealt_to_every_rank() -> None:
    for order in (Contiguous(), Zigzag(), Striped(), Balanced()):
        assert [s.count for s in order.spread(ONE_AXIS[4], 0, mask_of("causal", 0))] == [0] * 4


def test_zigzag_causal_work_is_equal() -> None:
    visible = [sum(p + 1 for p in s) for s in Zigzag().spread(ONE_AXIS[4], 32, mask_of("causal", 32))]
    assert len(set(visible)) == 1


# ------------------------------------------------------------------ balanced
def chunks_of(size: int, count: int) -> list[range]:
    """Neighbouring tokens in so many chunks, the first ones longer by one; said once more."""
    ends = [(size // count) * i + min(i, size % count) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


@settings(max_examples=150)
@given(st.sampled_from((2, 3, 8)), st.integers(1, 8), st.integers(1, 130), st.data())
def test_balanced_work_differs_by_at_most_the_heaviest_chunk(
    ranks: int, chunks: int, size: int, data: st.DataObject
) -> None:
    mask = data.draw(masks(size))
    visible = reference.visible(mask, size).sum(1).tolist()
    dealt = Balanced(chunks=chunks).spread(Mesh(axes=("a",), sizes=(ranks,)), size, mask_of(mask, size))
    work = [sum(visible[p] for p in s) for s in dealt]
    pieces = chunks_of(size, ranks * chunks)
    assert max(work) - min(work) <= max(sum(visible[p] for p in piece) for piece in pieces)
    for held in map(set, dealt):  # of whole chunks, and equally many of them
        assert sum(set(piece) <= held for piece in pieces if piece) == sum(bool(set(piece) & held) for piece in pieces)
        assert len(held) <= chunks * max(map(len, pieces))


def test_balanced_looks_at_the_mask() -> None:
    documents = mask_of({"kind": "document", "starts": [0, 4, 6]}, 8)  # visible keys: 1 2 3 4 | 1 2 | 1 2
    order = Balanced(chunks=2)
    # pairs of the four chunks of 2: causal 3 7 11 15, so head and tail as in zigzag; documents 3 7 3 3, so 7 + 3 against 3 + 3
    assert [list(s) for s in order.spread(ONE_AXIS[2], 8, mask_of("causal", 8))] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [list(s) for s in order.spread(ONE_AXIS[2], 8, documents)] == [[2, 3, 6, 7], [0, 1, 4, 5]]


@pytest.mark.parametrize("preset", ["allgather_kv", "needed_kv"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_balanced_plan_of_documents_differs_by_at_most_one_chunk(preset: str, ranks: int) -> None:
    mask = {"kind": "document", "starts": [0, 1, 40, 43, 99, 100, 170]}
    plan = plan_of(
        preset, "layout@cp.layout=balanced", degree=ranks, shape=small(sequence=257, heads=2, batch=3), mask=mask
    )
    visible = reference.visible(mask, 257).sum(1).tolist()
    heaviest = max(sum(visible[p] for p in piece) for piece in chunks_of(257, 8 * ranks))
    pairs = totals(plan).pairs
    assert sum(pairs) == 2 * 3 * sum(visible)
    assert max(pairs) - min(pairs) <= 2 * 3 * heaviest
    assert_equals_reference(plan, mask)


# ------------------------------------------------------------------ meshes
def test_groups_number_ranks_with_the_first_axis_as_the_major_one() -> None:
    mesh = Mesh(axes=("a", "b", "c"), sizes=(2, 3, 2))
    assert mesh.groups(("c",)) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert mesh.groups(("a",)) == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]
    assert mesh.groups(("a", "c")) == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
    assert mesh.groups(("c", "a")) == [(0, 6, 1, 7), (2, 8, 3, 9), (4, 10, 5, 11)]
    assert mesh.coordinate(7) == "a=1 b=0 c=1"


def test_cut_of_different_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="not the same"):
        cut(ONE_AXIS[2], contiguous(whole(8), 2), ("a",), contiguous)


def test_joined_of_the_same_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        joined(ONE_AXIS[2], [whole(8)] * 2, ("a",))


# ------------------------------------------------------------------ heads
@pytest.mark.quick
@pytest.mark.parametrize(
    ("heads", "size", "group", "kv"),
    [
        ([0, 1, 2, 3], 8, 4, [0]),
        ([2, 3, 4, 5], 8, 4, [0, 1]),
        ([4, 5, 6, 7], 8, 4, [1]),
        ([0, 1], 6, 2, [0]),
        ([1, 2], 6, 2, [0, 1]),
        ([5], 6, 2, [2]),
        ([0, 2, 4], 6, 2, [0, 1, 2]),
        ([0, 3], 6, 2, [0, 1]),
        ([3, 4], 5, 1, [3, 4]),
        ([], 6, 2, []),
    ],
)
def test_image_of_query_heads(heads: list[int], size: int, group: int, kv: list[int]) -> None:
    served = image(index_set(heads, size), group)
    assert list(served) == kv
    assert served.size == size // group


@given(index_sets(24), st.sampled_from((1, 2, 3, 4, 6)))
def test_image_any_heads(heads: IndexSet, group: int) -> None:
    assert list(image(heads, group)) == sorted({h // group for h in heads}) or group == 1


# (heads, kv heads, ranks) -> q heads and kv heads of each rank after an exchange to head shards; written by hand
HEADS = [
    (7, 7, 4, [[0, 1], [2, 3], [4, 5], [6]], [[0, 1], [2, 3], [4, 5], [6]]),
    (6, 3, 4, [[0, 1], [2, 3], [4], [5]], [[0], [1], [2], [2]]),
    (8, 2, 3, [[0, 1, 2], [3, 4, 5], [6, 7]], [[0], [0, 1], [1]]),
    (2, 1, 4, [[0], [1], [], []], [[0], [0], [], []]),
    (3, 3, 4, [[0], [1], [2], []], [[0], [1], [2], []]),
]


@pytest.mark.parametrize(("heads", "kv_heads", "ranks", "q", "k"), HEADS)
def test_heads_of_each_rank_where_they_do_not_divide(
    heads: int, kv_heads: int, ranks: int, q: list[list[int]], k: list[list[int]]
) -> None:
    plan = plan_of("ulysses", f"cp.degree={ranks}", shape=small(heads=heads, kv_heads=kv_heads, sequence=13))
    layout = plan.steps[0].layout_after("q")
    assert [list(h) for h in layout.heads] == q
    assert [list(image(h, heads // kv_heads)) for h in plan.steps[0].layout_after("k").heads] == k
    assert explain.data(plan)["idle_ranks"] == [r for r, held in enumerate(q) if not held]
    assert ("idle" in explain.text(plan)) == (not all(q))
    assert_equals_reference(plan, {"kind": "causal"})


def test_replicated_kv_heads_travel_only_as_far_as_a_rank_needs() -> None:
    # 6 heads on 3 kv heads and 4 ranks: rank 3 sends each other rank one kv head of its 4 tokens, and q heads 0..4
    plan = plan_of("ulysses", "cp.degree=4", shape=small(heads=6, kv_heads=3, sequence=16, head_dim=8))
    q, k, v = 5 * 4 * 8 * 4, 3 * 4 * 8 * 4, 3 * 4 * 8 * 4
    assert plan.costs[0].bytes_sent[0][3] == q + k + v


# ------------------------------------------------------------------ transfers
SIZE, HEAD_SIZE, RANKS = 12, 6, 3


@st.composite
def transfers(draw: st.DrawFn, *, may_start_from_heads: bool = False) -> Transfer:
    """A move from sequence shards (or from head shards, where kv heads may be replicated) to anything."""
    group_size = draw(st.sampled_from((1, 2, 3)))
    everything = (whole(SIZE),) * RANKS, (whole(HEAD_SIZE),) * RANKS
    if may_start_from_heads and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, HEAD_SIZE), min_size=RANKS - 1, max_size=RANKS - 1)))
        shards = [whole(HEAD_SIZE).part(a, b - a) for a, b in pairwise([0, *cuts, HEAD_SIZE])]
        before = Layout(everything[0], tuple(shards))
    else:
        before = Layout(tuple(index_set(p, SIZE) for p in draw(partitions(SIZE, RANKS))), everything[1])
    after = []
    for _ in range(RANKS):
        first, last = sorted(draw(st.tuples(st.integers(0, HEAD_SIZE), st.integers(0, HEAD_SIZE))))
        after.append((draw(index_sets(SIZE)), whole(HEAD_SIZE).part(first, last - first)))
    wanted = Layout(tuple(s for s, _ in after), tuple(h for _, h in after))
    return Transfer("k", before, wanted, (tuple(range(RANKS)),), group_size)


def elements(layout: Layout, rank: int, group_size: int) -> list[list[tuple[int, int]]]:
    """(kv head, position) of a rank's tensor, [heads][positions]."""
    return [[(h, p) for p in layout.sequence[rank]] for h in image(layout.heads[rank], group_size)]


def indices(heads: Run, sequence: Run) -> list[tuple[int, int]]:
    return list(
        product(range(heads.start, heads.stop, heads.step), range(sequence.start, sequence.stop, sequence.step))
    )


@settings(max_examples=200)
@given(transfers(may_start_from_heads=True))
def test_blocks_carry_the_same_elements_at_source_and_destination(transfer: Transfer) -> None:
    for source, destination in product(range(RANKS), repeat=2):
        here = elements(transfer.before, source, transfer.group_size)
        there = elements(transfer.after, destination, transfer.group_size)
        blocks = transfer.blocks(source, destination)
        for b in blocks:
            sent = [here[h][p] for h, p in indices(b.heads_from, b.sequence_from)]
            assert sent == [there[h][p] for h, p in indices(b.heads_to, b.sequence_to)]
            assert b.rows == len(sent) > 0
        assert sum(b.rows for b in blocks) == int(transfer.tables[0][source, destination])


@settings(max_examples=200)
@given(transfers(may_start_from_heads=True))
def test_blocks_deliver_each_wanted_element_that_is_held_once(transfer: Transfer) -> None:
    held = {e for r in range(RANKS) for row in elements(transfer.before, r, transfer.group_size) for e in row}
    for destination in range(RANKS):
        there = elements(transfer.after, destination, transfer.group_size)
        arrived = Counter(
            there[h][p]
            for source in range(RANKS)
            for b in transfer.blocks(source, destination)
            for h, p in indices(b.heads_to, b.sequence_to)
        )
        assert set(arrived) == {e for row in there for e in row} & held
        assert set(arrived.values()) <= {1}


@settings(max_examples=200)
@given(transfers(may_start_from_heads=True))
def test_adjoint_is_the_mirror(transfer: Transfer) -> None:
    back = transfer.adjoint
    assert back.adjoint == transfer
    assert (back.result, transfer.result) == (transfer.before, transfer.after)
    assert (back.tables[0] == transfer.tables[0].T).all()
    assert back.moves_anything == transfer.moves_anything
    assert back.is_replicating == transfer.is_replicating
    for source, destination in product(range(RANKS), repeat=2):
        mirrored = [
            (b.heads_to, b.heads_from, b.sequence_to, b.sequence_from) for b in transfer.blocks(source, destination)
        ]
        found = [(b.heads_from, b.heads_to, b.sequence_from, b.sequence_to) for b in back.blocks(destination, source)]
        assert found == mirrored


@settings(max_examples=200)
@given(transfers())
def test_moves_anything_and_is_replicating_by_element(transfer: Transfer) -> None:
    wanted = [{e for row in elements(transfer.after, r, transfer.group_size) for e in row} for r in range(RANKS)]
    holders = {e: r for r in range(RANKS) for row in elements(transfer.before, r, transfer.group_size) for e in row}
    received = Counter(e for r in range(RANKS) for e in wanted[r] if e in holders)
    assert transfer.moves_anything == any(holders[e] != r for r in range(RANKS) for e in wanted[r] if e in holders)
    copies = Counter(e for w in wanted for e in w)
    if max(received.values(), default=0) > 1:
        assert transfer.is_replicating  # else its gradient would be overwritten instead of summed
    held = [{h for h, _ in w} for w in wanted]
    if max(copies.values(), default=0) <= 1 and all(a == b or not a & b for a, b in combinations(held, 2)):
        assert not transfer.is_replicating


def gather(positions: list[list[int]], after: list[list[int]], group_size: int = 1) -> Transfer:
    heads = (whole(2),) * len(positions)
    before = Layout(tuple(index_set(p, 8) for p in positions), heads)
    return Transfer(
        "k", before, Layout(tuple(index_set(p, 8) for p in after), heads), (tuple(range(len(positions))),), group_size
    )


EVERYTHING = list(range(8))


@pytest.mark.parametrize(
    ("transfer", "is_even"),
    [
        (gather([[0, 1, 2, 3], [4, 5, 6, 7]], [EVERYTHING, EVERYTHING]), True),
        (gather([[0, 2, 4, 6], [1, 3, 5, 7]], [EVERYTHING, EVERYTHING], 2), True),
        (gather([[0, 1, 2, 3], [4, 5, 6, 7]], [EVERYTHING, EVERYTHING]).adjoint, False),
        (gather([[0, 1, 2], [3, 4, 5, 6, 7]], [EVERYTHING, EVERYTHING]), False),  # uneven
        (gather([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], EVERYTHING]), False),  # rank 0 wants less
        (gather([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 4, 5], [0, 1, 4, 5]]), False),  # parts of each
        (gather([[], []], [[], []]), False),
        (gather([[0, 1, 2, 3], [4, 5, 6, 7]], [[4, 5, 6, 7], [0, 1, 2, 3]]), False),  # an exchange
    ],
)
def test_is_even_gather_only_where_everybody_gets_everything(transfer: Transfer, is_even: bool) -> None:
    assert transfer.is_even_gather is is_even


def test_moves_anything_is_false_where_every_rank_keeps_what_it_has() -> None:
    assert not gather([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]).moves_anything
    assert not gather([[0, 1, 2, 3], [4, 5, 6, 7]], [[2, 3], [4]]).moves_anything
