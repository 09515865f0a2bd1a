"""Whole compositions with all ranks in one process: whatever compiles is right, whatever is not right is reported."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cp_engine import attend, mask, tiles
from cp_engine.check import Composition, prove
from cp_engine.errors import CoverageError, CPError, LayoutError
from cp_engine.index_set import IndexSet, Run, whole
from cp_engine.kernels import math as math_kernel
from cp_engine.layout import Layout, Mesh
from cp_engine.lower import ExchangeOperation
from cp_engine.plan import Plan, Shape, State
from cp_engine.primitives import exchange
from cp_engine.primitives.attention import Dense
from cp_engine.primitives.collective import AllGather
from cp_engine.primitives.order import Contiguous, Striped, Zigzag
from cp_engine.redistribute import Redistribution
from cp_engine.transfer import Block, Transfer
from cp_engine.verify import in_one_process
from tests.helpers import (
    CAUSAL,
    PRESETS,
    assert_close,
    assert_equals_reference,
    computed,
    computed_by_threads,
    masks,
    plan_of,
    small,
)

Node = dict[str, object]
EXCHANGING = [p for p in PRESETS if p != "none"]
UNEVEN = small(batch=2, sequence=13, heads=6, kv_heads=3, v_head_dim=4)
patch = pytest.MonkeyPatch


# ------------------------------------------------------------------ presets
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_preset_equals_reference(preset: str, degree: int, layout: str) -> None:
    plan = plan_of(preset, f"layout@cp.layout={layout}", degree=degree, shape=UNEVEN)
    assert_equals_reference(plan, CAUSAL)


@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_equals_reference_with_each_kernel(preset: str, kernel: str) -> None:
    degree = 1 if preset == "none" else 3
    assert_equals_reference(plan_of(preset, f"cp.steps.attend.kernel={kernel}", degree=degree, shape=UNEVEN), CAUSAL)


@pytest.mark.parametrize("preset", EXCHANGING)
def test_preset_accepts_more_ranks_than_tokens_and_heads(preset: str) -> None:
    plan = plan_of(preset, degree=5, shape=small(sequence=3, heads=2, kv_heads=1))
    assert_equals_reference(plan, CAUSAL)


def executed(plan: Plan) -> None:
    """Runs every rank with a communicator of its own: same numbers, and bytes and collectives as planned."""
    plan = replace(plan, shape=replace(plan.shape, dtype="float64"))
    tensors, counted = computed_by_threads(plan)
    assert_close(tensors, computed(plan), 1e-13)
    for way in (0, 1):
        collectives = sum(c.collectives[way] for c in plan.costs)
        sent = [sum(c.bytes_sent[way][r] for c in plan.costs) for r in range(plan.degree)]
        assert counted[way] == [(s, collectives) for s in sent]


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
    for layout in ("contiguous", "zigzag"):
        executed(plan_of(preset, f"layout@cp.layout={layout}", degree=4, shape=shape))


# ------------------------------------------------------------------ random compositions
HEADS = [(1, 1), (2, 1), (4, 4), (4, 2), (6, 3), (6, 2), (7, 7), (8, 2)]
ATTEND: Node = {"kind": "dense"}


def a2a(*axes: str) -> Node:
    return {
        "kind": "all_to_all",
        "axes": list(axes),
        "tensors": ["q", "k", "v"],
        "split": "heads",
        "concat": "sequence",
    }


def gather(*axes: str, only: str = "all") -> Node:
    return {"kind": "all_gather", "axes": list(axes), "tensors": ["k", "v"], "only": only}


def reorder(to: str, *over: str) -> Node:
    return {"kind": "reorder", "to": to, "over": list(over) or None, "tensors": ["q", "k", "v"]}


def undo(of: str) -> Node:
    return {"kind": "undo", "of": of, "tensors": ["out"]}


Template = Callable[[list[str], str, str], dict[str, Node]]
ONE_AXIS: list[Template] = [
    lambda x, to, only: {"in": a2a(*x), "attend": ATTEND, "back": undo("in")},
    lambda x, to, only: {"fetch": gather(*x, only=only), "attend": ATTEND},
    lambda x, to, only: {
        "deal": reorder(to, *x),
        "fetch": gather(*x, only=only),
        "attend": ATTEND,
        "back": undo("deal"),
    },
    lambda x, to, only: {"deal": reorder(to), "in": a2a(*x), "attend": ATTEND, "out": undo("in"), "back": undo("deal")},
]
TWO_AXES: list[Template] = [
    *ONE_AXIS,
    lambda x, to, only: {"one": a2a(x[0]), "two": a2a(x[1]), "attend": ATTEND, "b": undo("two"), "a": undo("one")},
    lambda x, to, only: {"in": a2a(x[0]), "fetch": gather(x[1], only=only), "attend": ATTEND, "back": undo("in")},
    lambda x, to, only: {"one": gather(x[0]), "two": gather(x[1], only=only), "attend": ATTEND},
    lambda x, to, only: {
        "deal": reorder(to, x[0]),
        "in": a2a(x[1]),
        "fetch": gather(x[0], only=only),
        "attend": ATTEND,
        "out": undo("in"),
        "back": undo("deal"),
    },
    lambda x, to, only: {
        "fetch": gather(x[0]),
        "in": {**a2a(x[1]), "tensors": ["k", "v"]},
        "also": {**a2a(x[1]), "tensors": ["q"]},
        "attend": ATTEND,
        "back": undo("also"),
    },
]


@dataclass(frozen=True)
class Case:
    """A composition with the call that it is for."""

    cp: Node
    shape: Shape
    mask: dict[str, object]

    def plan(self) -> Plan:
        return plan_of(self.cp, shape=self.shape, mask=self.mask)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2), (1, 2), (2, 4)]))
    axes = ["a", "b"][: len(sizes)]
    template = draw(st.sampled_from(ONE_AXIS if len(sizes) == 1 else TWO_AXES))
    kinds = st.sampled_from(["contiguous", "zigzag", "striped"])
    over = draw(st.sampled_from([None, *([a] for a in axes), axes, axes[::-1]]))
    steps = template(draw(st.permutations(axes)), draw(kinds), draw(st.sampled_from(["all", "visible"])))
    if draw(st.booleans()):  # everything divides, so that exchanges are even
        heads, kv_heads = (n * prod(sizes) for n in draw(st.sampled_from([(1, 1), (2, 1), (2, 2)])))
        sequence = draw(st.integers(1, 3)) * 2 * prod(sizes)
    else:
        heads, kv_heads = draw(st.sampled_from(HEADS))
        sequence = draw(st.integers(1, 24))
    shape = small(
        batch=draw(st.integers(1, 2)),
        sequence=sequence,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([3, 4])),
        v_head_dim=draw(st.sampled_from([2, 4, 5])),
    )
    cp: Node = {
        "name": "random",
        "mesh": dict(zip(axes, sizes, strict=True)),
        "axes": draw(st.permutations(axes)),
        "layout": {"kind": draw(kinds), "over": over},
        "order": list(steps),
        "steps": steps,
    }
    return Case(cp, shape, draw(masks(sequence)))


@st.composite
def damaged(draw: st.DrawFn) -> Case:
    """A composition with one or two faults of the kind that people make."""
    case = deepcopy(draw(cases()))
    steps, order = case.cp["steps"], case.cp["order"]
    assert isinstance(steps, dict) and isinstance(order, list)
    other = {"sequence": "heads", "heads": "sequence", "all": "visible", "visible": "all"}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(order))
        node = steps[name] = dict(steps[name])
        what = draw(st.sampled_from(["drop", "swap dims", "axes", "exchange", "tensors", "again", "of", "only", "dim"]))
        if what == "drop" and len(order) > 1:
            order.remove(name)
            del steps[name]
        elif what == "exchange":
            i, j = draw(st.integers(0, len(order) - 1)), draw(st.integers(0, len(order) - 1))
            order[i], order[j] = order[j], order[i]
        elif what == "swap dims" and "split" in node:
            node["split"], node["concat"] = node["concat"], node["split"]
        elif what == "axes":
            key = next((k for k in ("axes", "over") if k in node), None)
            if key is not None:
                node[key] = draw(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2, unique=True))
        elif what == "tensors" and "tensors" in node:
            node["tensors"] = draw(st.lists(st.sampled_from(["q", "k", "v", "out"]), min_size=1, unique=True))
        elif what == "again":
            steps["again"] = dict(node)
            order.insert(draw(st.integers(0, len(order))), "again")
        elif what == "of" and "of" in node:
            node["of"] = draw(st.sampled_from(order))
        elif what == "only" and "only" in node:
            node["only"] = other[str(node["only"])]
        elif what == "dim" and node["kind"] == "all_gather":
            node["dim"] = "heads"
        if order.count("again") > 1:
            order.remove("again")
    return case


def right_or_refused(case: Case) -> bool:
    """Whether it compiles; then it must be right. Anything but a CPError is a fault of the engine."""
    try:
        plan = case.plan()
    except CPError:
        return False
    assert_equals_reference(plan, case.mask)
    return True


@settings(max_examples=120)
@given(cases())
def test_random_composition_compiles_and_equals_reference(case: Case) -> None:
    assert right_or_refused(case)


@settings(max_examples=40)
@given(cases())
def test_random_composition_executes_as_planned(case: Case) -> None:
    executed(case.plan())


@settings(max_examples=200)
@given(damaged())
def test_damaged_composition_is_refused_or_right(case: Case) -> None:
    right_or_refused(case)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("sequence", [2, 3, 4])
def test_gradients_are_summed_where_other_elements_are_dropped(sequence: int, mask: str) -> None:
    """Ranks without queries want no keys, so as many elements are dropped as are replicated: totals alone do not tell."""
    steps = {"one": gather("a"), "two": gather("b", only="visible"), "attend": ATTEND}
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


@pytest.mark.long
@settings(max_examples=4000)
@given(cases())
def test_many_random_compositions_compile_and_equal_reference(case: Case) -> None:
    assert right_or_refused(case)


@pytest.mark.long
@settings(max_examples=1000)
@given(cases())
def test_many_random_compositions_execute_as_planned(case: Case) -> None:
    executed(case.plan())


@pytest.mark.long
@settings(max_examples=8000)
@given(damaged())
def test_many_damaged_compositions_are_refused_or_right(case: Case) -> None:
    right_or_refused(case)


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
    return prove(composition, small(sequence=8), mask.mask_of(mask_kind, 8))


def test_pieces_that_no_rank_of_the_group_holds_are_refused() -> None:
    claim = Any(name="claim", tensors=("k", "v"), axes=("b",), wanted=(tuple(range(8)),) * 4)
    with pytest.raises(LayoutError, match="its group holds 16") as caught:
        proved(claim)
    assert caught.value.problems[0].key == "cp.steps.claim"


def test_positions_of_another_group_are_refused() -> None:
    claim = Any(name="claim", tensors=("k",), axes=("b",), wanted=((0, 1), (2, 3), (4, 5), (2, 3)))
    with pytest.raises(LayoutError, match="a=1 b=1"):
        proved(claim)


def test_piece_that_two_ranks_hold_is_refused() -> None:
    everything = AllGather(name="all", tensors=("k", "v"), axes=("a", "b"))
    claim = Any(name="claim", tensors=("k",), axes=("a",), wanted=((0, 1),) * 4)
    with pytest.raises(LayoutError, match=r"cp\.steps\.claim"):
        proved(everything, claim)


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


# ------------------------------------------------------------------ the checks can fail: one thing broken at a time
def wrong_rows(plan: Plan, masked: Mapping[str, object] = CAUSAL) -> set[str]:
    return {row.name for row in in_one_process(plan, masked) if not row.is_good}


def four_ranks(preset: str, *overrides: str) -> Plan:
    return plan_of(preset, *overrides, degree=4, shape=small(sequence=16))


@pytest.mark.parametrize("preset", PRESETS)
def test_verify_is_content_with_what_is_right(preset: str) -> None:
    assert wrong_rows(plan_of(preset, degree=1 if preset == "none" else 4)) == set()


@pytest.mark.parametrize("tensor", ["q", "k", "v", "out"])
def test_verify_reports_pieces_that_arrive_in_another_order(tensor: str, monkeypatch: patch) -> None:
    plan, blocks = four_ranks("ulysses"), Transfer.blocks

    def exchanged(self: Transfer, source: int, destination: int) -> list[Block]:
        found = blocks(self, source, destination)
        if self.tensor != tensor or self.is_adjoint or source not in (1, 2) or tensor == "out":
            return found
        return [
            replace(b, sequence_to=c.sequence_to)
            for b, c in zip(found, blocks(self, 3 - source, destination), strict=True)
        ]

    def exchanged_out(self: Transfer, source: int, destination: int) -> list[Block]:
        found = blocks(self, source, destination)
        if self.tensor != "out" or self.is_adjoint or source not in (1, 2):
            return found
        return [
            replace(b, heads_to=c.heads_to) for b, c in zip(found, blocks(self, 3 - source, destination), strict=True)
        ]

    monkeypatch.setattr(Transfer, "blocks", exchanged_out if tensor == "out" else exchanged)
    assert "out" in wrong_rows(plan)


def test_verify_reports_an_adjoint_that_forgets_the_sum(monkeypatch: patch) -> None:
    plan = four_ranks("allgather_kv")
    monkeypatch.setattr(Transfer, "is_replicating", property(lambda self: False))
    assert wrong_rows(plan) == {"dk", "dv"}


def test_verify_reports_an_adjoint_that_sums_twice(monkeypatch: patch) -> None:
    plan, backward = four_ranks("allgather_kv"), ExchangeOperation.backward

    def twice(self: ExchangeOperation, grads: dict[str, list[Tensor]], saved: tuple[Tensor, ...], scale: float) -> None:
        backward(self, grads, saved, scale)
        grads.update({n: [x * 2.0 for x in grads[n]] for n in (("k", "v") if "k" in grads else ())})

    monkeypatch.setattr(ExchangeOperation, "backward", twice)
    assert wrong_rows(plan) == {"dk", "dv"}


@pytest.mark.parametrize(("preset", "wrong"), [("ulysses", {"dq", "dk", "dv"}), ("allgather_kv", {"dk", "dv"})])
def test_verify_reports_an_adjoint_that_returns_zeros(preset: str, wrong: set[str], monkeypatch: patch) -> None:
    plan, backward = four_ranks(preset), ExchangeOperation.backward

    def zeros(self: ExchangeOperation, grads: dict[str, list[Tensor]], saved: tuple[Tensor, ...], scale: float) -> None:
        backward(self, grads, saved, scale)
        grads.update({n: [torch.zeros_like(x) for x in grads[n]] for n in "qkv" if n in grads and f"d{n}" in wrong})

    monkeypatch.setattr(ExchangeOperation, "backward", zeros)
    assert wrong_rows(plan) == wrong


def averaged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    out.add_(part).div_(2.0)
    lse.copy_(torch.logaddexp(lse, part_lse))


def forgotten_lse(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    attend_merge(out, lse.clone(), part, part_lse)


def overwritten(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    out.copy_(part)
    lse.copy_(part_lse)


attend_merge = attend.merge


@pytest.mark.parametrize(
    ("merge", "wrong"),
    [
        (averaged, {"out", "dq", "dk"}),
        (forgotten_lse, {"dq", "dk", "dv"}),
        (overwritten, {"out", "dq", "dk", "dv"}),
    ],
)
def test_verify_reports_a_wrong_merge(merge: Callable[..., None], wrong: set[str], monkeypatch: patch) -> None:
    plan = four_ranks("allgather_kv")
    monkeypatch.setattr(attend, "merge", merge)
    assert wrong <= wrong_rows(plan)


@pytest.mark.parametrize("low", [1, -1])
def test_verify_reports_a_mask_that_is_off_by_one(low: int, monkeypatch: patch) -> None:
    def shifted(size: int, fields: Mapping[str, object]) -> list[mask.Band]:
        return [mask.Band(q0=0, q1=size, k0=0, k1=size, low=low, high=size)]

    monkeypatch.setitem(mask.KINDS, "causal", (shifted, (), ()))
    assert {"out", "dq", "dk", "dv"} <= wrong_rows(four_ranks("ulysses"))


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_verify_reports_causal_tiles_that_are_off_by_one(shift: int, layout: str, monkeypatch: patch) -> None:
    plan, staircase = four_ranks("allgather_kv", f"layout@cp.layout={layout}"), tiles._staircase
    monkeypatch.setattr(tiles, "_staircase", lambda first, last, m, low: staircase(first, last, m, low + shift))
    assert "out" in wrong_rows(plan)


def test_verify_reports_a_kernel_that_is_not_causal(monkeypatch: patch) -> None:
    monkeypatch.setattr(math_kernel, "band_mask", lambda tile, device: torch.ones(tile.q.count, tile.k.count).bool())
    assert "out" in wrong_rows(four_ranks("ulysses", "cp.steps.attend.kernel=math"))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_verify_reports_two_positions_that_are_swapped_between_ranks(layout: str) -> None:
    plan = four_ranks("ulysses", f"layout@cp.layout={layout}")
    sets = [list(s) for s in plan.entry.sequence]
    sets[0][1], sets[2][0] = sets[2][0], sets[0][1]
    moved = tuple(IndexSet(tuple(Run(p, 1) for p in s), 16) for s in sets)
    wrong = replace(plan, entry=Layout(moved, plan.entry.heads))  # what the model's tokens are, not what the plan says
    assert {"out", "dq", "dk", "dv"} <= wrong_rows(wrong)


@pytest.mark.parametrize("kind", [Contiguous, Zigzag, Striped])
def test_tables_by_hand_report_one_position_that_is_elsewhere(kind: type[Contiguous], monkeypatch: patch) -> None:
    from tests.test_layout import TABLES, test_positions_as_written_by_hand

    deal = kind.deal

    def swapped(self: Contiguous, held: IndexSet, ranks: int) -> list[IndexSet]:
        dealt = deal(self, held, ranks)
        if ranks == 1:
            return dealt
        sets = [list(s) for s in dealt]
        sets[0][-1], sets[1][0] = sets[1][0], sets[0][-1]
        return [IndexSet(tuple(Run(p, 1) for p in s), held.size) for s in sets]

    monkeypatch.setattr(kind, "deal", swapped)
    row = next(r for r in TABLES if type(r[0]) is kind and r[1].degree == 2)
    with pytest.raises(AssertionError):
        test_positions_as_written_by_hand(*row)


def test_plan_reports_one_position_that_is_lost(monkeypatch: patch) -> None:
    destination = AllGather.destination

    def lossy(self: AllGather, state: State, tensor: str) -> Layout:
        layout = destination(self, state, tensor)
        return layout.replaced("sequence", (*layout.sequence[:-1], whole(16).part(1, 15)))

    monkeypatch.setattr(AllGather, "destination", lossy)
    with pytest.raises(CoverageError, match="cp=3"):
        four_ranks("allgather_kv")


@pytest.mark.parametrize("preset", EXCHANGING)
def test_byte_test_reports_a_count_that_is_wrong(preset: str, monkeypatch: patch) -> None:
    executed(four_ranks(preset))
    sent = exchange._sent

    def off_by_one_element(transfer: Transfer, plan: Plan, size: int) -> object:
        table = sent(transfer, plan, size)
        table[0, 1] += size
        return table

    monkeypatch.setattr(exchange, "_sent", off_by_one_element)
    with pytest.raises(AssertionError):
        executed(four_ranks(preset))


def test_byte_test_reports_an_exchange_that_is_done_twice(monkeypatch: patch) -> None:
    once = Redistribution.__call__

    def twice(self: Redistribution, values: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        once(self, values)
        return once(self, values)

    monkeypatch.setattr(Redistribution, "__call__", twice)
    plan = four_ranks("ulysses")
    assert wrong_rows(plan) == set()  # the numbers are right, so only counting tells
    with pytest.raises(AssertionError):
        executed(plan)
