"""Orders: how a sequence is dealt to ranks. As `layout` they place the model's tokens, as `reorder` those of attention only.

rank              0                1                          S=8, 2 ranks
contiguous        0 1 2 3          4 5 6 7
zigzag            0 1 6 7          2 3 4 5      (head and tail: equal work under a causal mask)
striped           0 2 4 6          1 3 5 7
balanced          by work, from the mask: as zigzag or better, for any mask
"""

from dataclasses import dataclass

from cp_engine.algebra.index_set import IndexSet, shares, union, whole
from cp_engine.algebra.layout import contiguous
from cp_engine.algebra.mask import Mask
from cp_engine.plan.fields import number
from cp_engine.plan.token_layout import TokenLayout


@dataclass(frozen=True, kw_only=True)
class Contiguous(TokenLayout):
    """Neighbouring tokens together; the first ranks hold one more when there is a remainder."""

    kind = "contiguous"

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        return contiguous(held, ranks)


@dataclass(frozen=True, kw_only=True)
class Zigzag(TokenLayout):
    """Rank r of P holds chunks r and 2P - 1 - r of 2P, so that causal work is equal.

    Source: torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py (head-tail).
    """

    kind = "zigzag"

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        chunks = [held.part(first, count) for first, count in shares(held.count, 2 * ranks)]
        return [union([chunks[r], chunks[2 * ranks - 1 - r]], held.size) for r in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Striped(TokenLayout):
    """Rank r of P holds every P-th token from r on. Source: arXiv 2311.09431."""

    kind = "striped"

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        return [held.every(ranks, r) for r in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Balanced(TokenLayout):
    """Chunks dealt by work: ranks differ by at most one chunk's visible pairs, and hold equally many chunks.

    In rounds of one chunk per rank, heaviest chunks first, the rank with least work takes the heaviest: the difference of two ranks
    then changes towards zero or stays below what the chunks of a round differ by.
    Source of the idea: `_PTRRLoadBalancer` of torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py.

    Args:
        chunks: chunks per rank.
    """

    kind = "balanced"
    looks_at_mask = True
    chunks: int = number(default=8, least=1, most_in_all=2**14)

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
