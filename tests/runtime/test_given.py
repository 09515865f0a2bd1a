"""What the library is given: meshes in any order, compositions as Hydra composes them, scales, and inference mode."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.distributed.device_mesh import DeviceMesh

import cp_engine
from cp_engine.config.compose import compose
from cp_engine.errors import CallError
from cp_engine.runtime.call import Call
from tests.gloo import World

SIZES = {"sequence": 16, "heads": 4, "head_dim": 8, "dtype": torch.float64}


def qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 4, 16, 8, dtype=torch.float64, generator=generator) for _ in range(3)]


def on_a_permuted_mesh(preset: str, order: list[object], names: tuple[str, ...]) -> float:
    """The largest difference of out and dq to dense attention, on this rank."""
    mesh = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=names)
    engine = cp_engine.compile(preset, mesh=mesh, **SIZES)
    dense = [x.requires_grad_() for x in qkv()]
    wanted = F.scaled_dot_product_attention(*dense, is_causal=True)
    wanted.pow(2).sum().backward()
    local = [engine.shard(x.detach(), dim=2).requires_grad_() for x in dense]
    out = engine.call(*local)
    out.pow(2).sum().backward()
    shares = [engine.shard(x, dim=2) for x in (wanted.detach(), *(x.grad for x in dense))]
    found = [out.detach(), *(x.grad for x in local)]
    whole = engine.unshard(out.detach(), dim=2)
    engine.close()
    assert torch.allclose(whole, wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, shares, strict=True))


@pytest.fixture(scope="module")
def world() -> World:
    four = World(4)
    yield four
    four.close()


@pytest.mark.parametrize(
    ("preset", "order", "names"),
    [
        ("ulysses", [2, 0, 3, 1], ("cp",)),
        ("ring", [3, 1, 0, 2], ("cp",)),
        ("allgather_kv", [1, 0, 3, 2], ("cp",)),
        ("usp", [[0, 1], [2, 3]], ("ulysses", "ring")),
        ("usp", [[3, 0], [1, 2]], ("ring", "ulysses")),
    ],
    ids=str,
)
def test_a_mesh_may_list_its_ranks_in_any_order(
    world: World, preset: str, order: list[object], names: tuple[str, ...]
) -> None:
    assert max(world.run(on_a_permuted_mesh, preset, order, names)) < 1e-12


def test_a_composition_may_be_one_of_omegaconf() -> None:
    composed = OmegaConf.create(
        {"cp": compose("none"), "mask": {"kind": "window", "left": 3, "right": "${width}"}, "width": 0}
    )
    engine = cp_engine.compile(composed.cp, mesh=None, mask=composed.mask, **SIZES)
    assert (
        engine.plan
        == cp_engine.compile(compose("none"), mesh=None, mask={"kind": "window", "left": 3, "right": 0}, **SIZES).plan
    )


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, float("inf"), float("nan"), -(2**70)])
def test_a_scale_that_gives_nan_is_refused(scale: float) -> None:
    engine = cp_engine.compile("none", mesh=None, **SIZES)
    with pytest.raises(CallError, match=r"call\.scale  must be a finite number above 0"):
        engine.call(*qkv(), scale=scale)
    with pytest.raises(CallError, match=r"call\.scale  must be a finite number above 0"):
        engine.attend(Call(tensors=dict(zip("qkv", qkv(), strict=True)), scale=scale))


def test_inference_mode_with_skip_attention() -> None:
    engine = cp_engine.compile("none", mesh=None, overrides=["cp.recompute=skip_attention"], **SIZES)
    model = cp_engine.Attention()
    wanted = F.scaled_dot_product_attention(*qkv(), is_causal=True)
    with engine.context(model):
        with torch.inference_mode():
            assert torch.allclose(model(*qkv()), wanted)
            of_inference = qkv()
        with torch.no_grad():
            assert torch.allclose(model(*of_inference), wanted)
        given = [x.requires_grad_() for x in qkv()]
        model(*given).sum().backward()
    assert given[0].grad is not None and dist.is_initialized() is False
