"""Turns Hydra's composition errors into ours: every bad override at once, each with the nearest thing that works."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cp_engine.errors import ConfigError, Problem, suggest
from cp_engine.keys import known_keys, unknown_key

KEY = re.compile(r"Could not (?:override|append to config\. An item is already at|delete(?: from config\.)?) '([^']+)'")
MEANT = re.compile(r"Did you mean to override (?:one of )?([^?]+)\?")


def config_error(
    error: Exception, overrides: Sequence[str], *, conf: Path, extra: str | None, sweep: bool
) -> ConfigError:
    """Every override that Hydra refuses, found by composing again without it.

    Args:
        error: what Hydra raised for all overrides together.
        overrides: as typed.
        conf: the shipped configuration folder.
        extra: the user's --config-dir, if any.
        sweep: whether several values are several jobs; the first stands for them.
    """
    if isinstance(error, SearchPathException):
        return ConfigError([Problem(key="--config-dir", what=str(error))], source="the command line")
    with initialize_config_dir(config_dir=str(conf), version_base="1.3"):
        left = [_one_choice(override) if sweep else override for override in overrides]
        if extra is not None:
            left.append(f"hydra.searchpath=[file://{Path(extra).absolute()}]")
        refused: list[tuple[str, Exception]] = []
        composed = _composed(left, refused)
    GlobalHydra.instance().clear()
    found = [_problem(reason, override, composed) for override, reason in refused]
    return ConfigError(found or [_problem(error, "", composed)], source="the command line")


def _composed(left: list[str], refused: list[tuple[str, Exception]]) -> DictConfig | None:
    """Composes without the overrides that Hydra refuses, which are moved to `refused`."""
    while True:
        composed, error = _attempt(left)
        if error is None:
            return composed
        culprit = next((override for override in left if _is_about(error, override)), None)
        if culprit is None:  # its message does not say: the one without which Hydra says something else
            culprit = next(
                (each for each in left if str(_attempt([o for o in left if o != each])[1]) != str(error)), None
            )
        if culprit is None:
            return None
        left.remove(culprit)
        refused.append((culprit, error))


def _attempt(overrides: list[str]) -> tuple[DictConfig | None, Exception | None]:
    try:
        return compose("config", overrides, return_hydra_config=True), None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return None, error


def _is_about(error: Exception, override: str) -> bool:
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    if isinstance(error, OverrideParseException):
        return error.override == override
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return error.missing_cfg_file == f"{key.partition('@')[0]}/{value}"
    text = str(error)
    match = KEY.search(text)
    return match.group(1).partition("=")[0] == key if match else override in text


def _one_choice(override: str) -> str:
    """A sweep's first job; anything else as it is."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override  # composing reports it
    if not parsed.is_sweep_override() or override.startswith("~"):
        return override
    return f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"


def _problem(error: Exception, override: str, composed: DictConfig | None) -> Problem:
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MissingConfigException) and error.options is not None:
        near = suggest(value, error.options)
        tries = (f"{key}={near}",) if near else ()
        what = f"'{value}' is not one of the choices"
        return Problem(key=key, what=what, details=(("allowed", ", ".join(error.options)),), tries=tries)
    if "Ambiguous value" in str(error) or "requires --multirun" in str(error):
        return Problem(key=key, what=f"{value} is several values, one run takes one", tries=(f"-m {key}={value}",))
    if override.startswith("+") and str(error).startswith("Multiple values for"):
        return Problem(key=key, what="has a value already; + would add a second", tries=_assigned([key], value))
    meant = MEANT.search(str(error))
    if meant is not None:
        return Problem(
            key=key, what="is not the name of this choice", tries=_assigned(meant.group(1).split(", "), value)
        )
    if composed is None or not KEY.search(str(error)):
        cause = [str(error.__cause__).splitlines()[0]] if error.__cause__ else []
        return Problem(key=key or "configuration", what=" ".join([*lines, *cause]))
    choices = [name for name in composed.hydra.runtime.choices if not name.startswith("hydra/")]
    relocated = [name for name in choices if name.partition("@")[2] == key.replace("/", ".")]
    if relocated:
        return Problem(key=key, what="is not the name of this choice", tries=_assigned(relocated, value))
    known = {**known_keys(), **dict.fromkeys(_dotted(composed), "")}
    if any(name.startswith(f"{key}.") for name in known):
        rule = ("rule", "a mapping is replaced in two overrides; one alone would merge with what is there")
        return Problem(key=key, what="is a mapping", details=(rule,), tries=(f"'~{key}' '+{key}={value}'",))
    if key in known:
        return Problem(key=key, what=" ".join(lines))
    near_choice = suggest(key, choices)
    if near_choice is not None and "." not in key:
        return Problem(
            key=key,
            what="unknown key",
            details=(("allowed", ", ".join(choices)),),
            tries=_assigned([near_choice], value),
        )
    return unknown_key(key, known, value)


def _assigned(keys: Sequence[str], value: str) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key in keys)


def _dotted(composed: DictConfig) -> list[str]:
    """The dotted keys of a composed configuration, without Hydra's own."""
    tree = OmegaConf.to_container(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
    assert isinstance(tree, Mapping)
    keys: list[str] = []

    def walk(node: object, key: str) -> None:
        if isinstance(node, Mapping) and node:
            for name, child in node.items():
                walk(child, f"{key}.{name}" if key else str(name))
        else:
            keys.append(key)

    walk(tree, "")
    return keys
