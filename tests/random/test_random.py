"""Random compositions: what compiles equals dense attention, what a fault breaks is refused; nothing ends in a crash.

The long run is `python -m tools.run_random`; what it found once stays here.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_engine.algebra.mask_kinds import KINDS
from cp_engine.errors import CPError
from cp_engine.primitives.table import LAYOUTS
from tests.helpers import small
from tests.random.composition_mutations import MUTATIONS, mutated
from tests.random.compositions import MASKS, Case, Node, case, gather, maybe, to_heads
from tests.random.right_or_refused import outcome

CALL = small(sequence=2, heads=1, head_dim=4, dtype="float64")
CAUSAL: Node = {"kind": "causal"}
DENSE: Node = {"kind": "dense"}


def composed(mesh: Node, steps: Node, **changes: object) -> Node:
    """A composition from its steps, in their order."""
    cp: Node = {"name": "escaped", "mesh": mesh, "axes": list(mesh), "layout": {"kind": "contiguous"}}
    return {**cp, "order": list(steps), "steps": steps, **changes}


ESCAPES: list[tuple[str, Case, str]] = [
    (
        "gradients not summed where ranks without queries want no keys: as many elements dropped as replicated",
        Case(
            composed(
                {"a": 2, "b": 2},
                {"one": gather(["a"], ["k", "v"], "all"), "two": gather(["b"], ["k", "v"], "visible"), "attend": DENSE},
            ),
            CALL,
            CAUSAL,
        ),
        "right",
    ),
    (
        "boundaries of a call refused in the middle of a job, by a plan that was made for any",
        Case(
            composed(
                {"a": 2, "b": 2},
                {"one": gather(["a"], ["k", "v"], "visible"), "two": gather(["b"], ["k", "v"], "all"), "attend": DENSE},
            ),
            replace(CALL, sequence=4),
            {"kind": "document"},
            called={"kind": "document", "starts": [0, 3]},
        ),
        "LayoutError",
    ),
    (
        "an order that follows from each call's mask, not taken back, and none at all under the mask of the plan",
        Case(
            composed(
                {"a": 5},
                {
                    "fetch": gather(["a"], ["k", "v"], "all"),
                    "again": {
                        "kind": "reorder",
                        "to": {"kind": "balanced", "chunks": 2},
                        "over": ["a"],
                        "tensors": ["q"],
                    },
                    "deal": {
                        "kind": "reorder",
                        "to": {"kind": "balanced", "chunks": 2},
                        "over": ["a"],
                        "tensors": ["q"],
                    },
                    "attend": DENSE,
                    "back": {"kind": "undo", "of": "deal", "tensors": ["out"]},
                },
                layout={"kind": "zigzag"},
            ),
            replace(CALL, sequence=40),
            {"kind": "document"},
            called={"kind": "document", "starts": [0, 17, 18, 32, 33]},
        ),
        "LayoutError",
    ),
    (
        "RuntimeError where a rank has no head, and so no part of the latent",
        Case(
            composed(
                {"a": 2},
                {
                    "in": to_heads(["a"], ["q"]),
                    "cut": to_heads(["a"], ["kv_latent", "k_rope"]),
                    "expand": {"kind": "expand"},
                    "attend": DENSE,
                    "back": {"kind": "undo", "of": "in", "tensors": ["out"]},
                },
            ),
            replace(CALL, latent_dim=3, rope_dim=2),
            CAUSAL,
        ),
        "right",
    ),
    (
        "RuntimeError where a rank has heads and no part of the latent",
        Case(
            composed(
                {"a": 2},
                {
                    "cut": to_heads(["a"], ["kv_latent", "k_rope"]),
                    "expand": {"kind": "expand"},
                    "attend": DENSE,
                },
            ),
            replace(CALL, latent_dim=3, rope_dim=2),
            CAUSAL,
        ),
        "CoverageError",
    ),
    (
        "RuntimeError where a rank without heads has the rotary key and not the latent",
        Case(
            composed(
                {"a": 2},
                {
                    "gather": gather(["a"], ["k_rope"], "all"),
                    "cut": to_heads(["a"], ["kv_latent"]),
                    "in": to_heads(["a"], ["q"]),
                    "expand": {"kind": "expand"},
                    "attend": DENSE,
                    "back": {"kind": "undo", "of": "in", "tensors": ["out"]},
                },
            ),
            replace(CALL, latent_dim=3, rope_dim=2),
            CAUSAL,
        ),
        "right",
    ),
    (
        "TypeError for a field that is no name",
        Case(composed({}, {"attend": {**DENSE, 1: 2}}), CALL, CAUSAL),
        "ConfigError",
    ),
    (
        "TypeError for an axis that is no name",
        Case(composed({1: 2}, {"attend": DENSE}, axes=["a"]), CALL, CAUSAL),
        "ConfigError",
    ),
    (
        "TypeError for an axis that is no name beside one that is",
        Case(composed({"a": 2, 1: 2}, {"attend": DENSE}, axes=["a", "b"]), CALL, CAUSAL),
        "ConfigError",
    ),
    (
        "TypeError for a step that is no name",
        Case(composed({}, {1: DENSE}, order=["attend"]), CALL, CAUSAL),
        "ConfigError",
    ),
    (
        "KeyError for a mask of masks without a kind",
        Case(composed({}, {"attend": DENSE}), CALL, {"kind": "both", "of": [{}]}),
        "ConfigError",
    ),
    (
        "TypeError for a head_dim that is no number",
        Case(composed({}, {"attend": DENSE}), replace(CALL, head_dim="4"), CAUSAL),
        "ConfigError",
    ),
]
"""(what was wrong, the smallest case that showed it, what has to come of it)."""


@pytest.mark.quick
@pytest.mark.parametrize(("escaped", "wanted"), [e[1:] for e in ESCAPES], ids=[e[0] for e in ESCAPES])
def test_what_escaped_once_is_right_or_refused(escaped: Case, wanted: str) -> None:
    assert outcome(escaped, by_threads=True) == wanted


def right_or_refused(random: Random) -> None:
    drawn = case(random)
    if outcome(drawn, by_threads=maybe(random, 20)) == "right":
        outcome(mutated(random, drawn)[1])


@settings(max_examples=200)
@given(st.randoms(use_true_random=False))
def test_random_composition_and_a_fault_in_it_are_right_or_refused(random: Random) -> None:
    right_or_refused(random)


def test_random_compositions_reach_everything_and_most_compile() -> None:
    """Else the test above would say little; a primitive or a mask that is added has to be drawn too."""
    compiled: Counter[object] = Counter()
    count = 400
    for i in range(count):
        drawn = case(Random(f"reached:{i}"))
        try:
            plan = drawn.plan()
        except CPError as error:
            compiled["refused", type(error).__name__] += 1
            continue
        compiled["all"] += 1
        compiled.update({("step", s.step.kind) for s in plan.steps})
        compiled["layout", drawn.cp["layout"]["kind"]] += 1
        compiled["mask", drawn.mask["kind"]] += 1
        compiled["axes", len(plan.mesh.axes)] += 1
        compiled["rotate", max(len(s.get("rotate", ())) for s in drawn.cp["steps"].values())] += 1
        compiled["is_pipelined", drawn.cp["head_groups"] > 1] += 1
    assert set(MASKS) == set(KINDS)
    assert compiled["all"] >= count // 2
    wanted = [("step", k) for k in ("all_to_all", "all_gather", "reorder", "undo", "dense")]
    wanted += [("layout", k) for k in LAYOUTS] + [("mask", k) for k in KINDS] + [("axes", n) for n in (0, 1, 2, 3)]
    wanted += [("rotate", n) for n in (0, 1, 2)] + [("is_pipelined", True)]
    wanted += [("refused", e) for e in ("ConfigError", "LayoutError", "CoverageError")]
    assert [w for w in wanted if not compiled[w]] == []


HARMLESS = {"other order of axes", "other layout", "other pipeline"}
"""What changes who does what, or nothing: such compositions mostly still compile, and then must be right."""


def test_each_fault_is_refused_in_some_composition() -> None:
    refused: Counter[str] = Counter()
    random = Random("faults")
    while sum(refused.values()) < 250:
        drawn = case(random)
        try:
            drawn.plan()
        except CPError:
            continue
        what, changed = mutated(random, drawn)
        try:
            changed.plan()
        except CPError:
            refused[what] += 1
    assert set(MUTATIONS) - set(refused) <= HARMLESS
