"""Attention written out in torch operations: any device, any floating dtype, in blocks of queries."""

import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.base import KernelRequest, Limits, band_mask
from cp_engine.kernels.operands import without_autocast

ROWS = 1024
"""Queries per block: scores take ROWS x keys elements per head, never queries x keys."""


class Math:
    """Softmax attention with its derivative by hand; half types are computed in float32."""

    name = "math"
    summary = "torch operations, any device and dtype"
    limits = Limits()

    def refusal(self, request: KernelRequest) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = _grouped(q, k, v)
        mask = None if tile.kind == "full" else band_mask(tile, q.device)
        outs, lses = [], []
        with without_autocast(q):
            for rows in _blocks(tile):
                scores = _scores(q_[..., rows, :], k_, None if mask is None else mask[rows], scale)
                lse = scores.logsumexp(-1)
                outs.append((scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v_)
                lses.append(lse)
        return torch.cat(outs, 3).flatten(1, 2).to(q.dtype), torch.cat(lses, 3).flatten(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_, k_, v_ = _grouped(q, k, v)
        shape = q_.shape[:3]
        lse_ = lse.to(q_.dtype).unflatten(1, shape[1:3]).nan_to_num(neginf=0.0)
        dout_, out_ = (t.to(q_.dtype).unflatten(1, shape[1:3]) for t in (dout, out))
        delta = (dout_ * out_).sum(-1)
        mask = None if tile.kind == "full" else band_mask(tile, q.device)
        dq, dk, dv = torch.empty_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
        with without_autocast(q):
            for rows in _blocks(tile):
                scores = _scores(q_[..., rows, :], k_, None if mask is None else mask[rows], scale)
                p = (scores - lse_[..., rows, None]).exp()
                dv += (p.transpose(-1, -2) @ dout_[..., rows, :]).sum(2, keepdim=True)
                ds = p * (dout_[..., rows, :] @ v_.transpose(-1, -2) - delta[..., rows, None]) * scale
                dq[..., rows, :] = ds @ k_
                dk += (ds.transpose(-1, -2) @ q_[..., rows, :]).sum(2, keepdim=True)
        return dq.flatten(1, 2).to(q.dtype), dk.flatten(1, 2).to(k.dtype), dv.flatten(1, 2).to(v.dtype)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q as [B, K, H / K, S, D]; k and v as [B, K, 1, S, D]; at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads = k.shape[1]
    q_ = q.to(dtype).unflatten(1, (kv_heads, q.shape[1] // kv_heads))
    return q_, k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)


def _blocks(tile: Tile) -> list[slice]:
    return [slice(i, min(i + ROWS, tile.q.count)) for i in range(0, tile.q.count, ROWS)]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)
