"""torchtitan-npu as a host: the package itself, on the stand-in, with this engine's context parallelism.

The package is not a dependency. These tests run wherever it can be imported:
    pip install --no-deps torchtitan-npu==0.2.2.post2 && pip install scipy && pytest tests/ascend/test_npu_host.py
or where CP_ENGINE_TORCHTITAN_NPU names a folder that it was installed into with `--target`, as in `.ci/run`, so that all other tests
run without it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend

from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import plan_from_config
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job.checks.versions import HOSTED
from cp_engine.kernels.ascend.stand_in import stand_in
from cp_engine.kernels.ascend.torch_npu_module import torch_npu_module
from cp_engine.runtime.compile import compose
from cp_engine.runtime.context import ContextParallel
from tests.conftest import Result
from tests.gloo import World, world

FOLDER = os.environ.get("CP_ENGINE_TORCHTITAN_NPU", "")
IS_THERE = bool(FOLDER) or find_spec("torchtitan_npu") is not None
IS_TOO_NEW = list(map(int, torch.__version__.split(".")[:2])) > list(HOSTED["torchtitan_npu"][1])
pytestmark = [
    pytest.mark.skipif(not IS_THERE, reason="torchtitan-npu is not installed, nor named by CP_ENGINE_TORCHTITAN_NPU"),
    pytest.mark.skipif(IS_TOO_NEW, reason="torchtitan-npu cannot be imported with this torch; such a job is refused"),
]
OWN = Path(__file__).parents[1] / "toml"
Numbers = dict[str, Tensor]


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with world(2) as made:
        yield made


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with world(4) as made:
        yield made


# ------------------------------------------------------------------ on the ranks
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


# ------------------------------------------------------------------ its modules
@pytest.mark.parametrize(
    ("batch", "sequence", "layout"), [(1, 64, "contiguous"), (3, 65, "zigzag"), (3, 67, "striped")]
)
def test_sparse_module_on_two_ranks_is_its_own_torch_code_on_one(
    two: World, batch: int, sequence: int, layout: str
) -> None:
    for errors, loss in two.run(eager, batch, sequence, layout):  # type: ignore[misc]
        assert len(errors) == 14 and max(errors.values()) < 1e-5, errors
        assert loss["found"] == pytest.approx(loss["expected"], rel=1e-5) and loss["found"] > 1e-3


@pytest.mark.parametrize("batch", [1, 3])
def test_its_model_beside_tensor_parallelism_is_its_own_torch_code_on_one(four: World, batch: int) -> None:
    for errors in four.run(under_tensor_parallelism, batch):
        assert len(errors) == 20 and max(errors.values()) < 1e-5, errors  # type: ignore[arg-type, attr-defined]


def test_sparse_module_with_its_converter_on_two_ranks_is_the_converter_on_one(two: World) -> None:
    errors, differing = two.run(converted)[0]  # type: ignore[misc]
    assert len(errors) == 14 and max(errors.values()) <= 5e-3, errors
    assert differing == 0


def test_its_own_class_patch_gives_the_indexer_as_many_times_its_gradient_as_there_are_ranks() -> None:
    with world(2) as last:  # the class stays patched
        for ratios in last.run(by_its_own_class_patch):
            assert all(1.98 < ratio < 2.02 for ratio in ratios.values()), ratios  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dense_module_on_two_ranks_is_that_of_one(two: World, layout: str) -> None:
    for errors in two.run(dense, layout):
        assert len(errors) >= 7 and max(errors.values()) < 1e-5, errors  # type: ignore[attr-defined, arg-type]


def test_fused_module_of_its_converter_is_a_site(two: World) -> None:
    for errors in two.run(fused):
        assert len(errors) == 6 and max(errors.values()) < 1e-5, errors  # type: ignore[attr-defined, arg-type]


def test_its_experts_with_its_converters_are_torchtitans() -> None:
    with world(1) as last:  # the classes stay patched
        for errors in last.run(experts):
            assert len(errors) == 8 and max(errors.values()) < 5e-3, errors  # type: ignore[attr-defined, arg-type]


# ------------------------------------------------------------------ its jobs
@pytest.fixture
def hosted(launch: Callable[..., Result]) -> Callable[..., Result]:
    """The command, where torchtitan-npu is installed and Ascend is rehearsed."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), FOLDER, os.environ.get("PYTHONPATH"))))
    same = (
        "data=builtin",
        "launch.device=npu_reference",
        "titan.debug.seed=0",
    )  # its default draws other weights each time
    return lambda file, *options: launch(f"toml={OWN / file}.toml", *same, *options, PYTHONPATH=path)


FLOAT32 = ("mode=verify", "verify.level=training", "titan.training.mixed_precision_param=float32")
CONVERTERS = "titan.model.converters=[npu_rms_norm,npu_rope]"
BATCH = "titan.training.local_batch_size=1"
TWO_STEPS = ("titan.training.steps=2", "titan.metrics.log_freq=1")
SPARSE = ("titan.model.flavor=tinymodel", "titan.training.seq_len=64", "titan.activation_checkpoint.mode=full", BATCH)


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("npu_ulysses", ("titan.training.seq_len=64", "titan.training.local_batch_size=2")),
        pytest.param(
            "npu_dsa",
            ("cp=dsa", *SPARSE, "titan.parallelism.data_parallel_shard_degree=2"),
            marks=pytest.mark.long,  # six ranks with a vocabulary of 129,280; its module is compared above
        ),
    ],
)
def test_its_models_train_as_they_do_alone(hosted: Callable[..., Result], file: str, options: tuple[str, ...]) -> None:
    result = hosted(file, *FLOAT32, CONVERTERS, *options)
    assert result.code == 0 and result.out.rstrip().endswith("verified"), result.out + result.err
    assert ("indexer 1" in result.out) == (file == "npu_dsa")


