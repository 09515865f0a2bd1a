"""Calls on one rank: what each carries (scale, mask, documents, sinks) is computed or refused."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from cp_engine import Attention
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.errors import CallError
from cp_engine.job.verify import reference
from cp_engine.runtime.context import ContextParallel
from tests.helpers import plan_of, small
from tests.runtime.two_layers import (
    BOTH,
    BOUND,
    DOCUMENTS,
    HEAD_DIM,
    HEADS,
    PLAIN,
    SEQUENCE,
    SHAPE,
    WINDOW,
    assert_same,
    engine,
    of_mask,
    qkv,
    random_qkv,
)

# ------------------------------------------------------------------ calls
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


@pytest.mark.quick
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
