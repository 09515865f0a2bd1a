"""The TOML that torchtitan or torchtitan-npu needs for a configuration, where its keys can say the same."""

import json
from collections.abc import Iterator, Mapping

from cp_engine.config.compose import compose
from cp_engine.config.composition import degree_of
from cp_engine.errors import ConfigError, Problem
from cp_engine.hosts.torchtitan.models import OWN
from cp_engine.hosts.torchtitan.text import sources
from cp_engine.job.checks import training as training_checks
from cp_engine.job.checks.keys import (
    CONFIG_MODULE,
    lookup,
    module_tables,
    shape_row,
    shape_table,
    titan_table,
    value_of,
)
from cp_engine.job.checks.rules import Rules, shipped_rules

FREE = ("name", "degree", "mesh", "layout")
"""Keys of a composition in which it may differ from the preset that a TOML asks for."""
MODULE = CONFIG_MODULE.removeprefix("titan.")
FEW = 4
"""Differences from a shipped preset that are named; a composition with more is another one."""


def toml_text(config: Mapping[str, object]) -> str:
    """The text of the file.

    Args:
        config: the composed configuration.

    Raises:
        ConfigError: everything that no key of torchtitan or torchtitan-npu says.
    """
    problems = [
        *training_checks.mask_problems(config),
        *training_checks.shape_problems(config),
        *sources.tokenizer_problems(config),
        *_own_model(config),
    ]
    keys = _titan_keys(config)
    rules, cp = shipped_rules(), config["cp"]
    assert isinstance(cp, Mapping)
    try:
        degree = degree_of(cp)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    asked, more = _asked(rules, cp, keys, degree)
    problems += more
    dataset = sources.dataset_of(config)
    if dataset is None:
        what = "is read byte by byte from files of this project's kind, and torchtitan reads its own data sets"
        problems.append(Problem(key="data", what=what, tries=("data=c4_test", "data=c4")))
    else:
        places = {"training.dataset_path": "path", "model.hf_assets_path": "tokenizer"}
        asked |= {"training.dataset": dataset}
        asked |= {
            key: at for key, name in places.items() if (at := sources.place_of(config, dataset, name)) is not None
        }
    keys = {**asked, **{key: value for key, value in keys.items() if key not in asked}}
    if not problems:
        problems += _otherwise_read(rules, keys, config, asked, degree)
    for key, value in keys.items():
        if value is None:
            default = titan_table(config)[key]["default"]
            problems.append(
                Problem(key=f"titan.{key}", what=f"is null, which a TOML cannot say; the default is {default}")
            )
    if problems:
        raise ConfigError(problems)
    program = "torchtitan-npu 0.2.2" if MODULE in asked else "torchtitan 0.2.2"
    return "\n".join([f"# cp={cp['name']} on {degree} ranks, as a file of {program}.", *_sections(keys)]) + "\n"


def _own_model(config: Mapping[str, object]) -> Iterator[Problem]:
    """A model that ships with this engine alone: a file that names it would train another one, or none."""
    name, flavor = value_of(config, "titan.model.name"), value_of(config, "titan.model.flavor")
    table, here = shape_table().get(str(name), {}), shape_row(config).get("package")
    if name not in OWN or here is not None or value_of(config, "titan.experimental.custom_import"):
        return
    its = [other for other, row in table.items() if "package" in row or "in" in row]
    module = next(module for module in module_tables() if module.startswith(f"{_package(table)}."))
    what = f"{name} {flavor} is this engine's own; torchtitan has no {name}, and that of {_package(table)} is another model"
    tries = (f"{CONFIG_MODULE}={module} titan.model.flavor={flavor if flavor in its else its[0]}",)
    yield Problem(key="titan.model.name", what=what, tries=tries)


def _package(table: Mapping[str, Mapping[str, object]]) -> str:
    """The package that brings a model of the same name."""
    return next(str(row["package"]) for row in table.values() if "package" in row)


def _otherwise_read(
    rules: Rules, keys: Mapping[str, object], config: Mapping[str, object], asked: Mapping[str, object], degree: int
) -> Iterator[Problem]:
    """A file whose other keys would ask for another composition than its configuration has."""
    module = keys.get("job.custom_config_module", "")
    table = titan_table({"titan": {"job": {"custom_config_module": module}}})
    read = rules.composed(lambda key: keys[key] if key in keys else table.get(key, {}).get("default"))
    cp = config["cp"]
    assert isinstance(cp, Mapping)
    layout = lookup(config, "cp.layout.kind")
    is_same = read.preset and _is_like(cp, compose(read.preset)) and (degree == 1 or read.layout == layout)
    if not is_same:
        details = (("read as", f"cp={read.preset} {read.layout}".strip()), ("rule", read.why or "another rule"))
        what = "would be read as another composition, because of other keys of titan.*"
        yield Problem(key="cp", what=what, details=details)


