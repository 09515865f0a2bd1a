"""Compose: the configuration of a preset, by Hydra, from inside any program."""

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from hydra import compose as hydra_compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cp_engine.config.hydra_files import composing, shadows
from cp_engine.config.references import require_bounded
from cp_engine.config.shipped import RENAMED, conf_dir
from cp_engine.errors import ConfigError, Problem, suggest

OF_CP = re.compile(r"(\+\+|\+|~)?(cp\.|[\w/]+@cp\.)")
"""Overrides that change the composition: `cp.key=...` and `group@cp.key=...`."""


def compose(preset: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> dict[str, object]:
    """The `cp` node of a preset, as plain data.

    Args:
        preset: a file name in `cp/`, without its ending.
        overrides: as on the command line.
        config_dir: a folder whose groups are searched after the shipped ones.

    Returns:
        Mappings, lists and values; `???` where a required value is missing.

    Raises:
        ConfigError: no such preset, or an override that does not apply.
    """
    problems = [_not_of_cp(o) for o in overrides if not OF_CP.match(o)]
    problems += [_renamed(o) for o in overrides if _key(o) in RENAMED and not o.startswith("~")]
    if config_dir is not None and not os.path.isdir(config_dir):
        problems.append(Problem(key="config_dir", what=f"there is no folder {config_dir}"))
    elif preset not in presets(config_dir):
        problems.append(_no_preset(preset, config_dir))
    else:
        problems += shadows(Path(config_dir)) if config_dir is not None else []
    if problems:
        raise ConfigError(problems, f"cp={preset}")
    try:
        stamps = _stamps() if config_dir is None else None
        composed = plain((_read if stamps is None else _kept)(preset, tuple(overrides), config_dir, stamps))["cp"]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([Problem(key="overrides", what=" ".join(str(error).split()))], f"cp={preset}") from error
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}


def _read(preset: str, overrides: tuple[str, ...], config_dir: str | Path | None, stamps: object) -> DictConfig:
    """What Hydra composes, before interpolations are resolved."""
    with composing(config_dir):
        return hydra_compose("config", [f"cp={preset}", *overrides])


_kept = lru_cache(maxsize=64)(_read)
"""Of the shipped files alone, as they are: reading them again takes ten times as long as a plan."""


def _stamps() -> tuple[tuple[str, int, int], ...]:
    """What changes when a shipped file does."""
    found = [(path, path.stat()) for path in sorted(conf_dir().rglob("*.yaml"))]
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in found)


def plain(composed: DictConfig) -> dict[str, object]:
    """The configuration as plain containers, interpolations resolved.

    Raises:
        ConfigError: if an interpolation has no target, or too large a one.
    """
    require_bounded(OmegaConf.to_container(composed, resolve=False))
    try:
        config = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([Problem(key=error.full_key or "configuration", what=str(error).splitlines()[0])]) from error
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def presets(config_dir: str | Path | None = None) -> list[str]:
    """The names of all presets."""
    return options("cp", [conf_dir(), *([Path(config_dir)] if config_dir is not None else [])])


def options(group: str, folders: Sequence[Path]) -> list[str]:
    """The files of a group, in any of some configuration folders."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def groups(folders: Sequence[Path]) -> list[str]:
    """The groups of some configuration folders."""
    return sorted({path.name for folder in folders for path in folder.iterdir() if any(path.glob("*.yaml"))})


def _no_preset(preset: str, config_dir: str | Path | None) -> Problem:
    names = presets(config_dir)
    near = suggest(preset, names)
    allowed = (("allowed", ", ".join(names)),)
    return Problem(key="cp", what=f"there is no preset {preset!r}", details=allowed, tries=(near,) if near else ())


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _renamed(override: str) -> Problem:
    key, new = _key(override), RENAMED[_key(override)]
    return Problem(key=key, what=f"is named {new} now", tries=(override.replace(key, new, 1),))


def _not_of_cp(override: str) -> Problem:
    rule = ("rule", "overrides change the composition; mask, shape and device are arguments of compile")
    return Problem(key="overrides", what=f"{override!r} is no key of cp", details=(rule,))
