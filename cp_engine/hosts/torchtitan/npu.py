"""torchtitan-npu 0.2.2 as a host: its models and converters, with a composition in the place of its context parallelism.

Its config module, `job.custom_config_module`, imports the package, which then patches torchtitan. What its own entry point adds to that
is done here for the time of one job: the loss scale of its indexers, rotary tables that are indexed as real numbers, and the share of
memory. Importing this imports torchtitan, on CPU inside `cpu_shims`.
Source: torchtitan_npu/entry.py and torchtitan_npu/train.py, 0.2.2.post2.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend
from torchtitan.config import JobConfig
from torchtitan.tools.utils import device_type

from cp_engine.errors import ConfigError, Problem
from cp_engine.runtime.known_modules import site_of
from cp_engine.runtime.sparse_attention import TENSORS

PACKAGE = "torchtitan_npu"
WITH_ROTARY_TABLES = tuple(f"torchtitan.models.{name}.model.model" for name in ("deepseek_v3", "llama3", "llama4"))


def is_host(job_config: JobConfig) -> bool:
    """Whether a job names the package's config module, and so runs with its models and converters.

    Raises:
        ConfigError: it does not, and an earlier job of this process did.
    """
    module = job_config.job.custom_config_module
    found = bool(module) and module.partition(".")[0] == PACKAGE
    if not found and PACKAGE in sys.modules:
        what = f"names no module of {PACKAGE}, which an earlier job of this process loaded"
        rule = ("rule", "what the package and its converters change in torchtitan stays until the process ends")
        tries = ("launch.inline=false",)
        raise ConfigError([Problem(key="titan.job.custom_config_module", what=what, details=(rule,), tries=tries)])
    return found


@contextmanager
def as_host(job_config: JobConfig) -> Iterator[None]:
    """What the package's entry point does for a job, undone at the end but for the devices of fake groups.

    Args:
        job_config: a job for which `is_host` holds.
    """
    replacement = importlib.import_module(
        f"{PACKAGE}.train"
    ).reshape_for_broadcast  # Ascend cannot index complex numbers
    if device_type == "npu":
        memory = torch.get_device_module("npu")
        memory.empty_cache()
        memory.set_per_process_memory_fraction(job_config.training.torch_npu_memory_ratio)
    with ExitStack() as undo:
        if device_type == "cpu":  # the package lets fake groups serve Ascend too, a device that torch cannot name here
            capability = dist.Backend.backend_capability  # not put back: what the package does to a process stays
            capability["fake"] = [device for device in capability["fake"] if device != "npu"]
            attention = importlib.import_module(f"{PACKAGE}.models.deepseek_v32.model.model").DSV32_SDPA
            undo.callback(setattr, attention, "sdpa_backends", attention.sdpa_backends)
            attention.sdpa_backends = [SDPBackend.MATH]  # of those that it names, a CPU has none that takes its sizes
        for name in WITH_ROTARY_TABLES:
            names = vars(importlib.import_module(name))
            undo.callback(names.update, reshape_for_broadcast=names["reshape_for_broadcast"])
            names["reshape_for_broadcast"] = replacement
        yield


class LayerLosses:
    """The losses of the indexers of one of the package's model parts: their weight in backward, and their sum for the log.

    Args:
        part: the model part.
        tokens: of one call over the whole sequence, B x S; each module's loss is divided by them.
    """

    def __init__(self, part: nn.Module, tokens: int) -> None:
        self._part, self._tokens, self._sum = part, tokens, None
        modules = [m for m in part.modules() if _is_of_package(m) and site_of(m, TENSORS) is not None]
        self._hooks = [m.register_forward_hook(self._add) for m in modules]
        self._scalers = [_scaler(m) for m in modules[:1]]  # one for all layers
        self._weight: Tensor | None = None

    _sum: Tensor | None

    @property
    def is_empty(self) -> bool:
        """Whether the part has no such module."""
        return not self._scalers

    @property
    def weight(self) -> Tensor | None:
        """Of one token's loss."""
        return self._weight

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        self._weight = weight
        for scaler in self._scalers:
            scaler.set_loss_scale((weight * self._tokens).to(torch.float32))

    def take(self) -> Tensor:
        """The sum of all losses since the last `take`, over tokens and layers; a scalar."""
        taken, self._sum = self._sum, None
        return torch.zeros(()) if taken is None else taken

    def close(self) -> None:
        """Removes the hooks, and sets the package's loss scale back."""
        for hook in self._hooks:
            hook.remove()
        del self._part.indexer_loss
        for scaler in self._scalers:
            scaler.set_loss_scale(torch.tensor(1.0))

    def _add(self, module: nn.Module, args: tuple[object, ...], result: tuple[Tensor, Tensor]) -> None:
        is_repeated = torch._C._current_graph_task_id() != -1  # inside a backward: a checkpoint's recompute
        if module.training and torch.is_grad_enabled() and not is_repeated:
            found = result[0].detach()  # under tensor parallelism spread over ranks, the same on each
            loss = (found.to_local() if isinstance(found, DTensor) else found).sum() * self._tokens
            self._sum = loss if self._sum is None else self._sum + loss


def _is_of_package(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == PACKAGE


class Scaler(Protocol):
    """What gives the losses of all layers their weight in backward."""

    def set_loss_scale(self, scale: Tensor) -> None: ...


def _scaler(attention: nn.Module) -> Scaler:
    """The one that the module of an attention imports."""
    names = vars(sys.modules[type(attention).__module__])
    scaler: Scaler = next(value for value in names.values() if hasattr(value, "set_loss_scale"))
    return scaler
