"""torchtitan-npu's modules on gloo ranks, on the stand-in, beside what they give on one rank."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from types import MethodType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend

from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import plan_from_config
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.kernels.ascend.stand_in import stand_in
from cp_engine.kernels.ascend.torch_npu_module import torch_npu_module
from cp_engine.runtime.compile import compose
from cp_engine.runtime.context import ContextParallel

FOLDER = os.environ.get("CP_ENGINE_TORCHTITAN_NPU", "")
Numbers = dict[str, Tensor]


@contextmanager
def package() -> Iterator[None]:
    """torchtitan-npu on the stand-in, imported once in this process."""
    if FOLDER and FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    with ExitStack() as undo:
        undo.enter_context(cpu_shims())
        undo.enter_context(stand_in())
        undo.enter_context(torch_npu_module())
        import torchtitan_npu

        assert torchtitan_npu.__version__ == "0.2.2.post2"
        yield


def sparse_module(sizes: Mapping[str, int], dtype: torch.dtype, is_converted: bool) -> tuple[nn.Module, Tensor]:
    """The package's DeepSeek-V3.2 attention with equal weights on all ranks, and its rotary table."""
    from torchtitan.models.deepseek_v3.model.model import precompute_freqs_cis
    from torchtitan_npu.converters.kernels.dsa import SparseLightningIndexerKLLoss, dsa_forward
    from torchtitan_npu.models.deepseek_v32 import deepseekv32_args
    from torchtitan_npu.models.deepseek_v32.model.model import Attention

    args = deepseekv32_args["tinymodel"]
    for name, size in sizes.items():
        setattr(args, name, size)
    torch.manual_seed(0)
    module = Attention(args)
    with torch.no_grad():
        module.init_weights(0.02)
    with torch.no_grad():
        for p in module.parameters():  # larger than the package draws them: its outputs would be near zero
            p.mul_(5.0) if p.ndim == 2 else p.add_(0.1 * torch.randn_like(p))
    if is_converted:  # what its converter npu_dsa does, on this instance
        inner = module.inner_attention
        inner.compute_dsa_indexer_loss, inner.layer_number, inner.num_layers = SparseLightningIndexerKLLoss(), 0, 1
        inner.forward = MethodType(dsa_forward, inner)
    return module.to(dtype), precompute_freqs_cis(args)


def run_module(module: nn.Module, arguments: tuple[object, ...], x: Tensor, dout: Tensor) -> Numbers:
    """Out, and the gradients of x and of every parameter."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = module(x, *arguments)
    out.backward(dout)
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "dx": x.grad, **grads}


def in_two(
    engine: ContextParallel, module: nn.Module, call: Callable[[Tensor], tuple[object, ...]], x: Tensor, dout: Tensor
) -> Numbers:
    """The same from two ranks, whole and summed."""
    positions = engine.shard(torch.arange(x.shape[1]).expand(x.shape[:2]), dim=1)
    with engine.context(module):
        found = run_module(module, call(positions), engine.shard(x), engine.shard(dout))
    for name, value in found.items():
        if name in ("out", "dx"):
            found[name] = engine.unshard(value)
        else:
            wide = value.float()
            dist.all_reduce(wide)
            found[name] = wide
    return found


def differences(found: Numbers, expected: Numbers) -> dict[str, float]:
    """|found - expected| / |expected| by name."""
    assert set(found) == set(expected), set(found) ^ set(expected)
    return {n: float((found[n].double() - x.double()).norm() / x.double().norm()) for n, x in expected.items()}


def engine_of(preset: str, overrides: tuple[str, ...], shape: Shape, kernels: str) -> ContextParallel:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    plan = plan_from_config(compose(preset, overrides, None), shape=shape, mask="causal", world_degree=2)
    return ContextParallel(plan, mesh, "cpu", kernels)


def sparse_shape(sizes: Mapping[str, int], batch: int, sequence: int, dtype: str) -> Shape:
    latent, rope = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    return Shape(
        batch=batch, sequence=sequence, heads=sizes["n_heads"], kv_heads=1, head_dim=latent + rope, v_head_dim=latent, dtype=dtype,
        latent_dim=latent, rope_dim=rope, index_heads=sizes["index_n_heads"], index_dim=sizes["index_head_dim"],
        topk=min(sizes["index_topk"], sequence),
    )  # fmt: skip


SMALL = {"dim": 32, "n_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
SMALL |= {"v_head_dim": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 24, "max_seq_len": 128}
LEAST = {
    "dim": 64,
    "n_heads": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
}
LEAST |= {"v_head_dim": 32, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 1024, "max_seq_len": 2048}
"""The smallest sizes that the operators take, but for the heads of the indexer."""


def eager(batch: int, sequence: int, layout: str) -> tuple[dict[str, float], dict[str, float]]:
    """The package's module without its converter: its own torch code on one rank, the engine on two; float32."""
    with package():
        module, table = sparse_module(SMALL, torch.float32, is_converted=False)
        module.inner_attention.sdpa_backends.append(SDPBackend.MATH)  # the others do not take these sizes on a CPU
        x, dout = torch.randn(batch, sequence, 32), torch.randn(batch, sequence, 32)
        engine = engine_of(
            "dsa", (f"layout@cp.layout={layout}",), sparse_shape(SMALL, batch, sequence, "float32"), "cpu"
        )
        losses = Losses(module)
        found = in_two(engine, module, lambda positions: (table, None, 0, positions), x, dout)
        loss = losses.total.clone()
        dist.all_reduce(loss)
        engine.close()
        assert "forward" not in vars(module.inner_attention)
        losses.total.zero_()
        expected = run_module(module, (table, None, 0, None), x, dout)
        return differences(found, expected), {"found": float(loss), "expected": float(losses.total)}


