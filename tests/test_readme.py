"""README.md and docs/ say what is true: their files exist, their commands compose, their examples run, their outputs are the program's."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from cp_engine.job import cli
from cp_engine.job.checks.degrees import world_size
from cp_engine.job.checks.keys import known_keys, value_of
from tests.conftest import PATIENCE, clean_environment
from tests.helpers import EVERY

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
FOLDERS = ("conf", "cp_engine", "docs", "tests", "tools", "benchmarks", ".ci")
REFUSED_STEP = "~cp.steps.gather"
SPARSE = (ROOT / "tests" / "toml" / "npu_dsa.toml").read_text()
SWAPPED = "[training]\nlocal_batch_size = 1\n[optimizer]\nswap_optimizer = true\n"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def lines_of(page: str) -> list[str]:
    """The lines of all blocks of commands."""
    return "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()


def commands(page: str) -> list[list[str]]:
    """The arguments of every `python launch.py` in a block of commands."""
    lines = [line for line in lines_of(page) if line.startswith("python launch.py")]
    return [shlex.split(line, comments=True)[2:] for line in lines]


def as_plan(arguments: list[str]) -> list[str]:
    """The same command, only planned: without what another mode alone reads, which explain refuses."""
    other = ("mode=", "verify.", "translate.", "out=")
    return [*(a for a in arguments if not a.startswith(other)), "mode=explain"]


COMMANDS = [(name, arguments) for name, page in PAGES.items() for arguments in commands(page)]
LAUNCHED = {
    path.relative_to(ROOT).as_posix(): shlex.split(line)
    for path in sorted(ROOT.glob("conf/*/*.yaml"))
    for line in re.findall(r"Launch: python launch\.py (.*)", path.read_text())
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the strategy of the README."""
    (tmp_path / "my" / "cp").mkdir(parents=True)
    (tmp_path / "my" / "cp" / "mine.yaml").write_text(blocks(README, "yaml")[1])
    (tmp_path / "my" / "deepseek_v3.toml").write_text(blocks(README, "toml")[0])
    (tmp_path / "my" / "deepseek_v32.toml").write_text(SPARSE)
    # of the package's own file, what the command beside it takes away or replaces
    (tmp_path / "my" / "deepseek_v32_671b_61layers_32k_128die.toml").write_text(f"{SPARSE}\n{SWAPPED}")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["mode=translate", "toml=my/deepseek_v3.toml", "out=my/experiment/deepseek_v3.yaml"]) == 0
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_every_key_is_in_the_table_of_keys() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    keys = [key for key in known_keys() if not key.startswith("titan.")]
    assert len(keys) > 30 and not [key for key in keys if f"`{key}`" not in page]


def without_errors(text: str) -> str:
    """A result without its rounding errors, which differ between processors."""
    return re.sub(r"\d\.\de[-+]\d\d", "#", "\n".join(line.rstrip() for line in text.strip().splitlines()))


def test_strategy_is_the_shipped_file() -> None:
    assert blocks(README, "yaml")[0] == (ROOT / "conf" / "cp" / "ulysses.yaml").read_text()


def test_own_strategy_is_one_that_no_preset_has_and_is_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(["--config-dir", "my", "mode=verify", "cp=mine"])
    shown = capsys.readouterr().out
    assert code == 0 and "4 ranks in one process" in shown and shown.rstrip().endswith("verified")


def test_refusal_is_the_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (arguments,) = (a for a in commands(README) if REFUSED_STEP in a)
    assert cli.run(arguments) == 1
    refusal = capsys.readouterr().err
    assert refusal.strip() in [block.strip() for block in blocks(README, "text")]
    (line,) = re.findall(r"^ +try +(.+)$", refusal, flags=re.MULTILINE)
    assert cli.run([*arguments, *shlex.split(line), "mode=explain"]) == 0  # pasted behind the command
    assert "proved" in capsys.readouterr().out


@pytest.mark.parametrize("shown", [["mode=verify", "cp=ulysses"], ["mode=verify", "shape.sequence=257"]], ids=" ".join)
def test_verification_is_the_programs(folder: Path, capsys: pytest.CaptureFixture[str], shown: list[str]) -> None:
    arguments = next(a for a in commands(README) if set(shown) <= set(a))
    assert cli.run(arguments) == 0
    assert without_errors(capsys.readouterr().out) in [without_errors(block) for block in blocks(README, "text")]


def test_plan_is_the_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["mode=explain", "cp=ulysses"]) == 0
    shown = capsys.readouterr().out.splitlines()
    block = next(block for block in blocks(README, "text") if block.startswith(shown[0]))
    plan = block[: block.index("starting 2 ranks")].splitlines()
    assert len(plan) >= 10 and [line for line in plan if line not in shown] == ["..."]


