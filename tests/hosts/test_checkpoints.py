"""Checkpoints: whole or absent, loaded as named, refused before ranks start when damaged, and never a way to run code."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, load, save
from torch.distributed.checkpoint.metadata import Metadata

from cp_engine.errors import ConfigError
from cp_engine.hosts.torchtitan import checkpoint_trust as trust
from cp_engine.hosts.torchtitan.checkpoint_files import METADATA, SEAL, metadata_of, require_safe, require_whole, seal
from cp_engine.hosts.torchtitan.checkpoint_trust import Damaged
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job import train
from cp_engine.job.checks.resume import Source, source_of
from cp_engine.job.launch import start as elastic
from tests.conftest import LAUNCH, PATIENCE, Result, clean_environment
from tests.jobs import Config, configured

JOB = ("model=llama3", "titan.training.seq_len=64", "titan.checkpoint.enable=true", "titan.checkpoint.interval=2")
SHARD = "__1_0.distcp"


def run(folder: Path, *arguments: str, **environment: str) -> Result:
    command = [sys.executable, str(LAUNCH), *JOB, *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("straight")
    done = run(folder, "cp=ulysses", "titan.training.steps=6", "hydra.run.dir=a")
    assert done.code == 0, done.err
    return folder / "a"


@pytest.fixture
def old(straight: Path, tmp_path: Path) -> Path:
    """A copy of that run, to damage."""
    return Path(shutil.copytree(straight, tmp_path / "old"))


def step(run_folder: Path, number: int) -> Path:
    return run_folder / "checkpoint" / f"step-{number}"


def source(new: Path, *overrides: str, is_restart: bool = False) -> Source | None:
    config = configured(new, "model=llama3", "titan.training.steps=8", *overrides)
    return source_of(config, new, is_restart=is_restart)


def refusal(new: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        source(new, *overrides)
    return str(caught.value)


def test_every_file_has_its_digest_for_a_standard_tool(straight: Path) -> None:
    for number in (2, 4, 6):
        assert require_whole(step(straight, number), digests=True)
        done = subprocess.run(["sha256sum", "-c", SEAL], cwd=step(straight, number), capture_output=True, check=False)
        assert done.returncode == 0 and done.stdout.count(b": OK") == 3, done
    assert {path.name for path in (straight / "checkpoint").iterdir()} == {"step-2", "step-4", "step-6"}


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda s: os.truncate(s / SHARD, 1000), "has 1,000 of "),
    "empty": (lambda s: os.truncate(s / SHARD, 0), "has 0 of "),
    "missing": (lambda s: (s / SHARD).unlink(), f"lacks {SHARD}"),
    "flipped": (lambda s: flipped(s / SHARD, 5_000), f"has other bytes in {SHARD} than were saved"),
    "junk": (lambda s: (s / METADATA).write_bytes(b"\x80\x04junk"), "has a .metadata that is none"),
    "cut metadata": (lambda s: os.truncate(s / METADATA, 500), "has a .metadata that is none"),
    "empty metadata": (lambda s: os.truncate(s / METADATA, 0), "has a .metadata that is none"),
    "no metadata": (lambda s: (s / METADATA).unlink(), "has no .metadata: its save was not finished"),
    "other metadata": (
        lambda s: (s / METADATA).write_bytes(pickle.dumps({"a": 1})),
        "has a .metadata that is none (it is a dict)",
    ),
    "empty seal": (lambda s: os.truncate(s / SEAL, 0), "has a SHA256SUMS that is none"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_name_and_never_preferred(old: Path, tmp_path: Path, kind: str) -> None:
    damage, said = DAMAGE[kind]
    damage(step(old, 6))
    text = refusal(tmp_path / "new", f"launch.resume={step(old, 6)}")
    assert f"launch.resume  {step(old, 6)} {said}" in text and f"launch.resume={step(old, 4)}" in text
    found = source(tmp_path / "new", f"launch.resume={old}")
    assert found is not None and found.path == step(old, 4).resolve() and f"step-6 {said}" in found.note


def test_sizes_alone_can_be_asked_for_and_are_all_of_an_unsealed_one(old: Path, tmp_path: Path) -> None:
    flipped(step(old, 6) / SHARD, (step(old, 6) / SHARD).stat().st_size // 2)  # in a tensor
    found = source(tmp_path / "new", f"launch.resume={old}", "launch.resume_check=sizes")
    assert found is not None and found.path == step(old, 6).resolve()
    (step(old, 6) / SEAL).unlink()  # as torchtitan by itself saves
    found = source(tmp_path / "new", f"launch.resume={old}")
    assert found is not None and found.path == step(old, 6).resolve() and "has no digests" in found.note


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def entry_of(folder: Path, name: str, data: bytes) -> None:
    """Puts other bytes in the place of an entry of a checkpoint, and seals it again."""
    metadata = metadata_of(folder)
    index = next(i for i in metadata.storage_data if i.fqn == name)
    (folder / "__9_0.distcp").write_bytes(data)
    info = type(metadata.storage_data[index])(relative_path="__9_0.distcp", offset=0, length=len(data))
    metadata.storage_data[index] = info
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    seal(folder)


def rewritten(folder: Path, value: object) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(value))
    seal(folder)


def nested(canary: Path) -> bytes:
    """As a tensor's storage in a data loader's state: torch would unpickle it once more, with any class."""

    class Storage:
        def __reduce__(self) -> tuple[object, tuple[bytes]]:
            return torch.storage._load_from_bytes, (saved(Evil(canary)),)

    return pickle.dumps(Storage())


CRAFTED: dict[str, Callable[[Path, Path], None]] = {
    "metadata": lambda s, canary: rewritten(s, Evil(canary)),
    "entry": lambda s, canary: entry_of(s, "train_state.step", saved(Evil(canary))),
    "data loader": lambda s, canary: entry_of(s, "dataloader.dp_rank_0", saved(pickle.dumps(Evil(canary)))),
    "tensor in a data loader": lambda s, canary: entry_of(s, "dataloader.dp_rank_0", saved({"a": [nested(canary)]})),
    # as Python wrote pickles before they had a first byte of their own, and bytes of another type
    "old pickle in a data loader": lambda s, canary: entry_of(
        s, "dataloader.dp_rank_0", saved(pickle.dumps(Evil(canary), protocol=0))
    ),
    "bytearray in a data loader": lambda s, canary: entry_of(
        s, "dataloader.dp_rank_0", saved(bytearray(pickle.dumps(Evil(canary), protocol=0)))
    ),
    "legacy entry": lambda s, canary: entry_of(s, "train_state.step", pickle.dumps(Evil(canary))),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_checkpoint_runs_no_code(command: Callable[..., Result], old: Path, tmp_path: Path, kind: str) -> None:
    canary = tmp_path / "canary"
    CRAFTED[kind](step(old, 6), canary)
    whole_run = () if kind == "legacy entry" else (old,)  # of which such an entry is damage, so step 4 is taken
    for resume in (step(old, 6), *whole_run):
        result = command(*JOB, "cp=none", "titan.training.steps=8", f"launch.resume={resume}")
        assert result.code == 1 and "launch.resume" in result.err and not canary.exists()
        assert (
            "posix.system, of which it has no need" in result.err
            or "of which a checkpoint" in result.err
            or not whole_run
        )
    weights = f"titan.checkpoint.initial_load_path={step(old, 6)}"
    result = command(*JOB, "cp=none", weights)
    assert result.code == 1 and "titan.checkpoint.initial_load_path" in result.err and not canary.exists()


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_rank_reads_data_alone(old: Path, tmp_path: Path, kind: str) -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.saving import DataPlanner, DataReader
    canary = tmp_path / "canary"
    names = ("train_state.step", "dataloader.dp_rank_0")
    wanted: dict[str, object] = dict.fromkeys(names, 0)
    load(wanted, storage_reader=DataReader(step(old, 6)), planner=DataPlanner(), no_dist=True)
    assert pickle.loads(wanted[names[1]])["_num_yielded"] == 6
    CRAFTED[kind](step(old, 6), canary)
    with pytest.raises(
        CheckpointException, match=r"posix\.system, of which it has no need|is not there|does not write"
    ):
        load(dict(wanted), storage_reader=DataReader(step(old, 6)), planner=DataPlanner(), no_dist=True)
    assert not canary.exists()
    with suppress(Exception, CheckpointException):  # what torch does with it, and torchtitan's data loader
        load(wanted, checkpoint_id=step(old, 6), no_dist=True)
    if kind != "tensor in a data loader":  # which lies deeper than anything looks today
        with suppress(Exception):
            pickle.loads(wanted[names[1]])
        assert canary.exists()


def test_what_no_rank_reads_may_hold_anything(old: Path, tmp_path: Path) -> None:
    CRAFTED["data loader"](step(old, 6), tmp_path / "canary")
    left_out = "+titan.checkpoint.exclude_from_loading=[dataloader]"
    found = source(tmp_path / "new", f"launch.resume={old}", left_out)
    assert found is not None and found.path == step(old, 6).resolve()
    weights = ("titan.checkpoint.enable=true", f"+titan.checkpoint.initial_load_path={step(old, 6)}")
    assert source(tmp_path / "new", *weights, left_out) is None
    text = refusal(tmp_path / "new", *weights)
    assert "titan.checkpoint.initial_load_path" in text and "posix.system" in text


def test_a_pickle_changes_no_class(old: Path) -> None:
    # what no pickler writes: the class itself, given attributes
    changed = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x07changedK\x01stb."
    (step(old, 6) / METADATA).write_bytes(changed)
    with pytest.raises(Damaged, match="that is none"):
        metadata_of(step(old, 6))
    assert not hasattr(Metadata, "changed")


def test_arrays_and_tensors_in_a_place_in_the_data_are_data() -> None:
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(0).bit_generator.state
    state = {"random": generator, "order": numpy.arange(4), "tensor": torch.arange(3), "seen": {1}, "raw": b"\x80ab"}
    state["itself"] = [state["seen"]]
    read = trust.entry_of("dataloader.dp_rank_0", saved(pickle.dumps(state)))
    assert isinstance(read, bytes) and repr(pickle.loads(read)) == repr(state)


@pytest.mark.parametrize("file", [METADATA, SHARD, SEAL])
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(old: Path, tmp_path: Path, file: str) -> None:
    (step(old, 6) / file).unlink()
    os.mkfifo(step(old, 6) / file)
    if file == SEAL:
        assert not require_whole(step(old, 6), digests=True)
    else:
        assert f"{step(old, 6)} " in refusal(tmp_path / "new", f"launch.resume={step(old, 6)}")


def test_a_file_outside_the_folder_is_not_read(old: Path, tmp_path: Path) -> None:
    metadata = metadata_of(step(old, 6))
    index, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = type(info)(relative_path="../step-4/" + SHARD, offset=0, length=8)
    rewritten(step(old, 6), metadata)
    assert "outside its folder" in refusal(tmp_path / "new", f"launch.resume={old}")


def test_real_checkpoints_are_safe_to_read(straight: Path) -> None:
    for number in (2, 4, 6):
        require_safe(step(straight, number))


def test_what_is_named_is_loaded_or_refused(old: Path, straight: Path, tmp_path: Path) -> None:
    text = refusal(old, f"launch.resume={step(old, 2)}")
    assert "has a later one, step-6" in text and f"launch.resume={step(old, 2)} hydra.run.dir={old}-2" in text
    text = refusal(old, f"launch.resume={straight}")
    assert f"the run's folder has checkpoints of its own: {step(old, 6)}" in text
    text = refusal(old, "titan.checkpoint.enable=true", "+titan.checkpoint.load_step=5")
    assert "titan.checkpoint.load_step  there is no folder" in text and "step-5" in text
    assert "titan.checkpoint.load_step  means" in refusal(
        old, "titan.checkpoint.enable=true", "+titan.checkpoint.load_step=4"
    )
    own = source(old, "titan.checkpoint.enable=true")
    assert own is not None and own.path == step(old, 6).resolve()  # as torchtitan goes on in a run's folder
    assert source(tmp_path / "new", "titan.checkpoint.enable=true") is None


def test_a_restart_takes_its_own_newest_checkpoint(old: Path, straight: Path, tmp_path: Path) -> None:
    own = source(old, f"launch.resume={step(straight, 2)}", is_restart=True)
    assert own is not None and own.path == step(old, 6).resolve()
    none_yet = source(tmp_path / "new", f"launch.resume={step(straight, 2)}", is_restart=True)
    assert none_yet is not None and none_yet.path == step(straight, 2).resolve()


def test_a_restart_passes_over_weights_and_takes_what_was_to_be_replaced(old: Path) -> None:
    step(old, 4).rename(old / "checkpoint" / "replaced-4")  # killed between two renames: there is no step-4
    weights = {"weight": torch.ones(2)}
    shutil.rmtree(step(old, 6))
    save(weights, checkpoint_id=step(old, 6), no_dist=True)
    found = source(old, "titan.checkpoint.enable=true", is_restart=True)
    assert found is not None and found.path == (old / "checkpoint" / "replaced-4").resolve()
    assert found.note == "step-6 holds weights only" and found.line().startswith("step 4 of ")
    with cpu_shims():
        from cp_engine.hosts.torchtitan.saving import clear
    clear(old / "checkpoint")
    assert require_whole(step(old, 4), digests=True)


def test_checkpoints_are_looked_for_where_torchtitan_saves_them(old: Path, tmp_path: Path) -> None:
    os.truncate(step(old, 6) / SHARD, 1000)
    own = ("titan.checkpoint.enable=true", f"+titan.job.dump_folder={old}", "titan.training.steps=6")
    found = source(tmp_path / "new", *own)
    assert found is not None and found.path == step(old, 4).resolve() and "step-6 has 1,000 of" in found.note
    text = refusal(tmp_path / "new", *own, f"launch.resume={step(old, 2)}")
    assert f"launch.resume={step(old, 2)} titan.job.dump_folder={old}-2" in text
    steps = refusal(tmp_path / "new", *own[:2], "titan.training.steps=4")
    assert "titan.training.steps  is 4, and " in steps  # before ranks start, also in a run's own folder


def test_weights_are_loaded_beside_a_save_that_was_killed(straight: Path, tmp_path: Path, one_rank: None) -> None:
    (tmp_path / "b" / "checkpoint" / "saving-2").mkdir(parents=True)
    weights = (f"+titan.checkpoint.initial_load_path={step(straight, 6)}", "titan.training.seq_len=64")
    job = ("cp=none", "model=llama3", "titan.checkpoint.enable=true", "titan.training.steps=1")
    train.run(configured(tmp_path / "b", *job, *weights))
    (first,) = losses(tmp_path / "b").values()
    assert first == pytest.approx(losses(straight)[6], abs=1.0) and first < losses(straight)[1] - 1
    train.run(configured(tmp_path / "b", *job, "titan.training.steps=2"))  # and goes on in its own folder
    assert list(losses(tmp_path / "b")) == [1, 2]


def test_ranks_that_are_started_again_after_the_last_step_are_done(
    old: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = (old / "metrics.jsonl").read_text()
    job = ("cp=none", "model=llama3", "titan.checkpoint.enable=true", "titan.training.seq_len=64")
    train.run(configured(old, *job, "titan.training.steps=6"))
    assert (old / "metrics.jsonl").read_text() == before


def test_a_run_begins_with_the_weights_of_its_seed(tmp_path: Path, one_rank: None) -> None:
    job = ("cp=none", "model=llama3", "titan.checkpoint.enable=true", "++titan.checkpoint.last_save_model_only=true")
    train.run(configured(tmp_path, *job, "+titan.checkpoint.create_seed_checkpoint=true"))
    config = configured(tmp_path, *job, "titan.training.steps=1")
    said = io.StringIO()
    settings = dict(config["launch"])
    elastic.resumed(config, settings, tmp_path, said)  # as a launcher does before it starts ranks
    assert said.getvalue().startswith("resume   step 0 of ")
    train.run({**config, "launch": settings})
    assert list(losses(tmp_path)) == [1]


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_the_newest_are_kept_and_leftovers_are_not_counted(tmp_path: Path, one_rank: None, mode: str) -> None:
    (tmp_path / "b" / "checkpoint" / "saving-9").mkdir(parents=True)
    job = ("cp=none", "model=llama3", "titan.checkpoint.enable=true", "titan.training.steps=5")
    keeping = ("++titan.checkpoint.interval=1", "+titan.checkpoint.keep_latest_k=2")
    config = configured(tmp_path / "b", *job, *keeping, f"+titan.checkpoint.async_mode={mode}")
    train.run(config)
    kept = {path.name for path in (tmp_path / "b" / "checkpoint").iterdir()}
    # the last save is none that torchtitan purges after; an asynchronous one is not yet there when it does
    assert kept == {"step-3", "step-4", "step-5"} | ({"step-2"} if mode == "async" else set())
    assert all(require_whole(tmp_path / "b" / "checkpoint" / name, digests=True) for name in kept)


def saved_by_a_process(config: Config) -> None:
    """One rank that saves as with pinned memory: by a process of its own, without the memory that a CPU does not have."""
    with train.rank_process(config):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torchtitan.components.checkpoint import AsyncMode

        from cp_engine.hosts.torchtitan.trainer import CompositionTrainer

        class Saving(CompositionTrainer):
            def train(self) -> None:
                manager, mode = self.checkpointer, AsyncMode.ASYNC_WITH_PINNED_MEM
                manager.stager = DefaultStager(StagingOptions(False, False, False, False))
                states, place = manager._flattened_model_states_sd(), manager._create_checkpoint_id(4)
                manager.dcp_save(states, checkpoint_id=place, async_mode=mode).result()

        train.train_composition(config, Saving)


@pytest.mark.long
def test_a_save_by_a_process_of_its_own_is_sealed(tmp_path: Path) -> None:
    job = ("cp=ulysses", "model=llama3", "titan.checkpoint.enable=true")
    config = configured(tmp_path, *job, "+titan.checkpoint.async_mode=async_with_pinned_mem")
    elastic.run_ranks(saved_by_a_process, config, tmp_path, ranks=2)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-4"]
    assert require_whole(step(tmp_path, 4), digests=True)


@pytest.fixture(scope="module")
def killed(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run whose step 4 was damaged, then continued from step 2, and killed while it saved step 4 again."""
    folder = tmp_path_factory.mktemp("killed")
    shutil.copytree(straight, folder / "a")
    shutil.rmtree(step(folder / "a", 6))
    os.truncate(step(folder / "a", 4) / SHARD, 1000)
    yield folder


