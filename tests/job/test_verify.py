"""`verify` in float64 with all ranks in one process: every preset on every mask, head layout, number of ranks and length.

The covering sample runs every value of a field beside every value of every other field. The whole matrix (`-m long`, with `-n 0 -s` for
its counts) runs the product of masks, heads, ranks, lengths and batches; the other fields are drawn for each of its cases.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, count, product

import pytest

from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import read
from cp_engine.errors import LayoutError
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.plan.ir import Composition
from cp_engine.plan.prove import prove
from tests.helpers import PRESETS, begins_with_latent, fitting, plan_of, shipped, small, varied

HEADS = {
    "mha": (4, 4, 16, 16),
    "gqa 8/2": (8, 2, 16, 16),
    "gqa 6/3": (6, 3, 16, 16),
    "mqa": (4, 1, 16, 16),
    "mla": (4, 4, 192, 128),
}
GROUPS = {"mha": 2, "gqa 8/2": 2, "gqa 6/3": 3, "mqa": 1, "mla": 2}
"""Head groups that divide heads and kv heads."""

MASKS = (
    *("full", "causal", "window", "window, two-sided", "prefix", "documents", "documents, full"),
    *("documents with window", "documents, full, with window", "block", "block, full", "window and documents"),
)


def mask_over(name: str, size: int, ranks: int) -> dict[str, object]:
    """A mask over some tokens. Of its documents one and the last have length 1, one ends where the first rank's tokens end
    (of contiguous ones), and the ones after it cross ranks."""
    border = -(-size // ranks)
    starts = sorted(p for p in {0, 1, border, border + size // 2, size - 1} if p < size)
    kind, _, rest = name.partition(" ")
    match kind.rstrip(","):
        case "window" if rest == "and documents":
            return {"kind": "both", "of": [mask_over("window", size, ranks), mask_over("documents", size, ranks)]}
        case "window":
            return {"kind": "window", "left": size // 5, "right": size // 9 if rest else 0}
        case "prefix":
            return {"kind": "prefix", "length": size // 4}
        case "documents":
            left = {"left": size // 6} if "window" in rest else {}
            right = {"right": size // 8} if "window" in rest and "full" in rest else {}
            return {"kind": "document", "starts": starts, "causal": "full" not in rest, **left, **right}
        case "block":
            return {"kind": "block", "size": 1 + size // 4, "causal": not rest}
    return {"kind": name}


@dataclass(frozen=True)
class Case:
    """One verification of a preset."""

    mask: str
    heads: str
    ranks: int
    length: int
    batch: int
    order: str
    is_grouped: bool
    has_sinks: bool
    kernel: str
    turn: int


def values(preset: str) -> dict[str, Sequence[object]]:
    """What each field of a case may be."""
    axes, is_latent = shipped(preset, ())["axes"], begins_with_latent(preset)
    assert isinstance(axes, list)
    return {
        "mask": MASKS,
        "heads": [h for h, (q, kv, _, _) in HEADS.items() if q == kv or not is_latent],
        "ranks": (1, 2, 3, 4, 6, 8) if axes else (1,),
        "length": (30, 31, 64, 257),
        "batch": (1, 3),
        "order": ("contiguous", "zigzag", "striped", "balanced", "reorder to striped", "reorder to balanced"),
        "is_grouped": (False,) if is_latent else (False, True),
        "has_sinks": (False, True),
        "kernel": ("auto", "math"),
        "turn": range(4 if len(axes) > 1 else 1),
    }


@cache
def composition(preset: str, case: Case) -> Composition:
    """A preset with the fields of a case, read once: masks, lengths and batches do not change it."""
    pipeline = GROUPS[case.heads] if case.is_grouped else 1
    return read(
        varied(
            *(preset, case.ranks),
            turn=case.turn,
            order=case.order,
            head_groups=pipeline,
            sinks=case.has_sinks,
            kernel=case.kernel,
        ),
        None,
    )


def problems(preset: str, case: Case) -> list[str]:
    """What is out of bounds."""
    heads, kv_heads, head_dim, v_head_dim = HEADS[case.heads]
    sizes = {"batch": case.batch, "sequence": case.length, "heads": heads, "kv_heads": kv_heads}
    shape = fitting(preset, Shape(**sizes, head_dim=head_dim, v_head_dim=v_head_dim, dtype="float64"))
    config = mask_over(case.mask, case.length, case.ranks)
    mask = mask_of(config, case.length)
    plan = prove(composition(preset, replace(case, mask="", length=0, batch=0)), shape, mask)
    rows = verify.in_one_process(plan, config)
    names = ["out", *(f"d{name}" for name in (*plan.inputs, *plan.parameters))]
    sees_first = bool(reference.visible(config, case.length)[-1, 0])
    assert [row.name for row in rows] == [*names, *(["influence"] if sees_first else [])]
    return [f"{case}: {row.name} {row.error:.1e}" for row in rows if not row.is_good]


# ------------------------------------------------------------------ a covering sample
Pair = tuple[str, object, str, object]


def pairs_of(chosen: Mapping[str, object]) -> set[Pair]:
    return {(a, chosen[a], b, chosen[b]) for a, b in combinations(chosen, 2)}


def covering(allowed: Mapping[str, Sequence[object]], seed: int = 0) -> list[dict[str, object]]:
    """A few choices in which every pair of values of two fields occurs (greedy, from a pair that is still missing)."""
    generator, chosen = random.Random(seed), list[dict[str, object]]()
    missing = {(a, x, b, y): None for a, b in combinations(allowed, 2) for x, y in product(allowed[a], allowed[b])}
    while missing:
        a, x, b, y = next(iter(missing))
        made = {a: x, b: y}
        for name in generator.sample(sorted(allowed), len(allowed)):
            if name not in made:
                options = list(allowed[name])  # of equally useful values the first, which is the quicker one
                made[name] = max(options, key=lambda v: sum(p in missing for p in _beside(name, v, made, allowed)))
        chosen.append({name: made[name] for name in allowed})
        for pair in pairs_of(chosen[-1]):
            missing.pop(pair, None)
    return chosen


def _beside(name: str, value: object, made: Mapping[str, object], allowed: Mapping[str, object]) -> list[Pair]:
    """The pairs that a value makes with what is chosen, in the order of the fields."""
    places = list(allowed)
    return [
        (name, value, b, y) if places.index(name) < places.index(b) else (b, y, name, value) for b, y in made.items()
    ]


def test_covering_sample_has_every_pair() -> None:
    for preset in ("none", "ulysses", "usp", "mla_ulysses"):
        allowed = values(preset)
        sample = covering(allowed)
        wanted = {(a, x, b, y) for a, b in combinations(allowed, 2) for x, y in product(allowed[a], allowed[b])}
        assert set().union(*(pairs_of(chosen) for chosen in sample)) == wanted
        assert len(sample) <= 1.2 * max(len(allowed[a]) * len(allowed[b]) for a, b in combinations(allowed, 2))


@pytest.mark.parametrize("preset", PRESETS)
def test_out_and_gradients_equal_dense_attention(preset: str) -> None:
    wrong = [line for chosen in covering(values(preset)) for line in problems(preset, Case(**chosen))]
    assert wrong == []


# ------------------------------------------------------------------ the whole matrix
PRODUCT = ("mask", "heads", "ranks", "length", "batch")


@pytest.mark.long
@pytest.mark.parametrize("preset", PRESETS)
def test_out_and_gradients_equal_dense_attention_in_the_whole_matrix(preset: str) -> None:
    allowed, generator, wrong, number = values(preset), random.Random(0), list[str](), 0
    allowed["ranks"] = [n for n in allowed["ranks"] if n != 1 or len(allowed["ranks"]) == 1]
    for chosen in product(*(allowed[name] for name in PRODUCT)):
        drawn = {name: generator.choice(options) for name, options in allowed.items() if name not in PRODUCT}
        wrong += problems(preset, Case(**dict(zip(PRODUCT, chosen, strict=True)), **drawn))
        number += 1
    print(f"\n{preset}: {number} cases, {len(wrong)} values out of bounds")
    assert wrong == []


# ------------------------------------------------------------------ what a preset does not accept
@pytest.mark.parametrize("preset", [p for p in PRESETS if begins_with_latent(p)])
@pytest.mark.parametrize("heads", ["gqa 8/2", "gqa 6/3", "mqa"])
def test_latent_with_fewer_kv_heads_than_heads_is_refused(preset: str, heads: str) -> None:
    h, kv, _, _ = HEADS[heads]
    shape = replace(fitting(preset, small(heads=h)), kv_heads=kv)
    with pytest.raises(LayoutError, match=f"there are {h} heads and {kv} kv heads") as caught:
        plan_of(preset, shape=shape)
    assert caught.value.problems[0].key == "cp.steps.expand"
    assert "every head of multi-head latent attention expands a key and a value of its own" in str(caught.value)


@pytest.mark.parametrize("preset", [p for p in PRESETS if begins_with_latent(p)])
@pytest.mark.parametrize("field", ["latent_dim", "rope_dim"])
def test_latent_that_the_call_does_not_have_is_refused(preset: str, field: str) -> None:
    shape = replace(fitting(preset, small()), **{field: 0})
    with pytest.raises(LayoutError, match=f"shape.{field}  is 0, and cp.steps.expand begins with"):
        plan_of(preset, shape=shape)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("heads", "kv_heads", "allowed"), [(4, 1, "1"), (6, 3, "1, 3"), (8, 4, "1, 2, 4")])
def test_head_groups_that_are_not_equal_are_refused(preset: str, heads: int, kv_heads: int, allowed: str) -> None:
    shape = fitting(preset, small(heads=heads, kv_heads=kv_heads))
    groups = next(n for n in count(2) if str(n) not in allowed.split(", ")) if not begins_with_latent(preset) else 2
    with pytest.raises(LayoutError, match=f"cp.head_groups  {groups} does not divide the heads") as caught:
        plan_of(preset, f"cp.head_groups={groups}", shape=shape)
    details = dict(caught.value.problems[0].details)
    assert details["allowed"] == ("1" if begins_with_latent(preset) else allowed)
    assert ("kv_latent and k_rope have one head" in str(caught.value)) == begins_with_latent(preset)
