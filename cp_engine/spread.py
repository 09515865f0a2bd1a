"""Calls whose tensors a host holds as DTensors: tensor parallelism that keeps them so between its layers."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cp_engine.call import Call
from cp_engine.errors import CallError, Problem

HEADS = 1  # the dim of a call's tensors that tensor parallelism cuts


def of_this_rank(call: Call) -> Call:
    """The call on what this rank holds, whose result is spread as its tensors were.

    Args:
        call: as a host made it.

    Returns:
        The call itself if its tensors are plain; else one on local tensors.

    Raises:
        CallError: tensors that are cut along another dim than heads, hold part of a sum, or are not all spread alike.
    """
    spread = {name: x for name, x in call.tensors.items() if isinstance(x, DTensor)}
    if not spread:
        return call
    first, *_ = spread.values()
    mesh, placements = first.device_mesh, first.placements
    problems = []
    for name, x in call.tensors.items():
        if not isinstance(x, DTensor):
            what = f"is a plain tensor, and {next(iter(spread))} is spread over ranks"
            problems.append(Problem(key=f"call.{name}", what=what, tries=(f"DTensor.from_local({name}, ...)",)))
        elif x.device_mesh != mesh or x.placements != placements or not all(_is_known(p) for p in placements):
            what = f"is spread as {_text(x.placements)} over a mesh of {x.device_mesh.size()} ranks"
            rule = ("rule", "attention runs on whole heads: Shard(1) or Replicate(), alike for all tensors of a call")
            tries = (f"{name}.redistribute(placements=[Shard(1)])",)
            problems.append(Problem(key=f"call.{name}", what=what, details=(rule,), tries=tries))
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


def _is_known(placement: Placement) -> bool:
    return placement == Replicate() or placement == Shard(HEADS)


def _text(placements: tuple[Placement, ...]) -> str:
    return f"[{', '.join('Replicate()' if p == Replicate() else repr(p) for p in placements)}]"
