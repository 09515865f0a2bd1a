"""The composition and its plan: layouts and transfers of every rank, equal on all ranks, without a device or a process group."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cp_engine.algebra.layout import Layout, Mesh
from cp_engine.algebra.mask import Mask
from cp_engine.algebra.shape import BYTES, Shape, part_of
from cp_engine.algebra.tensors import row, width
from cp_engine.algebra.transfer import Table, Transfer
from cp_engine.errors import Faulty, calling, named, require
from cp_engine.plan.facts import Fact
from cp_engine.plan.state import State
from cp_engine.plan.token_layout import TokenLayout

if TYPE_CHECKING:
    from cp_engine.exchange.operation import Operation
    from cp_engine.exchange.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one step costs, per rank; index 0 of the last field is forward, 1 backward.

    Args:
        bytes_sent: [2][ranks] bytes that leave each rank.
        collectives: [2] collectives that each rank takes part in.
        pairs: [ranks] visible (query head, query, key) triples computed, forward.
        buffer_bytes: [ranks] bytes of what the step makes: its outputs and exchange buffers, forward.
        index_pairs: [ranks] visible (index head, query, key) triples scored, forward; empty where a step has no indexer.
    """

    bytes_sent: tuple[tuple[int, ...], tuple[int, ...]]
    collectives: tuple[int, int]
    pairs: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    index_pairs: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step(ABC):
    """A primitive: its fields, and what follows from them, side by side.

    Args:
        name: the step's key in the composition.
    """

    kind: ClassVar[str]
    consumes: ClassVar[tuple[str, ...]] = ()
    """Tensors that it needs and that end with it; those that no earlier step makes come with the call."""
    uses: ClassVar[tuple[str, ...]] = ()
    """Likewise, and they stay."""
    makes: ClassVar[tuple[str, ...]] = ()
    """Tensors that there are from it on."""
    differentiates: ClassVar[tuple[str, ...] | None] = None
    """Tensors whose gradients it gives; None: those that it consumes."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Numbers that it makes beside them: each rank's share of a sum over queries."""
    name: str

    @property
    def looks_at_mask(self) -> bool:
        """Whether the step leaves out keys that the mask hides."""
        return False

    @property
    def deals_by_mask(self) -> bool:
        """Whether the order in which the step deals tokens follows from the mask."""
        return False

    @property
    def takes_back(self) -> str:
        """The name of the step whose exchange this one takes back."""
        return ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters of the model that it needs, with one row per query head."""
        return ()

    @abstractmethod
    def infer(self, state: State) -> "tuple[State, tuple[Transfer, ...]]":
        """The layouts after this step and the transfers that bring them about; raises Refused."""

    @abstractmethod
    def adjoint(self, planned: "PlannedStep") -> "tuple[Transfer, ...]":
        """The transfers that the gradients make; empty where nothing moves."""

    @abstractmethod
    def cost(self, planned: "PlannedStep", plan: "Plan") -> Cost:
        """Bytes, work and buffers, from the same layouts and transfers that are executed."""

    @abstractmethod
    def lower(self, planned: "PlannedStep", plan: "Plan", target: "Target") -> "Operation":
        """The step as something to run on the target's ranks: forward, and its adjoint as backward."""

    @property
    def moved(self) -> tuple[str, ...]:
        """The tensors that it leaves in a new layout."""
        return self.makes

    def facts(self, planned: "PlannedStep", plan: "Plan", cost: Cost, device: str) -> Sequence[Fact]:
        """What `mode=explain` says of it beside its row.

        Args:
            planned: the step with its layouts.
            plan: that it is of.
            cost: of one head group.
            device: device type for which kernels are chosen.
        """
        return ()

    def links(self, planned: "PlannedStep", plan: "Plan") -> tuple[Table, Table]:
        """Bytes from rank to rank, forward and backward; what a rank keeps is not counted."""
        nothing = np.zeros((plan.degree, plan.degree), dtype=np.int64)
        return nothing, nothing

    @property
    def used_axes(self) -> tuple[str, ...]:
        """The mesh axes that the step's own fields name."""
        return ()


