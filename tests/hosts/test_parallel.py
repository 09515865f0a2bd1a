"""A composition beside torchtitan's other parallelism: data, tensor, pipeline, expert, and activation checkpointing."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from cp_engine.errors import Problem
from cp_engine.job.checks import torchtitan
from cp_engine.job.checks.job import problems
from cp_engine.job.launch import start
from cp_engine.job.launch.failures import RankFailure
from cp_engine.job.train import rank_process, section, titan_of
from cp_engine.job.verify import training_mode
from cp_engine.job.verify.comparison import compare, read
from tests.hosts.packed import packed_alone, packed_composition
from tests.jobs import VALIDATION, Config, configured, keys

PRESETS = {  # of 2 ranks each, and the model it is tried with; the first one meets everything
    "ulysses": "llama3",
    "allgather_kv": "llama3",
    "ring_zigzag": "llama3",
    "needed_kv": "llama3",
    "mla_ulysses": "deepseek_v3",
}
MODELS = ("llama3", "deepseek_v3", "qwen3")
PAIRS = {  # what is parallel beside 2 context-parallel ranks
    "fsdp": ("+titan.parallelism.data_parallel_shard_degree=2", "titan.training.local_batch_size=1"),
    "hsdp": ("+titan.parallelism.data_parallel_replicate_degree=2", "titan.training.local_batch_size=1"),
    "tensor": ("+titan.parallelism.tensor_parallel_degree=2",),
    "pipeline": ("+titan.parallelism.pipeline_parallel_degree=2",),
    "expert": ("+titan.parallelism.expert_parallel_degree=2",),
    "fsdp_expert": (
        "+titan.parallelism.data_parallel_shard_degree=2",
        "+titan.parallelism.expert_parallel_degree=4",
        "titan.training.local_batch_size=1",
    ),
}
CHECKPOINTING = {
    "full": ("titan.activation_checkpoint.mode=full",),
    "selective_layer": (
        "titan.activation_checkpoint.mode=selective",
        "+titan.activation_checkpoint.selective_ac_option='2'",
    ),
    "selective_op": (
        "titan.activation_checkpoint.mode=selective",
        "+titan.activation_checkpoint.selective_ac_option=op",
    ),
}
# One rank cannot be the reference where torchtitan itself differs from one rank; docs/torchtitan.md says how.
DIFFERS_FROM_ONE_RANK = {("llama3", "pipeline"), ("deepseek_v3", "pipeline"), ("deepseek_v3", "tensor")}
SHORT = {("deepseek_v3", "fsdp_expert", "ulysses")}


def cases() -> list[object]:
    """Everything with both models, and the pairs with every preset; what is in SHORT by default, the rest with `-m long`."""
    first, *others = PRESETS
    found = [(model, kind, first) for model in MODELS for kind in (*PAIRS, *CHECKPOINTING)]
    found += [(PRESETS[preset], kind, preset) for preset in others for kind in PAIRS]
    found = [case for case in found if case[0] == "deepseek_v3" or "expert" not in case[1]]
    found.remove(("qwen3", "pipeline", first))  # torchtitan has no stages for it
    found.remove(("deepseek_v3", "tensor", "mla_ulysses"))  # tensor parallelism would cut what it expands k and v with
    return [pytest.param(*case, marks=() if case in SHORT else pytest.mark.long, id="-".join(case)) for case in found]


def job_of(output: Path, model: str, kind: str, preset: str, *more: str) -> Config:
    """The configuration of a comparison."""
    options = {**PAIRS, **CHECKPOINTING}[kind]
    return configured(output, f"model={model}", f"cp={preset}", "mode=verify", "verify.level=training", *options, *more)


def against(config: Config, reference: str) -> Config:
    """The comparison with one rank, or with torchtitan on the ranks of everything but context parallelism."""
    return {**config, "verify": {"reference": reference}}


def refusals(config: Config) -> list[Problem]:
    """What the command would say; the folder is the test's own."""
    launch = {key: value for key, value in section(config, "launch").items() if key != "output_dir"}
    return problems({**config, "launch": launch})


