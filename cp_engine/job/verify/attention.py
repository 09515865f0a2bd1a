"""Verify: a composition against dense float64 attention, out and gradients, and whether token 0 reaches the last token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.shape import Shape
from cp_engine.algebra.tensors import ROWS, parameter, size_of
from cp_engine.errors import ConfigError, Problem
from cp_engine.exchange.target import Target
from cp_engine.job.verify import reference
from cp_engine.plan.ir import Plan
from cp_engine.runtime.devices import of_tensors
from cp_engine.runtime.program import Program
from cp_engine.runtime.sparse_attention import plan_alone

BOUND = 1e-12
"""Largest absolute error in float64 for inputs of unit variance: some thousand roundings of 1e-16 and no wrong pair."""

SINGLE_BOUND = 1e-5
"""The same in float32."""

ROUNDINGS = 2.0
"""Of every element to a half type, at most: partial results are rounded before they are added, and a gradient before it is scaled."""

LONGEST = 4096
"""Longest sequence in tokens: the reference builds scores of heads x sequence x sequence elements."""

Attend = Callable[[Mapping[str, Tensor], Tensor], dict[str, Tensor]]
"""(inputs, dout), whole and in float64 -> out, the sum of each loss over all ranks, `topk` where keys are selected, and the gradient
`d` + name of every input: of tensors the local ranks' tokens, put together along dim 2, of parameters the sum over all ranks."""

DLOSS = 0.7
"""The gradient of a loss."""


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


