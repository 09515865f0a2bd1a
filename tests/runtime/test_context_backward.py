"""Backward and recompute on one rank repeat the plan of their forward, wherever they run; see two_layers."""

from contextlib import ExitStack

import pytest
import torch

from cp_engine.errors import CallError
from tests.runtime.two_layers import PLAIN, Model, assert_same, engine, expected, results, tokens


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("place", ["inside", "after"])
def test_backward_repeats_the_plan_of_its_forward(mode: str, place: str) -> None:
    model, cp, x = Model(mode=mode), engine(1), tokens()
    with cp.context(model):
        out = model(x)
        if place == "inside":
            out.square().sum().backward()
    if place == "after":
        out.square().sum().backward()
    assert x.grad is not None
    found = [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert_same(found, results(expected(model, 1)))


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_backward_of_a_plain_forward_inside_a_context_stays_plain(mode: str) -> None:
    model, other, x = Model(mode=mode), Model(5), tokens()
    out = model(x)
    with engine(1).context(model, other):
        out.square().sum().backward()
        other(tokens())
    assert x.grad is not None
    found = [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert_same(found, results(expected(model, PLAIN)))


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("under", ["no plan", "another plan"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_backward_after_an_evaluation_repeats_the_plan_of_its_forward(mode: str, under: str) -> None:
    model, cp, x = Model(mode=mode), engine(1), tokens()
    with cp.context(model):
        out = model(x)
    model.eval()
    with torch.no_grad(), ExitStack() as stack:
        if under == "another plan":
            stack.enter_context(engine(3).context(model))
        model(tokens())
    model.train()
    out.square().sum().backward()
    assert x.grad is not None
    assert_same([x.grad], [results(expected(model, 1))[1]])


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_backward_of_a_model_in_eval_mode_repeats_the_plan_of_its_forward(mode: str) -> None:
    model, cp, x = Model(mode=mode).eval(), engine(1), tokens()
    with cp.context(model):
        out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    assert_same([x.grad], [results(expected(model, 1))[1]])


def plain_with_graph(model: Model) -> list[object]:
    return [model(tokens())]


def plain_without_graph(model: Model) -> list[object]:
    with torch.no_grad():
        return [model(tokens())]


def under_another_engine(model: Model) -> list[object]:
    other = engine(3)
    with other.context(model):
        return [other, model(tokens())]


@pytest.mark.parametrize(
    ("between", "mode"),
    [
        (plain_with_graph, "reentrant"),
        (plain_without_graph, "reentrant"),
        (under_another_engine, "reentrant"),
        (plain_with_graph, "non-reentrant"),
        (under_another_engine, "non-reentrant"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_backward_whose_plan_cannot_be_told_is_refused_instead_of_guessed(between, mode: str) -> None:
    model, cp = Model(mode=mode), engine(1)
    with cp.context(model):
        out = model(tokens())
    kept = between(model)  # a graph or an engine that is still there
    with pytest.raises(CallError, match="a checkpoint recomputes a call of Attention, which ran under 2 engines"):
        out.square().sum().backward()
    del kept


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_backwards_in_between_let_a_module_run_under_several_plans(mode: str) -> None:
    model = Model(mode=mode)
    for left in (1, 3, 1):
        x, cp = tokens(), engine(left)
        with cp.context(model):
            model(x).square().sum().backward()
        cp.close()
        assert x.grad is not None
        assert_same([x.grad], [results(expected(model, left))[1]])


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_recompute_after_exit_is_not_counted_as_a_call(mode: str) -> None:
    model, cp = Model(mode=mode), engine(1)
    with cp.context(model):
        out = model(tokens())
    with pytest.raises(CallError, match="intercepted"), cp.context(model):
        out.sum().backward()
