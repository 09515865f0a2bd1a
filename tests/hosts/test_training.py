"""torchtitan's real Trainer with a composition against torchtitan alone: weights, packed documents, and how batches are cut."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job import train
from cp_engine.job.checks.comparison import comparison_problems
from cp_engine.job.launch import start as elastic
from cp_engine.job.verify import training_mode
from cp_engine.job.verify.comparison import Comparison, compare, read
from tests.conftest import Result
from tests.hosts.packed import packed_alone, packed_composition
from tests.jobs import VALIDATION, Config, configured, metrics


# ------------------------------------------------------------------ against torchtitan alone
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


@pytest.mark.long  # test_comparison has every verdict
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
    assert [problem.key for problem in comparison_problems(config)] == ["titan.training.mixed_precision_param"]


# ------------------------------------------------------------------ batches whose documents are packed and whose targets are few
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


# ------------------------------------------------------------------ batches on two ranks
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
