"""Ascend's operators of DeepSeek sparse attention: the indexer, attention to selected keys, and the loss with its gradients.

The operators place their causal mask at the bottom right of queries x keys. A rank's queries are therefore computed run by run of
neighbours, each over the keys up to its own end, so that tokens may be dealt contiguously or in zigzag. Backward passes lse as the
maximum and 1 as the sum, which is the same softmax.
Source: op-plugin documents of the operators, and the schemas of torch_npu 2.13.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cp_engine.algebra.shape import Shape
from cp_engine.kernels.ascend.operators import registered
from cp_engine.kernels.sparse.torch_ops import Attended, Given, Index, wide_of
from cp_engine.kernels.sparse.visibility import Sight

ABSORBED, RIGHT_DOWN = 2, 3
"""attention_mode of latent attention in absorbed form; sparse_mode of a causal mask from the bottom right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator, and the arguments that are the same in each of its calls, for the call and for the plan.

    Args:
        name: of it.
        layouts: the arguments that name a layout.
        layout: of all tensors.
        fixed: name and value of further arguments.
    """

    name: str
    layouts: tuple[str, ...]
    layout: str = "BSND"
    fixed: tuple[tuple[str, int], ...]

    def named(self) -> dict[str, object]:
        """The arguments of a call."""
        return {**dict.fromkeys(self.layouts, self.layout), **dict(self.fixed)}

    def describe(self) -> str:
        """The same for a reader."""
        return " ".join([self.name, self.layout, *(f"{name}={value}" for name, value in self.fixed)])


CAUSAL = ("sparse_mode", RIGHT_DOWN)
ATTENDING = (CAUSAL, ("attention_mode", ABSORBED), ("sparse_block_size", 1))
ATTEND = Operator(
    name="npu_sparse_flash_attention",
    layouts=("layout_query", "layout_kv"),
    fixed=(*ATTENDING, ("return_softmax_lse", True)),
)
ATTEND_GRADIENT = Operator(name="npu_sparse_flash_attention_grad", layouts=("layout",), fixed=ATTENDING)
LEARN = Operator(name="npu_sparse_lightning_indexer_grad_kl_loss", layouts=("layout",), fixed=(CAUSAL,))


def selecting(count: int) -> Operator:
    """The indexer, for a number of keys per query."""
    layouts = ("layout_query", "layout_key")
    return Operator(name="npu_lightning_indexer", layouts=layouts, fixed=(CAUSAL, ("sparse_count", count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCall:
    """What a sparse kernel is asked for, known before any tensor exists.

    Args:
        device: `cpu`, `npu`, ...
        shape: of the whole call.
        mask: its kind.
        local_sequence: the most queries of a rank.
        has_runs: whether each rank's queries are runs of neighbours.
        has_all_heads: whether a rank has all heads of its queries, and attention and indexer see the same keys.
    """

    device: str
    shape: Shape
    mask: str
    local_sequence: int
    has_runs: bool
    has_all_heads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLimits:
    """What the operators take, as data.

    Args:
        dtypes: of all tensors.
        latent_dim, rope_dim, index_dim: the only ones.
        heads: query heads, those of tensor-parallel ranks together, which the loss takes; attention takes any share of them.
        index_heads: of the indexer.
        selected: keys of each query.
        batch: most sequences of one call.
        local_sequence: most queries of one.
        sequence: most keys.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    latent_dim: int = 512
    rope_dim: int = 64
    index_dim: int = 128
    heads: tuple[int, ...] = (32, 64, 128)
    index_heads: tuple[int, ...] = (8, 16, 32, 64)
    selected: tuple[int, ...] = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192)
    batch: int = 256
    local_sequence: int = 8192
    sequence: int = 131072

    def refusal(self, call: SparseCall) -> str | None:
        """Why a call is outside the limits; None when it is inside."""
        shape = call.shape
        for what, value, allowed in (
            ("dtypes", shape.dtype, self.dtypes),
            ("a latent of", shape.latent_dim, (self.latent_dim,)),
            ("rotary keys of", shape.rope_dim, (self.rope_dim,)),
            ("index heads as wide as", shape.index_dim, (self.index_dim,)),
            ("query heads", shape.heads * shape.head_ranks, self.heads),
            ("index heads", shape.index_heads, self.index_heads),
            ("selections of", shape.selected, self.selected),
        ):
            if value not in allowed:
                return f"takes {what} {', '.join(map(str, allowed))}, not {value}"
        if call.mask != "causal":
            return f"computes causal attention, not {call.mask}"
        if not call.has_runs:
            return "takes queries that are neighbours, and a rank's are not"
        if shape.batch > self.batch:
            return f"takes {self.batch} sequences at most, not {shape.batch}"
        if call.local_sequence > self.local_sequence or shape.sequence > self.sequence:
            return f"takes {self.local_sequence} queries and {self.sequence} keys at most"
        if not call.has_all_heads:
            return "needs all heads of a query for the loss, and a rank has a share of them"
        return None