def test_its_sparse_model_trains_with_its_converters(hosted: Callable[..., Result], tmp_path: Path) -> None:
    options = (*SPARSE[:1], BATCH, "titan.training.seq_len=1024", "titan.activation_checkpoint.mode=none")
    result = hosted("npu_dsa", *options, *TWO_STEPS)  # with all five converters of its file
    assert result.code == 0, result.out + result.err
    assert "npu_sparse_lightning_indexer_grad_kl_loss BSND sparse_mode=3" in result.out
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert all(0 < row["indexer_loss"] < 1 for row in rows)
    log = next(tmp_path.rglob("rank0.log")).read_text()
    for name in ("npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm", "npu_rope"):
        assert f"[NPU-CONVERTER] Applied '{name}'" in log


@pytest.mark.long  # four ranks with a vocabulary of 129,280; its model is compared above
def test_its_sparse_model_trains_beside_tensor_parallelism(hosted: Callable[..., Result], tmp_path: Path) -> None:
    degrees = [f"titan.parallelism.{name}_parallel_degree=2" for name in ("tensor", "expert")]
    options = (*SPARSE[:1], BATCH, "titan.training.seq_len=1024", "titan.activation_checkpoint.mode=full")
    result = hosted("npu_dsa", *options, *degrees, "cp.degree=2", *TWO_STEPS)
    assert result.code == 0, result.out + result.err
    assert "learn: the queries of all heads are gathered over 2 tensor-parallel ranks" in result.out
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert all(0 < row["indexer_loss"] < 1 for row in rows)


def test_its_experts_are_spread_over_ranks_with_its_converters(hosted: Callable[..., Result], tmp_path: Path) -> None:
    converters = "titan.model.converters=[npu_rms_norm,npu_permute,npu_gmm,npu_rope]"
    spread = ("titan.parallelism.expert_parallel_degree=2", "titan.training.seq_len=64", BATCH)
    result = hosted("npu_ulysses", converters, *spread, *TWO_STEPS)
    assert result.code == 0, result.out + result.err
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("launch.device=cpu",), ("npu_permute, npu_gmm, npu_rope, which call Ascend", "imports torch_npu", "npu_reference")),
        (("titan.model.converters=[npu_gmm,npu_mhc_pre]", *SPARSE), ("npu_mhc_pre, which call operators that", "=[npu_gmm]'")),
        (("titan.model.converters=[npu_permute]", *SPARSE), ("only those of npu_gmm take", "=[npu_permute,npu_gmm]'")),
        (("titan.model.converters=[npu_gmm]", *SPARSE, *FLOAT32), ("computes in bfloat16 whatever the job says",)),
        (
            ("titan.model.converters=[npu_permute,npu_gmm]", *SPARSE, "titan.parallelism.tensor_parallel_degree=2",
             "titan.parallelism.expert_tensor_parallel_degree=2"),
            ("only with experts spread over ranks", "torchtitan_npu does not cut an expert"),
        ),
        (("titan.model.converters=[npu_dsa]",), ("is selective, and the converter npu_dsa takes none or full",)),
        ((CONVERTERS, "cp=dsa", "titan.model.flavor=npu_debugmodel"), ("this engine's deepseek_v32", "titan.model.flavor=debugmodel")),
        ((CONVERTERS, *SPARSE, "titan.training.num_mtp_modules=1"), ("num_mtp_modules", "the engine cuts tokens once")),
        ((CONVERTERS, "cp=dsa", "titan.parallelism.tensor_parallel_degree=2"), ("computes tensor-parallel experts wrongly",)),
        ((CONVERTERS, "cp=dsa", "titan.profiling.enable_profiling=true"), ("needs a device, which npu_reference is not",)),
        (("titan.model.converters=[npu_ropee]", *SPARSE), ("has npu_ropee, which is no converter", "[npu_rope]")),
        ((CONVERTERS, "cp=dsa", "titan.training.local_batch_size=8"), ("takes 7 of deepseek_v32", "local_batch_size=7")),
        ((CONVERTERS, *SPARSE, "cp=dsa", "titan.optimizer.name=Muon"), ("needs a device", "~titan.optimizer.name")),
        (
            (CONVERTERS, *SPARSE, "titan.training.dataset_type=sft", "titan.training.torch_npu_memory_ratio=7"),
            ("one kind of rows", "is 7, which is no share of the memory"),
        ),
        ((CONVERTERS, *SPARSE, *FLOAT32), ("leaves one rank beside cp", "data_parallel_shard_degree=2")),
        ((CONVERTERS, *SPARSE, "cp=dsa", "cp.degree=1"), ("leaves one rank, and torchtitan_npu trains",)),
    ],
)  # fmt: skip
def test_what_it_would_refuse_in_every_rank_is_refused_before(
    hosted: Callable[..., Result], options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    result = hosted("npu_dsa", *options)
    assert result.code != 0 and "starting" not in result.out
    for text in said:
        assert text in result.err, result.err
