"""DeepSeek sparse attention of one rank, in plain PyTorch: an indexer selects keys per query, attention sees those alone.

    I[t, s] = sum_h w[t, h] relu(q_index[t, h] . k_index[s])            scores of the indexer
    topk[t] = the `count` visible keys with the highest I               ties: the lowest position
    out[t]  = sum_s a[t, s] latent[s],  a = softmax over topk[t] of scale (q . [latent | rope])
    loss    = sum_t KL(p[t] || softmax of I[t] over topk[t]),  p = the sum of a over heads, normalised

All of it runs over chunks of queries: memory is chunk x keys, and nothing sequence x sequence is built. The latent is key and value
for all heads (the absorbed form of multi-head latent attention). Half types are computed in float32.
Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1; absorbed form: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cp_engine.kernels.sparse.selected_keys import SELECTING_ROWS, SelectedKeys, picked, product, seen_by, wide, wide_of
from cp_engine.kernels.sparse.visibility import Chunk, Sight


class Index(NamedTuple):
    """What an indexer scores with, or gradients of it.

    Args:
        q: [B, 1, S, heads x D], its heads side by side.
        k: [B, 1, S_keys, D].
        w: [B, 1, S, heads], the scale of the scores included.
    """

    q: Tensor
    k: Tensor
    w: Tensor


def select(index: Index, sight: Sight, count: int) -> Tensor:
    """The keys of each query.

    Args:
        index: what scores are made of.
        sight: what each query may see.
        count: keys per query.

    Returns:
        Global positions [B, 1, S, count], int32, ascending; -1 behind the last one.
    """
    (batch, _, rows, _), device = index.q.shape, index.q.device
    out = torch.full((batch, 1, rows, count), -1, dtype=torch.int32, device=device)
    for chunk in seen_by(index.q, sight.chunks(SELECTING_ROWS)):
        seen, places = sight.visible(chunk, device), sight.key_positions(chunk, device)
        for b in range(batch):
            q, w = _heads(index, b, chunk)
            k = wide(sight.ascending(index.k[b, 0], 0)[chunk.keys])
            act = product(q, k.T).relu_()
            scores = torch.bmm(w.unsqueeze(1), act).squeeze(1).masked_fill_(~seen, -torch.inf)
            out[b, 0, chunk.rows] = _highest(scores, seen, places, count)
    return out


def _highest(scores: Tensor, seen: Tensor, places: Tensor, count: int) -> Tensor:
    """Positions of the highest scores of each row, [c, count]; of equal ones those of the first columns."""
    chosen = seen
    if scores.shape[1] > count:
        cut = scores.topk(count, 1).values[:, -1:]
        above, level = scores > cut, (scores == cut) & seen
        room = count - above.sum(1, keepdim=True)
        chosen = above | (level & (level.cumsum(1) <= room))
    slots = torch.where(chosen, chosen.cumsum(1) - 1, count)
    out = places.new_full((scores.shape[0], count + 1), -1)
    return out.scatter_(1, slots, places.expand_as(slots))[:, :count]


class Given(NamedTuple):
    """What sparse attention is computed from.

    Args:
        q: [B, H, S, L + R].
        latent: [B, 1, S_keys, L], key and value.
        rope: [B, 1, S_keys, R].
        topk: [B, 1, S, count], global positions.
    """

    q: Tensor
    latent: Tensor
    rope: Tensor
    topk: Tensor

    def keys(self, sight: Sight) -> Tensor:
        """[B, S_keys, L + R], ascending."""
        return sight.ascending(torch.cat((self.latent, self.rope), 3).squeeze(1), 1)


def attend(given: Given, sight: Sight, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of each query to its selected keys.

    Args:
        given: queries, keys and selections.
        sight: of these queries and keys.
        scale: factor on the scores.

    Returns:
        out [B, H, S, L] in q's dtype; lse [B, H, S], float32 or wider, -inf for a query without keys.
    """
    q, width = given.q, given.latent.shape[3]
    out = torch.zeros((*q.shape[:3], width), dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide_of(q.dtype), device=q.device)
    both = given.keys(sight)
    for b, chunk, keys in picked(given.topk, sight, both.shape[2]):
        k = keys.of(both[b])
        scores = keys.scores(_rows(q[b], chunk), k).mul_(scale).masked_fill_(~keys.is_there.unsqueeze(1), -torch.inf)
        total = scores.logsumexp(2)
        weights = scores.sub_(total.nan_to_num(neginf=0.0).unsqueeze(2)).exp_()
        out[b, :, chunk.rows] = keys.weighted(weights, k[..., :width]).transpose(0, 1).to(q.dtype)
        lse[b, :, chunk.rows] = total.T
    return out, lse


