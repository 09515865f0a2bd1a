"""A module as a user writes one: a model of torchtitan's with a loss function of its own, which takes the mean over tokens."""

import dataclasses

import torch
from torch import Tensor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import train_spec


def mean_over_tokens(predictions: Tensor, labels: Tensor) -> Tensor:
    """Right on one rank, and too much on several."""
    return torch.nn.functional.cross_entropy(predictions.flatten(0, 1).float(), labels.flatten())


def build_mean_loss(job_config: JobConfig, parallel_dims: ParallelDims) -> train_spec.LossFunction:
    """torchtitan's signature."""
    return mean_over_tokens


if "llama3" not in train_spec._extra_train_specs:
    train_spec.register_train_spec(
        "llama3", dataclasses.replace(train_spec.get_train_spec("llama3"), build_loss_fn=build_mean_loss)
    )
