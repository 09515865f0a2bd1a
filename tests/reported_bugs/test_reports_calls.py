"""What users of context parallelism ran into elsewhere, tried here: what a call carries, and which calls an engine takes.

Which report is where is in docs/reports.md.
"""

from collections.abc import Mapping
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from cp_engine import Attention
from cp_engine.algebra.mask import Mask
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.errors import CallError, ConfigError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job.verify import reference
from cp_engine.job.verify.attention import inputs_of
from cp_engine.runtime.context import ContextParallel
from tests.helpers import CAUSAL, assert_close, computed, fitting, in_float64, plan_of, small, varied
from tests.reported_bugs.test_reports import BOUND, EXCHANGING, attended, wanted

Config = Mapping[str, object]


def one_rank(mask: Config | Mask | str = "causal", *overrides: str) -> ContextParallel:
    """An engine of one rank."""
    return ContextParallel(plan_of("none", *overrides, shape=in_float64(plan_of("none")).shape, mask=mask))


def attend(engine: ContextParallel | None, **arguments: object) -> Tensor:
    """A call of an attention module, under an engine or not."""
    attention, shape = Attention(), (engine or one_rank()).plan.shape
    tensors, _ = inputs_of(plan_of("none", shape=shape))
    if engine is None:
        return attention(**tensors, **arguments)
    with engine.context(attention):
        return attention(**tensors, **arguments)


# ------------------------------------------------------------------ masks and arguments of a call
@pytest.mark.parametrize("name", ["attn_mask", "mask"])
def test_mask_of_its_own_for_each_head_is_refused_by_name(name: str) -> None:
    per_head = torch.ones(1, 4, 16, 16, dtype=torch.bool)
    with pytest.raises(CallError, match=rf"call\.{name} .*Tensor\(1, 4, 16, 16\)"):
        attend(one_rank(), **{name: per_head})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_changing_one_document_leaves_the_other(preset: str, layout: str) -> None:
    mask = {"kind": "document", "starts": [0, 12]}
    shape = fitting(preset, small(sequence=32))
    plan = in_float64(plan_of(varied(preset, 2, order=layout), shape=shape, mask=mask))
    tensors, dout = inputs_of(plan)
    before = attended(plan, tensors, dout)["out"]
    for name in plan.inputs:
        tensors[name][:, :, :12] += 1.0
    after = attended(plan, tensors, dout)["out"]
    moved = (after - before).abs().amax((0, 1, 3))
    assert float(moved[12:].max()) <= BOUND and float(moved[:12].min()) > 1e-3


def test_window_of_a_call_is_honoured_or_refused_and_never_causal() -> None:
    window = {"kind": "window", "left": 4, "right": 0}
    tensors, _ = inputs_of(in_float64(plan_of("none")))
    expected = reference.attention(*tensors.values(), reference.visible(window, 16), 8**-0.5)
    for found in (attend(one_rank(window), mask=window), attend(one_rank(mask_of(window, 16)), mask=window)):
        torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
    with pytest.raises(
        CallError, match=r"call\.mask  is window \(left 4, right 0\), and the plan was proved for the mask causal"
    ):
        attend(one_rank(), mask=window)
    for is_causal in (True, False):  # what a module says that lost its window
        with pytest.raises(CallError, match=r"call\.is_causal  is .* proved for the mask window"):
            attend(one_rank(window), is_causal=is_causal)


@pytest.mark.parametrize("name", ["softcap", "window_size", "attn_bias", "score_mod", "s_aux"])
def test_argument_that_no_plan_knows_is_refused_by_name(name: str) -> None:
    with pytest.raises(CallError, match=rf"call\.{name}  the attention call carries {name}=0\.5"):
        attend(one_rank(), **{name: 0.5})


