"""Sizes of sparse attention, and what is wrong with a plan's numbers in one process."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

from cp_engine.algebra.shape import Shape
from cp_engine.job.verify import attention as verify
from cp_engine.plan.ir import Plan
from tests.helpers import CAUSAL

SHAPE = Shape(
    batch=1,
    sequence=64,
    heads=4,
    kv_heads=1,
    head_dim=24,
    v_head_dim=16,
    dtype="float64",
    latent_dim=16,
    rope_dim=8,
    index_heads=3,
    index_dim=8,
    topk=10,
)
PUBLIC = Shape(
    batch=1,
    sequence=4096,
    heads=128,
    kv_heads=1,
    head_dim=576,
    v_head_dim=512,
    dtype="bfloat16",
    latent_dim=512,
    rope_dim=64,
    index_heads=64,
    index_dim=128,
    topk=2048,
)
BOUND = 1e-11
Node = dict[str, object]


def call(**sizes: int) -> Shape:
    return replace(SHAPE, **sizes)


def wrong(plan: Plan, mask: Mapping[str, object] = CAUSAL) -> list[verify.Row]:
    """What is out of bounds; every row that there has to be is there."""
    rows = verify.in_one_process(plan, mask)
    names = ["out", "indexer_loss", *(f"d{name}" for name in plan.inputs), "topk"]
    assert [row.name for row in rows if row.name != "influence"] == names
    return [row for row in rows if not row.is_good or (row.name != "influence" and row.error > BOUND)]


def without(cp: Mapping[str, object], step: str) -> Node:
    order = cp["order"]
    assert isinstance(order, list)
    return {**cp, "order": [name for name in order if name != step]} if step in order else {**cp}


def moved(cp: Mapping[str, object], step: str, tensors: list[str]) -> Node:
    changed = deepcopy(dict(cp))
    changed["steps"][step]["tensors"] = tensors  # type: ignore[index]
    return changed
