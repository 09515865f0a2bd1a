"""Redistribute: executes transfers. One pack, one collective (or none in one process), one unpack; the adjoint is the reverse, summed.

Source of the idea that every exchange is one uneven all-to-all: the sub-box intersection of arXiv 2311.09431's reorderings and of
MPI_Alltoallw; all_gather is a fast path for even, complete gathers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

from cp_engine.algebra.index_set import Run
from cp_engine.algebra.layout import Layout
from cp_engine.algebra.transfer import Block, Transfer
from cp_engine.exchange.channel import Channel, Pending
from cp_engine.exchange.equal_chunks import Even, even
from cp_engine.exchange.equal_chunks import start as start_even
from cp_engine.exchange.target import Target

Piece: TypeAlias = "tuple[str, _Box, tuple[int, ...], tuple[int, ...], int]"
"""A tensor's name, its box, and where that lies in a flat buffer: size, stride, offset."""


@dataclass(frozen=True, slots=True)
class _Box:
    """A part of a tensor [B, H, S, D]; None where a dim is taken whole."""

    heads: slice | None
    sequence: slice | None

    def of(self, x: Tensor) -> Tensor:
        """The part, as a view."""
        if self.heads is not None:
            x = x[:, self.heads]
        return x if self.sequence is None else x[:, :, self.sequence]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of one tensor on its way between this process and a peer (its place in the group)."""

    tensor: str
    peer: int
    box: _Box
    heads: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor of one local rank after the exchange: its sizes, and what is copied within the process."""

    heads: int
    sequence: int
    local: tuple[tuple[int, _Box, _Box], ...]
    is_summed: bool
    starts_empty: bool


@dataclass(frozen=True, slots=True)
class _Bundle:
    """One collective for one batch size: where each piece lies in the flat buffers."""

    names: tuple[str, ...]
    sent: tuple[Piece, ...]
    received: tuple[Piece, ...]
    leaving: int
    per_peer: list[int]
    per_source: list[int]


class Redistribution:
    """The transfers of one step, ready to run on the local ranks."""

    def __init__(self, transfers: Sequence[Transfer], target: Target, bundles: Sequence[tuple[str, ...]]) -> None:
        """Works out every box once.

        Args:
            transfers: one per tensor, over the same groups.
            target: which ranks are here and how to reach the others.
            bundles: names of the tensors that travel in one collective; each of one dtype.
        """
        self._tensors = tuple(t.tensor for t in transfers)
        self._names = tuple(bundles)
        groups = {r: g for g in transfers[0].groups for r in g}
        here = {r: i for i, r in enumerate(target.ranks)}
        self._results = {t.tensor: [_result(t, groups[r], r, here) for r in target.ranks] for t in transfers}
        self._group: tuple[int, ...] = ()
        self._sent: list[_Piece] = []
        self._received: list[_Piece] = []
        self._is_gather = False
        self._channel: Channel | None = None
        self._evens: list[tuple[Even, ...]] = []
        self._bundles: dict[int, list[_Bundle]] = {}
        if target.communicator is not None and any(t.moves_anything for t in transfers):
            (rank,) = target.ranks
            self._group = tuple(sorted(groups[rank]))
            self._me = self._group.index(rank)
            self._channel = target.communicator.channel(self._group)
            self._is_gather = all(t.is_even_gather for t in transfers)
            evens = {t.tensor: even(t, rank, self._group) for t in transfers}
            if all(evens.values()):
                self._evens = [tuple(e for n in names if (e := evens[n]) is not None) for names in self._names]
            for i, peer in enumerate(self._group):
                for t in transfers if peer != rank else ():
                    heads_, sequence_ = sizes(t, rank, t.source)
                    self._sent += [_piece(t.tensor, i, _from(b, heads_, sequence_), b) for b in t.blocks(rank, peer)]
                    heads_, sequence_ = sizes(t, rank, t.result)
                    self._received += [_piece(t.tensor, i, _to(b, heads_, sequence_), b) for b in t.blocks(peer, rank)]

    def start(self, values: Mapping[str, list[Tensor]]) -> Callable[[], Mapping[str, list[Tensor]]]:
        """Sends off what leaves this process.

        Args:
            values: per tensor and local rank, [B, H, S, D] in the layout before.

        Returns:
            What waits for the rest and gives the same tensors in the layout after, contiguous.
        """
        channel = self._channel
        if channel is None:
            here = {name: self._local(self._results[name], values[name]) for name in self._tensors}
            return lambda: here
        if self._evens:
            waits = []
            for names, evens in zip(self._names, self._evens, strict=True):
                waits.append(start_even(evens, [values[n][0] for n in names], channel, is_gather=self._is_gather))
            return partial(_finished, self._names, waits)
        batch = values[self._tensors[0]][0].shape[0]
        if batch not in self._bundles:  # a pure function: ranks cannot disagree on whether to exchange
            self._bundles[batch] = [self._bundle(names, values) for names in self._names]
        sent = [self._send(bundle, values, channel) for bundle in self._bundles[batch]]
        results = {name: self._local(self._results[name], values[name]) for name in self._tensors}

        def finish() -> Mapping[str, list[Tensor]]:
            for bundle in self._bundles[batch]:  # a buffer is let go when it is unpacked
                self._unpack(bundle, sent.pop(0).wait(), results)
            return results

        return finish

    @property
    def sizes(self) -> dict[str, list[tuple[int, int]]]:
        """Heads and positions of each tensor on each local rank, after the exchange."""
        return {name: [(r.heads, r.sequence) for r in results] for name, results in self._results.items()}

    @property
    def is_local(self) -> bool:
        """Whether nothing leaves this process."""
        return self._channel is None

    def _local(self, ranks: list[_Result], sources: list[Tensor]) -> list[Tensor]:
        """Fresh tensors with what comes from ranks of this process."""
        like, out = sources[0], []
        for result in ranks:
            make = like.new_empty if result.starts_empty else like.new_zeros
            x = make((like.shape[0], result.heads, result.sequence, like.shape[3]))
            for i, (source, box_from, box_to) in enumerate(result.local):
                if result.is_summed and not (i == 0 and result.starts_empty):
                    box_to.of(x).add_(box_from.of(sources[source]))
                else:
                    box_to.of(x).copy_(box_from.of(sources[source]))
            out.append(x)
        return out

    def _bundle(self, names: tuple[str, ...], values: Mapping[str, list[Tensor]]) -> _Bundle:
        batch, widths = values[names[0]][0].shape[0], {n: values[n][0].shape[3] for n in names}

        def laid_out(pieces: list[_Piece], gap: int = -1) -> tuple[list[Piece], list[int]]:
            views: list[Piece] = []
            per_peer, offset = [0] * len(self._group), 0
            for p in pieces:
                if p.tensor in widths:
                    width = widths[p.tensor]
                    size = (batch, p.heads, p.rows, width)
                    stride = (p.heads * p.rows * width, p.rows * width, width, 1)
                    skipped = offset + (gap if gap > 0 and p.peer > self._me else 0)
                    views.append((p.tensor, p.box, size, stride, skipped))
                    offset += batch * p.heads * p.rows * width
                    per_peer[p.peer] += batch * p.heads * p.rows * width
            return views, per_peer

        # a gather sends everybody the same, once, and gets its own part back in the middle of what comes in
        first = [p for p in self._sent if not self._is_gather or p.peer == self._sent[0].peer]
        sent, per_peer = laid_out(first)
        received, per_source = laid_out(self._received, sum(per_peer) if self._is_gather else -1)
        return _Bundle(names, tuple(sent), tuple(received), sum(per_peer), per_peer, per_source)

    def _send(self, bundle: _Bundle, values: Mapping[str, list[Tensor]], channel: Channel) -> Pending:
        send = values[bundle.names[0]][0].new_empty(bundle.leaving)
        for tensor, box, size, stride, offset in bundle.sent:
            send.as_strided(size, stride, offset).copy_(box.of(values[tensor][0]))
        if self._is_gather:
            return channel.all_gather(send)
        return channel.all_to_all(send, bundle.per_peer, bundle.per_source)

    def _unpack(self, bundle: _Bundle, buffer: Tensor, results: Mapping[str, list[Tensor]]) -> None:
        for tensor, box, size, stride, offset in bundle.received:
            view, place = buffer.as_strided(size, stride, offset), box.of(results[tensor][0])
            if self._results[tensor][0].is_summed:
                place.add_(view)
            else:
                place.copy_(view)


