"""Names and types of every key outside `cp.*`, and what to say of one that is wrong."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cp_engine.errors import SHOWN, Problem, letters, shown, suggest

TABLES = Path(__file__).parent
MODES = ("train", "explain", "verify", "translate")

# key -> type, in the words of the torchtitan table. `cp` belongs to the schema, `mask` to its group, `datasets` to `data`.
KEYS: Mapping[str, str] = {
    "mode": " | ".join(map(repr, MODES)),
    "shape.batch": "int | null",
    "shape.sequence": "int | null",
    "shape.heads": "int | null",
    "shape.kv_heads": "int | null",
    "shape.head_dim": "int | null",
    "shape.v_head_dim": "int | null",
    "shape.latent_dim": "int | null",
    "shape.index_heads": "int | null",
    "shape.index_dim": "int | null",
    "shape.topk": "int | null",
    "shape.rope_dim": "int | null",
    "shape.dtype": "'float64' | 'float32' | 'bfloat16' | 'float16' | null",
    "data.path": "str | null",
    "data.field": "str",
    "data.dataset": "str | null",
    "data.cut": "list[str]",
    "data.whole": "list[str]",
    "launch.kind": "'local' | 'torchrun' | 'slurm'",
    "launch.device": "'auto' | 'cpu' | 'cuda' | 'npu' | 'npu_reference'",
    "launch.nproc": "int | null",
    "launch.inline": "bool",
    "launch.resume": "str | null",
    "launch.resume_check": "'digest' | 'sizes'",
    "launch.verbose": "bool",
    "launch.watch_seconds": "float | null",
    "launch.nonfinite": "'stop' | 'go_on'",
    "launch.max_restarts": "int",
    "launch.join_seconds": "int",
    "launch.nodes": "int | null",
    "launch.node": "int | null",
    "launch.rendezvous": "str | null",
    "toml": "str | null",
    "out": "str | null",
    "translate.to": "'experiment' | 'toml'",
    "translate.force": "bool",
    "translate.drop": "list[str]",
    "translate.trust_modules": "bool",
    "translate.drop_npu_converters": "bool",
    "explain.format": "'text' | 'json'",
    "verify.level": "'attention' | 'training'",
    "verify.target": "'process' | 'ranks'",
    "verify.reference": "'parallel' | 'single'",
}
ELSEWHERE = ("cp", "mask", "datasets")
CHOICES = ("model", "experiment")
"""Groups whose names are no keys."""
OF_FILES = ("data.path", "data.field")  # not of torchtitan's data sets
PLACES = ("path", "tokenizer")
CONFIG_MODULE = "titan.job.custom_config_module"

# Sizes that must be positive; torchtitan would fail later, in a rank.
POSITIVE = (
    "launch.nproc",
    "launch.nodes",
    "launch.join_seconds",
    "shape.batch",
    "shape.sequence",
    "shape.heads",
    "shape.kv_heads",
    "shape.head_dim",
    "shape.v_head_dim",
    "shape.latent_dim",
    "shape.index_heads",
    "shape.index_dim",
    "shape.topk",
    "shape.rope_dim",
    "titan.training.steps",
    "titan.training.seq_len",
    "titan.training.local_batch_size",
    "titan.parallelism.tensor_parallel_degree",
    "titan.parallelism.pipeline_parallel_degree",
    "titan.parallelism.data_parallel_replicate_degree",
    "titan.parallelism.context_parallel_degree",
)


def titan_table(config: Mapping[str, object] | None = None) -> dict[str, dict[str, object]]:
    """Type and default of every key of torchtitan's JobConfig, by dotted key.

    Args:
        config: the composed configuration, for the further keys of its config module; None for torchtitan's own keys.

    Raises:
        ConfigError: a trusted config module that cannot be imported.
    """
    table: dict[str, dict[str, object]] = json.loads((TABLES / "torchtitan_keys.json").read_text())
    module = None if config is None else lookup(config, CONFIG_MODULE)
    if not isinstance(module, str) or not module or config is None:
        return table
    if module in module_tables():
        return {**table, **module_tables()[module]}
    if lookup(config, "translate.trust_modules") is not True:
        return table
    from cp_engine.job.checks.tables import imported_table

    return {**table, **imported_table(module)}


def module_tables() -> dict[str, dict[str, dict[str, object]]]:
    """What each known config module adds to torchtitan's keys, or changes in them."""
    tables: dict[str, dict[str, dict[str, object]]] = json.loads((TABLES / "torchtitan_modules.json").read_text())
    return tables


