"""What users of context parallelism ran into elsewhere, tried here: the reports that no other test covers.

Which report is where is in docs/reports.md. Whatever needs ranks of its own is in tests/reported_bugs/test_reports_ranks.py.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet, union
from cp_engine.algebra.layout import Mesh, contiguous
from cp_engine.algebra.mask import Band, Mask
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.config.composition import read
from cp_engine.exchange.target import Target
from cp_engine.job import explain
from cp_engine.job.verify import reference
from cp_engine.job.verify.attention import inputs_of
from cp_engine.plan.cost import totals
from cp_engine.plan.ir import Plan
from cp_engine.plan.prove import prove
from cp_engine.plan.token_layout import TokenLayout
from cp_engine.runtime.memory import peak
from cp_engine.runtime.program import Program
from tests.helpers import (
    CAUSAL,
    PRESETS,
    assert_close,
    assert_equals_reference,
    begins_with_latent,
    computed,
    fitting,
    in_float64,
    local,
    plan_of,
    shipped,
    small,
    together,
    varied,
)

EXCHANGING = [p for p in PRESETS if p != "none"]
OF_QKV = [p for p in EXCHANGING if not begins_with_latent(p)]
BOUND = 1e-12
LONG = small(sequence=4096, heads=8, head_dim=64)
ROOT = Path(__file__).parents[2]
Config = Mapping[str, object]


def attended(plan: Plan, tensors: Mapping[str, Tensor], dout: Tensor, scale: float | None = None) -> dict[str, Tensor]:
    """out and the gradient of every input over whole sequences, with every rank in this process."""
    program = Program(in_float64(plan), Target(ranks=tuple(range(plan.degree)), device="cpu", communicator=None))
    given = [local(plan, tensors, r) for r in range(plan.degree)]
    outs = program.run({n: [x[n] for x in given] for n in tensors}, scale or plan.shape.head_dim**-0.5)
    douts = [dout[:, :, list(held)] for held in plan.entry.sequence]
    grads = iter(torch.autograd.grad(outs, [x for rank in given for x in rank.values()], douts))
    return together(plan, [{"out": o.detach(), **{f"d{n}": next(grads) for n in tensors}} for o in outs])


def wanted(
    plan: Plan, tensors: Mapping[str, Tensor], dout: Tensor, mask: Config, scale: float | None = None
) -> dict[str, Tensor]:
    """The same by the dense reference."""
    seen = reference.visible(mask, plan.shape.sequence)
    return reference.gradients_of(tensors, dout, seen, scale or plan.shape.head_dim**-0.5)


# ------------------------------------------------------------------ gradients
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_gradient_of_a_shard_is_the_sum_of_what_every_ranks_queries_add(preset: str, degree: int) -> None:
    plan = in_float64(plan_of(preset, degree=degree, shape=fitting(preset, small(batch=3, sequence=18, heads=4))))
    tensors, dout = inputs_of(plan)
    parts = []
    for held in plan.entry.sequence:  # one rank at a time has an upstream gradient
        mine = torch.zeros_like(dout)
        mine[:, :, list(held)] = dout[:, :, list(held)]
        parts.append(attended(plan, tensors, mine))
        assert_close(parts[-1], wanted(plan, tensors, mine, CAUSAL), BOUND)
    together_ = attended(plan, tensors, dout)
    for name in (n for n in together_ if n != "out"):
        torch.testing.assert_close(sum(p[name] for p in parts), together_[name], rtol=0, atol=BOUND)


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_equal_sizes_of_tokens_heads_and_width_hide_no_swapped_dims(preset: str, kernel: str) -> None:
    shape = small(batch=8, sequence=16, heads=8, head_dim=8)  # 8 tokens on each of 2 ranks
    plan = plan_of(varied(preset, 2, kernel=kernel), shape=fitting(preset, shape))
    assert_equals_reference(plan, CAUSAL)


# ------------------------------------------------------------------ heads
@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree"),
    [(40, 8, 5), (40, 8, 8), (40, 8, 16), (28, 4, 8), (20, 20, 8), (10, 10, 4), (7, 7, 4), (8, 2, 4), (8, 2, 8)],
)
def test_heads_that_do_not_divide_are_a_partition_and_equal_reference(heads: int, kv_heads: int, degree: int) -> None:
    plan = plan_of("ulysses", degree=degree, shape=small(sequence=18, heads=heads, kv_heads=kv_heads, head_dim=4))
    held = [h for rank in plan.steps[0].layout_after("q").heads for h in rank]
    assert held == list(range(heads))
    assert_equals_reference(plan, CAUSAL)


@pytest.mark.quick
@pytest.mark.parametrize("heads_of_a_tensor_parallel_rank", [4, 2])
def test_latent_gives_what_expanded_keys_give_and_sends_less(heads_of_a_tensor_parallel_rank: int) -> None:
    heads = heads_of_a_tensor_parallel_rank
    shape = replace(small(batch=2, sequence=32, heads=heads, head_dim=24, v_head_dim=16), latent_dim=16, rope_dim=8)
    plan = in_float64(plan_of("mla_ulysses", degree=2, shape=shape))
    other = in_float64(plan_of("ulysses", degree=2, shape=replace(shape, latent_dim=0, rope_dim=0)))
    tensors, dout = inputs_of(plan)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    k, v = reference.expanded(leaves["kv_latent"], leaves["k_rope"], leaves["kv_up"], 16)
    found = attended(other, {"q": tensors["q"], "k": k.detach(), "v": v.detach()}, dout)
    dlatent, drope, dup = torch.autograd.grad(
        (k, v), [leaves[n] for n in ("kv_latent", "k_rope", "kv_up")], (found["dk"], found["dv"])
    )
    expected = {"out": found["out"], "dq": found["dq"], "dkv_latent": dlatent, "dk_rope": drope, "dkv_up": dup}
    assert_close(attended(plan, tensors, dout), expected, BOUND)
    assert max(totals(plan).sent[0]) < max(totals(other).sent[0])


# ------------------------------------------------------------------ lengths and padding
@pytest.mark.parametrize(("sequence", "degree"), [(2, 2), (3, 2), (4, 2), (4, 4), (7, 4)])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_sequence_below_two_tokens_per_zigzag_chunk_equals_reference(preset: str, sequence: int, degree: int) -> None:
    shape = fitting(preset, small(batch=3, sequence=sequence))
    plan = plan_of(varied(preset, degree, order="zigzag"), shape=shape)
    assert_equals_reference(plan, CAUSAL)


@pytest.mark.parametrize("sequence", range(29, 37))
@pytest.mark.parametrize("preset", ["ulysses", "ring", "ring_zigzag"])
def test_every_length_from_29_to_36_equals_reference(preset: str, sequence: int) -> None:
    assert_equals_reference(plan_of(preset, degree=4, shape=small(sequence=sequence, heads=8, kv_heads=2)), CAUSAL)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_pad_tokens_behind_any_number_of_real_ones_move_nothing(preset: str, is_causal: bool) -> None:
    for real in range(1, 17) if is_causal else (1, 13, 16):
        mask = {"kind": "document", "starts": [0, real] if real < 16 else [0], "causal": is_causal}
        plan = plan_of(varied(preset, 2, order="zigzag"), shape=fitting(preset, small(sequence=16)), mask=mask)
        (tensors, dout), plan = inputs_of(in_float64(plan)), in_float64(plan)
        dout[:, :, real:] = 0  # a pad token has no loss
        found = attended(plan, tensors, dout)
        assert_close(found, wanted(plan, tensors, dout, mask), BOUND)
        for name in plan.inputs:
            tensors[name][:, :, real:] *= -3
        again = attended(plan, tensors, dout)
        is_of_tokens = {n: x for n, x in found.items() if n[1:] not in plan.parameters}
        assert_close(
            {n: again[n][:, :, :real] for n in is_of_tokens},
            {n: x[:, :, :real] for n, x in is_of_tokens.items()},
            BOUND,
        )


@dataclass(frozen=True, kw_only=True)
class TwoStreams(TokenLayout):
    """Two streams one after the other in the sequence, each dealt on its own."""

    kind = "two_streams"
    first: int

    def deal(self, held: IndexSet, ranks: int, mask: Mask) -> list[IndexSet]:
        parts = held.part(0, self.first), held.part(self.first, held.count - self.first)
        return [union(list(pair), held.size) for pair in zip(*(contiguous(p, ranks) for p in parts), strict=True)]


@pytest.mark.parametrize("preset", EXCHANGING)
def test_two_streams_that_do_not_divide_equal_reference(preset: str) -> None:
    composition = read({**shipped(preset, ()), "degree": None}, None)
    shape = fitting(preset, small(batch=2, sequence=7 + 32))
    plan = prove(replace(composition, layout=TwoStreams(first=7)), shape, mask_of("full", 39))
    assert [sum(p < 7 for p in held) for held in plan.entry.sequence[:2]] in ([4, 3], [2, 2])  # on 2 and on 4 ranks
    assert_equals_reference(plan, {"kind": "full"})


# ------------------------------------------------------------------ numbers
@pytest.mark.parametrize("preset", EXCHANGING)
def test_large_scores_and_blocks_that_nobody_sees_give_no_nan(preset: str) -> None:
    """The first 8 queries see nothing, and with them whole blocks of ranks see nothing of each other."""
    mask = Mask(kind="half", bands=(Band(q0=8, q1=16, k0=8, k1=16, low=0, high=16),), size=16)
    shape = fitting(preset, small(batch=2, sequence=16))
    plan = in_float64(plan_of(preset, degree=4, shape=shape, mask=mask))
    tensors, dout = inputs_of(plan)
    tensors["q"] *= 30
    seen = reference.visible({"kind": "document", "starts": [0, 8]}, 16)
    seen[:8] = False
    found = attended(plan, tensors, dout)
    assert_close(found, reference.gradients_of(tensors, dout, seen, shape.head_dim**-0.5), 1e-9)
    assert (found["out"][:, :, :8] == 0).all() and (found["dq"][:, :, :8] == 0).all()


@pytest.mark.parametrize("mask", [{"kind": "window", "left": 0, "right": 0}, {"kind": "window", "left": 3, "right": 2}])
@pytest.mark.parametrize("preset", EXCHANGING)
def test_masks_of_few_keys_have_the_bound_of_all_masks(preset: str, mask: Config) -> None:
    shape = fitting(preset, small(batch=2, sequence=31))
    assert_equals_reference(plan_of(preset, degree=4, shape=shape, mask=mask), mask)


# ------------------------------------------------------------------ meshes and memory
def test_axes_in_either_order_are_shown_and_give_the_same_numbers() -> None:
    shape = small(batch=2, sequence=30, heads=8, kv_heads=2)
    near, far = (
        plan_of("usp", f"cp.axes=[{axes}]", degree=4, shape=shape) for axes in ("ring,ulysses", "ulysses,ring")
    )
    assert near.mesh == Mesh(axes=("ring", "ulysses"), sizes=(2, 2)) and near.entry != far.entry
    assert "(ring=2 x ulysses=2)" in explain.text(near) and "(ulysses=2 x ring=2)" in explain.text(far)
    assert_close(computed(near), computed(far), BOUND)


@pytest.mark.parametrize("preset", ["ulysses", "ring_zigzag", "usp"])
def test_what_a_call_keeps_for_backward_falls_with_the_ranks(preset: str) -> None:
    one, two, four = (kept_by(preset, n) for n in (1, 2, 4))
    assert two == pytest.approx(one / 2, rel=0.01) and four == pytest.approx(one / 4, rel=0.01)


def test_gathered_keys_and_values_do_not_fall_and_the_plan_says_so() -> None:
    keys_and_values = 2 * LONG.sequence * LONG.heads * LONG.head_dim * 4
    for ranks in (2, 4, 8):
        assert kept_by("allgather_kv", ranks) > keys_and_values
    plan = plan_of("allgather_kv", degree=4, shape=LONG)
    assert explain.data(plan)["peak_bytes"]["kept"] == peak(plan).kept
    assert re.search(r"^memory .* MiB forward, .* MiB backward", explain.text(plan), re.MULTILINE)


def kept_by(preset: str, degree: int) -> int:
    return peak(plan_of(preset, degree=degree, shape=LONG)).kept


def test_planned_peak_promises_no_saving_where_there_is_none() -> None:
    one, two = (peak(plan_of("ring", degree=n, shape=replace(LONG, sequence=64))) for n in (1, 2))
    assert two.backward > one.backward


# ------------------------------------------------------------------ the table
@pytest.mark.quick
def test_every_test_that_the_table_names_exists() -> None:
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    assert len(named) > 50
    for path in sorted({path for path, _ in named}):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        there = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert {name for of, name in named if of == path} <= there, path


def test_every_report_of_the_table_has_a_test_or_a_reason() -> None:
    rows = [r for r in (ROOT / "docs" / "reports.md").read_text(encoding="utf-8").splitlines() if "#" in r and "|" in r]
    assert len(rows) == 138
    for row in rows:
        report, _, here = (cell.strip() for cell in row.strip("| ").split("|"))
        assert re.match(r"[\w.-]+/[\w.-]+#\d+", report), row
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`|out of scope: \w+", here), row
