"""Runs that go wrong on one rank, in every way that is known: the end says what happened and on which rank, and nothing is left."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Result

SMALL = ("model=llama3", "titan.experimental.custom_import=tests.faults", "titan.training.seq_len=64")
OTHER_TEXT = "from cp_engine.data import rows; e = rows.encode; rows.encode = lambda text: e(text.replace('e', 'o'))"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault and how the run ends.

    Args:
        at: the place, of those of tests/faults.py.
        fault: a line of Python.
        says: what the error says, of a run of N ranks in which the last one is at fault.
        more: arguments.
        step: of the fault.
    """

    at: str
    fault: str
    says: tuple[str, ...]
    more: tuple[str, ...] = ()
    step: int = 2


NAN = "model.{where}.register_forward_hook(lambda m, i, o: o * float('nan'))"
CASES = {
    "nan in a module": Case(
        at="forward",
        fault=NAN.format(where="tok_embeddings"),
        says=("loss  is nan at step 2; rank {last} had it first", "where  tok_embeddings (Embedding); its inputs"),
    ),
    "nan in a module after attention": Case(
        at="forward",
        fault=NAN.format(where="layers['1'].feed_forward.w2"),
        says=(
            "loss  is nan at step 2; rank {last} had it first",
            "where  layers.1.feed_forward.w2 (Linear); its inputs",
        ),
    ),
    "infinite weight": Case(
        at="forward",
        fault="model.layers['0'].feed_forward.w1.weight.data.fill_(float('inf'))",
        says=("at step 2; rank {last} had it first", "where  layers.0.feed_forward.w1.weight: weights that the step"),
    ),
    "other text": Case(
        at="import",
        fault=OTHER_TEXT,
        says=("data  of step ", "is not the same on the ranks", "which each attends to a part"),
        step=1,
    ),
    "other weights": Case(
        at="start",
        fault="model.layers['0'].feed_forward.w1.weight.data.add_(1e-4)",
        says=(
            "weights  differ between the ranks",
            "rank {last} has other ones",
            "first  layers.0.feed_forward.w1.weight, of 1",
        ),
        more=("titan.parallelism.data_parallel_replicate_degree={ranks}", "cp=none"),
        step=1,
    ),
}
QUICK = ("nan in a module after attention", "other text", "other weights")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_a_fault_ends_the_run_and_is_named(
    launch: Callable[..., Result], tmp_path: Path, name: str, ranks: int
) -> None:
    case, last = CASES[name], ranks - 1
    fault = {"FAULT_RANK": str(last), "FAULT_STEP": str(case.step), "FAULT_AT": case.at, "FAULT": case.fault}
    more = [argument.format(ranks=ranks) for argument in case.more]
    result = launch(*(["cp=ulysses", f"cp.degree={ranks}"] if "cp=none" not in more else []), *SMALL, *more, **fault)
    assert result.code == 1, result.out
    first = result.err.partition("\n")[0]
    assert first == f"RankFailure: rank {last} of {ranks} ended the run", result.err
    for text in case.says:
        assert text.format(last=last) in result.err, result.err
    assert not list(tmp_path.glob("**/*.end.json"))
