"""Kernels, one guard each, against attention written out in float64."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile
from cp_engine.kernels.math import Math
from cp_engine.kernels.registry import KERNELS, Kernel
from tests.conftest import PATIENCE, clean_environment
from tests.kernels.dense import (
    BOUNDS,
    SCALE,
    TILES,
    assert_matches,
    band,
    by_tile,
    causal,
    dense,
    every_kernel,
    full,
    heads_last,
    random_qkv,
    run_kernel,
    seen_in,
)


@every_kernel
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=by_tile)
def test_kernel_equals_dense_for_every_tile(kernel: Kernel, dtype: torch.dtype, tile: Tile) -> None:
    tensors = tuple(x.to(dtype) for x in random_qkv(tile.q.count, tile.k.count))
    found = run_kernel(kernel, tensors, tile)
    assert {n: found[n].dtype for n in ("out", "dq", "dk", "dv")} == dict.fromkeys(("out", "dq", "dk", "dv"), dtype)
    assert found["lse"].dtype == torch.promote_types(dtype, torch.float32)
    assert_matches(found, dense(*tensors, seen_in(tile)), BOUNDS[dtype])


@pytest.mark.quick
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


@pytest.mark.quick
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
