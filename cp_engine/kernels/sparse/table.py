"""What a kernel of sparse attention is, and the one in torch operations, which does every call."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from cp_engine.kernels.sparse import torch_ops
from cp_engine.kernels.sparse.npu import SparseCall
from cp_engine.kernels.sparse.torch_ops import Attended, Given, Index
from cp_engine.kernels.sparse.visibility import Sight


@runtime_checkable
class SparseKernel(Protocol):
    """The arithmetic of the three steps; see `cp_engine.kernels.sparse.torch_ops` for what each gives."""

    name: str
    summary: str
    devices: tuple[str, ...]
    """Device types; empty for any."""
    learns_from_heads: bool
    """Whether its loss takes the queries of all heads, and not what they attend to."""

    def refusal(self, call: SparseCall) -> str | None:
        """Why the kernel cannot do a call; None when it can."""

    def describe(self, work: str, count: int) -> tuple[str, ...]:
        """What a device's own operators are told in `select`, `attend` or `learn`, for a reader; `count` keys are selected."""

    def calls(self, sight: Sight) -> int:
        """How often each of them is called for a rank."""

    def select(self, index: Index, sight: Sight, count: int) -> Tensor:
        """Global positions [B, 1, S, count], int32, ascending; -1 behind the last one."""

    def attend(self, given: Given, sight: Sight, scale: float) -> tuple[Tensor, Tensor]:
        """out [B, H, S, L] in q's dtype and lse [B, H, S]."""

    def attend_backward(
        self, dout: Tensor, given: Given, out: Tensor, lse: Tensor, sight: Sight, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, latent and rope, the last two in float32 or wider."""

    def learn(self, index: Index, topk: Tensor, sight: Sight, source: Attended | Tensor) -> tuple[Tensor, Index]:
        """The loss and its gradients, those of a sum over queries."""


class TorchSparse:
    """Torch operations on any device, chunk by chunk of queries."""

    name = "torch"
    summary = "torch operations, any device, mask and size"
    devices: tuple[str, ...] = ()
    learns_from_heads = False
    select = staticmethod(torch_ops.select)
    attend = staticmethod(torch_ops.attend)
    attend_backward = staticmethod(torch_ops.attend_backward)
    learn = staticmethod(torch_ops.learn)

    def refusal(self, call: SparseCall) -> str | None:
        return None

    def describe(self, work: str, count: int) -> tuple[str, ...]:
        return ()

    def calls(self, sight: Sight) -> int:
        return 0
