"""The table of two training runs from the same weights, and the verdict."""

from collections.abc import Sequence

from rich.table import Table

from cp_engine.job.launch.progress import Screen
from cp_engine.job.verify.comparison import EXPERT_BOUND, GRADIENT_BOUND, SELECTION_BOUND, Comparison, judged, most_of

ROWS = 8  # of each kind, the worst first


def show(comparison: Comparison, title: str) -> None:
    """Print a comparison: losses, the worst gradients, experts, and the verdict.

    Args:
        comparison: of two runs.
        title: what was compared.
    """
    console = Screen(width=110, highlight=False)
    console.print(f"{title}\n")
    measured = ("rounding alone",) if comparison.rounding else ()
    losses = _table("step", "loss, alone", "loss, composition", "difference", *measured, "bound", "")
    for label, theirs, ours in comparison.losses:
        error, bound, most = abs(theirs - ours), comparison.loss_bound(label), most_of(theirs)
        alone = (f"{comparison.rounding[label]:.1e}" if label in comparison.rounding else "",) if measured else ()
        cells = (label, f"{theirs:.9f}", f"{ours:.9f}", f"{error:.1e}", *alone, f"<= {_digits(min(bound, most))}")
        losses.add_row(*cells, judged(error, bound, most))
    console.print(losses)
    gradients = [(name, error, judged(error, GRADIENT_BOUND)) for name, error in comparison.gradient_errors]
    _show(console, "gradient of step 1", "relative difference", gradients, GRADIENT_BOUND)
    judgements = [
        (name, x, judged(x, comparison.expert_bound(name), EXPERT_BOUND)) for name, x in comparison.expert_errors
    ]
    _show(console, "experts", "difference", judgements, EXPERT_BOUND)
    if comparison.selection_errors:
        rows = _table("selected keys of step 1", "only alone", "of", "farthest from the cut", "bound", "")
        for name, apart, total, distance in comparison.selection_errors[:ROWS]:
            cells = (name, f"{apart:,}", f"{total:,}", f"{distance:.1e}", f"<= {SELECTION_BOUND:.0e}")
            rows.add_row(*cells, judged(distance, SELECTION_BOUND))
        console.print()
        console.print(rows)
    console.print(f"\n{_conclusion(comparison)}")


def _show(console: Screen, title: str, kind: str, errors: Sequence[tuple[str, float, str]], bound: float) -> None:
    rows = _table(title, kind, "bound", "")
    for name, error, verdict in errors[:ROWS]:
        rows.add_row(name, f"{error:.1e}", f"<= {_digits(bound)}", verdict)
    if errors:
        console.print()
        console.print(rows)
    if len(errors) > ROWS:
        console.print(f"and {len(errors) - ROWS} more, each with no larger difference")


def _conclusion(comparison: Comparison) -> str:
    if comparison.is_within_bounds:
        return "verified"
    if not comparison.is_undecided:
        return "WRONG: the composition does not train as torchtitan does"
    most = max(comparison.rounding[label] for label, *_ in comparison.losses if label in comparison.rounding)
    moved = f"move by up to {most:.1e}" if most < float("inf") else "end in NaN"
    return (
        "NOT DECIDED: step 1 agrees, and later steps cannot tell a fault from a rounding: torchtitan's own losses\n"
        f"{moved} when its weights begin one rounding away. With a smaller titan.optimizer.lr they can."
    )


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 or not name else "right", no_wrap=True)
    return table


def _digits(bound: float) -> str:
    return f"{bound:.0e}" if float(f"{bound:.0e}") == bound else f"{bound:.1e}"
