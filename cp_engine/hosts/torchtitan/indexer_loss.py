"""The loss of a model's indexers under torchtitan's Trainer: divided by the tokens of all ranks, as the main loss is.

Importing this imports torchtitan, on CPU inside `cpu_shims`.
"""

from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.train import Trainer

from cp_engine.hosts.torchtitan import npu as torchtitan_npu


class Collected(Protocol):
    """What a model part with indexers has as `indexer_loss`."""

    weight: Tensor | None

    def take(self) -> Tensor: ...


class IndexerTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, which also weighs and sums the losses of indexers, where a model has any."""

    def __init__(self, job_config: JobConfig) -> None:
        super().__init__(job_config)
        training, parallelism = job_config.training, job_config.parallelism
        pipeline = self.parallel_dims.pp_enabled
        rows = parallelism.pipeline_parallel_microbatch_size if pipeline else training.local_batch_size
        self._layer_losses = []
        for part in self.model_parts if torchtitan_npu.is_host(job_config) else []:
            losses = torchtitan_npu.LayerLosses(part, rows * training.seq_len)
            if not losses.is_empty:
                part.indexer_loss = losses
                self._layer_losses.append(losses)

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """One micro batch.

        Args:
            input_dict: `input` [B, S] and companions.
            labels: [B, S].
            global_valid_tokens: predicted tokens of all ranks and micro batches.

        Returns:
            The main loss; the indexers' is added in their layers' backward.
        """
        parts = indexed(self.model_parts)
        for part in parts:
            # torchtitan-npu's models have no coefficient, which is 1
            weight = torch.as_tensor(float(getattr(self.model_args, "indexer_loss_coeff", 1.0)), device=self.device)
            # torchtitan 0.2.2 does not divide the gradients of a pipeline by the tokens; alike here, so that clipping sees one scale
            part.weight = weight if self.parallel_dims.pp_enabled else weight / global_valid_tokens
            part.take()
        if self.parallel_dims.pp_enabled and self._counted_in == -1:
            for part in self.model_parts:
                for losses in indexed([part]):
                    at_second_forward(part, losses.take)
        loss: Tensor = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        if parts:
            taken = torch.stack([part.take().to(torch.float32) for part in parts]).sum() / global_valid_tokens
            self._indexer_losses = self._indexer_losses + taken if self._counted_in == self.step else taken
            self._counted_in = self.step
        return loss

    def close(self) -> None:
        """Finish, and leave a host's modules as they were."""
        super().close()
        for losses in getattr(self, "_layer_losses", ()):  # torchtitan's __init__ may have failed
            losses.close()

    _indexer_losses: Tensor
    _counted_in = -1

    def mean_indexer_loss(self) -> float | None:
        """Of the step, per token and layer, the same on every rank; None for a model without indexers. Every rank calls it."""
        if not indexed(self.model_parts):
            return None
        total = self._indexer_losses.clone()
        mesh = self.parallel_dims.get_optional_mesh("loss")  # the ranks that hold other tokens
        if mesh is not None:
            dist.all_reduce(total, group=mesh.get_group())
        if self.parallel_dims.pp_enabled:
            dist.all_reduce(total, group=self.parallel_dims.get_mesh("pp").get_group())
        return float(total) / int(self.model_args.n_layers)


def at_second_forward(part: nn.Module, forget: Callable[[], object]) -> None:
    """Forget what a pipeline stage's first forward left, before the second one.

    The first one only learns shapes: torch's pipeline gives a later stage memory that nobody wrote.

    Args:
        part: the stage.
        forget: called once.
    """
    calls = []

    def before(*_: object) -> None:
        calls.append(part)
        if len(calls) == 2:
            forget()
            handle.remove()

    handle = part.register_forward_pre_hook(before)


def indexed(parts: list[nn.Module]) -> list[Collected]:
    """The indexers' losses of model parts."""
    return [cast(Collected, part.indexer_loss) for part in parts if hasattr(part, "indexer_loss")]
