"""The checks can fail: one thing broken at a time in what runs, and verify, the tables by hand or the count of bytes tell."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cp_engine.algebra import band, mask, mask_kinds, tiles
from cp_engine.algebra.index_set import IndexSet, Run, whole
from cp_engine.algebra.layout import Layout
from cp_engine.algebra.transfer import Block, Table, Transfer
from cp_engine.errors import CoverageError
from cp_engine.exchange.channel import Pending
from cp_engine.exchange.operation import ExchangeOperation, Moving, Saved
from cp_engine.exchange.redistribute import Redistribution
from cp_engine.job.verify.attention import in_one_process
from cp_engine.kernels import math as math_kernel
from cp_engine.kernels import tiled
from cp_engine.plan.ir import Plan, PlannedStep
from cp_engine.plan.state import State
from cp_engine.plan.token_layout import TokenLayout
from cp_engine.primitives import dense_operation
from cp_engine.primitives.collective import AllGather
from cp_engine.primitives.dense import Dense
from cp_engine.primitives.dense_operation import AttendOperation, LocalBlocks, TravellingBlocks
from cp_engine.primitives.expand import ExpandOperation
from cp_engine.primitives.layouts import Contiguous, Striped, Zigzag
from cp_engine.runtime import program
from tests.helpers import (
    CAUSAL,
    EVERY,
    PRESETS,
    executed,
    fitting,
    plan_of,
    small,
)

Values = dict[str, list[Tensor]]
EXCHANGING = [p for p in PRESETS if p != "none"]
patch = pytest.MonkeyPatch


def wrong_rows(plan: Plan, masked: Mapping[str, object] = CAUSAL) -> set[str]:
    return {row.name for row in in_one_process(plan, masked) if not row.is_good}


def four_ranks(preset: str, *overrides: str) -> Plan:
    return plan_of(preset, *overrides, degree=4, shape=fitting(preset, small(sequence=16)))


@pytest.mark.parametrize("preset", EVERY)
def test_verify_is_content_with_what_is_right(preset: str) -> None:
    plan = plan_of(preset, degree=1 if preset == "none" else 4, shape=fitting(preset, small()))
    assert wrong_rows(plan) == set()


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

    def twice(self: ExchangeOperation, grads: Values, saved: Saved, scale: float) -> Moving:
        found = yield from backward(self, grads, saved, scale)
        grads.update({n: [x * 2.0 for x in grads[n]] for n in (("k", "v") if "k" in grads else ())})
        return found

    monkeypatch.setattr(ExchangeOperation, "backward", twice)
    assert wrong_rows(plan) == {"dk", "dv"}


@pytest.mark.parametrize(("preset", "wrong"), [("ulysses", {"dq", "dk", "dv"}), ("allgather_kv", {"dk", "dv"})])
def test_verify_reports_an_adjoint_that_returns_zeros(preset: str, wrong: set[str], monkeypatch: patch) -> None:
    plan, backward = four_ranks(preset), ExchangeOperation.backward

    def zeros(self: ExchangeOperation, grads: Values, saved: Saved, scale: float) -> Moving:
        found = yield from backward(self, grads, saved, scale)
        grads.update({n: [torch.zeros_like(x) for x in grads[n]] for n in "qkv" if n in grads and f"d{n}" in wrong})
        return found

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


attend_merge = tiled.merge


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
    monkeypatch.setattr(tiled, "merge", merge)
    assert wrong <= wrong_rows(plan)


@pytest.mark.parametrize("low", [1, -1])
def test_verify_reports_a_mask_that_is_off_by_one(low: int, monkeypatch: patch) -> None:
    def shifted(size: int, fields: Mapping[str, object]) -> list[band.Band]:
        return [band.Band(q0=0, q1=size, k0=0, k1=size, low=low, high=size)]

    monkeypatch.setitem(mask_kinds.KINDS, "causal", (shifted, (), ()))
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
def test_tables_by_hand_report_one_position_that_is_elsewhere(kind: type[TokenLayout], monkeypatch: patch) -> None:
    from tests.algebra.test_layout import TABLES, test_positions_as_written_by_hand

    deal = kind.deal

    def swapped(self: TokenLayout, held: IndexSet, ranks: int, masked: mask.Mask) -> list[IndexSet]:
        dealt = deal(self, held, ranks, masked)
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
    sent, hops = Plan.sent, Dense.links

    def off_by_one_element(self: Plan, transfer: Transfer, size: int) -> Table:
        table = sent(self, transfer, size)
        table[0, 1] += size
        return table

    def off_by_one_element_of_a_hop(self: Dense, planned: PlannedStep, plan: Plan) -> tuple[Table, Table]:
        forward, backward = hops(self, planned, plan)
        forward[0, 1] += 8 * bool(self.rotate)
        return forward, backward

    if four_ranks(preset).costs[-1].collectives[0] and len(four_ranks(preset).steps) == 1:
        monkeypatch.setattr(Dense, "links", off_by_one_element_of_a_hop)
    else:
        monkeypatch.setattr(Plan, "sent", off_by_one_element)
    with pytest.raises(AssertionError):
        executed(four_ranks(preset))


def test_byte_test_reports_an_exchange_that_is_done_twice(monkeypatch: patch) -> None:
    once = Redistribution.start

    def twice(self: Redistribution, values: Values) -> Callable[[], Values]:
        once(self, values)()
        return once(self, values)

    monkeypatch.setattr(Redistribution, "start", twice)
    plan = four_ranks("ulysses")
    assert wrong_rows(plan) == set()  # the numbers are right, so only counting tells
    with pytest.raises(AssertionError):
        executed(plan)


@pytest.mark.parametrize("preset", ["ring", "double_ring", "usp"])
def test_byte_test_reports_a_hop_that_is_done_twice(preset: str, monkeypatch: patch) -> None:
    once = TravellingBlocks._shift

    def twice(self: TravellingBlocks, *block: object, **which: bool) -> object:
        once(self, *block, **which).wait()
        return once(self, *block, **which)

    monkeypatch.setattr(TravellingBlocks, "_shift", twice)
    with pytest.raises(AssertionError):
        executed(four_ranks(preset))


@pytest.mark.parametrize("preset", ["ring", "ring_striped", "double_ring", "usp"])
@pytest.mark.parametrize("is_gradient", [False, True])
def test_threads_report_a_hop_that_brings_zeros(preset: str, is_gradient: bool, monkeypatch: patch) -> None:
    shift = TravellingBlocks._shift

    def zeros(self: TravellingBlocks, *block: object, is_gradient: bool = False) -> Pending:
        pending = shift(self, *block, is_gradient=is_gradient)
        return Pending(torch.zeros_like(pending.wait())) if is_gradient == broken else pending

    broken = is_gradient
    monkeypatch.setattr(TravellingBlocks, "_shift", zeros)
    with pytest.raises(AssertionError, match="dk" if is_gradient else "out"):
        executed(four_ranks(preset))


def test_verify_reports_blocks_that_come_in_another_order_than_their_tiles(monkeypatch: patch) -> None:
    plan, made = four_ranks("ring"), LocalBlocks.__init__

    def exchanged(self: LocalBlocks, sources: tuple[tuple[int, ...], ...]) -> None:
        made(self, tuple((own, *rest[::-1]) for own, *rest in sources))

    monkeypatch.setattr(LocalBlocks, "__init__", exchanged)
    assert wrong_rows(plan) == {"out", "dq", "dk", "dv"}


def test_verify_reports_sinks_that_are_forgotten(monkeypatch: patch) -> None:
    plan, result = four_ranks("ulysses", "cp.steps.attend.sinks=true"), tiled.Forward.result
    monkeypatch.setattr(tiled.Forward, "result", lambda self, sinks=None: result(self))
    assert {"out", "dq", "dk", "dv", "dsinks"} <= wrong_rows(plan)


def test_verify_reports_sinks_that_are_those_of_other_heads(monkeypatch: patch) -> None:
    plan, lowered = four_ranks("ulysses", "cp.steps.attend.sinks=true"), AttendOperation.__init__

    def shifted(self: AttendOperation, ranks: object, blocks: object, sinks: list[tuple[int, ...]]) -> None:
        lowered(self, ranks, blocks, [sinks[i - 1] for i in range(len(sinks))])

    monkeypatch.setattr(AttendOperation, "__init__", shifted)
    assert {"out", "dsinks"} <= wrong_rows(plan)


def test_verify_reports_a_sink_gradient_of_the_wrong_sign(monkeypatch: patch) -> None:
    plan, gradient = four_ranks("ring", "cp.steps.attend.sinks=true"), dense_operation.sink_gradient
    monkeypatch.setattr(dense_operation, "sink_gradient", lambda *given: -gradient(*given))
    assert wrong_rows(plan) == {"dsinks"}


@pytest.mark.parametrize("name", ["kv_latent", "k_rope", "kv_up"])
def test_verify_reports_an_expansion_whose_gradient_is_halved(name: str, monkeypatch: patch) -> None:
    plan, backward = four_ranks("mla_ulysses"), ExpandOperation.backward

    def halved(self: ExpandOperation, grads: Values, saved: Saved, scale: float) -> Moving:
        found = yield from backward(self, grads, saved, scale)
        grads[name] = [g / 2.0 for g in grads[name]]
        return found

    monkeypatch.setattr(ExpandOperation, "backward", halved)
    assert wrong_rows(plan) == {f"d{name}"}


def test_verify_reports_head_groups_that_are_put_together_in_another_order(monkeypatch: patch) -> None:
    plan, joined = four_ranks("ulysses", "cp.head_groups=2"), program._joined
    assert wrong_rows(plan) == set()
    monkeypatch.setattr(program, "_joined", lambda parts, dim: joined(parts[::-1], dim))
    assert {"out", "dq", "dk", "dv"} <= wrong_rows(plan)
