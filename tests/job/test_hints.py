"""What the command line answers: each mistake once, all of them together, with lines that work when they are typed."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result

MINE = {
    "experiment/optional.yaml": "# @package _global_\ndefaults: [optional override /cp: missing, _self_]\n",
    "experiment/near.yaml": "# @package _global_\ndefaults: [override /cp: ulyses, _self_]\n",
    "experiment/folder.yaml": "# @package _global_\nhydra: {run: {dirr: x}}\n",
    "experiment/section.yaml": "# @package _global_\nhydra: {jobb: {chdir: true}}\n",
    "cp/mine.yaml": "defaults: [ulyses, _self_]\nname: mine\n",
}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A user's folder with files that are wrong."""
    for name, text in MINE.items():
        (tmp_path / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my" / name).write_text(text)
    return "my"


def problems(text: str) -> list[list[str]]:
    """The lines of each problem."""
    found: list[list[str]] = []
    for line in text.splitlines()[1:]:
        if line.startswith("  ") and line.strip()[:1].isdigit() and line[2:3] != " ":
            found.append([line.strip().partition(". ")[2]])
        elif found:
            found[-1].append(line.strip())
    return found


def tries(lines: list[str]) -> list[str]:
    """What a problem says to type."""
    labels = [i for i, line in enumerate(lines) if line.startswith("try ")]
    return [line.removeprefix("try").strip() for line in lines[labels[0] :]] if labels else []


# typed -> for each problem, how it begins and what to type instead
TYPED: list[tuple[str, list[tuple[str, list[str]]]]] = [
    ("+hydra.run.dirr=x", [("hydra.run.dirr  unknown key", ["hydra.run.dir=x"])]),
    ("++hydra.sweep.dirr=x", [("hydra.sweep.dirr  unknown key", ["hydra.sweep.dir=x"])]),
    ("+hydra.jobb.chdir=true", [("hydra.jobb  unknown key", ["hydra.job.chdir=true"])]),
    ("hydra.jobb.chdir=true", [("hydra.jobb  unknown key", ["hydra.job.chdir=true"])]),
    ("hydra.job.chdirr=true", [("hydra.job.chdirr  unknown key", ["hydra.job.chdir=true"])]),
    ("+hydra.launcher.n_jobs=2", [("hydra.launcher.n_jobs  unknown key", [])]),
    ("hydra/launcherr=basic", [("hydra/launcherr  unknown key", ["hydra/launcher=basic"])]),
    ("hydra.job.env_set.NAME=1", [("hydra.job.env_set.NAME  is not there yet", ["+hydra.job.env_set.NAME=1"])]),
    ("hydra.job.env_copy=[NOT_SET]", [("hydra.job.env_copy  'NOT_SET' is not in the environment", [])]),
    ("hydra/job_logging=disabled", [("hydra.job_logging  Unable to configure", ["hydra/job_logging=default"])]),
    ("modell=llama3", [("modell  unknown key", ["model=llama3"])]),
    ("+modell=llama3", [("modell  unknown key", ["model=llama3"])]),
    ("mod=explain", [("mod  unknown key", ["mode=explain"])]),
    ("layout.over=[ulysses]", [("layout  unknown key", ["'cp.layout.over=[ulysses]'"])]),
    ("training.steps=3", [("training  unknown key", ["titan.training.steps=3"])]),
    ("training.stepz=3", [("training  unknown key", ["titan.training.steps=3"])]),
    ("~titan.training.stepss", [("titan.training.stepss  unknown key", ["'~titan.training.steps'"])]),
    ("datasets.c4=x", [("datasets.c4  unknown key", ["datasets.c4.path=x"])]),
    ("colective@cp.steps.to_sequence=undo", [
        ("colective@cp.steps.to_sequence  there is no group", ["collective@cp.steps.to_sequence=undo"]),
    ]),
    ("cp=rng cp.mesh.ring=4", [("cp  'rng' is not one of the choices", ["cp=ring"])]),
    ("mask=windo mask.left=3", [("mask  'windo' is not one of the choices", ["mask=window"])]),
    ("mask.left=3", [("mask.left  unknown key", ["mask=window mask.left=3", "mask=document mask.left=3"])]),
    ("mask=window", [("mask.left  window needs it", ["'mask.left=64'"])]),
    ("cp.mesh=4", [("cp.mesh  must map each axis to its size", ["cp.degree=4"])]),
    ("cp=ring cp.steps.attend.rotate=[]", [("cp.mesh.ring  no step and no layout", ["'cp.steps.attend.rotate=[ring]'"])]),
    ("cp.steps.to_heads.axes=[]", [("cp.steps.to_heads.axes  [] names no mesh axis", ["'cp.steps.to_heads.axes=[ulysses]'"])]),
    ("cp.order=[to_head,attend,to_sequence]", [("cp.order[0]  'to_head'", ["'cp.order=[to_heads,attend,to_sequence]'"])]),
    ("cp.order=to_heads,attend,to_sequence", [
        ("cp.order  to_heads,attend,to_sequence is a list", ["'cp.order=[to_heads,attend,to_sequence]'"]),
    ]),
    ("titan.model.converters=float8", [("titan.model.converters  is str 'float8'", ["'titan.model.converters=[float8]'"])]),
    ("titan.job.description=a=b", [("titan.job.description  a=b cannot be read", ["\"titan.job.description='a=b'\""])]),
    ("'titan.job.description=f(x'", [("titan.job.description  f(x cannot be read", ["\"titan.job.description='f(x'\""])]),
    ("foo=1 titan.training.steps=ten", [("foo  unknown key", []), ("titan.training.steps  is str 'ten'", [])]),
    ("titan.training.stepz=1 cp.head_groups=x +hydra.run.dirr=x", [
        ("titan.training.stepz  unknown key", ["titan.training.steps=1"]),
        ("hydra.run.dirr  unknown key", ["hydra.run.dir=x"]),
        ("cp.head_groups  must be a number", ["cp.head_groups=1"]),
    ]),
    ("cp=none titan.parallelism.context_parallel_degree=2", [
        ("titan.parallelism.context_parallel_degree  is 2, but", ["~titan.parallelism.context_parallel_degree"]),
    ]),
    ("cp ulysses", [("cp  is not an override", []), ("ulysses  is not an override", ["cp=ulysses"])]),
    ("--cp=ring", [("--cp=ring  is not an option", ["cp=ring"])]),
    ("-cp ring", [("--config-path, --config-name  Primary config", ["cp=ring"])]),
    ("-m cp=ulysses,rng", [("cp  'rng' is not one of the choices", ["cp=ring"])]),
    ("--config-dir my experiment=optional", [("experiment/optional.yaml  its defaults name cp: missing", [])]),
    ("--config-dir my experiment=near", [("experiment/near.yaml  its defaults name cp: ulyses", ["cp=ulysses"])]),
    ("--config-dir my experiment=folder", [("hydra.run.dirr  unknown key, in experiment/folder.yaml", [])]),
    ("--config-dir my experiment=section", [("hydra.jobb  unknown key, in experiment/section.yaml", [])]),
    ("--config-dir my cp=mine", [("cp/mine.yaml  its defaults name cp: ulyses", [])]),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "expected"), TYPED, ids=[typed for typed, _ in TYPED])