INSIDE = "from cp_engine.hosts.torchtitan import saving as s; w = s.WholeWriter.{method}; "
KILLED = {
    "1": INSIDE.format(method="write_data") + "s.WholeWriter.write_data = lambda *a: (w(*a), os._exit(7))",
    "0": INSIDE.format(method="finish") + "s.put = lambda *a: os._exit(7)",
}


@pytest.mark.long
@pytest.mark.parametrize("rank", KILLED)
def test_a_save_that_is_killed_leaves_whole_checkpoints_and_the_same_losses(
    killed: Path, straight: Path, rank: str
) -> None:
    fault = {"FAULT_RANK": rank, "FAULT_AT": "import", "FAULT": KILLED[rank]}
    going_on = ("cp=ulysses", "titan.training.steps=6", "hydra.run.dir=a", "launch.resume=a")
    done = run(killed, *going_on, "titan.experimental.custom_import=tests.faults", **fault)
    assert done.code == 1 and f"rank {rank} of 2 ended the run\n  ended with exit code 7" in done.err, done.err
    assert "resume   step 2 of " in done.out and "(step-4 has 1,000 of " in done.out
    left = {path.name for path in (killed / "a" / "checkpoint").iterdir()}
    assert left == {"step-2", "step-4", "saving-4"}  # and step-4 is still the damaged one
    if rank != list(KILLED)[-1]:
        return
    done = run(killed, *going_on)
    assert done.code == 0 and "resume   step 2 of " in done.out, done.err
    assert {path.name for path in (killed / "a" / "checkpoint").iterdir()} == {"step-2", "step-4", "step-6"}
    assert losses(killed / "a") == pytest.approx(losses(straight), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("titan.checkpoint.async_mode=async",)], ids=["sync", "async"])
