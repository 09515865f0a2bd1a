"""Verify: a composition against dense float64 attention, out and gradients, and whether token 0 reaches the last token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_engine import reference
from cp_engine.errors import ConfigError, Problem
from cp_engine.index_set import IndexSet
from cp_engine.lower import Program
from cp_engine.plan import Plan, Shape
from cp_engine.redistribute import Target

BOUND = 1e-12
"""Largest absolute error in float64 for inputs of unit variance: some thousand roundings of 1e-16 and no wrong pair."""

LONGEST = 4096
"""Longest sequence in tokens: the reference builds scores of heads x sequence x sequence elements."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], dict[str, Tensor]]
"""(q, k, v, dout), whole and in float64 -> out, dq, dk, dv of the local ranks' tokens, put together along dim 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result.

    Args:
        name: what was compared.
        error: largest absolute difference, or for `influence` the change of the last token.
        bound: what it is compared with.
        is_good: whether it is within the bound.
    """

    name: str
    error: float
    bound: float
    is_good: bool


def inputs(shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a random upstream gradient in float64; equal on every rank that asks."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (shape.heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.v_head_dim),
        (shape.heads, shape.v_head_dim),
    )
    q, k, v, dout = (
        torch.randn(shape.batch, heads, shape.sequence, width, generator=generator, dtype=torch.float64)
        for heads, width in sizes
    )
    return q, k, v, dout


def compare(attend: Attend, held: Sequence[IndexSet], shape: Shape, mask: Mapping[str, object]) -> list[Row]:
    """Runs an attention and the reference on the same inputs.

    Args:
        attend: what is tested.
        held: the positions of its local ranks, in the order in which it returns them.
        shape: global sizes; computed in float64 whatever dtype it names.
        mask: what queries may see, as configuration.

    Returns:
        Rows for out, dq, dk, dv and, where the mask lets token 0 be seen by the last one, `influence`.
    """
    q, k, v, dout = inputs(shape)
    seen, scale = reference.visible(mask, shape.sequence), shape.head_dim**-0.5
    expected = reference.gradients(q, k, v, dout, seen, scale)
    found = attend(q, k, v, dout)
    positions = torch.tensor([p for s in held for p in s], dtype=torch.long)
    rows = []
    for name, whole in expected.items():
        wanted = whole[:, :, positions]
        fits = found[name].shape == wanted.shape
        error = (
            float((found[name] - wanted).abs().max()) if fits and wanted.numel() else (0.0 if fits else float("inf"))
        )
        rows.append(Row(name=name, error=error, bound=BOUND, is_good=error <= BOUND))
    if bool(seen[-1, 0]):
        k[:, :, 0], v[:, :, 0] = k[:, :, 0] + 1.0, v[:, :, 0] + 1.0
        last = (positions == shape.sequence - 1).nonzero().flatten()
        change = (attend(q, k, v, dout)["out"][:, :, last] - found["out"][:, :, last]).abs()
        moved = float(change.max()) if change.numel() else float("inf")  # another rank holds the last token
        rows.append(Row(name="influence", error=moved, bound=BOUND, is_good=moved > BOUND))
    return rows


def in_one_process(plan: Plan, mask: Mapping[str, object], device: str = "cpu") -> list[Row]:
    """Verifies a plan with all of its ranks in this process.

    Args:
        plan: what to verify; its dtype is replaced by float64.
        mask: the configuration that the plan's mask came from, read independently by the reference.
        device: whose kernels run; tensors stay on cpu.

    Returns:
        The rows of `compare`.
    """
    plan = replace(plan, shape=replace(plan.shape, dtype="float64"))
    program = Program(plan, Target(ranks=tuple(range(plan.degree)), device=device, communicator=None))
    held = plan.entry.sequence

    def attend(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
        index = [torch.tensor(list(s), dtype=torch.long) for s in held]
        local = [[x[:, :, i].requires_grad_() for i in index] for x in (q, k, v)]
        outs = program(local[0], local[1], local[2], plan.shape.head_dim**-0.5)
        flat = torch.autograd.grad(outs, [x for xs in local for x in xs], [dout[:, :, i] for i in index])
        n = plan.degree
        parts = {"out": outs, "dq": flat[:n], "dk": flat[n : 2 * n], "dv": flat[2 * n :]}
        return {name: torch.cat([x.detach() for x in xs], 2) for name, xs in parts.items()}

    return compare(attend, held, plan.shape, mask)


def check_length(plan: Plan) -> None:
    """Refuses a sequence for which the reference would not fit; raises ConfigError."""
    if plan.shape.sequence > LONGEST:
        what = f"is {plan.shape.sequence}, and the dense reference stops at {LONGEST}"
        raise ConfigError(
            [Problem(key="shape.sequence", what=what, tries=(f"shape.sequence={LONGEST}", "shape.sequence=257"))]
        )
