"""A configuration folder of the user's, `--config-dir`: read within bounds, in front of nothing that ships, and executed by nobody."""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cp_engine.config.bounded import yaml_of
from cp_engine.config.hydra_files import composing
from cp_engine.config.references import require_bounded
from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks.hydra_keys import OF_HYDRA
from cp_engine.job.checks.trust import RULE, TRUST, trusts
from cp_engine.job.options import SOURCE

EXECUTED = ("callbacks", "job_logging", "hydra_logging", "launcher", "sweeper", "job.env_set")
"""Keys of Hydra's that name what runs: classes, commands, further overrides, and the environment that every rank is started in."""
UNCOMPOSED = (
    *(HydraException, OmegaConfBaseException, OSError, ValueError),
    *(KeyError, TypeError, AttributeError, AssertionError, RecursionError),
)
"""What Hydra raises where it cannot compose, its own errors and others that it does not foresee."""
MOST_FILES = 1000
"""Of a folder, that are looked at to name those which start from each other."""


def require_nothing_executed(options: Namespace, *, is_sweep: bool) -> None:
    """Refuses what files say that Hydra would execute before a job begins, and that nobody typed or trusts.

    Args:
        options: of the command line, with its overrides as Hydra takes them.
        is_sweep: whether several values are several jobs.

    Raises:
        ConfigError: naming the keys.
    """
    if not folders(options) or trusts(options.overrides):
        return
    folder, name = options.config_dir, options.config_name or "config"
    typed = [o for o in options.overrides if o.lstrip("+~").startswith(OF_HYDRA)]
    asked = _parts("config", typed, folder) or _parts("config", [], None)
    found: dict[str, None] = {}
    for job in _jobs(options.overrides) if is_sweep else [options.overrides]:
        said = _parts(name, job, folder)  # where it cannot be composed Hydra says so, and executes nothing
        found |= {key: None for key, value in said.items() if asked[key] != value}
    what = "is set by a file, and Hydra would import or start what it names before the job"
    if found:
        tries = (f"{TRUST}=true",)
        raise ConfigError([Problem(key=f"hydra.{k}", what=what, details=(RULE,), tries=tries) for k in found], SOURCE)


def folders(options: Namespace) -> list[Path]:
    """The folders of the user's that a command line names, with `--config-dir` and with `hydra.searchpath`."""
    found = [] if options.config_dir is None else [Path(options.config_dir)]
    for override in options.overrides:
        key, _, value = override.lstrip("+").partition("=")
        places = re.split(r"[\[\],\s'\"]+", value) if key == "hydra.searchpath" else []
        found += [Path(place.removeprefix("file://")) for place in places if place and "://" not in place[7:]]
    return found


def _parts(name: str, overrides: Sequence[str], folder: str | None) -> dict[str, object]:
    """What Hydra would execute of a configuration; nothing where there is none."""
    try:
        with composing(folder):
            composed = hydra_compose(name, list(overrides), return_hydra_config=True)
        require_bounded(OmegaConf.to_container(composed, resolve=False))  # before Hydra resolves its own
        nodes = {key: OmegaConf.select(composed.hydra, key) for key in EXECUTED}
    except UNCOMPOSED:
        return {}
    return {k: OmegaConf.to_container(n) if isinstance(n, DictConfig) else n for k, n in nodes.items()}


def _jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The first job of a sweep, and one with each other file that it chooses."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    first = [next(o.sweep_string_iterator()) if o.is_sweep_override() else None for o in parsed]
    job = [
        o if one is None else f"{p.get_key_element()}={one}" for o, one, p in zip(overrides, first, parsed, strict=True)
    ]
    yield [o for o, one in zip(overrides, first, strict=True) if one is None]  # which Hydra composes before any job
    yield job
    for i, override in enumerate(parsed):
        if override.is_sweep_override() and "." not in override.key_or_group:  # a group, whose files it chooses
            yield from (
                [*job[:i], f"{override.get_key_element()}={v}", *job[i + 1 :]] for v in override.sweep_string_iterator()
            )


def circle(folders: Sequence[Path]) -> ConfigError | None:
    """The error of files whose `defaults` lead back to themselves; None where none do."""
    names = next((names for folder in folders if (names := _circle(folder))), [])
    if not names:
        return None
    what = f"its defaults name each other in a circle: {' -> '.join(names)}"
    rule = ("rule", "a file starts from files that do not start from it")
    return ConfigError([Problem(key=f"{names[0]}.yaml", what=what, details=(rule,))], SOURCE)


def _circle(folder: Path) -> list[str]:
    """The files of a circle, the first of them also last; empty where there is none."""
    seen: dict[str, list[str]] = {}
    for path in sorted(islice(folder.rglob("*.yaml"), MOST_FILES)):
        seen[str(path.relative_to(folder).with_suffix(""))] = []
    for name, leads_to in seen.items():
        tree = yaml_of(folder / f"{name}.yaml")
        defaults = tree.get("defaults") if isinstance(tree, Mapping) else None
        for entry in defaults if isinstance(defaults, list) else ():
            group, option = next(iter(entry.items())) if isinstance(entry, Mapping) and entry else ("", entry)
            place = str(group).removeprefix("optional ").partition("@")[0]
            target = f"{place}/{option}" if place else str(option).partition("@")[0]
            leads_to.append(target[1:] if target.startswith("/") else str(Path(name).parent / target))
    for first in seen:
        ways = {first: [first]}
        left = [first]
        for name in left:
            if first in seen[name]:
                return [*ways[name], first]
            new = [each for each in dict.fromkeys(seen[name]) if each in seen and each not in ways]
            ways |= {each: [*ways[name], each] for each in new}
            left += new
    return []
