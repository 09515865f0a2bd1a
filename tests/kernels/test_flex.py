"""FlexAttention as a kernel: on CPU against dense attention, for the compiler, and its blocks."""

import pytest
import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.flex import BLOCK, Flex, _band
from tests.kernels.dense import (
    BOUNDS,
    SCALE,
    TILES,
    assert_matches,
    band,
    by_tile,
    causal,
    dense,
    full,
    random_qkv,
    seen_in,
)


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
