"""What an attention kernel is: a small adapter that computes one tile, forward and backward, and says what it cannot do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cp_engine.tiles import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a kernel is asked for, known before any tensor exists.

    Args:
        device: `cpu`, `cuda`, ...
        dtype: `float64`, `float32`, `bfloat16` or `float16`.
        head_dim: of q and k.
        v_head_dim: of v and out.
    """

    device: str
    dtype: str
    head_dim: int
    v_head_dim: int


class Kernel(Protocol):
    """One attention kernel. Tensors are [B, H, S, D]; k and v may have fewer heads, dividing q's."""

    name: str
    summary: str

    def refusal(self, call: Call) -> str | None:
        """Why the kernel cannot do a call; None when it can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        """out [B, H, S, Dv] in q's dtype and lse [B, H, S] (natural log, at least float32); lse is -inf where nothing is visible."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the tile's share of the final out and lse."""


def band_mask(tile: Tile, device: torch.device) -> Tensor:
    """Which keys each query of a tile sees, bool [queries, keys]."""
    ahead = torch.arange(tile.q.count, device=device)[:, None] - torch.arange(tile.k.count, device=device)
    if tile.kind == "causal":
        return ahead >= 0
    return (ahead >= tile.low) & (ahead <= tile.high)


def choose(kernels: Sequence[Kernel], call: Call) -> tuple[Kernel, str]:
    """The first kernel that can do a call, and why the ones before it cannot."""
    reasons: list[str] = []
    for kernel in kernels:
        reason = kernel.refusal(call)
        if reason is None:
            return kernel, "; ".join(reasons) or kernel.summary
        reasons.append(f"{kernel.name}: {reason}")
    raise LookupError("; ".join(reasons))
