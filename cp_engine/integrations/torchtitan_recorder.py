"""Trainers that write down losses and first gradients, to compare a composition with torchtitan alone."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.train import Trainer

from cp_engine.integrations.torchtitan_host import RecordedMetrics
from cp_engine.integrations.torchtitan_trainer import Batch, CompositionTrainer

RECORD = "record.pt"
WRAPPERS = re.compile(
    r"_checkpoint_wrapped_module\.|_orig_mod\."
)  # activation checkpointing and compile rename parameters


class StockRecorder(Trainer):
    """torchtitan's Trainer as it is; training also writes `record.pt` into the dump folder.

    The record holds `losses` (a float per step) and `gradients` (name -> full tensor before clipping, step 1).
    """

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """One micro batch; after the last one of step 1 the gradients are kept."""
        loss: torch.Tensor = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        if self.step == 1:  # overwritten until the last micro batch; clipping comes after
            self._gradients = {
                WRAPPERS.sub("", name): _whole(parameter.grad)
                for part in self.model_parts
                for name, parameter in part.named_parameters()
                if parameter.grad is not None
            }
        return loss

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One step; its loss is kept."""
        super().train_step(data_iterator)
        assert isinstance(self.metrics_processor, RecordedMetrics)
        self._losses.append(self.metrics_processor.last_loss)

    def train(self) -> None:
        """Train and write the record on rank 0."""
        self._losses: list[float] = []
        super().train()
        if dist.get_rank() == 0:
            torch.save(
                {"losses": self._losses, "gradients": self._gradients}, Path(self.job_config.job.dump_folder) / RECORD
            )


class CompositionRecorder(StockRecorder, CompositionTrainer):
    """The same record from training with a composition."""


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.detach().to("cpu", torch.float64, copy=True)
