"""Trust: code runs that the user typed or trusts; what a file from elsewhere names is not imported for that alone."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from cp_engine.errors import Problem
from cp_engine.job.checks.keys import CONFIG_MODULE, lookup, module_tables
from cp_engine.job.checks.rules import shipped_rules

TRUST = "translate.trust_modules"
IMPORT = "titan.experimental.custom_import"
NAMING = (CONFIG_MODULE, IMPORT)
"""Keys whose value torchtitan imports; converters, models, data sets and optimizers of others are registered by these."""
RULE = ("rule", "what a file names is imported and run only when you type it, or that you trust it")
ON = re.compile(rf"\+{{0,2}}{re.escape(TRUST)}=true", re.IGNORECASE)


def is_typed(key: str, typed: Sequence[str]) -> bool:
    """Whether an override of the command line sets a key."""
    return any(override.partition("=")[0].lstrip("+") == key for override in typed)


def typed_in(hydra: object) -> list[str]:
    """The overrides of a job's command line, with their references as they were typed.

    Args:
        hydra: the job's `hydra` node.
    """
    task = OmegaConf.to_container(OmegaConf.select(cast(DictConfig, hydra), "overrides.task"), resolve=False)
    assert isinstance(task, list)
    return [str(override) for override in task]


def trusts(typed: Sequence[str]) -> bool:
    """Whether the command line says that files may name code."""
    said = [override for override in typed if is_typed(TRUST, [override])]
    return bool(said) and ON.fullmatch(said[-1]) is not None


def settled(config: Mapping[str, object], typed: Sequence[str]) -> dict[str, object]:
    """The configuration, in which `translate.trust_modules` says what was typed: no file can ask for trust in itself.

    Args:
        config: the composed configuration, as plain containers.
        typed: overrides of the command line.
    """
    node = config.get("translate")
    if not isinstance(node, Mapping) or not isinstance(node.get("trust_modules"), bool):
        return dict(config)  # which the check of names and types refuses
    named = [key for key in NAMING if _module(config, key)]
    is_trusted = trusts(typed) or (bool(named) and all(is_typed(key, typed) for key in named))
    return {**config, "translate": {**node, "trust_modules": is_trusted}}


def problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """A module that a run would import, and that nobody trusts.

    Args:
        config: the whole composed configuration, settled.
    """
    if lookup(config, TRUST) is True:
        return
    for key in NAMING:
        if module := _module(config, key):
            yield untrusted(key, module)


def untrusted(key: str, module: str, *details: tuple[str, str]) -> Problem:
    """The problem of a module that a file names.

    Args:
        key: that names it.
        module: dotted name.
        details: of the file.
    """
    known: tuple[tuple[str, str], ...] = ()
    what = f"names '{module}', which torchtitan would import and run"
    if key != IMPORT:
        what, known = f"'{module}' is not a module whose keys are known", (("known", ", ".join(module_tables())),)
    shown = (*details, ("from", _place(module)), RULE, *known)
    return Problem(key=key, what=what, details=shown, tries=(f"{TRUST}=true",))


def _module(config: Mapping[str, object], key: str) -> str:
    """What a key names, where it is code of nobody that this project knows."""
    value = lookup(config, key)
    if not isinstance(value, str) or not value:
        return ""
    if key == IMPORT and value.partition(".")[0] in ("torchtitan", *shipped_rules().ascend_packages):
        return ""
    return "" if value in module_tables() else value


def _place(module: str) -> str:
    """Where a module would be imported from; nothing is imported for it."""
    top = module.partition(".")[0]
    for here in (Path(f"{top}.py"), Path(top)):
        if top and os.path.exists(here):
            return f"{here.absolute()}, in the folder of this command"
    try:
        spec = find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    return (
        "nowhere here: it is not installed"
        if spec is None
        else str(spec.origin or list(spec.submodule_search_locations or []))
    )
