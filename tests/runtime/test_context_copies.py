"""Copies, state dicts, closing and wrappers of modules that an engine is attached to; see two_layers."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from cp_engine import Attention
from cp_engine.errors import CallError
from tests.runtime.two_layers import (
    HEAD_DIM,
    HEADS,
    PLAIN,
    SEQUENCE,
    Model,
    assert_same,
    attributes,
    engine,
    expected,
    results,
    sees,
    tokens,
)


def test_state_dict_is_unchanged_by_attaching() -> None:
    model, cp = Model(), engine(1)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with cp.context(model):
        model(tokens())
        inside = model.state_dict()
        assert list(inside) == list(before)
        Model(3).load_state_dict(inside)
        model.load_state_dict(before)
        assert sees(model, 1)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


@pytest.mark.parametrize("when", ["inside", "after"])
def test_copy_of_an_attached_model_is_unattached_and_independent(when: str) -> None:
    model, cp = Model(), engine(1)
    with cp.context(model):
        model(tokens())
        copy = deepcopy(model) if when == "inside" else None
        if copy is not None:
            assert sees(copy, PLAIN)
            assert sees(model, 1)
    copy = copy or deepcopy(model)
    assert sees(copy, PLAIN)
    with torch.no_grad():
        copy.qkv[0].weight.add_(1.0)
    assert sees(copy, PLAIN) and sees(model, PLAIN)  # each with its own weights
    with engine(3).context(copy):
        assert sees(copy, 3) and sees(model, PLAIN)
    with cp.context(model):
        assert sees(model, 1) and sees(copy, PLAIN)


@pytest.mark.quick
def test_copy_of_one_attention_module_is_unattached() -> None:
    model = Model()
    with engine(1).context(model):
        model(tokens())
        copy = deepcopy(model.attention[0])
        q = k = v = torch.randn(1, HEADS, SEQUENCE, HEAD_DIM, dtype=torch.float64)
        torch.testing.assert_close(copy(q, k, v), Attention()(q, k, v))
        assert not torch.allclose(model.attention[0](q, k, v), copy(q, k, v))


def test_close_leaves_instances_and_classes_as_before() -> None:
    model, cp = Model(), engine(1)
    instances, own, base = attributes(model), dict(Attention.__dict__), dict(nn.Module.__dict__)
    functional = dict(torch.nn.functional.__dict__)
    with cp.context(model):
        model(tokens())
    cp.close()
    assert attributes(model) == instances
    assert dict(Attention.__dict__) == own and dict(nn.Module.__dict__) == base
    assert dict(torch.nn.functional.__dict__) == functional
    assert sees(model, PLAIN)


def test_classes_and_functions_are_untouched_inside() -> None:
    model = Model()
    own, functional = dict(Attention.__dict__), dict(torch.nn.functional.__dict__)
    with engine(1).context(model):
        model(tokens())
        assert dict(Attention.__dict__) == own and dict(torch.nn.functional.__dict__) == functional


def test_close_of_one_engine_keeps_another_that_is_active() -> None:
    model, first, second = Model(), engine(1), engine(3)
    with first.context(model):
        assert sees(model, 1)
    with second.context(model):
        first.close()
        assert sees(model, 3)
    second.close()
    assert "forward" not in model.attention[0].__dict__


def test_engine_can_be_entered_again_after_another_was_closed() -> None:
    model, first, second = Model(), engine(1), engine(3)
    for cp, left in ((first, 1), (second, 3)):
        with cp.context(model):
            assert sees(model, left)
    first.close()
    with second.context(model):
        assert sees(model, 3)
    second.close()
    assert "forward" not in model.attention[0].__dict__


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_backward_survives_the_close_of_another_engine(mode: str) -> None:
    model, first, second, x = Model(mode=mode), engine(3), engine(1), tokens()
    with first.context(model):
        model(tokens())
    with second.context(model):
        out = model(x)
    first.close()
    out.square().sum().backward()
    assert x.grad is not None
    assert_same([x.grad], [results(expected(model, 1))[1]])


def test_close_inside_a_context_is_refused_and_works_after_it() -> None:
    model, cp = Model(), engine(1)
    with cp.context(model):
        with pytest.raises(CallError, match="context is still open"):
            cp.close()
        assert sees(model, 1)
    cp.close()
    assert "forward" not in model.attention[0].__dict__
    assert sees(model, PLAIN)


def test_own_wrapper_of_the_user_stays_underneath() -> None:
    model, cp = Model(), engine(1)
    calls = []
    plain = model.attention[0].forward

    def own(q: Tensor, k: Tensor, v: Tensor, **named: object) -> Tensor:
        calls.append(1)
        return plain(q, k, v, **named) * 2.0

    model.attention[0].forward = own
    doubled = model(tokens())
    with cp.context(model):
        assert sees(model, 1)  # the engine takes the call
    torch.testing.assert_close(model(tokens()), doubled)  # inert: the user's own runs
    cp.close()
    assert model.attention[0].forward is own
    torch.testing.assert_close(model(tokens()), doubled)
    assert len(calls) == 3
