"""Calls with DTensors, as hosts make them that keep tensor parallelism between layers (torchtitan's Qwen 3 does)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from cp_engine.errors import CallError
from cp_engine.runtime.attention import Attention
from cp_engine.runtime.context import ContextParallel
from tests.gloo import World
from tests.helpers import in_float64, plan_of

BATCH, HEADS, KV_HEADS, SEQUENCE, WIDTH = 3, 4, 2, 31, 8
WIDTHS = {"q": (HEADS, WIDTH), "k": (KV_HEADS, WIDTH), "v": (KV_HEADS, WIDTH)}


def inputs() -> dict[str, Tensor]:
    """Alike on every rank."""
    return {n: torch.randn(BATCH, heads, SEQUENCE, width, dtype=torch.float64) for n, (heads, width) in WIDTHS.items()}


def attended(preset: str, placement: Placement) -> list[float]:
    """Largest errors of out and gradients: 2 context-parallel ranks beside 2 that hold half of the heads, or all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tensors, dout = inputs(), torch.randn(BATCH, HEADS, SEQUENCE, WIDTH, dtype=torch.float64)
    whole = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    q, k, v = whole.values()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected.backward(dout)

    cut = 2 if placement == Shard(1) else 1
    plan = plan_of(preset)
    sizes = {"heads": HEADS // cut, "kv_heads": KV_HEADS // cut, "head_dim": WIDTH, "v_head_dim": WIDTH}
    shape = replace(in_float64(plan).shape, batch=BATCH, sequence=SEQUENCE, **sizes)
    engine, attention = ContextParallel(plan_of(preset, shape=shape), mesh["cp"]), Attention()
    given = {n: spread(engine.shard(x, dim=2), mesh["tp"], placement).requires_grad_() for n, x in tensors.items()}
    with engine.context(attention):
        out = attention(**given, enable_gqa=True)
        assert isinstance(out, DTensor) and out.placements == (placement,)
        assert out.shape[1] == HEADS
        out.backward(spread(engine.shard(dout, dim=2), mesh["tp"], placement))
    found = [out, *(x.grad for x in given.values())]
    wanted = [expected, *(x.grad for x in whole.values())]
    return [
        float((engine.unshard(x.full_tensor().contiguous(), dim=2) - y).abs().max())
        for x, y in zip(found, wanted, strict=True)
    ]


def spread(x: Tensor, mesh: object, placement: Placement) -> Tensor:
    return distribute_tensor(x.contiguous(), mesh, [placement]).detach()


@pytest.mark.parametrize("placement", [Shard(1), Replicate()], ids=["heads", "copies"])
@pytest.mark.parametrize("preset", ["ring", "allgather_kv"])
def test_out_is_spread_as_the_call_and_right(four: World, preset: str, placement: Placement) -> None:
    for errors in four.run(attended, preset, placement):
        assert max(errors) < 1e-12, errors  # type: ignore[call-overload]


def refused(placements: dict[str, Placement | None]) -> list[tuple[str, str]]:
    """(key, what) of a call whose tensors are spread so; None leaves one plain."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    engine, attention = ContextParallel(plan_of("none")), Attention()
    given = {
        n: x if placements[n] is None else DTensor.from_local(x, mesh, [placements[n]]) for n, x in inputs().items()
    }
    with pytest.raises(CallError) as caught, engine.context(attention):
        attention(**given)
    return [(problem.key, problem.what) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ({"q": Shard(2), "k": Shard(2), "v": Shard(2)}, ["call.q is spread as [Shard(dim=2)]", "call.k", "call.v"]),
        (
            {"q": Shard(1), "k": Replicate(), "v": Shard(1)},
            ["call.k is spread as [Replicate()] over a mesh of 4 ranks"],
        ),
        ({"q": Shard(1), "k": Shard(1), "v": None}, ["call.v is a plain tensor, and q is spread over ranks"]),
        ({"q": Partial(), "k": Partial(), "v": Partial()}, ["call.q is spread as [Partial(sum)]", "call.k", "call.v"]),
    ],
)
def test_another_spread_is_refused(four: World, placements: dict[str, Placement | None], expected: list[str]) -> None:
    for found in four.run(refused, placements):
        assert len(found) == len(expected)  # type: ignore[arg-type]
        for (key, what), begins in zip(found, expected, strict=True):  # type: ignore[call-overload]
            assert f"{key} {what}".startswith(begins)


def refused_whole(kind: str) -> list[tuple[str, str]]:
    """(key, what) of a call whose tensors are spread over ranks of the plan, or whose heads the ranks cannot share."""
    mesh, attention = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), Attention()
    plan, heads = (plan_of("ring", degree=4), 4) if kind == "plan" else (plan_of("none"), 6)
    engine = ContextParallel(plan, mesh if kind == "plan" else None)
    x = distribute_tensor(torch.randn(BATCH, heads, SEQUENCE, WIDTH), mesh, [Shard(1)])
    with pytest.raises(CallError) as caught, engine.context(attention):
        attention(x, x, x)
    return [(problem.key, problem.what) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("kind", "what"),
    [("plan", "is spread over ranks of the plan"), ("uneven", "has 6 heads, and 4 ranks cannot hold as many each")],
)
def test_what_ranks_would_misread_is_refused_on_every_rank(four: World, kind: str, what: str) -> None:
    assert four.run(refused_whole, kind) == [[(f"call.{name}", what) for name in "qkv"]] * 4


def with_sinks() -> float:
    """Largest error of out: sinks are a row per head, spread as heads are."""
    mesh, attention = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"], Attention()
    tensors, sinks = inputs(), torch.randn(HEADS, dtype=torch.float64)
    shape = replace(in_float64(plan_of("none", "cp.steps.attend.sinks=true")).shape, batch=BATCH, sequence=SEQUENCE)
    sizes = {"head_dim": WIDTH, "v_head_dim": WIDTH}

    def out_of(cut: int, sinks: Tensor, **given: Tensor) -> Tensor:
        here = replace(shape, heads=HEADS // cut, kv_heads=KV_HEADS // cut, **sizes)
        engine = ContextParallel(plan_of("none", "cp.steps.attend.sinks=true", shape=here))
        with engine.context(attention):
            return attention(**given, sinks=sinks, enable_gqa=True)

    given = {n: distribute_tensor(x, mesh, [Shard(1)]) for n, x in tensors.items()}
    out = out_of(2, distribute_tensor(sinks, mesh, [Shard(0)]), **given)
    return float((out.full_tensor() - out_of(1, sinks, **tensors)).abs().max())


def test_sinks_are_spread_as_heads_are(four: World) -> None:
    assert max(four.run(with_sinks)) < 1e-12  # type: ignore[type-var]
