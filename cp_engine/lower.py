"""Lower: a plan and the ranks of this process become one differentiable function of q, k and v."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from cp_engine.attend import TiledAttention
from cp_engine.errors import CallError, Problem
from cp_engine.plan import Plan
from cp_engine.redistribute import Redistribution, Target, Values
from cp_engine.transfer import Transfer

Saved = tuple[Tensor, ...]


class Operation(Protocol):
    """A lowered step. It holds no tensors: what backward needs goes through autograd."""

    def forward(self, values: Values, scale: float) -> Saved:
        """Replaces tensors in `values` and returns what backward needs."""

    def backward(self, grads: Values, saved: Saved, scale: float) -> None:
        """Replaces gradients in `grads`, of its outputs by those of its inputs."""


class ExchangeOperation:
    """Transfers forward, their adjoints backward; nothing is saved."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        adjoints: Sequence[Transfer],
        target: Target,
        *,
        is_packed: bool,
        wide: frozenset[str],
    ) -> None:
        names = tuple(t.tensor for t in transfers)
        # in one collective travels what has one dtype: gradients in float32 apart from the others
        by_dtype = (tuple(n for n in names if n in wide), tuple(n for n in names if n not in wide))
        together = (names,) if is_packed else tuple((n,) for n in names)
        apart = tuple(ns for ns in by_dtype if ns) if is_packed else together
        self._forward = Redistribution(transfers, target, together)
        self._backward = Redistribution(adjoints, target, apart)
        self._wide = tuple(n for n in names if n in wide)

    def forward(self, values: Values, scale: float) -> Saved:
        values.update(self._forward(values))
        return ()

    def backward(self, grads: Values, saved: Saved, scale: float) -> None:
        for name in self._wide:  # sums over ranks are made in float32
            grads[name] = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads[name]]
        grads.update(self._backward(grads))


class AttendOperation:
    """Attention of every local rank: q, k, v -> out, with lse kept for backward."""

    def __init__(self, ranks: Sequence[TiledAttention]) -> None:
        self._ranks = tuple(ranks)

    def forward(self, values: Values, scale: float) -> Saved:
        q, k, v = values.pop("q"), values.pop("k"), values.pop("v")
        results = [a.forward(x, y, z, scale) for a, x, y, z in zip(self._ranks, q, k, v, strict=True)]
        values["out"] = [out for out, _ in results]
        return (*q, *k, *v, *values["out"], *(lse for _, lse in results))

    def backward(self, grads: Values, saved: Saved, scale: float) -> None:
        n = len(self._ranks)
        q, k, v, out, lse = (saved[i * n : (i + 1) * n] for i in range(5))
        dout = grads.pop("out")
        parts = [a.backward(*x, scale) for a, *x in zip(self._ranks, dout, q, k, v, out, lse, strict=True)]
        grads["q"], grads["k"], grads["v"] = ([p[i] for p in parts] for i in range(3))


class Program:
    """A plan, executable on some of its ranks."""

    def __init__(self, plan: Plan, target: Target) -> None:
        """Lowers every step.

        Args:
            plan: what to do.
            target: the ranks that live here and how to reach the others.
        """
        self.target = target
        self.backwards = 0  # how often a gradient went through, so that it is known when there is something to sum
        self.operations: tuple[Operation, ...] = tuple(s.step.lower(s, plan, target) for s in plan.steps)

    def __call__(self, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], scale: float) -> list[Tensor]:
        """Attends; differentiable once.

        Args:
            q: per local rank, [B, H, S_local, D] in the plan's entry layout.
            k: per local rank, [B, K, S_local, D].
            v: per local rank, [B, K, S_local, Dv].
            scale: factor on the scores.

        Returns:
            Per local rank, [B, H, S_local, Dv].
        """
        outs = _Run.apply(self, scale, *q, *k, *v)
        return list(outs)


class _Run(torch.autograd.Function):
    """The whole composition as one node of the graph: its backward is the adjoint of each step, in reverse."""

    @staticmethod
    def forward(ctx: FunctionCtx, program: Program, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(program.target.ranks)
        values: Values = {name: list(tensors[i * n : (i + 1) * n]) for i, name in enumerate("qkv")}
        saved: list[Tensor] = []
        sizes: list[int] = []
        for operation in program.operations:
            kept = operation.forward(values, scale)
            saved += kept
            sizes.append(len(kept))
        ctx.save_for_backward(*saved)
        ctx.program, ctx.scale, ctx.sizes = program, scale, sizes  # type: ignore[attr-defined]
        return tuple(values["out"])

    @staticmethod
    def backward(ctx: FunctionCtx, *douts: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            what = "a second derivative was asked for (create_graph=True), and the adjoint is not differentiable"
            raise CallError([Problem(key="backward", what=what)])
        ctx.program.backwards += 1  # type: ignore[attr-defined]
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        grads: Values = {"out": list(douts)}
        end = len(saved)
        for operation, size in zip(reversed(ctx.program.operations), reversed(ctx.sizes), strict=True):  # type: ignore[attr-defined]
            operation.backward(grads, saved[end - size : end], ctx.scale)  # type: ignore[attr-defined]
            end -= size
        dtype = douts[0].dtype
        flat = (*grads["q"], *grads["k"], *grads["v"])
        return None, None, *(g if g.dtype == dtype else g.to(dtype) for g in flat)