def attend_backward(
    dout: Tensor, given: Given, out: Tensor, lse: Tensor, sight: Sight, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, latent and rope, the last two in float32 or wider, since they are sums over queries.

    Args:
        dout: [B, H, S, L].
        given, sight, scale: as in `attend`.
        out, lse: what it returned.
    """
    q, width = given.q, given.latent.shape[3]
    dq, both = torch.zeros_like(q), given.keys(sight)
    dkeys = torch.zeros(both.shape, dtype=lse.dtype, device=q.device)
    for b, chunk, keys in picked(given.topk, sight, both.shape[2]):
        k, q_, dout_ = keys.of(both[b]), _rows(q[b], chunk), _rows(dout[b], chunk)
        weights = _weights(keys, q_, k, lse[b, :, chunk.rows], scale)
        delta = (dout_ * _rows(out[b], chunk)).sum(2, keepdim=True)
        slope = keys.scores(dout_, k[..., :width]).sub_(delta).mul_(weights).mul_(scale)
        dq[b, :, chunk.rows] = keys.weighted(slope, k).transpose(0, 1).to(q.dtype)
        keys.add(dkeys[b], (slope, q_), (weights, dout_))
    dkeys = sight.as_given(dkeys, 1).unsqueeze(1)
    return dq, dkeys[..., :width].contiguous(), dkeys[..., width:].contiguous()


@dataclass(frozen=True, slots=True)
class Attended:
    """What heads attend to, summed over them; made again chunk by chunk from lse, and never stored.

    Args:
        q: [B, H, S, L + R].
        keys: [B, S_keys, L + R], from `Given.keys`.
        lse: [B, H, S].
        scale: factor on the scores.
    """

    q: Tensor
    keys: Tensor
    lse: Tensor
    scale: float

    def all_heads(self, together: Callable[[Tensor], Tensor]) -> "Attended":
        """The same with the heads of other ranks.

        Args:
            together: [B, H, ...] of each of these ranks -> their heads side by side, in one order.
        """
        return Attended(together(self.q), self.keys, together(self.lse), self.scale)

    def share(self, b: int, chunk: Chunk, keys: SelectedKeys) -> Tensor:
        """[c, n], of a chunk of queries."""
        q, k = _rows(self.q[b], chunk), keys.of(self.keys[b])
        return _weights(keys, q, k, self.lse[b, :, chunk.rows], self.scale).sum(1)


def shares(attended: Attended, topk: Tensor, sight: Sight) -> Tensor:
    """What some heads attend to, summed over them, for each selected key: [B, 1, S, count], in lse's dtype."""
    has_heads = int(attended.q.shape[1] > 0)  # a rank without heads adds nothing
    size = (topk.shape[0], has_heads, *topk.shape[2:])
    out = torch.zeros(size, dtype=attended.lse.dtype, device=topk.device)
    for b, chunk, picked_keys in picked(topk, sight, attended.keys.shape[2]):
        out[b, 0, chunk.rows] = picked_keys.in_slots(attended.share(b, chunk, picked_keys))
    return out


def learn(index: Index, topk: Tensor, sight: Sight, source: Attended | Tensor) -> tuple[Tensor, Index]:
    """The indexer's loss and its gradients.

    Args:
        index: as in `select`.
        topk: [B, 1, S, count], the selection of these queries.
        sight: of these queries and keys.
        source: the attention of all heads: of the same queries, or its sum [B, 1, S, count] for each selected key.
    """
    wide = wide_of(index.q.dtype)
    loss = torch.zeros((), dtype=wide, device=index.q.device)
    grads = Index(torch.zeros_like(index.q), torch.zeros_like(index.k, dtype=wide), torch.zeros_like(index.w))
    ascending = sight.ascending(index.k, 2)
    width = source.keys.shape[2] if isinstance(source, Attended) else index.k.shape[3]
    for b, chunk, keys in picked(topk, sight, width):
        if isinstance(source, Attended):
            share = source.share(b, chunk, keys)
        else:
            share = keys.from_slots(source[b, 0, chunk.rows])
        wanted = share / share.sum(1, keepdim=True).clamp(min=torch.finfo(share.dtype).tiny)
        q, w = _heads(index, b, chunk)
        k = keys.of(ascending[b, 0])
        act = keys.scores(q, k).relu_()
        scores = torch.bmm(w.unsqueeze(1), act).squeeze(1).masked_fill_(~keys.is_there, -torch.inf)
        total = scores.logsumexp(1, keepdim=True).nan_to_num(neginf=0.0)
        found = (scores - total).masked_fill(~keys.is_there, 0.0)  # log softmax
        loss += (torch.xlogy(wanted, wanted) - wanted * found).sum()
        slope = (found.exp() * keys.is_there - wanted).unsqueeze(1)  # the gradient of the scores
        grads.w[b, 0, chunk.rows] = (slope * act).sum(2).to(index.w.dtype)
        inner = (w.unsqueeze(2) * slope).mul_(act > 0)
        grads.q[b, 0, chunk.rows] = keys.weighted(inner, k).flatten(1).to(index.q.dtype)
        keys.add(grads.k[b, 0], (inner, q))
    return loss, grads._replace(k=sight.as_given(grads.k, 2))


def _weights(keys: SelectedKeys, q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    """The attention weights [c, H, n] again, from lse [H, c]."""
    scores = keys.scores(q, k).mul_(scale).masked_fill_(~keys.is_there.unsqueeze(1), -torch.inf)
    return scores.sub_(lse.T.nan_to_num(neginf=0.0).unsqueeze(2)).exp_()


def _heads(index: Index, b: int, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Queries [c, heads, D] and weights [c, heads] of a chunk, in float32 or wider."""
    q, w = wide(index.q[b, 0, chunk.rows]), wide(index.w[b, 0, chunk.rows])
    return q.view(q.shape[0], w.shape[1], -1), w


def _rows(x: Tensor, chunk: Chunk) -> Tensor:
    """[H, S, D] -> [c, H, D], in float32 or wider."""
    return wide(x[:, chunk.rows]).transpose(0, 1).contiguous()
