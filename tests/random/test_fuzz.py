"""5,000 mutated TOML files, YAML files and command lines: each is planned or refused by name, in bounds, and executes nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attempts import Attempts, Outcome
from tests.input_mutations import CANARY, Case, case_of

QUICK, ALL = 40, 5000


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    with Attempts() as started:
        yield started


def attempt(attempts: Attempts, case: Case, folder: Path) -> tuple[Outcome, str]:
    """How a case ended, and what was wrong with that."""
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    outcome = attempts.run(case.arguments, folder)
    ran = f"; {CANARY} was written" if any(folder.rglob(CANARY)) else ""
    return outcome, f"{outcome.fault}{ran}"


def faults(attempts: Attempts, seeds: range, folder: Path) -> list[str]:
    """Every seed whose case ended badly, with what it takes to repeat it: `python -m tests.random.test_fuzz SEED`."""
    found = []
    for seed in seeds:
        (here := folder / str(seed)).mkdir()
        outcome, fault = attempt(attempts, case_of(seed), here)
        if fault:
            found.append(f"seed {seed}: {fault}\n{case_of(seed)}\n{outcome.err[-600:]}")
    return found


def test_of_mutated_input_the_first_40(attempts: Attempts, tmp_path: Path) -> None:
    assert faults(attempts, range(QUICK), tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_of_mutated_input_the_rest(attempts: Attempts, tmp_path: Path, part: int) -> None:
    each = ALL // 20
    assert faults(attempts, range(max(QUICK, part * each), (part + 1) * each), tmp_path) == []


if __name__ == "__main__":
    import tempfile

    with Attempts() as started:
        for given in map(int, sys.argv[1:]):
            with tempfile.TemporaryDirectory() as made:
                print(given, case_of(given), *attempt(started, case_of(given), Path(made)), sep="\n")
