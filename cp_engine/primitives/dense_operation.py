"""Attention as an operation: over keys that are there, or over blocks of keys that go round the ranks while it computes.

A ring of P ranks, rank r, block b (the keys of rank b):          r computes r, r-1, r-2, ... while the next block travels
Several axes nest: a full turn of the inner ring for every hop of the outer one, whose block travels during that whole turn.

Backward turns again: k and v come round as in forward (nothing but the own block is kept), and what each rank adds to a block's
gradient follows it, one hop behind, until it is home; the owner adds its own share there.
Source: arXiv 2310.01889 (ring), arXiv 2406.18485 section 4.3 (two levels).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cp_engine.exchange.channel import Channel, Pending
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.operation import Moving, Saved, Sketch, Sketches
from cp_engine.kernels.tiled import Backward, Forward, TiledAttention, sink_gradient

Visit: TypeAlias = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(block, k, v) -> dk, dv of that block."""


class Blocks(Protocol):
    """Brings every block of keys to the queries of the local ranks, and what they add to its gradient back to its owner."""

    def forward(self, k: Sequence[Tensor], v: Sequence[Tensor], ranks: Sequence[Forward]) -> None:
        """Lets each local rank attend to every block."""

    def backward(
        self, k: Sequence[Tensor], v: Sequence[Tensor], ranks: Sequence[Backward]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """dk and dv of each local rank's own block."""


@dataclass(frozen=True)
class LocalBlocks:
    """All blocks are in this process.

    Args:
        sources: per local rank, the local rank that owns each block.
    """

    sources: tuple[tuple[int, ...], ...]

    def forward(self, k: Sequence[Tensor], v: Sequence[Tensor], ranks: Sequence[Forward]) -> None:
        for rank, sources in zip(ranks, self.sources, strict=True):
            for block, source in enumerate(sources):
                rank.visit(block, k[source], v[source])

    def backward(
        self, k: Sequence[Tensor], v: Sequence[Tensor], ranks: Sequence[Backward]
    ) -> tuple[list[Tensor], list[Tensor]]:
        sums: list[tuple[Tensor, Tensor] | None] = [None] * len(ranks)
        for rank, sources in zip(ranks, self.sources, strict=True):
            for block, source in enumerate(sources):
                dk, dv = rank.visit(block, k[source], v[source])
                before = sums[source]
                sums[source] = (dk, dv) if before is None else (before[0] + dk, before[1] + dv)
        done = [s for s in sums if s is not None]
        return [dk for dk, _ in done], [dv for _, dv in done]


@dataclass(frozen=True, slots=True)
class Level:
    """One axis that blocks go round.

    Args:
        size: ranks along it.
        to: the member of the group that comes after this rank.
        source: the member before it.
    """

    size: int
    to: int
    source: int


class TravellingBlocks:
    """Blocks that travel: one buffer holds k and v, and the next one arrives while this one is attended to."""

    def __init__(self, channel: Channel, levels: Sequence[Level], blocks: Sequence[tuple[int, int]]) -> None:
        """Knows every block's size beforehand.

        Args:
            channel: the group of all ranks along the axes.
            levels: the axes, outermost first.
            blocks: (kv heads, positions) of each block, in the order in which this rank attends to them.
        """
        self._channel, self._levels, self._blocks = channel, tuple(levels), tuple(blocks)

    def forward(self, k: Sequence[Tensor], v: Sequence[Tensor], ranks: Sequence[Forward]) -> None:
        (rank,) = ranks
        self._go_round(_packed(k[0], v[0]), _Widths.of(k[0], v[0]), rank, 0, 0)

    def backward(
        self, k: Sequence[Tensor], v: Sequence[Tensor], ranks: Sequence[Backward]
    ) -> tuple[list[Tensor], list[Tensor]]:
        (rank,) = ranks
        widths = _Widths.of(k[0], v[0])
        dk, dv = self._unpacked(self._go_back(_packed(k[0], v[0]), widths, rank, 0, 0), widths, 0)
        return [dk], [dv]

    def _go_round(self, block: Tensor, widths: "_Widths", rank: Forward, depth: int, first: int) -> None:
        if depth == len(self._levels):
            rank.visit(first, *self._unpacked(block, widths, first))
            return
        level, turn = self._levels[depth], self._turn(depth)
        for i in range(level.size):
            coming = self._shift(block, widths, depth, first + (i + 1) * turn) if i + 1 < level.size else None
            self._go_round(block, widths, rank, depth + 1, first + i * turn)
            if coming is not None:
                block = coming.wait()

    def _go_back(self, block: Tensor, widths: "_Widths", rank: Backward, depth: int, first: int) -> Tensor:
        """What the ranks along the levels from `depth` on add to the gradient of this rank's block."""
        if depth == len(self._levels):
            return _packed(*rank.visit(first, *self._unpacked(block, widths, first)))
        level, turn = self._levels[depth], self._turn(depth)
        own = following = None  # this rank's share of its own block; the gradient of the block that it will hold next
        for i in range(level.size):
            coming = self._shift(block, widths, depth, first + (i + 1) * turn) if i + 1 < level.size else None
            share = self._go_back(block, widths, rank, depth + 1, first + i * turn)
            if i == 0:
                own = share
            else:
                if following is not None:
                    share += following.wait()
                ahead = first + (i + 1) % level.size * turn
                following = self._shift(share, widths, depth, ahead, is_gradient=True)
            if coming is not None:
                block = coming.wait()
        assert own is not None
        return own if following is None else own.add_(following.wait())

    def _shift(self, block: Tensor, widths: "_Widths", depth: int, ahead: int, *, is_gradient: bool = False) -> Pending:
        level = self._levels[depth]
        heads, positions = self._blocks[ahead]
        return self._channel.shift(
            block, level.to, level.source, widths.elements(heads, positions), 2 * depth + is_gradient
        )

    def _turn(self, depth: int) -> int:
        """Blocks between two hops at a level."""
        out = 1
        for level in self._levels[depth + 1 :]:
            out *= level.size
        return out

    def _unpacked(self, block: Tensor, widths: "_Widths", index: int) -> tuple[Tensor, Tensor]:
        heads, positions = self._blocks[index]
        size = widths.batch * heads * positions * widths.k
        return (
            block[:size].view(widths.batch, heads, positions, widths.k),
            block[size:].view(widths.batch, heads, positions, widths.v),
        )


@dataclass(frozen=True, slots=True)
class _Widths:
    """What all blocks of one call have in common."""

    batch: int
    k: int
    v: int

    @staticmethod
    def of(k: Tensor, v: Tensor) -> "_Widths":
        return _Widths(k.shape[0], k.shape[3], v.shape[3])

    def elements(self, heads: int, positions: int) -> int:
        return self.batch * heads * positions * (self.k + self.v)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


class AttendOperation:
    """Attention of every local rank: q, k, v -> out, with lse kept for backward.

    Args:
        ranks: what each local rank computes.
        blocks: how keys come to them.
        sinks: per local rank, the heads whose learned sinks it uses; None without sinks.
    """

    def __init__(
        self, ranks: Sequence[TiledAttention], blocks: Blocks, sinks: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        self._ranks, self._blocks, self._sinks = tuple(ranks), blocks, sinks

    def outline(self, sketches: Sketches) -> list[Sketch]:
        q, k, v = sketches.pop("q"), sketches.pop("k"), sketches.pop("v")
        whole = sketches.pop("sinks") if self._sinks is not None else []
        wide = torch.promote_types(q[0].dtype, torch.float32)
        sketches["out"] = [Sketch((*a.size[:3], v[0].size[3]), a.dtype) for a in q]
        return [*q, *k, *v, *sketches["out"], *(Sketch(a.size[:3], wide) for a in q), *whole]

    def forward(self, values: InFlight, scale: float) -> Moving:
        yield from ()  # nothing is in flight when it ends
        q, k, v = values.pop("q"), values.pop("k"), values.pop("v")
        runs = [Forward(a, x, v[0].shape[3], scale) for a, x in zip(self._ranks, q, strict=True)]
        self._blocks.forward(k, v, runs)
        whole = values.pop("sinks") if self._sinks is not None else []
        own: list[Tensor | None] = [None] * len(runs)
        if self._sinks is not None:
            own = [x[list(heads)] for x, heads in zip(whole, self._sinks, strict=True)]
        results = [run.result(sinks) for run, sinks in zip(runs, own, strict=True)]
        values["out"] = [out for out, _ in results]
        return (*q, *k, *v, *values["out"], *(lse for _, lse in results), *whole)

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        yield from ()
        n = len(self._ranks)
        q, k, v, out, lse = (saved[i * n : (i + 1) * n] for i in range(5))
        dout = grads.pop("out")
        rows = zip(self._ranks, dout, q, out, lse, strict=True)
        runs = [Backward(a, dout_, q_, out_, lse_, scale) for a, dout_, q_, out_, lse_ in rows]
        grads["k"], grads["v"] = self._blocks.backward(k, v, runs)
        grads["q"] = [run.result() for run in runs]
        if self._sinks is not None:
            grads["sinks"] = []
            for whole, heads, *rest in zip(saved[5 * n :], self._sinks, dout, out, lse, strict=True):
                share = torch.zeros_like(whole)
                share[list(heads)] = sink_gradient(whole[list(heads)], *rest).to(whole.dtype)
                grads["sinks"].append(share)
        return ()
