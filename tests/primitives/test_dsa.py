"""DeepSeek sparse attention as a composition: numbers, selections, bytes, overlap, and what the proof refuses."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cp_engine.algebra.index_set import IndexSet, Run, whole
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.shape import Shape
from cp_engine.errors import CoverageError, CPError, LayoutError
from cp_engine.exchange.channel import Pending
from cp_engine.exchange.target import Target
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.kernels.sparse import selected_keys, torch_ops
from cp_engine.kernels.sparse.table import TorchSparse
from cp_engine.kernels.sparse.visibility import Sight
from cp_engine.plan.cost import totals
from cp_engine.runtime.call import Call
from cp_engine.runtime.context import ContextParallel
from cp_engine.runtime.program import Program
from tests.gloo import World
from tests.helpers import CAUSAL, SPARSE, executed, few_chunks, plan_of, shipped, sized, small
from tests.primitives.sparse_shapes import BOUND, PUBLIC, SHAPE, Node, call, moved, without, wrong


# ------------------------------------------------------------------ numbers
@pytest.mark.parametrize(
    ("preset", "degree", "layout"),
    [  # by default each layout on several degrees, each degree in one layout or more
        pytest.param(
            preset,
            degree,
            layout,
            marks=() if ((i - j + k) % 4 in (0, 1) and degree < 8) or (degree, j) == (8, 1) else pytest.mark.long,
        )
        for (k, preset), (i, degree), (j, layout) in product(
            enumerate(SPARSE), enumerate((1, 2, 3, 4, 8)), enumerate(("contiguous", "zigzag", "striped", "balanced"))
        )
    ],
)
def test_out_loss_selections_and_gradients_equal_one_process(preset: str, degree: int, layout: str) -> None:
    cp = {**sized(shipped(preset, ()), degree), "layout": few_chunks(layout)}
    for sequence, batch, topk in ((64, 1, 10), (96, 3, 96), (257, 1, 40), (257, 3, 300)):
        assert wrong(plan_of(cp, shape=call(sequence=sequence, batch=batch, topk=topk))) == []


@pytest.mark.parametrize(
    "mask",
    [
        {"kind": "full"},
        {"kind": "window", "left": 9, "right": 0},
        {"kind": "document", "starts": [0, 1, 20, 50]},
        {"kind": "prefix", "length": 11},
    ],
    ids=lambda m: m["kind"],
)
@pytest.mark.parametrize("preset", SPARSE)
def test_keys_are_selected_among_those_that_any_mask_shows(preset: str, mask: Node) -> None:
    for degree in (2, 3):
        assert wrong(plan_of(preset, degree=degree, shape=call(sequence=61, topk=7), mask=mask), mask) == []


@pytest.mark.parametrize("dense_from", [0, 4, 1000], ids=["gathered", "both", "columns"])
def test_selected_keys_are_computed_alike_side_by_side_and_as_columns(
    dense_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_keys, "SPARSE_FROM", dense_from)
    assert wrong(plan_of("dsa", degree=2, shape=call(sequence=200, batch=2, topk=11))) == []


def test_equal_scores_go_to_the_lowest_positions_whatever_the_order_of_the_keys() -> None:
    """ReLU makes exact zeros: here all scores are equal."""
    index = torch_ops.Index(torch.zeros(1, 1, 6, 4), torch.randn(1, 1, 6, 2), torch.ones(1, 1, 6, 2))
    backwards = IndexSet((Run(3, 3), Run(0, 3)), 6)
    for keys in (whole(6), backwards):
        chosen = torch_ops.select(index, Sight(whole(6), keys, mask_of("causal", 6)), 3)
        assert chosen[0, 0].tolist() == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 4]


def test_the_last_of_several_selections_of_one_score_is_cut_by_position() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0, 0.5])
    index = torch_ops.Index(torch.ones(1, 1, 6, 1), scores.view(1, 1, 6, 1), torch.ones(1, 1, 6, 1))
    chosen = torch_ops.select(index, Sight(whole(6), whole(6), mask_of("full", 6)), 3)
    assert chosen[0, 0, 0].tolist() == [0, 1, 2]


def test_half_types_are_computed_in_float32() -> None:
    """The error of bfloat16 on 8 ranks is that of one rank."""
    errors = []
    for degree in (1, 8):
        plan = plan_of("dsa", degree=degree, shape=call(sequence=256, dtype="bfloat16", topk=256))
        tensors, dout = verify.inputs_of(plan)
        exact = reference.gradients_of(tensors, dout, reference.visible(CAUSAL, 256), 24**-0.5, 256)
        program = Program(plan, Target(ranks=tuple(range(degree)), device="cpu", communicator=None))
        held = [torch.tensor(list(s)) for s in plan.entry.sequence]
        given = {n: [x[:, :, i].bfloat16().requires_grad_() for i in held] for n, x in tensors.items()}
        results = program.results(given, 24**-0.5)
        losses = results["indexer_loss"]
        assert losses[0].dtype == torch.float32
        leaves = [x for xs in given.values() for x in xs]
        upstream = [*(dout[:, :, i].bfloat16() for i in held), *map(torch.ones_like, losses)]
        grads = iter(torch.autograd.grad([*results["out"], *losses], leaves, upstream))
        back = torch.cat(held).argsort()
        found = {f"d{n}": torch.cat([next(grads) for _ in held], 2)[:, :, back] for n in given}
        found["out"] = torch.cat(results["out"], 2)[:, :, back]
        errors.append({n: float((found[n].detach().double() - exact[n]).norm() / exact[n].norm()) for n in found})
    for name, alone in errors[0].items():
        assert errors[1][name] <= 1.3 * alone, name


# ------------------------------------------------------------------ bytes and overlap
@pytest.mark.parametrize("preset", SPARSE)
def test_ranks_send_what_the_plan_says(preset: str) -> None:
    for degree in (2, 3, 4):
        for sequence in (24, 31):
            executed(plan_of(preset, degree=degree, shape=call(sequence=sequence, batch=2, topk=5, dtype="float32")))


@pytest.mark.quick
def test_a_token_travels_as_704_elements() -> None:
    """Key of the indexer 128, latent 512 once, rotary key 64; gathering the latent as key and again as value takes 1,216."""
    plan = plan_of("dsa", degree=8, shape=PUBLIC)
    sent = 7 * (4096 // 8) * 704
    assert totals(plan).sent == ((sent * 2,) * 8, (sent * 4,) * 8)  # gradients travel in float32


def test_selections_travel_as_int32_and_have_no_gradient() -> None:
    plan = plan_of("dsa_ulysses", degree=8, shape=PUBLIC)
    share = next(c for s, c in zip(plan.steps, plan.costs, strict=True) if s.step.name == "share")
    assert share.bytes_sent == ((7 * 512 * 2048 * 4,) * 8, (0,) * 8) and share.collectives == (1, 0)


class Noted:
    """A group of nobody that notes when what is sent is waited for."""

    def __init__(self, events: list[str]) -> None:
        self.members, self.events = 2, events

    def channel(self, group: tuple[int, ...]) -> "Noted":
        return self

    def all_gather(self, send: Tensor) -> Pending:
        return self._pending(send.new_zeros(2 * send.numel()), f"{send.numel()}")

    def all_to_all_even(self, send: Tensor) -> Pending:
        return self._pending(torch.zeros_like(send), f"{send.numel()} back")

    def _pending(self, buffer: Tensor, name: str) -> Pending:
        events = self.events
        events.append(f"sent {name}")

        class Work:
            def wait(self) -> None:
                events.append(f"waited {name}")

        return Pending(buffer, (Work(),))


def test_the_latent_travels_while_the_indexer_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("dsa", "layout@cp.layout=contiguous", degree=2, shape=call(sequence=8, dtype="float32", topk=3))
    events: list[str] = []
    select = TorchSparse.select

    def noted(index: torch_ops.Index, sight: Sight, count: int) -> Tensor:
        events.append("select")
        return select(index, sight, count)

    monkeypatch.setattr(TorchSparse, "select", staticmethod(noted))
    program = Program(plan, Target(ranks=(0,), device="cpu", communicator=Noted(events)))
    tensors, _ = verify.inputs_of(plan)
    program.results({n: [x[:, :, :4].float()] for n, x in tensors.items()}, 1.0)
    index, latent = f"{4 * 8}", f"{4 * (16 + 8)}"
    assert events == [f"sent {index}", f"sent {latent}", f"waited {index}", "select", f"waited {latent}"]


# ------------------------------------------------------------------ what is refused
DSA = sized(shipped("dsa", ()), 4)


@pytest.mark.parametrize(
    ("cp", "key", "what"),
    [
        (without(DSA, "gather_index"), "cp.steps.select", "would not see"),
        (without(DSA, "gather"), "cp.steps.attend", "would not see"),
        (moved(DSA, "gather", ["kv_latent"]), "cp.steps.attend", "different layouts"),
        (moved(DSA, "gather", ["k_rope"]), "cp.steps.attend", "different layouts"),
        (moved(DSA, "gather_index", ["q_index"]), "cp.steps.select", "different layouts"),
        (without(DSA, "select"), "cp.steps.attend", "no step before it selects keys"),
        (without(DSA, "attend"), "cp.steps.learn", "no sparse attention before it"),
    ],
)
def test_a_tensor_or_step_that_is_left_out_is_refused(cp: Node, key: str, what: str) -> None:
    steps = cp["steps"]
    assert isinstance(steps, dict)
    cp = {**cp, "steps": {name: steps[name] for name in cp["order"]}}  # type: ignore[attr-defined]
    with pytest.raises(CPError, match=what) as caught:
        plan_of(cp, shape=SHAPE)
    assert caught.value.problems[0].key == key


def test_heads_that_are_split_for_the_indexer_alone_are_refused() -> None:
    split = {"kind": "all_to_all", "axes": ["cp"], "split": "heads", "concat": "sequence"}
    steps = {"split": {**split, "tensors": ["q_index", "w_index"]}, **DSA["steps"]}  # type: ignore[dict-item]
    cp = {**DSA, "steps": steps, "order": list(steps)}
    with pytest.raises(CoverageError, match=r"the selection at .* is for queries"):
        plan_of(cp, shape=SHAPE)


def test_heads_that_are_not_summed_are_refused() -> None:
    cp = deepcopy(sized(shipped("dsa_ulysses", ()), 4))
    cp["steps"]["learn"]["sum"] = []  # type: ignore[index]
    with pytest.raises(CoverageError, match="1 of 4 heads are on the ranks along no axis") as caught:
        plan_of(cp, shape=SHAPE)
    assert caught.value.problems[0].key == "cp.steps.learn"


@pytest.mark.parametrize(
    ("sizes", "key", "what"),
    [
        ({"kv_heads": 2}, "cp.steps.attend", "there are 2 kv heads"),
        ({"topk": 0}, "shape.topk", "is 0"),
        ({"topk": -1}, "shape.topk", "-1"),
        ({"index_heads": 0}, "shape.index_heads", "is 0"),
        ({"head_dim": 32}, "cp.steps.attend", r"the latent has 16 \+ 8"),
    ],
)
def test_sizes_that_sparse_attention_does_not_have_are_refused(sizes: dict[str, int], key: str, what: str) -> None:
    with pytest.raises(CPError, match=what) as caught:
        plan_of("dsa", degree=2, shape=call(**sizes))
    assert caught.value.problems[0].key == key


def test_dense_attention_of_a_model_that_selects_is_refused() -> None:
    with pytest.raises(LayoutError, match="attends to every visible key, and the model selects 5"):
        plan_of("ulysses", shape=replace(small(), topk=5))


def test_a_gather_in_two_steps_and_over_two_axes_one_after_the_other_are_right() -> None:
    gather = {"kind": "all_gather", "dim": "sequence"}
    rest = {name: node for name, node in DSA["steps"].items() if "gather" not in name}  # type: ignore[attr-defined]
    apart = {
        "keys": {**gather, "axes": ["cp"], "tensors": ["k_index"]},
        "latent": {**gather, "axes": ["cp"], "tensors": ["kv_latent"]},
        "rope": {**gather, "axes": ["cp"], "tensors": ["k_rope"]},
        **rest,
    }
    assert wrong(plan_of({**DSA, "steps": apart, "order": list(apart)}, shape=call(sequence=61))) == []
    nested = {
        "keys": {**gather, "axes": ["near", "far"], "tensors": ["k_index"]},
        "near": {**gather, "axes": ["near"], "tensors": ["kv_latent", "k_rope"]},
        "far": {**gather, "axes": ["far"], "tensors": ["kv_latent", "k_rope"]},
        **rest,
    }
    two = {"mesh": {"far": 3, "near": 2}, "axes": ["far", "near"], "steps": nested, "order": list(nested)}
    assert wrong(plan_of({**DSA, **two}, shape=call(sequence=61, batch=2))) == []


# ------------------------------------------------------------------ real ranks
def on_ranks(preset: str, shape: Shape) -> tuple[list[tuple[str, float]], tuple[int, int], tuple[int, int]]:
    """Errors against one process, and bytes and collectives: executed and planned."""
    plan = plan_of(preset, degree=dist.get_world_size(), shape=shape)
    engine = ContextParallel(plan, init_device_mesh("cpu", (plan.degree,), mesh_dim_names=("cp",)))
    counted = []

    def attend(tensors: Mapping[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
        local = {n: engine.shard(tensors[n], dim=2).requires_grad_() for n in plan.inputs}
        before = engine.bytes_sent, engine.collectives
        result = engine.attend(Call(tensors=local, topk=shape.topk))
        loss = result.losses["indexer_loss"]
        upstream = [engine.shard(dout, dim=2), torch.full_like(loss, verify.DLOSS)]
        grads = torch.autograd.grad([result.out, loss], list(local.values()), upstream)
        counted.append((engine.bytes_sent - before[0], engine.collectives - before[1]))
        total = loss.detach().clone()
        dist.all_reduce(total)
        found = {f"d{n}": g for n, g in zip(local, grads, strict=True)}
        topk = engine.made("topk", Call(tensors=local, topk=shape.topk))
        return {"out": result.out.detach(), "indexer_loss": total, "topk": topk, **found}

    rows = verify.compare(attend, [engine.rank], plan, CAUSAL)
    total = totals(plan)
    planned = (total.sent[0][engine.rank] + total.sent[1][engine.rank], sum(total.collectives))
    engine.close()
    return [(row.name, row.error) for row in rows if row.name != "influence"], counted[0], planned


@pytest.mark.parametrize("sequence", [64, 61])
@pytest.mark.parametrize("preset", SPARSE)
def test_two_gloo_ranks_equal_one_process_and_send_what_is_planned(two: World, preset: str, sequence: int) -> None:
    for rows, counted, planned in two.run(on_ranks, preset, call(sequence=sequence, batch=3, topk=9)):
        assert all(error <= BOUND for _, error in rows), rows
        assert counted == planned


def test_no_later_key_and_none_of_another_document_is_selected() -> None:
    """Documents of 10 and 22 tokens: the second one begins on the first rank and ends on the second."""
    mask = {"kind": "document", "starts": [0, 10]}
    for layout in ("contiguous", "zigzag", "striped"):
        plan = plan_of("dsa", f"layout@cp.layout={layout}", degree=2, shape=call(sequence=32, topk=8), mask=mask)
        program = Program(plan, Target(ranks=(0, 1), device="cpu", communicator=None))
        tensors, _ = verify.inputs_of(plan)
        held = [torch.tensor(list(s)) for s in plan.entry.sequence]
        chosen = program.made("topk", {n: [x[:, :, i] for i in held] for n, x in tensors.items()}, 1.0)
        for positions, topk in zip(held, chosen, strict=True):
            for query, keys in zip(positions.tolist(), topk[0, 0].tolist(), strict=True):
                first = 10 if query >= 10 else 0
                found = [key for key in keys if key >= 0]
                assert all(first <= key <= query for key in found)
                assert len(found) == min(8, query - first + 1)
