"""Orders: how a sequence is dealt to ranks. As `layout` they place the model's tokens, as `reorder` those of attention only.

rank              0                1                          S=8, 2 ranks
contiguous        0 1 2 3          4 5 6 7
zigzag            0 1 6 7          2 3 4 5      (head and tail: equal work under a causal mask)
striped           0 2 4 6          1 3 5 7
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from cp_engine.index_set import IndexSet, shares, union, whole
from cp_engine.layout import Layout, Mesh, contiguous, cut
from cp_engine.plan import Refused, State
from cp_engine.primitives.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class Order(ABC):
    """How positions are dealt.

    Args:
        over: the axes that cut with this order, first and numbered major first; None is all of them. The others then cut contiguously.
    """

    kind: ClassVar[str]
    over: tuple[str, ...] | None = None

    @abstractmethod
    def deal(self, held: IndexSet, ranks: int) -> list[IndexSet]:
        """One share per rank; the shares partition `held`."""

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes that cut with this order."""
        return mesh.axes if self.over is None else self.over

    def spread(self, mesh: Mesh, size: int) -> tuple[IndexSet, ...]:
        """The positions of each rank's tokens; together they partition the sequence.

        Args:
            mesh: all axes.
            size: global sequence length in tokens.
        """
        axes = self.axes(mesh)
        rest = tuple(a for a in mesh.axes if a not in axes)
        return cut(mesh, cut(mesh, [whole(size)] * mesh.degree, axes, self.deal), rest, contiguous)

    def __str__(self) -> str:
        return self.kind + (f" over {', '.join(self.over)}" if self.over is not None else "")


@dataclass(frozen=True, kw_only=True)
class Contiguous(Order):
    """Neighbouring tokens together; the first ranks hold one more when there is a remainder."""

    kind = "contiguous"

    def deal(self, held: IndexSet, ranks: int) -> list[IndexSet]:
        return contiguous(held, ranks)


@dataclass(frozen=True, kw_only=True)
class Zigzag(Order):
    """Rank r of P holds chunks r and 2P - 1 - r of 2P, so that causal work is equal.

    Source: torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py (head-tail).
    """

    kind = "zigzag"

    def deal(self, held: IndexSet, ranks: int) -> list[IndexSet]:
        chunks = [held.part(first, count) for first, count in shares(held.count, 2 * ranks)]
        return [union([chunks[r], chunks[2 * ranks - 1 - r]], held.size) for r in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Striped(Order):
    """Rank r of P holds every P-th token from r on. Source: arXiv 2311.09431."""

    kind = "striped"

    def deal(self, held: IndexSet, ranks: int) -> list[IndexSet]:
        return [held.every(ranks, r) for r in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Reorder(Exchange):
    """Deals tensors in another order for attention only: seq in one order -> seq in another; `undo` brings the result back.

    Args:
        to: the other order, and the axes that it cuts first (None: all of `over`).
        over: the axes whose ranks exchange tokens; None is all of them.
    """

    kind = "reorder"
    to: Order = field(metadata={"is_order": True})
    over: tuple[str, ...] | None = None

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.over or ()

    def axes_of(self, state: State, tensor: str) -> tuple[str, ...]:
        return state.mesh.axes if self.over is None else self.over

    def destination(self, state: State, tensor: str) -> Layout:
        axes = self.axes_of(state, tensor)
        first = axes if self.to.over is None else self.to.over
        if not set(first) <= set(axes):
            raise Refused(
                f"to deals over {', '.join(first)}, and the ranks exchange tokens along {', '.join(axes)}",
                rule="tokens are dealt over axes whose ranks exchange them",
                tries=(f"'{{key}}.over=[{','.join(a for a in state.mesh.axes if a in {*first, *axes})}]'",),
            )
        together = self.joined(state, tensor, "sequence", axes)
        dealt = cut(state.mesh, together, first, self.to.deal)
        rest = tuple(a for a in axes if a not in first)
        return state.layout(tensor).replaced("sequence", cut(state.mesh, dealt, rest, contiguous))
