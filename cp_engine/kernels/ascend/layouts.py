"""Layouts of the operators' tensors: where batch, heads and tokens are, and one call per packed sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COPIES = 8
"""How often npu_fusion_attention writes each statistic, in a last dim of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a packed call, or all of a call that is not packed.

    Args:
        q, k: its tokens, along dim 2 of [B, N, S, D].
    """

    q: slice
    k: slice


def to_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    """Any layout -> [B, N, S, D]; packed tokens are one sequence of a batch of 1."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout in ("BSH", "SBH"):
        split: Tensor = x.unflatten(2, (heads, -1))
        return split.transpose(1, 2) if layout == "BSH" else split.permute(1, 2, 0, 3)
    return x.transpose(0, 1).unsqueeze(0)  # TND


def from_heads(x: Tensor, layout: str) -> Tensor:
    """The reverse of `to_heads`, contiguous."""
    if layout == "BNSD":
        return x.contiguous()
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2).contiguous()
    if layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2).contiguous()
    return x.squeeze(0).transpose(0, 1).contiguous()


def parts(q: Tensor, k: Tensor, ends_q: Sequence[int] | None, ends_k: Sequence[int] | None) -> list[Part]:
    """The sequences of a call.

    Args:
        q, k: [B, N, S, D].
        ends_q, ends_k: where each packed sequence ends; None where the call is not packed.
    """
    if ends_q is None or ends_k is None:
        return [Part(slice(0, q.shape[2]), slice(0, k.shape[2]))]
    starts_q, starts_k = (0, *ends_q[:-1]), (0, *ends_k[:-1])
    pairs = zip(starts_q, ends_q, starts_k, ends_k, strict=True)
    return [Part(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


def to_statistics(x: Tensor, layout: str, softmax_layout: str) -> Tensor:
    """[B, N, S] -> as npu_fusion_attention writes it: [B, N, S, 8], and of packed tokens [T, N, 8].

    By default packed statistics lie head by head although their size says token by token; `softmax_layout="TND"` makes both agree.
    """
    if layout != "TND":
        return x.float().unsqueeze(-1).expand(*x.shape, COPIES).contiguous()
    by_head = x.squeeze(0).float().unsqueeze(-1).expand(*x.shape[1:], COPIES)
    if softmax_layout == "TND":
        return by_head.transpose(0, 1).contiguous()
    return by_head.contiguous().view(x.shape[2], x.shape[1], COPIES)


def from_statistics(x: Tensor, layout: str, softmax_layout: str) -> Tensor:
    """The reverse: [B, N, S], float64."""
    if layout != "TND":
        return x[..., 0].double()
    if softmax_layout == "TND":
        return x[..., 0].transpose(0, 1).unsqueeze(0).double()
    return x.reshape(x.shape[1], x.shape[0], COPIES)[..., 0].unsqueeze(0).double()


def sees(mode: int, rows: int, columns: int, mask: Tensor | None, before: int, after: int) -> Tensor:
    """Which keys each query sees, bool [rows, columns], or with the mask's own batch and heads before it.

    Args:
        mode: sparse_mode; 0 and 1 the mask itself, 2 causal from the top left, 3 from the bottom right, 4 a band.
        rows, columns: queries and keys.
        mask: True where a key is hidden; None: all keys are seen, whatever the mode says.
        before, after: of a band, in tokens.
    """
    if mask is None:
        return torch.ones(rows, columns, dtype=torch.bool)
    if mode in (0, 1):
        return ~mask.bool()
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    if mode == 2:
        return j <= i
    ahead = i + columns - rows
    return j <= ahead if mode == 3 else (j >= ahead - before) & (j <= ahead + after)