def used_axes(step: Step) -> tuple[str, ...]:
    """The mesh axes that a step's own fields name; raises PrimitiveError."""
    with named(f"cp.steps.{step.name}"), calling(step, "used_axes"):
        axes = step.used_axes
        require(step, "used_axes", axes, tuple, "used_axes is a tuple of mesh axes")
    return axes


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step with the layouts around it.

    Args:
        before, after: tensor name and layout pairs.
        transfers: one per tensor that moves; for a rotation, the gather that a full turn amounts to.
    """

    step: Step
    before: tuple[tuple[str, Layout], ...]
    after: tuple[tuple[str, Layout], ...]
    transfers: tuple[Transfer, ...]

    def cost(self, plan: "Plan") -> Cost:
        """What the step costs, as it says itself; raises PrimitiveError."""
        with named(f"cp.steps.{self.step.name}"), calling(self.step, "cost"):
            cost = self.step.cost(self, plan)
            require(self.step, "cost", cost, Cost, "cost returns a Cost")
            per_rank = (*cost.bytes_sent, cost.pairs, cost.buffer_bytes)
            if any(len(numbers) != plan.degree for numbers in per_rank):
                rule = f"bytes, pairs and buffers have one number for each of {plan.degree} ranks"
                raise Faulty(self.step, "cost", f"returned numbers of {sorted({*map(len, per_rank)})} ranks", rule)
        return cost

    def links(self, plan: "Plan") -> tuple[Table, Table]:
        """Bytes from rank to rank, as the step says itself; raises PrimitiveError."""
        with named(f"cp.steps.{self.step.name}"), calling(self.step, "links"):
            forward, backward = self.step.links(self, plan)
            return forward, backward

    def layout_before(self, tensor: str) -> Layout:
        return dict(self.before)[tensor]

    def layout_after(self, tensor: str) -> Layout:
        return dict(self.after)[tensor]


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A strategy as typed data, before any shape is known.

    Args:
        name: for people.
        mesh: axes, major first.
        layout: how the model's tokens are dealt.
        steps: in the order in which they run.
        recompute: what activation checkpointing repeats.
        head_groups: head groups that run one after the other.
    """

    name: str
    mesh: Mesh
    layout: TokenLayout
    steps: tuple[Step, ...]
    recompute: str
    head_groups: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that the call brings: those that a step needs and no earlier one makes, q first."""
        made: set[str] = set()
        needed: list[str] = []
        for step in self.steps:
            needed += [t for t in (*step.consumes, *step.uses) if t not in made and not row(t).is_made]
            made |= set(step.makes)
        return tuple(sorted(dict.fromkeys(needed or ("q", "k", "v")), key=lambda t: t != "q"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A proved composition: layouts, transfers and tiles follow from it and from nothing else.

    Args:
        name: the preset's name, for people.
        tokens: how the model's tokens are dealt, for people, such as `zigzag over ring`.
        entry: the layout of the inputs and of the result, in the heads of one head group.
        inputs: tensors that the call brings, in this order.
        parameters: parameters of the model that the call brings.
        losses: what comes out beside out, each rank's share of a sum.
        recompute: what activation checkpointing repeats; `all` is everything, `skip_attention` all but the composition.
        head_groups: head groups that run one after the other, so that one travels while another computes.
        is_mask_from_call: whether each call brings its own mask, and `mask` stands for it.
        composition: what was proved, to be proved again for the mask of a call.
    """

    name: str
    mesh: Mesh
    shape: Shape
    mask: Mask
    tokens: str
    entry: Layout
    steps: tuple[PlannedStep, ...]
    inputs: tuple[str, ...] = ("q", "k", "v")
    parameters: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    recompute: str = "all"
    head_groups: int = 1
    is_mask_from_call: bool = False
    composition: Composition | None = field(default=None, compare=False, repr=False)

    @cached_property
    def part(self) -> Shape:
        """The call of one head group, which the steps are planned for."""
        return part_of(self.shape, self.head_groups)

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.mesh.degree

    def sent(self, transfer: Transfer, size: int) -> Table:
        """Bytes from rank to rank, of elements of a size; what a rank keeps is not counted."""
        table = np.zeros((self.degree, self.degree), dtype=np.int64)
        for group, rows in zip(transfer.groups, transfer.tables, strict=True):
            table[np.ix_(group, group)] = rows
        np.fill_diagonal(table, 0)
        return table * (self.part.batch * width(self.part, transfer.tensor) * size)

    @cached_property
    def wide_gradients(self) -> frozenset[str]:
        """Tensors whose gradients travel in float32 when the dtype is a half type: those that some step sends to several ranks."""
        half = BYTES[self.shape.dtype] < 4
        return frozenset(
            t.tensor
            for s in self.steps
            for t in s.transfers
            if half and t.is_replicating and row(t.tensor).has_gradient
        )

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """The cost of every step."""
        return tuple(s.cost(self) for s in self.steps)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal on ranks whose plans are equal."""
        steps = [(repr(s.step), hash_of(s.after)) for s in self.steps]
        rest = (self.mesh, self.shape, self.mask, self.tokens, self.head_groups, self.recompute)
        return hashlib.sha256(repr((*rest, steps)).encode()).hexdigest()[:16]


def hash_of(layouts: tuple[tuple[str, Layout], ...]) -> str:
    """A stable digest of layouts (Python's own hash differs between processes for strings)."""
    text = repr([(n, [s.runs for s in x.sequence], [h.runs for h in x.heads]) for n, x in layouts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
