"""The context manager on one rank: what it attaches to, and that everything is as before after every exit.

Whether the engine ran is seen in the numbers: its plans carry a mask that passes for causal and lets a query see only its last
few keys, so that each plan's result differs from plain attention and from each other's.
"""

import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_engine
from cp_engine import Attention
from cp_engine.algebra.mask import Band, Mask, mask_of
from cp_engine.errors import CallError, ConfigError, CPError
from cp_engine.job.verify import reference
from cp_engine.runtime.context import ContextParallel
from cp_engine.runtime.sparse_attention import SparseAttention
from tests.helpers import plan_of, small

SEQUENCE, HEADS, HEAD_DIM = 12, 2, 4
SHAPE = small(sequence=SEQUENCE, heads=HEADS, head_dim=HEAD_DIM, dtype="float64")
PLAIN = SEQUENCE
BOUND = 1e-12


class Model(nn.Module):
    """Two layers with attention modules that an engine can attach to."""

    def __init__(self, seed: int = 0, mode: str = "none") -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = HEADS * HEAD_DIM
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, dtype=torch.float64) for _ in range(2))
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.mode = mode

    def layer(self, x: Tensor, i: int) -> Tensor:
        q, k, v = self.qkv[i](x).unflatten(2, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return x + self.attention[i](q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            if self.mode == "none":
                x = self.layer(x, i)
            else:
                x = checkpoint(self.layer, x, i, use_reentrant=self.mode == "reentrant")
        return x


class Disguised(Mask):
    """A mask that calls which say `causal` are accepted for, whatever it shows."""

    def same_as(self, other: Mask) -> bool:
        return mask_of("causal", self.size).same_as(other)


def engine(left: int, preset: str = "none") -> ContextParallel:
    """An engine of one rank whose queries see `left` keys before their own."""
    band = Band(q0=0, q1=SEQUENCE, k0=0, k1=SEQUENCE, low=0, high=left)
    mask = Disguised(kind="causal", bands=(band,), size=SEQUENCE)
    return ContextParallel(plan_of(preset, shape=SHAPE, mask=mask, degree=1))


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, SEQUENCE, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64).requires_grad_()


class Windowed(Attention):
    """The reference's attention in the module's place."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        seen = reference.visible({"kind": "window", "left": self.left, "right": 0}, SEQUENCE)
        return reference.attention(q, k, v, seen, HEAD_DIM**-0.5)


def expected(model: Model, left: int) -> Model:
    """The same weights with the attention that an engine with `left` computes."""
    other = Model(mode="none")
    other.load_state_dict(model.state_dict())
    other.attention = nn.ModuleList(Windowed(left) for _ in range(2))
    return other


def results(model: Model) -> list[Tensor]:
    """Output, and gradients of the input and of every weight."""
    x = tokens()
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def sees(model: Model, left: int) -> bool:
    """Whether the model's attention is that of an engine with `left` (PLAIN: no engine) and of no other."""
    with torch.no_grad():
        found = model(tokens())
        errors = {n: float((found - expected(model, n)(tokens())).abs().max()) for n in (1, 3, PLAIN)}
    return {n for n, error in errors.items() if error <= BOUND} == {left}


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) <= BOUND


def attributes(model: nn.Module) -> list[dict[str, object]]:
    return [dict(m.__dict__) for m in model.modules()]


# ------------------------------------------------------------------ entering and leaving
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


# ------------------------------------------------------------------ backward after exit
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


# ------------------------------------------------------------------ copies and states
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


# ------------------------------------------------------------------ calls
def qkv(
    dtype: torch.dtype = torch.float64, kv_heads: int = HEADS, sequence: int = SEQUENCE, v_head_dim: int = HEAD_DIM
) -> list[Tensor]:
    sizes = ((HEADS, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, v_head_dim))
    return [torch.ones(1, heads, sequence, width, dtype=dtype) for heads, width in sizes]