def test_mistake_is_answered_with_what_works(
    command: Callable[..., Result], mine: str, typed: str, expected: list[tuple[str, list[str]]]
) -> None:
    result = command("mode=explain", *shlex.split(typed))
    assert result.code == 1 and "Traceback" not in result.err
    found = problems(result.err)
    assert [lines[0].startswith(begin) for lines, (begin, _) in zip(found, expected, strict=True)] == [True] * len(
        expected
    ), result.err
    assert [tries(lines) for lines in found] == [lines for _, lines in expected], result.err


@pytest.mark.parametrize(
    "typed",
    [
        *("+hydra.job.env_set.NAME=1", "+hydra.job_logging.loggers.x.level=INFO", "hydra.searchpath=[file://my]"),
        *("hydra.verbose=some.logger", "hydra.job.chdir=true"),
    ],
)
def test_keys_that_are_free_in_hydra_are_taken(command: Callable[..., Result], mine: str, typed: str) -> None:
    result = command("mode=explain", typed)
    assert (result.code, result.err) == (0, "")


def test_folder_to_search_that_is_not_there_is_refused(command: Callable[..., Result]) -> None:
    with pytest.warns(UserWarning, match="nowhere"):
        result = command("mode=explain", "hydra.searchpath=[nowhere]")
    assert result.code == 1 and "hydra.searchpath  there is no folder nowhere" in result.err


# ------------------------------------------------------------------ hydra.job.chdir
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("data=jsonl data.path=docs/none", "data.path  there is no folder {here}/docs/none"),
        ("launch.resume=runs/none", "launch.resume  there is no folder {here}/runs/none"),
        ("data=c4_test", "datasets.c4_test.path  there is no {here}/tests/assets/c4_test"),
        ("data=c4_test datasets.c4_test.tokenizer=tok", "datasets.c4_test.tokenizer  there is no folder {here}/tok"),
    ],
)
def test_path_is_relative_to_where_it_was_typed(
    command: Callable[..., Result], tmp_path: Path, typed: str, said: str
) -> None:
    result = command("hydra.job.chdir=true", *typed.split())
    assert result.code == 1 and said.format(here=tmp_path) in result.err
    assert not list(tmp_path.iterdir()), "a refused job leaves no folder"


def test_job_in_another_folder_reads_the_text_that_was_named(launch: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text('{"text": "%s"}\n' % ("some words of a document " * 400))
    small = ("titan.training.steps=1", "titan.training.seq_len=64", "titan.training.local_batch_size=1")
    result = launch("hydra.job.chdir=true", "data=jsonl", "data.path=docs", *small)
    assert result.code == 0, result.err
    (folder,) = tmp_path.glob("outputs/*/*")
    assert (folder / "metrics.jsonl").exists() and not (folder / "outputs").exists()


# ------------------------------------------------------------------ cp.degree beside a TOML
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("model", ["llama3", "deepseek_v32"])
def test_degree_beside_a_file_means_what_torchtitans_key_means(
    command: Callable[..., Result], tmp_path: Path, model: str, degree: int
) -> None:
    flavor = "debugmodel"
    (tmp_path / "one.toml").write_text(
        f'[model]\nname = "{model}"\nflavor = "{flavor}"\n[parallelism]\ncontext_parallel_degree = 1\n'
    )
    ours = command("mode=explain", "toml=one.toml", f"cp.degree={degree}")
    theirs = command("mode=explain", "toml=one.toml", f"titan.parallelism.context_parallel_degree={degree}")
    assert (ours.code, ours.out) == (theirs.code, theirs.out), ours.err
    assert ours.code == 0, ours.err
    assert f"{degree} rank" in ours.out


def test_degrees_that_decide_otherwise_are_not_swept_beside_a_file(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "one.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    result = command("-m", "mode=explain", "toml=one.toml", "cp.degree=1,2")
    assert result.code == 1 and "cp.degree  cannot be swept from 1 beside toml" in result.err
    result = command("-m", "mode=explain", "toml=one.toml", "cp.degree=2,4")
    assert result.code == 0, result.err
