"""Gradients of parameters: each rank's backward gives its tokens' share, and the shares are summed once."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_engine.errors import Problem

ONCE = ("rule", "gradients are summed over the cp ranks once per step, after the last backward")


def refusals(model: nn.Module, ranks: set[int], summed: Mapping[int, Tensor]) -> list[Problem]:
    """Why the gradients of a model must not be summed (again).

    Args:
        model: whose parameters have gradients.
        ranks: world ranks over which they would be summed.
        summed: per id of a parameter, the gradient that the last sum left.

    Returns:
        One problem per wrapper, parameter that a wrapper shards, and gradient that is still the summed one.
    """
    problems = []
    for name, module in model.named_modules():
        group = getattr(module, "process_group", None)
        shared = ranks & set(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else set()
        if len(shared) > 1:
            what = f"{type(module).__name__} reduces gradients over {len(shared)} of the cp ranks already"
            problems.append(Problem(key=name or "model", what=what, details=(ONCE,)))
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and len(ranks & {int(r) for r in p.device_mesh.mesh.flatten()}) > 1:
            what = f"is sharded over {p.device_mesh}, whose owner reduces its gradient over the cp ranks already"
            problems.append(Problem(key=name, what=what, details=(ONCE,)))
        elif p.grad is not None and summed.get(id(p)) is p.grad:
            what = "its gradient was summed in this step already, and it is the same tensor"
            tries = ("optimizer.zero_grad(set_to_none=True)",)
            problems.append(Problem(key=name, what=what, details=(ONCE,), tries=tries))
    return problems


def reduce(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, device: str) -> None:
    """Sums gradients over a group, in place.

    Args:
        parameters: equal on all ranks; one may have a gradient on some ranks only (an expert that got no token).
        group: of the cp ranks.
        device: device type of the group.
    """
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)  # ranks agree on which there are before they reduce
    for p, anywhere in zip(parameters, has.tolist(), strict=True):
        if anywhere:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad, group=group)
