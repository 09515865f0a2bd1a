"""Attention of one rank over its tiles: one result from several kernel calls, forward and backward, block of keys by block.

Partial results merge by log-sum-exp:  lse = log(exp lse1 + exp lse2),  out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse).
Source: Milakov and Gimelshein, arXiv 1805.02867; as used across ranks in arXiv 2310.01889, section 3.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet, Run
from cp_engine.algebra.layout import image
from cp_engine.algebra.tiles import Tile, Tiling
from cp_engine.kernels.registry import Kernel


def kv_index(heads: IndexSet, served: IndexSet, group: int) -> tuple[int, ...] | None:
    """Which local kv head each local q head uses.

    Args:
        heads: q heads of the rank.
        served: q heads whose kv heads the rank holds; at least `heads`.
        group: q heads per kv head.

    Returns:
        One index per q head; None where that is what a kernel's own GQA does (equal runs of q heads, all kv heads used).
    """
    kv = {head: i for i, head in enumerate(image(served, group))}
    index = tuple(kv[h // group] for h in heads)
    runs, rest = divmod(len(index), max(1, len(kv)))
    return None if rest == 0 and index == tuple(i // runs for i in range(len(index))) else index


@dataclass(frozen=True, kw_only=True)
class TiledAttention:
    """The attention of one rank, over keys that are all there or that arrive block by block.

    Args:
        tiling: its kernel calls, block by block.
        kernel: what computes one.
        kv_index: local kv head of each local q head where groups are uneven.
        wide_kv: whether dk and dv leave in float32 for half types, because they travel and are summed.
    """

    tiling: Tiling
    kernel: Kernel
    kv_index: tuple[int, ...] | None
    wide_kv: bool

    @cached_property
    def blocks(self) -> tuple[tuple[Tile, ...], ...]:
        """The tiles of each block; a block that nobody sees has none."""
        tiles = self.tiling.tiles
        return tuple(
            tuple(t for t in tiles if t.block == i) for i in range(max((t.block for t in tiles), default=-1) + 1)
        )

    def tiles_of(self, block: int) -> tuple[Tile, ...]:
        """The kernel calls over one block of keys."""
        return self.blocks[block] if block < len(self.blocks) else ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attends to keys that are all there.

        Args:
            q: [B, H, S, D].
            k: [B, K, S_keys, D].
            v: [B, K, S_keys, Dv].
            scale: factor on the scores.

        Returns:
            out [B, H, S, Dv] in q's dtype and lse [B, H, S], -inf where a query sees nothing.
        """
        run = Forward(self, q, v.shape[3], scale)
        run.visit(0, k, v)
        return run.result()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq in q's dtype, dk and dv in float32 where they are summed over ranks, from the final out and lse."""
        run = Backward(self, dout, q, out, lse, scale)
        dk, dv = run.visit(0, k, v)
        return run.result(), dk, dv

    def per_q_head(self, x: Tensor) -> Tensor:
        """k or v with one head per q head where groups are uneven; a kernel's own GQA does the rest."""
        return x if self.kv_index is None else x[:, list(self.kv_index)]

    def per_kv_head(self, grad: Tensor, kv_heads: int, wide: torch.dtype) -> Tensor:
        """The adjoint of `per_q_head`."""
        if self.kv_index is None:
            return grad
        index = torch.tensor(self.kv_index, device=grad.device)
        total = grad.new_zeros((grad.shape[0], kv_heads, *grad.shape[2:]), dtype=wide)
        return total.index_add_(1, index, grad.to(wide))


