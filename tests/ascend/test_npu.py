"""Ascend, rehearsed: the reference kernels against formulas written here, every strategy on the operators' schemas, and training."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.shape import Shape
from cp_engine.algebra.tiles import in_fewer_calls, tiling
from cp_engine.errors import ConfigError, CPError, KernelError
from cp_engine.job import cli
from cp_engine.job.verify import attention as verify
from cp_engine.kernels import npu_fusion
from cp_engine.kernels.ascend.stand_in import stand_in
from cp_engine.plan.ir import Plan
from cp_engine.runtime import devices
from tests.ascend.test_npu_rules import attention, fused, indexer, learning
from tests.conftest import Result
from tests.helpers import PRESETS, fitting, plan_of
from tools import regenerate_npu_schemas as schemas

HIDDEN = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    with stand_in():
        yield


def leaf(x: object) -> Tensor:
    assert isinstance(x, Tensor)
    return x.double().requires_grad_()


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_fused_attention_equals_dense_float64(mode: int) -> None:
    call = fused()
    q, k, v = (leaf(call[n]) for n in ("query", "key", "value"))
    k, v = (torch.cat((x, x[:, :, :3] * 0.5), 2).detach().requires_grad_() for x in (k, v))
    i, j = torch.arange(8)[:, None], torch.arange(11)
    own = (i + 2 * j) % 3 != 0
    seen = {0: torch.ones(8, 11, dtype=torch.bool), 1: own, 2: j <= i, 3: j <= i + 3}[mode]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.25, enable_gqa=True)
    dout = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(expected, [q, k, v], dout)
    single = [x.detach().float().requires_grad_() for x in (q, k, v)]
    given = {"atten_mask": {0: None, 1: ~own}.get(mode, HIDDEN), "sparse_mode": mode}
    out, highest, total, *_ = torch.ops.npu.npu_fusion_attention(*single, 4, "BNSD", scale=0.25, **given)
    grads = torch.autograd.grad(out, single, dout.float())
    for found, right in zip((out, *grads), (expected, *wanted), strict=True):
        assert (found.double() - right).abs().max() < 2e-6
    scores = (0.25 * q @ k.repeat_interleave(2, 1).transpose(2, 3)).masked_fill(~seen, -torch.inf)
    lse = highest[..., 0] + total[..., 0].log()
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 2e-6


def test_indexer_takes_the_highest_scores() -> None:
    call = indexer()
    q, k, w = (leaf(call[n]).detach() for n in ("query", "key", "weights"))
    found, _ = torch.ops.npu.npu_lightning_indexer(**call)
    for b in range(2):
        for t in range(8):
            scores = [
                float(sum(w[b, t, h] * max(0.0, float(q[b, t, h] @ k[b, s, 0])) for h in range(4)))
                for s in range(t + 1)
            ]
            best = sorted(range(t + 1), key=lambda s: (-scores[s], s))[:4]
            assert found[b, t, 0].tolist() == [*best, *[-1] * (4 - len(best))]


def test_sparse_attention_and_its_loss_have_the_gradients_of_autograd() -> None:
    call = attention()
    q, latent, q_rope, k_rope = (leaf(call[n]) for n in ("query", "key", "query_rope", "key_rope"))
    indices = call["sparse_indices"]
    assert isinstance(indices, Tensor)
    picked = torch.zeros(2, 8, 9, dtype=torch.bool).scatter_(2, indices[:, :, 0].long() % 9, True)[..., :8]
    scores = 0.04 * torch.einsum("btnd,bsd->bnts", torch.cat((q, q_rope), 3), torch.cat((latent, k_rope), 3)[:, :, 0])
    expected = torch.einsum(
        "bnts,bsd->btnd", scores.masked_fill(~picked[:, None], -torch.inf).softmax(-1), latent[:, :, 0]
    )
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = torch.autograd.grad(expected, [q, latent, q_rope, k_rope], dout.double())
    half = {n: x.detach().requires_grad_() for n, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()}
    half["value"] = half["key"]
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(**{**call, **half})
    grads = torch.autograd.grad(out, [half[n] for n in ("query", "key", "query_rope", "key_rope")], dout)
    for found, right in zip((out, *grads), (expected, *wanted), strict=True):
        assert (found.double() - right).norm() / right.norm() < 5e-3

    given = learning()
    q, latent, q_rope, k_rope = (leaf(given[n]).detach() for n in ("query", "key", "query_rope", "key_rope"))
    q_index, k_index, w = (leaf(given[n]) for n in ("query_index", "key_index", "weights"))
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    scores = 0.04 * torch.einsum("btnd,bsd->bnts", torch.cat((q, q_rope), 3), torch.cat((latent, k_rope), 3)[:, :, 0])
    target = scores.masked_fill(~seen, -torch.inf).softmax(-1).sum(1) / 32
    index = torch.einsum("bth,bths->bts", w, torch.einsum("bthd,bsd->bths", q_index, k_index[:, :, 0]).relu())
    log = index.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0.0)
    loss = (torch.xlogy(target, target) - target * log).sum()
    wanted = torch.autograd.grad(loss, [q_index, k_index, w])
    *grads, found_loss = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(**given)
    assert abs(float(found_loss) - float(loss)) < 1e-5
    for found, right in zip(grads, wanted, strict=True):
        assert (found.double() - right).norm() / right.norm() < 5e-3


SHAPE = Shape(batch=2, sequence=37, heads=12, kv_heads=4, head_dim=16, v_head_dim=8, dtype="float32")
MASKS = (
    {"kind": "causal"},
    {"kind": "full"},
    {"kind": "document", "starts": [0, 9, 10, 26]},
    {"kind": "window", "left": 5, "right": 0},
)


@pytest.mark.parametrize(
    ("preset", "degree"),
    [(name, degree) for name in PRESETS for degree in (1, 2, 3, 4) if degree == 1 or name != "none"],
)
def test_every_dense_strategy_computes_attention_with_the_operators(preset: str, degree: int) -> None:
    checked = 0
    for mask in MASKS:
        plan = fitting_plan(preset, degree, mask)
        if plan is None:
            continue
        rows = verify.in_one_process(plan, mask, devices.REHEARSAL, "float32")
        assert [row for row in rows if not row.is_good] == []
        checked += 1
    assert checked or degree > 1


def fitting_plan(preset: str, degree: int, mask: dict[str, object]) -> Plan | None:
    """A plan of a preset on some ranks; None where the preset has no such mesh, or does not take the mask."""
    try:
        return plan_of(preset, shape=fitting(preset, SHAPE), mask=mask, degree=degree)
    except CPError:
        return None


def test_a_mask_from_the_wrong_corner_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("allgather_kv", degree=2, shape=SHAPE)
    assert all(row.is_good for row in verify.in_one_process(plan, MASKS[0], devices.REHEARSAL, "float32"))
    masking = npu_fusion._masking
    monkeypatch.setattr(npu_fusion, "_masking", lambda *a: {**masking(*a), "sparse_mode": 2})
    rows = verify.in_one_process(plan, MASKS[0], devices.REHEARSAL, "float32")
    assert "out" in {row.name for row in rows if not row.is_good}


def test_more_documents_than_a_call_takes_go_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    documents, calls = 650, list[int]()
    shape = replace(SHAPE, batch=2, sequence=2 * documents, heads=2, kv_heads=1, head_dim=4, v_head_dim=4)
    mask = {"kind": "document", "starts": [*range(0, 2 * documents, 2)]}
    parts = npu_fusion._parts

    def counted(*given: object) -> Iterator[npu_fusion._Part]:
        for part in parts(*given):  # type: ignore[arg-type]
            calls.append(len(part.named["actual_seq_qlen"]))  # type: ignore[arg-type]
            yield part

    monkeypatch.setattr(npu_fusion, "_parts", counted)
    plan = plan_of("none", shape=shape, mask=mask, degree=1)
    rows = verify.in_one_process(plan, mask, devices.REHEARSAL, "float32")
    assert [row for row in rows if not row.is_good] == [] and {r.name for r in rows} >= {"out", "dq", "dk", "dv"}
    assert calls == [1024, 276, 1024, 276], calls  # forward and backward
    assert [len(g) for g in npu_fusion._groups([(2**19, 2**19), (1, 2**19), (5, 5), (2**20, 1)])] == [2, 1, 1]


@pytest.mark.parametrize("ends", ["actual_seq_qlen", "actual_seq_kvlen"])
def test_documents_that_end_one_token_off_are_seen(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, parts = plan_of("none", degree=1, shape=SHAPE, mask=MASKS[2]), npu_fusion._parts

    def shifted(*given: object) -> Iterator[npu_fusion._Part]:
        for part in parts(*given):  # type: ignore[arg-type]
            *all_but, last = part.named[ends]  # type: ignore[misc]
            yield part._replace(named={**part.named, ends: [*(end + 1 for end in all_but), last]})

    monkeypatch.setattr(npu_fusion, "_parts", shifted)
    try:
        rows = verify.in_one_process(plan, MASKS[2], devices.REHEARSAL, "float32")
    except KernelError as error:  # queries that see nothing
        assert "hides every key" in str(error)
    else:
        assert {"out", "dk"} <= {row.name for row in rows if not row.is_good}


def test_tiles_are_joined_for_a_kernel_that_takes_them() -> None:
    plan = plan_of("allgather_kv", degree=2, shape=SHAPE)
    q, k = plan.entry.sequence[1], plan_of("none", degree=1, shape=SHAPE).entry.sequence[0]
    causal = in_fewer_calls(tiling(q, k, plan.mask), ("right_down", "packed"))
    assert [(t.kind, t.q.count, t.k.count) for t in causal.tiles] == [("right_down", 18, 37)]
    documents = in_fewer_calls(tiling(k, k, mask_of(MASKS[2], 37)), ("right_down", "packed"))
    assert [(t.kind, t.parts) for t in documents.tiles] == [("packed", ((9, 9), (1, 1), (16, 16), (11, 11)))]
    assert documents.tiles[0].pairs == 45 + 1 + 136 + 66


def test_arguments_differ_between_versions_and_are_named() -> None:
    shipped = json.loads(schemas.SCHEMAS.read_text())["schemas"]
    name = "npu_sparse_flash_attention"
    older = {
        **shipped,
        name: shipped[name].replace(", Tensor? sinks=None", "").replace("Tensor? value", "Tensor value"),
    }
    assert schemas.differences(shipped, shipped) == []
    assert [line.split(":")[0] for line in schemas.differences(shipped, older)] == [name, name]
    moved = {**shipped, name: shipped[name].replace("Tensor query, Tensor key", "Tensor key, Tensor query")}
    assert schemas.differences(shipped, moved) == [f"{name}: arguments are in another order"]
    assert schemas.differences(shipped, {}) == [f"{n}: is not there" for n in shipped]


def test_npu_without_its_package_is_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="torch_npu is not installed"):
        devices.resolve("npu", 2)
    assert devices.resolve("npu_reference", 2) == "npu_reference" and devices.of_tensors("npu_reference") == "cpu"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["cp=ulysses", "titan.training.seq_len=64"],
            ["attend: npu_fusion_attention BNSD sparse_mode=2 (mask 2048 x 2048)"],
        ),
        pytest.param(
            ["cp=dsa", "titan.model.flavor=npu_debugmodel", "titan.training.seq_len=1280",
             "titan.training.mixed_precision_param=bfloat16", "titan.training.local_batch_size=1"],
            ["select: npu_sparse", "attend: npu_sparse", "learn: npu_sparse"],
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_job_trains_with_the_operators(
    launch: Callable[..., Result], tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    job = ("launch.device=npu_reference", "titan.training.steps=3", "hydra.run.dir=run")
    result = launch(*arguments, *job)
    assert result.code == 0, result.out + result.err
    assert not [text for text in said if text not in result.out], result.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and rows[-1]["loss"] < rows[0]["loss"]


def test_verify_runs_the_operators_on_gloo_ranks(launch: Callable[..., Result]) -> None:
    rehearsed = ("mode=verify", "launch.device=npu_reference", "verify.target=ranks")
    result = launch(*rehearsed, "cp=ring_zigzag", "cp.degree=3", "shape.sequence=65", "shape.batch=3")
    assert result.code == 0, result.out + result.err
    assert "3 gloo ranks, float32 by npu_reference, against dense attention in float64" in result.out
    assert result.out.count("<= 1e-05   ok") == 12 and result.out.rstrip().endswith("verified")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cp=ulysses", "shape.dtype=bfloat16"], "shape.dtype  is bfloat16, and this comparison computes in float32"),
        (["cp=dsa", "verify.target=ranks"], "verify.target  is ranks, and Ascend's sparse operators"),
        (["cp=dsa", "shape.dtype=float32"], "cp.steps.learn  is not what the operators take"),
        (["cp=dsa", "shape.topk=512"], "cp.steps.select  is not what the operators take"),
    ],
)
def test_verify_ignores_nothing_that_it_is_told(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["mode=verify", "launch.device=npu_reference", *arguments]) == 1
    assert said in capsys.readouterr().err
