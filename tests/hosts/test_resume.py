"""Runs that continue: another degree or layout, and every checkpoint that is refused."""

import shutil
from pathlib import Path

import pytest

from cp_engine.errors import ConfigError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job import train
from cp_engine.job.checks import resume as torchtitan_resume
from cp_engine.job.checks import torchtitan
from tests.jobs import checkpoint, configured, keys, losses, metrics, trained


# ------------------------------------------------------------------ resume
def test_resume_continues_with_another_degree_or_layout(tmp_path: Path, one_rank: None) -> None:
    schedule = ("model=llama3", "titan.training.steps=6", "+titan.lr_scheduler.total_steps=6")
    saving = ("titan.checkpoint.enable=true", "+titan.checkpoint.interval=4")
    whole = trained(configured(tmp_path / "whole", "cp=ulysses", *schedule, *saving))
    resume = f"launch.resume={tmp_path / 'whole' / 'checkpoint' / 'step-4'}"
    zigzag = ("cp=allgather_kv", "layout@cp.layout=zigzag")
    assert trained(configured(tmp_path / "zigzag", *zigzag, *schedule, *saving, resume)) == pytest.approx(
        whole[4:], abs=1e-5
    )
    train.run(configured(tmp_path / "one", "cp=none", *schedule, resume))
    assert losses(tmp_path / "one") == pytest.approx(whole[4:], abs=1e-5)
    assert not (tmp_path / "one" / "checkpoint").exists()  # loading alone saves nothing
    assert (tmp_path / "zigzag" / "checkpoint" / "step-6").is_dir()


