"""The kernels, in the order in which `auto` tries them."""

from cp_engine.kernels.base import Call, Hardware, Kernel, Limits, band_mask, choose, hardware
from cp_engine.kernels.cpu_flash import CPUFlash
from cp_engine.kernels.cuda_efficient import CUDAEfficient
from cp_engine.kernels.cuda_flash import CUDAFlash
from cp_engine.kernels.cudnn import CuDNN
from cp_engine.kernels.flex import Flex
from cp_engine.kernels.math import Math
from cp_engine.kernels.npu_fusion import NPUFusion

KERNELS: tuple[Kernel, ...] = (CPUFlash(), CUDAFlash(), CuDNN(), CUDAEfficient(), NPUFusion(), Flex(), Math())
"""For each device the fastest first; the last one can do every call."""

__all__ = ["KERNELS", "Call", "Hardware", "Kernel", "Limits", "band_mask", "choose", "hardware"]
