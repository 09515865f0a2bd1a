"""Fields of primitives: a constructor for each kind of key that a primitive's YAML may have, each with its reader."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Protocol

from cp_engine.algebra.layout import Mesh
from cp_engine.errors import suggest

KIND = "cp_engine"
"""Where the metadata of a dataclass field says which kind of key it is."""


class Reading(Protocol):
    """What a field is read with: it collects problems instead of raising."""

    def add(self, key: str, what: str, details: Sequence[tuple[str, str]] = (), tries: Sequence[str] = ()) -> None:
        """Notes what is wrong with a key."""

    def text(self, key: str, value: object) -> str:
        """A name."""

    def one_of(self, key: str, value: object, allowed: Sequence[object]) -> bool:
        """Whether a value is one of some."""

    def names(self, key: str, value: object) -> tuple[str, ...] | None:
        """A list of names."""

    def layout_of(self, key: str, node: object, mesh: Mesh) -> object:
        """A token layout."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a field is read.

    Args:
        key: dotted, such as `cp.steps.attend.rotate`.
        mesh: whose axes it may name.
        steps: names of the other steps.
        default: of the field; MISSING where it needs a value.
    """

    key: str
    mesh: Mesh
    steps: Sequence[str]
    default: object = MISSING


class Kind(ABC):
    """A kind of key."""

    @abstractmethod
    def read(self, reader: Reading, value: object, at: Place) -> object:
        """The field's value; what is wrong with it is added to the reader."""

    @abstractmethod
    def allowed(self, at: Place) -> str:
        """What it may be, in words."""


@dataclass(frozen=True)
class Text(Kind):
    """A name."""

    def read(self, reader: Reading, value: object, at: Place) -> object:
        return reader.text(at.key, value)

    def allowed(self, at: Place) -> str:
        return "a name"


