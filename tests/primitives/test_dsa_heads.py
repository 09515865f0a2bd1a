"""Sparse attention beside tensor parallelism: heads cut over ranks of their own, the loss of all of them on each; on real gloo ranks."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.shape import Shape
from cp_engine.algebra.tensors import INDEX
from cp_engine.config.compose import compose
from cp_engine.config.composition import plan_from_config
from cp_engine.errors import CallError
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.process_group import GroupChannel, Traffic
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.kernels.ascend.stand_in import stand_in
from cp_engine.kernels.sparse.npu import NPUSparse, SparseCall
from cp_engine.kernels.sparse.table import TorchSparse
from cp_engine.primitives.sparse_operation import Beside, LearnOperation
from cp_engine.runtime.call import Call
from cp_engine.runtime.context import ContextParallel
from cp_engine.runtime.sparse_attention import SparseAttention
from tests.ascend import test_npu_sparse as npu
from tests.gloo import World, world

SHAPE = Shape(
    batch=2, sequence=37, heads=8, kv_heads=1, head_dim=24, v_head_dim=16, dtype="float64", latent_dim=16, rope_dim=8,
    index_heads=3, index_dim=8, topk=5,
)  # fmt: skip
BOUND = 1e-11
Numbers = dict[str, Tensor]


def engine_of(preset: str, shape: Shape) -> tuple[ContextParallel, int]:
    """The composition on two ranks, beside two that have other heads, and which heads are this rank's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    plan = plan_from_config(compose(preset), shape=shape, mask={"kind": "causal"}, world_degree=2)
    return ContextParallel(plan, mesh["cp"], "cpu", heads=mesh["tp"]), mesh["tp"].get_local_rank()


def summed(x: Tensor, ranks: str) -> Tensor:
    """Over the ranks with other tokens (`cp`) or other heads (`tp`)."""
    other, rank = 2 if ranks == "cp" else 1, dist.get_rank()
    everyone: list[Tensor] = [x] * 4
    dist.all_gather_object(everyone, x)  # ranks hold 19 and 18 tokens
    return everyone[rank] + everyone[rank ^ other]


def errors(preset: str) -> dict[str, float]:
    """Largest differences of every result from dense attention of all heads, and of the indexer's gradients between ranks."""
    plan = plan_from_config(compose(preset), shape=SHAPE, mask={"kind": "causal"}, world_degree=2)
    tensors, dout = verify.inputs_of(plan)
    seen, scale = reference.visible({"kind": "causal"}, SHAPE.sequence), SHAPE.head_dim**-0.5
    wanted = reference.gradients_of(tensors, dout, seen, scale, SHAPE.topk, verify.DLOSS)
    engine, part = engine_of(preset, replace(SHAPE, heads=4, head_ranks=2))
    heads = slice(4 * part, 4 * part + 4)
    mine = {n: x[:, heads] if n == "q" else x for n, x in tensors.items()}
    local = {n: engine.shard(x, dim=2).detach().requires_grad_() for n, x in mine.items()}
    result = engine.attend(Call(tensors=local))
    loss = result.losses["indexer_loss"]
    upstream = [engine.shard(dout[:, heads], dim=2), torch.full_like(loss, verify.DLOSS)]
    grads = dict(zip(local, torch.autograd.grad([result.out, loss], list(local.values()), upstream), strict=True))
    found = {f"d{n}": summed(g, "tp") if n in ("kv_latent", "k_rope") else g for n, g in grads.items()}
    found |= {"out": result.out.detach(), "indexer_loss": summed(loss.detach(), "cp")}
    expected = {n: x[:, heads] if n in ("dq", "out") else x for n, x in wanted.items()}
    expected = {n: x if n == "indexer_loss" else engine.shard(x, dim=2) for n, x in expected.items()}
    apart = {n: float((found[n] - x).abs().max()) for n, x in expected.items()}
    for n in INDEX:  # nobody sums these over the ranks: each has all of it, bit for bit
        apart[f"d{n} between ranks"] = float((2 * grads[n] - summed(grads[n], "tp")).abs().max())
    engine.close()
    return apart


