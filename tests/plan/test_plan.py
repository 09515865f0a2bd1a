"""Whole compositions with all ranks in one process: whatever compiles is right, whatever is not right is reported."""

from dataclasses import dataclass

import pytest

from cp_engine.algebra.index_set import IndexSet, Run
from cp_engine.algebra.layout import Layout, Mesh
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.shape import Shape
from cp_engine.errors import CoverageError, LayoutError
from cp_engine.plan.cost import totals
from cp_engine.plan.ir import Composition, Plan
from cp_engine.plan.prove import prove
from cp_engine.plan.state import State
from cp_engine.primitives import exchange
from cp_engine.primitives.collective import AllGather
from cp_engine.primitives.dense import Dense
from cp_engine.primitives.layouts import Contiguous
from tests.helpers import (
    CAUSAL,
    PRESETS,
    assert_equals_reference,
    begins_with_latent,
    executed,
    factored,
    fitting,
    mesh_for,
    plan_of,
    shipped,
    small,
)

Node = dict[str, object]
EXCHANGING = [p for p in PRESETS if p != "none"]
UNEVEN = small(batch=2, sequence=13, heads=6, kv_heads=3, v_head_dim=4)
patch = pytest.MonkeyPatch


# ------------------------------------------------------------------ presets
def on_all_meshes(preset: str, degree: int, *overrides: str, shape: Shape = UNEVEN) -> list[Plan]:
    """The plans of a preset on so many ranks, one for each way to factor them over its axes."""
    axes = shipped(preset, ())["axes"]
    assert isinstance(axes, list)
    turns = range(len(factored(degree, len(axes))))
    return [plan_of(preset, *overrides, degree=degree, turn=t, shape=fitting(preset, shape)) for t in turns]


def test_degrees_are_factored_over_the_axes_in_every_order() -> None:
    assert factored(6, 2) == [(2, 3), (3, 2), (1, 6), (6, 1)]
    assert factored(4, 3)[:3] == [(1, 2, 2), (2, 1, 2), (2, 2, 1)]
    assert factored(1, 0) == [()] and factored(2, 0) == []
    overrides = mesh_for("usp", 6, turn=1)
    assert overrides == ("cp.mesh.ring=3", "cp.mesh.ulysses=2")
    assert plan_of("usp", *overrides) == plan_of("usp", degree=6, turn=1)


def test_axes_of_a_preset_may_be_swapped() -> None:
    near, far = (
        plan_of("usp", f"cp.axes=[{axes}]", degree=4, shape=UNEVEN) for axes in ("ring,ulysses", "ulysses,ring")
    )
    assert near.steps[0].transfers[0].groups == ((0, 1), (2, 3)) and far.steps[0].transfers[0].groups == (
        (0, 2),
        (1, 3),
    )
    assert_equals_reference(far, CAUSAL)


@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_equals_reference_with_each_kernel(preset: str, kernel: str) -> None:
    for plan in on_all_meshes(preset, 1 if preset == "none" else 4, f"cp.steps.attend.kernel={kernel}"):
        assert_equals_reference(plan, CAUSAL)


@pytest.mark.parametrize("preset", EXCHANGING)
def test_preset_accepts_more_ranks_than_tokens_and_heads(preset: str) -> None:
    for degree in (5, 6):
        for plan in on_all_meshes(preset, degree, shape=small(sequence=3, heads=2, kv_heads=1)):
            assert_equals_reference(plan, CAUSAL)
            executed(plan)


@pytest.mark.parametrize(
    ("sequence", "heads", "kv_heads"), [(16, 8, 8), (16, 8, 4), (16, 8, 2), (16, 6, 3), (13, 6, 3)]
)
@pytest.mark.parametrize("packed_bytes", [0, 1 << 20])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_ranks_send_what_the_plan_says(
    preset: str, packed_bytes: int, sequence: int, heads: int, kv_heads: int, monkeypatch: patch
) -> None:
    monkeypatch.setattr(exchange, "PACKED_BYTES", packed_bytes)
    shape = small(batch=2, sequence=sequence, heads=heads, kv_heads=kv_heads, v_head_dim=4)
    layout = "zigzag" if packed_bytes else "contiguous"
    for plan in on_all_meshes(preset, 4, f"layout@cp.layout={layout}", shape=shape):
        executed(plan)


