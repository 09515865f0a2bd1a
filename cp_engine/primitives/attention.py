"""Attention: every rank attends with the queries it holds to the keys it holds."""

from dataclasses import dataclass, field, replace

import numpy as np

from cp_engine.attend import TiledAttention, kv_index
from cp_engine.errors import CoverageError, KernelError, Problem
from cp_engine.index_set import whole
from cp_engine.kernels import KERNELS, Call, Kernel, choose
from cp_engine.layout import Layout, cut_by, image
from cp_engine.lower import AttendOperation, Operation
from cp_engine.plan import BYTES, Cost, Plan, PlannedStep, Refused, Shape, State, Step, counts
from cp_engine.redistribute import Target
from cp_engine.tiles import Tiling, tiling
from cp_engine.transfer import Transfer


@dataclass(frozen=True, kw_only=True)
class Dense(Step):
    """Softmax attention: q, k, v -> out in q's layout.

    Args:
        kernel: `auto`, or the name of a kernel.
        rotate: mesh axes around which k and v travel while attention runs.
    """

    kind = "dense"
    kernel: str = field(default="auto", metadata={"allowed": ("auto", *(k.name for k in KERNELS))})
    rotate: tuple[str, ...] = ()

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.rotate

    def infer(self, state: State) -> tuple[State, tuple[Transfer, ...]]:
        q, k, v = (state.layout(t) for t in ("q", "k", "v"))
        if self.rotate:
            raise Refused(
                f"rotate is {', '.join(self.rotate)}, and dense attention does not rotate k and v yet",
                rule="k and v are gathered before attention",
                tries=("{key}.rotate=[]",),
            )
        for rank in range(state.mesh.degree):
            if (k.sequence[rank], k.heads[rank]) != (v.sequence[rank], v.heads[rank]):
                raise Refused(
                    f"k and v are in different layouts at {state.mesh.coordinate(rank)}",
                    rule="every key needs its value on the same rank",
                    kind=CoverageError,
                    rank=rank,
                    shows=("k", "v"),
                )
        self._require_key_heads(state, q, k)
        self._require_coverage(state, q, k)
        layouts = {name: layout for name, layout in state.layouts.items() if name not in ("q", "k", "v")}
        history = {**state.history, "out": state.history.get("q", ())}
        return replace(state, layouts={**layouts, "out": q}, history=history), ()

    def adjoint(self, planned: PlannedStep) -> tuple[Transfer, ...]:
        return ()

    def lower(self, planned: PlannedStep, plan: Plan, target: Target) -> Operation:
        q, k = planned.layout_before("q"), planned.layout_before("k")
        kernel, _ = self.kernel_for(plan.shape, target.device)
        return AttendOperation(
            [
                TiledAttention(
                    tiling=tiling(q.sequence[r], k.sequence[r], plan.mask) if q.heads[r].count else Tiling((), False),
                    kernel=kernel,
                    kv_index=kv_index(q.heads[r], k.heads[r], plan.shape.group_size),
                    wide_kv=bool(plan.wide_gradients & {"k", "v"}),
                )
                for r in target.ranks
            ]
        )

    def kernel_for(self, shape: Shape, device: str) -> tuple[Kernel, str]:
        """The kernel that runs, and why it is that one.

        Raises:
            KernelError: the named kernel cannot do the call.
        """
        call = Call(device=device, dtype=shape.dtype, head_dim=shape.head_dim, v_head_dim=shape.v_head_dim)
        if self.kernel == "auto":
            return choose(KERNELS, call)
        kernel = next(k for k in KERNELS if k.name == self.kernel)
        reason = kernel.refusal(call)
        if reason is not None:
            key = f"cp.steps.{self.name}.kernel"
            rule = ("rule", "a named kernel is used or refused, never replaced")
            raise KernelError(
                [Problem(key=key, what=f"{self.kernel} {reason}", details=(rule,), tries=(f"{key}=auto",))]
            )
        return kernel, "named in the configuration"

    def cost(self, planned: PlannedStep, plan: Plan) -> Cost:
        q, k, shape = planned.layout_before("q"), planned.layout_before("k"), plan.shape
        seen: dict[object, int] = {}
        pairs = []
        for queries, keys, heads in zip(q.sequence, k.sequence, q.heads, strict=True):
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
        return Cost(
            bytes_sent=((0,) * plan.degree, (0,) * plan.degree),
            collectives=(0, 0),
            pairs=tuple(pairs),
            buffer_bytes=tuple(int(b) for b in made),
        )

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

    def _require_coverage(self, state: State, q: Layout, k: Layout) -> None:
        """Every visible pair of each rank's queries is there; keys are held once because sets hold positions once."""
        everything = whole(state.shape.sequence)
        checked: dict[object, tuple[int, int]] = {}
        missing: list[tuple[int, int, int]] = []
        for rank, (queries, keys, heads) in enumerate(zip(q.sequence, k.sequence, q.heads, strict=True)):
            if (queries, keys) not in checked:
                checked[queries, keys] = state.mask.count(queries, keys), state.mask.count(queries, everything)
            there, wanted = checked[queries, keys]
            if there != wanted and heads.count:
                missing.append((rank, there * heads.count, wanted * heads.count))
        if missing:
            raise self._uncovered(state, q, k, missing)

    def _uncovered(self, state: State, q: Layout, k: Layout, missing: list[tuple[int, int, int]]) -> Refused:
        total = state.mask.count(everything := whole(state.shape.sequence), everything) * state.shape.heads
        lost = sum(wanted - there for _, there, wanted in missing)
        details = []
        for i, (rank, _, _) in enumerate(missing[:2]):
            seen = state.mask.needed(q.sequence[rank], everything)
            rest = len(missing) - 2
            more = f"   (and {rest} rank{'s' * (rest != 1)} more)" if i == 1 and rest > 0 else ""
            what = f"queries {q.sequence[rank]} see keys {seen}, and {k.sequence[rank]} are held{more}"
            details.append(("missing" if i == 0 else "", f"at {state.mesh.coordinate(rank)}: {what}"))
        axes = ",".join(cut_by(state.mesh, k.sequence))
        return Refused(
            f"would not see {100 * lost / total:.0f} % of the visible (query, key) pairs: {lost} of {total}",
            rule="every visible pair is computed exactly once",
            details=details,
            tries=(
                f"+collective@cp.steps.{{free}}=all_gather 'cp.steps.{{free}}.axes=[{axes}]' "
                "'cp.steps.{free}.tensors=[k,v]' 'cp.order=[{with}]'",
            ),
            kind=CoverageError,
        )
