"""The keys that some queries selected, as columns of all visible keys or copied side by side, with the products of attention."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from cp_engine.kernels.sparse.visibility import Chunk, Sight

SELECTING_ROWS = 64
"""Queries whose scores against all visible keys are there at once."""

GATHERED_ELEMENTS = 1 << 21
"""Elements of selected keys that are copied side by side for some queries: 8 MiB in float32, the fastest of 1 to 80 MiB on a CPU."""

SPARSE_FROM = 4
"""Selected keys are gathered where there are this many times as many visible ones; below, scores of all of them, most of them masked,
take less time: a matrix product of many rows costs a fraction per element of one with as many rows as there are heads."""


class SelectedKeys:
    """The selected keys of a chunk of queries, either as columns of all visible keys or copied side by side.

    Args:
        local: [c, count], places among the ascending keys; -1 where there are fewer.
        chunk: the queries, and the range of keys that they can see.
    """

    def __init__(self, local: Tensor, chunk: Chunk) -> None:
        self._chunk, self._is_dense = chunk, chunk.is_dense
        if self._is_dense:
            width = chunk.keys.stop - chunk.keys.start
            columns = torch.where(local < 0, width, local - chunk.keys.start)
            self._columns = columns
            self.is_there = local.new_zeros((local.shape[0], width + 1), dtype=torch.bool).scatter_(1, columns, True)
            self.is_there = self.is_there[:, :width]
        else:
            self._flat = local.clamp(min=0).flatten()
            self.is_there = local >= 0

    def of(self, keys: Tensor) -> Tensor:
        """[S_keys, D] -> the keys that scores are computed with, [n, D] or [c, count, D]."""
        if self._is_dense:
            return wide(keys[self._chunk.keys])
        return wide(keys.index_select(0, self._flat).view(*self.is_there.shape, keys.shape[1]))

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """q [c, H, D] and what `of` gives -> [c, H, n]."""
        if self._is_dense:
            return product(q, keys.T)
        return torch.bmm(q, keys.transpose(1, 2))

    def weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """[c, H, n] and what `of` gives -> [c, H, D]."""
        if self._is_dense:
            return product(weights, values)
        return torch.bmm(weights, values)

    def add(self, total: Tensor, *products: tuple[Tensor, Tensor]) -> None:
        """total [S_keys, D] += weights [c, H, n] transposed times x [c, H, <= D], for each (weights, x); the first x is the widest."""
        if self._is_dense:
            for weights, x in products:
                total[self._chunk.keys, : x.shape[2]].addmm_(weights.flatten(0, 1).T, x.flatten(0, 1))
            return
        (weights, x), *others = products
        share = torch.bmm(weights.transpose(1, 2), x)
        for weights, x in others:
            share[..., : x.shape[2]].baddbmm_(weights.transpose(1, 2), x)
        total.index_add_(0, self._flat, share.flatten(0, 1))

    def in_slots(self, x: Tensor) -> Tensor:
        """[c, n] -> [c, count], a number for each selected key."""
        return torch.nn.functional.pad(x, (0, 1)).gather(1, self._columns) if self._is_dense else x

    def from_slots(self, x: Tensor) -> Tensor:
        """[c, count] -> [c, n]."""
        if not self._is_dense:
            return x
        width = self.is_there.shape[1]
        return x.new_zeros((x.shape[0], width + 1)).scatter_(1, self._columns, x)[:, :width]


def picked(topk: Tensor, sight: Sight, width: int) -> Iterator[tuple[int, Chunk, SelectedKeys]]:
    """Chunk by chunk of each sequence: its place in the batch, the queries, their selected keys.

    Args:
        topk: [B, 1, S, count], global positions of the keys of each query.
        sight: of those queries, in that order.
        width: elements of a key.
    """
    local, count = sight.places(topk), topk.shape[3]
    rows = max(1, min(SELECTING_ROWS, GATHERED_ELEMENTS // max(1, count * width)))
    for chunk in seen_by(topk, sight.chunks(SELECTING_ROWS, rows, SPARSE_FROM * count)):
        for b in range(topk.shape[0]):
            yield b, chunk, SelectedKeys(local[b, 0, chunk.rows], chunk)


def seen_by(x: Tensor, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """The chunks to compute; of tensors without data, which are asked for sizes alone, the largest of each kind."""
    if not x.is_meta:
        return chunks
    largest: dict[bool, Chunk] = {}
    for chunk in chunks:
        before = largest.setdefault(chunk.is_dense, chunk)
        if _pairs(chunk) > _pairs(before):
            largest[chunk.is_dense] = chunk
    return largest.values()


def _pairs(chunk: Chunk) -> int:
    return int(chunk.rows.stop - chunk.rows.start) * int(chunk.keys.stop - chunk.keys.start)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """[c, H, a] times [a, b] -> [c, H, b]; as a batch of one, since torchtitan's selective checkpointing keeps what `mm` gives, which
    would be the scores of every chunk."""
    return torch.bmm(x.flatten(0, 1).unsqueeze(0), matrix.unsqueeze(0)).view(*x.shape[:2], -1)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.to(wide_of(x.dtype))
