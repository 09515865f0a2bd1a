"""cuDNN's fused attention for full and causal tiles in half types."""

import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.base import KernelRequest, Limits
from cp_engine.kernels.cuda_efficient import CUDAEfficient
from cp_engine.kernels.operands import cut, is_empty, nothing_seen, padded, rounded

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

ANY_LENGTH = 91501
"""cuDNN from this version takes lengths that 128 does not divide; older ones read beyond them (PyTorch issue 169849)."""

MLA = (192, 128)
"""The one pair of head dims above 128: compute capability 9.0 and 10.x, cuDNN from 9.11."""


class CuDNN:
    """cuDNN's attention through PyTorch's operators; what it does not take runs on `cuda_efficient`.

    - bfloat16 and float16, compute capability 8.0 and newer, cuDNN 9
    - head dims that are multiples of 8 (padded with zeros) up to 128, or q and k of 192 with v of 128; Dk and Dv may differ
    - grouped heads are its own
    - partial tiles run on `cuda_efficient`: a bias that hides all keys from a query is not defined here. So do tiles of one query
      or one key, and with cuDNN before 9.15.1 those with lengths that 128 does not divide
    - its plans are cached by the strides of q, k and v alone, and a plan holds those of out and dout: all go in contiguous
    - lse is [B, H, S, 1]
    - its backward gives other bits on each run: refused where only deterministic algorithms are allowed

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_cudnn_attention, check_cudnn_tensor_shapes) and
    aten/src/ATen/native/cudnn/MHA.cpp (MHAParams, run_cudnn_SDP_bprop).
    """

    name = "cudnn"
    summary = "cuDNN attention; partial tiles, and lengths that it does not take, on cuda_efficient"
    limits = Limits(devices=("cuda",), dtypes=("bfloat16", "float16"), capability=(8, 0))
    _rest = CUDAEfficient()

    def refusal(self, request: KernelRequest) -> str | None:
        reason = self.limits.refusal(request)
        if reason is not None:
            return reason
        widths, hardware = (rounded(request.head_dim, 8), rounded(request.v_head_dim, 8)), request.hardware
        if max(widths) > 128 and widths != MLA:
            return f"takes head dims up to 128, or 192 with 128 for v, not {request.head_dim} with {request.v_head_dim}"
        if hardware is None:
            return None
        if hardware.cudnn_version < 90000:
            return f"needs cuDNN 9, and there is {hardware.cudnn_version or 'none'}"
        if widths == MLA and not (hardware.capability[0] in (9, 10) and hardware.cudnn_version >= 91100):
            needs = "takes head dims 192 with 128 on compute capability 9.0 and 10.x with cuDNN 9.11"
            return f"{needs}, not on {'.'.join(map(str, hardware.capability))} with {hardware.cudnn_version}"
        if hardware.is_deterministic and request.needs_backward:
            return "has no deterministic backward, and torch.use_deterministic_algorithms is on"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if is_empty(q, k, v):
            return nothing_seen(q, v)
        if not _takes(tile):
            return self._rest.forward(q, k, v, tile, scale)
        q_, k_, v_ = (_dense(x) for x in (q, k, v))
        out, lse, *_ = _forward(q_, k_, v_, None, True, 0.0, tile.kind == "causal", False, scale=scale)
        return cut(out, v.shape[3]), lse.reshape(q.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(q, k, v):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        if not _takes(tile):
            return self._rest.backward(dout, q, k, v, out, lse, tile, scale)
        dense = [_dense(x) for x in (dout, q, k, v, out)]
        unused = q.new_empty((), dtype=torch.int64)  # seed and offset of dropout
        lengths, is_causal = (tile.q.count, tile.k.count), tile.kind == "causal"
        stats = lse.contiguous().unsqueeze(-1)
        # no bias, and without cumulative lengths it is the dense form
        dq, dk, dv = _backward(*dense, stats, unused, unused, None, None, None, *lengths, 0.0, is_causal, scale=scale)
        return cut(dq, q.shape[3]), cut(dk, k.shape[3]), cut(dv, v.shape[3])


def _takes(tile: Tile) -> bool:
    lengths = (tile.q.count, tile.k.count)
    fits = all(n % 128 == 0 for n in lengths) or (torch.backends.cudnn.version() or 0) >= ANY_LENGTH
    return tile.kind != "partial" and min(lengths) > 1 and fits


def _dense(x: Tensor) -> Tensor:
    return padded(x, rounded(x.shape[3], 8)).contiguous()
