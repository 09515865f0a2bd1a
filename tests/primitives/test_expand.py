"""The latent on ranks that hold none of it: one head cannot be cut over several ranks, and the others have nothing to expand."""

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch

from cp_engine.algebra.index_set import whole
from cp_engine.errors import CoverageError
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.operation import Saved
from cp_engine.job.verify import attention
from cp_engine.primitives.expand import ExpandOperation
from tests.helpers import plan_of, small

SHAPE = small(sequence=21, batch=3, latent_dim=6, rope_dim=3)
HEADS = {"kind": "all_to_all", "axes": ["a"], "split": "heads", "concat": "sequence"}
GATHER = {"kind": "all_gather", "axes": ["a"]}


def composition(ranks: int, **steps: dict[str, object]) -> dict[str, object]:
    return {
        "name": "latent",
        "mesh": {"a": ranks},
        "axes": ["a"],
        "layout": "striped",
        "order": list(steps),
        "steps": steps,
    }


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize(("cut", "whole"), [("kv_latent", "k_rope"), ("k_rope", "kv_latent"), (None, None)])
def test_ranks_without_a_query_head_may_hold_any_part_of_the_latent(heads: int, cut: str | None, whole: str | None):
    moves = {"cut": {**HEADS, "tensors": ["kv_latent", "k_rope"]}}
    if cut is not None:
        moves = {"gather": {**GATHER, "tensors": [whole]}, "cut": {**HEADS, "tensors": [cut]}}
    cp = composition(
        4,
        to_heads={**HEADS, "tensors": ["q"]},
        **moves,
        expand={"kind": "expand"},
        attend={"kind": "dense"},
        back={"kind": "undo", "of": "to_heads", "tensors": ["out"]},
    )
    shape = replace(SHAPE, heads=heads, kv_heads=heads)
    rows = attention.in_one_process(plan_of(cp, shape=shape), {"kind": "causal"})
    assert [r.name for r in rows] == ["out", "dq", "dkv_latent", "dk_rope", "dkv_up", "influence"]
    assert [r for r in rows if not r.is_good] == []


@pytest.mark.quick
def test_query_heads_without_the_latent_are_refused():
    cp = composition(
        2, cut={**HEADS, "tensors": ["kv_latent", "k_rope"]}, expand={"kind": "expand"}, attend={"kind": "dense"}
    )
    with pytest.raises(CoverageError, match="expand a latent that is not there"):
        plan_of(cp, shape=replace(SHAPE, heads=1, kv_heads=1))


@pytest.mark.parametrize("wide", [(), ("k_rope",), ("kv_latent", "k_rope")])
def test_gradients_of_the_latent_travel_in_the_dtype_that_is_planned(wide: tuple[str, ...]) -> None:
    """In float32 where ranks sum them, and in the call's where one rank alone has the head: bytes are counted so."""
    operation = ExpandOperation([whole(1)], [True], 4, frozenset(wide))
    brought = {"kv_latent": (2, 1, 5, 6), "k_rope": (2, 1, 5, 3), "kv_up": (1, 8, 6)}
    values = InFlight({name: [torch.randn(size).bfloat16()] for name, size in brought.items()})
    saved = _returned(operation.forward(values, 1.0))
    grads = InFlight({"k": [torch.randn(2, 1, 5, 7).bfloat16()], "v": [torch.randn(2, 1, 5, 4).bfloat16()]})
    _returned(operation.backward(grads, saved, 1.0))
    for name in ("kv_latent", "k_rope"):
        assert grads[name][0].dtype == (torch.float32 if name in wide else torch.bfloat16)


def _returned(moving: Generator[None, None, Saved]) -> Saved:
    while True:
        try:
            next(moving)
        except StopIteration as end:
            saved: Saved = end.value
            return saved
