"""The dry-run resolve: `python -m tools.run_resolve`, with uv on the path.

Each extra of pyproject.toml is resolved as the documentation installs it, for each Python and machine that it is for, from the plain
registry alone: no local folder, no extra index and no constraint of this machine, so that what lies on it cannot hide a fault. uv reads
the markers of another Python as that Python would, which pip's --python-version does not, and fetches metadata instead of wheels.
Ends with 1 if an outcome is another than the one written here.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cp_engine.job.toml.file import tomllib

ROOT = Path(__file__).parents[1]
X86, ARM = "x86_64", "aarch64"
CUDA = ("cuda-", "nvidia-")
"""Libraries that torch pins itself, or a range of them."""
OWN_TORCH = {f"ascend-torch{line}" for line in (210, 211, 212, 214)}
"""Extras for another torch than constraints.txt has, installed without it."""
NO_CPU_BUILD = {"ascend-torch210": "torch==2.10.0+cpu", "ascend-torch211": "torch==2.11.0+cpu"}
"""What torch_npu's x86-64 wheels ask for, and the plain registry has not; their aarch64 wheels ask for the build that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One extra on one Python and machine."""

    extra: str
    python: str
    machine: str

    @property
    def constrained(self) -> bool:
        """Whether constraints.txt is for this extra."""
        return self.extra not in OWN_TORCH

    @property
    def lacking(self) -> str | None:
        """The requirement that nothing on the plain registry satisfies, if that is what is expected."""
        return NO_CPU_BUILD.get(self.extra) if self.machine == X86 else None


def cases() -> list[Case]:
    """Every extra on every Python of pyproject.toml; those for Ascend also on aarch64, as most of its machines are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    pythons = [line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)]
    return [
        Case(extra=extra, python=python, machine=machine)
        for python in pythons
        for extra in project["optional-dependencies"]
        for machine in (X86, *((ARM,) if extra.startswith("ascend") else ()))
    ]


def environment() -> dict[str, str]:
    """This one without settings of pip and uv, but for the main index and its certificate."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    more = {"UV_DEFAULT_INDEX": os.environ.get("PIP_INDEX_URL"), "SSL_CERT_FILE": os.environ.get("PIP_CERT")}
    return {**{name: value for name, value in more.items() if value}, **kept}


def resolved(case: Case, cache: Path) -> tuple[dict[str, str], str]:
    """Versions by name, and what uv says where there are none."""
    command = ["uv", "--no-config", "--no-python-downloads", "--cache-dir", str(cache), "pip", "compile", "--quiet"]
    command += ["--python", sys.executable, "--python-version", case.python, "--extra", case.extra, "pyproject.toml"]
    command += ["--python-platform", f"{case.machine}-manylinux_2_28", "--no-header", "--no-annotate"]
    command += ["--constraints", "constraints.txt"] if case.constrained else []
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    pins = (line.partition("==") for line in done.stdout.splitlines() if "==" in line)
    return {name: version for name, _, version in pins}, done.stderr if done.returncode else ""


def pinned() -> set[str]:
    """The names that constraints.txt and the extras themselves give one version, as uv writes them."""
    text = (ROOT / "constraints.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    return {name.lower().replace("_", "-") for name in re.findall(r"""(?:^|")([\w-]+)==""", text, flags=re.MULTILINE)}


def verdict(case: Case, found: dict[str, str], error: str) -> tuple[bool, str]:
    """Whether a result is the expected one, and what to print of it."""
    if case.lacking is not None:
        is_expected = f"there is no version of {case.lacking}" in " ".join(error.split())
        return is_expected, f"refused, as expected: no {case.lacking}" if is_expected else error or "resolved"
    if error or not found:
        return False, error or "nothing resolved"
    shown = f"{len(found)} packages, torch {found['torch']}, triton {found['triton']}"
    loose = sorted(name for name in set(found) - pinned() if not name.startswith(CUDA)) if case.constrained else []
    return not loose, shown + (f"; not in constraints.txt: {', '.join(loose)}" if loose else "")


def report(wanted: Iterable[Case], cache: Path, processes: int) -> int:
    """Prints a line per case; returns how many are not as expected."""
    wanted, failures = list(wanted), 0
    with ThreadPoolExecutor(processes) as pool:
        for case, (found, error) in zip(wanted, pool.map(lambda c: resolved(c, cache), wanted), strict=True):
            is_expected, shown = verdict(case, found, error)
            failures += not is_expected
            named = f"{case.python}  {case.machine:<8} {case.extra:<16}{'-c  ' if case.constrained else '    '}"
            print(f"{'ok    ' if is_expected else 'FAILED'}  {named}{shown}", flush=True)
    print(f"resolved  {len(wanted) - failures} of {len(wanted)} as expected")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, required=True, help="a folder for metadata")
    parser.add_argument("--processes", type=int, default=8, help="they wait for the network most of the time")
    parser.add_argument("--extra", help="only this one")
    given = parser.parse_args()
    wanted = [case for case in cases() if given.extra in (None, case.extra)]
    return 1 if not wanted or report(wanted, given.cache, given.processes) else 0


if __name__ == "__main__":
    sys.exit(main())
