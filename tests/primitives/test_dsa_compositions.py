"""Other compositions of sparse attention: other keys, orders, rounding, and modules of one's own."""

from collections.abc import Mapping

import pytest
import torch

import cp_engine
from cp_engine.errors import CPError
from cp_engine.exchange.target import Target
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.kernels.sparse import selected_keys
from cp_engine.runtime.call import Call
from cp_engine.runtime.context import ContextParallel
from cp_engine.runtime.program import Program
from cp_engine.runtime.sparse_attention import SparseAttention
from tests.helpers import CAUSAL, plan_of
from tests.primitives.sparse_shapes import BOUND, SHAPE, Node, call, wrong


def gathered(axes: list[str], *tensors: str) -> Node:
    return {"kind": "all_gather", "axes": axes, "tensors": list(tensors), "dim": "sequence"}


def to_heads(*tensors: str) -> Node:
    return {"kind": "all_to_all", "axes": ["cp"], "tensors": list(tensors), "split": "heads", "concat": "sequence"}


SELECT: Node = {"kind": "lightning_indexer"}
ATTEND: Node = {"kind": "sparse_attention"}
BEFORE = {
    "index": gathered(["cp"], "k_index"),
    "latent": gathered(["cp"], "kv_latent", "k_rope"),
    "select": SELECT,
    "attend": ATTEND,
}
INDEXED = ["q", "kv_latent", "k_rope", "q_index", "k_index", "w_index"]


def learned(*axes: str) -> Node:
    return {"kind": "indexer_loss", "sum": list(axes)}


def reorder(to: str, *tensors: str) -> Node:
    return {"kind": "reorder", "to": {"kind": to}, "tensors": list(tensors)}


def composed(steps: Mapping[str, Node], mesh: Mapping[str, int] | None = None) -> Node:
    sizes = mesh or {"cp": 4}
    layout = {"kind": "contiguous"}
    return {
        **{"name": "own", "mesh": dict(sizes), "axes": list(sizes), "layout": layout},
        **{"order": list(steps), "steps": dict(steps)},
    }


@pytest.mark.parametrize("swapped", [False, True])
def test_indexer_and_attention_may_hold_other_keys(swapped: bool) -> None:
    """Documents end on a rank border, so that keys of two ranks are all that the indexer has to see; attention has those of four."""
    few, many = ["near"], ["far", "near"]
    index, latent = (many, few) if swapped else (few, many)
    steps = {"index": gathered(index, "k_index"), "latent": gathered(latent, "kv_latent", "k_rope")}
    steps |= {"select": SELECT, "attend": ATTEND, "learn": learned()}
    mask = {"kind": "document", "starts": [0, 32]}
    assert wrong(plan_of(composed(steps, {"far": 2, "near": 2}), shape=SHAPE, mask=mask), mask) == []


def test_selections_are_compared_in_the_order_in_which_they_are_made() -> None:
    steps = {
        "deal": reorder("striped", *INDEXED),
        **BEFORE,
        "learn": learned(),
        "back": {"kind": "undo", "of": "deal", "tensors": ["out"]},
    }
    assert wrong(plan_of(composed(steps), shape=call(sequence=61))) == []


@pytest.mark.parametrize(
    ("steps", "heads", "key", "what"),
    [
        ({**BEFORE, "deal": reorder("striped", "topk"), "learn": learned()}, 4, "learn", "the selection at"),
        (
            {
                **{n: BEFORE[n] for n in ("index", "latent", "select")},
                "heads": to_heads("q", "topk"),
                "attend": ATTEND,
                "learn": learned("cp"),
                "back": {"kind": "undo", "of": "heads", "tensors": ["out"]},
            },
            2,
            "learn",
            "the indexer's are",
        ),
        (
            {"index": to_heads("k_index"), **{n: x for n, x in BEFORE.items() if n != "index"}},
            2,
            "select",
            "no k_index",
        ),
        (
            {
                "heads": to_heads("q", "q_index", "w_index"),
                **BEFORE,
                "learn": learned("cp"),
                "back": {"kind": "undo", "of": "heads", "tensors": ["out"]},
            },
            4,
            "learn",
            "on several ranks",
        ),
        ({**BEFORE, "again": ATTEND}, 4, "again", "makes out, lse once more"),
        ({**BEFORE, "learn": learned(), "again": learned()}, 4, "again", "makes indexer_loss once more"),
        ({**BEFORE, "late": gathered(["cp"], "k_index"), "learn": learned()}, 4, "late", "already"),
        ({**BEFORE, "learn": learned(), "late": gathered(["cp"], "q_index")}, 4, "late.tensors", "no later step gives"),
        ({**BEFORE, "deal": reorder("contiguous", "q"), "learn": learned()}, 4, "deal.tensors", "no later step gives"),
        (
            {**BEFORE, "deal": reorder("contiguous", "lse"), "learn": learned()},
            4,
            "deal.tensors",
            "no later step gives",
        ),
        ({**BEFORE, "dense": {"kind": "dense"}}, 4, "dense", "attends to every visible key"),
    ],
)
def test_what_cannot_be_learned_or_differentiated_is_refused(
    steps: dict[str, Node], heads: int, key: str, what: str
) -> None:
    with pytest.raises(CPError, match=what) as caught:
        plan_of(composed(steps), shape=call(heads=heads))
    assert caught.value.problems[0].key == f"cp.steps.{key}"


