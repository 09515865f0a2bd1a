"""Names and types of the keys of a TOML, against torchtitan's tables."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cp_engine.errors import SHOWN, Problem, suggest
from cp_engine.job.checks.keys import module_tables, type_matches, type_problem, unknown_key
from cp_engine.job.checks.rules import Rules
from cp_engine.job.checks.tables import Table
from cp_engine.job.toml.file import TomlFile
from cp_engine.job.toml.translation import COMMAND_LINE, Row

NULLS = ("none", "null", "nil")
"""Text that stands for no value where people write it; to torchtitan it is text."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file under its present name."""

    written: str
    value: object
    where: str

    @property
    def is_typed(self) -> bool:
        """Whether it is of the command line, where keys are below `titan`."""
        return self.where == COMMAND_LINE


def leaves(node: Mapping[str, object], known: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values of nested tables; a table that is a key's value, or is empty, stays whole."""
    for name, value in node.items():
        key = prefix + (f'"{name}"' if "." in name else name)  # a quoted name with a dot is one name
        if isinstance(value, Mapping) and value and key not in known:
            yield from leaves(value, known, f"{key}.")
        else:
            yield key, value


def all_modules() -> Table:
    """The further keys of every known config module."""
    return {key: row for table in module_tables().values() for key, row in table.items()}


@dataclass(slots=True)
class Named:
    """The keys of a file by their present names, and what became of those that have none."""

    keys: dict[str, Key]
    rows: list[Row]
    problems: list[Problem]
    is_older: bool = False


def present_names(file: TomlFile, known: Mapping[str, object], rules: Rules, drop: Sequence[str]) -> Named:
    """Every key of a file under its present name.

    Args:
        file: as read.
        known: keys that may have a table as their value.
        rules: with the older names.
        drop: keys and sections to leave out, as the file writes them.
    """
    named = Named(keys={}, rows=[], problems=[])
    found = set()
    for written, value in leaves(file.values, known):
        key, now = Key(written, value, file.at(written)), rules.retired.get(written, written)
        named.is_older |= written in rules.retired
        by = {name for name in drop if written == name or written.startswith(f"{name}.")}
        found |= by
        if by:
            named.rows.append(_row(key, "dropped", ""))
        elif isinstance(now, Mapping) and ("gone" in now or ("as" in now and _is_equal(now["as"], value))):
            named.rows.append(_row(key, "mapped", str(now.get("gone", "it is so whatever the file says"))))
        elif isinstance(now, Mapping):
            details = (("at", key.where), ("rule", str(now["refuse"])))
            problem = Problem(key=written, what="is retired", details=details, tries=(_drop(written),))
            named.problems.append(problem)
        elif (first := named.keys.get(str(now))) is not None:
            old, new = (key, first) if written in rules.retired else (first, key)
            what = f"is the retired name of {new.written} ({new.where}), and only one can be meant"
            if new.written in rules.retired:
                what = f"and {new.written} ({new.where}) are two retired names of {now}, and only one can be meant"
            at = ("at", old.where)
            named.problems.append(Problem(key=old.written, what=what, details=(at,), tries=(_drop(old.written),)))
        else:
            named.keys[str(now)] = key
    known_names = [written for written, _ in leaves(file.values, known)]
    sections = {written.rpartition(".")[0] for written in known_names} - {""}
    for name in drop:
        if name not in found:
            near = suggest(name, [*known_names, *sections])
            what = f"names {name}, which the file does not have"
            problem = Problem(key="translate.drop", what=what, tries=(_drop(near),) if near else ())
            named.problems.append(problem)
    return named


def key_problems(
    keys: Mapping[str, Key], table: Table, rules: Rules, untrusted: Problem | None = None
) -> Iterator[Problem]:
    """What is wrong with names and types, with one problem for all keys of an unknown section.

    Args:
        keys: of the file and of the command line, by their present names.
        table: the keys of torchtitan and of the file's config module.
        rules: for keys that a config module had once.
        untrusted: the problem of a config module whose keys are not known, which may have what no table has.
    """
    known = {name: str(row["type"]) for name, row in table.items()}
    strange: dict[tuple[str, tuple[str, ...]], list[Key]] = {}  # (section, config modules) -> its keys
    beyond: list[Problem] = []
    tables = {module: {**its, **rules.older_keys(module)} for module, its in module_tables().items()}
    sections = {name[:end] for name in known for end, letter in enumerate(name) if letter == "."}
    for name, key in keys.items():
        is_section = name in sections
        if name in known or is_section:
            if (problem := _value_problem(name, key, known, is_section)) is not None:
                yield _at(key, problem)
        elif key.is_typed or untrusted is None:
            modules = tuple(module for module, its in tables.items() if name in its)
            if not modules and len(strange) >= SHOWN:  # only the first are printed
                beyond.append(_at(key, Problem(key=key.written, what="unknown key")))
                continue
            here = "" if modules else unknown_key(key.written, known, elsewhere=()).key
            strange.setdefault((here, modules), []).append(key)
    left = [k for name, k in keys.items() if untrusted is not None and name not in known and not k.is_typed]
    if untrusted is not None:
        more = (("keys", ", ".join(k.written for k in left)),) if left else ()
        tries = (*untrusted.tries, _drop(untrusted.key, *(k.written for k in left)))
        yield Problem(key=untrusted.key, what=untrusted.what, details=(*untrusted.details, *more), tries=tries)
    for (here, modules), of in strange.items():
        yield _of_a_module(of, modules) if modules else _unknown(here, of, known)
    yield from beyond


def _of_a_module(keys: Sequence[Key], modules: Sequence[str]) -> Problem:
    first, names = keys[0], ", ".join(key.written for key in keys)
    what = "is a key of a config module, and the file names none that has it"
    if len(keys) > 1:
        what = f"and {len(keys) - 1} more are keys of a config module, and the file names none that has them"
    details = (("at", first.where), *((("keys", names),) if len(keys) > 1 else ()))
    tries = tuple(f"titan.job.custom_config_module={name}" for name in modules)
    typed = () if first.is_typed else (_drop(*(key.written for key in keys)),)
    shown = f"titan.{first.written}" if first.is_typed else first.written
    return Problem(key=shown, what=what, details=details, tries=(*tries, *typed))


def _unknown(here: str, keys: Sequence[Key], known: Mapping[str, str]) -> Problem:
    """One problem for the keys of a section that no table has, or for one key."""
    first, before = keys[0], "titan." if keys[0].is_typed else ""
    problem = unknown_key(first.written, known, json.dumps(first.value, default=str), elsewhere=())
    if first.written != here:
        return _unknown_section(before + here, keys, known, problem.details)
    details: tuple[tuple[str, str], ...] = (("at", first.where), *problem.details)
    near_keys = [line.partition("=")[0].strip('"') for line in problem.tries]
    near_keys = near_keys or [name for name in known if name.lower() == first.written.lower()]
    typed = [_typed(name, first.value) for name in near_keys]
    if not first.is_typed:
        details += tuple(("meant", name) for name in near_keys[:1])
        typed = [*(f"{_drop(first.written)} {line}" for line in typed), _drop(first.written)]
    return Problem(key=before + here, what=problem.what, details=details, tries=tuple(typed))


def _unknown_section(
    here: str, keys: Sequence[Key], known: Mapping[str, str], details: tuple[tuple[str, str], ...]
) -> Problem:
    section = here.removeprefix("titan.") if keys[0].is_typed else here
    names = {key.written.removeprefix(f"{section}."): key for key in keys}
    near = suggest(section, {".".join(name.split(".")[: section.count(".") + 1]) for name in known})
    fixed = [_typed(f"{near}.{name}", key.value) for name, key in names.items() if f"{near}.{name}" in known]
    is_whole = len(fixed) == len(keys)
    drop = () if keys[0].is_typed else (_drop(section),)
    tries = ((" ".join([*drop, *fixed]),) if is_whole else ()) + drop
    lines = ", ".join(f"{name} ({key.where})" for name, key in names.items())
    meant = (("meant", f"[{near}]"),) if near and not keys[0].is_typed else ()
    what = f"unknown section, with {len(keys)} key{'s' * (len(keys) != 1)}"
    return Problem(key=here, what=what, details=(("keys", lines), *details, *meant), tries=tries)


def _value_problem(name: str, key: Key, known: Mapping[str, str], is_section: bool) -> Problem | None:
    shown, value = f"titan.{key.written}" if key.is_typed else key.written, key.value
    if name not in known:
        if value == {}:
            return None
        tries = () if key.is_typed else (_drop(key.written),)
        details = (("write", f"[{key.written}]"),) if not key.is_typed else ()
        return Problem(key=shown, what=f"is a section, not {_shown(value)}", details=details, tries=tries)
    options = known[name].split(" | ")
    if value == "???":
        return Problem(key=shown, what="is '???', which a configuration reads as missing")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return Problem(key=shown, what="does not fit into 64 bits")
    if isinstance(value, float) and math.isnan(value):
        return Problem(key=shown, what="is nan, which is no number to compute with")
    if "null" in options and isinstance(value, str) and value.lower() in NULLS:
        rule = ("rule", "TOML has no null; torchtitan reads the word as text, and without the line takes its default")
        tries = (f"titan.{name}=null", *(() if key.is_typed else (_drop(key.written),)))
        return Problem(key=shown, what=f"is the text {value!r}, not null", details=(rule,), tries=tries)
    if type_matches(value, known[name]):
        return None
    problem = type_problem(key.written, value, known[name])
    fixed = _choice(value, options)
    return Problem(key=shown, what=problem.what.replace(repr(value), _shown(value)), details=problem.details,
                   tries=() if fixed is None else (_typed(name, fixed),))  # fmt: skip


def _choice(value: object, options: Sequence[str]) -> object:
    """What a value of the wrong type was meant to be; None where nothing is near."""
    words = [option.strip("'") for option in options if option.startswith("'")]
    plain = {option for option in options if not option.startswith("'")}
    if words:
        return suggest(str(value).lower(), words)
    if isinstance(value, str):
        if "bool" in plain and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if "int" in plain and value.replace("_", "").strip().lstrip("+-").isdigit():
            return int(value)
        if "float" in plain:
            try:
                return float(value)
            except ValueError:
                return None
        if "list[str]" in plain:
            return [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "int" in plain and abs(value) < 2**53 and value == math.floor(value):
            return int(value)
        if "str" in plain:
            return str(value)
    return None


def _drop(*names: str) -> str:
    """What leaves keys of the file out."""
    shown = [name if re.fullmatch(r"[\w.-]+", name) else json.dumps(name) for name in names]
    line = f"translate.drop=[{','.join(shown)}]"
    return line if shown == [*names] else shlex.quote(line)


def _typed(name: str, value: object) -> str:
    """What sets a key on the command line; the shell takes it as it is."""
    if isinstance(value, str) and value.replace("_", "").replace(".", "").isalnum() and not value[0].isdigit():
        return f"titan.{name}={value}"
    return shlex.quote(f"titan.{name}={json.dumps(value, default=str)}")


def _shown(value: object) -> str:
    """A value for a reader; dates and times as TOML writes them."""
    return repr(value) if isinstance(value, str | int | float | list | dict) else str(value)


def _is_equal(wanted: object, value: object) -> bool:
    return type(wanted) is type(value) and wanted == value


def _at(key: Key, problem: Problem) -> Problem:
    details = (("at", key.where), *problem.details)
    return Problem(key=problem.key, what=problem.what, details=details, tries=problem.tries)


def _row(key: Key, became: str, why: str) -> Row:
    return Row(key=key.written, value=key.value, where=key.where, became=became, target="", why=why)
