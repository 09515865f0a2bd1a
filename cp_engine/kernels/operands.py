"""What the fused kernels need of their tensors: widths, alignment, heads, masks, and nothing that is empty."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.base import band_mask

ALIGNED_BYTES = 16
"""Fused CUDA kernels load rows in vectors of this many bytes: every row starts at a multiple of it.

Source: kAlignmentQ of aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h; Gmem_copy_struct of FlashAttention.
"""


def is_empty(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is nothing to compute; some kernels end the process where there is not."""
    return not (q.numel() and k.numel() and v.numel())


def nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out 0 and lse -inf: what queries without keys get."""
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products in the dtype of their operands: autocast would round float32 scores to half types."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def rounded(width: int, multiple: int) -> int:
    """The next multiple at or above a width."""
    return -(-width // multiple) * multiple


def padded(x: Tensor, width: int) -> Tensor:
    """A tensor with zeros up to a head dim, and a last dim of stride 1."""
    if x.shape[3] < width:
        return F.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()


def aligned(x: Tensor, width: int) -> Tensor:
    """A tensor with zeros up to a head dim that is a multiple of ALIGNED_BYTES, in which every row is aligned."""
    x = padded(x, width)
    elements = ALIGNED_BYTES // x.element_size()
    starts = (x.storage_offset(), *x.stride()[:3])
    return x if all(s % elements == 0 for s in starts) else x.clone(memory_format=torch.contiguous_format)


def cut(x: Tensor, width: int) -> Tensor:
    """A tensor without the zeros that were added to its head dim."""
    return x if x.shape[3] == width else x[..., :width]


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """k or v repeated for each query head, for kernels without grouped heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def per_kv_head(grad: Tensor, kv_heads: int) -> Tensor:
    """The gradient of `per_query_head`, summed in float32."""
    if grad.shape[1] == kv_heads:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    total: Tensor = grad.unflatten(1, (kv_heads, -1)).sum(2, dtype=wide)
    return total.to(grad.dtype)


def additive_mask(tile: Tile, q: Tensor, multiple: int = 1) -> Tensor | None:
    """The mask of a partial tile as 0 and -inf in q's dtype, [queries, keys]; None for other tiles.

    Args:
        tile: whose mask.
        q: of the tile.
        multiple: what the stride of a row is rounded up to, in elements.
    """
    if tile.kind != "partial":
        return None
    size = (tile.q.count, rounded(tile.k.count, multiple))
    mask = torch.full(size, -torch.inf, dtype=q.dtype, device=q.device)[:, : tile.k.count]
    return mask.masked_fill_(band_mask(tile, q.device), 0.0)


def unseen(mask: Tensor | None) -> Tensor | None:
    """Queries to which an additive mask shows no key, bool [queries]; None without a mask."""
    return None if mask is None else (mask == -torch.inf).all(-1)