@pytest.mark.parametrize(("model", "kind", "preset"), cases())
def test_training_agrees_with_torchtitan_alone(tmp_path: Path, model: str, kind: str, preset: str) -> None:
    validation = VALIDATION if model == "llama3" else ()
    config = job_of(tmp_path / "run", model, kind, preset, *validation)
    assert refusals(config) == []
    reference = "parallel" if (model, kind) in DIFFERS_FROM_ONE_RANK else "single"
    with redirect_stdout(io.StringIO()) as printed:
        is_good = training_mode.run(against(config, reference))
    assert is_good, printed.getvalue()
    comparison = compare(tmp_path / "run" / "stock", tmp_path / "run" / "composition")
    assert len(comparison.losses) == (8 if validation else 5)
    assert len(comparison.gradient_errors) > 50  # of every stage
    assert len(comparison.expert_errors) == (10 if model == "deepseek_v3" else 0)


def test_a_model_without_pipeline_stages_is_refused(tmp_path: Path) -> None:
    (problem,) = refusals(job_of(tmp_path, "qwen3", "pipeline", "ulysses"))
    assert problem.key == "titan.parallelism.pipeline_parallel_degree"
    assert problem.what == "is 2, and torchtitan 0.2.2 has no pipeline stages for qwen3"


def test_experts_in_half_precision_are_not_compared(tmp_path: Path) -> None:
    experts = "titan.model.flavor=debugmodel_moe"
    (problem,) = refusals(job_of(tmp_path, "qwen3", "full", "ulysses", experts))
    assert problem.key == "titan.model.flavor" and "computes its experts in bfloat16" in problem.what


def test_compiling_beside_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    compiled = ("++titan.compile.enable=true", "cp.recompute=all")
    (problem,) = refusals(job_of(tmp_path, "llama3", "tensor", "ulysses", *compiled))
    assert problem.key == "titan.compile.components"
    assert problem.what == "includes model, and titan.parallelism.tensor_parallel_degree is 2"
    assert refusals(job_of(tmp_path, "llama3", "tensor", "ulysses", *compiled, *problem.tries)) == []


@pytest.mark.long
def test_pipeline_gradients_are_those_of_one_rank_times_the_tokens(tmp_path: Path) -> None:
    """torchtitan 0.2.2 divides the logged loss of a pipeline by the tokens, and not what it computes gradients of."""
    config = job_of(tmp_path / "run", "llama3", "pipeline", "ulysses")
    alone, composed = training_mode.prepare(against(config, "single"))
    start.run_ranks(training_mode.run_stock, alone, tmp_path / "run" / "stock", ranks=1)
    start.run_ranks(training_mode.run_composition, composed, tmp_path / "run" / "composition", ranks=4)
    one, four = (read(tmp_path / "run" / name)["gradients"] for name in ("stock", "composition"))
    assert one.keys() == four.keys()
    for name, gradient in one.items():
        assert torch.linalg.norm(four[name] / (2 * 128) - gradient) <= 1e-5 * torch.linalg.norm(gradient), name
    comparison = compare(tmp_path / "run" / "stock", tmp_path / "run" / "composition")
    assert all(abs(theirs - ours) <= 1e-5 for _, theirs, ours in comparison.losses)  # clipping takes the factor away


@pytest.mark.long
def test_packed_positions_reach_every_pipeline_stage(tmp_path: Path) -> None:
    config = job_of(tmp_path / "run", "llama3", "pipeline", "allgather_kv", *VALIDATION)
    alone, composed = training_mode.prepare(against(config, "single"))
    start.run_ranks(packed_alone, alone, tmp_path / "run" / "stock", ranks=1)
    start.run_ranks(packed_composition, composed, tmp_path / "run" / "composition", ranks=4)
    comparison = compare(tmp_path / "run" / "stock", tmp_path / "run" / "composition")
    assert len(comparison.losses) == 8
    assert all(abs(theirs - ours) <= 1e-5 for _, theirs, ours in comparison.losses)