def alone() -> dict[str, float]:
    """The same of the module without an engine, in float32: all ranks have all tokens, two by two other heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    plan = plan_from_config(compose("dsa"), shape=SHAPE, mask={"kind": "causal"}, world_degree=2)
    tensors, _ = verify.inputs_of(plan)
    tensors = {
        n: x.unflatten(3, (3, -1)).squeeze(1).transpose(1, 2) if n in ("q_index", "w_index") else x
        for n, x in tensors.items()
    }
    results = {}
    for heads, ranks in (
        (slice(0, 8), None),
        (slice(4 * mesh["tp"].get_local_rank(), 4 * mesh["tp"].get_local_rank() + 4), mesh["tp"]),
    ):
        module = SparseAttention(SHAPE.topk)
        module.heads = ranks
        given = {n: (x[:, heads] if n == "q" else x).float().requires_grad_() for n, x in tensors.items()}
        _, loss = module(**given, scale=0.3)
        results[ranks is None] = [loss.detach(), *torch.autograd.grad(loss, [given[n] for n in INDEX])]
    names = ("loss", *INDEX)
    return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, results[False], results[True], strict=True)}


def by_npu() -> dict[str, float]:
    """Ascend's loss of 32 heads from ranks with 16 each, over torch operations in float64 with all heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))["tp"]
    given, part = npu.numbers(torch.bfloat16), mesh.get_local_rank()
    right = npu.wanted(torch.bfloat16)
    topk = right["topk"]
    topk = torch.cat((topk, topk.new_full((*topk.shape[:3], npu.TAKEN - npu.SELECTED), -1)), 3)
    heads = slice(16 * part, 16 * part + 16)
    values = InFlight({"q": [given.q[:, heads]], "kv_latent": [given.latent], "k_rope": [given.rope], "topk": [topk]})
    for name, x in zip(INDEX, given.index, strict=True):
        values[name] = [x]
    values["lse"] = [right["lse"][:, heads].float()]
    channel = GroupChannel(mesh.get_group(), Traffic())
    held: list[IndexSet] = [given.sight.queries]
    step = LearnOperation([given.sight], [given.sight], held, None, Beside(channel), NPUSparse())
    run = step.forward(values, npu.SCALE)
    with stand_in():
        try:
            next(run)
        except StopIteration as stop:
            grads = stop.value
    found = {"loss": values["indexer_loss"][0], **dict(zip((f"d{n}" for n in INDEX), grads, strict=True))}
    return {n: float((x.double() - right[n]).norm() / right[n].norm()) for n, x in found.items()}


@pytest.mark.parametrize("preset", ["dsa", "dsa_ulysses"])
def test_heads_of_other_ranks_are_in_the_loss_and_in_the_gradients(four: World, preset: str) -> None:
    for apart in four.run(errors, preset):
        assert len(apart) == 11 and max(apart.values()) < BOUND, apart  # type: ignore[arg-type, attr-defined]
        assert [apart[f"d{n} between ranks"] for n in INDEX] == [0.0, 0.0, 0.0]  # type: ignore[index]


def test_the_module_alone_learns_from_the_heads_of_other_ranks(four: World) -> None:
    for apart in four.run(alone):
        assert len(apart) == 4 and max(apart.values()) < 1e-5, apart  # type: ignore[arg-type, attr-defined]


def test_ascends_loss_is_that_of_all_heads(four: World) -> None:
    for apart in four.run(by_npu):
        assert len(apart) == 4 and max(apart.values()) < 8e-3 and apart["loss"] < 1e-5, apart  # type: ignore[arg-type, attr-defined, index]


def own_heads_alone(preset: str) -> dict[str, float]:
    Beside.total = lambda self, target: target  # type: ignore[method-assign]  # in the ranks of this test
    return errors(preset)


def test_a_loss_of_one_ranks_heads_is_seen() -> None:
    with world(4) as last:
        for apart in last.run(own_heads_alone, "dsa"):
            wrong = {n for n, error in apart.items() if error > BOUND}  # type: ignore[attr-defined]
            assert wrong >= {"indexer_loss", "dq_index", "dk_index", "dw_index"} and not wrong & {"out", "dq"}


