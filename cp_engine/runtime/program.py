"""Lower: a plan and the ranks of this process become one differentiable function of its inputs."""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from cp_engine.errors import CallError, Problem, calling, is_foreign, named
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.operation import ForeignOperation, Operation, Saved, Sketch, Sketches
from cp_engine.exchange.target import Target
from cp_engine.plan.ir import Plan, PlannedStep
from cp_engine.runtime.recompute import Memo, Record, versions_of

IN_FLIGHT = 3
"""Head groups at work at once: one computes, the exchange into the next one and out of the last one travel."""


def _lowered(planned: PlannedStep, plan: Plan, target: Target) -> Operation:
    """A step's operation; one of another package says in its own name what goes wrong in it."""
    key, step = f"cp.steps.{planned.step.name}", planned.step
    with named(key), calling(step, "lower"):
        operation = step.lower(planned, plan, target)
    return ForeignOperation(key, step, operation) if is_foreign(step) else operation


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
        self.outputs = ("out", *plan.losses)
        self.sizes: tuple[int, ...] = ()  # tensors that each operation saves, known after `outline`
        self.forwards = self.backwards = self.compiled_runs = 0  # passes that began, and forward ones of a graph
        self.operations: tuple[Operation, ...] = tuple(_lowered(s, plan, target) for s in plan.steps)
        self._groups = plan.head_groups
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
        return self.results(inputs, scale, memo)["out"]

    def results(
        self, inputs: Mapping[str, Sequence[Tensor]], scale: float, memo: Memo | None = None
    ) -> dict[str, list[Tensor]]:
        """As `run`, with the losses of the plan beside out: each local rank's share of a sum over queries."""
        found = _Run.apply(self, scale, memo, *(x for name in self.inputs for x in inputs[name]))
        n = len(self.target.ranks)
        return {name: list(found[i * n : (i + 1) * n]) for i, name in enumerate(self.outputs)}

    # -------------------------------------------------------------- passes, without autograd
    def made(self, name: str, inputs: Mapping[str, Sequence[Tensor]], scale: float) -> list[Tensor]:
        """A tensor that a step makes on the way, as that step leaves it, for those who check it."""
        values = InFlight({n: [x.detach() for x in xs] for n, xs in inputs.items()})
        for operation in self.operations:
            for _ in operation.forward(values, scale):
                pass
            if name in values:
                break
        found = values[name]
        values.settle()
        return found

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
            outs.append([s for name in self.outputs for s in part[name]])
        self.sizes = tuple(sizes)
        if self._groups == 1:
            return saved, outs[0]
        whole = [(s.size[0], s.size[1] * self._groups, *s.size[2:]) for s in outs[0]]
        return saved, [Sketch(size, s.dtype) for size, s in zip(whole, outs[0], strict=True)]

    def _sketched(self, name: str, s: Sketch) -> Sketch:
        dim = 0 if name in self._parameters else 1
        size = (*s.size[:dim], s.size[dim] // self._groups, *s.size[dim + 1 :])
        return s if self._groups == 1 else Sketch(size, s.dtype)

    def forward(self, values: Mapping[str, list[Tensor]], scale: float) -> Record:
        """Runs every operation, head group by head group."""
        self.forwards += 1
        if self._groups == 1:  # nothing to overlap with: the fewest calls
            values = InFlight(values)
            saved = _ended(self._forward_chain(values, scale))
            outs = tuple(x for name in self.outputs for x in values[name])
            return Record(outs, tuple(x for part in saved for x in part), tuple(map(len, saved)))
        parts = [self._part(values, i) for i in range(self._groups)]
        chains = [self._forward_chain(part, scale) for part in parts]
        records = interleaved(chains)
        outs = tuple(_joined([part["out"][i] for part in parts], 1) for i in range(len(self.target.ranks)))
        return Record(
            outs, tuple(x for saved in records for x in _flat(saved)), tuple(len(s) for saved in records for s in saved)
        )

    def backward(
        self, douts: Sequence[Tensor], saved: Saved, sizes: Sequence[int], scale: float
    ) -> Mapping[str, list[Tensor]]:
        """The gradients of the inputs: the adjoint of each operation, in reverse."""
        self.backwards += 1
        if self._groups == 1:
            each = len(self.target.ranks)
            grads = InFlight({name: list(douts[i * each : (i + 1) * each]) for i, name in enumerate(self.outputs)})
            _ended(self._backward_chain(grads, saved, sizes, scale))
            return grads
        n, chains, parts = len(self.operations), [], []
        for i in range(self._groups):
            here = list(sizes[i * n : (i + 1) * n])
            first = sum(sizes[: i * n])
            parts.append(InFlight({"out": [_cut(x, i, self._groups, 1) for x in douts]}))
            chains.append(self._backward_chain(parts[-1], saved[first : first + sum(here)], here, scale))
        interleaved(chains)
        ranks = range(len(self.target.ranks))
        return {
            name: [_joined([part[name][r] for part in parts], 0 if name in self._parameters else 1) for r in ranks]
            for name in self.inputs
        }

    def _part(self, values: Mapping[str, list[Tensor]], group: int) -> InFlight:
        dims = {name: 0 if name in self._parameters else 1 for name in values}
        return InFlight({n: [_cut(x, group, self._groups, dims[n]) for x in xs] for n, xs in values.items()})

    def _forward_chain(self, values: InFlight, scale: float) -> Generator[None, None, list[Saved]]:
        saved = []
        for operation in self.operations:
            saved.append((yield from operation.forward(values, scale)))
        values.settle()
        return saved

    def _backward_chain(
        self, grads: InFlight, saved: Saved, sizes: Sequence[int], scale: float
    ) -> Generator[None, None, list[Saved]]:
        end = len(saved)
        for operation, size in zip(reversed(self.operations), reversed(sizes), strict=True):
            yield from operation.backward(grads, saved[end - size : end], scale)
            end -= size
        grads.settle()
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
            memo.versions = versions_of(record)
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
        saved: Saved = ctx.saved_tensors  # type: ignore[attr-defined]  # a checkpoint recomputes here
        if ctx.memo is not None:  # type: ignore[attr-defined]
            ctx.memo.record = None  # type: ignore[attr-defined]
        grads = program.backward(douts, saved, ctx.sizes, ctx.scale)  # type: ignore[attr-defined]
        flat = [g for name in program.inputs for g in grads[name]]
        dtypes = ctx.dtypes  # type: ignore[attr-defined]
        return None, None, None, *(g if g.dtype == d else g.to(d) for g, d in zip(flat, dtypes, strict=True))
