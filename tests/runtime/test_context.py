"""The context manager on one rank: what it attaches to, and that attention is plain after every exit; see two_layers."""

from contextlib import ExitStack

import pytest
from torch import nn

from cp_engine.errors import CallError
from tests.runtime.two_layers import PLAIN, Model, assert_same, engine, expected, qkv, results, sees, tokens


@pytest.mark.quick
def test_attention_goes_through_the_plan_inside_and_nowhere_else() -> None:
    model, cp = Model(), engine(1)
    assert sees(model, PLAIN)
    with cp.context(model) as entered:
        assert entered is cp
        assert sees(model, 1)
    assert sees(model, PLAIN)


def test_gradients_are_those_of_the_plan() -> None:
    model = Model()
    with engine(1).context(model):
        found = results(model)
    assert_same(found, results(expected(model, 1)))


@pytest.mark.parametrize("error", [RuntimeError("from the model"), KeyboardInterrupt()])
def test_exception_inside_leaves_plain_attention(error: BaseException) -> None:
    model, cp = Model(), engine(1)
    with pytest.raises(type(error)) as caught, cp.context(model):
        raise error
    assert caught.value is error  # and not that nothing was intercepted
    assert sees(model, PLAIN)
    with cp.context(model):
        assert sees(model, 1)


def test_exception_of_an_attention_call_leaves_plain_attention() -> None:
    model, cp = Model(), engine(1)
    with pytest.raises(CallError), cp.context(model):
        model(tokens()[:, :5])
    assert sees(model, PLAIN)


def test_error_while_entering_attaches_nothing() -> None:
    model, cp = Model(), engine(1)
    with pytest.raises(CallError), cp.context(model, nn.Linear(2, 2)):
        pass
    assert sees(model, PLAIN)


@pytest.mark.quick
def test_nested_contexts_the_innermost_counts() -> None:
    model, outer, inner = Model(), engine(1), engine(3)
    with outer.context(model):
        with inner.context(model):
            assert sees(model, 3)
        assert sees(model, 1)
        with pytest.raises(ValueError, match="inside"), inner.context(model):
            raise ValueError("inside")
        assert sees(model, 1)
    assert sees(model, PLAIN)


def test_context_may_be_entered_again() -> None:
    model, cp = Model(), engine(1)
    for _ in range(3):
        with cp.context(model):
            assert sees(model, 1)
        assert sees(model, PLAIN)
    with cp.context(model):
        with cp.context(model):
            assert sees(model, 1)
        assert sees(model, 1)
    assert sees(model, PLAIN)


def test_two_models_two_presets_side_by_side() -> None:
    one, two = Model(1), Model(2)
    with engine(1, "ulysses").context(one), engine(3, "allgather_kv").context(two):
        assert sees(one, 1)
        assert sees(two, 3)
        assert sees(one, 1)
    assert sees(one, PLAIN) and sees(two, PLAIN)


def test_contexts_may_be_left_in_another_order_than_nested() -> None:
    one, two = Model(1), Model(2)
    first, second = ExitStack(), ExitStack()
    first.enter_context(engine(1).context(one))
    second.enter_context(engine(3).context(two))
    assert sees(one, 1) and sees(two, 3)
    first.close()
    assert sees(one, PLAIN) and sees(two, 3)
    second.close()
    assert sees(two, PLAIN)


def test_contexts_of_one_model_may_be_left_in_another_order_than_nested() -> None:
    model, first, second = Model(), ExitStack(), ExitStack()
    first.enter_context(engine(1).context(model))
    second.enter_context(engine(3).context(model))
    assert sees(model, 3)
    first.close()
    assert sees(model, 3)  # the one that is left
    second.close()
    assert sees(model, PLAIN)


def test_one_context_for_two_models() -> None:
    one, two = Model(1), Model(2)
    with engine(1).context(one, two):
        assert sees(one, 1) and sees(two, 1)
    assert sees(one, PLAIN) and sees(two, PLAIN)


def test_other_instances_are_left_alone() -> None:
    one, two = Model(1), Model(2)
    with engine(1).context(one):
        assert sees(two, PLAIN)
        assert sees(one, 1)


def test_attention_module_itself_may_be_given() -> None:
    model = Model()
    with engine(1).context(*model.attention):
        assert sees(model, 1)


def test_no_attention_call_inside_is_an_error() -> None:
    model, cp = Model(), engine(1)
    with pytest.raises(CallError, match="no attention call of Model was intercepted"), cp.context(model):
        pass
    assert sees(model, PLAIN)


def test_call_of_ones_own_is_no_interception() -> None:
    model, cp = Model(), engine(1)
    with pytest.raises(CallError, match="no attention call of Model was intercepted"), cp.context(model):
        cp.call(*qkv())


def test_call_of_another_model_is_no_interception() -> None:
    one, two, cp = Model(1), Model(2), engine(1)
    with pytest.raises(CallError, match="no attention call of Model was intercepted"), cp.context(one):
        with cp.context(two):
            assert sees(two, 1)


def test_calls_of_an_earlier_block_do_not_count() -> None:
    model, cp = Model(), engine(1)
    with cp.context(model):
        model(tokens())
    with pytest.raises(CallError, match="intercepted"), cp.context(model):
        pass


def test_module_without_attention_is_an_error() -> None:
    with pytest.raises(CallError, match="Linear has no attention module") as caught, engine(1).context(nn.Linear(2, 2)):
        pass
    assert "cp_engine.Attention" in str(caught.value)