REFUSED: list[tuple[Callable[[Attention], Tensor], list[str], list[str]]] = [
    (
        lambda a: a(*qkv(), attn_mask=torch.ones(2, 2)),
        ["call.attn_mask"],
        ["attn_mask", "scale, is_causal, enable_gqa, mask, sinks, dropout_p"],
    ),
    (
        lambda a: a(*qkv(), softcap=30.0, score_mod=max, window_size=4),
        ["call.softcap", "call.score_mod", "call.window_size"],
        ["softcap=30.0", "score_mod=<built-in function max>", "window_size=4"],
    ),
    (lambda a: a(*qkv(), dropout_p=0.1), ["call.dropout_p"], ["is 0.1", "drops no attention weights", "dropout_p=0.0"]),
    (lambda a: a(*qkv(), dropout_p=0.1, sinks=3), ["call.sinks", "call.dropout_p"], ["is 0.1", "a tensor, not 3"]),
    (lambda a: a(*qkv(), sinks=torch.zeros(2)), ["call.sinks"], ["is carried", "cp.steps.attend.sinks=true"]),
    (lambda a: a(*qkv(), mask=3), ["call.mask"], ["a mask or its configuration, not 3"]),
    (lambda a: a(*qkv(), mask="cuasal"), ["call.mask.kind"], ["'cuasal'", "causal, window, prefix"]),
    (lambda a: a(*qkv(), mask={"kind": "window"}), ["call.mask.left", "call.mask.right"], ["window needs it"]),
    (lambda a: a(*qkv(), mask="full"), ["call.mask"], ["is full", "proved for the mask causal"]),
    (
        lambda a: a(*qkv(), mask={"kind": "document", "starts": [0, 5]}),
        ["call.mask"],
        ["is document", "proved for the mask causal"],
    ),
    (lambda a: a(*qkv(), None), ["call"], ["4 positional"]),
    (lambda a: a(*qkv()[:2]), ["call.v"], ["missing"]),
    (lambda a: a(*qkv(), scale="0.5"), ["call.scale"], ["number", "'0.5'"]),
    (lambda a: a(*qkv(sequence=5)), ["call.q", "call.k", "call.v"], ["[1, 2, 5, 4]", "[1, 2, 12, 4]"]),
    (lambda a: a(*qkv(v_head_dim=3)), ["call.v"], ["[1, 2, 12, 3]", "[1, 2, 12, 4]"]),
    (lambda a: a(*qkv(kv_heads=1), enable_gqa=True), ["call.k", "call.v"], ["[1, 1, 12, 4]", "[1, 2, 12, 4]"]),
    (lambda a: a(*qkv(torch.float32)), ["call.q", "call.k", "call.v"], ["float32", "float64"]),
    (lambda a: a(*qkv(), is_causal=False), ["call.is_causal"], ["False", "causal"]),
    (lambda a: a(torch.ones(2), *qkv()[1:]), ["call.q"], ["[2]", "[2, 2, 12, 4]"]),
]


@pytest.mark.parametrize(("call", "keys", "facts"), REFUSED, ids=[f"{i}-{row[1][0]}" for i, row in enumerate(REFUSED)])
def test_call_that_the_plan_is_not_for_is_refused(
    call: Callable[[Attention], Tensor], keys: list[str], facts: list[str]
) -> None:
    attention = Attention()
    with pytest.raises(CallError) as caught, engine(1).context(attention):
        call(attention)
    found = [p.key for p in caught.value.problems]
    assert found[: len(keys)] == keys
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


def test_grouped_call_must_say_so() -> None:
    attention = Attention()
    cp = ContextParallel(
        plan_of("none", shape=small(sequence=SEQUENCE, heads=2, kv_heads=1, head_dim=4, dtype="float64"))
    )
    with cp.context(attention):
        attention(*qkv(kv_heads=1), enable_gqa=True)
        with pytest.raises(CallError, match=r"call\.enable_gqa"):
            attention(*qkv(kv_heads=1))


def test_full_mask_needs_a_call_that_is_not_causal() -> None:
    attention, cp = Attention(), ContextParallel(plan_of("none", shape=SHAPE, mask="full"))
    with cp.context(attention):
        torch.testing.assert_close(attention(*qkv(), is_causal=False), qkv()[2])
        with pytest.raises(CallError, match=r"call\.is_causal"):
            attention(*qkv())


def test_scale_of_the_call_is_used() -> None:
    attention, cp = Attention(), engine(PLAIN)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, HEADS, SEQUENCE, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    seen = reference.visible({"kind": "causal"}, SEQUENCE)
    with cp.context(attention):
        for scale in (0.1, 2.0, 1):
            assert (
                float((attention(q, k, v, scale=scale) - reference.attention(q, k, v, seen, scale)).abs().max())
                <= BOUND
            )


# ------------------------------------------------------------------ masks and sinks of calls
def of_mask(mask: Mapping[str, object], *overrides: str) -> ContextParallel:
    return ContextParallel(plan_of("none", *overrides, shape=SHAPE, mask=mask))


