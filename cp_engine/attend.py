"""Attention of one rank over its tiles: one result from several kernel calls, forward and backward.

Partial results merge by log-sum-exp:  lse = log(exp lse1 + exp lse2),  out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse).
Source: Milakov and Gimelshein, arXiv 1805.02867; as used across ranks in arXiv 2310.01889, section 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_engine.index_set import IndexSet, Run
from cp_engine.kernels import Kernel
from cp_engine.layout import image
from cp_engine.tiles import Tile, Tiling


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
    """The attention of one rank.

    Args:
        tiling: its kernel calls.
        kernel: what computes one.
        kv_index: local kv head of each local q head where groups are uneven.
        wide_kv: whether dk and dv leave in float32 for half types, because they travel and are summed.
    """

    tiling: Tiling
    kernel: Kernel
    kv_index: tuple[int, ...] | None
    wide_kv: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attends.

        Args:
            q: [B, H, S, D].
            k: [B, K, S_keys, D].
            v: [B, K, S_keys, Dv].
            scale: factor on the scores.

        Returns:
            out [B, H, S, Dv] in q's dtype and lse [B, H, S], -inf where a query sees nothing.
        """
        tiles = self.tiling.tiles
        if self.kv_index is not None:
            k, v = self._per_q_head(k), self._per_q_head(v)
        if len(tiles) == 1 and self.tiling.is_complete:
            return self.kernel.forward(
                _rows(q, tiles[0].q), _rows(k, tiles[0].k), _rows(v, tiles[0].k), tiles[0], scale
            )
        dtype = torch.promote_types(q.dtype, torch.float32)
        make = q.new_empty if self.tiling.is_complete else q.new_zeros
        out = make((*q.shape[:3], v.shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        for tile in tiles:
            part, part_lse = self.kernel.forward(_rows(q, tile.q), _rows(k, tile.k), _rows(v, tile.k), tile, scale)
            rows = tile.q.slice()
            if tile.is_first:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
            else:
                merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq in q's dtype, dk and dv in float32 where they are summed over ranks, from the final out and lse."""
        tiles, wide = self.tiling.tiles, torch.promote_types(q.dtype, torch.float32)
        kv_dtype = wide if self.wide_kv else k.dtype
        is_one_call = len(tiles) == 1 and tiles[0].q.count == q.shape[2] and tiles[0].k.count == k.shape[2]
        if is_one_call and self.kv_index is None:
            dq, dk, dv = self.kernel.backward(dout, q, k, v, out, lse, tiles[0], scale)
            return dq, _as(dk, kv_dtype), _as(dv, kv_dtype)
        k_, v_ = self._per_q_head(k), self._per_q_head(v)
        if is_one_call:
            dq, dk_, dv_ = self._tile_backward(tiles[0], dout, q, k_, v_, out, lse, scale)
        else:
            # several tiles add up: in float32, and only what some tile does not overwrite starts as 0
            dq = q.new_zeros(q.shape, dtype=wide)
            dk_, dv_ = k_.new_zeros(k_.shape, dtype=wide), v_.new_zeros(v_.shape, dtype=wide)
            for tile in tiles:
                rows, keys = tile.q.slice(), tile.k.slice()
                parts = self._tile_backward(tile, dout, q, k_, v_, out, lse, scale)
                dq[:, :, rows] += parts[0]
                dk_[:, :, keys] += parts[1]
                dv_[:, :, keys] += parts[2]
        dk, dv = self._per_kv_head(dk_, k.shape[1], wide), self._per_kv_head(dv_, v.shape[1], wide)
        return _as(dq, q.dtype), _as(dk, kv_dtype), _as(dv, kv_dtype)

    def _tile_backward(
        self, tile: Tile, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c, d = (_rows(t, tile.q) for t in (dout, q, out, lse))
        return self.kernel.backward(a, b, _rows(k, tile.k), _rows(v, tile.k), c, d, tile, scale)

    def _per_q_head(self, x: Tensor) -> Tensor:
        return x if self.kv_index is None else x[:, list(self.kv_index)]

    def _per_kv_head(self, grad: Tensor, kv_heads: int, wide: torch.dtype) -> Tensor:
        if self.kv_index is None:
            return grad
        index = torch.tensor(self.kv_index, device=grad.device)
        total = grad.new_zeros((grad.shape[0], kv_heads, *grad.shape[2:]), dtype=wide)
        return total.index_add_(1, index, grad.to(wide))


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
