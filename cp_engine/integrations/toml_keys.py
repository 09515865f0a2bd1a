"""Names and types of the keys of a TOML, against torchtitan's tables."""

from collections.abc import Iterator, Mapping

from cp_engine.errors import Problem
from cp_engine.integrations.config_modules import Table
from cp_engine.integrations.toml_rules import Rules
from cp_engine.keys import module_tables, type_matches, type_problem, unknown_key


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


def key_problem(key: str, written: str, value: object, table: Table, rules: Rules, *, is_typed: bool) -> Problem | None:
    """What is wrong with one key.

    Args:
        key: its present name.
        written: as the file writes it.
        is_typed: whether it is of the command line, where keys are below `titan`.
        value: of it.
        table: the keys of torchtitan and of the file's config module.
        rules: for keys that a config module had once.
    """
    known = {name: str(row["type"]) for name, row in table.items()}
    shown = f"titan.{written}" if is_typed else written
    if key in known:
        if value == "???":
            return Problem(key=shown, what="is '???', which a configuration reads as missing")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return Problem(key=shown, what="does not fit into 64 bits")
        if type_matches(value, known[key]):
            return None
        problem = type_problem(written, value, known[key])
    elif any(name.startswith(f"{key}.") for name in known):
        return Problem(key=shown, what=f"is a section, not {value!r}", tries=() if is_typed else (f"[{key}]",))
    elif modules := [name for name, its in module_tables().items() if key in {**its, **rules.older_keys(name)}]:
        what = "is a key of a config module, and the file names none that has it"
        return Problem(key=shown, what=what, tries=tuple(f'[job] custom_config_module = "{name}"' for name in modules))
    elif key in rules.retired:
        now = rules.retired[key]
        return Problem(key=shown, what="is retired", tries=(f"titan.{now}={value}",) if isinstance(now, str) else ())
    else:
        problem = unknown_key(written, known, elsewhere=())
    tries = tuple(f"titan.{line}" if is_typed else _as_toml(line, known) for line in problem.tries)
    return Problem(key=shown, what=problem.what, details=problem.details, tries=tries)


def _as_toml(line: str, known: Mapping[str, str]) -> str:
    """`section.key=value`, as a TOML writes it."""
    key, _, value = line.strip('"').partition("=")
    return f"{key} = {value}" if key in known else f"[{key}]"
