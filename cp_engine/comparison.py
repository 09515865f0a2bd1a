"""Two training runs from the same weights: what each wrote, how far they are apart, and the table that says so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from rich.table import Table
from torch import Tensor

from cp_engine.progress import Screen

LOSS_BOUND = 1e-5  # absolute; float32 reordering alone gives 1e-6 on the debug models
GRADIENT_BOUND = 1e-5  # of each parameter, by norm; float32 reordering alone gives 2e-7
SELECTION_BOUND = 1e-6  # of a score: how far from the last selected key one may be that only one run selects
EXPERT_BOUND = 1e-6  # absolute: counts are whole numbers, and a step moves a bias by 1e-3
ROWS = 8  # parameters in the table, the worst first
RECORDS = "record*.pt"  # one for each pipeline stage, which holds parameters and experts of its own


class Record(TypedDict):
    """What one run wrote.

    Args:
        losses: one per step.
        indexer_losses: one per step; empty for a model without indexers.
        validation_losses: one per validation.
        selections: module that selects keys -> `topk` and the indexer's tensors of step 1, of one sequence per row.
        gradients: parameter -> whole gradient of step 1 before clipping, float64.
        spread: parameter -> how far two ranks are apart in the norm of that gradient, relative.
        experts: `...tokens_per_expert` of step 1 over all ranks, and `...expert_bias` after the last step.
    """

    losses: list[float]
    indexer_losses: list[float]
    selections: dict[str, dict[str, Tensor]]
    validation_losses: list[float]
    gradients: dict[str, Tensor]
    spread: dict[str, float]
    experts: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs from the same weights and the same text.

    Args:
        losses: (label, torchtitan alone, the composition), a row per step and per validation.
        gradient_errors: parameter -> |difference| / |stock| of the first step's gradient, in float64, or by how much more the
            ranks of the composition are apart than torchtitan's; worst first.
        expert_errors: expert statistics -> largest absolute difference; worst first, empty for a dense model.
        selection_errors: module that selects keys -> how many keys only one of the runs selects, of how many, and how far the score of
            such a key is from that of the last selected one, at most.
    """

    losses: tuple[tuple[str, float, float], ...]
    gradient_errors: tuple[tuple[str, float], ...]
    expert_errors: tuple[tuple[str, float], ...]
    selection_errors: tuple[tuple[str, int, int, float], ...] = ()

    @property
    def is_within_bounds(self) -> bool:
        """Whether every loss, every gradient and every expert statistic agrees."""
        return (
            all(abs(theirs - ours) <= LOSS_BOUND for _, theirs, ours in self.losses)
            and all(error <= GRADIENT_BOUND for _, error in self.gradient_errors)
            and all(error <= EXPERT_BOUND for _, error in self.expert_errors)
            and all(distance <= SELECTION_BOUND for *_, distance in self.selection_errors)
        )


def compare(stock: Path, composition: Path) -> Comparison:
    """Read two records.

    Args:
        stock: output folder of torchtitan alone.
        composition: output folder of the composition.

    Returns:
        The differences; a parameter that only one run has counts as infinitely wrong.
    """
    ours, theirs = read(composition), read(stock)
    apart = {name: spread - theirs["spread"].get(name, 0.0) for name, spread in ours["spread"].items()}
    return Comparison(
        losses=(
            *_rows("", theirs["losses"], ours["losses"]),
            *_rows("indexer ", theirs["indexer_losses"], ours["indexer_losses"]),
            *_rows("validation ", theirs["validation_losses"], ours["validation_losses"]),
        ),
        gradient_errors=_errors(ours["gradients"], theirs["gradients"], _relative, apart),
        expert_errors=_errors(ours["experts"], theirs["experts"], _absolute, {}),
        selection_errors=tuple(
            (name, *_selected_apart(theirs["selections"].get(name), ours["selections"].get(name)))
            for name in {**theirs["selections"], **ours["selections"]}
        ),
    )


def read(folder: Path) -> Record:
    """The records of all pipeline stages together."""
    whole = Record(
        losses=[], indexer_losses=[], selections={}, validation_losses=[], gradients={}, spread={}, experts={}
    )
    for path in sorted(folder.glob(RECORDS)):
        part: Record = torch.load(path, weights_only=True)
        assert not whole["gradients"].keys() & part["gradients"].keys(), "two stages hold the same parameter"
        for name in ("losses", "indexer_losses", "validation_losses"):
            whole[name] = part[name]  # alike at every stage
        whole["selections"] |= part["selections"]
        whole["gradients"] |= part["gradients"]
        whole["spread"] |= part["spread"]
        whole["experts"] |= part["experts"]
    return whole