# ------------------------------------------------------------------ sinks and head groups
@pytest.mark.quick
@pytest.mark.parametrize("preset", PRESETS)
def test_sinks_equal_reference_and_their_gradient_is_the_sum_of_the_ranks_shares(preset: str) -> None:
    for plan in on_all_meshes(preset, 1 if preset == "none" else 4, "cp.steps.attend.sinks=true"):
        assert plan.parameters[-1] == "sinks"
        assert_equals_reference(plan, CAUSAL)
        executed(plan)


@pytest.mark.parametrize("groups", [2, 6])
@pytest.mark.parametrize("preset", [p for p in PRESETS if not begins_with_latent(p)])
def test_head_groups_one_after_the_other_equal_reference_and_do_the_same_work(preset: str, groups: int) -> None:
    overrides = ("cp.steps.attend.sinks=true", f"cp.head_groups={groups}")
    shape = small(batch=2, sequence=13, heads=12, kv_heads=6, v_head_dim=4)
    for plan in on_all_meshes(preset, 1 if preset == "none" else 4, *overrides, shape=shape):
        assert plan.part.heads == 12 // groups
        assert_equals_reference(plan, CAUSAL)
        executed(plan)
        together = plan_of(preset, overrides[0], degree=plan.degree, shape=shape)
        assert sum(totals(plan).pairs) == sum(totals(together).pairs)


@pytest.mark.parametrize("preset", EXCHANGING)
def test_masks_that_come_with_each_call_are_planned_as_one_document(preset: str) -> None:
    plan = plan_of(preset, degree=4, shape=fitting(preset, UNEVEN), mask={"kind": "document"})
    assert plan.is_mask_from_call and not plan_of(preset, degree=4, shape=fitting(preset, UNEVEN)).is_mask_from_call
    assert_equals_reference(plan, CAUSAL)


# ------------------------------------------------------------------ faults that random compositions found
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("sequence", [2, 3, 4])
def test_gradients_are_summed_where_other_elements_are_dropped(sequence: int, mask: str) -> None:
    """Ranks without queries want no keys, so as many elements are dropped as are replicated: totals alone do not tell."""
    gather = {"kind": "all_gather", "tensors": ["k", "v"]}
    steps: Node = {
        "one": {**gather, "axes": ["a"]},
        "two": {**gather, "axes": ["b"], "only": "visible"},
        "attend": {"kind": "dense"},
    }
    cp: Node = {
        "name": "nested",
        "mesh": {"a": 2, "b": 2},
        "axes": ["a", "b"],
        "layout": {"kind": "contiguous"},
        "order": list(steps),
        "steps": steps,
    }
    plan = plan_of(cp, shape=small(sequence=sequence, heads=1, head_dim=3), mask=mask)
    assert_equals_reference(plan, {"kind": mask})


def test_half_types_travel_as_planned() -> None:
    """bf16 q, k and v; gradients that are summed over ranks travel in float32."""
    plan = plan_of("ulysses", degree=4, shape=small(heads=6, kv_heads=3, sequence=16, dtype="bfloat16"))
    assert plan.wide_gradients == {"k", "v"}
    q, kv = 4 * 8, 4 * 8  # elements of one head of a rank's tokens
    forward, backward = plan.costs[0].bytes_sent
    assert forward[3] == (5 * q + 2 * 3 * kv) * 2  # rank 3: all but its q head; kv heads 0 and 1, and head 2 to rank 2
    assert backward[3] == 3 * 4 * 8 * 2 + 2 * 3 * 4 * 8 * 4  # its q head and its kv head, of the tokens of 3 others
    assert plan_of("ulysses", degree=4, shape=small(heads=4, dtype="bfloat16")).wide_gradients == frozenset()


