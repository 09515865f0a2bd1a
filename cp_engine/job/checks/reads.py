"""Keys of torchtitan's JobConfig that would have no effect on a run, from the table of what torchtitan reads.

`torchtitan_reads.json` has a row for every key: `read`, a file of torchtitan that reads it, with `if`, the settings that one of which
must hold for that; or `by`, who reads it instead; or `unread`, why nothing does in a run of this project, with `seen`, the files that
mention it all the same, `instead`, what to write, and `replaced`, for what the composition decides. Config modules have a row each.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cp_engine.errors import Problem
from cp_engine.job.checks.keys import ABSENT, CONFIG_MODULE, TABLES, lookup, module_tables, titan_table, value_of
from cp_engine.job.checks.rules import holds

TYPED = re.compile(r"\+{0,2}titan\.([\w.]+)=")
Row = dict[str, Any]


def reads() -> dict[str, Row]:
    """What is known of each key, and of each config module, by name."""
    table: dict[str, Row] = json.loads((TABLES / "torchtitan_reads.json").read_text(encoding="utf-8"))
    return table


def replaced(config: Mapping[str, object]) -> Iterator[Problem]:
    """Keys that are written, and that the composition decides instead."""
    for name, row in reads().items():
        key = f"titan.{name}"
        if "replaced" in row and lookup(config, key) is not ABSENT:
            what, rule = "has no effect beside cp", ("rule", row["unread"])
            yield Problem(key=key, what=what, details=(rule,), tries=(f"~{key}", row["replaced"]))


def unread(config: Mapping[str, object]) -> Iterator[Problem]:
    """Keys with another value than torchtitan's default, which nothing reads in a run.

    Args:
        config: the whole composed configuration.
    """
    defaults = titan_table(config)
    for name, row in _rows(config).items():
        value = lookup(config, f"titan.{name}")
        if "unread" not in row or "replaced" in row or value in (ABSENT, None, ""):
            continue
        default, instead, key = defaults[name]["default"], row.get("instead"), f"titan.{name}"
        if value == default and instead is None:
            continue
        tries = (f"~{key}", instead) if instead else (assigned(key, default),)
        what, rule = f"is {shown(value)}, and would have no effect", ("rule", row["unread"])
        yield Problem(key=key, what=what, details=(rule,), tries=tries)


def idle(config: Mapping[str, object], typed: Sequence[str]) -> Iterator[Problem]:
    """Keys that were typed, and that torchtitan reads only beside settings that the job does not have.

    A file may write them all the same: it often holds the whole of a section that is off.

    Args:
        config: the whole composed configuration.
        typed: overrides of the command line.
    """
    defaults, rows = titan_table(config), _rows(config)
    for name in dict.fromkeys(match.group(1) for line in typed if (match := TYPED.match(line))):
        needed, key = rows.get(name, {}).get("if", []), f"titan.{name}"
        value = lookup(config, key)
        if value in (ABSENT, defaults.get(name, {}).get("default")) or not needed:
            continue
        if any(holds(when, lambda other: value_of(config, _dotted(other))) for when in needed):
            continue
        wanted = [" ".join(_turned_on(config, _dotted(k), c) for k, c in when.items()) for when in needed]
        tries = tuple(line for line in wanted if not line.startswith("launch."))
        rule = ("rule", f"torchtitan reads it only beside {' or '.join(tries)}")
        yield Problem(key=key, what=f"is {shown(value)}, and would have no effect", details=(rule,), tries=tries)


def assigned(key: str, value: object) -> str:
    """A value as it is typed."""
    text = shown(value)
    return f"'{key}={text}'" if isinstance(value, list) else f"{key}={text}"


def shown(value: object) -> str:
    """A value in Hydra's words."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if value != "" else "''"


def _rows(config: Mapping[str, object]) -> dict[str, Row]:
    """The row of every key of the job; keys that a config module adds have that module's."""
    table, module = reads(), lookup(config, CONFIG_MODULE)
    if not isinstance(module, str) or module not in table:
        return table
    return {**{key: table[module] for key in module_tables()[module]}, **table}


def _dotted(key: str) -> str:
    return key if key.startswith("launch.") else f"titan.{key}"


def _turned_on(config: Mapping[str, object], key: str, condition: object) -> str:
    """What to type for a condition to hold."""
    if not isinstance(condition, Mapping):
        return assigned(key, condition)
    ((kind, wanted),) = condition.items()
    if kind == "has":
        present = value_of(config, key)
        return assigned(key, [*(present if isinstance(present, list) else []), wanted])
    return assigned(key, int(str(wanted)) + 1) if kind == "above" else f"{key}=..."
