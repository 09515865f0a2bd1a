"""Orders: how a sequence is dealt to ranks. As `layout` they place the model's tokens, as `reorder` those of attention only.

rank              0                1                          S=8, 2 ranks
contiguous        0 1 2 3          4 5 6 7
zigzag            0 1 6 7          2 3 4 5      (head and tail: equal work under a causal mask)
striped           0 2 4 6          1 3 5 7
balanced          by work, from the mask: as zigzag or better, for any mask
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cp_engine.algebra.index_set import IndexSet, shares, union, whole
from cp_engine.algebra.layout import Layout, Mesh, contiguous, cut
from cp_engine.algebra.mask import Mask
from cp_engine.exchange.foreign import Faulty, calling, is_foreign, require
from cp_engine.plan.ir import Refused, State
from cp_engine.primitives.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class Order(ABC):
    """How positions are dealt.

    Args:
        over: the axes that cut with this order, first and numbered major first; None is all of them. The others then cut contiguously.
    """

    kind: ClassVar[str]
    looks_at_mask: ClassVar[bool] = False
    over: tuple[str, ...] | None = field(default=None, metadata={"is_axes": True})

    @abstractmethod
    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        """One share per rank; the shares partition `held`."""

    def spread(self, mesh: Mesh, size: int, mask: Mask) -> tuple[IndexSet, ...]:
        """The positions of each rank's tokens; together they partition the sequence.

        Args:
            mesh: all axes.
            size: global sequence length in tokens.
            mask: what queries may see, for orders that look at the work.
        """
        return self.divide(mesh, [whole(size)] * mesh.degree, mesh.axes, mask)

    def divide(self, mesh: Mesh, held: Sequence[IndexSet], axes: Sequence[str], mask: Mask) -> tuple[IndexSet, ...]:
        """Each rank's share of what its group along `axes` holds in common: dealt over `over` first, the rest contiguously."""
        first = axes if self.over is None else self.over
        dealt = cut(mesh, held, first, lambda common, ranks: self._dealt(common, ranks, mask))
        return cut(mesh, dealt, tuple(a for a in axes if a not in first), contiguous)

    def _dealt(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        """`deal`, and that its shares partition what was held."""
        with calling(self, "deal"):
            shares = self.deal(held, ranks, mask)
        if is_foreign(self):
            rule = "deal returns one IndexSet for each rank, which together hold every position once"
            require(self, "deal", shares, Sequence, rule)
            if len(shares) != ranks:
                raise Faulty(self, "deal", f"returned {len(shares)} shares for {ranks} ranks", rule)
            for share in shares:
                require(self, "deal", share, IndexSet, rule)
            try:
                together = union(shares, held.size)
            except ValueError as error:
                raise Faulty(self, "deal", f"gave a position to two ranks: {error}", rule) from error
            if sorted(together) != sorted(held):
                raise Faulty(self, "deal", f"dealt {together}, and {held} was held", rule)
        return shares

    def __str__(self) -> str:
        return self.kind + (f" over {', '.join(self.over)}" if self.over is not None else "")


@dataclass(frozen=True, kw_only=True)
class Contiguous(Order):
    """Neighbouring tokens together; the first ranks hold one more when there is a remainder."""

    kind = "contiguous"

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        return contiguous(held, ranks)


@dataclass(frozen=True, kw_only=True)
class Zigzag(Order):
    """Rank r of P holds chunks r and 2P - 1 - r of 2P, so that causal work is equal.

    Source: torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py (head-tail).
    """

    kind = "zigzag"

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        chunks = [held.part(first, count) for first, count in shares(held.count, 2 * ranks)]
        return [union([chunks[r], chunks[2 * ranks - 1 - r]], held.size) for r in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Striped(Order):
    """Rank r of P holds every P-th token from r on. Source: arXiv 2311.09431."""

    kind = "striped"

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        return [held.every(ranks, r) for r in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Balanced(Order):
    """Chunks dealt by work: ranks differ by at most one chunk's visible pairs, and hold equally many chunks.

    In rounds of one chunk per rank, heaviest chunks first, the rank with least work takes the heaviest: the difference of two ranks
    then changes towards zero or stays below what the chunks of a round differ by.
    Source of the idea: `_PTRRLoadBalancer` of torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py.

    Args:
        chunks: chunks per rank.
    """

    kind = "balanced"
    looks_at_mask = True
    chunks: int = field(default=8, metadata={"least": 1, "most_in_all": 2**14})

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        everything = whole(held.size)
        chunks = [held.part(first, count) for first, count in shares(held.count, ranks * self.chunks)]
        work = [mask.count(chunk, everything) for chunk in chunks]
        heaviest = sorted(range(len(chunks)), key=lambda i: -work[i])
        load = [0] * ranks
        dealt: list[list[IndexSet]] = [[] for _ in range(ranks)]
        for first in range(0, len(chunks), ranks):
            lightest = sorted(range(ranks), key=lambda r: load[r])
            for rank, i in zip(lightest, heaviest[first : first + ranks], strict=True):
                load[rank] += work[i]
                dealt[rank].append(chunks[i])
        return [union(sets, held.size) for sets in dealt]


@dataclass(frozen=True, kw_only=True)
class Reorder(Exchange):
    """Deals tensors in another order for attention only: seq in one order -> seq in another; `undo` brings the result back.

    Args:
        to: the other order, and the axes that it cuts first (None: all of `over`).
        over: the axes whose ranks exchange tokens; None is all of them.
    """

    kind = "reorder"
    to: Order = field(metadata={"is_order": True})
    over: tuple[str, ...] | None = field(default=None, metadata={"is_axes": True})

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.over or ()

    @property
    def deals_by_mask(self) -> bool:
        return self.to.looks_at_mask

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
        return state.layout(tensor).replaced("sequence", self.to.divide(state.mesh, together, axes, state.mask))
