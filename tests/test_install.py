"""What is installed: the declared dependencies are those that are imported, and a job runs with versions that it was tried with."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cp_engine.job.checks import versions
from cp_engine.job.toml.file import tomllib
from tests.conftest import Result

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {"hydra-core": "hydra", "pyyaml": "yaml", "torch-npu": "torch_npu"}
REQUIREMENT = re.compile(r"([\w-]+)\s*([^;\s]*)")


def named(requirements: list[str]) -> dict[str, str]:
    """Version ranges by normal name."""
    found = (REQUIREMENT.match(requirement.replace("[", ";")) for requirement in requirements)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


def test_what_the_package_imports_is_declared() -> None:
    declared = {"cp_engine", *sys.stdlib_module_names, "tomllib"}
    for requirements in (PROJECT["dependencies"], *EXTRAS.values()):
        declared |= {IMPORTED_AS.get(name, name) for name in named(requirements)}
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.glob("cp_engine/**/*.py")
        for name in imported(path)
        if name not in declared
    }
    assert not undeclared


def test_declared_ranges_are_those_that_a_job_is_checked_for() -> None:
    (first, last) = versions.TORCH
    assert named(PROJECT["dependencies"])["torch"] == f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert named(EXTRAS["torchtitan"])["torchtitan"] == f"=={versions.TORCHTITAN}"


def test_extras_for_ascend_are_for_torch_that_a_job_runs_with() -> None:
    lines = {
        extra: tuple(map(int, version[2:].split(".")[:2]))
        for extra, requirements in EXTRAS.items()
        for name, version in named(requirements).items()
        if name == "torch-npu"
    }
    assert len(lines) == 5 and versions.TORCH[0] <= min(lines.values()) and max(lines.values()) <= versions.TORCH[1]
    first, last, _ = versions.HOSTED["torchtitan_npu"]
    with_host = [extra for extra in EXTRAS if "cp-engine[ascend]" in EXTRAS[extra]]
    of_host = [line for extra, line in lines.items() if extra in with_host]
    assert len(of_host) == 4 and first <= min(of_host) and max(of_host) <= last


@pytest.mark.parametrize("found", ["2.9.1", "2.9.1+cpu", "2.16.0", "2.16.0a0+git0123456", "3.0.0"])
@pytest.mark.parametrize("arguments", [["cp=ulysses"], ["mode=verify", "verify.level=training", "cp=ring"]])
def test_other_torch_is_refused_before_anything_starts(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], found: str
) -> None:
    monkeypatch.setattr(versions, "version", {"torch": found, "torchtitan": "0.2.2"}.__getitem__)
    result = command(*arguments)
    assert result.code == 1 and not list(tmp_path.iterdir())
    assert result.err.startswith("ConfigError: 1 problem\n  1. torch  " + found)
    assert "needs 2.10 to 2.15" in result.err and 'try   pip install -c constraints.txt ".[torchtitan]"' in result.err


@pytest.mark.parametrize("found", ["2.10.0", "2.13.0+cpu", "2.15.1", "2.15.0a0+git0123456"])
def test_torch_of_the_range_is_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", {"torch": found, "torchtitan": "0.2.2"}.__getitem__)
    assert not list(versions.problems({}))


HOST = "titan.job.custom_config_module=torchtitan_npu.config.custom_config"


@pytest.mark.parametrize(("found", "is_refused"), [("2.13.0", False), ("2.14.0", True), ("2.15.0+cu132", True)])
def test_package_that_cannot_be_imported_with_a_torch_is_refused_where_a_job_names_it(
    command: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    found: str,
    is_refused: bool,
) -> None:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "torchtitan_npu").mkdir()
    (folder / "torchtitan_npu" / "__init__.py").write_text("raise ImportError('as under torch 2.14')")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(versions, "version", {"torch": found, "torchtitan": "0.2.2"}.__getitem__)
    where = {"titan": {"job": {"custom_config_module": "torchtitan_npu.config.custom_config"}}}
    assert bool(list(versions.problems(where))) == is_refused and not list(versions.problems({}))
    if is_refused:
        result = command("cp=ulysses", HOST)
        assert result.code == 1 and not list(tmp_path.iterdir())
        assert f"custom_config_module  torch {found} is installed, and torchtitan_npu needs 2.10 to 2.13" in result.err
        assert command("mode=explain", "cp=ulysses", HOST).code == 0


def test_other_torchtitan_is_refused_before_anything_starts(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", {"torch": "2.9.1", "torchtitan": "0.3.0"}.__getitem__)
    result = command("cp=ulysses")
    assert result.code == 1 and result.err.startswith("ConfigError: 2 problems\n  1. torch  2.9.1")
    assert "\n  2. torchtitan  0.3.0 is installed, and training needs 0.2.2\n" in result.err


def test_plan_needs_no_version(command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"torch": "2.9.1", "torchtitan": "0.3.0"}.__getitem__)
    result = command("mode=explain", "cp=ulysses")
    assert result.code == 0 and "proved" in result.out
