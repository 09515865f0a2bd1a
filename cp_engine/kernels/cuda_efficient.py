"""PyTorch's memory-efficient CUDA attention (CUTLASS): half types and float32, any mask as an additive bias."""

import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.base import KernelRequest, Limits
from cp_engine.kernels.operands import (
    ALIGNED_BYTES,
    additive_mask,
    aligned,
    cut,
    is_empty,
    nothing_seen,
    per_kv_head,
    per_query_head,
    rounded,
    unseen,
)

_forward = torch.ops.aten._scaled_dot_product_efficient_attention.default
_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

LSE_ROWS = 32
"""lse has a multiple of this many rows; those behind the last query are +inf, so that exp(score - lse) is 0 there."""

BIAS_COLUMNS = 16
"""The rows of a bias start at multiples of this many elements, as torch.nn.functional's own padding makes them."""


class CUDAEfficient:
    """Blocked attention on CUDA, out and lse; its operators ask for more than their schemas say.

    - bfloat16 from compute capability 8.0, float16 and float32 from 5.0; no float64
    - q, k, v, out, dout and the bias start every row at 16 bytes: head dims are padded (to 4 in float32, 8 in half types), and
      tensors that are cut otherwise are copied. Dk and Dv may differ
    - k and v have q's heads: they are repeated, and dk and dv summed over the group in float32
    - out is read in backward as if its memory were [B, S, H, D], whatever its strides
    - lse comes out padded to LSE_ROWS and must go in so
    - a query to which the bias shows nothing gets lse 0, not -inf

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_mem_efficient_attention), attention_backward.cu, and
    check_supported, o_strideM and accumApplyLSEToSmem of mem_eff_attention/kernel_backward.h and gemm/mma_from_smem.h.
    """

    name = "cuda_efficient"
    summary = "PyTorch's memory-efficient CUDA attention"
    limits = Limits(
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        capability=(5, 0),
        dtype_capability=(("bfloat16", (8, 0)),),
    )

    def refusal(self, request: KernelRequest) -> str | None:
        return self.limits.refusal(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if is_empty(q, k, v):
            return nothing_seen(q, v)
        mask, q_, k_, v_ = _operands(q, k, v, tile)
        out, lse, _, _ = _forward(q_, k_, v_, _bias(mask, q), True, 0.0, tile.kind == "causal", scale=scale)
        out, lse = cut(out, v.shape[3]), lse[:, :, : tile.q.count]
        hidden = unseen(mask)
        if hidden is None:
            return out, lse
        return out.masked_fill(hidden[:, None], 0.0), lse.masked_fill(hidden, -torch.inf)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(q, k, v):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        mask, q_, k_, v_ = _operands(q, k, v, tile)
        dout_, out_ = aligned(dout, v_.shape[3]), aligned(out, v_.shape[3])
        out_ = out_.transpose(1, 2).contiguous().transpose(1, 2)
        wide = lse.new_full((*lse.shape[:2], rounded(lse.shape[2], LSE_ROWS)), torch.inf, dtype=torch.float32)
        wide[:, :, : lse.shape[2]] = lse.masked_fill(lse == -torch.inf, torch.inf)  # no key at all: every weight is 0
        unused = q.new_empty((), dtype=torch.int64)  # seed and offset of dropout
        wanted, is_causal = [True, True, True, False], tile.kind == "causal"
        grads = _backward(
            dout_, q_, k_, v_, _bias(mask, q), out_, wide, unused, unused, 0.0, wanted, is_causal, scale=scale
        )
        dq, dk, dv = cut(grads[0], q.shape[3]), cut(grads[1], k.shape[3]), cut(grads[2], v.shape[3])
        return dq, per_kv_head(dk, k.shape[1]), per_kv_head(dv, v.shape[1])


def _operands(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The additive mask [queries, keys], and q, k and v as the operators take them."""
    step = ALIGNED_BYTES // q.element_size()
    width, v_width = rounded(q.shape[3], step), rounded(v.shape[3], step)
    k_, v_ = per_query_head(k, q.shape[1]), per_query_head(v, q.shape[1])
    return additive_mask(tile, q, BIAS_COLUMNS), aligned(q, width), aligned(k_, width), aligned(v_, v_width)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(q.shape[0], q.shape[1], *mask.shape)
