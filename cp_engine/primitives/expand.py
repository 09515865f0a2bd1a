"""Expand: the latent of multi-head latent attention becomes k and v, for the heads that a rank attends with and no others.

    k = [latent W_k | rope key],  v = latent W_v     W = [W_k; W_v] per head, [Dnope + Dv, latent_dim]

Where the latent is gathered first, (latent_dim + rope_dim) elements of a token move in place of heads x (head_dim + v_head_dim).
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.layout import Layout
from cp_engine.algebra.shape import BYTES
from cp_engine.algebra.tensors import counts
from cp_engine.algebra.transfer import Transfer
from cp_engine.errors import CoverageError
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.operation import Moving, Operation, Saved, Sketch, Sketches
from cp_engine.exchange.target import Target
from cp_engine.plan.ir import Cost, Plan, PlannedStep, Step
from cp_engine.plan.state import Refused, State


@dataclass(frozen=True, kw_only=True)
class Expand(Step):
    """kv_latent, k_rope -> k, v for the heads that q has on the rank; nothing moves."""

    kind = "expand"
    consumes = ("kv_latent", "k_rope")
    makes = ("k", "v")

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("kv_up",)

    def infer(self, state: State) -> tuple[State, tuple[Transfer, ...]]:
        q, latent, rope = (state.layout(t) for t in ("q", "kv_latent", "k_rope"))
        shape = state.shape
        if shape.kv_heads != shape.heads:
            raise Refused(
                f"there are {shape.heads} heads and {shape.kv_heads} kv heads",
                rule="every head of multi-head latent attention expands a key and a value of its own",
            )
        for rank in range(state.mesh.degree):
            if latent.sequence[rank] != rope.sequence[rank]:  # heads may differ: a rank without queries needs none
                raise Refused(
                    f"kv_latent and k_rope are in different layouts at {state.mesh.coordinate(rank)}",
                    rule="a key is made of the latent and the rotary key of one token",
                    kind=CoverageError,
                    rank=rank,
                    shows=("kv_latent", "k_rope"),
                )
            if q.heads[rank].count and not (latent.heads[rank].count and rope.heads[rank].count):
                raise Refused(
                    f"q heads {q.heads[rank]} at {state.mesh.coordinate(rank)} expand a latent that is not there",
                    rule="the latent has one head, which every rank with query heads holds whole",
                    kind=CoverageError,
                    rank=rank,
                    shows=("q", "kv_latent", "k_rope"),
                )
        made = Layout(latent.sequence, q.heads)
        layouts = {n: x for n, x in state.layouts.items() if n not in self.consumes}
        return replace(state, layouts={**layouts, "k": made, "v": made}), ()

    def adjoint(self, planned: PlannedStep) -> tuple[Transfer, ...]:
        return ()

    def cost(self, planned: PlannedStep, plan: Plan) -> Cost:
        size, made = BYTES[plan.shape.dtype], planned.layout_after("k")
        buffers = (counts(made, plan.part, "k") + counts(made, plan.part, "v")) * size
        return Cost(
            bytes_sent=((0,) * plan.degree, (0,) * plan.degree),
            collectives=(0, 0),
            pairs=(0,) * plan.degree,
            buffer_bytes=tuple(int(b) for b in buffers),
        )

    def lower(self, planned: PlannedStep, plan: Plan, target: Target) -> Operation:
        heads, rope = planned.layout_after("k").heads, planned.layout_before("k_rope").heads
        has_rope = [rope[r].count > 0 for r in target.ranks]
        nope_dim, wide = plan.shape.head_dim - plan.shape.rope_dim, plan.wide_gradients
        return ExpandOperation([heads[r] for r in target.ranks], has_rope, nope_dim, wide)


class ExpandOperation:
    """One matrix product forward, two backward.

    Args:
        heads: per local rank, the q heads that are expanded for; a rank without any may hold the latent or not.
        has_rope: per local rank, whether the rotary key is there.
        nope_dim: width of the part of a key that is expanded.
        wide: tensors whose gradients are summed over ranks, and travel in float32 for it.
    """

    def __init__(
        self, heads: Sequence[IndexSet], has_rope: Sequence[bool], nope_dim: int, wide: frozenset[str]
    ) -> None:
        self._heads, self._has_rope, self._nope_dim = tuple(heads), tuple(has_rope), nope_dim
        self._wide = wide

    def outline(self, sketches: Sketches) -> list[Sketch]:
        latents, ropes, weights = sketches.pop("kv_latent"), sketches.pop("k_rope"), sketches.pop("kv_up")
        sketches["k"], sketches["v"] = [], []
        for latent, rope, weight, heads in zip(latents, ropes, weights, self._heads, strict=True):
            b, _, s, _ = latent.size
            widths = {"k": self._nope_dim + rope.size[3], "v": weight.size[1] - self._nope_dim}
            for name, width in widths.items():
                sketches[name].append(Sketch((b, heads.count, s, width), latent.dtype))
        return [*latents, *weights]

    def forward(self, values: InFlight, scale: float) -> Moving:
        yield from ()  # nothing is in flight when it ends
        latents, ropes, weights = values.pop("kv_latent"), values.pop("k_rope"), values.pop("kv_up")
        ks: list[Tensor] = []
        vs: list[Tensor] = []
        for latent, rope, weight, heads in zip(latents, ropes, weights, self._heads, strict=True):
            rows = _rows(weight, heads)
            b, there, s, _ = latent.shape
            if not there:  # nor is there a query head: nothing to expand
                ks.append(rope.new_empty(b, 0, s, self._nope_dim + rope.shape[3]))
                vs.append(rope.new_empty(b, 0, s, rows.shape[1] - self._nope_dim))
                continue
            up = (latent.flatten(0, 2) @ rows.flatten(0, 1).T).view(b, s, *rows.shape[:2]).transpose(1, 2)
            nope, v = up.split([self._nope_dim, rows.shape[1] - self._nope_dim], 3)
            ks.append(torch.cat((nope, rope.expand(b, heads.count, s, rope.shape[3])), 3))
            vs.append(v.contiguous())
        values["k"], values["v"] = ks, vs
        return (*latents, *weights)

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        yield from ()
        n = len(self._heads)
        found: dict[str, list[Tensor]] = {"kv_latent": [], "k_rope": [], "kv_up": []}
        for latent, weight, heads, has_rope, dk, dv in zip(
            saved[:n], saved[n:], self._heads, self._has_rope, grads.pop("k"), grads.pop("v"), strict=True
        ):
            wide = torch.promote_types(weight.dtype, torch.float32)  # sums over heads and, after this, over ranks
            drope = dk[..., self._nope_dim :].to(wide)
            found["k_rope"].append(drope.sum(1, keepdim=True) if has_rope else drope)
            rows = _rows(weight, heads)
            if not latent.shape[1]:
                found["kv_latent"].append(latent)
                found["kv_up"].append(torch.zeros_like(weight))
                continue
            dup = torch.cat((dk[..., : self._nope_dim], dv), 3).transpose(1, 2).flatten(2).flatten(0, 1).to(rows.dtype)
            dlatent = (dup @ rows.flatten(0, 1)).to(wide).view(latent.shape)
            part = (dup.T @ latent.flatten(0, 2)).view(rows.shape)
            share = torch.zeros_like(weight)
            for local, r in zip(heads.offsets, heads.runs, strict=True):
                share[r.slice()] = part[local : local + r.count]
            found["kv_latent"].append(dlatent)
            found["kv_up"].append(share)
        for name in ("kv_latent", "k_rope"):
            if name not in self._wide:
                found[name] = [g.to(weight.dtype) for g, weight in zip(found[name], saved[n:], strict=True)]
        grads.update(found)
        return ()


def _rows(weight: Tensor, heads: IndexSet) -> Tensor:
    """The rows of some heads, [h, Dnope + Dv, latent_dim]; a view where heads are neighbours."""
    parts = [weight[r.slice()] for r in heads.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else weight[:0]
