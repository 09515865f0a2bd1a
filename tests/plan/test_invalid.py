"""Compositions that must be refused: kind, keys and the whole text of each error.

Each `invalid/NAME.yaml` is a composition (or a preset with overrides) with one mistake (or several) and what is expected;
`invalid/NAME.txt` is the text that a user reads. `python -m tests.plan.test_invalid` writes the texts anew: read their difference.

    expect: {kind: CoverageError, keys: [cp.steps.attend], pasted: compiles}

`pasted` says what the `try` lines do: `compiles` (one of them makes the composition compile), `mends` (each makes its
own problem go away, another is left) or `nothing` (there is no complete one).
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from cp_engine import errors
from cp_engine.algebra.shape import Shape
from cp_engine.config.compose import compose
from cp_engine.config.composition import plan_from_config
from cp_engine.errors import CPError, Problem
from cp_engine.plan.ir import Plan
from tests.helpers import small

FOLDER = Path(__file__).parents[1] / "invalid"
FILES = sorted(FOLDER.glob("*.yaml"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)

LISTED = {
    "attention_without_gathering",
    "gather_over_the_wrong_axis",
    "keys_seen_twice",
    "reorder_and_not_back",
    "heads_never_split_back",
    "undone_in_the_wrong_order",
    "axis_the_mesh_lacks",
    "axis_nothing_uses",
    "axes_not_the_mesh",
    "step_missing_from_order",
    "step_unknown_in_order",
    "step_twice_in_order",
    "unknown_key",
    "wrong_type",
    "several_faults",
}


@dataclass(frozen=True)
class Case:
    """One file."""

    kind: type[CPError]
    keys: list[str]
    pasted: str
    cp: dict[str, object]
    preset: str
    overrides: list[str]
    shape: Shape
    mask: dict[str, object]

    def plan(self, cp: Mapping[str, object] | None = None) -> Plan:
        return plan_from_config(self.cp if cp is None else cp, shape=self.shape, mask=self.mask)

    def error(self) -> CPError:
        with pytest.raises(CPError) as caught:
            self.plan()
        return caught.value

    def composed(self, pasted: list[str], folder: Path) -> dict[str, object]:
        """The composition with overrides that replace its own ones of the same key."""
        chosen = [o.removeprefix("cp=") for o in pasted if o.startswith("cp=")]
        if chosen:
            return compose(chosen[0])
        keys = {o.split("=")[0] for o in pasted}
        return compose(self.preset, [*(o for o in self.overrides if o.split("=")[0] not in keys), *pasted], folder)


def read(path: Path) -> Case:
    content = yaml.safe_load(path.read_text())
    expect = content.pop("expect")
    preset, overrides = content.pop("preset", "mine"), content.pop("overrides", [])
    case = Case(
        kind=getattr(errors, expect.pop("kind")),
        keys=expect.pop("keys"),
        pasted=expect.pop("pasted"),
        cp=content.pop("cp") if preset == "mine" else compose(preset, overrides),
        preset=preset,
        overrides=overrides,
        shape=small(**content.pop("shape", {})),
        mask=content.pop("mask", {"kind": "causal"}),
    )
    assert not expect and not content, "a field that the test does not read"
    return case


def test_every_refusal_of_the_list_has_a_file() -> None:
    assert LISTED <= {p.stem for p in FILES}
    assert {p.stem for p in FOLDER.glob("*.txt")} == {p.stem for p in FILES}


@every_file
def test_composition_is_refused_with_its_kind_and_every_key(path: Path) -> None:
    case = read(path)
    error = case.error()
    assert type(error) is case.kind
    assert [p.key for p in error.problems] == case.keys


@pytest.mark.quick
@every_file
def test_error_reads_as_reviewed(path: Path) -> None:
    assert f"{read(path).error()}\n" == path.with_suffix(".txt").read_text()


@every_file
def test_every_problem_says_what_would_be_right(path: Path) -> None:
    for problem in read(path).error().problems:
        labels = {label for label, _ in problem.details}
        assert labels & {"rule", "allowed"} or problem.tries, problem


@every_file
def test_try_lines_work_when_they_are_pasted(path: Path, tmp_path: Path) -> None:
    case = read(path)
    (tmp_path / "cp").mkdir()
    (tmp_path / "cp" / "mine.yaml").write_text(yaml.safe_dump(case.cp))
    results = set()
    for problem in case.error().problems:
        for line in problem.tries:
            if "..." not in line and problem.key.startswith("cp"):
                results.add("compiles" if _is_compiled(case, problem, shlex.split(line), tmp_path) else "mends")
    assert (results or {"nothing"}) & {case.pasted}
    assert case.pasted != "mends" or results == {"mends"}


def _is_compiled(case: Case, problem: Problem, overrides: list[str], folder: Path) -> bool:
    """Whether everything is right with these overrides; asserts that at least the problem is gone."""
    try:
        case.plan(case.composed(overrides, folder))
    except CPError as error:
        assert (problem.key, problem.what) not in {(p.key, p.what) for p in error.problems}, (
            f"{overrides} mends nothing"
        )
        return False
    return True


def test_composition_that_the_files_vary_compiles() -> None:
    """The mistakes are the only ones: without its mistake a file is accepted."""
    case = read(FOLDER / "unknown_key.yaml")
    steps = case.cp["steps"]
    assert isinstance(steps, dict)
    steps["to_heads"]["concat"] = steps["to_heads"].pop("concat_dim")
    assert case.plan().degree == 2


if __name__ == "__main__":
    for each in FILES:
        each.with_suffix(".txt").write_text(f"{read(each).error()}\n")