def random_qkv(batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = dict.fromkeys("qkv", (batch, HEADS, SEQUENCE, HEAD_DIM))
    made = {n: torch.randn(size, generator=generator, dtype=torch.float64) for n, size in sizes.items()}
    return {n: x.requires_grad_() for n, x in made.items()}


def assert_attends(attention: Attention, shown: Mapping[str, object], **carried: object) -> None:
    """Out and gradients of a call are those of the reference with the mask that is shown."""
    tensors = random_qkv()
    sinks = carried.get("sinks")
    leaves = {**tensors, **({"sinks": sinks} if isinstance(sinks, Tensor) else {})}
    dout = torch.linspace(-1, 1, tensors["q"].numel(), dtype=torch.float64).view_as(tensors["q"])
    out = attention(**tensors, **carried)
    found = [out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)]
    wanted = reference.gradients_of(leaves, dout, reference.visible(shown, SEQUENCE), HEAD_DIM**-0.5)
    assert_same(found, list(wanted.values()))


WINDOW = {"kind": "window", "left": 3, "right": 2}
DOCUMENTS = {"kind": "document", "starts": [0, 1, 5, 11], "causal": False, "left": 2}
BOTH = {"kind": "both", "of": [{"kind": "causal"}, WINDOW]}


@pytest.mark.parametrize(
    "mask", [WINDOW, DOCUMENTS, BOTH, {"kind": "prefix", "length": 4}, {"kind": "block", "size": 5}]
)
def test_call_carries_the_mask_of_the_plan_as_configuration_or_as_a_mask(mask: dict[str, object]) -> None:
    attention, cp = Attention(), of_mask(mask)
    with cp.context(attention):
        for carried in (mask, mask_of(mask, SEQUENCE), cp.plan.mask):
            assert_attends(attention, mask, mask=carried)
            assert_attends(attention, mask, mask=carried, is_causal=False)  # the mask says it


@pytest.mark.parametrize(
    ("plan", "carried"),
    [
        (BOTH, {"kind": "window", "left": 3, "right": 0}),
        ({"kind": "causal"}, {"kind": "document", "starts": [0]}),
        ({"kind": "document", "starts": [0], "causal": False}, "full"),
        ({"kind": "document", "starts": [0, 4, 8]}, {"kind": "block", "size": 4}),
        ({"kind": "window", "left": SEQUENCE, "right": 0}, "causal"),
    ],
)
def test_masks_that_show_the_same_pairs_are_the_same(plan: dict[str, object], carried: dict[str, object] | str) -> None:
    attention = Attention()
    with of_mask(plan).context(attention):
        assert_attends(attention, plan, mask=carried)


@pytest.mark.parametrize(
    ("plan", "carried", "key", "said"),
    [
        (WINDOW, {}, "call.is_causal", "is True, and the plan was proved for the mask window"),
        (WINDOW, {"is_causal": False}, "call.is_causal", "is False, and the plan was proved for the mask window"),
        (WINDOW, {"mask": "causal"}, "call.mask", "is causal, and the plan was proved for the mask window"),
        (
            WINDOW,
            {"mask": {**WINDOW, "left": 4}},
            "call.mask",
            "is window (left 4, right 2), and the plan was proved for the mask window (left 3, right 2)",
        ),
        (
            DOCUMENTS,
            {"mask": {**DOCUMENTS, "starts": [0, 1, 5, 10]}},
            "call.mask",
            "is document (4 documents, not causal, left 2) with other boundaries, and the plan was proved for the mask document",
        ),
        (DOCUMENTS, {"mask": {**DOCUMENTS, "causal": True}}, "call.mask", "is document"),
        (WINDOW, {"mask": mask_of(WINDOW, SEQUENCE + 1)}, "call.mask", f"{SEQUENCE + 1} positions"),
    ],
)
def test_call_with_another_mask_than_the_plans_is_refused(
    plan: dict[str, object], carried: dict[str, object], key: str, said: str
) -> None:
    attention = Attention()
    with pytest.raises(CallError) as caught, of_mask(plan).context(attention):
        attention(**random_qkv(), **carried)
    assert [p.key for p in caught.value.problems] == [key]
    assert said in str(caught.value)


def test_documents_of_each_call_are_those_that_are_computed() -> None:
    attention, cp = Attention(), of_mask({"kind": "document"})
    assert cp.plan.is_mask_from_call
    with cp.context(attention):
        for starts in ([0, 1, 5, 11], [0, 6], [0, 1, 5, 11], [0]):
            mask = {"kind": "document", "starts": starts}
            assert_attends(attention, mask, mask=mask)
            assert_attends(attention, mask, mask=mask_of(mask, SEQUENCE))
        assert_attends(attention, {"kind": "causal"})  # one document


