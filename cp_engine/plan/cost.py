"""Cost: what a whole call costs, summed once from the plan's steps, for people, tests and verify alike."""

from dataclasses import dataclass

import numpy as np

from cp_engine.plan.ir import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """One attention call of a plan; pairs of numbers are forward and backward.

    Args:
        sent: bytes that leave each rank.
        busiest_link: bytes from one rank to one other, of the pair that has most.
        collectives: that each rank takes part in.
        pairs: visible (query head, query, key) triples that each rank computes, forward.
        index_pairs: visible (index head, query, key) triples that each rank scores to select keys, forward.
        idle: ranks without a query or without a head; they only exchange.
    """

    sent: tuple[tuple[int, ...], tuple[int, ...]]
    busiest_link: tuple[int, int]
    collectives: tuple[int, int]
    pairs: tuple[int, ...]
    index_pairs: tuple[int, ...]
    idle: tuple[int, ...]

    @property
    def max_over_mean(self) -> float:
        """Attention of the busiest rank over the mean; 1 is perfect balance."""
        return max_over_mean(self.pairs)


def max_over_mean(work: tuple[int, ...]) -> float:
    """Work of the busiest rank over the mean of all; 1 is perfect balance."""
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0


def totals(plan: Plan) -> Totals:
    """Sums the costs of a plan's steps.

    Args:
        plan: of one call.

    Returns:
        The call's cost.
    """
    ranks = range(plan.degree)
    links = np.zeros((2, plan.degree, plan.degree), dtype=np.int64)
    for planned in plan.steps:
        for way, table in enumerate(planned.links(plan)):
            links[way] += table * plan.head_groups
    attends = [s.layout_before("q") for s in plan.steps if "out" in s.step.makes]
    return Totals(
        sent=(tuple(map(int, links[0].sum(1))), tuple(map(int, links[1].sum(1)))),
        busiest_link=(int(links[0].max()), int(links[1].max())),
        collectives=(
            plan.head_groups * sum(c.collectives[0] for c in plan.costs),
            plan.head_groups * sum(c.collectives[1] for c in plan.costs),
        ),
        pairs=tuple(plan.head_groups * sum(c.pairs[r] for c in plan.costs) for r in ranks),
        index_pairs=tuple(plan.head_groups * sum(c.index_pairs[r] for c in plan.costs if c.index_pairs) for r in ranks),
        idle=tuple(r for r in ranks if any(not (q.heads[r].count and q.sequence[r].count) for q in attends)),
    )
