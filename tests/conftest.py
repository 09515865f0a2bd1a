"""What the tests share: running the command as a user does."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gloo import World

# Two test processes on two cores: more threads would only wait for each other. Before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST = (
    "training",
    "gloo",
    "npu_host",
    "readme",
    "parallel",
    "cli",
    "checkpoints",
    "translate",
    "hostile",
    "on_ranks",
    "npu",
    "dsa",
    "reports_ranks",
    "verify",
    "hosts",
    "dsa_training",
    "faults",
    "resume",
    "random",
    "nodes",
    "fuzz",
    "one_process",
    "memory",
    "precision",
)
"""The files that take longest, in that order: one that begins last would keep the other test process waiting."""

LAUNCH = Path(__file__).parents[1] / "launch.py"
PATIENCE = 900.0
"""Seconds that nothing in a test takes on the busiest machine. Nobody waits for it unless something hangs."""
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order is the same in every test process."""
    names = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not depend on the tests before it."""
    import torch  # here: whoever asks for help needs none of it

    torch.manual_seed(0)


@pytest.fixture(scope="module")
def two() -> Iterator["World"]:
    from tests.gloo import world

    with world(2) as made:
        yield made


@pytest.fixture(scope="module")
def four() -> Iterator["World"]:
    from tests.gloo import world

    with world(4) as made:
        yield made


@pytest.fixture(params=["two", "four"])
def ranks(request: pytest.FixtureRequest) -> "World":
    return request.getfixturevalue(request.param)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank of a job."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of a user's shell: no rank of another job."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**kept, "PYTHONPATH": str(LAUNCH.parent), **more}


def alive(session: int) -> list[str]:
    """Processes of a session that still run; one that ended and waits to be reaped does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, of = text[text.rindex(")") + 2 :].split()[:4]
        if int(of) == session and state not in "ZX":
            found.append(text)
    return found


def gone(session: int) -> bool:
    """Whether a session has no process left, at last."""
    end = time.monotonic() + PATIENCE
    while alive(session) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(session)


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Result]:
    """Runs launch.py from another folder, the test's own."""

    def run(*arguments: str, timeout: float = PATIENCE, **environment: str) -> Result:
        command = [sys.executable, str(LAUNCH), *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=clean_environment(**environment),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Runs a command line in this process, from another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)

    from cp_engine.job import cli

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        try:
            code = cli.run(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        shown = capsys.readouterr()
        return Result(code, shown.out, shown.err)

    return run
