"""The registry of kernels, dense and sparse: those of the engine and of other packages, and which one does a request.

A package brings a kernel under the entry-point group `cp_engine.kernels`, as `name = "module:KERNEL"`; it is taken by name.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

from cp_engine.errors import KernelError, Problem, installed
from cp_engine.kernels.base import Hardware, Kernel, KernelRequest, Limits, Merge, band_mask, hardware
from cp_engine.kernels.cpu_flash import CPUFlash
from cp_engine.kernels.cuda_efficient import CUDAEfficient
from cp_engine.kernels.cuda_flash import CUDAFlash
from cp_engine.kernels.cudnn import CuDNN
from cp_engine.kernels.flex import Flex
from cp_engine.kernels.math import Math
from cp_engine.kernels.npu_fusion import LIMITS, NPUFusion
from cp_engine.kernels.npu_merge import OperatorMerge
from cp_engine.kernels.sparse.npu import NPUSparse
from cp_engine.kernels.sparse.table import SparseKernel, TorchSparse

GROUP = "cp_engine.kernels"
AUTO = "auto"

KERNELS: tuple[Kernel, ...] = (
    CPUFlash(),
    CUDAFlash(),
    CuDNN(),
    CUDAEfficient(),
    NPUFusion(),
    Flex(),
    Math(),
    NPUFusion(
        name="npu_fusion_update",
        summary="npu_fusion_attention of torch_npu, merged by npu_ring_attention_update",
        limits=replace(LIMITS, merge=OperatorMerge()),
    ),
)
"""For each device the fastest first; `math` can do every call, so that those behind it are taken by name only."""

SPARSE_KERNELS: tuple[SparseKernel, ...] = (NPUSparse(), TorchSparse())
"""Likewise; the last one can do every call."""

K = TypeVar("K", Kernel, SparseKernel)


def dense_kernels() -> tuple[Kernel, ...]:
    """Those of the engine, then those that other packages bring."""
    return (*KERNELS, *(k for k in _installed(tuple(sys.path)).values() if isinstance(k, Kernel)))


def sparse_kernels() -> tuple[SparseKernel, ...]:
    """Likewise."""
    return (*SPARSE_KERNELS, *(k for k in _installed(tuple(sys.path)).values() if isinstance(k, SparseKernel)))


def dense_names() -> tuple[str, ...]:
    """What a step's `kernel` may be."""
    return (AUTO, *(kernel.name for kernel in dense_kernels()))


def sparse_names() -> tuple[str, ...]:
    """Likewise."""
    return (AUTO, *(kernel.name for kernel in sparse_kernels()))


def choose(kernels: Sequence[K], request: object, name: str = AUTO, key: str = "kernel") -> tuple[K, str]:
    """The kernel that does a request, and why it is that one.

    Args:
        kernels: in the order in which they are tried.
        request: what is asked for, in the form that these kernels take.
        name: of a kernel; `auto` is the first that can.
        key: where in the configuration the name is.

    Raises:
        KernelError: the named one cannot do it, or none can.
    """
    reasons: list[str] = []
    for kernel in kernels if name == AUTO else [k for k in kernels if k.name == name]:
        refusal: str | None = kernel.refusal(request)  # type: ignore[arg-type]  # of the kernels' own form
        if refusal is None:
            return kernel, "named in the configuration" if name != AUTO else "; ".join(reasons) or kernel.summary
        if name != AUTO:
            rule = ("rule", "a named kernel is used or refused, never replaced")
            raise KernelError([Problem(key=key, what=f"{name} {refusal}", details=(rule,), tries=(f"{key}=auto",))])
        if getattr(request, "device", None) in _devices(kernel):
            reasons.append(f"{kernel.name}: {refusal}")
    raise KernelError([Problem(key=key, what="no kernel can do this call", details=tuple(("", r) for r in reasons))])


def _devices(kernel: Kernel | SparseKernel) -> tuple[str, ...]:
    return kernel.limits.devices if isinstance(kernel, Kernel) else kernel.devices


@cache
def _installed(path: tuple[str, ...]) -> Mapping[str, Kernel | SparseKernel]:
    """Kernels that other packages bring; looked up once for each path."""
    return installed(GROUP, _faults)


def _faults(name: str, found: object, others: Mapping[str, Kernel | SparseKernel]) -> Iterator[tuple[str, str]]:
    if isinstance(found, Kernel | SparseKernel) and not isinstance(found, type):
        if found.name != name:
            yield f"calls itself {found.name}", "a kernel has the name of its entry point"
        elif name in {AUTO, *(k.name for k in KERNELS), *(k.name for k in SPARSE_KERNELS)}:
            yield f"{name} is a kernel of the engine", "a name stands for one kernel"
        return
    has = [n for n in (*_members(Kernel), *_members(SparseKernel)) if hasattr(found, n)]
    of = SparseKernel if "select" in has else Kernel
    lacks = ", ".join(n for n in _members(of) if n not in has) or "an instance"
    yield f"is {found!r}, and lacks {lacks}", f"a kernel is an object with what {of.__module__}.{of.__name__} has"


def _members(of: type) -> tuple[str, ...]:
    return tuple(sorted({n for n in (*vars(of), *of.__annotations__) if not n.startswith("_")}))


__all__ = [
    "KERNELS",
    "SPARSE_KERNELS",
    "Hardware",
    "Kernel",
    "KernelRequest",
    "Limits",
    "Merge",
    "band_mask",
    "choose",
    "hardware",
]
