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


def reduce(
    parameters: Sequence[nn.Parameter], passes: tuple[int, int], group: dist.ProcessGroup, device: str
) -> list[Problem]:
    """Sums gradients over a group, in place; not where ranks made different passes.

    Args:
        parameters: equal on all ranks; one may have a gradient on some ranks only (an expert that got no token).
        passes: forward and backward passes through the plan that this rank made; equal on all ranks.
        group: of the cp ranks.
        device: device type of the group.

    Returns:
        The same problem on every rank where the passes differ; else nothing.
    """
    has = [p.grad is not None for p in parameters]
    told = torch.tensor([*has, *passes, *(-n for n in passes)], dtype=torch.int32, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)  # ranks agree on which there are before they reduce
    most, least = told[-4:-2].tolist(), (-told[-2:]).tolist()
    if most != least:
        return [_different(passes, group, device)]
    for p, anywhere in zip(parameters, told[:-4].tolist(), strict=True):
        if anywhere:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad, group=group)
    return []


def _different(passes: tuple[int, int], group: dist.ProcessGroup, device: str) -> Problem:
    mine = torch.tensor(passes, dtype=torch.int32, device=device)
    found = mine.new_empty(dist.get_world_size(group) * 2)
    dist.all_gather_into_tensor(found, mine, group=group)
    rows = list(zip(dist.get_process_group_ranks(group), found.view(-1, 2).tolist(), strict=True))
    fewest = [rank for rank, row in rows if sum(row) == min(sum(row) for _, row in rows)]
    skipped = f"rank{'s' * (len(fewest) > 1)} {', '.join(map(str, fewest))} skipped passes that others made"
    shown = tuple((f"rank {rank}", f"{row[0]} forward and {row[1]} backward passes of attention") for rank, row in rows)
    rule = (
        "rule",
        "every rank makes the same passes before gradients are summed, also one whose tokens have no labels",
    )
    return Problem(key="sum_gradients", what=f"{skipped}; no gradient was summed", details=(*shown[:8], rule))
