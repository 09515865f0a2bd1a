"""DeepSeek-V3.2 as torchtitan trains it: flavors, checkpoint names and the TrainSpec."""

from dataclasses import replace

from torch import nn
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import (
    OptimizersContainer,
    build_optimizers,
    build_optimizers_with_moe_load_balancing,
)
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec

from cp_engine.hosts.torchtitan.models.deepseek_v32.args import DeepSeekV32ModelArgs
from cp_engine.hosts.torchtitan.models.deepseek_v32.model import DeepSeekV32Model
from cp_engine.hosts.torchtitan.models.deepseek_v32.parallelize import parallelize

INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
"""The indexer's parameters, called alike in the public checkpoint."""


class DeepSeekV32StateDictAdapter(DeepSeekV3StateDictAdapter):  # type: ignore[misc]
    """Names of the public Hugging Face checkpoint: DeepSeek-V3's, and `model.layers.*.self_attn.indexer.*`.

    Args:
        model_args: sizes of the model.
        hf_assets_path: folder of the checkpoint; None for names alone.

    Source: ml-explore/mlx-lm, mlx_lm/models/deepseek_v32.py, whose modules are named as in the checkpoint that it loads.
    """

    def __init__(self, model_args: DeepSeekV32ModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        for name in INDEXER:
            self.from_hf_map[f"model.layers.{{}}.self_attn.indexer.{name}"] = f"layers.{{}}.attention.indexer.{name}"


def flavors() -> dict[str, DeepSeekV32ModelArgs]:
    """The sizes that a job can name; `<name>_warm_up` is the dense stage.

    Returns:
        New values at each call: torchtitan writes the job's choices into them.

    Source: 671B is inference/config_671B_v3.2.json and config.json (rms_norm_eps) of deepseek-ai/DeepSeek-V3.2-Exp.
    """
    sizes = {"debugmodel": _debug, "671B": _671b}
    return {
        **{name: make() for name, make in sizes.items()},
        **{f"{name}_warm_up": replace(make(), warm_up=True) for name, make in sizes.items()},
        "npu_debugmodel": _npu_debug(),
    }


def _debug() -> DeepSeekV32ModelArgs:
    return DeepSeekV32ModelArgs(
        vocab_size=2048,
        dim=256,
        inter_dim=1024,
        moe_inter_dim=256,
        n_layers=4,
        n_dense_layers=1,
        n_heads=8,
        norm_eps=1e-6,
        moe_args=MoEArgs(
            num_experts=8,
            num_shared_experts=1,
            top_k=2,
            score_func="sigmoid",
            route_norm=True,
            score_before_experts=False,
        ),
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
    )


def _npu_debug() -> DeepSeekV32ModelArgs:
    """The smallest sizes that Ascend's operators of sparse attention take: one layer, 32 heads, a latent of 512."""
    sizes = _debug()
    sizes.n_layers, sizes.n_heads, sizes.kv_lora_rank, sizes.qk_rope_head_dim = 1, 32, 512, 64
    sizes.index_n_heads, sizes.index_head_dim, sizes.index_topk = 8, 128, 1024
    return sizes


def _671b() -> DeepSeekV32ModelArgs:
    return DeepSeekV32ModelArgs(
        vocab_size=129280,
        dim=7168,
        inter_dim=18432,
        moe_inter_dim=2048,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        norm_eps=1e-6,
        moe_args=MoEArgs(
            num_experts=256,
            num_shared_experts=1,
            top_k=8,
            num_expert_groups=8,
            num_limited_groups=4,
            score_func="sigmoid",
            route_norm=True,
            route_scale=2.5,
            score_before_experts=False,
        ),
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2048,
    )


def build_optimizers_of_stage(
    model_parts: list[nn.Module], optimizer_config: Optimizer, parallel_dims: ParallelDims
) -> OptimizersContainer:
    """torchtitan's optimizers, with its balancing of experts unless the experts are frozen.

    Args:
        model_parts: all of one `warm_up`.
        optimizer_config: the job's.
        parallel_dims: the job's.
    """
    is_warm_up = any(p.model_args.warm_up for p in model_parts if isinstance(p, DeepSeekV32Model))
    build = build_optimizers if is_warm_up else build_optimizers_with_moe_load_balancing
    return build(model_parts, optimizer_config, parallel_dims)


def get_train_spec() -> TrainSpec:
    """What torchtitan needs to train DeepSeek-V3.2, for `register_train_spec("deepseek_v32", ...)`."""
    return TrainSpec(
        model_cls=DeepSeekV32Model,
        model_args=flavors(),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        build_optimizers_fn=build_optimizers_of_stage,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_text_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_cross_entropy_loss,
        state_dict_adapter=DeepSeekV32StateDictAdapter,
    )