def without_or_wrong() -> list[str]:
    said = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for ranks, heads in ((2, None), (4, mesh["tp"]), (2, mesh["cp"])):
        shape = replace(SHAPE, heads=2, head_ranks=ranks)
        plan = plan_from_config(compose("dsa"), shape=shape, mask={"kind": "causal"}, world_degree=2)
        try:
            ContextParallel(plan, mesh["cp"], "cpu", heads=heads)
        except CallError as error:
            said.append(str(error))
    module, engine = (
        SparseAttention(SHAPE.topk),
        ContextParallel(
            plan_from_config(compose("dsa"), shape=SHAPE, mask={"kind": "causal"}, world_degree=2), mesh["cp"], "cpu"
        ),
    )
    module.heads, tensors = mesh["tp"], verify.inputs_of(engine.plan)[0]
    local = {n: engine.shard(x, dim=2) for n, x in tensors.items()}
    heads_of = {n: local[n].unflatten(3, (3, -1)).squeeze(1).transpose(1, 2) for n in ("q_index", "w_index")}
    try:
        with engine.context(module):
            module(**{**local, **heads_of}, scale=0.3)
    except CallError as error:
        said.append(str(error))
    engine.close()
    return said


def test_an_engine_without_the_ranks_of_the_other_heads_is_refused(four: World) -> None:
    for missing, size, same, module in four.run(without_or_wrong):  # type: ignore[misc]
        assert "heads  is missing, and the heads of a query lie on 2 ranks" in missing
        assert "has 2 ranks, and the heads of a query lie on 4" in size
        assert "joins the plan ranks [0, 1]" in same
        assert "call.heads  lie on 2 ranks, and the plan was proved for 1" in module


@pytest.mark.parametrize(("heads", "ranks", "taken"), [(8, 4, True), (32, 4, True), (8, 2, False), (64, 4, False)])
def test_ascend_takes_any_share_of_the_heads_that_its_loss_takes(heads: int, ranks: int, taken: bool) -> None:
    shape = replace(
        SHAPE, batch=1, sequence=2048, heads=heads, head_ranks=ranks, latent_dim=512, rope_dim=64, index_heads=64, index_dim=128,
        topk=2048, dtype="bfloat16",
    )  # fmt: skip
    call = SparseCall(device="npu", shape=shape, mask="causal", local_sequence=1024, has_runs=True, has_all_heads=True)
    assert (NPUSparse().refusal(call) is None) == taken
    assert TorchSparse().refusal(call) is None


# ------------------------------------------------------------------ the model
def of_model(degree: int) -> dict[str, float]:
    """Every gradient of a model under torchtitan's plan, over those of the model as it is; one layer has experts."""
    with cpu_shims():
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.moe import MoEArgs

        from cp_engine.hosts.torchtitan.models.deepseek_v32.args import DeepSeekV32ModelArgs
        from cp_engine.hosts.torchtitan.models.deepseek_v32.model import DeepSeekV32Model
        from cp_engine.hosts.torchtitan.models.deepseek_v32.parallelize import parallelize

        experts = MoEArgs(
            num_experts=4, top_k=2, use_grouped_mm=False, score_before_experts=False, score_func="sigmoid"
        )
        args = DeepSeekV32ModelArgs(
            vocab_size=48, dim=24, inter_dim=32, moe_inter_dim=16, n_layers=2, n_dense_layers=1, n_heads=4, q_lora_rank=10,
            kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, index_n_heads=2, index_head_dim=8, index_topk=5,
            max_seq_len=64, moe_args=experts,
        )  # fmt: skip
        job = JobConfig()
        job.parallelism.tensor_parallel_degree, job.training.seq_len = degree, 24
        job.parallelism.disable_loss_parallel, job.activation_checkpoint.mode = True, "none"
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=degree, pp=1, ep=1, etp=1, world_size=degree)
        dims.build_mesh()
        torch.manual_seed(0)
        alone = DeepSeekV32Model(args)
        with torch.no_grad():
            alone.init_weights(torch.device("cpu"))
        tokens, dout = torch.randint(0, 48, (2, 24)), torch.randn(2, 24, 48)
        cut = parallelize(deepcopy(alone), dims, job)
        results = []
        for model in (alone, cut):
            model.train()
            model.indexer_loss.weight = torch.tensor(0.1)
            model(tokens).backward(dout)
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            results.append({n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()})
            results[-1]["indexer loss"] = model.indexer_loss.take()
        wanted, found = results
        assert set(wanted) == set(found)
        return {n: float((found[n] - x).norm() / x.norm()) for n, x in wanted.items()}


def test_the_model_under_torchtitans_plan_has_the_gradients_of_the_model_alone() -> None:
    with world(2) as two:
        for apart in two.run(of_model, 2):
            assert len(apart) == 42 and max(apart.values()) < 1e-5, {n: e for n, e in apart.items() if e >= 1e-5}  # type: ignore[arg-type, attr-defined]
