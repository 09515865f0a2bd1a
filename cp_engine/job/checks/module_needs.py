"""What a job uses of the package of its config module, and what becomes of a job whose package is not installed."""

from collections.abc import Iterator, Mapping

from cp_engine.errors import Problem
from cp_engine.hosts.torchtitan.models import OWN
from cp_engine.hosts.torchtitan.text.sources import TEXTS
from cp_engine.job.checks import trust
from cp_engine.job.checks.keys import (
    ABSENT,
    CONFIG_MODULE,
    flavors,
    lookup,
    module_tables,
    package_of,
    shape_row,
    shape_table,
    titan_table,
    value_of,
)
from cp_engine.job.checks.rules import shipped_rules
from cp_engine.job.checks.tables import is_installed

CONVERTERS = "titan.model.converters"
KNOWN = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
"""torchtitan's own model converters. Source: torchtitan/components/quantization of 0.2.2."""
OPTIMIZERS = ("Adam", "AdamW")
"""torchtitan's own."""
REPLACED = "parallelism.enable_custom_context_parallel"
"""A key of torchtitan-npu that a composition takes the place of."""


def spared_module(config: Mapping[str, object]) -> str:
    """A known config module that is not installed and of which the job uses nothing; empty where there is none.

    Args:
        config: the whole composed configuration.
    """
    module = value_of(config, CONFIG_MODULE)
    if not isinstance(module, str) or module not in module_tables() or is_installed(module):
        return ""
    is_model_its = _brings(config) or shape_row(config).get("package") == package_of(config)
    return "" if is_model_its or _used(config) else module


def notes(config: Mapping[str, object]) -> Iterator[str]:
    """What a reader should know of a run, one line each."""
    if module := spared_module(config):
        model, flavor = value_of(config, "titan.model.name"), value_of(config, "titan.model.flavor")
        package = module.partition(".")[0]
        yield f"{package} is not installed and the job uses nothing of it: {model} {flavor} is torchtitan's own model,"
        yield f"with the same arguments there, and is trained without {package}"


def without_spared_module(config: Mapping[str, object], titan: dict[str, object]) -> dict[str, object]:
    """The `titan` node of a job without the keys of a config module that it can do without."""
    if not spared_module(config):
        return titan
    gone = {CONFIG_MODULE.removeprefix("titan."), *_added(config)}
    return {
        name: {key: value for key, value in node.items() if f"{name}.{key}" not in gone}
        if isinstance(node, Mapping)
        else node
        for name, node in titan.items()
    }


def _added(config: Mapping[str, object]) -> list[str]:
    """The keys that the job's config module adds to torchtitan's."""
    return sorted(set(titan_table(config)) - set(titan_table()))


def _used(config: Mapping[str, object]) -> list[str]:
    """The keys of a job by which it needs the package of its config module, all but its model."""
    table = titan_table(config)
    used = [f"titan.{key}" for key in _added(config) if key != REPLACED]
    used = [key for key in used if value_of(config, key) not in (ABSENT, table[key.removeprefix("titan.")]["default"])]
    converters = value_of(config, CONVERTERS)
    if isinstance(converters, list) and set(converters) - set(KNOWN):
        used.append(CONVERTERS)
    if value_of(config, "titan.optimizer.name") not in OPTIMIZERS:
        used.append("titan.optimizer.name")
    dataset = lookup(config, "data.dataset")
    return [*used, *(["data.dataset"] if dataset not in (None, ABSENT, *TEXTS) else [])]


def _brings(config: Mapping[str, object]) -> list[str]:
    """The flavors of a model of the same name as one of this engine's that the package of the job's config module brings."""
    host = package_of(config)
    is_own = str(value_of(config, "titan.model.name")) in OWN
    return [name for name, row in flavors(config).items() if is_own and host and row.get("package") == host]