class Losses:
    """The sum of what a module's attention says its indexer loses."""

    def __init__(self, module: nn.Module) -> None:
        self.total = torch.zeros(())
        module.inner_attention.register_forward_hook(self.add)

    def add(self, _: nn.Module, args: object, result: tuple[Tensor, Tensor]) -> None:
        self.total += result[0].detach()


def converted() -> tuple[dict[str, float], int]:
    """The same with the converter, whose operators are the stand-in's; bfloat16, and how many selected keys differ."""
    with package():
        from cp_engine.hosts.torchtitan.npu_attention import read_absorbed

        sequence, dtype = 1280, torch.bfloat16
        module, table = sparse_module(LEAST, dtype, is_converted=True)
        norm = (
            module.pre_attention.indexer.k_norm.float()
        )  # a CPU sums its gradient over tokens in the input's dtype: 10 % off
        norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        norm.register_forward_hook(lambda _, args, out: out.to(dtype))
        x, dout = torch.randn(1, sequence, 64).to(dtype), torch.randn(1, sequence, 64).to(dtype)
        engine = engine_of("dsa", (), sparse_shape(LEAST, 1, sequence, "bfloat16"), "npu_reference")
        calls: list[Mapping[str, object]] = []
        hook = module.inner_attention.register_forward_pre_hook(
            lambda _, args, named: calls.append(dict(zip(("q", "k", "v"), args, strict=True)) | named), with_kwargs=True
        )
        found = in_two(engine, module, lambda positions: (table, None, 0, positions), x, dout)
        selected = engine.made("topk", read_absorbed(module.inner_attention, (), calls[0]))[:, 0]
        selected = engine.unshard(selected)
        if dist.get_rank():
            return {}, 0
        engine.close()
        expected = run_module(module, (table, None, 0, None), x, dout)
        hook.remove()
        of_one, _ = torch.ops.npu.npu_lightning_indexer(
            calls[1]["q_indexer"], calls[1]["k_indexer"], calls[1]["weights"], sparse_count=1024, sparse_mode=3
        )
        differing = (selected.sort(-1).values != of_one[:, :, 0].sort(-1).values).sum()
        return differences(found, expected), int(differing)


