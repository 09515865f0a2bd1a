"""What a DeepSeek-V3.2 model is made of, and what of a torchtitan job it refuses."""

from dataclasses import dataclass

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
from torchtitan.models.utils import get_moe_model_nparams_and_flops

from cp_engine.errors import ConfigError, Problem


@dataclass
class DeepSeekV32ModelArgs(DeepSeekV3ModelArgs):  # type: ignore[misc]
    """torchtitan's DeepSeek-V3 arguments, and the indexer's.

    Args:
        index_n_heads: query heads of the indexer; its key has one.
        index_head_dim: a power of two (Hadamard rotation), and at least qk_rope_head_dim.
        index_topk: keys that a query attends to.
        indexer_loss_coeff: factor on the indexer's loss per token; the trainer divides it by the global token count.
        warm_up: the dense stage: attention over every visible key, and only the indexer is trained, against it.
        moe_impl: how expert parallelism exchanges tokens; torchtitan writes the job's choice here.

    Raises:
        ConfigError: sizes that do not fit, all of them.
    """

    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    indexer_loss_coeff: float = 1.0
    warm_up: bool = False
    moe_impl: str = "standard"

    def __post_init__(self) -> None:
        problems = []
        for name in ("q_lora_rank", "index_n_heads", "index_topk"):
            if getattr(self, name) < 1:
                why = ", and the indexer's queries come from the q latent" * (name == "q_lora_rank")
                problems.append(Problem(key=f"model_args.{name}", what=f"is {getattr(self, name)}{why}"))
        size, rope = self.index_head_dim, self.qk_rope_head_dim
        if size < rope or size & (size - 1):
            what = f"is {size}; the Hadamard rotation needs a power of two, and rope turns the first {rope} values"
            tries = (f"index_head_dim={1 << (max(size, rope) - 1).bit_length()}",)
            problems.append(Problem(key="model_args.index_head_dim", what=what, tries=tries))
        if (self.attn_type, self.attn_mask_type) != ("sdpa", "causal"):
            what = (
                f"{self.attn_type} with a {self.attn_mask_type} mask, and sparse attention is causal and takes no mask"
            )
            tries = ("attn_type=sdpa attn_mask_type=causal",)
            problems.append(Problem(key="model_args.attn_type", what=what, tries=tries))
        if problems:
            raise ConfigError(problems, "deepseek_v32")

    def update_from_config(self, job_config: JobConfig) -> None:
        """Take over what the job decides.

        Args:
            job_config: torchtitan's configuration.

        Raises:
            ConfigError: a parallelism that does not know the indexer.
        """
        parallelism = job_config.parallelism
        refused = [
            ("context", parallelism.context_parallel_degree, "torchtitan's own cannot cut sparse attention"),
        ]
        problems = [
            Problem(key=f"titan.parallelism.{name}_parallel_degree", what=f"is {degree}, and {why}")
            for name, degree, why in refused
            if degree > 1
        ]
        if job_config.compile.enable and "model" in job_config.compile.components:
            what = "includes model, and a graph could not count the indexer's loss once per forward"
            tries = ("titan.compile.enable=false", "++titan.compile.components=[loss]")
            problems.append(Problem(key="titan.compile.components", what=what, tries=tries))
        if problems:
            raise ConfigError(problems, "deepseek_v32")
        super().update_from_config(job_config)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and floating point operations per trained token by torchtitan's convention (causality not deducted).

        Args:
            model: on any device, meta included.
            seq_len: of the job.

        Returns:
            The number of parameters, and of operations: attention counts its selected keys, the indexer every key.
        """
        parameters, flops = get_moe_model_nparams_and_flops(self, model, 0, seq_len)
        attended = seq_len if self.warm_up else min(self.index_topk, seq_len)
        attention = self.n_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim) * attended
        return parameters, flops + 6 * self.n_layers * (attention + self.index_n_heads * self.index_head_dim * seq_len)
