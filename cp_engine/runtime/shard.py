"""Tokens: this rank's part of whole tensors, and whole tensors from every rank's part."""

from collections import deque

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from cp_engine.algebra.index_set import IndexSet, whole
from cp_engine.algebra.layout import Layout
from cp_engine.algebra.transfer import Transfer
from cp_engine.exchange.in_flight import InFlight
from cp_engine.exchange.operation import ExchangeOperation
from cp_engine.exchange.target import Target
from cp_engine.plan.ir import Plan


class Unshard(torch.autograd.Function):
    """An exchange as a node of its own."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, operation: ExchangeOperation) -> Tensor:
        ctx.operation, ctx.dtype = operation, x.dtype  # type: ignore[attr-defined]
        values = InFlight({"x": [x]})
        deque(operation.forward(values, 1.0), maxlen=0)  # nothing else computes meanwhile
        return values["x"][0]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grads = InFlight({"x": [grad]})
        deque(ctx.operation.backward(grads, (), 1.0), maxlen=0)  # type: ignore[attr-defined]
        return grads["x"][0].to(ctx.dtype), None  # type: ignore[attr-defined]


def unsharding(plan: Plan, target: Target) -> ExchangeOperation:
    """The exchange that gives every rank the whole sequence."""
    ranks, size = plan.degree, plan.shape.sequence
    one_head = (whole(1),) * ranks
    before, after = Layout(plan.entry.sequence, one_head), Layout((whole(size),) * ranks, one_head)
    transfer = Transfer("x", before, after, (tuple(range(ranks)),), 1)
    return ExchangeOperation([transfer], [transfer.adjoint], target, is_packed=False, wide=frozenset({"x"}))


def take(x: Tensor, held: IndexSet, dim: int) -> Tensor:
    """The positions of a set along a dim, in local order, as a tensor of its own."""
    index: list[slice] = [slice(None)] * x.ndim
    parts = []
    for r in held.runs:
        index[dim] = r.slice()
        parts.append(x[tuple(index)])
    if not parts:
        index[dim] = slice(0, 0)
        return x[tuple(index)].contiguous()
    # a copy also where it could be a view: masking labels in place must not change the caller's batch
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
