"""What the steps of sparse attention share: their kernel, and what they ask of layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.layout import Layout, cut_by, image
from cp_engine.algebra.tensors import heads_per_head
from cp_engine.errors import CoverageError
from cp_engine.exchange.target import Target
from cp_engine.kernels.registry import AUTO, choose, sparse_kernels, sparse_names
from cp_engine.kernels.sparse.npu import SparseCall
from cp_engine.kernels.sparse.table import SparseKernel
from cp_engine.kernels.sparse.visibility import Sight, seen_keys
from cp_engine.plan.facts import Fact, in_units, span
from cp_engine.plan.fields import choice_of
from cp_engine.plan.ir import Cost, Plan, PlannedStep, Step
from cp_engine.plan.state import Refused, State


@dataclass(frozen=True, kw_only=True)
class SparseStep(Step):
    """A step with a kernel of sparse attention.

    Args:
        kernel: `auto`, or the name of a kernel.
    """

    work: ClassVar[str]
    """What its kernel does in it: `select`, `attend` or `learn`."""
    sees: ClassVar[tuple[str, str]]
    """The tensors whose positions are the queries and keys of that work."""
    kernel: str = choice_of(sparse_names, default=AUTO)

    def describe(self, planned: PlannedStep, plan: Plan, device: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """What a device's own operators are told, and how often each is called per rank, in each pass that needs it."""
        kernel, _ = self.kernel_for(plan, device)
        target = Target(ranks=tuple(range(plan.degree)), device=device, communicator=None)
        calls = (kernel.calls(sight) for sight in sights(planned, *self.sees, plan, target))
        return kernel.describe(self.work, plan.shape.selected), tuple(calls)

    def facts(self, planned: PlannedStep, plan: Plan, cost: Cost, device: str) -> Sequence[Fact]:
        facts = list[Fact]()
        if device != "cpu" or self.kernel != "auto":  # there was a choice
            kernel, reason = self.kernel_for(plan, device)
            operators, calls = self.describe(planned, plan, device)
            data: dict[str, object] = {"kernel": kernel.name, "kernel_reason": reason, "operators": list(operators)}
            data["operator_calls"] = {"per_rank": list(calls)}
            facts.append(Fact(label="kernel", text=f"{kernel.name} ({reason})", data=data))
            facts += [Fact(label="operator", text=operator) for operator in operators]
            if max(calls, default=1) > 1:
                how = f"{span(calls)} calls per rank, one for each run of neighbours"
                facts.append(Fact(label="operator", text=how))
        if (beside := self.beside(planned, plan, device)) is not None:
            how = f"{beside[0]} over {plan.shape.head_ranks} tensor-parallel ranks, {in_units(beside[1])} per rank"
            facts.append(Fact(label="heads", text=f"{how}, which is not in sent"))
        if cost.collectives[0]:
            n, m = (c * plan.head_groups for c in cost.collectives)
            how = f"{n} forward, {m} backward (what the ranks' heads attend to, summed)"
            facts.append(Fact(label="exchange", text=how, is_traffic=True))
        return facts

    def beside(self, planned: PlannedStep, plan: Plan, device: str) -> tuple[str, int] | None:
        """What goes between ranks with other heads of the same queries, and bytes that leave each for it; None where nothing does."""
        return None

    def kernel_for(self, plan: Plan, device: str) -> tuple[SparseKernel, str]:
        """The kernel that runs, and why it is that one.

        Raises:
            KernelError: the named kernel cannot do the call.
        """
        return choose(sparse_kernels(), call_of(plan, device), self.kernel, f"cp.steps.{self.name}.kernel")


def call_of(plan: Plan, device: str) -> SparseCall:
    """What the kernels of a plan's sparse steps are asked for; one call, so that all take the same kernel where they can."""
    layouts = [(s.layout_before(t)) for s in plan.steps if isinstance(s.step, SparseStep) for t in s.step.uses[:1]]
    held = [x for layout in layouts for x in layout.sequence]
    sums = any(s.step.losses and s.transfers for s in plan.steps)
    learning = [s for s in plan.steps if s.step.losses]
    pairs = (("q", "q_index"), ("kv_latent", "k_index"))
    same = all(s.layout_before(a).sequence == s.layout_before(b).sequence for s in learning for a, b in pairs)
    return SparseCall(
        device=device,
        shape=plan.shape,
        mask=plan.mask.kind,
        local_sequence=max(x.count for x in held),
        has_runs=all(run.step == 1 or run.count == 1 for x in held for run in x.runs),
        has_all_heads=same and not sums,
    )


