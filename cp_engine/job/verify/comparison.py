"""Two training runs from the same weights: what each wrote, how far they are apart, and how far they may be."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Final, Literal, TypedDict

import torch
from torch import Tensor

LOSS_BOUND = 1e-5  # absolute; float32 reordering alone gives 1e-6 on the debug models
GRADIENT_BOUND = 1e-5  # of each parameter, by norm; float32 reordering alone gives 2e-7
SELECTION_BOUND = 1e-6  # of a score: how far from the last selected key one may be that only one run selects
EXPERT_BOUND = 1e-6  # absolute: counts are whole numbers, and a step moves a bias by 1e-3
ANY_STEPS = 1.0  # more than a bias moves in all steps
ROUNDINGS = 10  # times what rounding was measured to do after step 1, where that is more than the bound above
LOSS_MOST = 1e-4  # of the loss: a bound above it would take another batch, or another gradient, for a rounding
OK, UNKNOWN, WRONG = "ok", "unknown", "WRONG"
BIAS = "expert_bias"
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


LOSSES: Final[Mapping[Literal["losses", "indexer_losses", "validation_losses"], str]] = {
    "losses": "",
    "indexer_losses": "indexer ",
    "validation_losses": "validation ",
}
"""What of a record is a loss -> what its label in the table begins with."""


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
        rounding: label of a loss after step 1, or `expert_bias` -> how far torchtitan alone moved it, at most so far, when its weights
            began one rounding away; empty where that was not measured.
    """

    losses: tuple[tuple[str, float, float], ...]
    gradient_errors: tuple[tuple[str, float], ...]
    expert_errors: tuple[tuple[str, float], ...]
    selection_errors: tuple[tuple[str, int, int, float], ...] = ()
    rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_within_bounds(self) -> bool:
        """Whether every loss, every gradient and every expert statistic agrees."""
        return all(verdict == OK for _, verdict in self._verdicts())

    @property
    def is_in_doubt(self) -> bool:
        """Whether all of step 1 agrees and something later does not: the same would come of a rounding that grew."""
        return not self.is_within_bounds and all(verdict == OK for is_first, verdict in self._verdicts() if is_first)

    @property
    def is_undecided(self) -> bool:
        """Whether nothing is wrong, and something may be: rounding moves it by more than a fault would."""
        verdicts = {verdict for _, verdict in self._verdicts()}
        return WRONG not in verdicts and UNKNOWN in verdicts

    def loss_bound(self, label: str) -> float:
        """How far rounding may move a loss, absolute."""
        return max(LOSS_BOUND, ROUNDINGS * self.rounding.get(label, 0.0))

    def expert_bound(self, name: str) -> float:
        """How far rounding may move an expert statistic, absolute: a bias goes by whole steps, so not at all or by any of them."""
        is_moved = self.rounding.get(BIAS, 0.0) > EXPERT_BOUND
        return ANY_STEPS if is_moved and not is_of_first_step(name) else EXPERT_BOUND

    def _verdicts(self) -> Iterator[tuple[bool, str]]:
        """Whether it is of step 1, and what the table says of it."""
        for name, theirs, ours in self.losses:
            yield is_of_first_step(name), judged(abs(theirs - ours), self.loss_bound(name), most_of(theirs))
        for _, error in self.gradient_errors:
            yield True, judged(error, GRADIENT_BOUND)
        for name, error in self.expert_errors:
            yield is_of_first_step(name), judged(error, self.expert_bound(name), EXPERT_BOUND)
        for *_, distance in self.selection_errors:
            yield True, judged(distance, SELECTION_BOUND)


def most_of(loss: float) -> float:
    """The largest difference of a loss that may be called a rounding, absolute."""
    return max(LOSS_BOUND, LOSS_MOST * abs(loss))


def judged(error: float, bound: float, most: float = float("inf")) -> str:
    """What the table says of a difference.

    Args:
        error: the difference; NaN where something was computed that is no number.
        bound: at most what rounding makes of it; infinite where rounding alone may end in NaN.
        most: a bound above it tells nothing.

    Returns:
        `OK`, `WRONG`, or `UNKNOWN` where only a bound that tells nothing holds.
    """
    return OK if error <= min(bound, most) else UNKNOWN if error <= bound or bound == float("inf") else WRONG


def is_of_first_step(name: str) -> bool:
    """Whether a loss or an expert statistic was computed before the weights were first updated."""
    return name in ("1", "indexer 1") or name.endswith("tokens_per_expert")


def compare(stock: Path, composition: Path, rounded: Iterable[Path] = ()) -> Comparison:
    """Read two records.

    Args:
        stock: output folder of torchtitan alone.
        composition: output folder of the composition.
        rounded: output folders of torchtitan alone from weights that are one rounding away from those of `stock`.

    Returns:
        The differences; a parameter that only one run has counts as infinitely wrong.
    """
    ours, theirs = read(composition), read(stock)
    apart = {name: spread - theirs["spread"].get(name, 0.0) for name, spread in ours["spread"].items()}
    return Comparison(
        losses=tuple(_losses(theirs, ours)),
        gradient_errors=_errors(ours["gradients"], theirs["gradients"], _relative, apart),
        expert_errors=_errors(ours["experts"], theirs["experts"], _absolute, {}),
        selection_errors=tuple(
            (name, *_selected_apart(theirs["selections"].get(name), ours["selections"].get(name)))
            for name in {**theirs["selections"], **ours["selections"]}
        ),
        rounding=_moved(theirs, [read(folder) for folder in rounded]),
    )


def read(folder: Path) -> Record:
    """The records of all pipeline stages together."""
    whole = Record(
        losses=[], indexer_losses=[], selections={}, validation_losses=[], gradients={}, spread={}, experts={}
    )
    for path in sorted(folder.glob(RECORDS)):
        part: Record = torch.load(path, weights_only=True)
        assert not whole["gradients"].keys() & part["gradients"].keys(), "two stages hold the same parameter"
        for name in LOSSES:
            whole[name] = part[name]  # alike at every stage
        whole["selections"] |= part["selections"]
        whole["gradients"] |= part["gradients"]
        whole["spread"] |= part["spread"]
        whole["experts"] |= part["experts"]
    return whole


def _losses(theirs: Record, ours: Record) -> Iterator[tuple[str, float, float]]:
    for kind in LOSSES:
        for i, (alone, composed) in enumerate(zip(theirs[kind], ours[kind], strict=True), 1):
            yield f"{LOSSES[kind]}{i}", alone, composed


def _moved(stock: Record, rounded: Sequence[Record]) -> dict[str, float]:
    """How far later numbers of torchtitan alone move with a rounding of its first weights; what has moved once stays moved."""
    moved: dict[str, float] = {}
    for record in rounded:
        so_far = dict.fromkeys(LOSSES.values(), 0.0)
        for label, before, after in _losses(stock, record):
            kind = label.rstrip("0123456789")
            if not is_of_first_step(label):
                apart = abs(after - before)
                so_far[kind] = max(so_far[kind], apart if isfinite(apart) else float("inf"))
                moved[label] = max(moved.get(label, 0.0), so_far[kind])
        for name, bias in record["experts"].items():
            if not is_of_first_step(name):
                moved[BIAS] = max(moved.get(BIAS, 0.0), _absolute(bias, stock["experts"][name]))
    return moved


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