class _Run(NamedTuple):
    """Neighbouring queries, and how many of the ascending keys there are up to the last of them."""

    rows: slice
    keys: int


class NPUSparse:
    """The three operators of torch_npu."""

    name = "npu_sparse"
    summary = "npu_lightning_indexer, npu_sparse_flash_attention and their gradients"
    devices: tuple[str, ...] = ("npu", "npu_reference")
    limits = SparseLimits()
    learns_from_heads = True

    def refusal(self, call: SparseCall) -> str | None:
        if call.device not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {call.device}"
        return self.limits.refusal(call)

    def describe(self, work: str, count: int) -> tuple[str, ...]:
        works = {"select": (selecting(count),), "attend": (ATTEND, ATTEND_GRADIENT), "learn": (LEARN,)}
        return tuple(operator.describe() for operator in works[work])

    def calls(self, sight: Sight) -> int:
        return len(sight.queries.runs)

    def select(self, index: Index, sight: Sight, count: int) -> Tensor:
        batch, _, rows, _ = index.q.shape
        out = index.q.new_full((batch, 1, rows, count), -1, dtype=torch.int32)
        k, operator = sight.ascending(index.k, 2).transpose(1, 2), selecting(count)
        for run in _runs(sight):
            q, w = _index_rows(index, run)
            keys = k[:, : run.keys].contiguous()
            found, _ = registered(operator.name)(query=q, key=keys, weights=w, **operator.named())
            out[:, :, run.rows] = sight.positions_of(found.squeeze(2)).unsqueeze(1)
        return out

    def attend(self, given: Given, sight: Sight, scale: float) -> tuple[Tensor, Tensor]:
        q, width = given.q, given.latent.shape[3]
        out = q.new_zeros((*q.shape[:3], width))
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide_of(q.dtype))
        for run, named in _sparse_runs(given, sight):
            part, highest, total = registered(ATTEND.name)(
                **named, value=named["key"], scale_value=scale, **ATTEND.named()
            )
            out[:, :, run.rows] = part.transpose(1, 2)
            lse[:, :, run.rows] = (highest + total.log()).squeeze(1).transpose(1, 2)
        return out, lse

    def attend_backward(
        self, dout: Tensor, given: Given, out: Tensor, lse: Tensor, sight: Sight, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, wide = torch.zeros_like(given.q), lse.dtype
        dlatent, drope = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (given.latent, given.rope))
        width = given.latent.shape[3]
        for run, named in _sparse_runs(given, sight):
            rows = (x[:, :, run.rows].transpose(1, 2).contiguous() for x in (dout.to(given.q.dtype), out))
            d_out, out_ = rows
            highest = _statistics(lse, run)
            dq_, dk, dv, dq_rope, dk_rope = registered(ATTEND_GRADIENT.name)(
                **named, value=named["key"], d_out=d_out, out=out_, softmax_max=highest, softmax_sum=torch.ones_like(highest),
                scale_value=scale, **ATTEND_GRADIENT.named(),
            )  # fmt: skip
            dq[:, :, run.rows, :width] = dq_.transpose(1, 2)
            dq[:, :, run.rows, width:] = dq_rope.transpose(1, 2)
            dlatent[:, :, : run.keys] += (dk.to(wide) + dv.to(wide)).transpose(1, 2)
            drope[:, :, : run.keys] += dk_rope.to(wide).transpose(1, 2)
        return dq, sight.as_given(dlatent, 2), sight.as_given(drope, 2)

    def learn(self, index: Index, topk: Tensor, sight: Sight, source: Attended | Tensor) -> tuple[Tensor, Index]:
        assert isinstance(source, Attended), "all heads of a query are on its rank: the limits ask for it"
        wide, latent = wide_of(index.q.dtype), self.limits.latent_dim
        loss = torch.zeros((), dtype=wide, device=index.q.device)
        grads = Index(torch.zeros_like(index.q), torch.zeros_like(index.k, dtype=wide), torch.zeros_like(index.w))
        k_index = sight.ascending(index.k, 2).transpose(1, 2)
        keys = source.keys.unsqueeze(2)
        for run in _runs(sight):
            q_index, w = _index_rows(index, run)
            q = source.q[:, :, run.rows].transpose(1, 2)
            k = keys[:, : run.keys]
            highest = _statistics(source.lse, run)
            dq, dk, dw, part = registered(LEARN.name)(
                query=q[..., :latent].contiguous(), key=k[..., :latent].contiguous(), query_index=q_index,
                key_index=k_index[:, : run.keys].contiguous(), weights=w, sparse_indices=_indices(topk, sight, run),
                softmax_max=highest, softmax_sum=torch.ones_like(highest), scale_value=source.scale,
                query_rope=q[..., latent:].contiguous(), key_rope=k[..., latent:].contiguous(), **LEARN.named(),
            )  # fmt: skip
            loss += part.to(wide).sum()
            grads.q[:, 0, run.rows] = dq.flatten(2)
            grads.w[:, 0, run.rows] = dw
            grads.k[:, :, : run.keys] += dk.to(wide).transpose(1, 2)
        return loss, grads._replace(k=sight.as_given(grads.k, 2))


