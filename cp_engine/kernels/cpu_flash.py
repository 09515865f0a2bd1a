"""PyTorch's CPU flash attention, with the guards that it needs.

Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of PyTorch; each guard was found by a wrong result or a crash:
equal head dims (v is padded), a last dim of stride 1 (else silently wrong), no empty tensors (SIGFPE), masks in q's dtype, and
lse 0 instead of -inf where nothing is visible.
"""

import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.base import KernelRequest, Limits
from cp_engine.kernels.operands import additive_mask, cut, is_empty, nothing_seen, padded, unseen

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CPUFlash:
    """Blocked attention on CPU, out and lse; GQA is native."""

    name = "cpu_flash"
    summary = "PyTorch's CPU flash attention"
    limits = Limits(devices=("cpu",))

    def refusal(self, request: KernelRequest) -> str | None:
        return self.limits.refusal(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if is_empty(q, k, v):
            return nothing_seen(q, v)
        mask, width = additive_mask(tile, q), max(q.shape[3], v.shape[3])
        q_, k_, v_ = (padded(t, width) for t in (q, k, v))
        out, lse = _forward(q_, k_, v_, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale)
        hidden = unseen(mask)
        if hidden is not None and tile.has_blind_queries:
            lse = lse.masked_fill(hidden, -torch.inf)
        return cut(out, v.shape[3]), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(q, k, v):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        mask, width = additive_mask(tile, q), max(q.shape[3], v.shape[3])
        if mask is not None:  # exp(-inf - -inf) of a query that sees nothing anywhere
            lse = lse.nan_to_num(neginf=0.0)
        wide = [padded(t, width) for t in (dout, q, k, v, out)]
        dq, dk, dv = _backward(*wide, lse, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale)
        return cut(dq, q.shape[3]), cut(dk, q.shape[3]), cut(dv, v.shape[3])
