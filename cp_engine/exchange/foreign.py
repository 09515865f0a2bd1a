"""Foreign: primitives that other packages bring; what they raise, or return and may not, is said in their own name."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from cp_engine.errors import CPError, Problem, Reason

GROUP = "cp_engine.primitives"
"""The entry-point group in which packages name theirs."""
WHERE = "docs/configuration.md, Primitives of one's own"


class PrimitiveError(CPError):
    """A primitive of another package that does not do what primitives have to do."""


class Faulty(Reason):
    """What a primitive did, before it is known where in the configuration it is.

    Args:
        primitive: the layout or step, or its class.
        method: of it.
        did: what that did.
        rule: what has to hold.
    """

    def __init__(self, primitive: object, method: str, did: str, rule: str) -> None:
        self.kind, self.rule = _class(primitive), rule
        super().__init__(f"{self.kind.__name__}.{method} {did}")


def _class(primitive: object) -> type:
    return primitive if isinstance(primitive, type) else type(primitive)


def is_foreign(primitive: object) -> bool:
    """Whether a layout or a step is of a class that another package defines."""
    return _class(primitive).__module__.partition(".")[0] != __name__.partition(".")[0]


@contextmanager
def calling(primitive: object, method: str) -> Iterator[None]:
    """Around a call of a method: what one of another package raises becomes Faulty, with the original as its cause."""
    try:
        yield
    except (CPError, Reason):
        raise
    except Exception as error:
        if not is_foreign(primitive):
            raise
        rule = "a primitive refuses what it cannot do by raising cp_engine.plan.state.Refused"
        raise Faulty(primitive, method, f"raised {raised(error)}", rule) from error


@contextmanager
def named(key: str, source: str = "") -> Iterator[None]:
    """Adds where in the configuration the primitive is; raises PrimitiveError."""
    try:
        yield
    except Faulty as fault:
        details = (("of", _origin(fault.kind)), ("rule", fault.rule), ("see", WHERE))
        raise PrimitiveError([Problem(key=key, what=str(fault), details=details)], source) from (
            fault.__cause__ or fault
        )


def require(primitive: object, method: str, value: object, wanted: type, rule: str) -> None:
    """A returned value has its type; raises Faulty."""
    if not isinstance(value, wanted):
        got = "None" if value is None else f"a {type(value).__name__}"
        raise Faulty(primitive, method, f"returned {got}, not a {wanted.__name__}", rule)


def unloadable(entry: EntryPoint, what: str, rule: str) -> Problem:
    """The problem of an entry point that gives no primitive."""
    details = (("of", _package(entry)), ("rule", rule), ("see", WHERE))
    return Problem(key=f"{GROUP}: {entry.name} = {entry.value}", what=what, details=details)


def raised(error: BaseException) -> str:
    """An exception in one line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _origin(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    entry = next((e for e in entry_points(group=GROUP) if e.value == f"{kind.__module__}:{kind.__qualname__}"), None)
    return name if entry is None else f"{name}, of {_package(entry)}"


def _package(entry: EntryPoint) -> str:
    return "a package without metadata" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
