"""The versions that a job trains with, read from the metadata of what is installed: nothing is imported."""

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from cp_engine.errors import Problem
from cp_engine.job.checks.keys import CONFIG_MODULE, package_of
from cp_engine.job.checks.tables import is_installed

Line = tuple[int, int]
TORCH = ((2, 10), (2, 15))
"""The first and the last line of torch that torchtitan's trainer and the engine were run with; docs/torchtitan.md says what was seen."""
TORCHTITAN = "0.2.2"
PINNED = 'pip install -c constraints.txt ".[torchtitan]"'
"""In a checkout: the versions of the tests."""


HOSTED = {"torchtitan_npu": ((2, 10), (2, 13), "torch.distributed.tensor._ops._matrix_ops._mm_like_strategy")}
"""Packages of config modules: the first and the last line of torch that they can be imported with, and what the next one lacks."""


def problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """Packages of another version than a job was ever trained with; one that is absent is another fault.

    Args:
        config: the whole composed configuration.
    """
    rule = "torchtitan and the kernels call parts of torch that change between its versions"
    yield from _of_torch("torch", "training", *TORCH, rule)
    package = package_of(config)
    if package in HOSTED and is_installed(package):
        first, last, lacking = HOSTED[package]
        rule = f"it imports {lacking}, which later ones lack"
        yield from _of_torch(CONFIG_MODULE, package, first, last, rule, f"~{CONFIG_MODULE}")
    found = _installed("torchtitan")
    if found is not None and found != TORCHTITAN:
        what = f"{found} is installed, and training needs {TORCHTITAN}"
        details = (("rule", "its keys, models and trainer are another program's in every version"),)
        tries = (PINNED, f"pip install torchtitan=={TORCHTITAN}")
        yield Problem(key="torchtitan", what=what, details=details, tries=tries)


def _of_torch(key: str, who: str, first: Line, last: Line, rule: str, *instead: str) -> Iterator[Problem]:
    found = _installed("torch")
    if found is None or first <= _line(found) <= last:
        return
    oldest, newest, after = (".".join(map(str, line)) for line in (first, last, (last[0], last[1] + 1)))
    name = "" if key == "torch" else "torch "
    what = f"{name}{found} is installed, and {who} needs {oldest} to {newest}"
    tries = (PINNED, f'pip install "torch>={oldest},<{after}"', *instead)
    yield Problem(key=key, what=what, details=(("rule", rule),), tries=tries)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _line(found: str) -> Line:
    """2.13 of `2.13.0+cpu`, `2.13.1` and `2.13.0a0+git1234567`."""
    major, minor = re.findall(r"\d+", found)[:2]
    return int(major), int(minor)
