"""torchtitan's parallelisation of DeepSeek-V3, with what tensor parallelism asks of the indexer and of the router."""

from functools import partial, wraps
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.config import JobConfig
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.models.deepseek_v3 import parallelize_deepseekv3
from torchtitan.models.moe import MoE

from cp_engine.hosts.torchtitan.models.deepseek_v32.attention import Attention

LAYERS = ("wq_b", "wk", "k_norm", "weights_proj")
"""Of the indexer, which tensor parallelism does not cut: every rank computes with all of it, and gets its whole gradient."""


@wraps(parallelize_deepseekv3)  # it stays that module's, whose context parallelism the engine replaces
def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Parallelize a model in place.

    Args:
        model: a DeepSeekV32Model.
        parallel_dims: the job's.
        job_config: the job's.

    Returns:
        The model.
    """
    if parallel_dims.tp_enabled:
        mesh = parallel_dims.get_mesh("tp")
        for module in model.modules():
            if isinstance(module, Attention):
                module.inner_attention.heads = mesh
                parallelize_module(module.indexer, mesh, {name: NoParallel() for name in LAYERS})
            if isinstance(module, MoE) and not module.score_before_experts:
                module.router.register_forward_hook(partial(_scores_of_all, mesh))
    return cast(nn.Module, parallelize_deepseekv3(model, parallel_dims, job_config))


def _scores_of_all(
    mesh: DeviceMesh, router: nn.Module, args: tuple[Tensor, ...], found: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums the gradient of a router's scores over ranks: each multiplies them with what its part of the experts gives.

    torchtitan 0.2.2 leaves each rank its own part of it, so that copies of one router drift apart.
    """
    scores, experts, counts = found
    spread = DTensor.from_local(scores, mesh, (Replicate(),), run_check=False)
    return spread.to_local(grad_placements=(Partial(),)), experts, counts
