"""Tiles, attention over them written out in float64, and strict comparison with it."""

import math

import pytest
import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet, Run
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.tiles import Tile, tiling
from cp_engine.kernels.cpu_flash import CPUFlash
from cp_engine.kernels.registry import KERNELS, Kernel, KernelRequest
from cp_engine.kernels.tiled import TiledAttention
from tests.helpers import assert_close, index_set

BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Absolute, for unit-variance inputs and some 20 keys: a few hundred roundings of each dtype's own epsilon."""
SCALE = 0.3
Results = dict[str, Tensor]

TRAINING = KernelRequest(device="cpu", dtype="float64", head_dim=8, v_head_dim=8)
CPU_KERNELS = [k for k in KERNELS if k.refusal(TRAINING) is None]
every_kernel = pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda k: k.name)
flash = CPUFlash()


def full(q: int, k: int) -> Tile:
    return Tile(Run(0, q), Run(0, k), "full")


def causal(n: int) -> Tile:
    return Tile(Run(0, n), Run(0, n), "causal")


def band(q: int, k: int, low: int, high: int) -> Tile:
    return Tile(Run(0, q), Run(0, k), "partial", low, high)


def by_tile(tile: Tile) -> str:
    """A tile's name in a test's."""
    return f"{tile.kind}{tile.q.count}x{tile.k.count}"


def random_qkv(
    queries: int,
    keys: int,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 8,
    v_head_dim: int = 8,
    size: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout in float64."""
    generator = torch.Generator().manual_seed(1)
    sizes = (
        (heads, queries, head_dim),
        (kv_heads, keys, head_dim),
        (kv_heads, keys, v_head_dim),
        (heads, queries, v_head_dim),
    )
    q, k, v, dout = (torch.randn(2, *s, generator=generator, dtype=torch.float64) for s in sizes)
    return q * size, k * size, v, dout


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor) -> Results:
    """Attention and its derivative written out by hand in float64; queries that see nothing give 0 and lse -inf."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    share = q.shape[1] // k.shape[1]
    k_, v_ = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (q @ k_.mT * SCALE).masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - top).exp() * seen
    total = weights.sum(-1, keepdim=True)
    p = weights / total.clamp_min(1e-300)
    out = p @ v_
    ds = p * (dout @ v_.mT - (dout * out).sum(-1, keepdim=True)) * SCALE
    dk, dv = ds.mT @ q, p.mT @ dout
    lse = torch.where(total > 0, total.log() + top, -math.inf).squeeze(-1)
    return {
        "out": out,
        "lse": lse,
        "dq": ds @ k_,
        "dk": dk.unflatten(1, (-1, share)).sum(2),
        "dv": dv.unflatten(1, (-1, share)).sum(2),
    }


def run_kernel(kernel: Kernel, tensors: tuple[Tensor, ...], tile: Tile) -> Results:
    q, k, v, dout = tensors
    out, lse = kernel.forward(q, k, v, tile, SCALE)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, tile, SCALE)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def seen_in(tile: Tile) -> Tensor:
    rows = []
    for i in range(tile.q.count):
        row = {
            "full": lambda i, j: True,
            "causal": lambda i, j: j <= i,
            "partial": lambda i, j: tile.low <= i - j <= tile.high,
        }
        rows.append([row[tile.kind](i, j) for j in range(tile.k.count)])
    return torch.tensor(rows)


def assert_matches(found: Results, wanted: Results, bound: float) -> None:
    """-inf must be where it is expected; everything else is compared by value."""
    assert torch.equal(found["lse"] == -math.inf, wanted["lse"] == -math.inf)
    finite = {n: x.double().nan_to_num(nan=math.nan, neginf=0.0) for n, x in found.items()}
    assert_close(finite, {n: x.nan_to_num(nan=math.nan, neginf=0.0) for n, x in wanted.items()}, bound)


TILES = [
    full(11, 19),
    full(1, 1),
    full(1, 23),
    causal(17),
    causal(1),
    band(9, 20, -11, -3),
    band(9, 9, 0, 3),
    band(7, 5, -1, 2),
]


def heads_last(x: Tensor) -> Tensor:
    """The same values in [B, S, H, D] memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def attention_of(
    queries: IndexSet, keys: IndexSet, mask: dict[str, object], kernel: Kernel, *, wide_kv: bool = False
) -> TiledAttention:
    return TiledAttention(
        tiling=tiling(queries, keys, mask_of(mask, queries.size)), kernel=kernel, kv_index=None, wide_kv=wide_kv
    )


def run_tiles(attention: TiledAttention, tensors: tuple[Tensor, ...]) -> Results:
    q, k, v, dout = tensors
    out, lse = attention.forward(q, k, v, SCALE)
    dq, dk, dv = attention.backward(dout, q, k, v, out, lse, SCALE)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


CASES = [
    ([12, 13, 14, 15, 0, 1], range(16), {"kind": "causal"}),
    (range(4, 12), [0, 1, 2, 3, 12, 13, 14, 15], {"kind": "causal"}),
    (range(0, 8), range(8, 16), {"kind": "causal"}),  # nobody sees anything
    (range(0, 16, 3), range(1, 16, 2), {"kind": "causal"}),  # the first query sees nothing
    (range(16), range(16), {"kind": "window", "left": 2, "right": 1}),
    (range(16), range(16), {"kind": "document", "starts": [0, 5, 6]}),
    (range(3, 16), range(16), {"kind": "prefix", "length": 6}),
]


def sets_of(queries: range, keys: range) -> tuple[IndexSet, IndexSet]:
    """Positions of 16, ascending by run."""
    held, there = (IndexSet(tuple(sorted(index_set(p, 16).runs, key=lambda r: r.start)), 16) for p in (queries, keys))
    return held, there


def visible_pairs(held: IndexSet, there: IndexSet, mask: dict[str, object]) -> Tensor:
    """Which keys each query sees, position by position."""
    whole_mask = mask_of(mask, 16)
    return torch.tensor([[whole_mask.count(index_set([q], 16), index_set([k], 16)) == 1 for k in there] for q in held])
