"""Sight: which of a rank's keys each of its queries may see, as rows of booleans for a few queries at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cp_engine.algebra.band import Band
from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.mask import Mask
from cp_engine.algebra.transfer import Numbers


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some of a rank's queries, and the range of its keys, in ascending order, outside of which they see nothing.

    Args:
        rows: local queries.
        keys: among the keys in ascending order.
        is_dense: whether there are so few keys in it that computing with all of them is cheaper than copying some.
    """

    rows: slice
    keys: slice
    is_dense: bool = True


@dataclass(frozen=True, eq=False)
class Sight:
    """The queries and keys that a rank holds, under a mask.

    Keys are numbered in ascending order, so that the first of equal ones is the one with the lowest position on every rank.

    Args:
        queries: positions of the local queries, in local order.
        keys: positions of the local keys, in local order.
        mask: what is visible.
    """

    queries: IndexSet
    keys: IndexSet
    mask: Mask

    @cached_property
    def _queries(self) -> Numbers:
        return positions(self.queries)

    @cached_property
    def _keys(self) -> Numbers:
        return np.sort(positions(self.keys))

    @cached_property
    def _order(self) -> Tensor | None:
        """Local keys in ascending order; None where they lie so."""
        return None if self.keys.is_ascending else torch.from_numpy(np.argsort(positions(self.keys)))

    def ascending(self, x: Tensor, dim: int) -> Tensor:
        """Keys in local order -> in ascending order."""
        return x if self._order is None else x.index_select(dim, self._order.to(x.device))

    def as_given(self, x: Tensor, dim: int) -> Tensor:
        """Keys in ascending order -> in local order."""
        return x if self._order is None else x.index_select(dim, self._order.argsort().to(x.device))

    def places(self, positions: Tensor) -> Tensor:
        """Global positions -> places among the ascending keys, int64; -1 stays."""
        where = torch.full((self.mask.size + 1,), -1, dtype=torch.int64)
        where[torch.from_numpy(self._keys)] = torch.arange(self.keys.count)
        return where.to(positions.device)[positions.long()]  # -1 is the last one, which no key has

    def positions_of(self, places: Tensor) -> Tensor:
        """Places among the ascending keys -> global positions, int32, ascending along the last dim; -1 comes last."""
        known = torch.from_numpy(self._keys.astype(np.int32)).to(places.device)
        behind = torch.full((1,), self.mask.size, dtype=torch.int32, device=places.device)
        found = torch.cat((known, behind))[places.long()].sort(-1).values  # -1 is the last one
        return found.masked_fill(found == self.mask.size, -1)

    def keys_before(self, position: int) -> int:
        """How many keys lie before a position."""
        return int(np.searchsorted(self._keys, position))

    def key_positions(self, chunk: Chunk, device: torch.device) -> Tensor:
        """Positions of a chunk's keys, [n], int32."""
        return torch.from_numpy(self._keys[chunk.keys].astype(np.int32)).to(device)

    def visible(self, chunk: Chunk, device: torch.device) -> Tensor:
        """[c, n], whether each query of a chunk sees each of its keys."""
        q = torch.from_numpy(self._queries[chunk.rows]).to(device).unsqueeze(1)
        k = torch.from_numpy(self._keys[chunk.keys]).to(device)
        seen = torch.zeros((q.shape[0], k.shape[0]), dtype=torch.bool, device=device)
        for band in self._bands(self._queries[chunk.rows]):
            seen |= _inside(band, q, k, self.mask.size)
        return seen

    def chunks(self, rows: int, sparse_rows: int = 0, dense_keys: int = -1) -> Iterator[Chunk]:
        """The queries, some at a time.

        Args:
            rows: queries of a chunk.
            sparse_rows: queries of a chunk that is not dense; 0: all are.
            dense_keys: up to this many keys a chunk is dense.
        """
        for start in range(0, len(self._queries), rows):
            stop = min(start + rows, len(self._queries))
            keys = self._range(start, stop)
            if keys.stop - keys.start <= dense_keys or not sparse_rows:
                yield Chunk(slice(start, stop), keys)
                continue
            for first in range(start, stop, sparse_rows):
                last = min(first + sparse_rows, stop)
                yield Chunk(slice(first, last), self._range(first, last), False)

    def _range(self, start: int, stop: int) -> slice:
        """The ascending keys between the first and the last one that some of the queries see."""
        queries = self._queries[start:stop]
        first, last = self.mask.size, 0
        for band in self._bands(queries):
            inside = queries[(queries >= band.q0) & (queries < band.q1)]
            low, high = max(band.k0, int(inside.min()) - band.high), min(band.k1, int(inside.max()) - band.low + 1)
            if low < high:
                first, last = min(first, low), max(last, high)
        place = int(np.searchsorted(self._keys, first))
        return slice(place, max(place, int(np.searchsorted(self._keys, last))))

    def _bands(self, queries: Numbers) -> list[Band]:
        """The bands in which one of some queries is."""
        return [b for b in self.mask.bands if bool(((queries >= b.q0) & (queries < b.q1)).any())]


def _inside(band: Band, q: Tensor, k: Tensor, size: int) -> Tensor:
    """Which pairs of positions are in a band, [c, n]; bounds that cut nothing are left out."""
    distance = q - k
    seen = distance >= band.low
    if band.high < size:
        seen = seen & (distance <= band.high)
    if band.q0 > 0 or band.q1 < size:
        seen = seen & ((q >= band.q0) & (q < band.q1))
    if band.k0 > 0 or band.k1 < size:
        seen = seen & ((k >= band.k0) & (k < band.k1))
    return seen


def positions(held: IndexSet) -> Numbers:
    """The members of a set in local order, [n]."""
    runs = [np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in held.runs]
    return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)


def rows_of(wanted: IndexSet, held: IndexSet) -> Tensor:
    """Where some members of a set lie in its local order, int64."""
    order = np.argsort(positions(held))
    return torch.from_numpy(order[np.searchsorted(positions(held), positions(wanted), sorter=order)])


def seen_keys(queries: IndexSet, mask: Mask) -> Numbers:
    """How many keys of the whole sequence each query sees, [n]."""
    q = positions(queries)
    seen = np.zeros(len(q), dtype=np.int64)
    for b in mask.bands:
        keys = np.minimum(b.k1, q - b.low + 1) - np.maximum(b.k0, q - b.high)
        seen += np.where((q >= b.q0) & (q < b.q1), np.maximum(keys, 0), 0)
    return seen
