"""The one table of primitives: kind -> class. Own ones come from the entry-point group `cp_engine.primitives`."""

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from cp_engine.plan import Step
from cp_engine.primitives.attention import Dense
from cp_engine.primitives.collective import AllGather, AllToAll, Undo
from cp_engine.primitives.expand import Expand
from cp_engine.primitives.order import Balanced, Contiguous, Order, Reorder, Striped, Zigzag
from cp_engine.primitives.sparse import IndexerLoss, LightningIndexer, Sparse

ORDERS: Mapping[str, type[Order]] = {c.kind: c for c in (Contiguous, Zigzag, Striped, Balanced)}
"""Config group `layout/`."""

STEPS: Mapping[str, type[Step]] = {
    c.kind: c for c in (AllToAll, AllGather, Undo, Reorder, Expand, Dense, LightningIndexer, Sparse, IndexerLoss)
}
"""Config groups `collective/` and `attention/`."""

PRIMITIVES: Mapping[str, type[Order] | type[Step]] = {**ORDERS, **STEPS}


def installed() -> dict[str, type[Order] | type[Step]]:
    """The table with what other installed packages add to it.

    Raises:
        ValueError: a package names a kind that exists already, or something that is no primitive.
    """
    return dict(_installed(tuple(sys.path)))


@cache
def _installed(path: tuple[str, ...]) -> Mapping[str, type[Order] | type[Step]]:
    """Looked up once for each path: reading the metadata of all packages takes longer than planning."""
    table = dict(PRIMITIVES)
    for entry in entry_points(group="cp_engine.primitives"):
        primitive = entry.load()
        if not (isinstance(primitive, type) and issubclass(primitive, Order | Step)):
            raise ValueError(f"entry point {entry.name} of {entry.value} is not a Step or an Order")
        if primitive.kind in table:
            raise ValueError(
                f"entry point {entry.name} of {entry.value} defines {primitive.kind!r}, which exists already"
            )
        table[primitive.kind] = primitive
    return table
