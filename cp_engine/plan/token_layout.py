"""Token layouts: how a sequence is dealt to ranks; what every kind of them shares."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cp_engine.algebra.index_set import IndexSet, union, whole
from cp_engine.algebra.layout import Mesh, contiguous, cut
from cp_engine.algebra.mask import Mask
from cp_engine.errors import Faulty, calling, is_foreign, require
from cp_engine.plan.fields import axes


@dataclass(frozen=True, kw_only=True)
class TokenLayout(ABC):
    """How positions are dealt.

    Args:
        over: the axes that cut with this order, first and numbered major first; None is all of them. The others then cut contiguously.
    """

    kind: ClassVar[str]
    looks_at_mask: ClassVar[bool] = False
    over: tuple[str, ...] | None = axes(default=None)

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