def _without_module(config: Mapping[str, object]) -> str:
    """What is typed to train without the job's config module: another model, asked for by name."""
    drop = [f"~titan.{key}" for key in _added(config) if lookup(config, f"titan.{key}") is not ABSENT]
    used, converters = _used(config), value_of(config, CONVERTERS)
    assert isinstance(converters, list)
    kept = [name for name in converters if name in KNOWN]
    change = [f"{CONVERTERS}=[{','.join(kept)}]"] if CONVERTERS in used else []
    change += ["~titan.optimizer.name"] if "titan.optimizer.name" in used else []
    change += ["data=builtin"] if "data.dataset" in used else []
    own = [
        f for f, row in shape_table().get(str(value_of(config, "titan.model.name")), {}).items() if "package" not in row
    ]
    if value_of(config, "titan.model.flavor") not in own and own:
        change.append(f"titan.model.flavor={own[0]}")
    return " ".join([*drop, f"~{CONFIG_MODULE}", *change])


def problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """Modules that nobody trusts, or flavors that the job's modules do not go with, on whatever machine.

    Args:
        config: the whole composed configuration.
    """
    module, key = value_of(config, CONFIG_MODULE), "titan.model.flavor"
    yield from trust.problems(config)
    name, flavor, host = str(value_of(config, "titan.model.name")), str(value_of(config, key)), package_of(config)
    rows = flavors(config)
    package = rows.get(flavor, {}).get("package")
    if isinstance(package, str) and package != host and is_installed(package):
        module = next(module for module in module_tables() if module.startswith(f"{package}."))
        what = f"'{flavor}' of {name} is a flavor of the package {package}, which the job does not load"
        own = next(other for other, row in rows.items() if row.get("package") != package)
        yield Problem(key=key, what=what, tries=(f"{CONFIG_MODULE}={module}", f"{key}={own}"))
    brought = _brings(config)
    if brought and flavor in rows and package is None:
        what = f"'{flavor}' is a flavor of this engine's {name}, and {CONFIG_MODULE} brings the {name} of {host}"
        details = (("of " + host, ", ".join(brought)),)
        tries = (f"{key}={brought[0]}", _without_module(config))
        yield Problem(key=key, what=what, details=details, tries=tries)


def missing(config: Mapping[str, object]) -> Iterator[Problem]:
    """Packages of config module and flavor that the job needs and that are not installed here.

    Args:
        config: the whole composed configuration.
    """
    module, key = value_of(config, CONFIG_MODULE), "titan.model.flavor"
    if isinstance(module, str) and module and _is_trusted(config, module):
        package, used = module.partition(".")[0], ", ".join(_used(config))
        other = shipped_rules().imports.get(module)
        if other is not None and not is_installed(other):
            what, tries = f"imports {other}, which is not installed", (_install(other), _without_module(config))
            yield Problem(key=CONFIG_MODULE, what=what, tries=tries)
        elif not is_installed(module) and (module not in module_tables() or used):
            what, tries = (
                f"needs the package {package}, which is not installed",
                (_install(package), _without_module(config)),
            )
            yield Problem(key=CONFIG_MODULE, what=what, details=(("for", used or "its JobConfig"),), tries=tries)
    name, flavor, host = str(value_of(config, "titan.model.name")), str(value_of(config, key)), package_of(config)
    rows = flavors(config)
    needed = rows.get(flavor, {}).get("package")
    if isinstance(needed, str) and not is_installed(needed):
        own = [other for other, row in rows.items() if row.get("package") != needed]
        what = (
            f"'{flavor}' of {name} is a flavor of the package {needed}, which is not installed: it can be planned only"
        )
        change = _without_module(config) if needed == host else f"{key}={own[0]}" if own else ""
        details = (("here", ", ".join(own)), *_sizes(name, flavor, needed))
        tries = (_install(needed), "mode=explain", *((change,) if change else ()))
        yield Problem(key=key, what=what, details=details, tries=tries)


def _is_trusted(config: Mapping[str, object], module: str) -> bool:
    return module in module_tables() or lookup(config, trust.TRUST) is True


def _install(package: str) -> str:
    return shipped_rules().ascend_packages.get(package, f"pip install {package.replace('_', '-')}")


def _sizes(name: str, flavor: str, package: str) -> Iterator[tuple[str, str]]:
    """How this engine's model of the same name and flavor differs from that of a package."""
    row = shape_table().get(name, {}).get(flavor, {})
    its = row.get("in", {})
    other = its.get(package, {}) if isinstance(its, Mapping) else {}
    shown = [f"{size} {other[size]} (here {row[size]})" for size in other if size in row and other[size] != row[size]]
    if shown:
        yield "its", ", ".join(shown)
