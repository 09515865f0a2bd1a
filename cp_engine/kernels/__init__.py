"""The kernels, in the order in which `auto` tries them."""

from cp_engine.kernels.base import Call, Kernel, band_mask, choose
from cp_engine.kernels.cpu_flash import CPUFlash
from cp_engine.kernels.math import Math

KERNELS: tuple[Kernel, ...] = (CPUFlash(), Math())
"""The fastest first; the last one can do every call."""

__all__ = ["KERNELS", "Call", "Kernel", "band_mask", "choose"]
