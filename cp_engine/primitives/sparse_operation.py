"""The steps of DeepSeek sparse attention as operations on the local ranks; `cp_engine.kernels.sparse.torch_ops` has the arithmetic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.tensors import INDEX
from cp_engine.exchange.channel import Channel
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.operation import Moving, Saved, Sketch, Sketches
from cp_engine.exchange.redistribute import Redistribution
from cp_engine.kernels.operands import without_autocast
from cp_engine.kernels.sparse import torch_ops
from cp_engine.kernels.sparse.table import SparseKernel
from cp_engine.kernels.sparse.visibility import Sight, rows_of


class SelectOperation:
    """The indexer's choice. No gradient goes through it: what the indexer learns comes from its loss alone.

    Args:
        sights: per local rank, its queries and keys.
        count: keys per query.
        is_learned: whether a later step gives the indexer's gradients; else they are zero.
        kernel: what computes it.
    """

    def __init__(self, sights: Sequence[Sight], count: int, is_learned: bool, kernel: SparseKernel) -> None:
        self._sights, self._count, self._is_learned, self._kernel = tuple(sights), count, is_learned, kernel

    def outline(self, sketches: Sketches) -> list[Sketch]:
        sketches["topk"] = [Sketch((*q.size[:3], self._count), torch.int32) for q in sketches["q_index"]]
        return [] if self._is_learned else [s for name in INDEX for s in sketches[name]]

    def forward(self, values: InFlight, scale: float) -> Moving:
        yield from ()
        given = _index(values)
        with without_autocast(given[0].q):
            values["topk"] = [
                self._kernel.select(index, sight, self._count) for index, sight in zip(given, self._sights, strict=True)
            ]
        return () if self._is_learned else _flat(given)

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        yield from ()
        n = len(self._sights)
        for i, name in enumerate(() if self._is_learned else INDEX):
            grads[name] = [torch.zeros_like(x) for x in saved[i * n : (i + 1) * n]]
        return ()


class SparseOperation:
    """Attention of every local rank to the selected keys, with lse kept for backward.

    Args:
        sights: per local rank, its queries and keys.
        kernel: what computes it.
    """

    def __init__(self, sights: Sequence[Sight], kernel: SparseKernel) -> None:
        self._sights, self._kernel = tuple(sights), kernel

    def outline(self, sketches: Sketches) -> list[Sketch]:
        given = [sketches[name] for name in ("q", "kv_latent", "k_rope", "topk")]
        q, latent = given[:2]
        sketches["out"] = [Sketch((*a.size[:3], b.size[3]), a.dtype) for a, b in zip(q, latent, strict=True)]
        sketches["lse"] = [Sketch(a.size[:3], torch_ops.wide_of(a.dtype)) for a in q]
        return [s for part in (*given, sketches["out"], sketches["lse"]) for s in part]

    def forward(self, values: InFlight, scale: float) -> Moving:
        yield from ()
        given = _given(values)
        with without_autocast(given[0].q):
            results = [self._kernel.attend(x, sight, scale) for x, sight in zip(given, self._sights, strict=True)]
        values["out"], values["lse"] = [out for out, _ in results], [lse for _, lse in results]
        return (*_flat(given), *values["out"], *values["lse"])

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        yield from ()
        n = len(self._sights)
        parts = [saved[i * n : (i + 1) * n] for i in range(6)]
        rows = zip(grads.pop("out"), *parts, self._sights, strict=True)
        with without_autocast(saved[0]):
            found = [
                self._kernel.attend_backward(dout, torch_ops.Given(q, latent, rope, topk), out, lse, sight, scale)
                for dout, q, latent, rope, topk, out, lse, sight in rows
            ]
        for i, name in enumerate(("q", "kv_latent", "k_rope")):
            grads[name] = [x[i] for x in found]
        return ()


class Beside:
    """The ranks that hold the other heads of the same queries, as tensor parallelism cuts them, this one included.

    Each of them needs the loss of all heads, and gets the same bits: what the indexer is made of is the same on all of them, and
    nobody sums its gradients over them.

    Args:
        channel: the way to them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def total(self, target: Tensor) -> Tensor:
        """What the heads of every rank attend to, summed over the ranks in one order."""
        return self._of_each(target).sum(0)

    def together(self, x: Tensor) -> Tensor:
        """[B, H, ...] -> [B, ranks x H, ...], rank after rank."""
        return self._of_each(x).movedim(0, 1).flatten(1, 2)

    def _of_each(self, x: Tensor) -> Tensor:
        found: Tensor = self._channel.all_gather(x.contiguous().flatten()).wait().view(self._channel.members, *x.shape)
        return found


