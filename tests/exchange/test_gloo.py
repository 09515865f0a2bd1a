"""The same numbers and bytes on real gloo ranks: whole worlds of 2 and 4, and groups of 2 inside a world of 4."""

from collections.abc import Mapping
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import plan_from_config
from cp_engine.errors import CallError
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.runtime.context import ContextParallel
from tests.helpers import CAUSAL, fitting, local, varied
from tests.on_ranks import SPREAD, Sent, attended, check, check_preset, mesh_of, planned_traffic

DOCUMENTS = {"kind": "document", "starts": [0, 1, 9, 16, 30]}
BLOCKS = {"kind": "both", "of": [{"kind": "block", "size": 12}, {"kind": "window", "left": 5, "right": 0}]}
# heads, sequence, batch, order, mask, head groups, sinks
CASES = [
    ("mha", 31, 1, "contiguous", CAUSAL, 1, False),
    ("gqa 8/2", 32, 3, "zigzag", CAUSAL, 1, False),
    ("gqa 6/3", 257, 1, "striped", CAUSAL, 1, False),
    ("mla", 31, 3, "zigzag", {"kind": "full"}, 1, False),
    ("gqa 6/3", 32, 1, "contiguous", {"kind": "full"}, 1, False),
    ("two heads", 31, 3, "contiguous", CAUSAL, 1, False),  # with four ranks, two have no head and only exchange
    ("mha", 3, 1, "contiguous", CAUSAL, 1, False),  # with four ranks, one has no token
    ("gqa 8/2", 31, 1, "balanced", DOCUMENTS, 2, True),
    ("mla", 64, 1, "zigzag", {"kind": "window", "left": 9, "right": 4}, 2, False),
    ("mqa", 31, 3, "striped", {"kind": "prefix", "length": 7}, 1, True),
    ("gqa 6/3", 31, 1, "reorder to balanced", {**DOCUMENTS, "causal": False, "left": 5}, 3, True),
    (
        "mha",
        30,
        1,
        "reorder to zigzag",
        BLOCKS,
        2,
        False,
    ),
]
KINDS = ("two", "four", "half of four")


def in_turn(*kinds: str) -> list[object]:
    """Every case with every preset, on groups of each kind. By default a pair runs on one of the three kinds, in turn, so that every
    preset and every case meets each kind of group; the others are for -m long."""
    found = []
    for kind, case, (number, preset) in product(kinds, range(len(CASES)), enumerate(SPREAD)):
        marks = () if (case + number) % len(KINDS) == KINDS.index(kind) else pytest.mark.long
        name = "-".join(map(str, (*CASES[case][:4], preset)))
        found.append(pytest.param(kind, case, preset, marks=marks, id=f"{kind}-{name}" if len(kinds) > 1 else name))
    return found


@pytest.mark.parametrize(("ranks", "case", "preset"), in_turn("two", "four"), indirect=["ranks"])
def test_out_gradients_and_bytes_are_those_of_the_plan(ranks, preset, case):
    check(ranks, preset, *CASES[case], degree=len(ranks.processes), turn=case)


MATRIX = (
    pytest.mark.parametrize("heads", ["mha", "gqa 8/2", "gqa 6/3", "mqa", "mla"]),
    pytest.mark.parametrize("sequence", [31, 32, 257]),
    pytest.mark.parametrize("batch", [1, 3]),
    pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "balanced"]),
    pytest.mark.parametrize("preset", SPREAD),
    pytest.mark.long,
)


def whole_matrix(test):
    for mark in MATRIX:
        test = mark(test)
    return test


@whole_matrix
def test_out_gradients_and_bytes_of_the_whole_matrix(ranks, preset, heads, sequence, batch, order):
    check(
        ranks,
        preset,
        heads,
        sequence,
        batch,
        order,
        CAUSAL,
        1,
        False,
        degree=len(ranks.processes),
        turn=sequence + batch,
    )


@whole_matrix
def test_out_gradients_and_bytes_of_the_whole_matrix_in_a_group_of_two(four, preset, heads, sequence, batch, order):
    check(four, preset, heads, sequence, batch, order, CAUSAL, 1, False, degree=2, turn=sequence + batch)


@pytest.mark.parametrize(("kind", "case", "preset"), in_turn("half of four"))
def test_out_and_gradients_in_a_group_of_two_inside_four_ranks(four, kind, case, preset):
    check(four, preset, *CASES[case], degree=2, turn=case)


