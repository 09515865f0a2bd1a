"""What an attention kernel is: a small adapter that computes one tile, forward and backward, and says what it cannot do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cp_engine.algebra.tiles import Tile, Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What is known of the device on which a call will run.

    Args:
        capability: compute capability, such as (9, 0).
        is_nvidia: whether this PyTorch is built for CUDA; on ROCm the same operators have other limits and layouts.
        cudnn_version: such as 91501; 0 where there is no cuDNN.
        is_deterministic: whether algorithms that give other bits on each run are forbidden.
    """

    capability: tuple[int, int]
    is_nvidia: bool = True
    cudnn_version: int = 0
    is_deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRequest:
    """What a kernel is asked for, known before any tensor exists.

    Args:
        device: `cpu`, `cuda`, ...
        dtype: `float64`, `float32`, `bfloat16` or `float16`.
        head_dim: of q and k.
        v_head_dim: of v and out.
        needs_backward: whether gradients will be asked for.
        hardware: the device itself; None where a plan is made on another machine, and then its limits are not known.
    """

    device: str
    dtype: str
    head_dim: int
    v_head_dim: int
    needs_backward: bool = True
    hardware: Hardware | None = None


class Merge(Protocol):
    """How partial results become one, where a kernel has a way of its own."""

    def refusal(self) -> str | None:
        """Why this process cannot merge so; None where it can, or where that is not known."""

    def describe(self) -> str:
        """What merges, for a reader."""

    def add(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Adds a partial result to another, in place; as `cp_engine.kernels.tiled.merge`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a kernel can do, as data.

    Args:
        devices: device types; empty for any.
        dtypes: empty for any.
        widest: the largest head dim; None for any.
        capability: the lowest compute capability.
        dtype_capability: dtype -> a higher lowest one.
        joins: kinds of joined tiles that it takes, see `cp_engine.algebra.tiles.in_fewer_calls`.
        merge: what makes its partial results one; None: torch operations in float32, by lse.
        describe: what its own operators are given of tiles, and what merges them, for a reader.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    widest: int | None = None
    capability: tuple[int, int] = (0, 0)
    dtype_capability: tuple[tuple[str, tuple[int, int]], ...] = ()
    joins: tuple[str, ...] = ()
    merge: Merge | None = None
    describe: Callable[[Sequence[Tiling], Merge | None], str] | None = None

    def lines(self, tilings: Sequence[Tiling]) -> list[str]:
        """What a reader is told of a rank's kernel calls; nothing of most kernels."""
        return [] if self.describe is None else [self.describe(tilings, self.merge)]

    def refusal(self, request: KernelRequest) -> str | None:
        """Why a call is outside the limits; None when it is inside."""
        if self.devices and request.device not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {request.device}"
        if self.dtypes and request.dtype not in self.dtypes:
            return f"computes {', '.join(self.dtypes)}, not {request.dtype}"
        width = max(request.head_dim, request.v_head_dim)
        if self.widest is not None and width > self.widest:
            return f"takes head dims up to {self.widest}, not {width}"
        hardware = request.hardware
        if hardware is None:
            return None
        if not hardware.is_nvidia:
            return "is written for NVIDIA GPUs, and this PyTorch is built for ROCm"
        lowest = max(self.capability, dict(self.dtype_capability).get(request.dtype, (0, 0)))
        if hardware.capability < lowest:
            needed, there = (".".join(map(str, c)) for c in (lowest, hardware.capability))
            return f"needs compute capability {needed} for {request.dtype}, and this GPU has {there}"
        return None


@runtime_checkable
class Kernel(Protocol):
    """One attention kernel. Tensors are [B, H, S, D]; k and v may have fewer heads, dividing q's."""

    @property
    def name(self) -> str:
        """In the configuration."""

    @property
    def summary(self) -> str:
        """What it is, for a reader."""

    @property
    def limits(self) -> Limits:
        """What it can do."""

    def refusal(self, request: KernelRequest) -> str | None:
        """Why the kernel cannot do a call; None when it can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        """out [B, H, S, Dv] in q's dtype and lse [B, H, S] (natural log, at least float32); lse is -inf where nothing is visible."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the tile's share of the final out and lse."""


def hardware(device: str) -> Hardware | None:
    """What is known of the GPU of this process; None for other devices, and where there is no GPU."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    only_deterministic = torch.are_deterministic_algorithms_enabled()
    return Hardware(
        capability=torch.cuda.get_device_capability(),
        is_nvidia=torch.version.hip is None,
        cudnn_version=torch.backends.cudnn.version() or 0,
        is_deterministic=only_deterministic and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def band_mask(tile: Tile, device: torch.device) -> Tensor:
    """Which keys each query of a tile sees, bool [queries, keys]."""
    ahead = torch.arange(tile.q.count, device=device)[:, None] - torch.arange(tile.k.count, device=device)
    if tile.kind == "causal":
        return ahead >= 0
    return (ahead >= tile.low) & (ahead <= tile.high)
