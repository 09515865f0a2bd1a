"""PyTorch's CPU flash attention, with the guards that it needs.

Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of PyTorch; each guard was found by a wrong result or a crash:
equal head dims (v is padded), a last dim of stride 1 (else silently wrong), no empty tensors (SIGFPE), masks in q's dtype, and
lse 0 instead of -inf where nothing is visible.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_engine.kernels.base import Call, band_mask
from cp_engine.tiles import Tile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CPUFlash:
    """Blocked attention on CPU, out and lse; GQA is native."""

    name = "cpu_flash"
    summary = "PyTorch's CPU flash attention"

    def refusal(self, call: Call) -> str | None:
        if call.device != "cpu":
            return f"runs on cpu, not on {call.device}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if not (q.numel() and k.numel() and v.numel()):
            lse_dtype = torch.promote_types(q.dtype, torch.float32)
            return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype)
        mask = _additive(tile, q)
        v_head_dim, width = v.shape[3], max(q.shape[3], v.shape[3])
        out, lse = _forward(
            _padded(q, width),
            _padded(k, width),
            _padded(v, width),
            0.0,
            tile.kind == "causal",
            attn_mask=mask,
            scale=scale,
        )
        if mask is not None:
            unseen = (mask == -torch.inf).all(-1)
            if unseen.any():
                lse = lse.masked_fill(unseen, -torch.inf)
        return out if width == v_head_dim else out[..., :v_head_dim], lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not (q.numel() and k.numel() and v.numel()):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        head_dim, v_head_dim, width = q.shape[3], v.shape[3], max(q.shape[3], v.shape[3])
        mask = _additive(tile, q)
        if mask is not None:  # exp(-inf - -inf) of a query that sees nothing anywhere
            lse = lse.nan_to_num(neginf=0.0)
        wide = [_padded(t, width) for t in (dout, q, k, v, out)]
        dq, dk, dv = _backward(*wide, lse, 0.0, tile.kind == "causal", attn_mask=mask, scale=scale)
        if head_dim < width:
            dq, dk = dq[..., :head_dim], dk[..., :head_dim]
        return dq, dk, dv if v_head_dim == width else dv[..., :v_head_dim]


def _padded(x: Tensor, width: int) -> Tensor:
    if x.shape[3] < width:
        return F.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()


def _additive(tile: Tile, q: Tensor) -> Tensor | None:
    """The mask of a partial tile as 0 and -inf in q's dtype."""
    if tile.kind != "partial":
        return None
    mask = torch.full((tile.q.count, tile.k.count), -torch.inf, dtype=q.dtype, device=q.device)
    return mask.masked_fill_(band_mask(tile, q.device), 0.0)