def shape_table() -> dict[str, dict[str, dict[str, object]]]:
    """Attention shape by model name and flavor."""
    table: dict[str, dict[str, dict[str, object]]] = json.loads((TABLES / "torchtitan_shapes.json").read_text())
    return table


def package_of(config: Mapping[str, object]) -> str:
    """The package of the config module; empty where none is named."""
    module = lookup(config, CONFIG_MODULE)
    return module.partition(".")[0] if isinstance(module, str) else ""


def flavors(config: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The attention shapes of the configured model by flavor; a flavor that the config module's package brings too is the package's."""
    table, package = shape_table().get(str(value_of(config, "titan.model.name")), {}), package_of(config)
    brought = {flavor: row["in"] for flavor, row in table.items() if "in" in row}
    return {
        **table,
        **{flavor: rows[package] for flavor, rows in brought.items() if isinstance(rows, dict) and package in rows},
    }


def shape_row(config: Mapping[str, object]) -> dict[str, object]:
    """The attention shape of the configured model; empty where the table has none."""
    return flavors(config).get(str(value_of(config, "titan.model.flavor")), {})


def known_keys(config: Mapping[str, object] | None = None) -> dict[str, str]:
    """Every key that has a type here; with those of the configuration's config module, where there is a configuration."""
    return {**KEYS, **{f"titan.{key}": str(row["type"]) for key, row in titan_table(config).items()}}


def type_matches(value: object, wanted: str) -> bool:
    """Whether a value has a type of the key tables, such as `int | null` or `list[str]`."""
    return any(_is_one(value, option) for option in wanted.split(" | "))


def _is_one(value: object, option: str) -> bool:
    if option.startswith("list["):
        return isinstance(value, list) and all(_is_one(item, option[5:-1]) for item in value)
    if option == "any":
        return True
    if option == "null":
        return value is None
    if option == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if option == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if option == "dict":
        return isinstance(value, dict)
    if option == "bool":
        return isinstance(value, bool)
    if option == "str":
        return isinstance(value, str)
    return repr(value) == option


def _leaves(node: object, known: Mapping[str, str], key: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values; a mapping is a value where the tables have its key."""
    is_section = not key or any(name.startswith(f"{key}.") for name in known)
    if isinstance(node, Mapping) and (node or is_section) and key not in known:
        for name, child in node.items():
            dotted = f"{key}.{name}" if key else str(name)
            if dotted not in ELSEWHERE:
                yield from _leaves(child, known, dotted)
    else:
        yield key, node


def key_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """Unknown, missing and unset keys, wrong types and sizes below 1."""
    known, strange = known_keys(config), 0
    for key, value in _leaves(config, known):
        if any(name.startswith(f"{key}.") for name in known):
            _, inside = _met([*key.split("."), ""], tuple(known), ())
            yield Problem(key=key, what=f"is a section, not {value!r}", details=(("allowed", ", ".join(inside)),))
        elif key not in known:
            strange += 1  # of very many only the first are printed
            elsewhere = (*ELSEWHERE, *CHOICES)
            is_shown = strange <= SHOWN
            yield unknown_key(key, known, shown(value), elsewhere) if is_shown else Problem(key=key, what="unknown key")
        elif value == "???":
            yield Problem(key=key, what="has no value", details=(("allowed", known[key]),), tries=(f"{key}=...",))
        elif not type_matches(value, known[key]):
            yield type_problem(key, value, known[key])
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield Problem(key=key, what="does not fit into 64 bits")
        elif key in POSITIVE and isinstance(value, int) and value < 1:
            yield Problem(key=key, what=f"is {value}, less than 1")
    yield from _dataset_problems(lookup(config, "datasets"))
    needed = [key for key in KEYS if key not in OF_FILES or lookup(config, "data.dataset") in (None, ABSENT)]
    missing = [key for key in needed if lookup(config, key) is ABSENT]
    yield from (Problem(key=key, what="is missing", details=(("allowed", known[key]),)) for key in missing)


def _dataset_problems(node: object) -> Iterator[Problem]:
    """`datasets` has one entry per data set, with where it lies."""
    for name, place in node.items() if isinstance(node, Mapping) else ():
        for key, value in place.items() if isinstance(place, Mapping) else ((None, place),):
            dotted = f"datasets.{name}" + (f".{key}" if key is not None else "")
            if key not in PLACES:
                allowed = (("allowed", ", ".join(f"datasets.{name}.{place}" for place in PLACES)),)
                near = PLACES[0] if key is None else suggest(str(key), PLACES)
                tries = (f"datasets.{name}.{near}={shown(value)}",) if near else ()
                yield Problem(key=dotted, what="unknown key", details=allowed, tries=tries)
            elif not isinstance(value, str | None):
                yield type_problem(dotted, value, "str | null")
    if not isinstance(node, Mapping):
        yield Problem(key="datasets", what=f"is a section, not {node!r}", tries=("'datasets={}'",))


def unknown_key(key: str, known: Iterable[str], value: str = "...", elsewhere: tuple[str, ...] = ELSEWHERE) -> Problem:
    """The problem of a key that no table has, with its siblings and the nearest ones.

    Args:
        key: dotted.
        known: every dotted key there is.
        value: what it was given.
        elsewhere: first parts that others know the keys of.
    """
    known, parts = tuple(known), key.split(".")
    depth, siblings = _met(parts, known, elsewhere)
    allowed = ", ".join(siblings) if len(siblings) <= 25 else f"{len(siblings)} keys; python launch.py --help"
    tries = tuple(f"{name}={value}" for name in near_keys(key, known, elsewhere))
    details = (("allowed", allowed), *letters(key))
    return Problem(key=".".join(parts[: depth + 1]), what="unknown key", details=details, tries=tries)


def _met(parts: list[str], known: tuple[str, ...], elsewhere: tuple[str, ...]) -> tuple[int, list[str]]:
    """How many parts lead to a section that there is, and the names in it."""
    depth = 0
    while depth < len(parts) and any(name.startswith(".".join([*parts[: depth + 1], ""])) for name in known):
        depth += 1
    names = {name.split(".")[depth] for name in known if name.startswith("".join(f"{part}." for part in parts[:depth]))}
    return depth, sorted({*names, *elsewhere} if depth == 0 else names)


def near_keys(key: str, known: Iterable[str], elsewhere: tuple[str, ...] = ()) -> list[str]:
    """The keys that a misspelt one may mean: it without its beginning, its name in another section, or the nearest."""
    known, parts = tuple(known), key.split(".")
    depth, siblings = _met(parts, known, elsewhere)
    if depth == len(parts):
        return []
    whole = [name for name in known if name.endswith(f".{key}")]
    near = suggest(parts[depth], [name for name in siblings if name != parts[depth]])
    if depth == len(parts) - 1:
        whole = whole or [name for name in known if name.split(".")[-1] == parts[-1]]
    inside = next((name.partition(".")[0] for name in known if name.split(".")[1:2] == parts[:1]), None)
    if not whole and near is None and depth == 0 and inside is not None:  # its beginning is missing, and it is misspelt
        return near_keys(f"{inside}.{key}", known) if len(parts) > 1 else []
    if whole or near is None:
        return whole[:3]
    fixed = ".".join([*parts[:depth], near, *parts[depth + 1 :]])
    if fixed in known or near in elsewhere or any(name.startswith(f"{fixed}.") for name in known):
        return [fixed]
    return near_keys(fixed, known) if _met(fixed.split("."), known, ())[0] > depth else []  # another part is wrong too


def type_problem(key: str, value: object, wanted: str) -> Problem:
    """The problem of a value that has not the type of the tables."""
    names = {"NoneType": "null"}
    got = names.get(type(value).__name__, type(value).__name__)
    if "'" in wanted:
        choices = [option.strip("'") for option in wanted.split(" | ")]
        near = suggest(str(value), choices)
        tries = (f"{key}={near}",) if near else ()
        return Problem(
            key=key, what=f"{value!r} is not a choice", details=(("allowed", ", ".join(choices)),), tries=tries
        )
    tries = ()
    if wanted.split(" | ")[0] == "str" and isinstance(value, (int, float, bool)):
        tries = (f"\"{key}='{shown(value)}'\"",)
    elif isinstance(value, str) and value and type_matches([value], wanted):
        tries = (f"'{key}=[{value}]'",)
    given = got if value is None else f"{got} {value!r}"
    return Problem(key=key, what=f"is {given}, not {wanted}", details=(("allowed", wanted),), tries=tries)


ABSENT = object()
"""No value at a key, not even null."""


def lookup(config: Mapping[str, object], key: str) -> object:
    """What is at a dotted key, or ABSENT."""
    node: object = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def value_of(config: Mapping[str, object], key: str) -> object:
    """A value of the configuration, or torchtitan's default."""
    value = lookup(config, key)
    if value is ABSENT and key.startswith("titan."):
        return titan_table(config)[key.removeprefix("titan.")]["default"]
    return None if value is ABSENT else value