def _titan_keys(config: Mapping[str, object]) -> dict[str, object]:
    """What differs from torchtitan's defaults, and the model."""
    table = titan_table(config)
    keys = {key: value_of(config, f"titan.{key}") for key in table}
    return {
        key: value
        for key, value in keys.items()
        if value != table[key]["default"] or key in ("model.name", "model.flavor")
    }


def _asked(
    rules: Rules, cp: Mapping[str, object], keys: Mapping[str, object], degree: int
) -> tuple[dict[str, object], list[Problem]]:
    """The keys that ask for a composition, and what is wrong with it."""
    presets = [preset for preset in rules.presets if _is_like(cp, compose(preset))]
    if not presets:
        near = min(((_differences(cp, compose(p)), p) for p in rules.presets), key=lambda x: len(x[0]))
        details = [("differs", f"{', '.join(near[0])} from {near[1]} as shipped")] if len(near[0]) <= FEW else []
        what = f"{cp.get('name')} is no composition that a TOML can ask for"
        allowed = ("allowed", ", ".join(rules.presets))
        return {}, [Problem(key="cp", what=what, details=(*details, allowed))]
    rows = [row for preset in presets for row in rules.asking_for(preset, degree)]
    fitting = [row for row in rows if all(keys.get(key) == value for key, value in _fixed(row) if key == "model.name")]
    if not fitting:
        models = sorted({str(value) for row in rows for key, value in _fixed(row) if key == "model.name"})
        what = f"{presets[0]} is known there for {', '.join(models)} only, not for {keys['model.name']}"
        return {}, [Problem(key="cp", what=what, tries=tuple(f"model={name}" for name in models))]
    row = fitting[0]
    now, wanted = keys.get(MODULE), row["when"].get(MODULE) if isinstance(row["when"], Mapping) else None
    if now is not None and wanted is not None and now != wanted:
        what = f"{presets[0]} is asked for with the config module {wanted}, and the job has {now}"
        return {}, [Problem(key=f"titan.{MODULE}", what=what, tries=(f"titan.{MODULE}={wanted}",))]
    asked: dict[str, object] = {}
    for key, value in _fixed(row):
        if isinstance(value, Mapping):
            now = keys.get(key)
            assert isinstance(now, list | None)
            asked[key] = [*dict.fromkeys([*(now or []), value["has"]])]
        elif key != "model.name":
            asked[key] = value
    asked["parallelism.context_parallel_degree"] = degree
    layout = lookup({"cp": cp}, "cp.layout.kind")
    key, choices = rules.balancers
    wanted = row.get("layout")
    if degree > 1 and wanted is not None and layout != wanted:
        what = f"is {layout}, and torchtitan-npu cuts the sequence {wanted} whatever the file says"
        return {}, [Problem(key="cp.layout", what=what, tries=(f"layout@cp.layout={wanted}",))]
    if degree > 1 and wanted is None:
        named = [name for name, kind in choices.items() if kind == layout]
        module = asked.get("job.custom_config_module", keys.get("job.custom_config_module", ""))
        default = titan_table({"titan": {"job": {"custom_config_module": module}}})
        if not named or (named == [None] and default[key]["default"] is not None):
            what = f"is {layout}, which the file cannot ask for: {key} has no word for it in TOML"
            tries = tuple(f"layout@cp.layout={kind}" for name, kind in choices.items() if name is not None)
            return {}, [Problem(key="cp.layout", what=what, tries=tries)]
        if named[0] is not None:
            asked[key] = named[0]
    return asked, []


def _fixed(row: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The conditions of a rule that a file can be made to meet."""
    when = row["when"]
    assert isinstance(when, Mapping)
    yield from when.items()


def _is_like(cp: Mapping[str, object], preset: Mapping[str, object]) -> bool:
    return not _differences(cp, preset)


def _differences(cp: Mapping[str, object], preset: Mapping[str, object]) -> list[str]:
    """Keys of a composition with another value than the preset's; layouts may differ in their kind."""
    mine, its = ({key: value for key, value in _flat(node, "cp.") if _is_fixed(key)} for node in (cp, preset))
    return [key for key in {**mine, **its} if key not in mine or key not in its or mine[key] != its[key]]


def _is_fixed(key: str) -> bool:
    return key == "cp.layout.over" or key.split(".")[1] not in FREE


def _flat(node: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sections(keys: Mapping[str, object]) -> Iterator[str]:
    """`[section]` and its keys, the sections in torchtitan's order."""
    order = {key.rpartition(".")[0]: i for i, key in reversed(list(enumerate(titan_table())))}
    names = sorted({key.rpartition(".")[0] for key in keys}, key=lambda name: order.get(name, len(order)))
    for name in names:
        yield from ("", f"[{name}]")
        for key, value in keys.items():
            section, _, last = key.rpartition(".")
            if section == name:
                yield f"{last} = {_value(value)}"


def _value(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value)