def test_a_run_stands_for_its_newest_step(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        newest = checkpoint(tmp_path / "checkpoint" / f"step-{step}", "train_state.step", "weight")
    for resume, name in ((tmp_path, "step-10"), (newest, newest.name)):
        config = configured(tmp_path / "new", f"launch.resume={resume}", "titan.training.steps=20")
        source = torchtitan_resume.source_of(config, tmp_path / "new")
        assert source is not None and source.path == (tmp_path / "checkpoint" / name).resolve()
        assert "no digests" in source.note


def test_check_refuses_to_resume_from_weights_alone(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "old" / "checkpoint" / "step-2", "train_state.step")
    checkpoint(tmp_path / "old" / "checkpoint" / "step-4", "weight")
    (problem,) = torchtitan.check(configured(tmp_path / "new", f"launch.resume={tmp_path / 'old'}"))
    assert problem.key == "launch.resume" and "weights only" in problem.what
    assert problem.tries[0] == f"launch.resume={whole}"


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_check_refuses_to_resume_from_nothing(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    assert keys(configured(tmp_path / "new", f"launch.resume={tmp_path / folder}")) == ["launch.resume"]


def test_check_refuses_two_names_for_what_to_load(tmp_path: Path) -> None:
    old = checkpoint(tmp_path / "checkpoint" / "step-1", "train_state.step")
    config = configured(tmp_path / "new", f"launch.resume={tmp_path}", f"+titan.checkpoint.initial_load_path={old}")
    (problem,) = torchtitan.check(config)
    assert problem.key == "launch.resume" and "titan.checkpoint.initial_load_path" in problem.what


def test_check_refuses_to_resume_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = (f"dataloader.dp_rank_{rank}" for rank in range(2))
    checkpoint(tmp_path / "checkpoint" / "step-20", "train_state.step", *places)
    (tmp_path / ".hydra").mkdir()
    saved = "titan: {model: {name: llama3, flavor: debugmodel}}\ndata: {dataset: null, path: '${oc.env:TEXTS}', field: text}"
    (tmp_path / ".hydra" / "config.yaml").write_text(saved)
    started = tmp_path / "started"
    (tmp_path / ".hydra" / "hydra.yaml").write_text(f"hydra: {{runtime: {{cwd: '{started}'}}}}")
    monkeypatch.setenv("TEXTS", "text")
    found = {p.key: p for p in torchtitan.check(configured(tmp_path / "new", f"launch.resume={tmp_path}"))}
    shards = "titan.parallelism.data_parallel_shard_degree"
    assert set(found) == {"titan.training.steps", "titan.model.name", "data.path", shards}
    assert "is null, and" in found["data.path"].what and found["data.path"].tries[0] == "data.path=text"
    assert "is at step 20" in found["titan.training.steps"].what and "is of llama3" in found["titan.model.name"].what
    (started / "text").mkdir(parents=True)
    (started / "text" / "a.jsonl").write_text('{"text": "words"}')
    monkeypatch.chdir(started)
    for path in ("text", "text/", str(started / "text")):  # the same folder
        again = configured(tmp_path / "new", f"launch.resume={tmp_path}", "data=jsonl", f"data.path={path}")
        assert "data.path" not in {p.key for p in torchtitan.check(again)}
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path)  # another folder of the same name
    again = configured(tmp_path / "new", f"launch.resume={tmp_path}", "data=jsonl", "data.path=text")
    assert "data.path" in {p.key for p in torchtitan.check(again)}
    monkeypatch.chdir(started)
    (started / "text").rename(started / "moved")  # the place of the run is gone: what was typed is compared
    for path, is_same in (("text", True), ("moved", False)):
        again = configured(tmp_path / "new", f"launch.resume={tmp_path}", "data=jsonl", f"data.path={path}")
        assert ("data.path" not in {p.key for p in torchtitan.check(again)}) == is_same
    gmm = configured(tmp_path / "new", f"launch.resume={tmp_path}", "+titan.model.converters=[npu_gmm]")
    assert "titan.model.converters" in {p.key for p in torchtitan.check(gmm) if "renames parameters" in p.what}
    monkeypatch.delenv("TEXTS")
    unset = torchtitan.check(configured(tmp_path / "new", f"launch.resume={tmp_path}", "titan.training.steps=30"))
    assert "TEXTS" in {p.key: p.what for p in unset}["launch.resume"]
    copies = "titan.parallelism.data_parallel_replicate_degree"
    of_copies = torchtitan.check(configured(tmp_path / "new", f"launch.resume={tmp_path}", f"+{copies}=3"))
    assert {p.key: p.tries for p in of_copies}[copies] == (f"{shards}=2 {copies}=1",)
    assert found[shards].tries == (f"{shards}=2",) and found["titan.training.steps"].tries == (
        "titan.training.steps=30",
    )


# ------------------------------------------------------------------ inside one process
def test_a_run_that_continues_in_its_own_folder_keeps_one_line_per_step(tmp_path: Path, one_rank: None) -> None:
    saving = (
        "titan.checkpoint.enable=true",
        "+titan.checkpoint.interval=1",
        "++titan.checkpoint.last_save_model_only=false",
        "+titan.lr_scheduler.total_steps=4",
    )
    train.run(configured(tmp_path, "cp=none", "model=llama3", *saving, "titan.training.steps=3"))
    shutil.rmtree(tmp_path / "checkpoint" / "step-3")
    train.run(
        configured(
            tmp_path, "cp=none", "model=llama3", *saving, "titan.training.steps=3", "++titan.checkpoint.load_step=2"
        )
    )
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3]
    train.run(configured(tmp_path, "cp=none", "model=llama3", *saving, "titan.training.steps=4"))
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4]


# ------------------------------------------------------------------ the data position in a checkpoint
def test_data_position_of_other_data_parallel_ranks_is_refused() -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.text.loader import TextLoader
    from cp_engine.hosts.torchtitan.text.rows import Rows

    rows = Rows(path=None, field="text", sequence=16, rank=0, world=2)
    state = TextLoader(rows, dp_rank=0, dp_world_size=2, batch_size=1).state_dict()
    one = TextLoader(
        Rows(path=None, field="text", sequence=16, rank=0, world=1), dp_rank=0, dp_world_size=1, batch_size=1
    )
    with pytest.raises(ConfigError, match="for 2 data-parallel ranks, this run has 1"):
        one.load_state_dict(state)
