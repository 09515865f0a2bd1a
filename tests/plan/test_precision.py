"""bfloat16 on 8 ranks at sequence 4096: no further from float64 than one kernel call on one rank."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cp_engine.exchange.target import Target
from cp_engine.job.verify.attention import inputs_of
from cp_engine.plan.ir import Plan
from cp_engine.runtime.program import Program
from tests.helpers import PRESETS, mesh_for, plan_of, small

SHAPE = small(sequence=4096, heads=8, kv_heads=8, head_dim=32, dtype="bfloat16")
LATENT = replace(SHAPE, latent_dim=48, rope_dim=8)
FACTOR = 1.3


def results(plan: Plan, tensors: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    """out and the gradients of all inputs of a plan, in its dtype, with all ranks in this process."""
    dtype = getattr(torch, plan.shape.dtype)
    program = Program(plan, Target(ranks=tuple(range(plan.degree)), device="cpu", communicator=None))
    index = [torch.tensor(list(held)) for held in plan.entry.sequence]
    local = {n: [tensors[n][:, :, i].to(dtype).requires_grad_() for i in index] for n in plan.inputs}
    whole = {n: tensors[n].to(dtype).requires_grad_() for n in plan.parameters}
    outs = program.run({**local, **{n: [x] * plan.degree for n, x in whole.items()}}, plan.shape.head_dim**-0.5)
    leaves = [*(x for xs in local.values() for x in xs), *whole.values()]
    grads = iter(torch.autograd.grad(outs, leaves, [dout[:, :, i].to(dtype) for i in index]))
    back = torch.cat(index).argsort()
    found = {f"d{n}": torch.cat([next(grads) for _ in index], 2)[:, :, back] for n in local}
    found.update({f"d{n}": next(grads) for n in whole})
    return {"out": torch.cat([x.detach() for x in outs], 2)[:, :, back], **found}


SHORT = ("ulysses", "ring_zigzag", "mla_ulysses")
"""By default one that exchanges heads, one that merges parts, one that expands a latent; the others with -m long."""


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a half type can hold, in float64: the error of the inputs is nobody's."""
    return {n: x.bfloat16().double() for n, x in tensors.items()}


@pytest.mark.parametrize(
    "preset", [p if p in SHORT else pytest.param(p, marks=pytest.mark.long) for p in PRESETS if p != "none"]
)
def test_half_types_on_eight_ranks_lose_no_more_than_one_kernel_call(preset: str) -> None:
    shape = LATENT if preset.startswith("mla") else SHAPE
    plan = plan_of(preset, *mesh_for(preset, 8), shape=shape)
    tensors, dout = inputs_of(plan)
    tensors, dout = rounded(tensors), dout.bfloat16().double()
    alone = plan_of(preset, *mesh_for(preset, 1), shape=shape)
    exact = results(replace(alone, shape=replace(alone.shape, dtype="float64")), tensors, dout)
    one, many = results(alone, tensors, dout), results(plan, tensors, dout)
    for name, wanted in exact.items():
        by_one, by_many = ((x[name].double() - wanted).norm() / wanted.norm() for x in (one, many))
        assert by_many <= FACTOR * by_one, f"{name}: {by_many:.2e} on 8 ranks, {by_one:.2e} on one"
