"""Calls of npu_ring_attention_update: their sizes, their values, and what the reference kernel gives."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cp_engine.kernels.ascend import dense_reference as reference
from cp_engine.kernels.ascend.dense_calls import refusal, tensor
from cp_engine.kernels.ascend.layouts import COPIES

Arguments = Mapping[str, object]
NAME = "npu_ring_attention_update"
MAXIMA, SUMS = ("prev_softmax_max", "cur_softmax_max"), ("prev_softmax_sum", "cur_softmax_sum")


def sizes(given: Arguments) -> dict[str, object]:
    """What follows from the layout; nothing for tensors that have other dims."""
    out, highest, is_packed = tensor(given, "prev_attn_out"), tensor(given, MAXIMA[0]), given["input_layout"] == "TND"
    if out.ndim != 3 or highest.ndim != (3 if is_packed else 4):
        return {}
    if is_packed:
        tokens, heads, width = out.shape
        return {"heads": heads, "head_dim": width, "tokens": tokens, "statistics": [tokens, heads, COPIES]}
    tokens, batch, width = out.shape
    heads = highest.shape[1]
    return {"heads": heads, "width": width, "tokens": tokens, "statistics": [batch, heads, tokens, COPIES]}


def compute(given: Arguments) -> object:
    """The operator."""
    _require_statistics(given)
    ends = given["actual_seq_qlen"]
    if isinstance(ends, Tensor):
        _require_ends(ends, tensor(given, "prev_attn_out").shape[0])
    previous, current = _part(given, "prev"), _part(given, "cur")
    return reference.update(previous, current, str(given["input_layout"]), str(given["input_softmax_layout"]))


def outline(given: Arguments) -> object:
    """Sizes of what the operator gives."""
    return tuple(torch.empty_like(x) for x in _part(given, "prev"))


def _part(given: Arguments, which: str) -> tuple[Tensor, Tensor, Tensor]:
    out, highest, total = (tensor(given, f"{which}_{name}") for name in ("attn_out", "softmax_max", "softmax_sum"))
    return out, highest, total


def _require_statistics(given: Arguments) -> None:
    """Statistics of queries that saw a key, each 8 times."""
    for name in (*MAXIMA, *SUMS):
        x = tensor(given, name)
        if not torch.equal(x, x[..., :1].expand_as(x)):
            raise refusal(NAME, name, "its last dim holds different values", "each statistic is there 8 times")
        is_wrong = ~x.isfinite() if name in MAXIMA else ~(x.isfinite() & (x > 0))
        if rows := int(is_wrong[..., 0].sum()):
            rule = "what the operator gives for a query that saw no key is not documented"
            raise refusal(NAME, name, f"is that of no softmax in {rows} rows", rule)


def _require_ends(ends: Tensor, tokens: int) -> None:
    found = ends.tolist()
    if found[:1] != [0] or found[-1] != tokens or found != sorted(set(found)):
        rule = f"ends of packed sequences ascend from 0 to the last of {tokens} tokens"
        raise refusal(NAME, "actual_seq_qlen", f"is {found}", rule)


UPDATE = {NAME: (sizes, compute, outline)}