def test_a_mask_of_a_call_that_shows_more_than_the_plans_is_refused() -> None:
    windows = {"kind": "document", "left": 3}
    attention, cp = Attention(), of_mask(windows)
    with cp.context(attention):
        inside = {"kind": "document", "starts": [0, 5], "left": 2}
        assert_attends(attention, inside, mask=inside)
        for carried in ({"mask": {"kind": "document", "starts": [0, 5]}}, {}, {"is_causal": False}):
            with pytest.raises(
                CallError, match=r"call\.mask  is .*, and shows what the mask of the plan hides: document"
            ):
                attention(**random_qkv(), **carried)


def test_backward_repeats_the_documents_of_its_own_call() -> None:
    attention, cp = Attention(), of_mask({"kind": "document"})
    masks = [{"kind": "document", "starts": starts} for starts in ([0, 1, 5], [0, 9])]
    tensors = [random_qkv() for _ in masks]
    with cp.context(attention):
        outs = [attention(**x, mask=m) for x, m in zip(tensors, masks, strict=True)]
    for out, x, mask in zip(outs, tensors, masks, strict=True):  # after both forwards
        found = torch.autograd.grad(out, list(x.values()), torch.ones_like(out))
        seen = reference.visible(mask, SEQUENCE)
        wanted = reference.gradients_of(x, torch.ones_like(out), seen, HEAD_DIM**-0.5)
        assert_same([out.detach(), *found], list(wanted.values()))


@pytest.mark.parametrize(
    ("mask", "key", "said"),
    [
        ({"kind": "document", "starts": [1, 5]}, "call.mask.starts", "must begin with 0"),
        ({"kind": "document", "starts": [0, 5, 5]}, "call.mask.starts", "must begin with 0 and rise"),
        ({"kind": "document", "starts": [0, SEQUENCE]}, "call.mask.starts", f"below the sequence length {SEQUENCE}"),
        ({"kind": "document", "start": [0, 5]}, "call.mask.start", "unknown field of document"),
    ],
)
def test_documents_that_are_none_are_refused_at_the_call(mask: dict[str, object], key: str, said: str) -> None:
    attention = Attention()
    with pytest.raises(CallError) as caught, of_mask({"kind": "document"}).context(attention):
        attention(**random_qkv(), mask=mask)
    assert [p.key for p in caught.value.problems] == [key] and said in str(caught.value)


def test_sinks_of_the_call_are_used_and_get_their_gradient() -> None:
    attention, cp = Attention(), of_mask({"kind": "causal"}, "cp.steps.attend.sinks=true")
    with cp.context(attention):
        for sinks in ([0.5, -1.0], [20.0, -20.0]):
            given = torch.tensor(sinks, dtype=torch.float64, requires_grad=True)
            assert_attends(attention, {"kind": "causal"}, sinks=given)


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        (None, "is missing, and the composition uses it"),
        (torch.zeros(HEADS + 1, dtype=torch.float64), f"[{HEADS + 1}]"),
        (torch.zeros(1, dtype=torch.float64), "[1]"),
        (torch.zeros(HEADS, 1, dtype=torch.float64), f"[{HEADS}, 1]"),
    ],
)
def test_sinks_that_the_plan_is_not_for_are_refused(sinks: Tensor | None, said: str) -> None:
    attention, cp = Attention(), of_mask({"kind": "causal"}, "cp.steps.attend.sinks=true")
    with pytest.raises(CallError) as caught, cp.context(attention):
        attention(**random_qkv(), sinks=sinks)
    assert [p.key for p in caught.value.problems] == ["call.sinks"] and said in str(caught.value)


def test_no_dropout_is_accepted() -> None:
    attention = Attention()
    with of_mask({"kind": "causal"}).context(attention):
        assert_attends(attention, {"kind": "causal"}, dropout_p=0.0)


def test_plain_module_refuses_what_only_an_engine_computes() -> None:
    with pytest.raises(CallError) as caught:
        Attention()(**random_qkv(), mask="causal", sinks=torch.zeros(HEADS))
    assert [p.key for p in caught.value.problems] == ["call.mask", "call.sinks"]


