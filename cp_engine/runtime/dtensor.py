"""Calls whose tensors a host holds as DTensors: tensor parallelism that keeps them so between its layers."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cp_engine.errors import CallError, Problem
from cp_engine.runtime.call import Call

HEADS = 1  # the dim of a call's tensors that tensor parallelism cuts


def of_this_rank(call: Call, ranks: Collection[int]) -> Call:
    """The call on what this rank holds, whose result is spread as its tensors were.

    Args:
        call: as a host made it.
        ranks: world ranks of the plan, which hold parts of the sequence.

    Returns:
        The call itself if its tensors are plain; else one on local tensors.

    Raises:
        CallError: tensors that are cut along another dim than heads, unevenly, or over ranks of the plan, that hold part of a sum, or
            that are not all spread alike.
    """
    spread = {name: x for name, x in call.tensors.items() if isinstance(x, DTensor)}
    if not spread:
        return call
    first, *_ = spread.values()
    mesh, placements = first.device_mesh, first.placements
    cuts = _cuts(mesh, placements)
    problems = []
    for name, x in call.tensors.items():
        if not isinstance(x, DTensor):
            what = f"is a plain tensor, and {next(iter(spread))} is spread over ranks"
            problems.append(Problem(key=f"call.{name}", what=what, tries=(f"DTensor.from_local({name}, ...)",)))
        elif not torch.compiler.is_compiling() and _meets(x.device_mesh, ranks):
            what, rule = "is spread over ranks of the plan", "the plan says which positions each of its ranks holds"
            tries = (f"{name}.to_local()",)
            problems.append(Problem(key=f"call.{name}", what=what, details=(("rule", rule),), tries=tries))
        elif x.device_mesh != mesh or x.placements != placements or not all(_is_known(p) for p in placements):
            what = f"is spread as {_text(x.placements)} over a mesh of {x.device_mesh.size()} ranks"
            rule = "attention runs on whole heads: Shard(1) or Replicate(), alike for all tensors of a call"
            problems.append(Problem(key=f"call.{name}", what=what, details=(("rule", rule),)))
        elif x.shape[HEADS] % cuts:
            what = f"has {x.shape[HEADS]} heads, and {cuts} ranks cannot hold as many each"
            problems.append(Problem(key=f"call.{name}", what=what))
    rows = tuple(Shard(0) if isinstance(p, Shard) else p for p in placements)
    for name, x in call.parameters.items():
        if not isinstance(x, DTensor) or x.device_mesh != mesh or x.placements != rows:
            what = f"has a row for each query head, and heads are spread as {_text(placements)}"
            tries = (f"distribute_tensor({name}, mesh, {_text(rows)})",)
            problems.append(Problem(key=f"call.{name}", what=what, tries=tries))
    if problems:
        raise CallError(problems)

    def finish(out: Tensor, losses: Mapping[str, Tensor], sequence: int) -> object:
        return call.finish(DTensor.from_local(out, mesh, placements, run_check=False), losses, sequence)

    return replace(call, tensors=_local(call.tensors), parameters=_local(call.parameters), finish=finish)


def _local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors.items()}


def _cuts(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int:
    """Into how many parts heads are cut."""
    cuts = 1
    for i, placement in enumerate(placements):
        cuts *= mesh.size(i) if isinstance(placement, Shard) else 1
    return cuts


def _meets(mesh: DeviceMesh, ranks: Collection[int]) -> bool:
    """Whether a rank of the plan, other than this one, is among those that this rank's part of a mesh lies beside."""
    beside = {rank for i in range(mesh.ndim) for rank in dist.get_process_group_ranks(mesh.get_group(i))}
    return bool((beside & set(ranks)) - {dist.get_rank()})


def _is_known(placement: Placement) -> bool:
    return placement == Replicate() or placement == Shard(HEADS)


def _text(placements: tuple[Placement, ...]) -> str:
    return f"[{', '.join('Replicate()' if p == Replicate() else repr(p) for p in placements)}]"
