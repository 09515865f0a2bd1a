"""torchtitan's real Trainer with a composition: against torchtitan alone, over resumes, and what it leaves behind."""

import gc
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cp_engine.errors import ConfigError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job import train
from cp_engine.job.checks import degrees, job, torchtitan
from cp_engine.job.checks import resume as torchtitan_resume
from cp_engine.job.checks.keys import shape_table
from cp_engine.job.launch import start as elastic
from cp_engine.job.verify import training_mode
from cp_engine.job.verify.comparison import Comparison, compare, read
from tests.conftest import Result

CONF = Path(__file__).parents[2] / "conf"
SMALL = (
    "titan.training.seq_len=128",
    "titan.training.local_batch_size=2",
    "titan.training.steps=2",
    "launch.device=cpu",
)
VALIDATION = (
    "++titan.validation.enable=true",
    "++titan.validation.seq_len=128",
    "++titan.validation.local_batch_size=2",
    "++titan.validation.steps=3",
    "++titan.validation.freq=2",
)
Config = dict[str, object]


def configured(output: Path, *overrides: str) -> Config:
    """The composed configuration of a small job on CPU."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides=[*SMALL, *overrides]), resolve=True)
    assert isinstance(config, dict)
    output.mkdir(parents=True, exist_ok=True)
    config["launch"]["output_dir"] = str(output)
    return {str(key): value for key, value in config.items()}


def trained(config: Config) -> list[float]:
    """The loss of each step of a run on new ranks."""
    output = Path(str(train.section(config, "launch")["output_dir"]))
    elastic.run_ranks(train.run, config, output, ranks=degrees.world_size(config))
    return losses(output)


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in metrics(output)]


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / train.METRICS).read_text().splitlines()]


def keys(config: Config) -> list[str]:
    return [problem.key for problem in torchtitan.check(config)]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank of a job."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")


def process_state() -> list[object]:
    """What a job must leave as it found it."""
    with cpu_shims():
        import torchtitan.components.validate as validate
        import torchtitan.models.llama3 as llama3
        import torchtitan.models.llama3.infra.parallelize as parallelize
        import torchtitan.models.moe.kernels as kernels
        import torchtitan.train as trainer
        from torchtitan.protocols import train_spec
    root = logging.getLogger()
    return [
        trainer.prepare_context_parallel_input,
        validate.build_text_validation_dataloader,
        kernels.fill_indices_wrapper,
        parallelize.apply_cp_to_attention_module,
        dict(train_spec._extra_train_specs),
        repr(llama3.llama3_args),
        torch.histc,
        torch.nn.utils.get_total_norm,
        set(vars(torch.cpu)),
        dict(os.environ),
        list(root.handlers),
        root.level,
        gc.isenabled(),
        torch.are_deterministic_algorithms_enabled(),
        dist.is_initialized(),
    ]


# --- against torchtitan alone ---


@dataclass(frozen=True)
class Run:
    """A finished comparison: its folder, whether it was within bounds, and what it printed."""

    output: Path
    is_good: bool
    printed: str

    @property
    def comparison(self) -> Comparison:
        return compare(self.output / "stock", self.output / "composition")


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """torchtitan alone and one model with one preset, trained and validated from the same weights."""
    model, preset = request.param
    output = tmp_path_factory.mktemp(model) / preset
    composed = (f"model={model}", f"cp={preset}", "mode=verify", "verify.level=training")
    with redirect_stdout(io.StringIO()) as printed:
        is_good = training_mode.run(configured(output, *composed, *VALIDATION))
    return Run(output, is_good, printed.getvalue())


two_models = pytest.mark.parametrize(
    "compared",
    [
        ("deepseek_v3", "ulysses"),
        ("llama3", "allgather_kv"),
        pytest.param(("deepseek_v3", "allgather_kv"), marks=pytest.mark.long),
        pytest.param(("llama3", "ulysses"), marks=pytest.mark.long),
        pytest.param(("deepseek_v3", "reorder_zigzag"), marks=pytest.mark.long),
    ],
    indirect=True,
    ids="-".join,
)


@two_models
def test_training_agrees_with_torchtitan_alone(compared: Run) -> None:
    assert compared.is_good
    assert [label for label, *_ in compared.comparison.losses if label.isdigit()] == list("12345")
    assert len(compared.comparison.gradient_errors) > 50
    assert compared.printed.rstrip().endswith("verified")
    assert sum(row["cp_bytes_sent"] for row in metrics(compared.output / "composition")) > 0


@two_models
def test_validation_loss_is_that_of_torchtitan_alone(compared: Run) -> None:
    rows = [row for row in compared.comparison.losses if row[0].startswith("validation")]
    assert [label for label, *_ in rows] == ["validation 1", "validation 2", "validation 3"]
    assert all(0 < alone < 10 and abs(alone - ours) <= 1e-5 for _, alone, ours in rows)
    reported = {row["step"]: row.get("validation_loss") for row in metrics(compared.output / "composition")}
    assert reported == {1: rows[0][2], 2: rows[1][2], 3: None, 4: rows[2][2], 5: None}


@pytest.mark.parametrize("compared", [("deepseek_v3", "ulysses")], indirect=True, ids="-".join)
def test_expert_statistics_are_summed_over_context_parallel_ranks(compared: Run) -> None:
    alone, ours = (read(compared.output / name)["experts"] for name in ("stock", "composition"))
    counts = [name for name in alone if name.endswith("tokens_per_expert")]
    assert len(counts) == 5 and len(alone) == 10
    for name in counts:
        assert int(ours[name].sum()) == 2 * 128 * 3  # batch x sequence x experts of each token
        assert torch.equal(ours[name], alone[name])
        bias = name.replace("tokens_per_expert", "expert_bias")
        assert float(ours[bias].abs().max()) > 0
        assert torch.equal(ours[bias], alone[bias])


def test_weights_one_rounding_away_are_the_floats_beside_them(one_rank: None) -> None:
    with cpu_shims():
        from cp_engine.job.verify.recorder import one_rounding_away
    before = torch.randn(1000)
    before[0] = 0.0
    moved = [before.clone() for _ in range(3)]
    for parameter, seed in zip(moved, (1, 1, 2), strict=True):
        one_rounding_away([parameter], torch.Generator().manual_seed(seed))
    assert torch.equal(moved[0], moved[1]) and not torch.equal(moved[0], moved[2])
    distance = (moved[0].view(torch.int32) - before.view(torch.int32)).abs()
    assert distance[1:].eq(1).all() and 0 < moved[0][0].abs() < 1e-44
    assert 400 < int((moved[0] > before).sum()) < 600


def test_comparison_whose_roundings_grow_beyond_telling_is_not_decided(launch: Callable[..., Result]) -> None:
    options = ("mode=verify", "verify.level=training", "cp=ulysses", "model=llama3", "titan.training.seq_len=32")
    result = launch(*options, "titan.optimizer.lr=1")
    assert result.code == 1 and "NOT DECIDED: step 1 agrees" in result.out, result.out + result.err
    assert "4/4 torchtitan alone, 5 steps: from weights one rounding away" in result.out
    rows = [line.split() for line in result.out.splitlines() if re.match(r"[1-5] ", line)]
    assert len(rows[0]) == 7 and rows[0][-3:] == ["<=", "1e-05", "ok"]  # nothing was measured of step 1
    assert all(len(row) == 8 for row in rows[1:]) and rows[-1][-1] == "unknown"


def test_comparison_draws_the_same_weights_each_time(tmp_path: Path) -> None:
    config = configured(tmp_path / "a", "mode=verify", "verify.level=training", "titan.debug.seed=null")
    for made in training_mode.prepare(config):
        assert made["titan"]["debug"]["seed"] == 0
    chosen = configured(tmp_path / "b", "mode=verify", "verify.level=training", "titan.debug.seed=7")
    for made in training_mode.prepare(chosen):
        assert made["titan"]["debug"]["seed"] == 7


def test_comparison_refuses_half_types_instead_of_comparing_in_float32(tmp_path: Path) -> None:
    config = configured(tmp_path, "cp=ulysses", "titan.training.mixed_precision_param=bfloat16")
    assert [problem.key for problem in training_mode.check(config)] == ["titan.training.mixed_precision_param"]


# --- batches whose documents are packed and whose targets are few ---


class Packed:
    """Text as two documents a row, whose positions start anew; only the last quarter of a row is predicted."""

    def __init__(self, text: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        self.text = text

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for rest, labels in self.text:
            sequence = labels.shape[1]
            positions = (torch.arange(sequence) % (sequence // 2)).expand_as(labels)
            targets = labels.clone()
            targets[:, : -sequence // 4] = -100
            yield {**rest, "positions": positions}, targets


def packed_alone(config: Config) -> None:
    """One rank of torchtitan alone on packed text, validated by its own validator."""
    with train.rank_process(config):
        from cp_engine.job.verify.recorder import StockRecorder

        class PackedRecorder(StockRecorder):
            def train(self) -> None:
                self.dataloader = Packed(self.dataloader)
                self.validator.validation_dataloader = Packed(self.validator.validation_dataloader)
                super().train()

        training_mode.train_alone(config, PackedRecorder)


def packed_composition(config: Config) -> None:
    """One rank of the composition on the same text."""
    with train.rank_process(config):
        from cp_engine.job.verify.recorder import CompositionRecorder

        class PackedRecorder(CompositionRecorder):
            def train(self) -> None:
                self.dataloader = Packed(self.dataloader)
                self.validator.text = Packed(self.validator.text)
                super().train()

        train.train_composition(config, PackedRecorder)


@pytest.mark.parametrize("layout", ["contiguous", pytest.param("zigzag", marks=pytest.mark.long)])
def test_packed_positions_are_kept_and_ranks_without_targets_add_nothing(
    tmp_path: Path, one_rank: None, layout: str
) -> None:
    config = configured(tmp_path / "run", "cp=allgather_kv", "model=llama3", f"layout@cp.layout={layout}", *VALIDATION)
    alone, composed = training_mode.prepare(config)
    packed_alone(alone)  # in this process
    elastic.run_ranks(packed_composition, composed, tmp_path / "run" / "composition", ranks=2)
    comparison = compare(tmp_path / "run" / "stock", tmp_path / "run" / "composition")
    assert len(comparison.losses) == 8 and all(0 < loss < 10 for _, *both in comparison.losses for loss in both)
    assert comparison.is_within_bounds


# --- resume ---


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


def checkpoint(folder: Path, *entries: str) -> Path:
    from torch.distributed.checkpoint import save

    folder.mkdir(parents=True)
    save({entry: torch.ones(2) for entry in entries}, checkpoint_id=folder, no_dist=True)
    return folder


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


# --- what the job may not ask for ---


def test_check_accepts_the_default_job(tmp_path: Path) -> None:
    assert keys(configured(tmp_path, "cp=ulysses")) == []


@pytest.mark.parametrize(
    "override",
    [
        "titan.training.dataset=c4",
        "titan.training.dataset_path=/text",
        "titan.model.hf_assets_path=/tokenizer",
        "titan.job.config_file=job.toml",
        "titan.model.tokenizer_path=/tokenizer",
        "titan.comm.mode=fake_backend",
    ],
)
def test_check_refuses_what_would_have_no_effect_or_be_wrong(tmp_path: Path, override: str) -> None:
    assert keys(configured(tmp_path, "cp=ulysses", f"++{override}")) == [override.split("=")[0]]


@pytest.mark.parametrize("differs", ["cp.recompute=skip_attention", "mask=document"])
def test_check_refuses_to_compile_what_a_graph_cannot_hold(tmp_path: Path, differs: str) -> None:
    compiled = ("cp=ulysses", "+titan.compile.enable=true")
    assert keys(configured(tmp_path, *compiled)) == []
    assert keys(configured(tmp_path, *compiled, differs)) == ["titan.compile.components"]
    assert keys(configured(tmp_path, *compiled, differs, "+titan.compile.components=[loss]")) == []


@pytest.mark.parametrize("preset", ["none", "ulysses"])
def test_check_accepts_a_validation_of_the_planned_call(tmp_path: Path, preset: str) -> None:
    assert keys(configured(tmp_path, f"cp={preset}", *VALIDATION)) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("titan.validation.seq_len=64", "titan.validation.seq_len"),
        ("titan.validation.steps=-1", "titan.validation.steps"),
        ("titan.metrics.log_freq=3", "titan.validation.freq"),
        ("titan.validation.dataset_path=/nowhere", "titan.validation.dataset_path"),
        ("data.path=/text", "titan.validation.dataset_path"),
    ],
)
def test_check_refuses_a_validation_that_would_not_end_or_not_be_seen(tmp_path: Path, override: str, key: str) -> None:
    assert keys(configured(tmp_path, "cp=ulysses", *VALIDATION, f"++{override}")) == [key]


def test_check_refuses_a_validation_batch_that_the_pipeline_cannot_split(tmp_path: Path) -> None:
    pipeline = ("+titan.parallelism.pipeline_parallel_degree=2", "++titan.validation.local_batch_size=3")
    (problem,) = torchtitan.check(configured(tmp_path, "cp=ulysses", *VALIDATION, *pipeline))
    assert problem.key == "titan.validation.local_batch_size" and problem.tries == (f"{problem.key}=2",)


def test_validation_reads_a_folder_of_its_own(tmp_path: Path, one_rank: None) -> None:
    for name, text in (("train", "a" * 4000), ("other", "b" * 4000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    folders = (f"data.path={tmp_path / 'train'}", f"+titan.validation.dataset_path={tmp_path / 'other'}")
    config = configured(tmp_path / "run", "cp=none", "model=llama3", "titan.training.steps=30", *VALIDATION, *folders)
    assert keys(config) == []
    train.run(config)
    last = metrics(tmp_path / "run")[-1]
    assert last["loss"] < 1 and last["validation_loss"] > 5  # it never saw a b


# --- inside one process ---


def test_two_jobs_in_one_process_leave_it_as_it_was(tmp_path: Path, one_rank: None) -> None:
    before = process_state()
    for name in ("first", "second"):
        train.run(configured(tmp_path / name, "cp=none", "model=llama3"))
        assert process_state() == before
    assert losses(tmp_path / "first") == pytest.approx(losses(tmp_path / "second"), abs=1e-5)
    rows = metrics(tmp_path / "first")
    assert [row["step"] for row in rows] == [1, 2]
    assert {key for row in rows for key in row} == {"step", "loss", "tokens_per_second", "cp_bytes_sent", "seconds"}
    assert all(row["cp_bytes_sent"] == 0 and row["seconds"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert "Training completed" in (tmp_path / "first" / "ranks" / "rank0.log").read_text()


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


def test_a_job_that_fails_leaves_the_process_as_it_was(tmp_path: Path, one_rank: None) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "text.jsonl").write_text(json.dumps({"text": "words " * 40}) + "\nno record\n")
    before = process_state()
    with pytest.raises(ConfigError, match=r"text\.jsonl:2"):
        train.run(configured(tmp_path / "run", "cp=none", "model=llama3", f"data.path={folder}"))
    assert process_state() == before


def test_seed_checkpoint_is_written_without_training(tmp_path: Path, one_rank: None) -> None:
    options = ("titan.checkpoint.enable=true", "+titan.checkpoint.create_seed_checkpoint=true")
    train.run(configured(tmp_path, "cp=none", "model=llama3", *options))
    assert (tmp_path / "checkpoint" / "step-0" / ".metadata").is_file()
    assert not (tmp_path / train.METRICS).exists()


def test_bfloat16_trains(tmp_path: Path, one_rank: None) -> None:
    train.run(configured(tmp_path, "cp=none", "model=llama3", "titan.training.mixed_precision_param=bfloat16"))
    assert all(0 < loss < 20 for loss in losses(tmp_path))


def test_job_config_takes_nested_sections_and_refuses_unknown_keys() -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.host import job_config
    made = job_config({"training": {"steps": 3}, "quantize": {"linear": {"float8": {"emulate": True}}}})
    assert (made.training.steps, made.quantize.linear.float8.emulate) == (3, True)
    with pytest.raises(ConfigError, match=re.escape("titan.training.step ")) as caught:
        job_config({"training": {"step": 3}, "trainings": {}})
    assert [problem.tries for problem in caught.value.problems] == [("titan.training.steps",), ("titan.training",)]


def test_planned_shapes_are_those_of_the_models(tmp_path: Path) -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.host import job_config
        from cp_engine.hosts.torchtitan.spec import refuse_other_shape
    checked = 0
    for model, flavors in shape_table().items():
        for flavor, row in flavors.items():
            config = configured(tmp_path, f"titan.model.name={model}", f"titan.model.flavor={flavor}")
            if row["attention"] == "sdpa" and "package" not in row:
                refuse_other_shape(job_config(train.titan_of(config)), job.shape_of(config))
                checked += 1
    assert checked > 5


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.host import job_config
        from cp_engine.hosts.torchtitan.spec import refuse_other_shape
    config = configured(tmp_path, "titan.model.flavor=debugmodel_flex_attn", "shape.heads=8")
    with pytest.raises(ConfigError) as caught:
        refuse_other_shape(job_config(train.titan_of(config)), job.shape_of(config))
    assert [problem.key for problem in caught.value.problems] == ["shape.heads"]
    assert "16" in caught.value.problems[0].what


# --- batches on two ranks ---


def cut_batches(config: Config) -> None:
    """One rank: cut a batch of known numbers, and keep the first batch of text."""
    with train.rank_process(config):
        from cp_engine.errors import CallError
        from cp_engine.hosts.torchtitan.trainer import CompositionTrainer

        class Cutter(CompositionTrainer):
            """Cuts instead of training."""

            def train(self) -> None:
                output, rank = Path(self.job_config.job.dump_folder), dist.get_rank()
                text = next(iter(self.dataloader))
                kept = {"text": text[0]["input"], "plain": self.cut({}), "packed": self.cut(packed())}
                try:
                    self.cut({"weights": torch.zeros(128)})
                except CallError as error:
                    kept["refused"] = str(error)
                torch.save(kept, output / f"{rank}.pt")

            def cut(self, companions: dict[str, torch.Tensor]) -> list[torch.Tensor]:
                tokens = torch.arange(256).reshape(2, 128)
                inputs, labels, rest, arguments = self.post_dataloading_process(
                    {"input": tokens, **companions}, tokens + 1
                )
                positions = arguments["positions"]
                assert isinstance(positions, torch.Tensor)
                return [inputs, labels, positions, *rest.values()]

        train.train_composition(config, Cutter)


def packed() -> dict[str, torch.Tensor]:
    """Two documents of 64 tokens, and a companion with features."""
    positions = (torch.arange(128) % 64).expand(2, 128)
    return {"positions": positions, "features": torch.arange(512).reshape(2, 128, 2)}


def test_declared_companions_of_the_tokens_are_cut_by_the_layout(tmp_path: Path) -> None:
    config = configured(tmp_path, "cp=ulysses", "model=llama3", "layout@cp.layout=zigzag", "data.cut=[features]")
    elastic.run_ranks(cut_batches, config, tmp_path, ranks=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert torch.equal(ranks[0]["text"], ranks[1]["text"])
    tokens = torch.arange(256).reshape(2, 128)
    tables = (torch.cat([torch.arange(0, 32), torch.arange(96, 128)]), torch.arange(32, 96))
    for kept, held in zip(ranks, tables, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(kept["plain"], (tokens[:, held], tokens[:, held] + 1), strict=False)
        )
        assert torch.equal(kept["plain"][2], held.expand(2, 64))
        assert torch.equal(kept["packed"][2], (held % 64).expand(2, 64))
        assert torch.equal(kept["packed"][3], torch.arange(512).reshape(2, 128, 2)[:, held])
        assert "weights" in kept["refused"] and "128" in kept["refused"]


# --- the data position in a checkpoint ---


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


def test_tokenizer_returns_the_text() -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.text.loader import ByteTokenizer
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    assert max(tokenizer.encode("a")) == tokenizer.get_vocab_size() - 1