def stock_with_experts_spread(config: Config) -> None:
    """torchtitan alone on 2 data-parallel ranks, nothing replaced for expert parallelism."""
    with rank_process(config):
        from torchtitan.train import Trainer

        from cp_engine.hosts.torchtitan.host import hosted, job_config

        titan = job_config(titan_of(config))
        with hosted(titan, data=section(config, "data"), is_composed=False):
            Trainer(titan).train()


@pytest.mark.long
def test_torchtitan_alone_cannot_spread_experts_on_cpu(tmp_path: Path) -> None:
    options = ("+titan.parallelism.data_parallel_shard_degree=2", "+titan.parallelism.expert_parallel_degree=2")
    config = configured(tmp_path, "cp=none", "model=deepseek_v3", *options)
    with pytest.raises(RankFailure, match=re.escape("RuntimeError: 0 active drivers ([]). There should only be one.")):
        start.run_ranks(stock_with_experts_spread, config, tmp_path, ranks=2)


# --- what is refused before a rank starts ---


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (("expert_parallel_degree=4",), "titan.parallelism.expert_parallel_degree"),
        (
            ("expert_parallel_degree=2", "expert_tensor_parallel_degree=2"),
            "titan.parallelism.expert_tensor_parallel_degree",
        ),
        (("expert_parallel_degree=0",), "titan.parallelism.expert_parallel_degree"),
    ],
)
def test_experts_that_do_not_fit_the_ranks_are_refused(tmp_path: Path, options: tuple[str, ...], key: str) -> None:
    config = configured(tmp_path, "cp=ulysses", *(f"+titan.parallelism.{option}" for option in options))
    assert keys(config) == [key]


def test_experts_beside_tensor_parallelism_alone_are_refused(tmp_path: Path) -> None:
    options = ("+titan.parallelism.tensor_parallel_degree=2", "+titan.parallelism.expert_parallel_degree=2")
    (problem,) = torchtitan.check(configured(tmp_path, "cp=none", *options))
    assert problem.key == "titan.parallelism.expert_parallel_degree" and "cp x dp_shard" in problem.what


@pytest.mark.parametrize("kind", ["expert", "fsdp_expert"])
def test_experts_that_fit_the_ranks_are_accepted(tmp_path: Path, kind: str) -> None:
    assert keys(configured(tmp_path, "cp=ulysses", *PAIRS[kind])) == []


def test_micro_batches_that_do_not_divide_the_batch_are_refused(tmp_path: Path) -> None:
    options = ("pipeline_parallel_degree=2", "pipeline_parallel_microbatch_size=2")
    overrides = (f"+titan.parallelism.{option}" for option in options)
    config = configured(tmp_path, "cp=ulysses", "titan.training.local_batch_size=3", *overrides)
    (problem,) = refusals(config)
    assert problem.key == "titan.parallelism.pipeline_parallel_microbatch_size" and "3" in problem.what


def test_a_latent_beside_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    options = ("+titan.parallelism.tensor_parallel_degree=2", "titan.training.seq_len=256")
    (problem,) = torchtitan.check(configured(tmp_path, "cp=mla_ulysses", *options))
    assert problem.key == "titan.parallelism.tensor_parallel_degree" and "expands k and v" in problem.what
    assert torchtitan.check(configured(tmp_path, "cp=ulysses", *options)) == []


def test_a_graph_with_what_differs_from_call_to_call_is_refused(tmp_path: Path) -> None:
    compiled = ("+titan.compile.enable=true", "cp=ulysses")
    assert torchtitan.check(configured(tmp_path, *compiled)) == []
    for more, word in (("cp.recompute=skip_attention", "cp.recompute"), ("mask=document", "mask of its own")):
        (problem,) = torchtitan.check(configured(tmp_path, *compiled, more))
        assert problem.key == "titan.compile.components" and word in problem.what