def under_tensor_parallelism(batch: int) -> dict[str, float]:
    """Its model of one layer under its own plan for tensor parallelism, over its own torch code on one rank; two parts of the sequence
    beside two of the heads, float32."""
    with package():
        from torchtitan_npu.models.deepseek_v32 import deepseekv32_args
        from torchtitan_npu.models.deepseek_v32.infra.parallelize import apply_non_moe_tp
        from torchtitan_npu.models.deepseek_v32.model.model import DeepSeekV32Model

        args, sequence = deepseekv32_args["tinymodel"], 64
        for name, size in {**SMALL, "vocab_size": 48, "inter_dim": 40}.items():
            setattr(args, name, size)
        torch.manual_seed(0)
        alone = DeepSeekV32Model(args)
        with torch.no_grad():
            alone.init_weights(torch.device("cpu"))
            for p in alone.parameters():  # larger than the package draws them: its outputs would be near zero
                p.mul_(5.0) if p.ndim == 2 else p.add_(0.1 * torch.randn_like(p))
        tokens, dout = torch.randint(0, 48, (batch, sequence)), torch.randn(batch, sequence, 48)
        cut, grads = deepcopy(alone), list[Numbers]()
        for model in (alone, cut):
            model.layers["0"].attention.inner_attention.sdpa_backends.append(SDPBackend.MATH)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        job = SimpleNamespace(
            parallelism=SimpleNamespace(enable_custom_context_parallel=False, context_parallel_degree=1),
            model=SimpleNamespace(converters=[]),
            activation_checkpoint=SimpleNamespace(mode="none"),
        )
        apply_non_moe_tp(cut, mesh["tp"], False, False, job, True)
        shape = sparse_shape(SMALL, batch, sequence, "float32")
        shape = replace(shape, heads=shape.heads // 2, head_ranks=2)
        plan = plan_from_config(compose("dsa"), shape=shape, mask="causal", world_degree=2)
        engine = ContextParallel(plan, mesh["cp"], "cpu", heads=mesh["tp"])
        alone(tokens).backward(dout)
        positions = engine.shard(torch.arange(sequence).expand(batch, sequence), dim=1)
        with engine.context(cut):
            cut(engine.shard(tokens), positions=positions).backward(engine.shard(dout))
        engine.close()
        for model in (alone, cut):
            found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            grads.append({n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()})
        for g in grads[1].values():
            dist.all_reduce(g, group=mesh["cp"].get_group())
        return differences(grads[1], grads[0])


def by_its_own_class_patch() -> dict[str, float]:
    """What the package's own context parallelism gives on two ranks, over what one rank gives, for the indexer."""
    with package():
        from torchtitan_npu.distributed.context_parallel import patch_dsa_for_context_parallel

        sizes = {**LEAST, "index_n_heads": 8}
        module, table = sparse_module(sizes, torch.bfloat16, is_converted=True)
        x, dout = (torch.randn(1, 128, 64).to(torch.bfloat16) for _ in range(2))
        expected = run_module(module, (table, None, 0, None), x, dout)
        del module.inner_attention.forward
        patch_dsa_for_context_parallel(
            cp_mesh=init_device_mesh("cpu", (2,)), model_args=module.inner_attention.model_args
        )
        half = slice(64 * dist.get_rank(), 64 * dist.get_rank() + 64)
        positions = torch.arange(128)[half].unsqueeze(0)
        found = run_module(module, (table, None, 0, positions), x[:, half], dout[:, half])
        ratios = {}
        for name in ("wq_b", "wk", "weights_proj"):
            name = f"pre_attention.indexer.{name}.weight"
            total = found[name].float()
            dist.all_reduce(total)
            ratios[name] = float(total.norm() / expected[name].float().norm())
        return ratios


def dense(layout: str) -> dict[str, float]:
    """DeepSeek-V3's attention, as the package leaves it, in float32."""
    with package():
        from torchtitan.models.deepseek_v3 import deepseekv3_args
        from torchtitan.models.deepseek_v3.model.model import Attention, precompute_freqs_cis

        args = deepseekv3_args["debugmodel"]
        torch.manual_seed(0)
        module = Attention(args)
        with torch.no_grad():
            module.init_weights(0.02)
        shape = Shape(batch=3, sequence=65, heads=16, kv_heads=16, head_dim=192, v_head_dim=128, dtype="float32")
        engine = engine_of("ulysses", (f"layout@cp.layout={layout}",), shape, "npu_reference")
        x, dout, table = torch.randn(3, 65, args.dim), torch.randn(3, 65, args.dim), precompute_freqs_cis(args)
        found = in_two(engine, module, lambda positions: (table, None, positions), x, dout)
        engine.close()
        return differences(found, run_module(module, (table, None, None), x, dout))


def fused() -> dict[str, float]:
    """Llama 3's attention with the package's converter npu_fusion_attention, whose module it brings; float32."""
    with package():
        from torchtitan.models.llama3 import llama3_args
        from torchtitan.models.llama3.model.model import Attention, precompute_freqs_cis
        from torchtitan_npu.converters.kernels.fusion_attention import FusionAttentionKernel

        args = llama3_args["debugmodel"]
        torch.manual_seed(0)
        module = Attention(args)
        with torch.no_grad():
            module.init_weights(0.02)
        x, dout = torch.randn(1, 64, args.dim), torch.randn(1, 64, args.dim)
        table = precompute_freqs_cis(args.dim // args.n_heads, 128)
        expected = run_module(module, (table, None, None), x, dout)
        assert (
            FusionAttentionKernel.apply(module, "llama3") == 1
        )  # alone, it does not take torchtitan 0.2.2's enable_gqa
        heads, width = args.n_heads, args.dim // args.n_heads
        shape = Shape(
            batch=1, sequence=64, heads=heads, kv_heads=heads, head_dim=width, v_head_dim=width, dtype="float32"
        )
        engine = engine_of("ulysses", (), shape, "npu_reference")
        found = in_two(engine, module, lambda positions: (table, None, positions), x, dout)
        engine.close()
        return differences(found, expected)


def experts() -> dict[str, float]:
    """torchtitan's mixture of experts with the package's converters npu_permute and npu_gmm, over without; bfloat16 weights and tokens."""
    with package():
        from torchtitan.models.moe import MoE, MoEArgs
        from torchtitan_npu.converters.kernels.gmm import GMMKernel
        from torchtitan_npu.converters.kernels.permute import PermuteKernel

        torch.manual_seed(0)
        args = MoEArgs(num_experts=8, num_shared_experts=1, top_k=3, score_before_experts=False, use_grouped_mm=False)
        module = MoE(args, dim=32, hidden_dim=48)
        with torch.no_grad():
            module.init_weights(0.2, torch.device("cpu"))
            for p in module.parameters():
                p.copy_(p.bfloat16())
        x, dout = torch.randn(3, 65, 32).bfloat16().float(), torch.randn(3, 65, 32)
        expected = run_module(module, (), x, dout)
        first, third = (expected.pop(f"experts.{name}") for name in ("w1", "w3"))
        expected["experts.w13"] = torch.cat((first, third), 1)
        both = torch.cat((module.experts.w1.detach(), module.experts.w3.detach()), 1)
        PermuteKernel.apply(module, "deepseek_v3")
        GMMKernel.apply(module, "deepseek_v3")
        with torch.no_grad():
            module.experts.w13.copy_(both)
        return differences(run_module(module, (), x, dout), expected)