@pytest.mark.parametrize(("page", "arguments"), COMMANDS, ids=[" ".join([n, *a]) for n, a in COMMANDS])
def test_command_composes_to_a_plan(
    page: str, arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_refused = REFUSED_STEP in arguments
    code = cli.run(as_plan(arguments))
    text = capsys.readouterr()
    assert code == is_refused, text.err
    assert "CoverageError" in text.err if is_refused else "proved" in text.out or '"ranks"' in text.out


def is_for_ascend(line: str) -> bool:
    """A command whose comment says that it trains on the device."""
    return bool(re.search(r"# *(on Ascend|在昇腾上)", line))


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if commands(text)])
def test_commands_end_soon_on_two_cores(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = (re.search(r"\blaunch\.py (.*)", line) for line in lines_of(PAGES[page]) if not is_for_ascend(line))
    long = []
    for arguments in (shlex.split(match[1], comments=True) for match in started if match):
        if {"mode=explain", "mode=translate", REFUSED_STEP} & set(arguments):
            continue  # starts nothing
        capsys.readouterr()
        assert cli.run([*arguments, "--cfg", "job"]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        sizes = ("steps", "seq_len", "local_batch_size")
        steps, sequence, batch = (int(value_of(config, f"titan.training.{name}")) for name in sizes)
        is_short = steps <= 30 and sequence * batch <= 2048 and world_size(config) <= 4
        if "mode=verify" in arguments:  # 5 steps, or one call
            is_short = sequence * batch <= 2048
        small = str(value_of(config, "titan.model.flavor")).endswith(("debugmodel", "tinymodel", "warm_up"))
        long += [] if is_short and small else [arguments]
    assert not long


@pytest.mark.long
def test_every_command_of_the_readme_does_what_it_says(folder: Path) -> None:
    (folder / "launch.py").symlink_to(ROOT / "launch.py")
    (folder / "example.py").write_text(blocks(README, "python")[0])
    (folder / "my" / "experiment" / "deepseek_v3.yaml").unlink()  # one of the commands writes it
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = [line for line in lines_of(README) if not line.startswith(("pip ", "pytest"))]
    assert len(run) >= 17 and all(line.startswith(("python launch.py ", "torchrun ")) for line in run)
    for line in run:
        done = subprocess.run(
            line, shell=True, cwd=folder, env=clean_environment(PATH=path), capture_output=True, text=True, timeout=900
        )
        assert done.returncode == (REFUSED_STEP in line), (line, done.stdout, done.stderr)


@pytest.mark.parametrize("file", LAUNCHED)
def test_command_of_a_configuration_file_composes_to_a_plan(
    file: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "text.jsonl").write_text('{"text": "some words"}\n')
    arguments = as_plan([a.replace("/my/folder", str(folder / "data")) for a in LAUNCHED[file]])
    code = cli.run(arguments)
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "") and "proved" in shown.out
    group, name = file.removesuffix(".yaml").split("/")[1:]
    assert any(a.startswith(f"{group}=") for a in arguments) and f"{group}={name}" in arguments


def test_every_preset_says_how_to_launch_it() -> None:
    assert {f"conf/cp/{name}.yaml" for name in EVERY} <= set(LAUNCHED)


def test_library_example_gives_one_ranks_loss_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(blocks(README, "python")[0])
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "example.py"]
    jobs = [
        subprocess.Popen(
            [*run[:-1], "--nproc-per-node", str(ranks), run[-1]],
            cwd=tmp_path,
            env=clean_environment(OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ranks in (1, 2)
    ]
    ends = [(*job.communicate(timeout=PATIENCE), job.returncode) for job in jobs]
    assert [code for _, _, code in ends] == [0, 0], ends
    one, two = ([re.split(r"\s{2,}", line) for line in out.splitlines()] for out, _, _ in ends)
    assert len(one) == 3 and [row[0] for row in one] == [row[0] for row in two]
    lost = [[float(row[1].removeprefix("loss ")) for row in rows] for rows in (one, two)]
    assert lost[0] == pytest.approx(lost[1], abs=2e-4)  # printed to 1e-4, of sums in float32
    sent = [int(row[2].split()[1].replace(",", "")) for row in two]
    assert one[0][2] == "sent 0 bytes" and sent == [sent[0], 2 * sent[0], 3 * sent[0]] and sent[0] > 0


def test_primitive_of_the_documentation_is_right(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGES["docs/configuration.md"]
    (file,) = (block for block in blocks(page, "yaml") if block.startswith("kind: blocks"))
    (folder / "my" / "layout").mkdir()
    (folder / "my" / "layout" / "blocks.yaml").write_text(file)
    (folder / "my_primitives.py").write_text(blocks(page, "python")[0])
    monkeypatch.syspath_prepend(folder)
    entry = EntryPoint("blocks", "my_primitives:Blocks", "cp_engine.primitives")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == entry.group else [])
    (shown,) = (block for block in blocks(page, "text") if block.startswith("$ python -m cp_engine"))
    command, _, result = shown.partition("\n")
    assert cli.run(shlex.split(command)[4:]) == 0
    assert without_errors(capsys.readouterr().out) == without_errors(result)


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = PAGES[page]
    named = {match.rstrip("./") for match in re.findall(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*", text)}
    links = re.findall(r"\]\(([^):#]+)\)", text)
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    missing += [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: str) -> None:
    modules = set(re.findall(r"`([\w/]+\.py)`", PAGES[page])) - {"example.py"}
    assert [name for name in modules if not any((ROOT / folder / name).is_file() for folder in ("", "cp_engine"))] == []


def test_ci_runs_the_readmes_install_and_tests() -> None:
    install, test = next(block for block in blocks(README, "bash") if "pytest" in block).splitlines()
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert test in ci
    assert any(shlex.split(install)[2:] == [word for word in shlex.split(line)[2:] if word[:2] != "--"] for line in ci)