def test_named_tensors_and_any_batch_are_accepted() -> None:
    attention, cp = Attention(), engine(1)
    with cp.context(attention):
        q, k, v = random_qkv(1).values()
        torch.testing.assert_close(attention(v=v, q=q, k=k), attention(q, k, v))
        assert attention(*(x.expand(5, -1, -1, -1) for x in (q, k, v))).shape[0] == 5


def test_mesh_is_asked_for_where_there_are_several_ranks() -> None:
    with pytest.raises(CallError, match="plan is for 2 ranks"):
        ContextParallel(plan_of("ulysses"))


# ------------------------------------------------------------------ the library's entry
def test_compile_of_one_rank_needs_no_process_group() -> None:
    cp = cp_engine.compile("none", mesh=None, sequence=SEQUENCE, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float64)
    model = Model()
    with cp.context(model):
        found = results(model)
    assert_same(found, results(expected(model, PLAIN)))
    assert not torch.distributed.is_initialized()
    assert (cp.bytes_sent, cp.collectives, cp.plan.degree) == (0, 0, 1)


def test_compile_reports_a_preset_that_does_not_exist() -> None:
    with pytest.raises(CPError, match="there is no preset 'ulyses'") as caught:
        cp_engine.compile("ulyses", mesh=None, sequence=8, heads=2, head_dim=4)
    assert caught.value.problems[0].tries


def test_shard_and_unshard_of_one_rank_are_the_identity() -> None:
    cp, x = engine(1), torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    assert torch.equal(cp.shard(x), x) and torch.equal(cp.unshard(x), x)
    one, two = cp.shard(x, x + 1)
    assert torch.equal(one, x) and torch.equal(two, x + 1)
    assert torch.equal(cp.shard(x.mT, dim=0), x.mT)


def test_shard_of_another_length_is_refused_for_each_tensor() -> None:
    with pytest.raises(CallError) as caught:
        engine(1).shard(torch.ones(2, SEQUENCE), torch.ones(2, 5), torch.ones(2, 6))
    assert [p.key for p in caught.value.problems] == ["shard.tensors[1]", "shard.tensors[2]"]
    assert "5 positions" in str(caught.value) and f"is for {SEQUENCE}" in str(caught.value)


def test_gradients_are_summed_once_for_each_step() -> None:
    model, cp = Model(), engine(1)
    for _ in range(2):
        with cp.context(model):
            model(tokens()).sum().backward()
        cp.sum_gradients(model)
        with pytest.raises(CallError, match="summed in this step already"):
            cp.sum_gradients(model)
        model.zero_grad(set_to_none=True)


