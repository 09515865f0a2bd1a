"""Merging partial results by Ascend's npu_ring_attention_update, in place of torch operations.

    m = max(m1, m2)     s = s1 exp(m1 - m) + s2 exp(m2 - m)     out = out1 s1 exp(m1 - m) / s + out2 s2 exp(m2 - m) / s

Each side goes in with its lse as the maximum and 1 as the sum, which is the same softmax. The operator takes no queries that saw
nothing: with -inf on both sides the formula is -inf - -inf. Such a query gets a maximum below every score, so that the other side
replaces it, and lse -inf again where both sides have it.

The operator's page wants positive maxima, which scores do not have; the formula takes any, and torch_npu's own ring passes them.
Source: torch_npu 2.13.0, docstring of npu_ring_attention_update; the page of that name in op-plugin.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_engine.kernels.ascend.layouts import from_heads, to_heads, to_statistics
from cp_engine.kernels.ascend.operators import lacks, registered, shipped

UNSEEN = -1e30
"""The maximum of a query that saw nothing: exp(UNSEEN - score) is 0, and exp(UNSEEN - UNSEEN) is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMerge:
    """A merge by an operator of torch_npu.

    Args:
        operator: its name.
        layout: of out, `SBH`; the other one that the operator knows, `TND`, is for packed tokens.
    """

    operator: str = "npu_ring_attention_update"
    layout: str = "SBH"

    def refusal(self) -> str | None:
        """Why this process cannot merge so, where that is known."""
        if lacks(self.operator):
            version, _ = shipped()
            return f"merges by {self.operator}, which the torch_npu of this process does not register; {version} does"
        return None

    def describe(self) -> str:
        """What the operator is told, for a reader."""
        return f"{self.operator} {self.layout}"

    def add(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Adds a partial result to another, in place.

        Args:
            out: [B, H, S, Dv], float32.
            lse: [B, H, S], float32, -inf where nothing was seen yet.
            part: [B, H, S, Dv], 0 where nothing was seen.
            part_lse: [B, H, S].

        Raises:
            KernelError: the operator is not registered.
        """
        results = [from_heads(x.to(out.dtype), self.layout) for x in (out, part)]
        maxima = [to_statistics(x.clamp(min=UNSEEN), self.layout, "") for x in (lse, part_lse)]
        one = torch.ones_like(maxima[0])
        merged, highest, total = registered(self.operator)(
            prev_attn_out=results[0], prev_softmax_max=maxima[0], prev_softmax_sum=one, cur_attn_out=results[1],
            cur_softmax_max=maxima[1], cur_softmax_sum=one, input_layout=self.layout,
        )  # fmt: skip
        out.copy_(to_heads(merged, self.layout, out.shape[1]))
        m = highest[..., 0]
        lse.copy_((m + total[..., 0].log()).masked_fill(m <= UNSEEN, -torch.inf))
