"""Gradients of the operators for code that calls them under autograd, as torch_npu registers them: through the gradient operators.

`torch.library.register_autograd` refuses keyword-only tensors, so these are kernels of the Autograd key.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cp_engine.errors import KernelError, Problem
from cp_engine.kernels.ascend.operators import bound

OF_GRADIENT = ("input_layout", "atten_mask", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix",
               "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "softmax_layout")  # fmt: skip
"""Arguments of npu_fusion_attention that its gradient takes under the same name."""


class _FusionAttention(torch.autograd.Function):
    """npu_fusion_attention; the gradient of its statistics is not propagated, as on the device."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, given: dict[str, object]) -> Any:
        result = _below(torch.ops.npu.npu_fusion_attention, {**given, "query": query, "key": key, "value": value})
        ctx.save_for_backward(query, key, value, *result[:3])
        ctx.given = given
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: object) -> Any:
        query, key, value, out, highest, total = ctx.saved_tensors
        given = ctx.given
        grads = torch.ops.npu.npu_fusion_attention_grad(
            query, key, value, dout.contiguous(), given["head_num"], given["input_layout"], softmax_max=highest,
            softmax_sum=total, attention_in=out, scale_value=given["scale"],
            **{name: given[name] for name in OF_GRADIENT[1:]},
        )  # fmt: skip
        return (*grads[:3], None)


class _SparseAttention(torch.autograd.Function):
    """npu_sparse_flash_attention."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_rope: Tensor, k_rope: Tensor, given: dict[str, object]
    ) -> Any:
        named = {"query": q, "key": k, "value": v, "query_rope": q_rope, "key_rope": k_rope}
        result = _below(torch.ops.npu.npu_sparse_flash_attention, {**given, **named})
        ctx.save_for_backward(q, k, v, q_rope, k_rope, *result)
        ctx.given = given
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: object) -> Any:
        q, k, v, q_rope, k_rope, out, highest, total = ctx.saved_tensors
        given = ctx.given
        grads = torch.ops.npu.npu_sparse_flash_attention_grad(
            q, k, v, given["sparse_indices"], dout.contiguous(), out, highest, total, given["scale_value"],
            given["sparse_block_size"], query_rope=q_rope, key_rope=k_rope, layout=given["layout_query"],
            sparse_mode=given["sparse_mode"], attention_mode=given["attention_mode"],
        )  # fmt: skip
        return (*grads, None)


def _below(operator: Any, given: dict[str, object]) -> Any:
    """Calls an operator below autograd."""
    schema = operator.default._schema
    positional = [given[a.name] for a in schema.arguments if not a.kwarg_only]
    named = {a.name: given[a.name] for a in schema.arguments if a.kwarg_only}
    with torch._C._AutoDispatchBelowAutograd():
        return operator.default(*positional, **named)


def _fusion_attention(*args: object, **kwargs: object) -> object:
    given = bound(torch.ops.npu.npu_fusion_attention.default._schema, args, kwargs)
    return _FusionAttention.apply(*(given.pop(name) for name in ("query", "key", "value")), given)


def _sparse_attention(*args: object, **kwargs: object) -> object:
    given = bound(torch.ops.npu.npu_sparse_flash_attention.default._schema, args, kwargs)
    tensors = [given.pop(name) for name in ("query", "key", "value", "query_rope", "key_rope")]
    return _SparseAttention.apply(*tensors, given)


def _lightning_indexer(*args: object, **kwargs: object) -> object:
    """Positions have no gradient."""
    operator = torch.ops.npu.npu_lightning_indexer
    return _below(operator, bound(operator.default._schema, args, kwargs))


def require_no_gradient(name: str, given: Mapping[str, object]) -> None:
    """Refuses a call under autograd of an operator that has no gradient; raises KernelError."""
    lists = [x if isinstance(x, list) else [x] for x in given.values()]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for xs in lists for x in xs):
        what = "is called under autograd, and the operator has no gradient"
        raise KernelError([Problem(key=f"npu.{name}", what=what)])


def _update(*args: object, **kwargs: object) -> object:
    """No gradient is registered for it."""
    operator = torch.ops.npu.npu_ring_attention_update
    given = bound(operator.default._schema, args, kwargs)
    require_no_gradient("npu_ring_attention_update", given)
    return _below(operator, given)


DIFFERENTIABLE: dict[str, Callable[..., object]] = {
    "npu_fusion_attention": _fusion_attention,
    "npu_sparse_flash_attention": _sparse_attention,
    "npu_lightning_indexer": _lightning_indexer,
    "npu_ring_attention_update": _update,
}
