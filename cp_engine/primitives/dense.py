"""Attention: every rank attends with the queries it holds to the keys it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_engine.algebra.layout import Layout, Mesh, cut_by, image, joined
from cp_engine.algebra.shape import BYTES, Shape
from cp_engine.algebra.tensors import counts, heads_per_head
from cp_engine.algebra.tiles import Tiling, in_fewer_calls, tiling_of_blocks
from cp_engine.algebra.transfer import Numbers, Table, Transfer
from cp_engine.errors import CoverageError
from cp_engine.exchange.operation import Operation
from cp_engine.exchange.redistribute import sizes
from cp_engine.exchange.target import Target
from cp_engine.kernels.registry import AUTO, Kernel, KernelRequest, choose, dense_kernels, dense_names, hardware
from cp_engine.kernels.tiled import TiledAttention, kv_index
from cp_engine.plan.facts import TRACED_RANKS, Fact
from cp_engine.plan.fields import axes, choice_of
from cp_engine.plan.ir import Cost, Plan, PlannedStep, Step
from cp_engine.plan.state import Refused, State
from cp_engine.primitives.coverage import require_coverage, require_same_layout
from cp_engine.primitives.dense_operation import AttendOperation, Level, LocalBlocks, TravellingBlocks


@dataclass(frozen=True, kw_only=True)
class Dense(Step):
    """Softmax attention: q, k, v -> out in q's layout.

    Args:
        kernel: `auto`, or the name of a kernel.
        rotate: mesh axes around which k and v travel while attention runs, outermost first.
        sinks: whether the call brings one learned score per head that takes part in the softmax with a value of 0.
    """

    kind = "dense"
    consumes = ("q", "k", "v")
    makes = ("out",)
    kernel: str = choice_of(dense_names, default=AUTO)
    rotate: tuple[str, ...] = axes(default=())
    sinks: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("sinks",) if self.sinks else ()

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.rotate

    def infer(self, state: State) -> tuple[State, tuple[Transfer, ...]]:
        q, k = state.layout("q"), state.layout("k")
        require_same_layout(state, ("k", "v"), "every key needs its value on the same rank")
        self._require_key_heads(state, q, k)
        met = self._met(state, k)  # the keys that a rank's queries meet
        require_coverage(state, q, met, ("k", "v"), "every visible pair is computed exactly once")
        groups = tuple(state.mesh.groups(self.rotate))
        turns = tuple(Transfer(t, k, met, groups, heads_per_head(state.shape, t)) for t in ("k", "v") if self.rotate)
        layouts = {name: layout for name, layout in state.layouts.items() if name not in ("q", "k", "v")}
        history = {**state.history, "out": state.history.get("q", ())}
        return replace(state, layouts={**layouts, "out": q}, history=history), turns

    def adjoint(self, planned: PlannedStep) -> tuple[Transfer, ...]:
        return tuple(t.adjoint for t in planned.transfers)

    def tilings(self, planned: PlannedStep, plan: Plan, kernel: Kernel, ranks: Sequence[int]) -> list[Tiling]:
        """The kernel calls of some ranks."""
        q, k, sources = planned.layout_before("q"), planned.layout_before("k"), self.sources(plan.mesh)
        return [
            in_fewer_calls(
                tiling_of_blocks(q.sequence[r], [k.sequence[s] for s in sources[r]], plan.mask), kernel.limits.joins
            )
            if q.heads[r].count
            else Tiling((), False)
            for r in ranks
        ]

    def lower(self, planned: PlannedStep, plan: Plan, target: Target) -> Operation:
        q, k = planned.layout_before("q"), planned.layout_before("k")
        kernel, _ = self.kernel_for(plan.shape, target.device)
        sources = self.sources(plan.mesh)
        attentions = [
            TiledAttention(
                tiling=tiling,
                kernel=kernel,
                kv_index=kv_index(q.heads[r], k.heads[r], plan.part.group_size),
                wide_kv=bool(plan.wide_gradients & {"k", "v"}),
            )
            for r, tiling in zip(target.ranks, self.tilings(planned, plan, kernel, target.ranks), strict=True)
        ]
        sinks = [tuple(q.heads[r]) for r in target.ranks] if self.sinks else None
        if target.communicator is None or all(len(s) == 1 for s in sources.values()):
            here = {r: i for i, r in enumerate(target.ranks)}
            return AttendOperation(
                attentions, LocalBlocks(tuple(tuple(here[s] for s in sources[r]) for r in here)), sinks
            )
        (rank,) = target.ranks
        group = sorted(next(g for g in planned.transfers[0].groups if rank in g))
        levels = []
        for axis in self.rotate:
            along = next(g for g in plan.mesh.groups((axis,)) if rank in g)
            i = along.index(rank)
            after, before = along[(i + 1) % len(along)], along[i - 1]
            levels.append(Level(len(along), group.index(after), group.index(before)))
        blocks = [sizes(planned.transfers[0], s, k) for s in sources[rank]]
        return AttendOperation(
            attentions, TravellingBlocks(target.communicator.channel(tuple(group)), levels, blocks), sinks
        )

    def sources(self, mesh: Mesh) -> dict[int, tuple[int, ...]]:
        """Per rank, the ranks whose keys it meets, in order: at hop i the neighbour i hops before, axis inside axis."""
        found: dict[int, tuple[int, ...]] = {r: (r,) for r in range(mesh.degree)}
        for axis in reversed(self.rotate):
            inner = dict(found)
            for group in mesh.groups((axis,)):
                for i, rank in enumerate(group):
                    found[rank] = tuple(s for hop in range(len(group)) for s in inner[group[i - hop]])
        return found

    def kernel_for(self, shape: Shape, device: str) -> tuple[Kernel, str]:
        """The kernel that runs, and why it is that one.

        Raises:
            KernelError: the named kernel cannot do the call.
        """
        call = KernelRequest(
            device=device,
            dtype=shape.dtype,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            hardware=hardware(device),
        )
        return choose(dense_kernels(), call, self.kernel, f"cp.steps.{self.name}.kernel")

    def cost(self, planned: PlannedStep, plan: Plan) -> Cost:
        q, k, shape = planned.layout_before("q"), planned.layout_before("k"), plan.part
        met = planned.transfers[0].after if planned.transfers else k
        seen: dict[object, int] = {}
        pairs = []
        for queries, keys, heads in zip(q.sequence, met.sequence, q.heads, strict=True):
            if (queries, keys) not in seen:
                seen[queries, keys] = plan.mask.count(queries, keys)
            pairs.append(seen[queries, keys] * heads.count * shape.batch)
        lse = np.array(
            [
                s.count * h.count * shape.batch * max(4, BYTES[shape.dtype])
                for s, h in zip(q.sequence, q.heads, strict=True)
            ]
        )
        made = counts(q, shape, "out") * BYTES[shape.dtype] + lse
        forward, backward = self.links(planned, plan)
        hops = len(self.sources(plan.mesh)[0]) - 1
        if hops:  # the block that is attended to and the one that arrives
            made = made + 2 * _largest(planned, plan)
        return Cost(
            bytes_sent=(_ints(forward.sum(1)), _ints(backward.sum(1))),
            collectives=(hops, 2 * hops),
            pairs=tuple(pairs),
            buffer_bytes=_ints(made),
        )

    def facts(self, planned: PlannedStep, plan: Plan, cost: Cost, device: str) -> Sequence[Fact]:
        kernel, reason = self.kernel_for(plan.shape, device)
        tilings = (
            self.tilings(planned, plan, kernel, range(min(plan.degree, TRACED_RANKS))) if kernel.limits.describe else []
        )
        operators = kernel.limits.lines(tilings)
        data: dict[str, object] = {"kernel": kernel.name, "kernel_reason": reason, "operators": operators}
        facts = [
            Fact(label="kernel", text=f"{kernel.name} ({reason}){', with sinks' if self.sinks else ''}", data=data)
        ]
        facts += [Fact(label="operator", text=line) for line in operators]
        if cost.collectives[0]:
            n, m = (c * plan.head_groups for c in cost.collectives)
            hops = f"{n} hop{'s' * (n != 1)} around {' and '.join(self.rotate)}"
            how = f"{hops} while blocks are attended to; {m} backward, with gradients"
            facts.append(Fact(label="rotation", text=how, data={"rotates": list(self.rotate)}, is_traffic=True))
        elif self.rotate:
            facts.append(Fact(label="", text="", data={"rotates": list(self.rotate)}))
        return facts

    def links(self, planned: PlannedStep, plan: Plan) -> tuple[Table, Table]:
        size = BYTES[plan.shape.dtype]
        wide = 4 if plan.wide_gradients & {"k", "v"} else size
        blocks, gradients = (
            np.zeros((plan.degree, plan.degree), dtype=np.int64),
            np.zeros((plan.degree, plan.degree), dtype=np.int64),
        )
        if self.rotate:
            elements = _elements(planned, plan)
            along = {
                a: {r: g[(i + 1) % len(g)] for g in plan.mesh.groups((a,)) for i, r in enumerate(g)}
                for a in self.rotate
            }
            for rank, sources in self.sources(plan.mesh).items():
                turn = len(sources)
                for axis in self.rotate:
                    hops, after = plan.mesh.size((axis,)), along[axis][rank]
                    turn //= hops
                    # the block of a hop is the one that the rank attends to first in that turn of the axes inside
                    held = elements[list(sources[::turn])].reshape(-1, hops)
                    blocks[rank, after] += held[:, :-1].sum()
                    gradients[rank, after] += held[:, 1:].sum()
        return blocks * size, blocks * size + gradients * wide

    def _require_key_heads(self, state: State, q: Layout, k: Layout) -> None:
        group = state.shape.group_size
        for rank, (heads, served) in enumerate(zip(q.heads, k.heads, strict=True)):
            needed, held = image(heads, group), image(served, group)
            if needed.count_common(held) != needed.count:
                raise Refused(
                    f"q heads {heads} at {state.mesh.coordinate(rank)} need kv heads {needed}, and k holds {held}",
                    rule="the key head that a query head needs is on its rank",
                    kind=CoverageError,
                    rank=rank,
                    shows=("q", "k"),
                )

    def _met(self, state: State, k: Layout) -> Layout:
        """The keys that go past each rank: those of its group, which all hold different ones, for the same heads."""
        if not self.rotate:
            return k
        for group in state.mesh.groups(self.rotate):
            for rank in group:
                if k.heads[rank] != k.heads[group[0]]:
                    fine = [a for a in self.rotate if a not in cut_by(state.mesh, k.heads)]
                    raise Refused(
                        f"k holds heads {k.heads[group[0]]} at {state.mesh.coordinate(group[0])} and {k.heads[rank]} "
                        f"at {state.mesh.coordinate(rank)}",
                        rule="keys that go round an axis serve the same heads everywhere along it",
                        tries=(f"'{{key}}.rotate=[{','.join(fine)}]'",),
                        kind=CoverageError,
                        rank=rank,
                        shows=("q", "k"),
                    )
        try:
            return k.replaced("sequence", joined(state.mesh, k.sequence, self.rotate))
        except ValueError as error:
            uncut = [axis for axis in self.rotate if axis not in cut_by(state.mesh, k.sequence)]
            what = f"keys would come round more than once along {', '.join(self.rotate)}: {error}"
            if uncut:
                size = state.mesh.size(uncut)
                what = f"every rank along {', '.join(uncut)} holds the same keys; going round would count each {size} times"
            rest = ",".join(axis for axis in self.rotate if axis not in uncut)
            raise Refused(
                what,
                rule="an axis that keys go round must cut their sequence before",
                tries=(f"'{{key}}.rotate=[{rest}]'",) if uncut else (),
                kind=CoverageError,
            ) from None


def _largest(planned: PlannedStep, plan: Plan) -> Numbers:
    """Bytes of the largest block of k and v that goes round, for each rank."""
    return np.full(plan.degree, int(_elements(planned, plan).max()) * BYTES[plan.shape.dtype], dtype=np.int64)


def _elements(planned: PlannedStep, plan: Plan) -> Numbers:
    """Elements of k and v that each rank holds before it attends."""
    k, v = (counts(planned.layout_before(t), plan.part, t) for t in ("k", "v"))
    return k + v


def _ints(values: Numbers) -> tuple[int, ...]:
    return tuple(int(v) for v in values)