def inputs_of(plan: Plan, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Every input of a plan, whole and in float64, and a random upstream gradient; equal on every rank that asks.

    Args:
        plan: whose tensors and parameters are made.
        seed: of the random numbers.

    Returns:
        Tensors [B, heads, S, width] and parameters by name, and dout [B, H, S, Dv].
    """
    shape = plan.shape
    q, k, v, dout = inputs(shape, seed)
    made = {"q": q, "k": k, "v": v}
    generator = torch.Generator().manual_seed(seed + 1)
    listed = dict.fromkeys(
        (*(r.name for r in ROWS), *plan.inputs)
    )  # the same numbers in whatever order a plan takes them
    sizes = {n: size_of(shape, n, shape.sequence) for n in listed if n in plan.inputs and n not in made}
    parameters = [parameter(name) for name in plan.parameters]
    for name, size, scale in (
        *((n, size, 1.0) for n, size in sizes.items()),
        *((p.name, p.size(shape), p.scale(shape)) for p in parameters),
    ):
        made[name] = torch.randn(size, generator=generator, dtype=torch.float64) * scale
    return {name: made[name] for name in (*plan.inputs, *plan.parameters)}, dout


def selecting(plan: Plan) -> tuple[IndexSet, ...]:
    """Per rank, the queries for which it selects keys, in the order of `topk` as the selecting step leaves it."""
    step = next(s for s in plan.steps if "topk" in s.step.makes)
    return step.layout_after("topk").sequence


def compare(
    attend: Attend, ranks: Sequence[int], plan: Plan, mask: Mapping[str, object], dtype: str = "float64"
) -> list[Row]:
    """Runs an attention and the reference on the same inputs.

    Args:
        attend: what is tested.
        ranks: its local ranks, in the order in which it returns their tokens.
        plan: of what is tested; computed in float64 whatever dtype it names.
        mask: what queries may see, as configuration.
        dtype: what it computes in; the reference gets the same numbers, and computes in float64.

    Returns:
        Rows for out, the gradient of every input and, where the mask lets token 0 be seen by the last one, `influence`.
    """
    shape = plan.shape
    tensors, dout = inputs_of(plan)
    tensors = {n: x.to(getattr(torch, dtype)).double() for n, x in tensors.items()}
    bound = BOUND if dtype == "float64" else SINGLE_BOUND
    dout = dout.to(getattr(torch, dtype)).double()
    seen, scale = reference.visible(mask, shape.sequence), shape.head_dim**-0.5
    expected = reference.gradients_of(tensors, dout, seen, scale, shape.topk, DLOSS if plan.losses else 0.0)
    expected = {n: x for n, x in expected.items() if n != "indexer_loss" or n in plan.losses}
    found = attend(tensors, dout)
    positions = torch.tensor([p for r in ranks for p in plan.entry.sequence[r]], dtype=torch.long)
    rows = []
    for name, whole in expected.items():
        wanted = whole if name[1:] in plan.parameters or name in plan.losses else whole[:, :, positions]
        fits = found[name].shape == wanted.shape
        error = (
            float((found[name] - wanted).abs().max()) if fits and wanted.numel() else (0.0 if fits else float("inf"))
        )
        if name in plan.losses:  # a sum over all queries
            error /= max(1.0, float(wanted))
        rows.append(Row(name=name, error=error, bound=bound, is_good=error <= bound))
    if "topk" in found:
        selected = torch.tensor([p for r in ranks for p in selecting(plan)[r]], dtype=torch.long)
        chosen = reference.selection(tensors, seen, shape.topk)[:, selected]
        mine = torch.zeros(*chosen.shape[:2], shape.sequence + 1, dtype=torch.bool)
        mine.scatter_(2, found["topk"][:, 0].long() % (shape.sequence + 1), True)  # -1 is the last one
        others = float((mine[..., :-1] != chosen).sum())
        rows.append(Row(name="topk", error=others, bound=0.0, is_good=not others))
    if bool(seen[-1, 0]):
        for name in plan.inputs:
            if name[0] != "q":
                tensors[name][:, :, 0] += 1.0
        if "topk" in found and not reference.selection(tensors, seen, shape.topk)[:, -1, 0].all():
            return rows  # the last query does not attend to token 0
        last = (positions == shape.sequence - 1).nonzero().flatten()
        change = (attend(tensors, dout)["out"][:, :, last] - found["out"][:, :, last]).abs()
        moved = float(change.max()) if change.numel() else float("inf")  # another rank holds the last token
        rows.append(Row(name="influence", error=moved, bound=bound, is_good=moved > bound))
    return rows


def in_one_process(plan: Plan, mask: Mapping[str, object], device: str = "cpu", dtype: str = "float64") -> list[Row]:
    """Verifies a plan with all of its ranks in this process.

    Args:
        plan: what to verify; its dtype is replaced.
        mask: the configuration that the plan's mask came from, read independently by the reference.
        device: whose kernels run; the reference stays on cpu.
        dtype: what they compute in.

    Returns:
        The rows of `compare`.
    """
    plan = replace(plan, shape=replace(plan.shape, dtype=dtype))
    return compare(runner(plan, device), range(plan.degree), plan, mask, dtype)


def against_torch(plan: Plan, device: str) -> list[Row]:
    """Compares all ranks of a plan of sparse attention, in this process and in the plan's dtype, with one rank by torch operations.

    Both get the same numbers. The other side computes in float64, by `cp_engine.kernels.sparse.torch_ops`, and shares no arithmetic with a
    device.

    Args:
        plan: what to verify.
        device: whose kernels run.

    Returns:
        The rows of `differences`.
    """
    tensors, dout = inputs_of(plan)
    kind = getattr(torch, plan.shape.dtype)
    given = {n: x.to(kind).double() for n, x in tensors.items()}, dout.to(kind).double()
    return differences(plan, runner(plan, device)(*given), by_torch(plan)(*given))


def by_torch(plan: Plan) -> Attend:
    """The same sparse attention on one rank, in float64."""
    return runner(plan_alone(replace(plan.shape, dtype="float64")), "cpu")


def differences(plan: Plan, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[Row]:
    """Compares what the ranks of a plan give with what one rank gives.

    Args:
        plan: of what is tested.
        found: of its ranks, put together along dim 2.
        wanted: of one rank, in the order of the sequence.

    Returns:
        Rows with the largest difference of a row of a tensor, of a gradient of queries that of a head; for losses the difference
        relative to the loss, for `topk` the number of keys that only one of both selects.
    """
    order = torch.tensor([p for s in plan.entry.sequence for p in s])
    bound = ROUNDINGS * torch.finfo(getattr(torch, plan.shape.dtype)).eps / 2
    rows = []
    for name, whole in wanted.items():
        if name == "topk":
            mine, theirs = (x.sort(-1).values for x in (found[name], whole[:, :, order]))
            error, most = float((mine != theirs).sum()), 0.0
        elif name in plan.losses:  # a sum in float32 of what is computed in it
            error, most = float((found[name] - whole).abs() / whole.abs()), SINGLE_BOUND
        else:  # a query that sees few keys has a gradient near zero: what is left of larger numbers, out among them, that were rounded
            dims = (2, 3) if name in ("dq", "dq_index", "dw_index") else (3,)
            error, most = block_error(found[name], whole[:, :, order], dims), bound
        rows.append(Row(name=name, error=error, bound=most, is_good=error <= most))
    return rows


def block_error(found: Tensor, wanted: Tensor, dims: tuple[int, ...]) -> float:
    """The largest difference of a block, by norm, relative to the norm of that block and of a block in the mean of squares.

    One wrong block among many is as large as if all were wrong.

    Args:
        found, wanted: of one size.
        dims: of a block.
    """
    if found.shape != wanted.shape:
        return float("inf")
    norms, apart = wanted.norm(dim=dims), (found - wanted).norm(dim=dims)
    return float((apart / torch.maximum(norms, norms.square().mean().sqrt())).max())


def runner(plan: Plan, device: str) -> Attend:
    """All ranks of a plan in this process, in the plan's dtype."""
    program = Program(plan, Target(ranks=tuple(range(plan.degree)), device=device, communicator=None))
    held, place, kind = plan.entry.sequence, of_tensors(device), getattr(torch, plan.shape.dtype)

    def attend(tensors: Mapping[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
        tensors, dout = {n: x.to(place, kind) for n, x in tensors.items()}, dout.to(place, kind)
        index = [torch.tensor(list(s), dtype=torch.long, device=place) for s in held]
        local = {n: [x[:, :, i].requires_grad_() for i in index] for n, x in tensors.items() if n in plan.inputs}
        whole = {n: x.clone().requires_grad_() for n, x in tensors.items() if n in plan.parameters}
        given = {**local, **{n: [x] * plan.degree for n, x in whole.items()}}
        results, scale = program.results(given, plan.shape.head_dim**-0.5), plan.shape.head_dim**-0.5
        outs, losses = results["out"], [x for name in plan.losses for x in results[name]]
        leaves = [*(x for xs in local.values() for x in xs), *whole.values()]
        upstream = [*(dout[:, :, i] for i in index), *(torch.full_like(x, DLOSS) for x in losses)]
        grads = iter(torch.autograd.grad([*outs, *losses], leaves, upstream))
        found = {f"d{n}": torch.cat([next(grads) for _ in index], 2) for n in local}
        found.update({f"d{n}": next(grads) for n in whole})
        found["out"] = torch.cat([x.detach() for x in outs], 2)
        found.update({name: torch.stack(results[name]).detach().sum() for name in plan.losses})
        if "q_index" in plan.inputs:
            found["topk"] = torch.cat(program.made("topk", given, scale), 2)
        return {n: x.cpu() if n == "topk" else x.cpu().double() for n, x in found.items()}

    return attend


def check_length(plan: Plan) -> None:
    """Refuses a sequence for which the reference would not fit; raises ConfigError."""
    if plan.shape.sequence > LONGEST:
        what = f"is {plan.shape.sequence}, and the dense reference stops at {LONGEST}"
        raise ConfigError(
            [Problem(key="shape.sequence", what=what, tries=(f"shape.sequence={LONGEST}", "shape.sequence=257"))]
        )
