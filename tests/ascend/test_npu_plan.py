"""What a plan for Ascend says its operators are told is what they get."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cp_engine.exchange.target import Target
from cp_engine.job import explain
from cp_engine.job.verify import attention
from cp_engine.job.verify import attention_mode as verify_attention
from cp_engine.plan.ir import Plan
from cp_engine.runtime import devices
from cp_engine.runtime.program import Program
from tests.ascend.npu_calls import Recorded
from tests.conftest import Result
from tests.helpers import local, plan_of

SHAPE = replace(verify_attention.TAKEN, sequence=1024, index_heads=8)
NAMES = {
    "select": ["npu_lightning_indexer"],
    "attend": ["npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"],
    "learn": ["npu_sparse_lightning_indexer_grad_kl_loss"],
}


def sparse_steps(plan: Plan, device: str) -> dict[str, dict[str, object]]:
    """The steps of a plan as data that have a sparse kernel."""
    steps = json.loads(json.dumps(explain.data(plan, device)["steps"]))
    return {step["step"]: step for step in steps if step["step"] in NAMES}


def test_operators_get_what_the_plan_says_once_for_each_run() -> None:
    plan = plan_of("dsa", "layout@cp.layout=zigzag", shape=SHAPE, degree=2)
    tensors, _ = attention.inputs_of(plan)
    ranks = [local(plan, {n: x.bfloat16() for n, x in tensors.items()}, rank) for rank in (0, 1)]
    with devices.operators_of(devices.REHEARSAL):
        steps, shown = sparse_steps(plan, devices.REHEARSAL), explain.text(plan, devices.REHEARSAL)
        with Recorded() as recorded:
            program = Program(plan, Target(ranks=(0, 1), device=devices.REHEARSAL, communicator=None))
            results = program.results({n: [x[n] for x in ranks] for n in plan.inputs}, SHAPE.head_dim**-0.5)
            made = [*results["out"], *results["indexer_loss"]]
            torch.autograd.backward(made, [torch.ones_like(x) for x in made])
        schemas = {name: getattr(torch.ops.npu, name).default._schema for names in NAMES.values() for name in names}
    assert {name for name, _ in recorded.calls} == set(schemas)
    for step, names in NAMES.items():
        told, calls = steps[step]["operators"], steps[step]["operator_calls"]
        assert isinstance(told, list) and [text.split()[0] for text in told] == names
        assert calls == {"per_rank": [2, 1]}  # the chunks of rank 1 are neighbours
        lines = (*told, "1..2 calls per rank, one for each run of neighbours")
        assert all(f"{step}: {line}\n" in shown for line in lines)
        for text in told:
            name, layout, *fixed = text.split()
            printed = dict(argument.split("=") for argument in fixed)
            assert len(recorded.of(name)) == 3
            for given in recorded.of(name):
                assert {n: str(given[n]) for n in printed} == printed
                assert {given[n] for n in given if n.startswith("layout")} == {layout}
                told_apart = {
                    a.name
                    for a in schemas[name].arguments
                    if isinstance(given[a.name], int | str) and given[a.name] != a.default_value
                }
                assert told_apart <= set(printed) | {"layout"}  # nothing is told that is not printed


def test_text_names_the_sparse_operators(launch: Callable[..., Result]) -> None:
    result = launch(
        "mode=explain", "cp=dsa", "layout@cp.layout=contiguous", "titan.model.flavor=npu_debugmodel", "launch.device=npu",
        "titan.training.seq_len=1280", "titan.training.local_batch_size=1", "titan.training.mixed_precision_param=bfloat16",
    )  # fmt: skip
    assert result.code == 0, result.out + result.err
    lines = [line.removeprefix("operator").strip() for line in result.out.splitlines() if line.startswith("operator")]
    attending = "attention_mode=2 sparse_block_size=1"
    attend = f"npu_sparse_flash_attention BSND sparse_mode=3 {attending} return_softmax_lse=True"
    gradient = f"npu_sparse_flash_attention_grad BSND sparse_mode=3 {attending}"
    assert lines == [
        "select: npu_lightning_indexer BSND sparse_mode=3 sparse_count=1024",
        f"attend: {attend}",
        f"attend: {gradient}",
        "learn: npu_sparse_lightning_indexer_grad_kl_loss BSND sparse_mode=3",
    ]


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_torch_operations_are_no_operators_of_a_device(device: str) -> None:
    plan = plan_of("dsa", "cp.steps.select.kernel=torch", shape=SHAPE, degree=2)
    with devices.operators_of(device):
        steps, text = sparse_steps(plan, device), explain.text(plan, device)
    assert steps["select"]["operators"] == [] and steps["select"]["kernel"] == "torch"
    assert "select: npu_lightning_indexer" not in text
    assert ("learn: npu_sparse_lightning" in text) == (device == "npu")