class LearnOperation:
    """The indexer's loss. Its gradients are those of a sum, known once the loss is, so they are what is kept for backward.

    Args:
        attention: per local rank, the sight of its attention.
        indexer: per local rank, that of its indexer.
        selected: per local rank, the queries whose selection it holds.
        exchange: sums over ranks what heads attend to; None where a rank has all heads of its queries.
        beside: the same over ranks that are not the plan's; None where there are none.
        kernel: what computes it.
    """

    def __init__(
        self,
        attention: Sequence[Sight],
        indexer: Sequence[Sight],
        selected: Sequence[IndexSet],
        exchange: Redistribution | None,
        beside: Beside | None,
        kernel: SparseKernel,
    ) -> None:
        self._attention, self._indexer, self._exchange = tuple(attention), tuple(indexer), exchange
        self._beside = beside
        self._selected, self._kernel = tuple(selected), kernel
        # then attention can be made again chunk by chunk of the indexer; else it is brought to it key by key
        pairs = zip(self._attention, self._indexer, strict=True)
        self._holds_the_same = all((a.queries, a.keys) == (b.queries, b.keys) for a, b in pairs)

    def outline(self, sketches: Sketches) -> list[Sketch]:
        wide = torch_ops.wide_of(sketches["q"][0].dtype)
        sketches["indexer_loss"] = [Sketch((), wide) for _ in self._indexer]
        dtypes = {"k_index": wide}
        return [Sketch(s.size, dtypes.get(name, s.dtype)) for name in INDEX for s in sketches[name]]

    def forward(self, values: InFlight, scale: float) -> Moving:
        yield from ()
        given, index = _given(values), _index(values)
        with without_autocast(given[0].q):
            learned = self._learned(given, index, values["lse"], scale)
        values["indexer_loss"] = [loss for loss, _ in learned]
        return _flat([gradients for _, gradients in learned])

    def _learned(
        self, given: list[torch_ops.Given], index: list[torch_ops.Index], lse: list[Tensor], scale: float
    ) -> list[tuple[Tensor, torch_ops.Index]]:
        attended = [
            torch_ops.Attended(x.q, x.keys(sight), statistics, scale)
            for x, sight, statistics in zip(given, self._attention, lse, strict=True)
        ]
        topk, beside = [x.topk for x in given], self._beside
        if beside is not None and self._kernel.learns_from_heads:
            attended, beside = [x.all_heads(beside.together) for x in attended], None
        sources: Sequence[torch_ops.Attended | Tensor] = attended
        if self._exchange is not None or beside is not None or not self._holds_the_same:
            sources = [torch_ops.shares(*x) for x in zip(attended, topk, self._attention, strict=True)]
        if self._exchange is not None:
            sources = self._exchange.start({"target": [x for x in sources if isinstance(x, Tensor)]})()["target"]
            topk = [
                x.index_select(2, rows_of(sight.queries, held).to(x.device))
                for x, sight, held in zip(topk, self._indexer, self._selected, strict=True)
            ]
        if beside is not None:
            sources = [beside.total(x) if isinstance(x, Tensor) else x for x in sources]
        return [self._kernel.learn(*x) for x in zip(index, topk, self._indexer, sources, strict=True)]

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        yield from ()
        n, upstream = len(self._indexer), grads.pop("indexer_loss")
        for i, name in enumerate(INDEX):
            parts = saved[i * n : (i + 1) * n]
            grads[name] = [(x.to(g.dtype) * g).to(x.dtype) for x, g in zip(parts, upstream, strict=True)]
        return ()


def _index(values: InFlight) -> list[torch_ops.Index]:
    q, k, w = (values[name] for name in INDEX)
    return [torch_ops.Index(*x) for x in zip(q, k, w, strict=True)]


def _given(values: InFlight) -> list[torch_ops.Given]:
    q, latent, rope, topk = (values[name] for name in ("q", "kv_latent", "k_rope", "topk"))
    return [torch_ops.Given(*x) for x in zip(q, latent, rope, topk, strict=True)]


def _flat(parts: Sequence[tuple[Tensor, ...]]) -> Saved:
    """Tensors of each rank -> the same, tensor by tensor."""
    return tuple(x for same in zip(*parts, strict=True) for x in same)
