"""Attention over several tiles: merging of partial results, and kv heads of uneven groups."""

import math

import pytest
import torch

from cp_engine.algebra.index_set import Run, whole
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.tiles import Tile, Tiling, tiling
from cp_engine.kernels.math import Math
from cp_engine.kernels.registry import Kernel
from cp_engine.kernels.tiled import TiledAttention, kv_index, merge
from tests.helpers import assert_close, index_set
from tests.kernels.dense import (
    CASES,
    SCALE,
    assert_matches,
    attention_of,
    causal,
    dense,
    every_kernel,
    flash,
    full,
    random_qkv,
    run_tiles,
    seen_in,
    sets_of,
    visible_pairs,
)


# ------------------------------------------------------------------ several tiles
@every_kernel
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(("queries", "keys", "mask"), CASES)
def test_merged_tiles_equal_dense(
    kernel: Kernel, size: float, queries: range, keys: range, mask: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cp_engine.algebra.tiles.ROWS", 3)
    held, there = sets_of(queries, keys)
    tensors = random_qkv(held.count, there.count, size=size)
    found = run_tiles(attention_of(held, there, mask, kernel), tensors)
    assert_matches(found, dense(*tensors, visible_pairs(held, there, mask)), 1e-13 if size == 1.0 else 1e-9)


@pytest.mark.quick
def test_merge_equals_softmax_over_both_parts() -> None:
    q, k, v, dout = random_qkv(7, 12)
    parts = [
        Math().forward(q, k[:, :, s], v[:, :, s], full(7, n), SCALE) for s, n in ((slice(0, 5), 5), (slice(5, 12), 7))
    ]
    (out, lse), (part, part_lse) = parts
    merge(out, lse, part, part_lse)
    wanted = dense(q, k, v, dout, torch.ones(7, 12, dtype=torch.bool))
    assert_close({"out": out, "lse": lse}, {n: wanted[n] for n in ("out", "lse")}, 1e-13)


def test_merge_of_rows_that_saw_nothing() -> None:
    out, lse = (
        torch.zeros(1, 1, 3, 2, dtype=torch.float64),
        torch.tensor([[[-math.inf, -math.inf, 1.5]]], dtype=torch.float64),
    )
    out[:, :, 2] = 4.0
    part, part_lse = torch.full_like(out, 7.0), torch.tensor([[[-math.inf, 0.5, -math.inf]]], dtype=torch.float64)
    part[:, :, 0] = part[:, :, 2] = 0.0
    merge(out, lse, part, part_lse)
    assert out[0, 0].tolist() == [[0.0, 0.0], [7.0, 7.0], [4.0, 4.0]]
    assert lse[0, 0].tolist() == [-math.inf, 0.5, 1.5]


@pytest.mark.parametrize("far", [800.0, -800.0])
def test_merge_of_results_that_are_far_apart(far: float) -> None:
    out, lse = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1)
    merge(out, lse, torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1), far))
    assert (out.item(), lse.item()) == ((2.0, 800.0) if far > 0 else (1.0, 0.0))


def test_half_types_accumulate_in_float32() -> None:
    """256 tiles add to the same dk; in bfloat16 each sum would lose 8 bits."""
    tensors = tuple(x.bfloat16() for x in random_qkv(256, 256, heads=1, kv_heads=1))
    wanted = dense(*tensors, torch.ones(256, 256, dtype=torch.bool).tril())
    rows = tuple(Tile(Run(i, 1), Run(0, i + 1), "full", is_first=True) for i in range(256))
    one_by_one = TiledAttention(
        tiling=Tiling(rows, True),
        kernel=Math(),
        kv_index=None,
        wide_kv=True,
    )
    found = run_tiles(one_by_one, tensors)
    assert found["out"].dtype == found["dq"].dtype == torch.bfloat16
    assert found["dk"].dtype == found["dv"].dtype == torch.float32
    rounding = 2.0**-8
    for name in ("dk", "dv"):
        error = (found[name].double() - wanted[name]).norm() / wanted[name].norm()
        assert error < 2 * rounding, f"{name}: {error:.2e}"


def test_half_types_merge_in_float32() -> None:
    tensors = tuple(x.bfloat16() for x in random_qkv(4, 256, heads=1, kv_heads=1))
    wanted = dense(*tensors, torch.ones(4, 256, dtype=torch.bool))
    tiles = tuple(Tile(Run(0, 4), Run(2 * i, 2), "full", is_first=i == 0) for i in range(128))
    found = TiledAttention(
        tiling=Tiling(tiles, True),
        kernel=Math(),
        kv_index=None,
        wide_kv=False,
    )
    out, _ = found.forward(*tensors[:3], SCALE)
    assert out.dtype == torch.bfloat16
    error = (out.double() - wanted["out"]).norm() / wanted["out"].norm()
    assert error < 2.0**-8, f"{error:.2e}"


# ------------------------------------------------------------------ heads
@pytest.mark.parametrize(
    ("heads", "served", "group", "index"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], 1, None),
        ([0, 1, 2, 3], [0, 1, 2, 3], 2, None),
        ([4, 5], [4, 5], 2, None),
        ([4], [4], 2, None),
        ([3, 4, 5], [3, 4, 5], 4, (0, 1, 1)),  # kv heads 0 and 1, used once and twice
        ([2, 3], [0, 1, 2, 3], 2, (1, 1)),  # more kv heads than are needed
        ([0, 1], [0, 1, 2, 3], 1, (0, 1)),
        ([], [], 2, None),
    ],
)
def test_kv_index_where_groups_are_uneven(
    heads: list[int], served: list[int], group: int, index: tuple[int, ...] | None
) -> None:
    assert kv_index(index_set(heads, 8), index_set(served, 8), group) == index


def test_uneven_groups_equal_dense() -> None:
    q, k, v, dout = random_qkv(9, 9, heads=3, kv_heads=2)
    attention = TiledAttention(
        tiling=tiling(whole(9), whole(9), mask_of("causal", 9)), kernel=flash, kv_index=(0, 1, 1), wide_kv=False
    )
    wanted = dense(q, k[:, [0, 1, 1]], v[:, [0, 1, 1]], dout, seen_in(causal(9)))
    for name in ("dk", "dv"):
        wanted[name] = torch.stack([wanted[name][:, 0], wanted[name][:, 1] + wanted[name][:, 2]], 1)
    assert_matches(run_tiles(attention, (q, k, v, dout)), wanted, 1e-13)
