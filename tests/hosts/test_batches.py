"""What a job brings of its own beside tokens: a loss function, whose values must add up, and companions, which must be declared."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, mse_loss

from cp_engine.errors import CallError
from cp_engine.hosts.torchtitan.companions import Declared, to_cut
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.hosts.torchtitan.text.sources import check
from cp_engine.job import train
from cp_engine.job.launch import start
from cp_engine.job.launch.failures import RankFailure
from tests.conftest import Result
from tests.jobs import configured

with cpu_shims():
    from cp_engine.hosts.torchtitan.loss import SummedLoss

ROWS, LENGTH, WORDS = 2, 24, 11
Loss = Callable[[Tensor, Tensor], Tensor]


# --- loss functions ---


def summed(predictions: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(predictions.flatten(0, 1), labels.flatten(), reduction="sum")


def mean(predictions: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(predictions.flatten(0, 1), labels.flatten())


def smoothed_with_z(predictions: Tensor, labels: Tensor) -> Tensor:
    smooth = cross_entropy(predictions.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
    return smooth + 1e-2 * (predictions.logsumexp(-1).square() * (labels != -100)).sum()


def mean_of_each_row(predictions: Tensor, labels: Tensor) -> Tensor:
    nll = -log_softmax(predictions, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    seen = labels != -100
    return ((nll * seen).sum(1) / seen.sum(1).clamp(min=1)).sum()


def with_a_constant(predictions: Tensor, labels: Tensor) -> Tensor:
    return summed(predictions, labels) + 3.0


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    labels = torch.randint(WORDS, (ROWS, LENGTH))
    labels[:, : LENGTH // 2] = -100
    return torch.randn(ROWS, LENGTH, WORDS).to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [summed, smoothed_with_z])
def test_loss_that_adds_up_is_taken_as_it_is(loss: Loss, dtype: torch.dtype) -> None:
    predictions, labels = batch(dtype)
    assert torch.equal(SummedLoss(loss, [0, 1])(predictions, labels), loss(predictions, labels))


@pytest.mark.parametrize(
    ("loss", "dims"),
    [(mean, [1]), (mean, [0]), (mean_of_each_row, [1]), (with_a_constant, [0]), (partial(mean), [1])],
)
def test_loss_that_does_not_add_up_is_refused_by_name_with_both_numbers(loss: Loss, dims: list[int]) -> None:
    predictions, labels = batch()
    with pytest.raises(CallError, match=r"mean|constant") as caught:
        SummedLoss(loss, dims)(predictions, labels)
    text = str(caught.value)
    assert "tests.hosts.test_batches" in text and "sum over two halves" in text and 'try   reduction="sum"' in text


def test_mean_of_each_row_is_right_where_rows_alone_are_dealt() -> None:
    predictions, labels = batch()
    assert SummedLoss(mean_of_each_row, [0])(predictions, labels) == mean_of_each_row(predictions, labels)


@pytest.mark.parametrize("dims", [[], [0]])
def test_one_rank_and_one_row_are_left_alone(dims: list[int]) -> None:
    predictions, labels = batch()
    assert SummedLoss(mean, dims)(predictions[:1], labels[:1]) == mean(predictions[:1], labels[:1])


def test_loss_is_compared_at_the_first_batch_with_targets_that_can_tell_and_then_no_more() -> None:
    predictions, labels = batch()
    calls = []

    def noted(predictions: Tensor, labels: Tensor) -> Tensor:
        calls.append(labels.shape[1])
        return summed(predictions, labels)

    loss = SummedLoss(noted, [1])
    loss(predictions, torch.full_like(labels, -100))
    loss(predictions, labels)
    loss(predictions, labels)
    assert calls == [LENGTH, 12, 6, 6, LENGTH, LENGTH]


def test_comparing_leaves_gradients_random_numbers_and_compiled_graphs_alone() -> None:
    predictions, labels = batch()
    predictions.requires_grad_()
    found = SummedLoss(torch.compile(summed, backend="eager"), [0, 1])
    state = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(found(predictions, labels), predictions)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradient, torch.autograd.grad(summed(predictions, labels), predictions)[0])


def test_loss_of_predictions_beside_others_is_compared_too() -> None:
    predictions, labels = batch()

    def both(found: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return summed(found[0], labels) + mse_loss(found[1], torch.zeros_like(found[1]), reduction="sum")

    SummedLoss(both, [1])((predictions, predictions[..., 0]), labels)
    with pytest.raises(CallError, match="both"):  # a term that every rank has whole
        SummedLoss(both, [1])((predictions, torch.ones(3)), labels)


def test_users_own_mean_is_refused_in_the_ranks_of_a_job(tmp_path: Path) -> None:
    own = ("model=llama3", "++titan.experimental.custom_import=tests.mean_loss")
    config = configured(tmp_path, "cp=allgather_kv", *own)
    with pytest.raises(RankFailure, match=r"tests\.mean_loss\.mean_over_tokens"):
        start.run_ranks(train.run, config, tmp_path, ranks=2)


# --- companions ---


def companions(**tensors: Tensor) -> dict[str, Tensor]:
    return tensors


def test_what_is_declared_is_cut_and_what_has_no_sequence_is_whole() -> None:
    found = companions(a=torch.zeros(2, 32), b=torch.zeros(2, 32, 3), table=torch.zeros(4, 32), scale=torch.zeros(2))
    assert to_cut({**found, "ids": {"pad": 0}}, 32, Declared(cut=["a", "b"], whole=["table"])) == ["a", "b"]


def test_companion_that_nobody_declared_is_refused_with_both_ways_out() -> None:
    found = companions(feat=torch.zeros(2, 32), bias=torch.zeros(32), fine=torch.zeros(2, 16))
    with pytest.raises(CallError) as caught:
        to_cut(found, 32, Declared(cut=["weights"], whole=["table"]))
    feat, bias = caught.value.problems
    assert feat.key == "batch.feat" and feat.tries == ("'data.cut=[weights,feat]'", "'data.whole=[table,feat]'")
    assert bias.key == "batch.bias" and bias.tries == ("'data.whole=[table,bias]'",)


@pytest.mark.parametrize("shape", [(2, 16), (32,), (2, 3, 32)])
def test_companion_to_cut_with_another_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CallError, match=r"batch\.feat"):
        to_cut(companions(feat=torch.zeros(*shape)), 32, Declared(cut=["feat"]))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"cut": ["feat"]}, "text that is read as bytes has no companions"),
        ({"dataset": "c4", "cut": ["feat"], "whole": ["feat"]}, "names feat, and so does data.cut"),
        ({"dataset": "c4", "whole": ["positions"]}, "names positions, which is always cut with the tokens"),
        ({"dataset": "c4", "cut": "feat"}, "must be a list of names, not 'feat'"),
    ],
)
def test_declarations_without_effect_or_sense_are_refused_before_a_start(named: dict[str, object], said: str) -> None:
    assert said in "\n".join(p.what for p in check({"data": {"path": None, "field": "text", **named}}))


def test_declared_names_are_keys_of_the_configuration(command: Callable[..., Result]) -> None:
    shown = command("--cfg", "job", "data.cut=[feat]")
    assert shown.code == 0 and "cut:\n  - feat\n" in shown.out
    refused = command("cp=none", "mode=explain", "data.cut=feat")
    assert refused.code == 1 and "data.cut" in refused.err
