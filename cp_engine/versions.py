"""The versions that a job trains with, read from the metadata of what is installed: nothing is imported."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from cp_engine.errors import Problem

TORCH = ((2, 10), (2, 15))
"""The first and the last line of torch that torchtitan's trainer and the engine were run with; docs/torchtitan.md says what was seen."""
TORCHTITAN = "0.2.2"
PINNED = 'pip install -c constraints.txt ".[torchtitan]"'
"""In a checkout: the versions of the tests."""


def problems() -> Iterator[Problem]:
    """Packages of another version than a job was ever trained with; one that is absent is another fault."""
    found, (first, last) = _installed("torch"), TORCH
    if found is not None and not first <= _line(found) <= last:
        oldest, newest = (".".join(map(str, line)) for line in TORCH)
        what = f"{found} is installed, and training needs {oldest} to {newest}"
        rule = ("rule", "torchtitan and the kernels call parts of torch that change between its versions")
        after = f"{last[0]}.{last[1] + 1}"
        tries = (PINNED, f'pip install "torch>={oldest},<{after}"')
        yield Problem(key="torch", what=what, details=(rule,), tries=tries)
    found = _installed("torchtitan")
    if found is not None and found != TORCHTITAN:
        what = f"{found} is installed, and training needs {TORCHTITAN}"
        rule = ("rule", "its keys, models and trainer are another program's in every version")
        yield Problem(
            key="torchtitan", what=what, details=(rule,), tries=(PINNED, f"pip install torchtitan=={TORCHTITAN}")
        )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _line(found: str) -> tuple[int, int]:
    """2.13 of `2.13.0+cpu`, `2.13.1` and `2.13.0a0+git1234567`."""
    major, minor = re.findall(r"\d+", found)[:2]
    return int(major), int(minor)
