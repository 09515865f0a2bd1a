"""The one table of primitives: kind -> class. Own ones come from the entry-point group `cp_engine.primitives`."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import get_type_hints

from cp_engine.errors import GROUP, raised
from cp_engine.errors import installed as found_in
from cp_engine.plan.fields import KIND, OfLayout
from cp_engine.plan.ir import Step
from cp_engine.plan.token_layout import TokenLayout
from cp_engine.primitives.collective import AllGather, AllToAll, Reorder, Undo
from cp_engine.primitives.dense import Dense
from cp_engine.primitives.expand import Expand
from cp_engine.primitives.layouts import Balanced, Contiguous, Striped, Zigzag
from cp_engine.primitives.sparse import IndexerLoss, LightningIndexer, Sparse

LAYOUTS: Mapping[str, type[TokenLayout]] = {c.kind: c for c in (Contiguous, Zigzag, Striped, Balanced)}
"""Config group `layout/`."""

STEPS: Mapping[str, type[Step]] = {
    c.kind: c for c in (AllToAll, AllGather, Undo, Reorder, Expand, Dense, LightningIndexer, Sparse, IndexerLoss)
}
"""Config groups `collective/` and `attention/`."""

PRIMITIVES: Mapping[str, type[TokenLayout] | type[Step]] = {**LAYOUTS, **STEPS}


READABLE = (str, int, float, bool, tuple[str, ...], tuple[str, ...] | None)
FIELDS = "fields are str, int, float, bool, tuple[str, ...], or a layout declared by cp_engine.plan.fields.layout()"
"""What a field of a primitive may be, since it is a key of a YAML file."""


def installed() -> dict[str, type[TokenLayout] | type[Step]]:
    """The table with what other installed packages add to it.

    Raises:
        ConfigError: entry points that cannot be imported, or that name no primitive; all of them.
    """
    return dict(_installed(tuple(sys.path)))


@cache
def _installed(path: tuple[str, ...]) -> Mapping[str, type[TokenLayout] | type[Step]]:
    """Looked up once for each path."""
    brought = found_in(GROUP, _faults)
    return {**PRIMITIVES, **{primitive.kind: primitive for primitive in brought.values()}}


def _faults(
    entry: str, primitive: object, others: Mapping[str, type[TokenLayout] | type[Step]]
) -> Iterator[tuple[str, str]]:
    """What a class lacks that every primitive has, and the rule; before any method is called."""
    if not (isinstance(primitive, type) and issubclass(primitive, TokenLayout | Step)):
        yield f"is {primitive!r}", "a primitive is a class derived from Step or TokenLayout"
        return
    kind, name = getattr(primitive, "kind", None), primitive.__name__
    table = {**PRIMITIVES, **{other.kind: other for other in others.values()}}
    if not isinstance(kind, str) or not kind or "kind" not in vars(primitive):
        yield f"{name} states no kind", "`kind` is a name of its own, by which compositions choose the class"
    elif kind in table:
        yield f"{name} has the kind {kind!r}, and {_of(table[kind])} has it already", "a kind names one class"
    if primitive.__abstractmethods__:
        missing = ", ".join(sorted(primitive.__abstractmethods__))
        yield f"{name} lacks {missing}", "a primitive has all methods that its base leaves open"
    declared, own = {f.name for f in fields(primitive)}, inspect.get_annotations(primitive)
    stray = [n for n, x in own.items() if n not in declared and "ClassVar" not in str(x)]
    if stray:
        yield f"{name} is no dataclass: {', '.join(stray)} would be no key", "@dataclass(frozen=True, kw_only=True)"
    try:
        types = get_type_hints(primitive)
    except Exception as error:  # an annotation that only a type checker can read
        yield f"{name} has fields whose types cannot be read: {raised(error)}", FIELDS
        return
    for field in fields(primitive):
        if types[field.name] not in READABLE and not isinstance(field.metadata.get(KIND), OfLayout):
            yield f"{name}.{field.name} is declared as {types[field.name]}", FIELDS


def _of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
