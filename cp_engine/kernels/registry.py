"""The kernels, in the order in which `auto` tries them."""

from dataclasses import replace

from cp_engine.kernels.base import Call, Hardware, Kernel, Limits, Merge, band_mask, choose, hardware
from cp_engine.kernels.cpu_flash import CPUFlash
from cp_engine.kernels.cuda_efficient import CUDAEfficient
from cp_engine.kernels.cuda_flash import CUDAFlash
from cp_engine.kernels.cudnn import CuDNN
from cp_engine.kernels.flex import Flex
from cp_engine.kernels.math import Math
from cp_engine.kernels.npu_fusion import LIMITS, NPUFusion
from cp_engine.kernels.npu_merge import OperatorMerge

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

__all__ = ["KERNELS", "Call", "Hardware", "Kernel", "Limits", "Merge", "band_mask", "choose", "hardware"]