def _runs(sight: Sight) -> Iterator[_Run]:
    start = 0
    for run in sight.queries.runs:
        yield _Run(slice(start, start + run.count), sight.keys_before(run.stop))
        start += run.count


def _sparse_runs(given: Given, sight: Sight) -> Iterator[tuple[_Run, dict[str, Tensor]]]:
    """Each run with the tensors of its call."""
    width = given.latent.shape[3]
    latent, rope = (sight.ascending(x, 2).transpose(1, 2) for x in (given.latent, given.rope))
    for run in _runs(sight):
        q = given.q[:, :, run.rows].transpose(1, 2)
        yield (
            run,
            {
                "query": q[..., :width].contiguous(),
                "key": latent[:, : run.keys].contiguous(),
                "sparse_indices": _indices(given.topk, sight, run),
                "query_rope": q[..., width:].contiguous(),
                "key_rope": rope[:, : run.keys].contiguous(),
            },
        )


def _indices(topk: Tensor, sight: Sight, run: _Run) -> Tensor:
    """Global positions of a run's selection -> places among its keys, [B, n, 1, count], int32."""
    return sight.places(topk[:, :, run.rows]).to(torch.int32).transpose(1, 2).contiguous()


def _index_rows(index: Index, run: _Run) -> tuple[Tensor, Tensor]:
    """The indexer's queries [B, n, heads, D] and weights [B, n, heads] of a run."""
    w = index.w[:, 0, run.rows].contiguous()
    q: Tensor = index.q[:, 0, run.rows].unflatten(2, (w.shape[2], -1))
    return q.contiguous(), w


def _statistics(lse: Tensor, run: _Run) -> Tensor:
    """[B, H, S] -> [B, 1, n, H], float32."""
    return lse[:, :, run.rows].transpose(1, 2).unsqueeze(1).float().contiguous()