# ------------------------------------------------------------------ the proof can refuse
MESH = Mesh(axes=("a", "b"), sizes=(2, 2))


@dataclass(frozen=True, kw_only=True)
class Any(AllGather):
    """An exchange over one axis that claims to bring any positions."""

    wanted: tuple[tuple[int, ...], ...]

    def destination(self, state: State, tensor: str) -> Layout:
        sets = (IndexSet(tuple(Run(p, 1) for p in w), 8) for w in self.wanted)
        return state.layout(tensor).replaced("sequence", tuple(sets))


def proved(*steps: AllGather, mesh: Mesh = MESH, mask_kind: str = "causal") -> Plan:
    composition = Composition(
        name="claims", mesh=mesh, layout=Contiguous(), steps=(*steps, Dense(name="attend")), recompute="all"
    )
    return prove(composition, small(sequence=8), mask_of(mask_kind, 8))


def test_pieces_that_no_rank_of_the_group_holds_are_refused() -> None:
    claim = Any(name="claim", tensors=("k", "v"), axes=("b",), wanted=(tuple(range(8)),) * 4)
    with pytest.raises(LayoutError, match="its group holds 16") as caught:
        proved(claim)
    assert caught.value.problems[0].key == "cp.steps.claim"


def test_positions_of_another_group_are_refused() -> None:
    claim = Any(name="claim", tensors=("k",), axes=("b",), wanted=((0, 1), (2, 3), (4, 5), (2, 3)))
    with pytest.raises(LayoutError, match="a=1 b=1"):
        proved(claim)


@pytest.mark.quick
def test_piece_that_two_ranks_hold_is_refused() -> None:
    everything = AllGather(name="all", tensors=("k", "v"), axes=("a", "b"))
    claim = Any(name="claim", tensors=("k",), axes=("a",), wanted=((0, 1),) * 4)
    with pytest.raises(LayoutError, match=r"cp\.steps\.claim"):
        proved(everything, claim)


@pytest.mark.quick
def test_keys_that_are_left_out_are_refused() -> None:
    axes, everything = ("a", "b"), tuple(range(8))
    claim = Any(
        name="claim", tensors=("k", "v"), axes=axes, wanted=(everything, everything, everything, everything[1:])
    )
    with pytest.raises(CoverageError, match="would not see 6 % of the visible"):
        proved(claim)  # the 2 queries of the last rank do not see key 0 with 4 heads: 8 of 144 pairs
    unseen = Any(name="claim", tensors=("k", "v"), axes=axes, wanted=((0, 1), *(everything[:-1],) * 2, everything))
    assert proved(unseen).degree == 4  # keys that nobody sees may be left out


@pytest.mark.parametrize(
    "wanted",
    [((0, 1), (2, 3), (4, 5), (4, 5)), ((0, 1, 2, 3), (2, 3), (4, 5), ()), ((0, 1), (2, 3), (4, 5, 6), (6, 7))],
)
def test_queries_that_are_computed_twice_are_refused(wanted: tuple[tuple[int, ...], ...]) -> None:
    axes = ("a", "b")
    everything = AllGather(name="all", tensors=("k", "v"), axes=axes)
    with pytest.raises(CoverageError, match=r"cp\.steps\.attend"):
        proved(everything, Any(name="claim", tensors=("q",), axes=axes, wanted=wanted))


def test_result_that_is_elsewhere_is_refused() -> None:
    axes = ("a", "b")
    everything = AllGather(name="all", tensors=("k", "v"), axes=axes)
    claim = Any(name="claim", tensors=("q",), axes=axes, wanted=((1, 0), (2, 3), (4, 5), (6, 7)))
    with pytest.raises(CoverageError, match="out does not end in the layout in which q came"):
        proved(everything, claim)
