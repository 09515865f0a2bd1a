"""DeepSeek-V3.2 under torchtitan's Trainer: the command, parity with one rank, its selections, and what memory it takes."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch

from cp_engine.algebra.tensors import width
from cp_engine.exchange.target import Target
from cp_engine.job.verify import training_mode
from cp_engine.job.verify.comparison import SELECTION_BOUND, compare
from cp_engine.runtime import memory
from cp_engine.runtime.program import Program
from tests.conftest import Result
from tests.helpers import plan_of
from tests.job.test_comparison import record
from tests.jobs import VALIDATION, configured, losses, metrics, trained
from tests.primitives.sparse_shapes import PUBLIC
from tests.runtime.test_memory import most_held


@pytest.mark.long
def test_command_trains_and_both_losses_fall(launch: Callable[..., Result], tmp_path: Path) -> None:
    result = launch("cp=dsa", "hydra.run.dir=run")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    for name in ("loss", "indexer_loss"):
        values = [row[name] for row in rows]
        assert mean(values[-5:]) <= 0.9 * mean(values[:5]), name
    assert "indexer 0." in result.out


def test_a_model_without_an_indexer_is_refused_with_the_reason(launch: Callable[..., Result]) -> None:
    result = launch("cp=dsa", "model=llama3")
    assert result.code == 1
    assert "shape.topk  is 0, and cp.steps.select begins with q_index" in result.err
    assert "only a model with an indexer selects keys" in result.err


SINGLE = ("+titan.parallelism.data_parallel_shard_degree=2", "titan.training.local_batch_size=1")
EXPERTS = (*SINGLE, "+titan.parallelism.expert_parallel_degree=2")
TENSOR = ("+titan.parallelism.tensor_parallel_degree=2", "titan.training.seq_len=128")
FULL, SKIP = ("titan.activation_checkpoint.mode=full",), "cp.recompute=skip_attention"


@pytest.mark.parametrize(
    ("preset", "options", "reference"),
    [
        ("dsa", VALIDATION, "parallel"),
        pytest.param("dsa", ("cp.degree=4",), "parallel", marks=pytest.mark.long),
        pytest.param("dsa", (*FULL, SKIP), "parallel", marks=pytest.mark.long),
        pytest.param("dsa", FULL, "parallel", marks=pytest.mark.long),
        pytest.param("dsa", ("titan.activation_checkpoint.mode=selective",), "parallel", marks=pytest.mark.long),
        pytest.param("dsa", SINGLE, "single", marks=pytest.mark.long),
        pytest.param(
            "dsa", TENSOR, "single", marks=pytest.mark.long
        ),  # every gradient of the model: tests/primitives/test_dsa_heads.py
        pytest.param("dsa_ulysses", (*TENSOR, *FULL, SKIP), "parallel", marks=pytest.mark.long),
        pytest.param("dsa", EXPERTS, "single", marks=pytest.mark.long),
        pytest.param("dsa_ulysses", (), "parallel", marks=pytest.mark.long),
        pytest.param("dsa_ulysses", ("cp.degree=4",), "parallel", marks=pytest.mark.long),
    ],
)
def test_training_and_selections_agree_with_one_rank(
    tmp_path: Path, preset: str, options: tuple[str, ...], reference: str
) -> None:
    config = configured(tmp_path / "run", f"cp={preset}", "mode=verify", "verify.level=training", *options)
    with redirect_stdout(io.StringIO()) as printed:
        is_good = training_mode.run({**config, "verify": {"reference": reference}})
    assert is_good, printed.getvalue()
    comparison = compare(tmp_path / "run" / "stock", tmp_path / "run" / "composition")
    labels = [label for label, *_ in comparison.losses]
    assert labels[:10] == [*"12345", *(f"indexer {i}" for i in range(1, 6))]
    assert len(labels) == (13 if options == VALIDATION else 10)
    assert sum(".indexer." in name for name, _ in comparison.gradient_errors) == 4 * 5
    assert len(comparison.selection_errors) == 4
    for _, apart, total, distance in comparison.selection_errors:
        assert total > 1000 and (distance <= SELECTION_BOUND) and apart < 10
    assert "selected keys of step 1" in printed.getvalue()


def test_a_selection_that_no_rounding_explains_is_found(tmp_path: Path) -> None:
    """Scores 4, 3, 2, 1 for the last of 4 queries: one run selects the first two, the other the first and the third."""
    index = {
        "q_index": torch.ones(1, 1, 4, 1),
        "k_index": torch.tensor([4.0, 3.0, 2.0, 1.0]).view(1, 1, 4, 1),
        "w_index": torch.ones(1, 1, 4, 1),
    }
    first = torch.tensor([[0, -1], [0, 1], [0, 1], [0, 1]], dtype=torch.int32).view(1, 1, 4, 2)
    other = first.clone()
    other[0, 0, 3] = torch.tensor([0, 2])
    folders = []
    for name, topk in (("stock", first), ("composition", other)):
        folders.append(record(tmp_path / name, [1.0]))
        written = torch.load(folders[-1] / "record0.pt", weights_only=True)
        torch.save({**written, "selections": {"layer": {"topk": topk, **index}}}, folders[-1] / "record0.pt")
    comparison = compare(*folders)
    assert comparison.selection_errors == (("layer", 2, 7, 1.0),)
    assert not comparison.is_within_bounds
    assert compare(folders[0], folders[0]).is_within_bounds
    fewer = first.clone()
    fewer[0, 0, 3, 1] = -1
    written = torch.load(folders[1] / "record0.pt", weights_only=True)
    torch.save({**written, "selections": {"layer": {"topk": fewer, **index}}}, folders[1] / "record0.pt")
    assert not compare(*folders).is_within_bounds  # the last selected key left out: at the cut, and yet no rounding
    torch.save({**written, "selections": {}}, folders[1] / "record0.pt")
    assert not compare(*folders).is_within_bounds


@pytest.mark.long
def test_the_dense_stage_trains_the_indexer_alone(tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "cp=dsa", "titan.model.flavor=debugmodel_warm_up", "titan.training.steps=8")
    values = trained(config)
    indexer = [row["indexer_loss"] for row in metrics(tmp_path / "run")]
    assert values == losses(tmp_path / "run") and len(values) == 8
    assert max(values) - min(values) < 0.3  # other batches, the same model
    assert indexer[-1] < 0.7 * indexer[0]


@pytest.mark.long
def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    """One rank, forward and backward, 16 heads of the public sizes, 512 keys: bytes beside the call's own tensors."""
    peaks = []
    for sequence in (4096, 8192, 16384):
        sizes = {"sequence": sequence, "heads": 16, "topk": 512, "index_heads": 16, "dtype": "float32"}
        plan = plan_of("dsa", degree=1, shape=replace(PUBLIC, **sizes))
        program = Program(plan, Target(ranks=(0,), device="cpu", communicator=None))
        tensors = {
            n: torch.randn(1, 16 if n == "q" else 1, sequence, width(plan.shape, n), requires_grad=True)
            for n in plan.inputs
        }
        dout = torch.randn(1, 16, sequence, 512)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            results = program.results({n: [x] for n, x in tensors.items()}, 192**-0.5)
            outs = [*results["out"], *results["indexer_loss"]]
            torch.autograd.grad(outs, list(tensors.values()), [dout, torch.ones(())])
        peaks.append(most_held(profiled))
        planned = memory.peak(plan)
        print(
            f"S {sequence}: {peaks[-1] / 2**20:,.0f} MiB, planned {max(planned.forward, planned.backward) / 2**20:,.0f}"
        )
        assert peaks[-1] == pytest.approx(max(planned.forward, planned.backward), rel=0.1)
        del results, outs, tensors
    assert peaks[1] - peaks[0] == pytest.approx((peaks[2] - peaks[1]) / 2, rel=0.05)
    assert peaks[2] < 4.1 * peaks[0]
