"""Two records of training from the same weights: what agrees, what is wrong, and what only rounding could explain."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cp_engine.job.verify.comparison import Record, compare
from cp_engine.job.verify.table import show


def record(
    folder: Path,
    losses: Sequence[float],
    stage: int = 0,
    spread: float = 0.0,
    experts: torch.Tensor | None = None,
    expert_bias: torch.Tensor | None = None,
    **gradients: torch.Tensor,
) -> Path:
    folder.mkdir(exist_ok=True)
    whole = Record(
        losses=list(losses),
        indexer_losses=[],
        selections={},
        validation_losses=[],
        gradients=gradients,
        spread=dict.fromkeys(gradients, spread),
        experts={n: x for n, x in (("tokens_per_expert", experts), ("expert_bias", expert_bias)) if x is not None},
    )
    torch.save(whole, folder / f"record{stage}.pt")
    return folder


@pytest.mark.parametrize(
    ("loss", "scale", "spread", "moved", "is_good"),
    [
        (1.0, 1.0, 0.0, 0.0, True),
        (1.0 + 2e-5, 1.0, 0.0, 0.0, False),
        (1.0, 1.0 + 2e-5, 0.0, 0.0, False),
        (float("nan"), 1.0, 0.0, 0.0, False),
        (1.0, float("nan"), 0.0, 0.0, False),
        (1.0, 1.0, 2e-5, 0.0, False),
        (1.0, 1.0, 0.0, 1.0, False),
    ],
)
def test_comparison_finds_what_is_out_of_bounds(
    tmp_path: Path, loss: float, scale: float, spread: float, moved: float, is_good: bool
) -> None:
    weight, experts = torch.ones(4, dtype=torch.float64), torch.tensor([3.0, 5.0])
    stock = record(tmp_path / "stock", [2.0, 1.0], experts=experts, weight=weight, unused=0 * weight)
    ours = record(tmp_path / "ours", [2.0, loss], 0, spread, experts + moved, weight=scale * weight, unused=0 * weight)
    assert compare(stock, ours).is_within_bounds == is_good


def test_comparison_counts_a_missing_gradient_as_wrong(tmp_path: Path) -> None:
    stock = record(tmp_path / "stock", [1.0], weight=torch.ones(4), bias=torch.ones(1))
    ours = record(tmp_path / "ours", [1.0], weight=torch.ones(4))
    assert compare(stock, ours).gradient_errors[0] == ("bias", float("inf"))


def test_comparison_joins_the_records_of_pipeline_stages(tmp_path: Path) -> None:
    stock = record(tmp_path / "stock", [1.0], first=torch.ones(4), last=torch.ones(1))
    record(tmp_path / "ours", [1.0], 0, first=torch.ones(4))
    ours = record(tmp_path / "ours", [1.0], 1, last=torch.ones(1))
    assert compare(stock, ours).gradient_errors == (("first", 0.0), ("last", 0.0))


def test_comparison_does_not_blame_the_composition_for_ranks_that_torchtitan_leaves_apart(tmp_path: Path) -> None:
    stock = record(tmp_path / "stock", [1.0], spread=0.7, weight=torch.ones(4))
    ours = record(tmp_path / "ours", [1.0], spread=0.7, weight=torch.ones(4))
    assert compare(stock, ours).is_within_bounds


@pytest.mark.parametrize(
    ("later", "rounded", "verdict"),
    [
        (1.0, (1.0, 1.0), "verified"),
        (1.0 + 5e-5, (1.0, 1.0), "WRONG"),
        (1.0 + 5e-5, (1.0 + 4e-6, 1.0), "WRONG"),
        (1.0 + 5e-5, (1.0 + 6e-6, 1.0), "verified"),
        (1.0 + 5e-5, (1.0, 1.0 - 6e-6), "verified"),
        (1.0 + 2e-3, (1.0 + 1e-3, 1.0), "NOT DECIDED"),
        (1.0 + 2e-2, (1.0 + 1e-3, 1.0), "WRONG"),
        (1.0 + 5e-5, (1.0 + 1.0, 1.0), "verified"),  # nearer than another batch would be
        (1.0 + 2e-4, (1.0 + 1.0, 1.0), "NOT DECIDED"),
        (float("nan"), (1.0 + 1e-3, 1.0), "WRONG"),
        (float("nan"), (1.0, float("nan")), "NOT DECIDED"),
        (1.0 + 2e-4, (1.0, float("inf")), "NOT DECIDED"),
    ],
)
def test_a_later_loss_may_move_as_rounding_moves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], later: float, rounded: tuple[float, float], verdict: str
) -> None:
    stock, ours = record(tmp_path / "stock", [2.0, 1.0, 1.0]), record(tmp_path / "ours", [2.0, 1.0, later])
    folders = [record(tmp_path / str(i), [2.0, loss, 1.0]) for i, loss in enumerate(rounded)]  # what moved stays moved
    found = compare(stock, ours, folders)
    show(found, "two runs")
    assert capsys.readouterr().out.strip().splitlines()[-1 if verdict != "NOT DECIDED" else -2].startswith(verdict)
    assert found.is_within_bounds == (verdict == "verified") and found.is_undecided == (verdict == "NOT DECIDED")


def test_what_step_1_computes_is_never_excused_by_rounding(tmp_path: Path) -> None:
    stock = record(tmp_path / "stock", [2.0, 1.0], experts=torch.tensor([3.0]), weight=torch.ones(4))
    rounded = [record(tmp_path / "rounded", [2.1, 1.1], experts=torch.tensor([4.0]), weight=2 * torch.ones(4))]
    same = {"experts": torch.tensor([3.0]), "weight": torch.ones(4)}
    assert compare(stock, record(tmp_path / "0", [2.0, 1.0], **same), rounded).is_within_bounds
    wrong = [
        record(tmp_path / "1", [2.0 + 2e-5, 1.0], **same),
        record(tmp_path / "2", [2.0, 1.0], **{**same, "experts": torch.tensor([4.0])}),
        record(tmp_path / "3", [2.0, 1.0], **{**same, "weight": (1 + 2e-5) * torch.ones(4)}),
    ]
    for folder in wrong:
        assert not compare(stock, folder).is_in_doubt  # no run can excuse it, and none is made
        found = compare(stock, folder, rounded)
        assert not found.is_within_bounds and not found.is_undecided
    assert compare(stock, record(tmp_path / "4", [2.0, 1.0 + 2e-5], **same)).is_in_doubt


def test_a_loss_that_is_none_with_torchtitan_alone_tells_nothing(tmp_path: Path) -> None:
    nan = float("nan")
    folders = [record(tmp_path / name, [2.0, nan]) for name in ("stock", "ours", "rounded")]
    assert compare(*folders[:2]).is_in_doubt and compare(*folders[:2], folders[2:]).is_undecided
    at_once = [record(tmp_path / f"{i}", [nan, nan]) for i in range(3)]
    assert not compare(*at_once[:2]).is_in_doubt and not compare(*at_once[:2], at_once[2:]).is_undecided


@pytest.mark.parametrize("flipped", [0.0, 2e-3])
@pytest.mark.parametrize("missing", [1e-3, 5e-3, 2.0, float("nan")])
def test_a_bias_that_is_off_is_never_verified(tmp_path: Path, missing: float, flipped: float) -> None:
    bias = torch.tensor([5e-3, -5e-3])
    stock, ours = (
        record(tmp_path / "stock", [2.0], expert_bias=bias),
        record(tmp_path / "ours", [2.0], expert_bias=bias - missing),
    )
    found = compare(stock, ours, [record(tmp_path / "rounded", [2.0], expert_bias=bias - flipped)])
    assert not found.is_within_bounds
    assert found.is_undecided == (flipped > 0 and missing < 1)  # no number of steps moves it by 2


def test_an_indexer_loss_is_small_and_so_is_what_it_may_be_off_by(tmp_path: Path) -> None:
    stock, ours, rounded = (record(tmp_path / name, [2.0, 1.0]) for name in ("stock", "ours", "rounded"))
    for folder, loss in ((stock, 1e-3), (ours, 1e-4), (rounded, 1e-3 + 1e-4)):
        whole = torch.load(folder / "record0.pt") | {"indexer_losses": [0.1, loss]}
        torch.save(whole, folder / "record0.pt")
    assert compare(stock, ours, [rounded]).is_undecided