def require_absorbed(state: State) -> None:
    """The call is that of multi-head latent attention in absorbed form."""
    shape = state.shape
    if shape.kv_heads != 1:
        raise Refused(
            f"there are {shape.kv_heads} kv heads",
            rule="sparse attention has one key head, the latent, which serves all query heads",
            tries=("shape.kv_heads=1",),
        )
    sizes = (shape.latent_dim + shape.rope_dim, shape.latent_dim)
    if (shape.head_dim, shape.v_head_dim) != sizes:
        raise Refused(
            f"head_dim is {shape.head_dim}|{shape.v_head_dim}, and the latent has {shape.latent_dim} + {shape.rope_dim}",
            rule="in absorbed form q is as wide as the latent with the rotary key, and out as wide as the latent",
            tries=(f"shape.head_dim={sizes[0]} shape.v_head_dim={sizes[1]}",),
        )


def require_key(state: State, queries: str, keys: str) -> None:
    """A rank with queries has the keys' one head."""
    q, k = state.layout(queries), state.layout(keys)
    for rank, (here, there) in enumerate(zip(q.heads, k.heads, strict=True)):
        if here.count and not there.count:
            raise Refused(
                f"{queries} at {state.mesh.coordinate(rank)} has no {keys} beside it",
                rule=f"{keys} has one head, which every rank with queries holds whole",
                kind=CoverageError,
                rank=rank,
                shows=(queries, keys),
            )


def require_selection(state: State, q: Layout, topk: Layout) -> None:
    """Every query has its selection on its rank, row by row."""
    for rank in range(state.mesh.degree):
        has_queries = q.heads[rank].count and q.sequence[rank].count
        if has_queries and (topk.sequence[rank] != q.sequence[rank] or not topk.heads[rank].count):
            raise Refused(
                f"the selection at {state.mesh.coordinate(rank)} is for queries {topk.sequence[rank]}, "
                f"and q holds {q.sequence[rank]}",
                rule="every query has its selected keys on its rank",
                tries=gathering(state, topk, "topk"),
                kind=CoverageError,
                rank=rank,
                shows=("q", "topk"),
            )


def gathering(state: State, layout: Layout, tensor: str) -> tuple[str, ...]:
    """A line that would bring a tensor's whole sequence to every rank, where its ranks cut it."""
    axes = ",".join(cut_by(state.mesh, layout.sequence))
    gather = f"+collective@cp.steps.{{free}}=all_gather 'cp.steps.{{free}}.axes=[{axes}]'"
    return (f"{gather} 'cp.steps.{{free}}.tensors=[{tensor}]' 'cp.order=[{{with}}]'",) if axes else ()


def require_once(state: State, q_index: Layout) -> None:
    """Every query's loss is counted on one rank."""
    held = [s for s, h in zip(q_index.sequence, q_index.heads, strict=True) if h.count]
    rows = sum(s.count for s in held)
    if rows != state.shape.sequence:
        raise Refused(
            f"the loss of {state.shape.sequence} queries would be counted for {rows}",
            rule="each query's loss is counted on one rank",
            kind=CoverageError,
            shows=("q_index",),
        )


def sights(planned: PlannedStep, queries: str, keys: str, plan: Plan, target: Target) -> list[Sight]:
    q, k = planned.layout_before(queries), planned.layout_before(keys)
    nothing = IndexSet((), plan.shape.sequence)
    return [Sight(q.sequence[r] if q.heads[r].count else nothing, k.sequence[r], plan.mask) for r in target.ranks]


def triples(planned: PlannedStep, queries: str, plan: Plan, most: int) -> tuple[int, ...]:
    """How many (head, query, key) triples each rank computes where a query has at most so many of the keys that it sees."""
    layout, group = planned.layout_before(queries), heads_per_head(plan.part, queries)
    seen = {s: int(np.minimum(seen_keys(s, plan.mask), most).sum()) for s in dict.fromkeys(layout.sequence)}
    held = zip(layout.sequence, layout.heads, strict=True)
    return tuple(seen[s] * image(h, group).count * plan.part.batch for s, h in held)


def cost(plan: Plan, made: object) -> Cost:
    nothing = (0,) * plan.degree
    return Cost(
        bytes_sent=(nothing, nothing),
        collectives=(0, 0),
        pairs=nothing,
        buffer_bytes=tuple(int(b) for b in np.asarray(made)),
    )
