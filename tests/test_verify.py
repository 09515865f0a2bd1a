"""`verify` in float64, all ranks in one process: every preset, count of ranks, shape, length, batch, order and kernel."""

import functools
import itertools

import pytest

from cp_engine import verify
from cp_engine.compose import compose, presets
from cp_engine.plan import Shape
from cp_engine.schema import plan_from_config

HEADS = {"mha": (4, 4, 16, 16), "gqa 8/2": (8, 2, 16, 16), "gqa 6/3": (6, 3, 16, 16), "mla": (4, 4, 192, 128)}
RANKS, LENGTHS, BATCHES = (1, 2, 3, 4, 8), (31, 32, 257), (1, 3)
ORDERS = ("contiguous", "zigzag", "striped")


@functools.cache
def composed(preset: str) -> dict:
    """Hydra takes a quarter of a second; what the overrides do is tested elsewhere."""
    return compose(preset)


def check(preset: str, ranks: int, heads: str, length: int, batch: int, order: str, mask: str, kernel: str) -> None:
    cp = composed(preset)
    changed = {"layout": {"kind": order}, "degree": ranks}
    cp = {**cp, **changed, "steps": {**cp["steps"], "attend": {**cp["steps"]["attend"], "kernel": kernel}}}
    h, kv, d, dv = HEADS[heads]
    shape = Shape(batch=batch, sequence=length, heads=h, kv_heads=kv, head_dim=d, v_head_dim=dv, dtype="float64")
    plan = plan_from_config(cp, shape=shape, mask=mask)
    rows = verify.in_one_process(plan, {"kind": mask})
    assert [r.name for r in rows] == ["out", "dq", "dk", "dv", "influence"]
    assert [r for r in rows if not r.is_good] == []


def matrix(preset: str) -> list[tuple[int, str, int, int, str, str, str]]:
    ranks = RANKS if preset != "none" else (1,)
    masks, kernels = ("causal", "full"), ("auto", "math")
    return list(itertools.product(ranks, HEADS, LENGTHS, BATCHES, ORDERS, masks, kernels))


def covering(cases: list[tuple[int, str, int, int, str, str, str]]) -> list[tuple[int, str, int, int, str, str, str]]:
    """A few cases in which every pair of two values of two fields occurs (greedy)."""
    fields = range(len(cases[0]))
    missing = {(i, j, c[i], c[j]) for c in cases for i in fields for j in fields if i < j}
    chosen = []
    while missing:
        best = max(cases, key=lambda c: sum((i, j, c[i], c[j]) in missing for i in fields for j in fields if i < j))
        chosen.append(best)
        missing -= {(i, j, best[i], best[j]) for i in fields for j in fields if i < j}
    return chosen


@pytest.mark.parametrize("preset,case", [(p, c) for p in presets() for c in covering(matrix(p))])
def test_out_and_gradients_equal_dense_attention(preset, case):
    check(preset, *case)


@pytest.mark.long
@pytest.mark.parametrize("preset", presets())
def test_out_and_gradients_equal_dense_attention_in_the_whole_matrix(preset):
    for case in matrix(preset):
        check(preset, *case)


MASKS = [
    {"kind": "window", "left": 5, "right": 0},
    {"kind": "window", "left": 4, "right": 9},
    {"kind": "prefix", "length": 7},
    {"kind": "document", "starts": [0, 1, 16, 30]},
    {"kind": "document", "starts": [0, 12], "left": 6},
]


@pytest.mark.parametrize("preset", [p for p in presets() if p != "none"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bands_of_windows_documents_and_prefixes_lower_to_the_right_tiles(preset, order, mask):
    cp = {**composed(preset), "layout": {"kind": order}, "degree": 3}
    shape = Shape(batch=2, sequence=31, heads=6, kv_heads=3, head_dim=8, v_head_dim=8, dtype="float64")
    rows = verify.in_one_process(plan_from_config(cp, shape=shape, mask=mask), mask)
    assert [r for r in rows if not r.is_good] == []
