"""Ascend's npu_fusion_attention as a tile kernel: its mask, its statistics, and what a tile must be for it.

    full         no mask
    causal       the compressed 2048 x 2048 mask, mode 2 (from the top left)
    right_down   the same mask, mode 3 (from the bottom right): the keys before a causal square and the square in one call
    packed       documents side by side: TND, with the end of each, mode 3; in several calls where there are more than one takes
    partial      a mask of its own, mode 1, over the queries that see a key: what the operator gives for others is not documented

Arguments go by keyword: their positions moved between versions. Backward passes lse as the maximum and 1 as the sum, which is the same
softmax, so that a tile's share of a merged result is one call.
Source: torch_npu 2.13.0, docstring of npu_fusion_attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile, Tiling
from cp_engine.kernels.ascend.layouts import COPIES
from cp_engine.kernels.ascend.operators import COMPRESSED, accepts, registered
from cp_engine.kernels.base import KernelRequest, Limits, Merge, band_mask
from cp_engine.kernels.operands import is_empty, nothing_seen

FORWARD, BACKWARD = "npu_fusion_attention", "npu_fusion_attention_grad"
SEQUENCES = 1024
"""Most sequences of a call of packed tokens."""
TOKENS = 2**20
"""Most tokens of a sequence, and of a call of packed tokens."""


def _described(tilings: Sequence[Tiling], merge: Merge | None) -> str:
    """What the operator is given of tiles and, where some have a part of a row, what merges them."""
    calls = dict.fromkeys(_tile_in_words(tile) for tiling in tilings for tile in tiling.tiles)
    merged = "merged in float32 by lse" if merge is None else f"merged by {merge.describe()}"
    is_merged = any(not tile.is_first for tiling in tilings for tile in tiling.tiles)
    return f"{FORWARD} {'; '.join([*calls, merged] if is_merged else calls)}"


def _tile_in_words(tile: Tile) -> str:
    mode = {"full": 0, "causal": 2, "right_down": 3, "packed": 3, "partial": 1}[tile.kind]
    mask = {"full": "no mask", "partial": "its own mask"}.get(tile.kind, f"mask {COMPRESSED} x {COMPRESSED}")
    return f"{'TND' if tile.kind == 'packed' else 'BNSD'} sparse_mode={mode} ({mask})"


LIMITS = Limits(
    describe=_described,
    devices=("npu", "npu_reference"),
    dtypes=("float32", "bfloat16", "float16"),
    widest=768,
    joins=("right_down", "packed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NPUFusion:
    """Blocked attention on Ascend, out and statistics; GQA is native.

    Args:
        name: in the configuration.
        summary: for a reader.
        limits: with what merges its partial results.
    """

    name: str = "npu_fusion"
    summary: str = "npu_fusion_attention of torch_npu"
    limits: Limits = LIMITS

    def refusal(self, request: KernelRequest) -> str | None:
        if request.v_head_dim > request.head_dim:
            return f"takes values no wider than keys, and they are {request.v_head_dim} and {request.head_dim} wide"
        merge = self.limits.merge
        return self.limits.refusal(request) or (None if merge is None else merge.refusal())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if is_empty(q, k, v):
            return nothing_seen(q, v)
        rows = _seeing(tile)
        layout, q_, k_, v_ = _arranged(tile, q[:, :, rows], k, v)
        masking = _masking(tile, rows, q)
        results = [
            registered(FORWARD)(
                query=q_[part.q], key=k_[part.k], value=v_[part.k], head_num=q.shape[1], input_layout=layout, scale=scale,
                keep_prob=1.0, **masking, **part.named,
            )
            for part in _parts(tile, q.shape[0], FORWARD)
        ]  # fmt: skip
        out, highest, total = (_joined([r[i] for r in results]) for i in range(3))
        lse = highest[..., 0] + total[..., 0].log()
        if layout == "TND":
            out, lse = _unpacked(out, q.shape[0]), _unpacked(lse.unsqueeze(-1), q.shape[0]).squeeze(-1)
        return _placed(tile, rows, out, 0.0), _placed(tile, rows, lse, -torch.inf)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(q, k, v):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        rows = _seeing(tile)
        layout, q_, k_, v_ = _arranged(tile, q[:, :, rows], k, v)
        dout_, out_ = (_tokens(x[:, :, rows].to(q.dtype), layout) for x in (dout, out))
        highest = _tokens(lse[:, :, rows].float().unsqueeze(-1).expand(*q[:, :, rows].shape[:3], COPIES), layout)
        total, masking = torch.ones_like(highest), _masking(tile, rows, q)
        results = [
            registered(BACKWARD)(
                query=q_[part.q], key=k_[part.k], value=v_[part.k], dy=dout_[part.q], head_num=q.shape[1], input_layout=layout,
                softmax_max=highest[part.q], softmax_sum=total[part.q], attention_in=out_[part.q], scale_value=scale,
                keep_prob=1.0, **masking, **part.named,
            )
            for part in _parts(tile, q.shape[0], BACKWARD)
        ]  # fmt: skip
        dq, dk, dv = (_joined([r[i] for r in results]) for i in range(3))
        if layout == "TND":
            dq, dk, dv = (_unpacked(x, q.shape[0]) for x in (dq, dk, dv))
        return _placed(tile, rows, dq, 0.0), dk, dv


def _seeing(tile: Tile) -> slice:
    """The queries of a tile that see one of its keys."""
    if tile.kind != "partial":
        return slice(0, tile.q.count)
    return slice(max(0, tile.low), min(tile.q.count, tile.k.count + tile.high))


def _arranged(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    """Layout, q, k and v of the call."""
    layout = "TND" if tile.kind == "packed" else "BNSD"
    return layout, _tokens(q, layout), _tokens(k, layout), _tokens(v, layout)


def _tokens(x: Tensor, layout: str) -> Tensor:
    """[B, N, S, D] as it is, or the tokens of all sequences one after the other, [T, N, D]."""
    return x.contiguous() if layout == "BNSD" else x.transpose(1, 2).flatten(0, 1).contiguous()


def _unpacked(x: Tensor, batch: int) -> Tensor:
    """[T, N, D] -> [B, N, S, D]."""
    found: Tensor = x.unflatten(0, (batch, -1))
    return found.transpose(1, 2)


def _masking(tile: Tile, rows: slice, q: Tensor) -> dict[str, object]:
    if tile.kind == "full":
        return {"sparse_mode": 0}
    if tile.kind == "partial":
        return {"sparse_mode": 1, "atten_mask": ~band_mask(tile, q.device)[rows]}
    hidden = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=q.device).triu_(1)
    return {"sparse_mode": 2 if tile.kind == "causal" else 3, "atten_mask": hidden}


class _Part(NamedTuple):
    """What one call computes of a tile: along the first dim of its tensors, and what it is told of it."""

    q: slice
    k: slice
    named: dict[str, object]


def _parts(tile: Tile, batch: int, operator: str) -> Iterator[_Part]:
    """One call; of packed tokens as many as their documents need, with the ends of each."""
    if tile.kind != "packed":
        yield _Part(slice(None), slice(None), {})
        return
    layout = {"softmax_layout": "TND"} if accepts(operator, "softmax_layout") else {}  # data lie as their size says
    documents, q, k = tile.parts * batch, 0, 0
    for group in _groups(documents):
        ends_q, ends_k = (list(accumulate(counts)) for counts in zip(*group, strict=True))
        named: dict[str, object] = {"actual_seq_qlen": ends_q, "actual_seq_kvlen": ends_k, **layout}
        yield _Part(slice(q, q + ends_q[-1]), slice(k, k + ends_k[-1]), named)
        q, k = q + ends_q[-1], k + ends_k[-1]


def _groups(documents: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Neighbouring documents, (queries, keys) of each, as many as one call takes."""
    group, tokens = list[tuple[int, int]](), 0
    for document in documents:
        tokens += max(document)
        if group and (len(group) == SEQUENCES or tokens > TOKENS):
            yield group
            group, tokens = [], max(document)
        group.append(document)
    yield group


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _placed(tile: Tile, rows: slice, x: Tensor, otherwise: float) -> Tensor:
    """Rows of queries that see a key -> of all queries of the tile."""
    if rows == slice(0, tile.q.count):
        return x
    whole = x.new_full((*x.shape[:2], tile.q.count, *x.shape[3:]), otherwise)
    whole[:, :, rows] = x
    return whole
