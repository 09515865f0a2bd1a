"""Lower: a plan and the ranks of this process become one differentiable function of its inputs."""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from cp_engine.errors import CallError, Problem
from cp_engine.plan import Plan
from cp_engine.redistribute import Redistribution, Target, Values
from cp_engine.transfer import Transfer

Saved: TypeAlias = tuple[Tensor, ...]
Moving: TypeAlias = Generator[None, None, Saved]
"""What an operation runs as: it yields while something of it is in flight, so that another head group can compute."""

IN_FLIGHT = 3
"""Head groups at work at once: one computes, the exchange into the next one and out of the last one travel."""


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

    def forward(self, values: Values, scale: float) -> Moving:
        """Replaces tensors in `values` and returns what backward needs."""

    def backward(self, grads: Values, saved: Saved, scale: float) -> Moving:
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
        names = tuple(t.tensor for t in transfers)
        # in one collective travels what has one dtype: gradients in float32 apart from the others
        by_dtype = (tuple(n for n in names if n in wide), tuple(n for n in names if n not in wide))
        together = (names,) if is_packed else tuple((n,) for n in names)
        apart = tuple(ns for ns in by_dtype if ns) if is_packed else together
        self._forward = Redistribution(transfers, target, together)
        self._backward = Redistribution(adjoints, target, apart)
        self._wide = tuple(n for n in names if n in wide)

    def outline(self, sketches: Sketches) -> list[Sketch]:
        for name, sizes in self._forward.sizes.items():
            before = sketches[name]
            sketches[name] = [
                Sketch((b.size[0], heads, rows, b.size[3]), b.dtype)
                for b, (heads, rows) in zip(before, sizes, strict=True)
            ]
        return []

    def forward(self, values: Values, scale: float) -> Moving:
        finish = self._forward.start(values)
        if not self._forward.is_local:
            yield
        values.update(finish())
        return ()

    def backward(self, grads: Values, saved: Saved, scale: float) -> Moving:
        for name in self._wide:  # sums over ranks are made in float32
            grads[name] = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads[name]]
        finish = self._backward.start(grads)
        if not self._backward.is_local:
            yield
        grads.update(finish())
        return ()


@dataclass(frozen=True, slots=True)
class Record:
    """A forward pass that has run: its results, what backward needs, and how many tensors of that belong to each operation.

    Args:
        outs: per local rank, in the entry layout.
        saved: operation by operation, head group by head group.
        sizes: tensors of each operation, in that order.
    """

    outs: tuple[Tensor, ...]
    saved: Saved
    sizes: tuple[int, ...]


@dataclass(slots=True)
class Memo:
    """Where a forward pass leaves its record, so that a recompute repeats neither attention nor its traffic.

    Args:
        record: set by the first pass; emptied by its backward.
        prints: a digest of every input, by which a recompute finds the pass that it repeats.
    """

    record: Record | None = None
    prints: tuple[Tensor, ...] = ()


