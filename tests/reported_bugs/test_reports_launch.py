"""Reports about launching and configuration from elsewhere, tried here: keys without effect, overrides, experiments."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from cp_engine import compile
from cp_engine.config.compose import compose, conf_dir
from cp_engine.config.composition import read
from cp_engine.errors import ConfigError
from cp_engine.plan.ir import Step
from tests.conftest import Result

Command = Callable[..., Result]
SHAPE = {"batch": 1, "sequence": 64, "heads": 4, "kv_heads": 4, "head_dim": 8}


def user(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "user" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def plan_head(result: Result) -> str:
    """The plan's first line: which strategy runs."""
    assert result.code == 0, result.err
    return next(line for line in result.out.splitlines() if " tokens " in line)


def test_key_of_a_config_module_has_one_effect_from_file_and_command_line(command: Command, tmp_path: Path) -> None:
    text = '[job]\ncustom_config_module = "torchtitan.components.ft.config"\n'
    (tmp_path / "with.toml").write_text(f"{text}[fault_tolerance]\nsync_steps = 7\n")
    (tmp_path / "without.toml").write_text(text)
    of_file = yaml.safe_load(command("toml=with.toml", "--cfg", "job").out)
    of_line = yaml.safe_load(command("toml=without.toml", "titan.fault_tolerance.sync_steps=7", "--cfg", "job").out)
    assert of_file["titan"]["fault_tolerance"] == of_line["titan"]["fault_tolerance"] == {"sync_steps": 7}
    assert of_file["titan"]["job"] == of_line["titan"]["job"]
    result = command("titan.fault_tolerance.sync_steps=7", "mode=explain")  # and without its module it is no key
    assert result.code == 1 and "titan.fault_tolerance.sync_steps" in result.err


def test_degree_that_nothing_uses_is_an_error(command: Command) -> None:
    result = command("cp=none", "cp.degree=2", "mode=explain")
    assert result.code == 1 and "cp.degree  asks for 2 ranks, and the mesh has 1" in result.err


def test_one_typo_is_one_error_from_command_line_file_and_library(command: Command, tmp_path: Path) -> None:
    user(tmp_path, "experiment/typo", "# @package _global_\ncp: {steps: {attend: {kernl: math}}}\n")
    errors = [
        command("+cp.steps.attend.kernl=math", "mode=explain").err,
        command("--config-dir", "user", "experiment=typo", "mode=explain").err,
    ]
    cp = compose("ulysses")
    cp["steps"]["attend"]["kernl"] = "math"
    with pytest.raises(ConfigError) as caught:
        compile(cp, mesh=None, mask="causal", **SHAPE)
    errors.append(f"{caught.value}\n")
    assert len(set(errors)) == 1 and "cp.steps.attend.kernl  unknown key" in errors[0]


def test_chosen_kernel_is_the_one_that_is_planned(command: Command) -> None:
    assert "kernel     attend: math" in command("mode=explain", "cp.steps.attend.kernel=math").out


def test_last_choice_wins_and_the_effective_one_is_shown(command: Command, tmp_path: Path) -> None:
    user(tmp_path, "experiment/mine", "# @package _global_\ndefaults: [{override /cp: ring}, _self_]\n")
    (tmp_path / "a.toml").write_text("[parallelism]\ncontext_parallel_degree = 2\n")
    mine = ("--config-dir", "user", "mode=explain", "experiment=mine")
    assert plan_head(command(*mine)).startswith("ring ")
    assert plan_head(command(*mine, "toml=a.toml")).startswith("allgather_kv ")
    assert plan_head(command(*mine, "toml=a.toml", "cp=ulysses")).startswith("ulysses ")


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_file_with_defaults_says_where_it_is_merged(path: Path) -> None:
    node = yaml.safe_load(path.read_text())
    assert "defaults" not in node or "_self_" in node["defaults"]


@pytest.mark.parametrize(
    ("arguments", "head"),
    [
        (["~cp.mesh", "+cp.mesh={ulysses: 4}"], "4 ranks (ulysses=4)"),
        (["cp.order=[to_heads, attend, to_sequence]"], "2 ranks"),
        (["cp.order=[to_heads,attend,to_sequence]"], "2 ranks"),
        (["cp=none"], "1 rank "),
    ],
)
def test_overrides_in_their_documented_form_work(command: Command, arguments: list[str], head: str) -> None:
    assert head in plan_head(command("mode=explain", *arguments))


def test_steps_of_plain_data_become_typed_objects() -> None:
    composition = read({**compose("ulysses"), "degree": 4}, None)
    assert all(isinstance(step, Step) for step in composition.steps) and composition.mesh.sizes == (4,)


@pytest.mark.parametrize("name", ["mine", "presets/mine"])
def test_another_primary_file_has_the_same_choices(command: Command, tmp_path: Path, name: str) -> None:
    user(tmp_path, name, "# @package _global_\ndefaults: [/config, _self_]\ntitan: {training: {seq_len: 128}}\n")
    result = command("--config-dir", "user", "--config-name", name, "mode=explain", "cp=usp")
    assert plan_head(result).startswith("usp ") and "sequence 128" in result.out


def test_relative_interpolation_without_a_target_says_where_it_is(command: Command, tmp_path: Path) -> None:
    user(tmp_path, "experiment/typo", "# @package _global_\ncp: {steps: {attend: {kernel: '${..degre}'}}}\n")
    result = command("--config-dir", "user", "experiment=typo", "mode=explain")
    assert result.code == 1 and "cp.steps.attend.kernel" in result.err and "degre" in result.err


def test_two_jobs_of_one_moment_have_two_folders() -> None:
    def folder() -> str:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            return str(hydra_compose("config", return_hydra_config=True).hydra.run.dir)

    assert len({folder() for _ in range(3)}) == 3


def test_missing_value_is_refused_before_any_process_starts(command: Command, tmp_path: Path) -> None:
    gather = "{kind: all_gather, axes: '???', tensors: [k, v], dim: sequence, only: all}"
    text = f"defaults: [allgather_kv, _self_]\nname: open\norder: [more, attend]\nsteps: {{more: {gather}}}\n"
    user(tmp_path, "cp/open", text)
    result = command("--config-dir", "user", "cp=open")
    assert result.code == 1 and "cp.steps.more.axes  has no value" in result.err
    assert "outputs" not in {path.name for path in tmp_path.iterdir()}