def _rows(label: str, theirs: list[float], ours: list[float]) -> list[tuple[str, float, float]]:
    return [(f"{label}{i}", a, b) for i, (a, b) in enumerate(zip(theirs, ours, strict=True), 1)]


def _errors(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    error: Callable[[Tensor, Tensor], float],
    more: Mapping[str, float],
) -> tuple[tuple[str, float], ...]:
    rows = []
    for name in {*ours, *theirs}:
        known = name in ours and name in theirs and ours[name].shape == theirs[name].shape
        found = error(ours[name], theirs[name]) if known else float("inf")
        rows.append((name, max(found, more.get(name, 0.0))) if found == found else (name, float("inf")))
    return tuple(sorted(rows, key=lambda row: (-row[1], row[0])))


def _selected_apart(theirs: Mapping[str, Tensor] | None, ours: Mapping[str, Tensor] | None) -> tuple[int, int, float]:
    """Keys that one of two runs selects alone, the keys that the first selects, and how far from the cut such a key's score is, at most.

    A run may hold some rows of the batch alone, and in another order: a row is known again by what its indexer weighs heads with.
    """
    if theirs is None or ours is None:  # a module that selects in one run alone
        return 0, 0, float("inf")
    size, apart, total, worst = ours["topk"].shape[2], 0, 0, 0.0
    for topk, weights in zip(ours["topk"][:, 0], ours["w_index"], strict=True):
        row = int((theirs["w_index"] - weights).abs().flatten(1).sum(1).argmin())
        q, k, w = (theirs[name][row, 0].to(torch.float64) for name in ("q_index", "k_index", "w_index"))
        chosen, other = (
            torch.zeros(size, size + 1, dtype=torch.bool).scatter_(1, x.long() % (size + 1), True)[:, :size]
            for x in (theirs["topk"][row, 0], topk)
        )
        differs = chosen != other
        if not torch.equal(chosen.sum(1), other.sum(1)):
            worst = float("inf")  # a query attends to more keys in one run than in the other
        for t in differs.any(1).nonzero().flatten().tolist():
            scores = w[t] @ (q[t].view(w.shape[1], -1) @ k.T).relu()
            distances = (scores[differs[t]] - scores[chosen[t]].min()).abs() if chosen[t].any() else scores[differs[t]]
            worst = max(worst, float(distances.nan_to_num(nan=torch.inf).max()))
        apart, total = apart + int(differs.sum()), total + int(chosen.sum())
    return apart, total, worst


def _relative(ours: Tensor, theirs: Tensor) -> float:
    norm, difference = float(theirs.norm()), float((ours - theirs).norm())
    if norm == 0:  # an expert that got no token
        return 0.0 if difference == 0 else float("inf")
    return difference / norm


def _absolute(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def show(comparison: Comparison, title: str) -> None:
    """Print a comparison: losses, the worst gradients, experts, and the verdict.

    Args:
        comparison: of two runs.
        title: what was compared.
    """
    console = Screen(width=110, highlight=False)
    console.print(f"{title}\n")
    losses = _table("step", "loss, alone", "loss, composition", "difference", "bound", "")
    for label, theirs, ours in comparison.losses:
        error = abs(theirs - ours)
        cells = (label, f"{theirs:.9f}", f"{ours:.9f}", f"{error:.1e}", f"<= {LOSS_BOUND:.0e}")
        losses.add_row(*cells, _verdict(error <= LOSS_BOUND))
    console.print(losses)
    for title, kind, errors, bound in (
        ("gradient of step 1", "relative difference", comparison.gradient_errors, GRADIENT_BOUND),
        ("experts", "difference", comparison.expert_errors, EXPERT_BOUND),
    ):
        rows = _table(title, kind, "bound", "")
        for name, error in errors[:ROWS]:
            rows.add_row(name, f"{error:.1e}", f"<= {bound:.0e}", _verdict(error <= bound))
        if errors:
            console.print()
            console.print(rows)
        if len(errors) > ROWS:
            console.print(f"and {len(errors) - ROWS} more, each with no larger difference")
    if comparison.selection_errors:
        rows = _table("selected keys of step 1", "only alone", "of", "farthest from the cut", "bound", "")
        for name, apart, total, distance in comparison.selection_errors[:ROWS]:
            cells = (name, f"{apart:,}", f"{total:,}", f"{distance:.1e}", f"<= {SELECTION_BOUND:.0e}")
            rows.add_row(*cells, _verdict(distance <= SELECTION_BOUND))
        console.print()
        console.print(rows)
    verdict = "verified" if comparison.is_within_bounds else "WRONG: the composition does not train as torchtitan does"
    console.print(f"\n{verdict}")


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 or not name else "right", no_wrap=True)
    return table


def _verdict(is_good: bool) -> str:
    return "ok" if is_good else "WRONG"
