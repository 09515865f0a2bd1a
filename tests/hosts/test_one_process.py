"""Jobs in this process: it is left as it was found, and shapes are those that were planned."""

import gc
import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cp_engine.errors import ConfigError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job import train
from cp_engine.job.checks import job
from cp_engine.job.checks.keys import shape_table
from tests.jobs import VALIDATION, configured, keys, losses, metrics


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


# ------------------------------------------------------------------ what the job may not ask for
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


# ------------------------------------------------------------------ inside one process
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


@pytest.mark.quick
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


# ------------------------------------------------------------------ the data position in a checkpoint
def test_tokenizer_returns_the_text() -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.text.loader import ByteTokenizer
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    assert max(tokenizer.encode("a")) == tokenizer.get_vocab_size() - 1
