"""`cp_engine.Attention`: scaled_dot_product_attention as a module, until an engine is attached."""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from cp_engine.algebra.mask import Mask
from cp_engine.errors import CallError, Problem
from cp_engine.runtime.call import Call, read


class Attention(nn.Module):
    """Scaled dot-product attention as a module, for models of one's own; plain PyTorch until an engine is attached."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = True,
        enable_gqa: bool = False,
        mask: Mask | Mapping[str, object] | str | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            q: [B, H, S, D].
            k: [B, K, S, D].
            v: [B, K, S, Dv].
            scale: factor on the scores; None is D ** -0.5.
            is_causal: whether a query sees only keys up to its own position.
            enable_gqa: whether K may be less than H.
            mask: another mask than causal or full; it wins over `is_causal`. Only under an engine.
            sinks: [H], one learned score per head that joins the softmax with a value of 0. Only under an engine.

        Returns:
            [B, H, S, Dv].

        Raises:
            CallError: a mask or sinks without an engine.
        """
        if mask is not None or sinks is not None:
            given = [n for n, x in (("mask", mask), ("sinks", sinks)) if x is not None]
            rule = ("rule", "scaled_dot_product_attention has no such argument; the engine computes it")
            tries = ("with engine.context(model): ...",)
            raise CallError(
                [Problem(key=f"call.{n}", what="needs an engine", details=(rule,), tries=tries) for n in given]
            )
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)


def read_qkv(module: nn.Module, args: Sequence[object], named: Mapping[str, object]) -> Call:
    """The call of `forward(q, k, v, *, scale, is_causal, enable_gqa, mask, sinks)`; everything else is refused by name.

    Args:
        module: whose forward was called.
        args: positional arguments, q, k, v.
        named: arguments by name.

    Returns:
        The call.

    Raises:
        CallError: every argument that is missing, unknown or of a wrong type.
    """
    return read(args, named)