def test_another_strategy_continues_with_the_same_losses(straight: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    resumed = run(
        tmp_path,
        "cp=ring_zigzag",
        "titan.training.steps=6",
        "hydra.run.dir=b",
        f"launch.resume={step(straight, 4)}",
        *more,
    )
    assert resumed.code == 0 and f"resume   step 4 of {straight.resolve()}" in resumed.out, resumed.err
    then = losses(straight)
    assert losses(tmp_path / "b") == pytest.approx({5: then[5], 6: then[6]}, rel=1e-4)
    assert require_whole(step(tmp_path / "b", 6), digests=True)


@pytest.mark.long
def test_a_restart_continues_by_itself_with_the_same_losses(straight: Path, tmp_path: Path) -> None:
    once = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os._exit(7)"
    fault = {"FAULT_RANK": "1", "FAULT_STEP": "4", "FAULT_AT": "backward", "FAULT": once}
    more = ("launch.max_restarts=1", "titan.experimental.custom_import=tests.faults")
    done = run(tmp_path, "cp=ulysses", "titan.training.steps=6", "hydra.run.dir=b", *more, **fault)
    assert done.code == 0, done.err
    said = "restart 1 of 1: rank 1 of 2: ended with exit code 7; continues from step 2 of "
    assert said in done.out and "restarts 1 of 1" in done.out, done.out
    assert losses(tmp_path / "b") == pytest.approx(losses(straight), rel=1e-4)
