"""PyTorch's CUDA flash attention for full and causal tiles in half types."""

import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.base import KernelRequest, Limits
from cp_engine.kernels.cuda_efficient import CUDAEfficient
from cp_engine.kernels.operands import ALIGNED_BYTES, aligned, cut, is_empty, nothing_seen, rounded

_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

UNTRAINABLE = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
"""Compute capabilities, first to last, whose shared memory is too small for the backward of head dims above 192 and up to 224."""


class CUDAFlash:
    """FlashAttention 2 as PyTorch ships it; partial tiles, which it has no mask for, run on `cuda_efficient`.

    - bfloat16 and float16, compute capability 8.0 and newer
    - one head dim for q, k and v, a multiple of 8 up to 256: the others are padded with zeros, which change neither scores nor delta.
      Above 192 and up to 224 it cannot train on compute capability 8.6 to 8.9 and 12.0 to 12.1
    - grouped heads are its own
    - its causal flag is aligned bottom-right; the causal tiles are square, where that is top-left
    - rows must start at 16 bytes; lse must be contiguous, as its memory is read and its strides are not

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_flash_attention) and flash_attn/flash_api.cpp (mha_fwd, mha_bwd).
    """

    name = "cuda_flash"
    summary = "PyTorch's CUDA flash attention; partial tiles on cuda_efficient"
    limits = Limits(devices=("cuda",), dtypes=("bfloat16", "float16"), widest=256, capability=(8, 0))
    _partial = CUDAEfficient()

    def refusal(self, request: KernelRequest) -> str | None:
        reason = self.limits.refusal(request)
        if reason is not None or request.hardware is None or not request.needs_backward:
            return reason
        width, here = rounded(max(request.head_dim, request.v_head_dim), 8), request.hardware.capability
        if 192 < width <= 224 and any(first <= here <= last for first, last in UNTRAINABLE):
            return f"has no backward for head dim {width} on compute capability {here[0]}.{here[1]}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if is_empty(q, k, v):
            return nothing_seen(q, v)
        if tile.kind == "partial":
            return self._partial.forward(q, k, v, tile, scale)
        width = _width(q, v)
        q_, k_, v_ = (aligned(x, width) for x in (q, k, v))
        out, lse, *_ = _forward(q_, k_, v_, 0.0, tile.kind == "causal", False, scale=scale)
        return cut(out, v.shape[3]), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(q, k, v):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        if tile.kind == "partial":
            return self._partial.backward(dout, q, k, v, out, lse, tile, scale)
        wide = [aligned(x, _width(q, v)) for x in (dout, q, k, v, out)]
        state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)  # of dropout
        lengths, is_causal = (tile.q.count, tile.k.count), tile.kind == "causal"
        # without cumulative lengths it is the dense form
        dq, dk, dv = _backward(
            *wide, lse.contiguous(), None, None, *lengths, 0.0, is_causal, state, unused, scale=scale
        )
        return cut(dq, q.shape[3]), cut(dk, k.shape[3]), cut(dv, v.shape[3])


def _width(q: Tensor, v: Tensor) -> int:
    return rounded(max(q.shape[3], v.shape[3]), ALIGNED_BYTES // q.element_size())
