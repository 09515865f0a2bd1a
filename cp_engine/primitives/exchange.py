"""What all exchanges share: a destination layout is inferred, and transfers, bytes, adjoint and execution follow from it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.layout import Layout, cut_by, joined
from cp_engine.algebra.tensors import counts, element_bytes, heads_per_head, row
from cp_engine.algebra.transfer import Table, Transfer
from cp_engine.errors import CoverageError, Faulty, require
from cp_engine.exchange.operation import ExchangeOperation, Operation
from cp_engine.exchange.target import Target
from cp_engine.plan import fields
from cp_engine.plan.facts import Fact
from cp_engine.plan.ir import Cost, Plan, PlannedStep, Step
from cp_engine.plan.state import Passed, Refused, State, require_layout

PACKED_BYTES = 1 << 20
"""Up to this many bytes per rank, one collective for all tensors costs less than one each; above it, an extra copy of a large
buffer costs more than it saves (docs/benchmarks.md has the measurement)."""


@dataclass(frozen=True, kw_only=True)
class Exchange(Step):
    """A step that moves tensors between ranks.

    Args:
        tensors: names of the tensors that move, such as q, k, v.
    """

    tensors: tuple[str, ...] = fields.tensors()

    @abstractmethod
    def axes_of(self, state: State, tensor: str) -> tuple[str, ...]:
        """The mesh axes whose ranks exchange this tensor with each other."""

    @abstractmethod
    def destination(self, state: State, tensor: str) -> Layout:
        """The layout of a tensor after the step; raises Refused."""

    def history(self, state: State, tensor: str) -> tuple[Passed, ...]:
        """The exchanges that `undo` can take back after this step."""
        passed = Passed(step=self.name, axes=self.axes_of(state, tensor), before=state.layout(tensor))
        return (*state.history.get(tensor, ()), passed)

    def infer(self, state: State) -> tuple[State, tuple[Transfer, ...]]:
        layouts, histories, transfers = dict(state.layouts), dict(state.history), []
        for tensor in self.tensors:
            after = self._checked_destination(state, tensor)
            groups = tuple(state.mesh.groups(self._checked_axes(state, tensor)))
            transfer = Transfer(tensor, state.layout(tensor), after, groups, heads_per_head(state.shape, tensor))
            self._require_available(state, transfer)
            layouts[tensor], histories[tensor] = after, self.history(state, tensor)
            transfers.append(transfer)
        return replace(state, layouts=layouts, history=histories), tuple(transfers)

    def _checked_axes(self, state: State, tensor: str) -> tuple[str, ...]:
        axes, rule = self.axes_of(state, tensor), "axes_of returns a tuple of axes of the mesh, each once"
        require(self, "axes_of", axes, tuple, rule)
        if not set(axes) <= set(state.mesh.axes) or len(set(axes)) != len(axes):
            raise Faulty(self, "axes_of", f"returned {axes}, and the mesh has {state.mesh.axes}", rule)
        return axes

    def _checked_destination(self, state: State, tensor: str) -> Layout:
        after = self.destination(state, tensor)
        require_layout(self, "destination", after, state)
        return after

    def adjoint(self, planned: PlannedStep) -> tuple[Transfer, ...]:
        return tuple(t.adjoint for t in planned.transfers if row(t.tensor).has_gradient)

    def lower(self, planned: PlannedStep, plan: Plan, target: Target) -> Operation:
        return ExchangeOperation(
            planned.transfers,
            self.adjoint(planned),
            target,
            is_packed=self.is_packed(planned, plan),
            wide=plan.wide_gradients,
        )

    def is_packed(self, planned: PlannedStep, plan: Plan) -> bool:
        """Whether all tensors travel in one collective."""
        sent = self.links(planned, plan)[0].sum(1)
        return len(planned.transfers) > 1 and int(np.max(sent)) <= PACKED_BYTES

    def links(self, planned: PlannedStep, plan: Plan) -> tuple[Table, Table]:
        nothing: Table = np.zeros((plan.degree, plan.degree), dtype=np.int64)
        forward = sum((plan.sent(t, _sizes(plan, t.tensor)[0]) for t in planned.transfers), nothing)
        backward = sum((plan.sent(t, _sizes(plan, t.tensor)[1]) for t in self.adjoint(planned)), nothing)
        return forward, backward

    def cost(self, planned: PlannedStep, plan: Plan) -> Cost:
        forward, backward = self.links(planned, plan)
        made = np.sum(
            [counts(t.after, plan.part, t.tensor) * element_bytes(plan.shape, t.tensor) for t in planned.transfers],
            axis=0,
        )
        buffers = made + forward.sum(1) + forward.sum(0)
        return Cost(
            bytes_sent=(_ints(forward.sum(1)), _ints(backward.sum(1))),
            collectives=(self._collectives(planned, plan, 0), self._collectives(planned, plan, 1)),
            pairs=(0,) * plan.degree,
            buffer_bytes=_ints(buffers),
        )

    @property
    def moved(self) -> tuple[str, ...]:
        return self.tensors

    def facts(self, planned: PlannedStep, plan: Plan, cost: Cost, device: str) -> Sequence[Fact]:
        if not cost.collectives[0]:
            return ()
        is_packed = self.is_packed(planned, plan)
        how = "tensors of one dtype together" if is_packed else "each tensor alone"
        how += f": {', '.join(t.tensor for t in planned.transfers)}"
        n, m = (c * plan.head_groups for c in cost.collectives)
        data = {"sends": "packed" if is_packed else "separate"}
        return [Fact(label="exchange", text=f"{n} forward, {m} backward ({how})", data=data, is_traffic=True)]

    def _collectives(self, planned: PlannedStep, plan: Plan, way: int) -> int:
        transfers = (planned.transfers, self.adjoint(planned))[way]
        if not any(t.moves_anything for t in transfers):
            return 0
        kinds = {(row(t.tensor).dtype, _sizes(plan, t.tensor)[way]) for t in transfers}
        return len(kinds) if self.is_packed(planned, plan) else len(transfers)

    def joined(self, state: State, tensor: str, dim: str, axes: tuple[str, ...]) -> tuple[IndexSet, ...]:
        """What the ranks along `axes` hold together; refuses what would be there twice."""
        held = state.layout(tensor).of(dim)
        try:
            return joined(state.mesh, held, axes)
        except ValueError as error:
            uncut = [axis for axis in axes if axis not in cut_by(state.mesh, held)]
            what = f"the ranks along {', '.join(axes)} hold {tensor}'s {dim} more than once: {error}"
            if uncut:
                size = state.mesh.size(uncut)
                what = (
                    f"every rank along {', '.join(uncut)} holds the same {dim} of {tensor} already; "
                    f"joining them would count each position {size} times"
                )
            raise Refused(
                what,
                rule=f"an axis that joins {dim} must cut the same {dim} before: nothing may be there twice",
                tries=("'~cp.steps.{name}' 'cp.order=[{without}]'",),
                kind=CoverageError,
            ) from None

    def _require_available(self, state: State, transfer: Transfer) -> None:
        """Every element that a rank shall hold comes from exactly one rank of its group."""
        for group, table in zip(transfer.groups, transfer.tables, strict=True):
            for rank, arriving in zip(group, table.sum(0), strict=True):
                sequence, heads = transfer.after.sequence[rank], transfer.after.heads[rank]
                wanted = sequence.count * transfer.kv_count(heads)
                if int(arriving) != wanted:
                    raise Refused(
                        f"{transfer.tensor} at {state.mesh.coordinate(rank)} would need {wanted} (head, position) pairs "
                        f"and its group holds {arriving} of them",
                        rule="a step can only deliver what the ranks of its group hold",
                    )


def _sizes(plan: Plan, tensor: str) -> tuple[int, int]:
    """Bytes of an element, and of one of its gradient."""
    size = element_bytes(plan.shape, tensor)
    return size, 4 if tensor in plan.wide_gradients else size


def _ints(values: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[int, ...]:
    return tuple(int(v) for v in values)