@pytest.mark.parametrize("dense_from", [0, 1000], ids=["gathered", "columns"])
def test_autocast_rounds_no_score(dense_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_keys, "SPARSE_FROM", dense_from)
    plan = plan_of("dsa", degree=1, shape=call(dtype="float32", topk=9))
    program = Program(plan, Target(ranks=(0,), device="cpu", communicator=None))
    tensors, dout = verify.inputs_of(plan)
    found = []
    for enabled in (False, True):
        given = {n: [x.float().requires_grad_()] for n, x in tensors.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results = program.results(given, 0.2)
            outs = [results["out"][0], results["indexer_loss"][0]]
            grads = torch.autograd.grad(outs, [x for (x,) in given.values()], [dout.float(), torch.ones(())])
        found.append([*outs, *grads])
    for exact, cast in zip(
        *found, strict=True
    ):  # sums of some hundred roundings of 1e-7; one rounding to bfloat16 is 4e-3
        assert float((exact - cast).norm() / exact.norm()) < 1e-5


def test_the_weight_of_the_loss_is_not_rounded_to_a_half_type() -> None:
    """1 / 300,000 tokens is 1.6e-3 off in bfloat16, and so would every gradient be; rounding each of them is not biased."""
    plan, weight = plan_of("dsa", degree=1, shape=call(dtype="bfloat16", topk=9)), 1 / 3e5
    program = Program(plan, Target(ranks=(0,), device="cpu", communicator=None))
    tensors, _ = verify.inputs_of(plan)
    given = {n: [x.bfloat16().requires_grad_()] for n, x in tensors.items()}
    (loss,) = program.results(given, 0.2)["indexer_loss"]
    leaves = [given[n][0] for n in INDEXED[3:]]
    whole = torch.autograd.grad(loss, leaves, torch.ones(()), retain_graph=True)
    for one, part in zip(whole, torch.autograd.grad(loss, leaves, torch.tensor(weight)), strict=True):
        wanted = one.double() * weight
        assert float((part.double() * wanted).sum() / (wanted * wanted).sum()) == pytest.approx(1.0, abs=4e-4)


def test_what_a_step_makes_is_made_under_the_mask_of_the_call() -> None:
    plan = plan_of("dsa", degree=1, shape=call(sequence=32, topk=4), mask={"kind": "document"})
    engine = ContextParallel(plan)
    tensors, _ = verify.inputs_of(plan)
    mask = {"kind": "document", "starts": [0, 16]}
    topk = engine.made("topk", Call(tensors=tensors, mask=mask))
    assert topk[0, 0, 16].tolist() == [16, -1, -1, -1]
    with pytest.raises(CPError, match=r"call\.q_index"):
        engine.made("topk", Call(tensors={**tensors, "q_index": tensors["q_index"][..., :-1]}, mask=mask))


def test_a_call_whose_tensors_do_not_fit_is_refused_without_an_engine() -> None:
    tensors, _ = verify.inputs_of(plan_of("dsa", degree=1, shape=SHAPE))
    heads = {"q_index": tensors["q_index"].view(1, 64, 3, 8).transpose(1, 2), "w_index": tensors["w_index"].mT}
    good = {**tensors, **heads, "w_index": tensors["w_index"].transpose(1, 3).transpose(2, 3).reshape(1, 3, 64, 1)}
    attention = SparseAttention(10)
    out, _ = attention(**good, scale=1)
    assert out.shape == (1, 4, 64, 16)
    for name, other in (("k_index", good["k_index"][:, :, 1:]), ("kv_latent", good["kv_latent"].float())):
        with pytest.raises(CPError, match=rf"call\.{name}"):
            attention(**{**good, name: other}, scale=1.0)
    with pytest.raises(CPError, match=r"call\.scale"):
        attention(**good, scale=float("nan"))


def test_a_module_of_ones_own_runs_under_an_engine_that_the_library_compiles() -> None:
    sizes = {name: getattr(SHAPE, name) for name in ("latent_dim", "rope_dim", "index_heads", "index_dim", "topk")}
    whole = {"sequence": 64, "heads": 4, "kv_heads": 1, "head_dim": 24, "v_head_dim": 16, **sizes}
    engine = cp_engine.compile("dsa", mesh=None, dtype=torch.float64, overrides=("cp.degree=1",), **whole)
    tensors, _ = verify.inputs_of(engine.plan)
    given = {n: tensors[n] for n in INDEXED}
    given["q_index"] = given["q_index"].view(1, 64, 3, 8).transpose(1, 2)
    given["w_index"] = given["w_index"].view(1, 64, 3, 1).transpose(1, 2)
    attention = SparseAttention(10)
    plain = attention(**given, scale=0.2)
    with engine.context(attention):
        under = attention(**given, scale=0.2)
    expected = reference.sparse(tensors, reference.visible(CAUSAL, 64), 0.2, 10)
    for out, loss in (plain, under):
        assert float((out - expected[0]).abs().max()) < BOUND and float((loss - expected[1]).abs()) < BOUND
    with pytest.raises(CPError, match=r"call\.topk"), engine.context(attention):
        attention.topk = 11
        attention(**given, scale=0.2)
