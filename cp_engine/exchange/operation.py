"""Operation: a lowered step, run forward and backward on the local ranks; the one of exchanges follows from transfers alone."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from cp_engine.algebra.tensors import row
from cp_engine.algebra.transfer import Transfer
from cp_engine.errors import calling, named
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.redistribute import Redistribution
from cp_engine.exchange.target import Target

Saved: TypeAlias = tuple[Tensor, ...]
Moving: TypeAlias = Generator[None, None, Saved]
"""What an operation runs as: it yields while something of it is in flight, so that another head group can compute."""


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A tensor's size and dtype; the same object stands for the same tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype


Sketches: TypeAlias = dict[str, list[Sketch]]


class Operation(Protocol):
    """A lowered step. It holds no tensors: what backward needs goes through autograd."""

    def outline(self, sketches: Sketches) -> list[Sketch]:
        """What `forward` does to sizes: replaces sketches, and returns those of what it saves, in the same order."""

    def forward(self, values: InFlight, scale: float) -> Moving:
        """Replaces tensors in `values` and returns what backward needs."""

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        """Replaces gradients in `grads`, of its outputs by those of its inputs."""


class ExchangeOperation:
    """Transfers forward, their adjoints backward; nothing is saved."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        adjoints: Sequence[Transfer],
        target: Target,
        *,
        is_packed: bool,
        wide: frozenset[str],
    ) -> None:
        self._names, self._gradients = (tuple(t.tensor for t in ts) for ts in (transfers, adjoints))
        # in one collective travels what has one dtype: positions, statistics, and gradients in float32, apart from the others
        self._wide = tuple(n for n in self._gradients if n in wide)
        kinds = [row(n).dtype for n in self._names] if is_packed else self._names
        self._forward = Redistribution(transfers, target, _bundles(self._names, kinds, is_packed=is_packed))
        apart = _bundles(self._gradients, [n in wide for n in self._gradients], is_packed=is_packed)
        self._backward = Redistribution(adjoints, target, apart) if adjoints else None

    def outline(self, sketches: Sketches) -> list[Sketch]:
        for name, sizes in self._forward.sizes.items():
            before = sketches[name]
            sketches[name] = [
                Sketch((b.size[0], heads, rows, b.size[3]), b.dtype)
                for b, (heads, rows) in zip(before, sizes, strict=True)
            ]
        return []

    def forward(self, values: InFlight, scale: float) -> Moving:
        values.later(self._names, self._forward.start(values))
        if not self._forward.is_local:
            yield
        return ()

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        if self._backward is None:
            return ()
        for name in self._wide:  # sums over ranks are made in float32
            grads[name] = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads[name]]
        grads.later(self._gradients, self._backward.start(grads))
        if not self._backward.is_local:
            yield
        return ()


class ForeignOperation:
    """The operation of a step of another package; what it raises becomes a PrimitiveError that names the step."""

    def __init__(self, key: str, step: object, operation: Operation) -> None:
        self._key, self._step, self._operation = key, step, operation

    def outline(self, sketches: Sketches) -> list[Sketch]:
        with named(self._key), calling(self._step, "lower().outline"):
            return self._operation.outline(sketches)

    def forward(self, values: InFlight, scale: float) -> Moving:
        with named(self._key), calling(self._step, "lower().forward"):
            return (yield from self._operation.forward(values, scale))

    def backward(self, grads: InFlight, saved: Saved, scale: float) -> Moving:
        with named(self._key), calling(self._step, "lower().backward"):
            return (yield from self._operation.backward(grads, saved, scale))


def _bundles(names: Sequence[str], kinds: Sequence[object], *, is_packed: bool) -> tuple[tuple[str, ...], ...]:
    """What travels in one collective: tensors of one kind."""
    if not is_packed:
        return tuple((n,) for n in names)
    first = sorted(set(kinds), key=kinds.index)
    return tuple(tuple(n for n, kind in zip(names, kinds, strict=True) if kind == of) for of in first)