def rows(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda e: e.call(None, *qkv()[1:]), "call.q  is missing"),
        (lambda e: e.call(qkv()[0].tolist(), *qkv()[1:]), "call.q  is missing"),
        (lambda e: e.call(*(x.to("meta") for x in qkv())), "call.q  is on meta, and the plan runs on cpu"),
        (lambda e: e.call(*qkv(), scale=float("nan")), "call.scale  must be a finite number above 0, not nan"),
        (
            lambda e: e.call(*qkv(), scale=torch.ones((), requires_grad=True)),
            "call.scale  must be a finite number above 0, not Tensor()",
        ),
        (lambda e: e.call(*qkv(), mask=3), "call.mask  must be a mask or its configuration, not 3"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim=9), "shard.tensors[0]  has 2 dims, of which none is 9"),
        (lambda e: e.unshard(rows(SEQUENCE)), "unshard.tensor  has 1 dims, of which none is 1"),
        (lambda e: e.unshard(rows(2, SEQUENCE).to(torch.complex128)), "torch.view_as_real"),
        (lambda e: e.context(None).__enter__(), "context  is given NoneType, which is no module"),
        (lambda e: e.context().__enter__(), "context  is given no module"),
        (lambda e: e.shard(rows(2, SEQUENCE), []), "shard.tensors[1]  is [], and a tensor is needed"),
        (lambda e: e.shard(None), "shard.tensors[0]  is None, and a tensor is needed"),
        (lambda e: e.shard(rows(2, SEQUENCE).numpy()), "try   torch.as_tensor(...)"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim="1"), "dim  is '1', and a number is needed"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim=None), "dim  is None, and a number is needed"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim=True), "dim  is True, and a number is needed"),
        (lambda e: e.unshard([]), "unshard.tensor  is [], and a tensor is needed"),
        (lambda e: e.unshard(rows(2, SEQUENCE), dim=1.0), "dim  is 1.0, and a number is needed"),
        (lambda e: e.call(*qkv(), attn_mask=None), "try       is_causal=True"),
        (lambda e: e.call(*qkv(), causal=True), "call.causal  the attention call carries causal=True"),
        (lambda e: e.call(*qkv(), dropout_p=0.1), "call.dropout_p  is 0.1"),
        (lambda e: e.call(*(torch.tensor(1.0) for _ in range(3))), "call.q  is [], and the plan is for [1,"),
        (lambda e: e.call(qkv()[0].to_sparse(), *qkv()[1:]), "try  q.to_dense()"),
        (lambda e: e.attend(qkv()), "call  is of type list, and a cp_engine.runtime.call.Call is needed"),
        (lambda e: e.sum_gradients(None), "model  is None, and a module is needed"),
        (lambda e: e.sum_gradients(Model().parameters()), "model  is of type generator, and a module is needed"),
        (pickle.dumps, "engine  holds process groups of this process"),
        (deepcopy, "try  cp_engine.compile(...) there"),
        (lambda e: ContextParallel("ulysses"), "plan  is 'ulysses', and a plan is needed"),  # type: ignore[arg-type]
        (lambda e: ContextParallel(e.plan, "cpu"), "mesh  is 'cpu', and a DeviceMesh or None is needed"),  # type: ignore[arg-type]
        (lambda e: ContextParallel(e.plan, None, "gpu"), "device  'gpu' is no type of device"),
        (lambda e: ContextParallel(e.plan, None, None, "gpu"), "kernels  'gpu' is no type of device"),
    ],
)
def test_misuse_of_an_engine_is_refused_by_name(use: Callable[[ContextParallel], object], said: str) -> None:
    with pytest.raises(CallError) as caught:
        use(of_mask("causal"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"overrides": "cp.degree=2"}, "try  overrides=['cp.degree=2']"),
        ({"device": "gpu"}, "device  'gpu' is no type of device"),
        ({"overrides": None}, "overrides  is None, and a list of texts is needed"),
        ({"overrides": [3]}, "overrides  is [3], and a list of texts is needed"),
        ({"config_dir": 3}, "config_dir  is 3, and a folder is needed"),
        ({"mesh": "cp"}, "mesh  is 'cp', and a DeviceMesh or None is needed"),
        ({"mesh": (2,)}, "try  dist.init_device_mesh('cpu', (ranks,), mesh_dim_names=('cp',))"),
        ({"composition": None}, "composition  is None, and the name of a preset, or a mapping is needed"),
        ({"composition": []}, "composition  is [], and the name"),
    ],
)
def test_misuse_of_compile_is_refused_by_name(named: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cp_engine.compile(**{"composition": "none", "mesh": None, "sequence": 8, "heads": 2, "head_dim": 4, **named})
    assert said in str(caught.value)


WRONG: dict[str, tuple[object, ...]] = {
    "sequence": ("512", 0, -1, 1.5, None, True),
    "heads": ("4", 0, None, 2.5),
    "head_dim": ("4", 0, None),
    "kv_heads": ("2", 3, 0, 1.0),
    "v_head_dim": ("x", 0),
    "latent_dim": ("a", -1),
    "rope_dim": (None,),
    "topk": ("3",),
    "index_heads": ("x",),
    "index_dim": (1.5,),
    "batch": ("1", 0, None),
    "dtype": (float, torch.int64, None, torch.complex64),
    "mask": (
        object(),
        3,
        None,
        ["causal"],
        "casual",
        {},
        {"kind": 3},
        {"kind": "window"},
        {1: 2},
        mask_of("causal", 9),
    ),
    "overrides": (3, ["a=b=c"], ["=="], [None], ["cp.degree=x"]),
    "composition": (3, "", {}, {"kind": "x"}, {"name": "x", "mesh": 3, "axes": [3], "order": 3, "steps": 3}),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_argument_of_compile_is_an_error_of_the_engine(name: str) -> None:
    right = {"composition": "none", "mesh": None, "sequence": 8, "heads": 2, "head_dim": 4}
    for value in WRONG[name]:
        with pytest.raises(CPError):
            cp_engine.compile(**{**right, name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: mask_of("full", "8"),
        lambda: mask_of("full", -1),
        lambda: SparseAttention("3"),
        lambda: SparseAttention(0),
    ],
)
def test_every_wrong_argument_of_masks_and_sparse_attention_is_an_error_of_the_engine(
    make: Callable[[], object],
) -> None:
    with pytest.raises(CPError):
        make()