def test_sinks_are_computed_or_refused() -> None:
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=torch.float64)
    tensors, _ = inputs_of(in_float64(plan_of("none")))
    expected = reference.attention(*tensors.values(), reference.visible(CAUSAL, 16), 8**-0.5, sinks)
    found = attend(one_rank("causal", "cp.steps.attend.sinks=true"), sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
    with pytest.raises(CallError, match=r"call\.sinks  is carried, and the composition does not use it"):
        attend(one_rank(), sinks=sinks)
    with pytest.raises(CallError, match=r"call\.sinks  is missing"):
        attend(one_rank("causal", "cp.steps.attend.sinks=true"))
    with pytest.raises(CallError, match=r"call\.sinks  needs an engine"):
        attend(None, sinks=sinks)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_scale_is_the_calls_at_every_degree(preset: str, degree: int) -> None:
    plan = in_float64(plan_of(preset, degree=degree, shape=fitting(preset, small())))
    tensors, dout = inputs_of(plan)
    assert_close(attended(plan, tensors, dout, scale=0.3), wanted(plan, tensors, dout, CAUSAL, scale=0.3), BOUND)


def test_scale_is_the_calls_with_and_without_an_engine() -> None:
    torch.testing.assert_close(attend(one_rank(), scale=0.3), attend(None, scale=0.3), rtol=0, atol=BOUND)
    assert not torch.allclose(attend(one_rank(), scale=0.3), attend(one_rank()))


def test_attention_dropout_is_refused_by_name() -> None:
    with pytest.raises(CallError, match=r"call\.dropout_p  is 0\.5, and the engine drops no attention weights"):
        attend(one_rank(), dropout_p=0.5)
    torch.testing.assert_close(attend(one_rank(), dropout_p=0.0), attend(one_rank()), rtol=0, atol=BOUND)


# ------------------------------------------------------------------ scope
def test_heads_of_another_model_change_nothing() -> None:
    three, twelve = (small(heads=12, kv_heads=n, head_dim=4) for n in (3, 12))
    first = computed(plan := plan_of("ulysses", degree=4, shape=twelve))
    computed(plan_of("ulysses", degree=4, shape=three))
    assert_close(computed(again := plan_of("ulysses", degree=4, shape=twelve)), first, BOUND)
    assert again == plan and [h.count for h in again.steps[0].layout_after("k").heads] == [3, 3, 3, 3]


def test_attention_modules_that_the_host_leaves_out_are_named() -> None:
    with cpu_shims():
        from cp_engine.hosts.torchtitan.host import _refuse_left_out
    one, two = Attention(), Attention()
    with pytest.raises(ConfigError, match="parallelizes 1 of the model's 2 attention modules") as caught:
        _refuse_left_out({"layers.0.attention": one, "layers.1.mla": two}, [one])
    assert "layers.1.mla" in str(caught.value)
    with pytest.raises(ConfigError, match="0 of the model's 0"):
        _refuse_left_out({}, [])


class SelfAndCross(nn.Module):
    """Attends to itself and then to 5 tokens of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.cross(self.own(q, k, v), k[:, :, :5], v[:, :, :5], is_causal=False)


def test_cross_attention_beside_can_be_left_out() -> None:
    block, engine = SelfAndCross(), one_rank()
    tensors, _ = inputs_of(in_float64(plan_of("none")))
    plain = block(**tensors)
    with engine.context(block.own):
        torch.testing.assert_close(block(**tensors), plain, rtol=0, atol=BOUND)
    with pytest.raises(CallError, match=r"call\.k  is \[1, 4, 5, 8\]"), engine.context(block):
        block(**tensors)


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_hooks_of_the_user_run_whenever_they_were_registered(when: str) -> None:
    attention, engine = Attention(), one_rank()
    tensors, _ = inputs_of(in_float64(plan_of("none")))
    plain, seen = attention(**tensors), []

    def register() -> None:
        attention.register_forward_pre_hook(lambda module, args: seen.append("pre"))
        attention.register_forward_hook(lambda module, args, out: out * 2)

    if when == "before":
        register()
    with engine.context(attention):
        if when == "inside":
            register()
        found = attention(**tensors)
    if when == "after":
        register()
    torch.testing.assert_close(found, plain * (1 if when == "after" else 2), rtol=0, atol=BOUND)
    engine.close()
    torch.testing.assert_close(attention(**tensors), plain * 2, rtol=0, atol=BOUND)
    assert len(seen) == (1 if when == "after" else 2)


def test_call_from_any_place_goes_through_the_plan() -> None:
    """A plan for a window answers, whoever calls: nothing depends on the caller's frame or thread."""
    window = {"kind": "window", "left": 1, "right": 0}
    attention, engine, found = Attention(), one_rank(window), list[Tensor]()
    tensors, _ = inputs_of(in_float64(plan_of("none")))
    with engine.context(attention):
        thread = Thread(target=lambda: found.append(attention(**tensors, mask=window)))
        thread.start()
        thread.join()
        found += [attention(**tensors, mask=window), *map(lambda x: attention(**x, mask=window), [tensors])]
    assert len(found) == 3
    for x in found:
        torch.testing.assert_close(x, attend(one_rank(window), mask=window), rtol=0, atol=BOUND)
