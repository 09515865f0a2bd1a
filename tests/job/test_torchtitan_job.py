"""What a job may not ask of torchtitan, said before ranks start."""

from pathlib import Path

import pytest

from cp_engine.job.checks import torchtitan
from tests.jobs import VALIDATION, configured, keys


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
