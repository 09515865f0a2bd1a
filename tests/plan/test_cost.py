"""Bytes and work of whole plans against numbers worked out by hand; that ranks send what a plan says is in test_plan and test_gloo."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_engine.algebra.shape import Shape
from cp_engine.job.verify import reference
from cp_engine.plan.cost import Totals, totals
from cp_engine.plan.ir import Plan
from tests.algebra.test_layout import chunks_of
from tests.helpers import CAUSAL, PRESETS, begins_with_latent, plan_of, small

TOKEN = 4 * 8 * 4
"""Bytes of a token of q, k, v or out: 4 heads of dim 8 in float32."""


def moved(plan: Plan) -> tuple[int, int]:
    """Bytes that leave all ranks together, forward and backward."""
    forward, backward = totals(plan).sent
    return sum(forward), sum(backward)


def cost(preset: str, *overrides: str, degree: int = 4, **sizes: int | str) -> Totals:
    return totals(plan_of(preset, *overrides, degree=degree, shape=small(**sizes)))


# ------------------------------------------------------------------ only the keys that are needed
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_needed_keys_of_causal_zigzag_are_a_quarter_less_than_all(ranks: int, chunk: int) -> None:
    shape = small(sequence=2 * ranks * chunk)
    needed, everything = (
        moved(plan_of("needed_kv", f"cp.steps.gather.only={only}", degree=ranks, shape=shape))
        for only in ("visible", "all")
    )
    assert (
        everything == (2 * ranks * (ranks - 1) * 2 * chunk * TOKEN,) * 2
    )  # k and v of every token, to every other rank
    assert [4 * n for n in needed] == [3 * n for n in everything]


@pytest.mark.quick
def test_needed_keys_of_each_rank_by_hand() -> None:
    # 4 ranks, chunks of 2 tokens: rank r holds chunks r and 7 - r, and needs the 8 - r first ones, 2 of which are its own
    plan = plan_of("needed_kv", degree=4)
    assert [s.count for s in plan.steps[0].layout_after("k").sequence] == [16, 14, 12, 10]
    # chunk r goes to 3 others, chunk 7 - r to those that hold later ones: r of them
    assert totals(plan).sent[0] == tuple((3 + r) * 2 * 2 * TOKEN for r in range(4))


@pytest.mark.parametrize("preset", ["window_halo", "needed_kv"])
@pytest.mark.parametrize("sequence", [64, 256, 4096])
def test_halo_is_as_large_as_the_window_and_no_larger(preset: str, sequence: int) -> None:
    for left, right in ((1, 0), (5, 0), (16, 0), (3, 2), (0, 7)):
        mask = {"kind": "window", "left": left, "right": right}
        plan = plan_of(preset, "layout@cp.layout=contiguous", degree=4, shape=small(sequence=sequence), mask=mask)
        window = (left + right) * 2 * TOKEN  # k and v of the neighbours' tokens; the first rank has none before it
        assert moved(plan) == (3 * window, 3 * window)
        assert totals(plan).busiest_link[0] == max(left, right) * 2 * TOKEN


def test_window_that_is_wider_than_a_share_comes_from_several_ranks() -> None:
    plan = plan_of("window_halo", degree=4, shape=small(sequence=64), mask={"kind": "window", "left": 20, "right": 0})
    assert moved(plan)[0] == (16 + 20 + 20) * 2 * TOKEN


def test_documents_that_end_on_rank_borders_move_nothing() -> None:
    mask = {"kind": "document", "starts": [0, 4, 6, 8, 12]}
    plan = plan_of("needed_kv", "layout@cp.layout=contiguous", degree=4, mask=mask)
    assert moved(plan) == (0, 0) and totals(plan).collectives == (0, 0)


# ------------------------------------------------------------------ rings
@pytest.mark.quick
def test_ring_sends_its_keys_round_and_their_gradients_after_them() -> None:
    block = 4 * 2 * TOKEN  # k and v of 4 tokens
    found = cost("ring")
    assert found.sent == ((3 * block,) * 4, (6 * block,) * 4)
    assert found.collectives == (3, 6)
    assert found.busiest_link == (3 * block, 6 * block)  # to the next rank and to no other


def test_ring_of_half_types_sends_gradients_in_float32() -> None:
    block = 4 * 2 * TOKEN // 2
    assert cost("ring", dtype="bfloat16").sent == ((3 * block,) * 4, (3 * block + 3 * 2 * block,) * 4)


def test_double_ring_uses_the_outer_axis_once_for_a_turn_of_the_inner_one() -> None:
    plan = plan_of("double_ring", "cp.mesh.outer=3", "cp.mesh.inner=2", shape=small(sequence=24))
    block = 4 * 2 * TOKEN
    forward, backward = plan.steps[0].step.links(plan.steps[0], plan)
    # rank 0 (outer 0, inner 0): 1 hop to its neighbour (rank 1) in each of 3 turns, and 2 hops to the next group (rank 2)
    assert list(forward[0]) == [0, 3 * block, 2 * block, 0, 0, 0]
    assert list(backward[0]) == [0, 6 * block, 4 * block, 0, 0, 0]
    assert totals(plan).collectives == (5, 10)


def test_uneven_rings_send_the_blocks_that_come_by() -> None:
    # 3 ranks hold 3, 2 and 2 tokens; rank 0 sends its own and rank 2's, rank 1 its own and rank 0's, rank 2 its own and rank 1's
    found = cost("ring", degree=3, sequence=7)
    assert found.sent[0] == tuple(n * 2 * TOKEN for n in (3 + 2, 2 + 3, 2 + 2))


def test_ulysses_inside_a_ring_by_hand() -> None:
    # a rank holds 4 tokens; half of the heads of q, k and v leave, then k and v of 8 tokens and 2 heads go 1 hop, half of out comes back
    found = cost("usp")
    assert found.sent[0] == (3 * 2 * TOKEN + 2 * 4 * TOKEN + 2 * TOKEN,) * 4
    assert found.collectives == (3, 4)


# ------------------------------------------------------------------ latent attention, DeepSeek-V3 671B
DEEPSEEK = Shape(
    batch=1,
    sequence=4096,
    heads=128,
    kv_heads=128,
    head_dim=192,
    v_head_dim=128,
    dtype="bfloat16",
    latent_dim=512,
    rope_dim=64,
)


def test_latent_and_rotary_key_are_8_times_fewer_bytes_than_keys_and_values() -> None:
    expanded, latent = (plan_of(preset, degree=8, shape=DEEPSEEK) for preset in ("ulysses", "mla_ulysses"))
    q = [max(way) for way in latent.costs[0].bytes_sent]  # the same in both
    kv = [max(way) - n for way, n in zip(expanded.costs[0].bytes_sent, q, strict=True)]
    shared = [max(way) for way in latent.costs[1].bytes_sent]
    tokens = 4096 // 8
    assert kv == [tokens * 7 * 16 * (192 + 128) * 2] * 2  # 7 of 8 ranks' heads of k and v
    assert shared == [
        tokens * 7 * (512 + 64) * 2,
        tokens * 7 * (512 + 64) * 4,
    ]  # to 7 ranks; gradients are summed in float32
    everything = [[max(way) for way in totals(plan).sent] for plan in (expanded, latent)]
    forward = kv[0] / shared[0], everything[0][0] / everything[1][0]
    both = sum(kv) / sum(shared), sum(everything[0]) / sum(everything[1])
    print(f"\nk and v, all: forward {forward[0]:.2f} {forward[1]:.2f}   with backward {both[0]:.2f} {both[1]:.2f}")
    assert forward[0] >= 8 and forward[1] >= 1.75
    assert both[0] >= 5.8 and both[1] >= 1.68


# ------------------------------------------------------------------ head groups
@pytest.mark.parametrize("preset", [p for p in PRESETS if not begins_with_latent(p)])
def test_head_groups_move_as_much_in_more_collectives(preset: str) -> None:
    degree = 1 if preset == "none" else 4
    shape = small(heads=16, kv_heads=8, sequence=30, batch=2)
    one, two = (totals(plan_of(preset, f"cp.head_groups={n}", degree=degree, shape=shape)) for n in (1, 2))
    assert (two.sent, two.pairs, two.busiest_link) == (one.sent, one.pairs, one.busiest_link)
    assert two.collectives == tuple(2 * n for n in one.collectives)


# ------------------------------------------------------------------ work
def balance(preset: str, *overrides: str, mask: Mapping[str, object] = CAUSAL, sequence: int = 4096) -> float:
    return totals(plan_of(preset, *overrides, degree=8, shape=small(sequence=sequence), mask=mask)).max_over_mean


@pytest.mark.parametrize("preset", ["ring_zigzag", "needed_kv", "reorder_zigzag"])
@pytest.mark.parametrize("sequence", [16, 48, 4096])
def test_causal_work_of_zigzag_is_equal(preset: str, sequence: int) -> None:
    assert balance(preset, sequence=sequence) == 1.0


@pytest.mark.parametrize("preset", ["ring", "allgather_kv", "window_halo"])
def test_causal_work_of_contiguous_tokens_is_nearly_twice_the_mean_on_the_last_rank(preset: str) -> None:
    # with n tokens on each of P ranks ((2P - 1) n + 1) / (P n + 1), which goes to 15/8
    assert balance(preset) == pytest.approx((15 * 512 + 1) / (8 * 512 + 1), rel=1e-12)
    assert balance(preset) == pytest.approx(1.875, abs=5e-4)


def test_causal_work_of_stripes_differs_by_the_diagonal() -> None:
    # of each square of 8 x 8 pairs on the diagonal rank r sees r + 1
    assert balance("ring_striped") == pytest.approx(1 + 7 / (4096 + 1), rel=1e-12)


def test_work_of_head_shards_is_equal_whatever_the_mask_is() -> None:
    shape = small(heads=8, sequence=31)
    for mask in (CAUSAL, {"kind": "document", "starts": [0, 1, 2, 3]}, {"kind": "window", "left": 2, "right": 0}):
        assert totals(plan_of("ulysses", degree=8, shape=shape, mask=mask)).max_over_mean == 1.0


@st.composite
def documents(draw: st.DrawFn, most: int = 300) -> tuple[int, dict[str, object]]:
    size = draw(st.integers(2, most))
    starts = sorted({0, *draw(st.sets(st.integers(1, size - 1), max_size=12))})
    window = draw(st.none() | st.integers(0, size))
    return size, {"kind": "document", "starts": starts, "causal": draw(st.booleans()), "left": window}


@settings(max_examples=60)
@given(documents(), st.sampled_from((2, 3, 8)), st.sampled_from((1, 4, 8)))
def test_balanced_work_of_documents_differs_by_at_most_the_heaviest_chunk(
    given_documents: tuple[int, dict[str, object]], ranks: int, chunks: int
) -> None:
    size, mask = given_documents
    order = ("layout@cp.layout=balanced", f"cp.layout.chunks={chunks}")
    for preset in ("allgather_kv", "needed_kv"):
        pairs = totals(plan_of(preset, *order, degree=ranks, shape=small(sequence=size), mask=mask)).pairs
        visible = reference.visible(mask, size).sum(1).tolist()
        heaviest = max(sum(visible[p] for p in chunk) for chunk in chunks_of(size, ranks * chunks))
        assert sum(pairs) == 4 * sum(visible)
        assert max(pairs) - min(pairs) <= 4 * heaviest


def test_balanced_work_of_documents_beats_zigzag() -> None:
    mask = {"kind": "document", "starts": [0, 100, 2100, 2150, 3000, 3900]}
    zigzag, balanced = (
        balance("allgather_kv", f"layout@cp.layout={order}", mask=mask) for order in ("zigzag", "balanced")
    )
    assert zigzag > 1.3 and balanced < 1.05
    assert balance("allgather_kv", "layout@cp.layout=balanced") == 1.0  # and is not worse where zigzag is perfect
