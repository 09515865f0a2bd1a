"""Every key of every TOML file is accounted for, and the experiment that is written gives the same job."""

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import yaml

from cp_engine.errors import ConfigError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job import cli, train
from cp_engine.job.checks.keys import titan_table
from cp_engine.job.toml.file import tomllib
from cp_engine.job.toml.translate import DEGREE
from tests.job.toml_files import DEGREES, FILES, OF_CP, OWN, REAL, composed_from, flat, refusal, translated
from tools import regenerate_titan_tables as tables


def is_named(error: ConfigError) -> bool:
    """Whether a real file is refused for one of the reasons that there are: a model or a module without a place, or retired keys."""
    said = [f"{problem.key} {problem.what}" for problem in error.problems]
    reasons = (
        "model.name 'deepseek_v4' has context parallelism of its own",
        "is retired",
        "is not a module whose keys are known",
        "is a key of a config module, and the file names none that has it",
    )
    unknown_module = any("is not a module whose keys are known" in line for line in said)
    return all(any(r in line for r in reasons) or (unknown_module and line.startswith("model.name")) for line in said)


def keys_in(node: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from keys_in(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def of_every_file(*rarely: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Every file with its own degree and with 2, whether it is refused or not; with these marks a real one that is large, or with 2."""
    cases = []
    for path, degree in product(FILES, DEGREES):
        is_rare = path.parent != OWN and (degree is not None or "debug" not in path.stem)
        cases.append(pytest.param(path, degree, marks=rarely if is_rare else (), id=f"{path.stem}-{degree or 'own'}"))
    return pytest.mark.parametrize(("path", "degree"), cases)


def test_files_that_are_refused_are_refused_by_name() -> None:
    refused = {(path, degree): error for path in FILES for degree in DEGREES if (error := refusal(path, degree))}
    assert [str(error) for error in refused.values() if not is_named(error)] == []
    assert not [path for path, _ in refused if path.parent == OWN]
    assert not REAL or (len(FILES) > 40 and len(refused) <= 16)


@of_every_file()
def test_every_key_is_mapped_or_passed_through(path: Path, degree: int | None) -> None:
    if (error := refusal(path, degree)) is not None:
        assert is_named(error)
        return
    made = translated(path, degree)
    written = sorted(keys_in(tomllib.loads(path.read_text())))
    assert sorted(row.key for row in made.rows if row.became != "defaulted") == written
    assert made.count("mapped") + made.count("passed through") == len(written)
    for row in made.rows:
        assert row.became != "passed through" or f"titan.{row.key}" in made.settings
        assert row.target in ("", *made.settings) or re.fullmatch(r"(cp|model|data)=[\w-]+", row.target)


@of_every_file(pytest.mark.long)
def test_experiment_composes_to_what_the_toml_composes_to(
    path: Path, degree: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_degree = [] if degree is None else [f"titan.{DEGREE}={degree}"]
    out = tmp_path / "experiment" / "made.yaml"
    is_refused = refusal(path, degree) is not None
    assert cli.run(["mode=translate", f"toml={path}", f"out={out}", *set_degree]) == int(is_refused)
    if is_refused:
        assert not out.exists()
        return
    report = capsys.readouterr().out
    assert f"wrote {out}" in report and f"python launch.py --config-dir {tmp_path} experiment=made" in report
    assert cli.run([f"toml={path}", *set_degree, "--cfg", "job"]) == 0
    of_toml = yaml.safe_load(capsys.readouterr().out)
    assert cli.run(["--config-dir", str(tmp_path), "experiment=made", "--cfg", "job"]) == 0
    of_experiment = yaml.safe_load(capsys.readouterr().out)
    assert of_toml.pop("toml") == str(path) and of_experiment.pop("toml") is None
    assert of_toml == of_experiment
    first = out.read_bytes()
    assert cli.run(["mode=translate", f"toml={path}", f"out={out}", "translate.force=true", *set_degree]) == 0
    assert out.read_bytes() == first


@contextmanager
def importable() -> Iterator[None]:
    """torchtitan's config modules without the packages that their models would need."""
    import torchtitan

    before = {name: module for name, module in sys.modules.items() if name.startswith(tables.HEAVY)}
    tables.without_its_start(Path(torchtitan.__file__).parents[1], tables.HEAVY)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(tables.HEAVY)]:
            del sys.modules[name]
        sys.modules.update(before)


def is_of_torchtitan(path: Path) -> bool:
    return "0.2.2" in path.parent.name or path.stem in ("native", "flux")


@pytest.mark.parametrize("path", [path for path in FILES if is_of_torchtitan(path)], ids=lambda p: p.stem)
def test_torchtitan_reads_what_the_experiment_gives(path: Path) -> None:
    with cpu_shims():
        from torchtitan.config import ConfigManager

        from cp_engine.hosts.torchtitan.host import job_config
    with importable():
        try:
            parsed = ConfigManager().parse_args(["--job.config_file", str(path)])
        except ValueError as error:  # a file that its own parser refuses: so do we
            assert "Invalid field names" in str(error) and refusal(path) is not None
            return
        given = job_config(train.titan_of(composed_from(translated(path))))
    theirs, ours = (dict(flat(dataclasses.asdict(job))) for job in (parsed, given))
    assert (
        theirs.pop("job.config_file") == str(path) and ours.pop("job.config_file") is None
    )  # named on the command line
    if str(theirs["job.custom_config_module"]) == "":
        assert len(theirs) == len(titan_table()) - 1
    assert {k: v for k, v in theirs.items() if not OF_CP.fullmatch(k)} == {
        k: v for k, v in ours.items() if not OF_CP.fullmatch(k)
    }
