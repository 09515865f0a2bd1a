"""Kernels, one guard each, against attention written out in float64; and merging of partial results."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet, Run, whole
from cp_engine.algebra.mask import mask_of
from cp_engine.algebra.tiles import Tile, Tiling, tiling
from cp_engine.errors import CPError, KernelError
from cp_engine.exchange.redistribute import Target
from cp_engine.kernels.cpu_flash import CPUFlash
from cp_engine.kernels.flex import BLOCK, Flex, _band
from cp_engine.kernels.math import Math
from cp_engine.kernels.registry import KERNELS, Call, Hardware, Kernel, choose, hardware
from cp_engine.kernels.tiled import TiledAttention, kv_index, merge
from cp_engine.runtime.program import Program
from tests.conftest import PATIENCE, clean_environment
from tests.helpers import SMALL, assert_close, index_set, plan_of, small

BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Absolute, for unit-variance inputs and some 20 keys: a few hundred roundings of each dtype's own epsilon."""
SCALE = 0.3
Results = dict[str, Tensor]

TRAINING = Call(device="cpu", dtype="float64", head_dim=8, v_head_dim=8)
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


@every_kernel
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=by_tile)
def test_kernel_equals_dense_for_every_tile(kernel: Kernel, dtype: torch.dtype, tile: Tile) -> None:
    tensors = tuple(x.to(dtype) for x in random_qkv(tile.q.count, tile.k.count))
    found = run_kernel(kernel, tensors, tile)
    assert {n: found[n].dtype for n in ("out", "dq", "dk", "dv")} == dict.fromkeys(("out", "dq", "dk", "dv"), dtype)
    assert found["lse"].dtype == torch.promote_types(dtype, torch.float32)
    assert_matches(found, dense(*tensors, seen_in(tile)), BOUNDS[dtype])


@every_kernel
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 3), (8, 2)])
def test_kernel_equals_dense_for_grouped_heads(kernel: Kernel, heads: int, kv_heads: int) -> None:
    tensors = random_qkv(13, 13, heads=heads, kv_heads=kv_heads)
    assert_matches(run_kernel(kernel, tensors, causal(13)), dense(*tensors, seen_in(causal(13))), 1e-13)


@every_kernel
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(12, 8), (8, 12), (192, 128), (8, 1)])
@pytest.mark.parametrize("tile", [causal(9), band(9, 9, 0, 3)], ids=lambda t: t.kind)
def test_kernel_equals_dense_for_unequal_head_dims(kernel: Kernel, head_dim: int, v_head_dim: int, tile: Tile) -> None:
    tensors = random_qkv(9, 9, head_dim=head_dim, v_head_dim=v_head_dim)
    found = run_kernel(kernel, tensors, tile)
    assert found["out"].shape[3] == found["dv"].shape[3] == v_head_dim
    assert_matches(found, dense(*tensors, seen_in(tile)), 1e-12)


@every_kernel
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_query_that_sees_nothing_has_lse_minus_infinity(kernel: Kernel, dtype: torch.dtype) -> None:
    tile = band(9, 9, 3, 5)  # queries 0, 1 and 2 see nothing
    tensors = tuple(x.to(dtype) for x in random_qkv(9, 9))
    found = run_kernel(kernel, tensors, tile)
    assert (found["lse"][:, :, :3] == -math.inf).all()
    assert (found["out"][:, :, :3] == 0).all()
    assert (found["dq"][:, :, :3] == 0).all()
    assert_matches(found, dense(*tensors, seen_in(tile)), BOUNDS[dtype])