def _finished(names: Sequence[tuple[str, ...]], waits: list[Callable[[], list[Tensor]]]) -> Mapping[str, list[Tensor]]:
    results: dict[str, list[Tensor]] = {}
    for together in names:  # a buffer is let go when its tensors are made of it
        for name, x in zip(together, waits.pop(0)(), strict=True):
            results[name] = [x]
    return results


def sizes(transfer: Transfer, rank: int, layout: Layout) -> tuple[int, int]:
    """Local heads and positions of a tensor under a layout."""
    return transfer.kv_count(layout.heads[rank]), layout.sequence[rank].count


def _result(transfer: Transfer, group: tuple[int, ...], rank: int, here: Mapping[int, int]) -> _Result:
    heads, sequence = sizes(transfer, rank, transfer.result)
    is_summed = transfer.is_adjoint and transfer.is_replicating
    own, local = transfer.blocks(rank, rank), []
    for source in sorted((p for p in group if p in here), key=lambda p: p != rank):  # its own part first
        for b in own if source == rank else transfer.blocks(source, rank):
            local.append((here[source], _from(b, *sizes(transfer, source, transfer.source)), _to(b, heads, sequence)))
    if is_summed:  # the own part, where it is one box that covers everything, is what the rest is added to
        starts_empty = len(own) == 1 and own[0].rows == heads * sequence
    else:
        arriving = transfer.tables[transfer.groups.index(group)][:, group.index(rank)]
        starts_empty = int(arriving.sum()) == heads * sequence
    return _Result(heads, sequence, tuple(local), is_summed, starts_empty)


def _piece(tensor: str, peer: int, box: _Box, block: Block) -> _Piece:
    return _Piece(tensor, peer, box, block.heads_from.count, block.sequence_from.count)


def _from(block: Block, heads: int, sequence: int) -> _Box:
    return _Box(_part(block.heads_from, heads), _part(block.sequence_from, sequence))


def _to(block: Block, heads: int, sequence: int) -> _Box:
    return _Box(_part(block.heads_to, heads), _part(block.sequence_to, sequence))


def _part(r: Run, size: int) -> slice | None:
    return None if r.count == size else r.slice()
