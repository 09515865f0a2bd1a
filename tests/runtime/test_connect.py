"""Engines where ranks differ before they meet: other process groups here and there, or a refusal of one rank alone."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import cp_engine
from cp_engine import CPError
from tests.gloo import World
from tests.helpers import shipped

SIZES = {"sequence": 32, "heads": 4, "head_dim": 8}


def attended(preset: str, axes: tuple[str, ...], sizes: tuple[int, ...], more: tuple[int, ...]) -> float:
    """How far the attention of an engine is from dense attention where these ranks have groups that the others have not."""
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    for _ in range(2 * more.count(dist.get_rank())):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    composed = {**shipped(preset, ()), "mesh": dict(zip(axes, sizes, strict=True))}
    engine = cp_engine.compile(composed, mesh=mesh, dtype=torch.float64, **SIZES)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 32, 8, dtype=torch.float64)
    attention = cp_engine.Attention()
    with engine.context(attention):
        out = attention(*engine.shard(q, k, v, dim=2))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return float((engine.unshard(out, dim=2) - dense).abs().max())


@pytest.mark.parametrize("more", [(0,), (3,), (0, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("preset", "axes", "sizes"),
    [("ulysses", ("ulysses",), (4,)), ("usp", ("ring", "ulysses"), (2, 2))],
    ids=["one", "two"],
)
def test_ranks_with_other_numbers_of_groups_make_an_engine(
    four: World, preset: str, axes: tuple[str, ...], sizes: tuple[int, ...], more: tuple[int, ...]
) -> None:
    assert max(four.run(attended, preset, axes, sizes, more)) < 1e-12


def refused(what: str, odd: int) -> str:
    """What this rank is told when a rank is refused alone."""
    group = dist.new_group([0, 1, 2, 3], timeout=timedelta(minutes=10))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    mine = {} if dist.get_rank() != odd else {"heads": {"heads": 0}, "name": {}, "device": {"device": "tpu"}}[what]
    name = "ulises" if what == "name" and dist.get_rank() == odd else "ulysses"
    try:
        cp_engine.compile(name, mesh=mesh, overrides=["cp.degree=4"], **{**SIZES, **mine})  # type: ignore[arg-type]
    except CPError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "said"), [("heads", "not 0"), ("name", "ulises"), ("device", "'tpu' is no type of device")]
)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_is_refused_alone_leaves_nobody_waiting(four: World, what: str, said: str, odd: int) -> None:
    for rank, text in enumerate(four.run(refused, what, odd)):
        assert said in text, (rank, text)
        assert (f"rank {odd} was refused" in text) == (rank != odd), (rank, text)