@every_kernel
def test_tile_in_which_no_query_sees_anything_gives_nothing(kernel: Kernel) -> None:
    tensors = random_qkv(5, 5)
    found = run_kernel(kernel, tensors, band(5, 5, 7, 9))
    assert (found["lse"] == -math.inf).all()
    assert all((found[n] == 0).all() for n in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads"), [(0, 7, 4, 4), (7, 0, 4, 4), (0, 0, 4, 4), (7, 7, 0, 0), (7, 7, 0, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.name != "math"], ids=lambda k: k.name)
def test_empty_tensors_do_not_reach_a_fused_kernel(
    kernel: Kernel, queries: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    tensors = tuple(x.to(dtype) for x in random_qkv(queries, keys, heads=heads, kv_heads=kv_heads))
    found = run_kernel(kernel, tensors, full(queries, keys))  # on CPU, SIGFPE would end this process
    assert (found["lse"] == -math.inf).all() and (found["out"] == 0).all()
    assert found["lse"].dtype == torch.float32
    for name, x in zip(("dq", "dk", "dv"), tensors, strict=False):
        assert found[name].shape == x.shape and (found[name] == 0).all()


def strided_last_dim(x: Tensor) -> Tensor:
    """The same values with a last dim of stride 2."""
    return torch.stack([x, x + 1.0], -1).flatten(-2)[..., ::2]


def strided_sequence(x: Tensor) -> Tensor:
    """The same values as every second row of a longer tensor."""
    return torch.stack([x, x + 1.0], 3).flatten(2, 3)[:, :, ::2]


def heads_last(x: Tensor) -> Tensor:
    """The same values in [B, S, H, D] memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@every_kernel
@pytest.mark.parametrize("view", [strided_last_dim, strided_sequence, heads_last])
@pytest.mark.parametrize("tile", [causal(9), band(9, 9, 0, 3), full(9, 9)], ids=lambda t: t.kind)
def test_kernel_equals_dense_for_strided_tensors(kernel: Kernel, view: Callable[[Tensor], Tensor], tile: Tile) -> None:
    tensors = random_qkv(9, 9)
    q, k, v, dout = (view(x) for x in tensors)
    assert not q.is_contiguous()
    assert_matches(run_kernel(kernel, (q, k, v, dout), tile), dense(*tensors, seen_in(tile)), 1e-13)


@every_kernel
def test_strided_upstream_gradient_is_read_right(kernel: Kernel) -> None:
    q, k, v, dout = random_qkv(9, 9)
    expanded = dout.sum(dim=(1, 2, 3), keepdim=True).expand_as(dout)  # what `out.sum().backward()` brings
    assert_matches(
        run_kernel(kernel, (q, k, v, expanded), causal(9)), dense(q, k, v, expanded, seen_in(causal(9))), 1e-13
    )


@every_kernel
def test_kernel_survives_large_scores(kernel: Kernel) -> None:
    tensors = random_qkv(17, 17, size=30.0)
    assert_matches(run_kernel(kernel, tensors, causal(17)), dense(*tensors, seen_in(causal(17))), 1e-9)


@every_kernel
def test_causal_is_aligned_top_left(kernel: Kernel) -> None:
    q, k, v, _ = random_qkv(6, 6)
    out, lse = kernel.forward(q, k, v, causal(6), SCALE)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], rtol=0, atol=1e-13)  # query 0 sees key 0 and no other
    torch.testing.assert_close(lse[:, :, 0], (q[:, :, 0] * k[:, :, 0]).sum(-1) * SCALE, rtol=0, atol=1e-13)


def test_kernels_agree_on_many_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_engine.kernels.math.ROWS", 4)
    tensors = random_qkv(19, 19, kv_heads=2)
    for tile in (causal(19), full(19, 19), band(19, 19, -2, 6)):
        assert_matches(run_kernel(Math(), tensors, tile), dense(*tensors, seen_in(tile)), 1e-13)


@every_kernel
def test_autocast_does_not_round_scores(kernel: Kernel) -> None:
    tensors = tuple(x.float() for x in random_qkv(17, 17))
    with torch.autocast("cpu", torch.bfloat16):
        found = run_kernel(kernel, tensors, causal(17))
    assert_matches(found, dense(*tensors, seen_in(causal(17))), BOUNDS[torch.float32])


# ------------------------------------------------------------------ flex
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("tile", [*TILES, full(150, 300), band(128, 300, -200, -31), band(9, 9, 3, 5)], ids=by_tile)
def test_flex_forward_on_cpu_equals_dense(dtype: torch.dtype, tile: Tile) -> None:
    tensors = tuple(x.to(dtype) for x in random_qkv(tile.q.count, tile.k.count, kv_heads=2, v_head_dim=12))
    wanted = dense(*tensors, seen_in(tile))
    out, lse = Flex().forward(*tensors[:3], tile, SCALE)
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    nothing = torch.zeros(1)
    found = {"out": out, "lse": lse, "nothing": nothing}
    assert_matches(found, {"out": wanted["out"], "lse": wanted["lse"], "nothing": nothing}, BOUNDS[dtype])


def test_flex_operators_take_what_the_compiler_traces() -> None:
    """The same graphs that a GPU compiles, with the operators' own dense code behind them; shapes become symbolic on the way."""
    compiled = Flex(backend="aot_eager")
    for tile in (causal(130), full(40, 140), full(50, 150), band(128, 140, -100, 9), band(9, 9, 3, 5)):
        for scale in (SCALE, SCALE / 2):  # `dense` computes with SCALE
            q, k, v, dout = random_qkv(tile.q.count, tile.k.count, kv_heads=2, v_head_dim=12)
            wanted = dense(q, k, v, dout, seen_in(tile))
            factor = SCALE / scale
            out, lse = compiled.forward(q * factor, k, v, tile, scale)
            dq, dk, dv = compiled.backward(dout, q * factor, k, v, out, lse, tile, scale)
            found = {"out": out, "lse": lse, "dq": dq * factor, "dk": dk, "dv": dv}
            assert_matches(found, wanted, 1e-6)  # the traced lse is float32


def test_flex_is_part_of_a_block_that_is_compiled_as_one_graph() -> None:
    kernel, tile = Flex(backend="aot_eager"), causal(130)
    q, k, v, dout = random_qkv(130, 130)

    def both_ways(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse = kernel.forward(q, k, v, tile, SCALE)
        return out, lse, *kernel.backward(dout, q, k, v, out, lse, tile, SCALE)

    found = torch.compile(both_ways, fullgraph=True, backend="aot_eager")(q, k, v, dout)
    wanted = dense(q, k, v, dout, seen_in(tile))
    assert_matches(dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True)), wanted, 1e-6)


@pytest.mark.parametrize(
    "tile",
    [full(300, 140), causal(300), band(128, 400, -300, -40), band(128, 260, 3, 90), band(9, 9, 7, 9)],
    ids=by_tile,
)
def test_flex_blocks_are_those_of_the_band(tile: Tile) -> None:
    """A block in the list of full ones is seen by all its queries, one in no list by none."""
    _, blocks = _band(tile, torch.device("cpu"))
    seen = seen_in(tile)
    counts = {name: blocks[i : i + 2] for name, i in (("some", 2), ("all", 4), ("some, by key", 6), ("all, by key", 8))}
    found = {
        name: {(row, int(key)) for row in range(count.shape[2]) for key in index[0, 0, row, : count[0, 0, row]]}
        for name, (count, index) in counts.items()
    }
    rows, columns = (range(-(-n // BLOCK)) for n in seen.shape)
    for row in rows:
        for column in columns:
            block = seen[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            listed = {name for name in ("some", "all") if (row, column) in found[name]}
            assert listed == {n for n in ("some", "all") if (column, row) in found[f"{n}, by key"]}
            if "all" in listed:
                assert listed == {"all"} and bool(block.all())
            if block.any():
                assert len(listed) == 1


# ------------------------------------------------------------------ several tiles
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


# ------------------------------------------------------------------ choosing
def test_auto_takes_the_fast_kernel_on_cpu_and_says_what_it_is() -> None:
    kernel, reason = choose(KERNELS, Call(device="cpu", dtype="float32", head_dim=64, v_head_dim=64))
    assert (kernel.name, reason) == ("cpu_flash", CPUFlash.summary)


def test_auto_says_why_it_does_not_take_the_fast_kernels() -> None:
    kernel, reason = choose(KERNELS, Call(device="cuda", dtype="float64", head_dim=64, v_head_dim=64))
    assert kernel.name == "math"
    for name in ("cuda_flash", "cudnn", "cuda_efficient", "flex"):
        assert f"{name}: computes " in reason and reason.count("not float64") == 4
    assert "cpu_flash" not in reason  # it was not a candidate


H200 = Hardware(capability=(9, 0), cudnn_version=91501)
A10 = Hardware(capability=(8, 6), cudnn_version=91501)
V100 = Hardware(capability=(7, 0), cudnn_version=91501)


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "there", "chosen"),
    [
        ("cpu", "float64", (64, 64), None, "cpu_flash"),
        ("cpu", "bfloat16", (192, 128), None, "cpu_flash"),
        ("cuda", "bfloat16", (64, 64), None, "cuda_flash"),
        ("cuda", "float16", (192, 128), H200, "cuda_flash"),
        ("cuda", "bfloat16", (576, 512), H200, "cuda_efficient"),
        ("cuda", "bfloat16", (200, 200), A10, "cuda_efficient"),
        ("cuda", "float32", (64, 64), H200, "cuda_efficient"),
        ("cuda", "float16", (64, 64), V100, "cuda_efficient"),
        ("cuda", "bfloat16", (64, 64), V100, "math"),
        ("cuda", "float64", (64, 64), H200, "math"),
        ("cuda", "bfloat16", (64, 64), Hardware(capability=(9, 4), is_nvidia=False), "math"),
        ("npu", "bfloat16", (64, 64), None, "npu_fusion"),
        ("xpu", "bfloat16", (64, 64), None, "math"),
    ],
)
def test_auto_takes_the_first_kernel_that_can(
    device: str, dtype: str, dims: tuple[int, int], there: Hardware | None, chosen: str
) -> None:
    call = Call(device=device, dtype=dtype, head_dim=dims[0], v_head_dim=dims[1], hardware=there)
    assert choose(KERNELS, call)[0].name == chosen


def on_h200(**changes: object) -> Call:
    """A call that every CUDA kernel takes, with some of it changed."""
    call = {"device": "cuda", "dtype": "bfloat16", "head_dim": 64, "v_head_dim": 64, "hardware": H200, **changes}
    return Call(**call)


def there(**changes: object) -> Hardware:
    return Hardware(**{"capability": (9, 0), "cudnn_version": 91501, **changes})


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("cpu_flash", on_h200(), "runs on cpu, not on cuda"),
        ("cuda_flash", on_h200(device="cpu"), "runs on cuda, not on cpu"),
        ("cuda_flash", on_h200(dtype="float32"), "computes bfloat16, float16, not float32"),
        ("cuda_flash", on_h200(head_dim=264), "takes head dims up to 256, not 264"),
        (
            "cuda_flash",
            on_h200(hardware=V100),
            "needs compute capability 8.0 for bfloat16, and this GPU has 7.0",
        ),
        (
            "cuda_flash",
            on_h200(head_dim=193, hardware=there(capability=(12, 0))),
            "has no backward for head dim 200 on compute capability 12.0",
        ),
        ("cuda_flash", on_h200(head_dim=193, hardware=there(capability=(12, 0)), needs_backward=False), None),
        ("cuda_flash", on_h200(head_dim=256, hardware=A10), None),
        ("cuda_flash", on_h200(head_dim=192, v_head_dim=128), None),
        ("cudnn", on_h200(dtype="float32"), "computes bfloat16, float16, not float32"),
        ("cudnn", on_h200(head_dim=192), "takes head dims up to 128, or 192 with 128 for v, not 192 with 64"),
        ("cudnn", on_h200(head_dim=192, v_head_dim=128), None),
        ("cudnn", on_h200(head_dim=192, v_head_dim=128, hardware=None), None),
        (
            "cudnn",
            on_h200(head_dim=192, v_head_dim=128, hardware=A10),
            "takes head dims 192 with 128 on compute capability 9.0 and 10.x with cuDNN 9.11, not on 8.6 with 91501",
        ),
        ("cudnn", on_h200(hardware=there(cudnn_version=0)), "needs cuDNN 9, and there is none"),
        ("cudnn", on_h200(hardware=there(cudnn_version=8907)), "needs cuDNN 9, and there is 8907"),
        (
            "cudnn",
            on_h200(hardware=there(is_deterministic=True)),
            "has no deterministic backward, and torch.use_deterministic_algorithms is on",
        ),
        ("cudnn", on_h200(hardware=there(is_deterministic=True), needs_backward=False), None),
        ("cuda_efficient", on_h200(dtype="float64"), "computes float32, bfloat16, float16, not float64"),
        (
            "cuda_efficient",
            on_h200(hardware=there(is_nvidia=False)),
            "is written for NVIDIA GPUs, and this PyTorch is built for ROCm",
        ),
        ("cuda_efficient", on_h200(head_dim=576, v_head_dim=512), None),
        ("flex", on_h200(dtype="float64"), "computes float32, bfloat16, float16 on cuda, not float64"),
        ("flex", on_h200(device="cpu"), "has no backward on cpu"),
        ("flex", on_h200(device="cpu", needs_backward=False), None),
        ("flex", on_h200(device="mps"), "runs on cuda and cpu, not on mps"),
        ("flex", on_h200(head_dim=192, v_head_dim=128), None),
        ("math", on_h200(dtype="float64", hardware=there(is_nvidia=False)), None),
    ],
)
def test_what_a_kernel_cannot_do_is_said(name: str, call: Call, reason: str | None) -> None:
    assert next(k for k in KERNELS if k.name == name).refusal(call) == reason


def test_hardware_is_that_of_this_process() -> None:
    assert hardware("cpu") is None
    found = hardware("cuda")
    assert (found is None) == (not torch.cuda.is_available())
    assert found is None or found.capability == torch.cuda.get_device_capability()


def test_named_kernel_is_used() -> None:
    plan = plan_of("none", "cp.steps.attend.kernel=math")
    attend = Program(plan, Target(ranks=(0,), device="cpu", communicator=None)).operations[0]
    assert attend._ranks[0].kernel.name == "math"


def test_named_kernel_on_another_device_is_refused_by_name() -> None:
    plan = plan_of("none", "cp.steps.attend.kernel=cpu_flash", shape=small(sequence=8))
    with pytest.raises(KernelError) as caught:
        Program(plan, Target(ranks=(0,), device="cuda", communicator=None))
    (problem,) = caught.value.problems
    assert problem.key == "cp.steps.attend.kernel"
    assert "cpu_flash" in problem.what and "cuda" in problem.what
    assert "never replaced" in str(caught.value)
    assert problem.tries == ("cp.steps.attend.kernel=auto",)


def test_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(CPError) as caught:
        plan_of("none", "cp.steps.attend.kernel=cpu_flush", shape=SMALL)
    (problem,) = caught.value.problems
    assert problem.key == "cp.steps.attend.kernel"
    assert "'cpu_flush'" in problem.what
    assert problem.details == (
        ("allowed", "auto, cpu_flash, cuda_flash, cudnn, cuda_efficient, npu_fusion, flex, math, npu_fusion_update"),
    )
    assert problem.tries == ("cp.steps.attend.kernel=cpu_flash",)


# ------------------------------------------------------------------ the benchmark
def test_benchmark_runs_every_kernel_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
    command = [sys.executable, str(script), "--device", "cpu", "--smoke", "--markdown", str(tmp_path / "table.md")]
    done = subprocess.run(
        command,
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[4:]]
    assert {(row[1], row[2]) for row in rows} == {
        (kernel, dtype) for kernel in ("cpu_flash", "flex", "math") for dtype in ("bfloat16", "float32")
    }
    for row in rows:
        if row[1] == "flex":
            assert row[-1] == "has no backward on cpu"
        else:
            assert all(0 < float(error) < (3e-2 if row[2] == "bfloat16" else 2e-5) for error in row[3:7])
            assert float(row[7]) > 0
