"""What npu_fusion_attention, its gradient and npu_ring_attention_update compute, in float64, from the vendor's formulas.

    S = scale Q K^T     P = exp(S - max) / sum     O = P V
    dV = P^T dO     dS = P (dO V^T - rowsum(dO O))     dQ = scale dS K     dK = scale dS^T Q
    update:   m = max(m1, m2)     a = s1 exp(m1 - m)     b = s2 exp(m2 - m)     O = O1 a / (a + b) + O2 b / (a + b)

max and sum are the statistics that are passed, so those of a merged result give its share. Dropout and pse are left out: refused.
Source: the docstrings of both operators in torch_npu 2.13.0; FlashAttention-2, arXiv 2307.08691, section 3.1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_engine.kernels.ascend.layouts import from_heads, from_statistics, parts, sees, to_heads, to_statistics


class Masking(NamedTuple):
    """Which pairs a call computes; the operator's own arguments."""

    mode: int
    mask: Tensor | None
    before: int
    after: int
    ends_q: Sequence[int] | None
    ends_k: Sequence[int] | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str, masking: Masking, scale: float, softmax_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """out in q's layout and dtype, and softmax_max and softmax_sum, float32, each value 8 times."""
    q_, k_, v_ = _wide(q, k, v, heads, layout)
    out = torch.zeros(*q_.shape[:3], v_.shape[3], dtype=torch.float64)
    highest = torch.zeros(q_.shape[:3], dtype=torch.float64)
    total = torch.ones(q_.shape[:3], dtype=torch.float64)
    for part in parts(q_, k_, masking.ends_q, masking.ends_k):
        scores = _scores(q_[:, :, part.q], k_[:, :, part.k], masking, scale)
        highest[:, :, part.q] = scores.amax(-1)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total[:, :, part.q] = weights.sum(-1)
        out[:, :, part.q] = weights @ _each(v_[:, :, part.k], heads) / weights.sum(-1, keepdim=True)
    m, s = (to_statistics(x, layout, softmax_layout) for x in (highest, total))
    return from_heads(out, layout).to(q.dtype), m, s


def backward(
    given: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    heads: int,
    layout: str,
    masking: Masking,
    statistics: tuple[Tensor, Tensor],
    out: Tensor,
    scale: float,
    softmax_layout: str,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """dq, dk and dv in the layout and dtype of the inputs, and the largest sum of a row of P, which is 1 at most."""
    q_, k_, v_ = _wide(*given, heads, layout)
    dout_, out_ = (to_heads(x, layout, heads).double() for x in (dout, out))
    highest, total = (from_statistics(x, layout, softmax_layout) for x in statistics)
    dq, dk, dv, largest = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_), 0.0
    for part in parts(q_, k_, masking.ends_q, masking.ends_k):
        rows, keys = part.q, part.k
        scores = _scores(q_[:, :, rows], k_[:, :, keys], masking, scale)
        p = (scores - highest[:, :, rows, None]).exp() / total[:, :, rows, None]
        largest = max(largest, float(p.sum(-1).max()))
        delta = (dout_[:, :, rows] * out_[:, :, rows]).sum(-1, keepdim=True)
        ds = p * (dout_[:, :, rows] @ _each(v_[:, :, keys], heads).transpose(-1, -2) - delta) * scale
        dq[:, :, rows] = ds @ _each(k_[:, :, keys], heads)
        dk[:, :, keys] = _summed(ds.transpose(-1, -2) @ q_[:, :, rows], k_.shape[1])
        dv[:, :, keys] = _summed(p.transpose(-1, -2) @ dout_[:, :, rows], v_.shape[1])
    dq, dk, dv = (from_heads(x, layout).to(given[0].dtype) for x in (dq, dk, dv))
    return dq, dk, dv, largest


def update(
    previous: tuple[Tensor, Tensor, Tensor], current: tuple[Tensor, Tensor, Tensor], layout: str, softmax_layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """out, softmax_max and softmax_sum of two parts, each given as these three; out in its layout and dtype."""
    heads = previous[1].shape[1]
    (out1, m1, s1), (out2, m2, s2) = (
        (to_heads(out, layout, heads).double(), *(from_statistics(x, layout, softmax_layout) for x in statistics))
        for out, *statistics in (previous, current)
    )
    m = torch.maximum(m1, m2)
    a, b = s1 * (m1 - m).exp(), s2 * (m2 - m).exp()
    out = out1 * (a / (a + b)).unsqueeze(-1) + out2 * (b / (a + b)).unsqueeze(-1)
    highest, total = (to_statistics(x, layout, softmax_layout) for x in (m, a + b))
    return from_heads(out, layout).to(previous[0].dtype), highest, total


def hidden_rows(q_tokens: int, k_tokens: int, masking: Masking) -> int:
    """How many queries see no key; the operator does not say what it gives for them."""
    if masking.ends_q is None or masking.ends_k is None:
        sizes = [(q_tokens, k_tokens)]
    else:
        ends = zip((0, *masking.ends_q[:-1]), masking.ends_q, (0, *masking.ends_k[:-1]), masking.ends_k, strict=True)
        sizes = [(b - a, d - c) for a, b, c, d in ends]
    seen = (sees(masking.mode, n, m, masking.mask, masking.before, masking.after) for n, m in sizes)
    return sum(int((~rows.any(-1)).sum()) for rows in seen)


def _wide(q: Tensor, k: Tensor, v: Tensor, heads: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, S, D], float64; k and v with their own heads."""
    q_ = to_heads(q, layout, heads).double()
    if layout in ("BSH", "SBH"):
        kv_heads = k.shape[2] // q_.shape[3]
        return q_, to_heads(k, layout, kv_heads).double(), to_heads(v, layout, kv_heads).double()
    return q_, to_heads(k, layout, 0).double(), to_heads(v, layout, 0).double()


def _scores(q: Tensor, k: Tensor, masking: Masking, scale: float) -> Tensor:
    seen = sees(masking.mode, q.shape[2], k.shape[2], masking.mask, masking.before, masking.after)
    return (scale * (q @ _each(k, q.shape[1]).transpose(-1, -2))).masked_fill(~seen, -torch.inf)


def _each(x: Tensor, heads: int) -> Tensor:
    """k or v once for each query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: Tensor, kv_heads: int) -> Tensor:
    total: Tensor = x.unflatten(1, (kv_heads, -1)).sum(2)
    return total