class Forward:
    """One forward pass of a rank, which merges what each block of keys gives.

    Args:
        attention: what is computed.
        q: [B, H, S, D].
        v_head_dim: of out.
        scale: factor on the scores.
    """

    def __init__(self, attention: TiledAttention, q: Tensor, v_head_dim: int, scale: float) -> None:
        self._attention, self._q, self._v_head_dim, self._scale = attention, q, v_head_dim, scale
        self._dtype = torch.promote_types(q.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse = q.new_empty(0)
        own = attention.kernel.limits.merge
        self._merge = merge if own is None else own.add

    def visit(self, block: int, k: Tensor, v: Tensor) -> None:
        """Attends to one block: k [B, K, S_keys, D] and v [B, K, S_keys, Dv]."""
        attention, q = self._attention, self._q
        tiles = attention.tiles_of(block)
        if tiles:
            k, v = attention.per_q_head(k), attention.per_q_head(v)
        for tile in tiles:
            part, lse = attention.kernel.forward(
                _rows(q, tile.q), _rows(k, tile.k), _rows(v, tile.k), tile, self._scale
            )
            if self._out is None and tile.q.count == q.shape[2]:
                if len(attention.tiling.tiles) == 1:
                    self._out, self._lse = part, lse  # nothing will be merged: no copy in another dtype
                else:
                    self._out, self._lse = part.to(self._dtype).contiguous(), lse.contiguous()
                continue
            out = self._started()
            rows = tile.q.slice()
            if tile.is_first:
                out[:, :, rows], self._lse[:, :, rows] = part, lse
            else:
                self._merge(out[:, :, rows], self._lse[:, :, rows], part, lse)

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out [B, H, S, Dv] in q's dtype and lse [B, H, S].

        Args:
            sinks: [H], the score of one more key per head whose value is 0; it joins after all merges.
        """
        out, lse = self._started(), self._lse
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * (lse - total).exp_().unsqueeze(-1), total
        return _as(out, self._q.dtype), lse

    def _started(self) -> Tensor:
        if self._out is None:
            q = self._q
            make = q.new_empty if self._attention.tiling.is_complete else q.new_zeros
            self._out = make((*q.shape[:3], self._v_head_dim), dtype=self._dtype)
            self._lse = q.new_full(q.shape[:3], -torch.inf, dtype=self._dtype)
        return self._out


class Backward:
    """One backward pass of a rank, from the final out and lse.

    Args:
        attention: what was computed.
        dout, q, out, lse: as in `TiledAttention.backward`.
        scale: factor on the scores.
    """

    def __init__(
        self, attention: TiledAttention, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> None:
        self._attention, self._scale = attention, scale
        self._rows = (dout, q, out, lse)
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._dq: Tensor | None = None

    def visit(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv of one block, in float32 where they are summed over ranks; dq grows."""
        attention, wide = self._attention, self._wide
        tiles = attention.tiles_of(block)
        k_, v_ = (attention.per_q_head(k), attention.per_q_head(v)) if tiles else (k, v)
        dk: Tensor | None = None
        dv: Tensor | None = None
        for tile in tiles:
            a, b, c, d = (_rows(t, tile.q) for t in self._rows)
            keys = tile.k.slice()
            dq_, dk_, dv_ = attention.kernel.backward(
                a, b, _rows(k_, tile.k), _rows(v_, tile.k), c, d, tile, self._scale
            )
            self._add_dq(tile, dq_)
            if dk is None or dv is None:
                if tile.k.count == k.shape[2]:  # what the first tile writes is what later ones add to
                    is_only = len(tiles) == 1
                    dk, dv = (dk_, dv_) if is_only else (dk_.to(wide), dv_.to(wide))
                    continue
                dk, dv = k_.new_zeros(k_.shape, dtype=wide), v_.new_zeros(v_.shape, dtype=wide)
            dk[:, :, keys] += dk_
            dv[:, :, keys] += dv_
        if dk is None or dv is None:
            dk, dv = k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
        elif attention.kv_index is not None:
            dk, dv = (attention.per_kv_head(g, k.shape[1], wide) for g in (dk, dv))
        kv_dtype = wide if attention.wide_kv else k.dtype
        return _as(dk, kv_dtype), _as(dv, kv_dtype)

    def result(self) -> Tensor:
        """dq in q's dtype."""
        q = self._rows[1]
        return torch.zeros_like(q) if self._dq is None else _as(self._dq, q.dtype)

    def _add_dq(self, tile: Tile, part: Tensor) -> None:
        q = self._rows[1]
        if self._dq is None:
            if tile.q.count == q.shape[2]:
                is_only = len(self._attention.tiling.tiles) == 1
                self._dq = part if is_only else part.to(self._wide)
                return
            self._dq = q.new_zeros(q.shape, dtype=self._wide)
        self._dq[:, :, tile.q.slice()] += part


def sink_gradient(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """What the scores of the sinks get: -sum over queries of p_sink (dout . out).

    Args:
        sinks: [H].
        dout, out: [B, H, S, Dv].
        lse: [B, H, S], the sinks included.

    Returns:
        [H], in lse's dtype.
    """
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a partial result to another, in place.

    Args:
        out: [B, H, S, Dv], float32 or wider.
        lse: [B, H, S], -inf where nothing was seen yet.
        part: [B, H, S, Dv].
        part_lse: [B, H, S].
    """
    total = torch.logaddexp(lse, part_lse)
    finite = total.nan_to_num(neginf=0.0)  # a query that sees nothing on either side: exp(-inf - 0) = 0, not nan
    out.mul_((lse - finite).exp_().unsqueeze(-1)).addcmul_(part.to(out.dtype), (part_lse - finite).exp_().unsqueeze(-1))
    lse.copy_(total)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _rows(x: Tensor, r: Run) -> Tensor:
    """Members of a run along the sequence, dim 2; the tensor itself where that is all of it."""
    return x if r.count == x.shape[2] and r.step == 1 else x[:, :, r.slice()]