@dataclass(frozen=True)
class Choice(Kind):
    """One of some names, or of those that a function gives when they are needed."""

    of: tuple[str, ...] | Callable[[], tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be."""
        return self.of() if callable(self.of) else self.of

    def read(self, reader: Reading, value: object, at: Place) -> object:
        reader.one_of(at.key, value, self.names)
        return value

    def allowed(self, at: Place) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class StepName(Kind):
    """The name of another step."""

    def read(self, reader: Reading, value: object, at: Place) -> object:
        if at.steps:
            reader.one_of(at.key, value, list(at.steps))
        else:
            reader.add(at.key, f"{value!r} is not one of the other steps")
        return value

    def allowed(self, at: Place) -> str:
        return ", ".join(at.steps)


@dataclass(frozen=True)
class OfLayout(Kind):
    """A token layout, chosen by `layout@cp.steps.<name>.<field>=...`."""

    def read(self, reader: Reading, value: object, at: Place) -> object:
        return reader.layout_of(at.key, value, at.mesh)

    def allowed(self, at: Place) -> str:
        return "a token layout"


@dataclass(frozen=True)
class Number(Kind):
    """A number, or true or false.

    Args:
        of: int, float or bool.
        least: smallest whole number.
        most_in_all: largest product with the number of ranks.
    """

    of: type
    least: int | None = None
    most_in_all: int | None = None

    def read(self, reader: Reading, value: object, at: Place) -> object:
        fits = isinstance(value, (int, float) if self.of is float else self.of)
        if value is None and at.default is None:
            return None
        if not fits or (isinstance(value, bool) and self.of is not bool):
            tries = (f"{at.key}={str(at.default).lower()}",) if at.default is not MISSING else ()
            what = f"must be {self.of.__name__}, not {value!r}"
            reader.add(at.key, what, (("allowed", self.allowed(at)),), tries)
        elif isinstance(value, int) and self.least is not None and value < self.least:
            reader.add(at.key, f"is {value}, less than {self.least}", tries=(f"{at.key}={at.default}",))
        elif isinstance(value, int) and self.most_in_all is not None and value * at.mesh.degree > self.most_in_all:
            what = f"is {value}, and {at.mesh.degree} ranks have at most {self.most_in_all} in all"
            reader.add(at.key, what, tries=(f"{at.key}={max(1, self.most_in_all // at.mesh.degree)}",))
        return value

    def allowed(self, at: Place) -> str:
        return {bool: "true, false", int: "whole numbers", float: "numbers"}[self.of]


@dataclass(frozen=True)
class Names(Kind):
    """A list of names, each once.

    Args:
        least: how many at least.
    """

    least: int = 0

    def read(self, reader: Reading, value: object, at: Place) -> object:
        if value is None and at.default is None:
            return None
        names = reader.names(at.key, value)
        if names is not None:
            if len(names) < self.least:
                reader.add(at.key, "[] names nothing", (("rule", "at least one, each once"),))
            once = list(dict.fromkeys(names))
            if once != list(names):
                what = f"[{', '.join(names)}] names one of them twice"
                reader.add(at.key, what, (("rule", "each once"),), (f"'{at.key}=[{','.join(once)}]'",))
            self.check(reader, names, at)
        return names

    def check(self, reader: Reading, names: tuple[str, ...], at: Place) -> None:
        """What else has to hold of the names."""

    def allowed(self, at: Place) -> str:
        return "a list of tensors, such as q, k, v"


@dataclass(frozen=True)
class Axes(Names):
    """A list of mesh axes, major first; null, where that is the default, is all of them."""

    def check(self, reader: Reading, names: tuple[str, ...], at: Place) -> None:
        there = (("allowed", ", ".join(at.mesh.axes) or "the mesh has none"),)
        for axis in names:
            if axis not in at.mesh.axes:
                near = suggest(axis, at.mesh.axes) or (at.mesh.axes[0] if len(at.mesh.axes) == 1 else None)
                tries = (f"'{at.key}=[{near}]'",) if near else ()
                reader.add(at.key, f"{axis!r} is not a mesh axis", there, tries)
        if not names and at.default in (MISSING, None):
            line = f"{at.key}=null" if at.default is None else f"'{at.key}=[{','.join(at.mesh.axes)}]'"
            reader.add(at.key, "[] names no mesh axis", there, (line,))

    def allowed(self, at: Place) -> str:
        return "a list of " + (", ".join(at.mesh.axes) or "mesh axes")


def axes(default: Any = MISSING) -> Any:
    """A field `tuple[str, ...]` of mesh axes, or `tuple[str, ...] | None` whose default None is all of them."""
    return field(default=default, metadata={KIND: Axes()})


def choice(*allowed: str, default: Any = MISSING) -> Any:
    """A field `str` that is one of some names."""
    return field(default=default, metadata={KIND: Choice(allowed)})


def choice_of(names: Callable[[], tuple[str, ...]], default: Any = MISSING) -> Any:
    """A field `str` that is one of the names which a function gives, such as those of all kernels."""
    return field(default=default, metadata={KIND: Choice(names)})


def step_name() -> Any:
    """A field `str` that names another step of the composition."""
    return field(metadata={KIND: StepName()})


def layout() -> Any:
    """A field `TokenLayout`."""
    return field(metadata={KIND: OfLayout()})


def tensors(least: int = 1) -> Any:
    """A field `tuple[str, ...]` that names tensors, at least so many."""
    return field(metadata={KIND: Names(least)})


def number(default: Any = MISSING, *, least: int | None = None, most_in_all: int | None = None) -> Any:
    """A field `int` within bounds; `most_in_all` bounds its product with the number of ranks."""
    return field(default=default, metadata={KIND: Number(int, least, most_in_all)})


def kind_of(declared: Any, f: "Field[Any]") -> Kind:
    """The kind of a field: as its constructor says, else by its type.

    Args:
        declared: the type of its annotation.
        f: the field.
    """
    kind = f.metadata.get(KIND)
    if isinstance(kind, Kind):
        return kind
    if declared is str:
        return Text()
    return Number(declared) if declared in (int, float, bool) else Names()