class Program:
    """A plan, executable on some of its ranks."""

    def __init__(self, plan: Plan, target: Target) -> None:
        """Lowers every step.

        Args:
            plan: what to do.
            target: the ranks that live here and how to reach the others.
        """
        self.target = target
        self.inputs = (*plan.inputs, *plan.parameters)
        self.compiled_runs = 0  # forward passes as an operator of a graph
        self.sizes: tuple[int, ...] = ()  # tensors that each operation saves, known after `outline`
        self.backwards = 0  # how often a gradient went through, so that it is known when there is something to sum
        self.operations: tuple[Operation, ...] = tuple(s.step.lower(s, plan, target) for s in plan.steps)
        self._groups = plan.pipeline
        self._parameters = frozenset(plan.parameters)

    def __call__(self, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], scale: float) -> list[Tensor]:
        """Attends, for plans whose inputs are q, k and v; differentiable once.

        Args:
            q: per local rank, [B, H, S_local, D] in the plan's entry layout.
            k: per local rank, [B, K, S_local, D].
            v: per local rank, [B, K, S_local, Dv].
            scale: factor on the scores.

        Returns:
            Per local rank, [B, H, S_local, Dv].
        """
        return self.run({"q": q, "k": k, "v": v}, scale)

    def run(self, inputs: Mapping[str, Sequence[Tensor]], scale: float, memo: Memo | None = None) -> list[Tensor]:
        """Attends; differentiable once.

        Args:
            inputs: the plan's tensors and parameters by name, one per local rank; parameters are whole on every rank, and each
                rank's gradient of them is its share of the sum.
            scale: factor on the scores.
            memo: keeps the pass; one that holds a record is used in place of computing.

        Returns:
            Per local rank, [B, H, S_local, Dv].
        """
        return list(_Run.apply(self, scale, memo, *(x for name in self.inputs for x in inputs[name])))

    # -------------------------------------------------------------- passes, without autograd
    def outline(self, inputs: Sketches) -> tuple[list[Sketch], list[Sketch]]:
        """The sizes of a forward pass: of what it saves (an input's own sketch where that is saved) and of its results."""
        saved: list[Sketch] = []
        outs: list[list[Sketch]] = []
        sizes = []
        for _ in range(self._groups):
            part = {name: [self._sketched(name, s) for s in sketches] for name, sketches in inputs.items()}
            for operation in self.operations:
                made = operation.outline(part)
                saved += made
                sizes.append(len(made))
            outs.append(part["out"])
        self.sizes = tuple(sizes)
        whole = [(s.size[0], s.size[1] * self._groups, *s.size[2:]) for s in outs[0]]
        return saved, [Sketch(size, s.dtype) for size, s in zip(whole, outs[0], strict=True)]

    def _sketched(self, name: str, s: Sketch) -> Sketch:
        dim = 0 if name in self._parameters else 1
        size = (*s.size[:dim], s.size[dim] // self._groups, *s.size[dim + 1 :])
        return s if self._groups == 1 else Sketch(size, s.dtype)

    def forward(self, values: Values, scale: float) -> Record:
        """Runs every operation, head group by head group."""
        if self._groups == 1:  # nothing to overlap with: the fewest calls
            saved = _ended(self._forward_chain(values, scale))
            return Record(tuple(values["out"]), tuple(x for part in saved for x in part), tuple(map(len, saved)))
        parts = [self._part(values, i) for i in range(self._groups)]
        chains = [self._forward_chain(part, scale) for part in parts]
        records = interleaved(chains)
        outs = tuple(_joined([part["out"][i] for part in parts], 1) for i in range(len(self.target.ranks)))
        return Record(
            outs, tuple(x for saved in records for x in _flat(saved)), tuple(len(s) for saved in records for s in saved)
        )

    def backward(self, douts: Sequence[Tensor], saved: Saved, sizes: Sequence[int], scale: float) -> Values:
        """The gradients of the inputs: the adjoint of each operation, in reverse."""
        if self._groups == 1:
            grads: Values = {"out": list(douts)}
            _ended(self._backward_chain(grads, saved, sizes, scale))
            return grads
        n, chains, parts = len(self.operations), [], []
        for i in range(self._groups):
            here = list(sizes[i * n : (i + 1) * n])
            first = sum(sizes[: i * n])
            parts.append({"out": [_cut(x, i, self._groups, 1) for x in douts]})
            chains.append(self._backward_chain(parts[-1], saved[first : first + sum(here)], here, scale))
        interleaved(chains)
        ranks = range(len(self.target.ranks))
        return {
            name: [_joined([part[name][r] for part in parts], 0 if name in self._parameters else 1) for r in ranks]
            for name in self.inputs
        }

    def _part(self, values: Values, group: int) -> Values:
        return {
            name: [_cut(x, group, self._groups, 0 if name in self._parameters else 1) for x in xs]
            for name, xs in values.items()
        }

    def _forward_chain(self, values: Values, scale: float) -> Generator[None, None, list[Saved]]:
        saved = []
        for operation in self.operations:
            saved.append((yield from operation.forward(values, scale)))
        return saved

    def _backward_chain(
        self, grads: Values, saved: Saved, sizes: Sequence[int], scale: float
    ) -> Generator[None, None, list[Saved]]:
        end = len(saved)
        for operation, size in zip(reversed(self.operations), reversed(sizes), strict=True):
            yield from operation.backward(grads, saved[end - size : end], scale)
            end -= size
        return []


def _ended(chain: Generator[None, None, list[Saved]]) -> list[Saved]:
    """What a chain returns that nothing else runs beside."""
    while True:
        try:
            next(chain)
        except StopIteration as end:
            saved: list[Saved] = end.value
            return saved


def interleaved(chains: Iterable[Generator[None, None, list[Saved]]]) -> list[list[Saved]]:
    """Runs chains so that one computes while others travel; the order depends on nothing but their number.

    Args:
        chains: one per head group; each yields when it has sent something off.

    Returns:
        What each chain returned.
    """
    waiting, active = deque(enumerate(chains)), deque[tuple[int, Generator[None, None, list[Saved]]]]()
    done: dict[int, list[Saved]] = {}
    while waiting or active:
        # the first ones start one after the other, so that their exchanges travel together
        i, chain = waiting.popleft() if waiting and len(active) < IN_FLIGHT else active.popleft()
        try:
            next(chain)
        except StopIteration as end:
            done[i] = end.value
        else:
            active.append((i, chain))
    return [done[i] for i in sorted(done)]


def _flat(saved: Iterable[Saved]) -> Iterable[Tensor]:
    return (x for one in saved for x in one)


def _cut(x: Tensor, group: int, groups: int, dim: int) -> Tensor:
    return x if groups == 1 else x.narrow(dim, group * (x.shape[dim] // groups), x.shape[dim] // groups)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class _Run(torch.autograd.Function):
    """The whole composition as one node of the graph."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, program: Program, scale: float, memo: Memo | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        n, record = len(program.target.ranks), memo.record if memo is not None else None
        if record is None:
            record = program.forward(
                {name: list(tensors[i * n : (i + 1) * n]) for i, name in enumerate(program.inputs)}, scale
            )
        outs = record.outs
        if memo is not None:  # what is kept must not be what autograd makes part of this graph
            memo.record, outs = record, tuple(x.detach() for x in outs)
        ctx.save_for_backward(*record.saved)
        ctx.program, ctx.scale, ctx.sizes, ctx.memo = program, scale, record.sizes, memo  # type: ignore[attr-defined]
        ctx.dtypes = [x.dtype for x in tensors]  # type: ignore[attr-defined]
        return outs

    @staticmethod
    def backward(ctx: FunctionCtx, *douts: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            what = "a second derivative was asked for (create_graph=True), and the adjoint is not differentiable"
            raise CallError([Problem(key="backward", what=what)])
        program: Program = ctx.program  # type: ignore[attr-defined]
        program.backwards += 1
        saved: Saved = ctx.saved_tensors  # type: ignore[attr-defined]  # a checkpoint recomputes here
        if ctx.memo is not None:  # type: ignore[attr-defined]
            ctx.memo.record = None  # type: ignore[attr-defined]
        grads = program.backward(douts, saved, ctx.sizes, ctx.scale)  # type: ignore[attr-defined]
        flat = [g for name in program.inputs for g in grads[name]]
        dtypes = ctx.dtypes  # type: ignore[attr-defined]
        return None, None, None, *(g if g.dtype == d else g.to(d) for g, d in zip(flat, dtypes, strict=True))