def test_one_rank_of_a_world_exchanges_nothing(four):
    check(four, "none", "mha", 31, 1, "contiguous", CAUSAL, 1, True, degree=1, turn=0)


def named_axes(cp: Mapping[str, object], shape: Shape, names: tuple[str, str]) -> None:
    plan = plan_from_config(cp, shape=shape, mask="causal")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    engine = ContextParallel(plan, mesh)
    assert engine.rank == mesh.get_local_rank(plan.mesh.axes[0]) * 2 + mesh.get_local_rank(plan.mesh.axes[1])
    tensors, dout = verify.inputs_of(plan)
    mine = local(plan, tensors, engine.rank)
    out = attended(engine, mine, "causal")
    seen, scale = reference.visible(CAUSAL, shape.sequence), shape.head_dim**-0.5
    wanted = reference.gradients_of(tensors, dout, seen, scale)
    grads = torch.autograd.grad(out, list(mine.values()), engine.shard(dout, dim=2))
    for found, name in zip((out.detach(), *grads), ("out", "dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(found, engine.shard(wanted[name], dim=2), rtol=0, atol=1e-12)
    engine.close()


@pytest.mark.parametrize(
    "preset", [pytest.param("usp", marks=pytest.mark.quick), "double_ring", "allgather_in_ulysses"]
)
def test_preset_of_two_axes_takes_a_mesh_with_their_names(four, preset):
    shape = Shape(batch=1, sequence=31, heads=4, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float64")
    cp = varied(preset, 4)
    four.run(named_axes, cp, shape, tuple(cp["axes"]))


def from_each_call(cp: Mapping[str, object], shape: Shape) -> None:
    """Each call's numbers, and the bytes of the plan that is made for its documents alone."""
    degree = dist.get_world_size()
    plan = plan_from_config(cp, shape=shape, mask={"kind": "document"}, world_degree=degree)
    engine = ContextParallel(plan, mesh_of(degree))
    tensors, dout = verify.inputs_of(plan)
    for starts in ([0, 1, 16, 30], [0], [0, 7, 8], [0, 1, 16, 30]):
        mask = {"kind": "document", "starts": starts}
        mine, before = local(plan, tensors, engine.rank), engine.bytes_sent
        out = attended(engine, mine, mask)
        seen = reference.visible(mask, shape.sequence)
        wanted = reference.gradients_of(tensors, dout, seen, shape.head_dim**-0.5)
        grads = torch.autograd.grad(out, list(mine.values()), engine.shard(dout, dim=2))
        for found, name in zip((out.detach(), *grads), ("out", *(f"d{n}" for n in mine)), strict=True):
            if name[1:] not in plan.parameters:
                torch.testing.assert_close(found, engine.shard(wanted[name], dim=2), rtol=0, atol=1e-12)
        alone = planned_traffic(plan_from_config(cp, shape=shape, mask=mask, world_degree=degree), engine.rank)
        assert engine.bytes_sent - before == sum(sent for sent, _ in alone)
    with pytest.raises(CallError, match=r"call\.mask\.starts"):
        attended(engine, mine, {"kind": "document", "starts": [3, 1]})
    engine.close()


def one_of(values: tuple[str, ...]) -> list[object]:
    """Every preset with every value, by default one of them in turn."""
    return [
        pytest.param(value, preset, marks=() if number % len(values) == i else pytest.mark.long, id=f"{preset}-{value}")
        for (i, value), (number, preset) in product(enumerate(values), enumerate(SPREAD))
    ]


@pytest.mark.parametrize(("order", "preset"), one_of(("", "reorder to balanced")))
def test_documents_of_each_call_are_those_that_are_computed(four, preset, order):
    shape = Shape(batch=2, sequence=31, heads=4, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float64")
    four.run(from_each_call, varied(preset, 4, order=order), fitting(preset, shape))


def check_half(cp: Mapping[str, object], shape: Shape, degree: int) -> tuple[list[object], list[object]]:
    plan = plan_from_config(cp, shape=shape, mask="causal", world_degree=degree)
    engine = ContextParallel(plan, mesh_of(degree))
    tensors, dout = verify.inputs_of(plan)
    mine = local(plan, {n: x.to(torch.bfloat16) for n, x in tensors.items()}, engine.rank)
    with Sent() as forward:
        out = attended(engine, mine, "causal")
    with Sent() as backward:
        out.backward(engine.shard(dout.to(torch.bfloat16), dim=2))
    engine.close()
    executed = [(forward.bytes, forward.collectives), (backward.bytes, backward.collectives)]
    assert {out.dtype, *(x.grad.dtype for x in mine.values())} == {torch.bfloat16}
    return executed, planned_traffic(plan, engine.rank)


@pytest.mark.parametrize("preset", SPREAD)
def test_gradients_of_half_types_that_are_summed_travel_in_float32_and_are_planned_so(ranks, preset):
    shape = Shape(batch=2, sequence=33, heads=4, kv_heads=1, head_dim=16, v_head_dim=16, dtype="bfloat16")
    degree = len(ranks.processes)
    for executed, planned in ranks.run(check_half, varied(preset, degree), fitting(preset, shape), degree):
        assert executed == planned


def any_strides(cp: Mapping[str, object], shape: Shape) -> None:
    """Inputs as hosts bring them, and the gradient that a sum sends back (strides 0)."""
    plan = plan_from_config(cp, shape=shape, mask="causal")
    engine = ContextParallel(plan, mesh_of(dist.get_world_size()))
    tensors, dout = verify.inputs_of(plan)
    seen, scale = reference.visible(CAUSAL, shape.sequence), shape.head_dim**-0.5
    wanted = reference.gradients_of(tensors, torch.ones_like(dout), seen, scale)
    for kind in ("transposed", "expanded heads"):
        mine = {n: x.detach() for n, x in local(plan, tensors, engine.rank).items()}
        if kind == "transposed":  # [B, S, H, D] in memory
            mine.update({n: mine[n].transpose(1, 2).contiguous().transpose(1, 2) for n in plan.inputs})
        else:  # one head for all
            mine.update({n: mine[n][:, :1].expand(-1, mine[n].shape[1], -1, -1) for n in plan.inputs})
        mine = {n: x.requires_grad_() for n, x in mine.items()}
        grads = torch.autograd.grad(attended(engine, mine, "causal").sum(), list(mine.values()))
        for found, name in zip(grads, mine, strict=True):
            if kind == "transposed" and name in plan.inputs:
                torch.testing.assert_close(found, engine.shard(wanted[f"d{name}"], dim=2), rtol=0, atol=1e-12)
    engine.close()


@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize(
    ("ranks", "sequence"),
    [
        ("two", 16),
        ("four", 18),
        pytest.param("two", 18, marks=pytest.mark.long),
        pytest.param("four", 16, marks=pytest.mark.long),
    ],
    indirect=["ranks"],
)
def test_inputs_and_gradients_of_any_strides(ranks, preset, sequence):
    shape = Shape(batch=2, sequence=sequence, heads=4, kv_heads=4, head_dim=8, v_head_dim=8, dtype="float64")
    ranks.run(any_strides, varied(preset, len(ranks.processes)), fitting(preset, shape))


def doubled_exchange(cp: Mapping[str, object], shape: Shape) -> list[tuple[str, float]]:
    from cp_engine.exchange.process_group import GroupChannel

    names = ("all_to_all", "all_to_all_even", "all_gather", "shift")
    once = {name: getattr(GroupChannel, name) for name in names}

    def doubled(name: str):
        def twice(self, *arguments):
            once[name](self, *arguments).wait()
            return once[name](self, *arguments)

        return twice

    for name in names:
        setattr(GroupChannel, name, doubled(name))
    try:
        return check_preset(cp, shape, CAUSAL, dist.get_world_size())
    finally:
        for name in names:
            setattr(GroupChannel, name, once[name])


@pytest.mark.parametrize("sequence", [31, pytest.param(32, marks=pytest.mark.long)])
def test_a_doubled_exchange_is_found_by_the_count_though_the_numbers_are_right(four, sequence):
    for preset in SPREAD:
        shape = Shape(batch=1, sequence=sequence, heads=4, kv_heads=4, head_dim=16, v_head_dim=16, dtype="float64")
        for bad in four.run(doubled_exchange, varied(preset, 4), fitting(preset, shape)):
            assert bad and all("executed" in name or "bytes_sent" in name for name, _ in bad)
