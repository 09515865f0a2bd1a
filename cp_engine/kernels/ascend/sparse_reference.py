"""What the operators of DeepSeek sparse attention compute, in float64, from the vendor's formulas. All tensors are BSND.

    indexer     I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]), then the sparse_count highest of each t; equal ones: the lowest position
    attention   softmax over the selected s of scale (q . k + q_rope . k_rope); statistics [B, 1, S, N]
    loss        sum_t KL(p[t] || softmax of I[t]), p the attention summed over heads and normalised; its gradients: dI = softmax(I) - p

Source: the op-plugin documents of npu_lightning_indexer, npu_sparse_flash_attention and npu_sparse_lightning_indexer_grad_kl_loss.
"""

import torch
from torch import Tensor


def select(q: Tensor, k: Tensor, w: Tensor, count: int, mode: int) -> Tensor:
    """Positions [B, S1, 1, count], int32, the highest score first; -1 behind the last one."""
    scores = index_scores(q, k, w)
    hidden = ~seen(q.shape[1], k.shape[1], mode)
    scores = scores.masked_fill(hidden, -torch.inf)
    found = torch.sort(scores, dim=-1, descending=True, stable=True)
    top, places = found.values[..., :count], found.indices[..., :count]
    places = places.masked_fill(top == -torch.inf, -1)
    out = torch.full((*q.shape[:2], 1, count), -1, dtype=torch.int32)
    out[:, :, 0, : places.shape[2]] = places.to(torch.int32)
    return out


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """I, [B, S1, S2]."""
    act = torch.einsum("bthd,bsd->bths", q.double(), k[:, :, 0].double()).relu_()
    return torch.einsum("bths,bth->bts", act, w.double())


def seen(rows: int, columns: int, mode: int) -> Tensor:
    """sparse_mode 0: every key; 3: causal from the bottom right."""
    if mode == 0:
        return torch.ones(rows, columns, dtype=torch.bool)
    return torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows


def chosen(indices: Tensor, columns: int, mode: int) -> Tensor:
    """Which keys each query attends to, bool [B, S1, S2]."""
    picked = torch.zeros(*indices.shape[:2], columns + 1, dtype=torch.bool)
    picked.scatter_(2, indices[:, :, 0].long() % (columns + 1), True)  # -1 is the last one
    return picked[..., :-1] & seen(indices.shape[1], columns, mode)


def scores_of(q: Tensor, k: Tensor, q_rope: Tensor, k_rope: Tensor, scale: float, picked: Tensor) -> Tensor:
    """[B, N, S1, S2], -inf where a key is not attended to."""
    wide = torch.cat((q, q_rope), 3).double(), torch.cat((k, k_rope), 3).double()
    scores = scale * torch.einsum("btnd,bsd->bnts", wide[0], wide[1][:, :, 0])
    return scores.masked_fill(~picked.unsqueeze(1), -torch.inf)


def attend(
    q: Tensor, k: Tensor, q_rope: Tensor, k_rope: Tensor, indices: Tensor, scale: float, mode: int
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, S1, N, D] in q's dtype; softmax_max and softmax_sum [B, 1, S1, N], float32."""
    scores = scores_of(q, k, q_rope, k_rope, scale, chosen(indices, k.shape[1], mode))
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bnts,bsd->btnd", weights / total, k[:, :, 0].double())
    m, s = (x.squeeze(-1).transpose(1, 2).unsqueeze(1).float().contiguous() for x in (highest, total))
    return out.to(q.dtype), m, s


def weights_of(scores: Tensor, highest: Tensor, total: Tensor) -> Tensor:
    """P again from the statistics [B, 1, S1, N] that are passed."""
    m, s = (x.squeeze(1).transpose(1, 2).unsqueeze(-1).double() for x in (highest, total))
    return (scores - m).exp() / s


def attend_backward(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    indices: Tensor,
    dout: Tensor,
    out: Tensor,
    statistics: tuple[Tensor, Tensor],
    scale: float,
    mode: int,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], float]:
    """dq, dk, dv, dq_rope, dk_rope, and the largest sum of a row of P; k and v are one tensor, and dk and dv its two shares."""
    q, k, q_rope, k_rope = given
    p = weights_of(scores_of(q, k, q_rope, k_rope, scale, chosen(indices, k.shape[1], mode)), *statistics)
    do, values = dout.double(), k[:, :, 0].double()
    delta = torch.einsum("btnd,btnd->bnt", do, out.double()).unsqueeze(-1)
    ds = p * (torch.einsum("btnd,bsd->bnts", do, values) - delta) * scale
    wide_q, wide_k = torch.cat((q, q_rope), 3).double(), torch.cat((k, k_rope), 3).double()
    dq = torch.einsum("bnts,bsd->btnd", ds, wide_k[:, :, 0])
    dk = torch.einsum("bnts,btnd->bsd", ds, wide_q).unsqueeze(2)
    dv = torch.einsum("bnts,btnd->bsd", p, do).unsqueeze(2)
    width = q.shape[3]
    grads = (dq[..., :width], dk[..., :width], dv, dq[..., width:], dk[..., width:])
    return tuple(x.contiguous().to(q.dtype) for x in grads), float(p.sum(-1).max())  # type: ignore[return-value]


def learn(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    index: tuple[Tensor, Tensor, Tensor],
    indices: Tensor,
    statistics: tuple[Tensor, Tensor],
    scale: float,
    mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The gradients of the indexer's query, key and weights, those of a sum over tokens; the loss, [1]; the largest sum of a row of P."""
    q, k, q_rope, k_rope = given
    q_index, k_index, w = index
    picked = chosen(indices, k.shape[1], mode)
    attended = weights_of(scores_of(q, k, q_rope, k_rope, scale, picked), *statistics)
    target = attended.sum(1)
    target = target / target.sum(-1, keepdim=True)
    scores = index_scores(q_index, k_index, w).masked_fill(~picked, -torch.inf)
    found = scores.log_softmax(-1).masked_fill(~picked, 0.0)
    loss = (torch.xlogy(target, target) - target * found).sum()
    slope = found.exp() * picked - target
    act = torch.einsum("bthd,bsd->bths", q_index.double(), k_index[:, :, 0].double()).relu_()
    dw = torch.einsum("bts,bths->bth", slope, act)
    inner = torch.einsum("bts,bth->bths", slope, w.double()) * (act > 0)
    dq = torch.einsum("bths,bsd->bthd", inner, k_index[:, :, 0].double())
    dk = torch.einsum("bths,bthd->bsd", inner, q_index.double()).unsqueeze(2)
    dq, dk, dw = (x.to(like.dtype) for x, like in zip((dq, dk, dw), index, strict=True))
    return dq, dk, dw, loss.float().reshape(1), float(attended.sum(-1).max())
