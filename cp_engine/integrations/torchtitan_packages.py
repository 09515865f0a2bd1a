"""What of a job needs a package or a device that is not here: config modules, flavors and model converters."""

from collections.abc import Iterator, Mapping

from cp_engine.compose import conf_dir
from cp_engine.errors import Problem
from cp_engine.integrations.config_modules import is_installed, untrusted
from cp_engine.integrations.toml_rules import Rules
from cp_engine.keys import ABSENT, CONFIG_MODULE, lookup, module_tables, shape_table, titan_table, value_of

CONVERTERS = "titan.model.converters"
KNOWN = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
"""torchtitan's own model converters. Source: torchtitan/components/quantization of 0.2.2."""


def check(config: Mapping[str, object]) -> Iterator[Problem]:
    """What is missing for a run, each with what to do.

    Args:
        config: the whole composed configuration.
    """
    module = value_of(config, CONFIG_MODULE)
    if isinstance(module, str) and module:
        yield from _module_problems(config, module)
    yield from _flavor_problems(config)
    yield from _converter_problems(config)


def _module_problems(config: Mapping[str, object], module: str) -> Iterator[Problem]:
    if module not in module_tables() and lookup(config, "translate.trust_modules") is not True:
        yield untrusted(module)
    elif not is_installed(module):
        package = module.partition(".")[0]
        added = (f"titan.{key}" for key in sorted(set(titan_table(config)) - set(titan_table())))
        keys = [key for key in added if lookup(config, key) is not ABSENT]
        keys += [CONVERTERS] if npu_converters(config) else []
        what = f"needs the package {package}, which is not installed"
        tries = (f"pip install {package.replace('_', '-')}", " ".join(f"~{key}" for key in [*keys, CONFIG_MODULE]))
        yield Problem(
            key=CONFIG_MODULE, what=what, details=(("for", ", ".join(keys) or "no key that is set"),), tries=tries
        )


def _flavor_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    key = "titan.model.flavor"
    name, flavor = str(value_of(config, "titan.model.name")), str(value_of(config, key))
    flavors = shape_table().get(name, {})
    package = flavors.get(flavor, {}).get("package")
    if isinstance(package, str) and not is_installed(package):
        own = [other for other, row in flavors.items() if "package" not in row]
        what = (
            f"'{flavor}' of {name} is a flavor of the package {package}, which is not installed: it can be planned only"
        )
        tries = (f"{key}={own[0]}", "mode=explain")
        yield Problem(key=key, what=what, details=(("here", ", ".join(own)),), tries=tries)


def _converter_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    device, found, converters = value_of(config, "launch.device"), npu_converters(config), value_of(config, CONVERTERS)
    if found and device != "npu":
        assert isinstance(converters, list)
        what = f"has {', '.join(found)}, which call Ascend operators, and launch.device is {device}"
        left = ",".join(name for name in converters if name not in found)
        drop = "translate.drop_npu_converters=true" if config.get("toml") else f"{CONVERTERS}=[{left}]"
        yield Problem(key=CONVERTERS, what=what, tries=(drop,))
    may_register = any(value_of(config, key) for key in (CONFIG_MODULE, "titan.experimental.custom_import"))
    assert isinstance(converters, list)
    for name in [] if may_register else [c for c in converters if c not in (*KNOWN, *found)]:
        near = next((other for other in KNOWN if other.endswith(f".{name}")), None)
        tries = (f"{CONVERTERS}=[{near}]",) if near else ()
        what, allowed = f"has {name}, which torchtitan 0.2.2 does not know", ("allowed", ", ".join(KNOWN))
        yield Problem(key=CONVERTERS, what=what, details=(allowed,), tries=tries)


def npu_converters(config: Mapping[str, object]) -> list[str]:
    """The job's model converters that call Ascend operators."""
    converters = value_of(config, CONVERTERS)
    known = Rules(conf_dir()).npu_converters
    return [name for name in converters if name in known] if isinstance(converters, list) else []
