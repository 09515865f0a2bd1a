"""Every key of torchtitan's JobConfig: read by torchtitan in a run, read beside other settings, or refused because nothing reads it."""

import ast
import re
import shlex
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cp_engine.job.checks import job
from cp_engine.job.checks import reads as torchtitan_reads
from cp_engine.job.checks.keys import module_tables, titan_table
from cp_engine.job.modes import plain
from tests.job.test_job import composed, refused
from tools import regenerate_titan_tables as tables
from tools import titan_reads

ROWS = torchtitan_reads.reads()
KEYS = titan_table()
UNREAD = {key: row for key, row in ROWS.items() if "unread" in row and "replaced" not in row and key in KEYS}
CHOICES = {key: re.findall(r"'([\w-]+)'", str(row["type"])) for key, row in KEYS.items()}
CONDITIONAL = {key: row["if"] for key, row in ROWS.items() if "if" in row and len(CHOICES[key]) != 1}
ANOTHER: dict[str, object] = {
    "int": 7,
    "float": 0.25,
    "bool": True,
    "str": "other",
    "list[str]": ["other"],
    "list[list[str]]": [["other"]],
}

Config = dict[str, object]


@pytest.fixture(scope="module")
def default() -> Config:
    return composed()


def with_values(config: Config, values: dict[str, object]) -> Config:
    made = OmegaConf.create(deepcopy(config))
    for key, value in values.items():
        OmegaConf.update(made, key, value, force_add=True)
    return plain(made)


def another(key: str) -> object:
    """A value of the key's type that is not torchtitan's default."""
    kind, default = str(KEYS[key]["type"]).split(" | ")[0], KEYS[key]["default"]
    if kind.startswith("'"):
        return next(choice for choice in CHOICES[key] if choice != default)
    return not default if isinstance(default, bool) else ANOTHER[kind]


def pasted(config: Config, line: str) -> Config:
    """The configuration with a `try` line behind it."""
    words = [word.partition("=")[::2] for word in shlex.split(line)]
    return with_values(config, {key.lstrip("+"): yaml.safe_load(value) for key, value in words})


def test_every_key_and_every_config_module_has_one_row_of_one_kind() -> None:
    assert set(ROWS) == {*KEYS, *module_tables()}
    for key, row in ROWS.items():
        assert len({"read", "by", "unread"} & set(row)) == 1, key
        assert set(row) <= {"read", "by", "unread", "if", "seen", "instead", "replaced"}, key


def test_what_is_read_is_what_the_installed_torchtitan_reads() -> None:
    assert tables.titan_reads_of(ROWS) == ROWS
    assert Path(tables.__file__).parents[1].joinpath(ROWS["job.custom_config_module"]["by"]).is_file()


def test_new_key_of_torchtitan_has_no_row_that_passes() -> None:
    shipped = {key: row for key, row in ROWS.items() if key not in ("memory_estimation.enable", "optimizer.lr")}
    found = tables.titan_reads_of(shipped)
    assert found["memory_estimation.enable"] == {} and found["optimizer.lr"] == {"read": "components/optimizer.py"}


def test_reads_are_found_through_the_names_that_hold_a_section() -> None:
    source = """
from torchtitan.config.job_config import Profiling as Settings
def f(job_config, given: Settings, other):
    held = self.job_config.profiling
    use(given.a, held.b, job_config.profiling.c, other.d, job_config.metrics.e, profiling.g)
    held.f = 1
"""
    assert titan_reads.read_in(ast.parse(source), "profiling", "Profiling") == {"a", "b", "c"}
    assert titan_reads.read_in(ast.parse("asdict(job_config.training.dataloader)"), "training.dataloader", "X") == {"*"}


@pytest.mark.parametrize("key", UNREAD)
def test_key_that_nothing_reads_is_refused_with_what_works(default: Config, key: str) -> None:
    config = with_values(default, {f"titan.{key}": another(key)})
    problem = refused(config)[f"titan.{key}"]
    assert "would have no effect" in problem.what and problem.details == (("rule", UNREAD[key]["unread"]),)
    if "instead" not in UNREAD[key]:
        job.check(with_values(default, {f"titan.{key}": KEYS[key]["default"]}))  # a file may say it
        job.check(pasted(config, problem.tries[0]))


@pytest.mark.parametrize("module", [name for name, row in ROWS.items() if name in module_tables() and "unread" in row])
def test_key_of_a_module_whose_program_does_not_run_is_refused(default: Config, module: str) -> None:
    config = with_values(default, {"titan.job.custom_config_module": module})
    assert not list(torchtitan_reads.unread(config))
    key, row = next(iter(module_tables()[module].items()))
    value = {"int": 77, "bool": True, "float": 0.7, "str": "other"}.get(str(row["type"]), ["other"])
    (problem,) = torchtitan_reads.unread(with_values(config, {f"titan.{key}": value}))
    assert problem.key == f"titan.{key}" and problem.details == (("rule", ROWS[module]["unread"]),)


@pytest.mark.parametrize("key", CONDITIONAL)
def test_typed_key_of_what_is_off_is_refused_and_each_try_line_turns_it_on(default: Config, key: str) -> None:
    dotted = f"titan.{key}"
    config = with_values(default, {dotted: another(key)})
    assert not list(torchtitan_reads.idle(config, []))  # a file holds sections that are off
    (problem,) = torchtitan_reads.idle(config, [f"++{dotted}=..."])
    assert problem.key == dotted and "would have no effect" in problem.what and problem.tries
    for line in problem.tries:
        assert not list(torchtitan_reads.idle(pasted(config, line), [f"{dotted}=..."])), line


@pytest.mark.parametrize("key", sorted({k for when in CONDITIONAL.values() for row in when for k in row}))
def test_conditions_name_keys_that_are_there(key: str) -> None:
    assert key in KEYS or key == "launch.resume"


def test_command_line_says_what_would_have_no_effect(command: Callable[..., object]) -> None:
    result = command(
        "titan.fault_tolerance.enable=true", "titan.profiling.profile_freq=5", "titan.checkpoint.interval=3"
    )
    assert result.code == 1
    for said in (
        "3 problems",
        "titan.fault_tolerance.enable  is true, and would have no effect",
        "try   titan.fault_tolerance.enable=false",
        "titan.profiling.profile_freq  is 5, and would have no effect",
        "titan.profiling.enable_profiling=true",
        "titan.checkpoint.interval  is 3, and would have no effect",
        "try   titan.checkpoint.enable=true",
    ):
        assert said in result.err


def test_file_may_hold_sections_that_are_off(command: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "llama3"\n[profiling]\nprofile_freq = 100\n[checkpoint]\nenable = false\ninterval = 7\n'
        "[fault_tolerance]\nenable = false\n"
    )
    result = command("toml=job.toml", "mode=explain", "data=builtin", "cp=none")
    assert result.code == 0 and "would refuse" not in result.out
