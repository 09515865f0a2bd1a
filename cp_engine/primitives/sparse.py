"""DeepSeek sparse attention in three steps: an indexer selects keys, attention sees those alone, the indexer learns from it.

    select   q_index, k_index, w_index       -> topk            each query's keys, as global positions
    attend   q, kv_latent, k_rope, topk      -> out, lse        the latent is key and value for every head
    learn    what both had, and lse          -> indexer_loss    KL to the attention over the selected keys

A selection is right only if it was made among all keys that a query can see, and attention only if it holds whatever may have been
selected; both are the same question of coverage that dense attention asks. Positions are global, so tokens may be dealt in any order.
Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

from dataclasses import dataclass, replace

import numpy as np

from cp_engine.algebra.layout import Layout, cut_by, joined
from cp_engine.algebra.tensors import INDEX, counts, element_bytes, heads_per_head
from cp_engine.algebra.transfer import Table, Transfer
from cp_engine.errors import CoverageError
from cp_engine.exchange.operation import Operation
from cp_engine.exchange.redistribute import Redistribution
from cp_engine.exchange.target import Target
from cp_engine.plan.fields import axes
from cp_engine.plan.ir import Cost, Plan, PlannedStep
from cp_engine.plan.state import Refused, State
from cp_engine.primitives.coverage import require_coverage, require_same_layout
from cp_engine.primitives.sparse_operation import Beside, LearnOperation, SelectOperation, SparseOperation
from cp_engine.primitives.sparse_rules import (
    SparseStep,
    cost,
    require_absorbed,
    require_key,
    require_once,
    require_selection,
    sights,
    triples,
)


@dataclass(frozen=True, kw_only=True)
class LightningIndexer(SparseStep):
    """Selects the keys of each query: q_index, k_index, w_index -> topk."""

    kind = "lightning_indexer"
    work, sees = "select", ("q_index", "k_index")
    uses = INDEX
    makes = ("topk",)
    differentiates = INDEX  # with zeros where nothing learns

    def infer(self, state: State) -> tuple[State, tuple[Transfer, ...]]:
        q, k = state.layout("q_index"), state.layout("k_index")
        require_same_layout(state, ("q_index", "w_index"), "a score needs a query and its weights")
        require_key(state, "q_index", "k_index")
        require_coverage(state, q, k, ("k_index",), "a key that the indexer does not see cannot be selected")
        return replace(state, layouts={**state.layouts, "topk": q}), ()

    def adjoint(self, planned: PlannedStep) -> tuple[Transfer, ...]:
        return ()

    def cost(self, planned: PlannedStep, plan: Plan) -> Cost:
        made = counts(planned.layout_after("topk"), plan.part, "topk") * element_bytes(plan.shape, "topk")
        pairs = triples(planned, "q_index", plan, plan.shape.sequence)
        return replace(cost(plan, made), index_pairs=tuple(n * plan.shape.index_heads for n in pairs))

    def lower(self, planned: PlannedStep, plan: Plan, target: Target) -> Operation:
        is_learned = any(s.step.losses for s in plan.steps)
        return SelectOperation(
            sights(planned, *self.sees, plan, target),
            plan.shape.selected,
            is_learned,
            self.kernel_for(plan, target.device)[0],
        )


@dataclass(frozen=True, kw_only=True)
class Sparse(SparseStep):
    """Softmax attention to the selected keys, in absorbed form: q, kv_latent, k_rope, topk -> out in q's layout, and lse."""

    kind = "sparse_attention"
    work, sees = "attend", ("q", "kv_latent")
    uses = ("q", "kv_latent", "k_rope", "topk")
    makes = ("out", "lse")
    differentiates = ("q", "kv_latent", "k_rope")

    def infer(self, state: State) -> tuple[State, tuple[Transfer, ...]]:
        require_absorbed(state)
        if "topk" not in state.layouts:
            raise Refused(
                "no step before it selects keys",
                rule="sparse attention sees the keys that a selection before it named",
                tries=("+attention@cp.steps.{free}=lightning_indexer 'cp.order=[{with}]'",),
            )
        q, latent, _, topk = (state.layout(t) for t in self.uses)
        require_same_layout(
            state, ("kv_latent", "k_rope"), "a key is made of the latent and the rotary key of one token"
        )
        require_key(state, "q", "kv_latent")
        require_selection(state, q, topk)
        require_coverage(state, q, latent, ("kv_latent", "k_rope"), "a key that can be selected is on the query's rank")
        history = {**state.history, "out": state.history.get("q", ())}
        return replace(state, layouts={**state.layouts, "out": q, "lse": q}, history=history), ()

    def adjoint(self, planned: PlannedStep) -> tuple[Transfer, ...]:
        return ()

    def cost(self, planned: PlannedStep, plan: Plan) -> Cost:
        q, shape = planned.layout_before("q"), plan.part
        made = sum(counts(q, shape, t) * element_bytes(plan.shape, t) for t in self.makes)
        return replace(cost(plan, made), pairs=triples(planned, "q", plan, shape.selected))

    def lower(self, planned: PlannedStep, plan: Plan, target: Target) -> Operation:
        return SparseOperation(sights(planned, *self.sees, plan, target), self.kernel_for(plan, target.device)[0])


