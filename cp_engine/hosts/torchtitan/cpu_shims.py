"""What torchtitan 0.2.2 asks of a device and the CPU backend of torch lacks, present inside one context only.

Each stand-in is installed only when the attribute is missing or cannot do what torchtitan asks of it, and is
taken away on exit. Found by leaving each one out: 2 gloo ranks, one step of the DeepSeek-V3 debug model.
"""

import math
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
import torch._utils
import torch.profiler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@contextmanager
def cpu_shims() -> Iterator[None]:
    """Let torchtitan import and train on CPU; every attribute is as before afterwards.

    torchtitan picks its device when it is imported, so its first import has to happen inside.
    """
    with ExitStack() as undo:
        if torch._utils._get_available_device_type() != "cpu":  # None on a machine without accelerator: cuda is assumed
            _replace(undo, torch._utils, "_get_available_device_type", lambda: "cpu")
        if torch.accelerator.current_accelerator() is not None:  # masks of flex attention would be made there
            _replace(undo, torch.accelerator, "current_accelerator", _no_accelerator)
        for name, stand_in in _MEMORY_MONITOR:
            if not hasattr(torch.cpu, name):
                _replace(undo, torch.cpu, name, stand_in)
        if not isinstance(
            torch.cpu.current_device(), int
        ):  # torch 2.13 returns "cpu", which barrier(device_ids=) refuses
            _replace(undo, torch.cpu, "current_device", lambda: 0)
        if not _counts_integers(torch.histc):
            _replace(undo, torch, "histc", _histc_of(torch.histc))
        if not _profiles_without_accelerator(torch.profiler.profile):
            _replace(undo, torch.profiler, "profile", _profile_of(torch.profiler.profile))
        if not _adds_up(torch.nn.utils.get_total_norm):
            _replace(undo, torch.nn.utils, "get_total_norm", _total_norm_of(torch.nn.utils.get_total_norm))
        yield


def _no_accelerator(check_available: bool = False) -> None:
    """What a build of torch for a CPU says; one for CUDA names CUDA, also on a machine that has no such device."""


def reduce_by_sum(model: torch.nn.Module) -> None:
    """Make FSDP reduce with a plain sum, which gloo has; its premultiplied sum exists only in NCCL.

    Args:
        model: a model or model part after `fully_shard`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


@contextmanager
def experts_ordered_on(device: torch.device) -> Iterator[None]:
    """Let experts train on a CPU: torchtitan orders their tokens by a Triton kernel, and has the same in torch beside it.

    Args:
        device: of the training; nothing is changed on another than a CPU.
    """
    from torchtitan.models.moe import kernels  # here: it imports torchtitan

    with ExitStack() as undo:
        if device.type == "cpu":
            _replace(undo, kernels, "fill_indices_wrapper", kernels.fill_indices_cpu)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """The part of a device's properties that torchtitan reads."""

    name: str
    total_memory: int


def _device_name(device: torch.device | None = None) -> str:
    return "CPU"


def _device_properties(device: torch.device | None = None) -> DeviceProperties:
    return DeviceProperties(name="CPU", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _memory_stats(device: torch.device | None = None) -> dict[str, int]:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return {
        "active_bytes.all.peak": peak_bytes,
        "reserved_bytes.all.peak": peak_bytes,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _nothing() -> None:
    """The process has no caching allocator to empty or to reset."""


_MEMORY_MONITOR = (
    ("get_device_name", _device_name),
    ("get_device_properties", _device_properties),
    ("memory_stats", _memory_stats),
    ("reset_peak_memory_stats", _nothing),
    ("empty_cache", _nothing),
)


def _counts_integers(histc: Callable[..., torch.Tensor]) -> bool:
    try:
        histc(torch.zeros(1, dtype=torch.int64), bins=1, min=0, max=1)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _histc_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Mixture-of-experts layers count how many tokens each expert gets: integers, one bin per integer.
    def histc(
        input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, **keywords: torch.Tensor
    ) -> torch.Tensor:
        if input.is_floating_point() or input.device.type != "cpu" or (min, max) != (0, bins) or keywords:
            return original(input, bins=bins, min=min, max=max, **keywords)
        flat = input.reshape(-1).long()
        # the last bin holds max; what is in none goes to one beside them: a graph needs a size that no number decides
        bin = torch.where((flat >= 0) & (flat <= max), flat.clamp(max=bins - 1), bins)
        counts = flat.new_zeros(bins + 1).scatter_add(0, bin, torch.ones_like(flat))[:bins]
        return counts.to(input.dtype)

    return histc


def _profiles_without_accelerator(profile: Callable[..., object]) -> bool:
    try:
        profile(activities=[torch.profiler.ProfilerActivity.CPU, None])
    except TypeError:
        return False
    return True


def _profile_of(original: Callable[..., torch.profiler.profile]) -> Callable[..., torch.profiler.profile]:
    # torchtitan asks for the CPU and for the accelerator that it found, which is None where there is none; torch 2.13 refuses that.
    def profile(
        *,
        activities: Iterable[torch.profiler.ProfilerActivity | None],
        schedule: Callable[[int], torch.profiler.ProfilerAction],
        on_trace_ready: Callable[[torch.profiler.profile], None],
        record_shapes: bool,
    ) -> torch.profiler.profile:
        present = [activity for activity in activities if activity is not None]
        return original(
            activities=present, schedule=schedule, on_trace_ready=on_trace_ready, record_shapes=record_shapes
        )

    return profile


def _adds_up(total_norm: Callable[..., torch.Tensor]) -> bool:
    count, number = 1 << 20, 0.7
    return abs(float(total_norm([torch.full((count,), number)])) / (number * math.sqrt(count)) - 1) < 1e-6


def _total_norm_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # By which torchtitan clips gradients. torch 2.13 adds float32 squares in float32 on a CPU: 6 million numbers lose 2e-4 of their
    # norm, half of them on each of two ranks lose half of that, and training would depend on how many ranks there are
    # (pytorch/pytorch#169237).
    @torch.no_grad()
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given, order = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors), float(norm_type)
        is_alike = len({isinstance(x, DTensor) for x in given}) == 1  # else torch says what is wrong
        if not is_alike or any(x.dtype == torch.float64 or x.device.type != "cpu" for x in given):
            return original(given, norm_type, error_if_nonfinite, foreach)
        norms = [torch.linalg.vector_norm(x, order, dtype=torch.float64) for x in given]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), order).to(torch.float32)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the gradients have a norm of {float(total)}, and cannot be clipped")
        return total

    return get_total_norm


def _replace(undo: ExitStack, owner: ModuleType, name: str, value: Callable[..., object]) -> None:
    if hasattr(owner, name):
        undo.callback(setattr, owner, name, getattr(owner, name))
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
