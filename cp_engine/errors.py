"""Every error a user can cause: one form, all problems at once, each with something to paste."""

import difflib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
SHOWN = 20
"""Problems that are printed; more are counted."""
LONGEST = 4000
"""Letters of one line of a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Args:
        key: dotted configuration key, or `call.<argument>` for a call at run time.
        what: the fact, with both numbers.
        details: label and text of further lines, such as `("rule", "...")`.
        tries: lines that can be pasted.
    """

    key: str
    what: str
    details: tuple[tuple[str, str], ...] = ()
    tries: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The lines below the problem's own, labels aligned."""
        rows = [*self.details, *(("try" if i == 0 else "", line) for i, line in enumerate(self.tries))]
        width = max([0, *(len(label) for label, _ in rows)])
        return [f"{label:<{width}}  {text}" for label, text in rows]


class Reason(Exception):
    """A bare reason; whoever knows where in the configuration it arose makes a CPError of it."""


class CPError(Exception):
    """Base of all errors that a user can cause; its text lists every problem.

    Args:
        problems: what is wrong, in the order of the configuration.
        source: what was being read, such as `cp=mine`.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self._text())

    def __reduce__(self) -> tuple[type["CPError"], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.source)  # the text is not the argument

    def _text(self) -> str:
        kind, where = type(self).__name__, f" in {self.source}" if self.source else ""
        count = f"{len(self.problems):,} problem{'s' * (len(self.problems) != 1)}"
        return "\n".join([printable(f"{kind}: {count}{where}"), *numbered(self.problems)])


def numbered(problems: Sequence[Problem]) -> list[str]:
    """The lines of several problems, below a line that says what they are problems of; of very many the first."""
    lines = []
    for i, problem in enumerate(problems[:SHOWN], 1):
        key = problem.key.replace("\n", "\\n")
        lines.append(f"  {i}. {key}  {problem.what}")
        lines += [f"     {line}" for line in problem.lines()]
    lines += [f"  and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
    return [printable(line) for line in lines]


def letters(name: str) -> tuple[tuple[str, str], ...]:
    """A detail that tells letters apart which look alike, of a name that has such."""
    return (("letters", ascii(name)),) if not name.isascii() else ()


def printable(text: str) -> str:
    """A text for a terminal: what would move its cursor, turn its letters round or stand for nothing is escaped, the rest is cut."""
    text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {len(text) - LONGEST:,} more letters"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class ConfigError(CPError):
    """A key, a name, a type or a value that the configuration does not allow."""


class LayoutError(CPError):
    """A step that cannot produce its layout from the layouts before it."""


class CoverageError(CPError):
    """A composition that would not compute every visible (query, key) pair exactly once."""


class KernelError(CPError):
    """A call that the chosen attention kernel cannot do."""


class CallError(CPError):
    """A call at run time that differs from what the plan was proved for."""


class RankError(CPError):
    """What one rank did, or did not do, and ends the run on all of them.

    Args:
        problems: what is wrong.
        source: what was being done.
        rank: world rank of the one.
    """

    def __init__(self, problems: Sequence[Problem], source: str, rank: int) -> None:
        super().__init__(problems, source)
        self.rank = rank

    def __reduce__(self) -> tuple[type["RankError"], tuple[tuple[Problem, ...], str, int]]:  # type: ignore[override]
        return type(self), (self.problems, self.source, self.rank)


def suggest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word nearest to a misspelt one.

    Args:
        word: what the user wrote.
        allowed: what could have been meant.

    Returns:
        The nearest allowed word, or None when nothing is near.
    """
    return next(iter(difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)), None)


def shown(value: object) -> str:
    """A value as a command line has it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


# ------------------------------------------------------------------ primitives that other packages bring
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


def installed(
    group: str, faults_of: Callable[[str, object, Mapping[str, T]], Iterator[tuple[str, str]]]
) -> dict[str, T]:
    """What other packages bring under a group of entry points, by name.

    Args:
        group: such as `cp_engine.kernels`.
        faults_of: what of an object is wrong, and the rule; given its name and those before it.

    Raises:
        ConfigError: entry points that cannot be imported, or that name something else; all of them.
    """
    from importlib.metadata import entry_points  # here: reading the metadata of all packages takes longer than planning

    table: dict[str, T] = {}
    problems: list[Problem] = []
    for entry in entry_points(group=group):
        try:
            found = entry.load()
        except Exception as error:  # whatever the package does while it is imported
            what, rule = f"cannot be imported: {raised(error)}", "an entry point is module:name"
            raise ConfigError([*problems, unloadable(entry, what, rule)]) from error
        faults = list(faults_of(entry.name, found, table))
        problems += [unloadable(entry, what, rule) for what, rule in faults]
        if not faults:
            table[entry.name] = found
    if problems:
        raise ConfigError(problems)
    return table


def unloadable(entry: "EntryPoint", what: str, rule: str) -> Problem:
    """The problem of an entry point that gives something else than it should."""
    details = (("of", _package(entry)), ("rule", rule), ("see", WHERE))
    return Problem(key=f"{entry.group}: {entry.name} = {entry.value}", what=what, details=details)


def raised(error: BaseException) -> str:
    """An exception in one line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _origin(kind: type) -> str:
    from importlib.metadata import entry_points  # here: few runs have an error to tell

    name = f"{kind.__module__}.{kind.__qualname__}"
    entry = next((e for e in entry_points(group=GROUP) if e.value == f"{kind.__module__}:{kind.__qualname__}"), None)
    return name if entry is None else f"{name}, of {_package(entry)}"


def _package(entry: "EntryPoint") -> str:
    return "a package without metadata" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