@dataclass(frozen=True, kw_only=True)
class IndexerLoss(SparseStep):
    """The indexer's loss and its gradients: KL to the attention over the selected keys -> indexer_loss, a sum over queries.

    Args:
        sum: mesh axes that cut q's heads: what each rank's heads attend to is summed over them.
    """

    kind = "indexer_loss"
    work, sees = "learn", ("q_index", "k_index")
    uses = (*INDEX, "q", "kv_latent", "k_rope", "topk", "lse")
    differentiates = INDEX
    losses = ("indexer_loss",)
    sum: tuple[str, ...] = axes(default=())

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.sum

    def infer(self, state: State) -> tuple[State, tuple[Transfer, ...]]:
        if "lse" not in state.layouts:
            raise Refused(
                "no sparse attention before it", rule="the indexer learns from the attention to the keys it selected"
            )
        q, q_index, k_index, latent, topk = (state.layout(t) for t in ("q", "q_index", "k_index", "kv_latent", "topk"))
        require_same_layout(state, ("q_index", "w_index"), "a score needs a query and its weights")
        require_same_layout(state, ("q", "lse"), "the attention of a query is made again from its lse")
        require_same_layout(
            state, ("kv_latent", "k_rope"), "a key is made of the latent and the rotary key of one token"
        )
        require_key(state, "q_index", "k_index")
        require_key(state, "q", "kv_latent")
        require_coverage(state, q, latent, ("kv_latent", "k_rope"), "a key that can be selected is on the query's rank")
        self._require_all_heads(state, q)
        self._require_same_queries(state, q, q_index)
        require_selection(state, q, topk)
        for rank, (held, own) in enumerate(zip(topk.sequence, q_index.sequence, strict=True)):
            there = topk.heads[rank].count and held.count_common(own) == own.count
            if q_index.heads[rank].count and own.count and not there:
                raise Refused(
                    f"the selection at {state.mesh.coordinate(rank)} is for queries {held}, and the indexer's are {own}",
                    rule="the indexer learns for the queries that it selected for",
                    kind=CoverageError,
                    rank=rank,
                    shows=("q_index", "topk"),
                )
        require_coverage(state, q_index, k_index, ("k_index",), "a key that can be selected is on the query's rank")
        require_once(state, q_index)
        if not self.sum:
            return state, ()
        groups = tuple(state.mesh.groups(self.sum))
        return state, (Transfer("target", q_index, q, groups, heads_per_head(state.shape, "target")),)

    def adjoint(self, planned: PlannedStep) -> tuple[Transfer, ...]:
        return ()

    def links(self, planned: PlannedStep, plan: Plan) -> tuple[Table, Table]:
        nothing = np.zeros((plan.degree, plan.degree), dtype=np.int64)
        return sum(
            (plan.sent(t.adjoint, element_bytes(plan.shape, "target")) for t in planned.transfers), nothing
        ), nothing

    def cost(self, planned: PlannedStep, plan: Plan) -> Cost:
        made = sum(counts(planned.layout_before(t), plan.part, t) * element_bytes(plan.shape, t) for t in self.uses[:3])
        if self.sum or plan.shape.head_ranks > 1:
            made = made + counts(planned.layout_before("q"), plan.part, "target") * element_bytes(plan.shape, "target")
        found = cost(plan, made)
        sent = tuple(int(b) for b in self.links(planned, plan)[0].sum(1))
        return replace(found, bytes_sent=(sent, found.bytes_sent[1]), collectives=(int(any(sent)), 0))

    def beside(self, planned: PlannedStep, plan: Plan, device: str) -> tuple[str, int] | None:
        if plan.shape.head_ranks == 1:
            return None
        what, like, moved = "what heads attend to is summed", "q_index", ["target"]
        if self.kernel_for(plan, device)[0].learns_from_heads:
            what, like, moved = "the queries of all heads are gathered", "q", ["q", "lse"]
        sent = sum(counts(planned.layout_before(like), plan.part, t) * element_bytes(plan.shape, t) for t in moved)
        return what, int(np.max(sent)) * (plan.shape.head_ranks - 1)

    def lower(self, planned: PlannedStep, plan: Plan, target: Target) -> Operation:
        exchange = beside = None
        if self.sum:
            exchange = Redistribution([t.adjoint for t in planned.transfers], target, (("target",),))
        if (ranks := plan.shape.head_ranks) > 1:
            assert target.heads is not None, "whoever runs such a plan brings the way to these ranks"
            beside = Beside(target.heads.channel(tuple(range(ranks))))
        return LearnOperation(
            sights(planned, "q", "kv_latent", plan, target),
            sights(planned, *self.sees, plan, target),
            [planned.layout_before("topk").sequence[r] for r in target.ranks],
            exchange,
            beside,
            self.kernel_for(plan, target.device)[0],
        )

    def _require_all_heads(self, state: State, q: Layout) -> None:
        """The heads of a query that are in the plan are on one rank, or on those along `sum`, each once."""
        total = state.shape.heads
        for group in state.mesh.groups(self.sum):
            held = sum(q.heads[r].count for r in group)
            try:
                distinct = joined(state.mesh, q.heads, self.sum)[group[0]].count if self.sum else held
            except ValueError:
                distinct = 0
            if held != total or distinct != total:
                axes = ", ".join(self.sum) or "no axis"
                raise Refused(
                    f"{distinct or held} of {total} heads are on the ranks along {axes} at {state.mesh.coordinate(group[0])}",
                    rule="the target is the attention of all heads, each counted once",
                    tries=(f"'{{key}}.sum=[{','.join(cut_by(state.mesh, q.heads))}]'",),
                    kind=CoverageError,
                    rank=group[0],
                    shows=("q",),
                )

    def _require_same_queries(self, state: State, q: Layout, q_index: Layout) -> None:
        try:
            wanted = joined(state.mesh, q_index.sequence, self.sum) if self.sum else q_index.sequence
        except ValueError as error:
            raise Refused(
                f"the indexer's queries are on several ranks along {', '.join(self.sum)}: {error}",
                rule="each query's loss is counted on one rank",
                kind=CoverageError,
                shows=("q", "q_index"),
            ) from None
        for rank, (a, b) in enumerate(zip(q.sequence, wanted, strict=True)):
            if a != b:
                raise Refused(
                    f"q holds {a} at {state.mesh.coordinate(rank)}, and the indexer's queries {b}",
                    rule="attention and indexer work on the same queries",
                    kind=CoverageError,
                    rank=rank,
                    shows=("q", "q_index"),
                )
