"""Accept: what a call carries must be what was proved, or it is refused by name."""

from collections import deque
from dataclasses import replace
from math import inf

import torch

from cp_engine.algebra.mask import Mask
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.errors import CallError, ConfigError, Problem
from cp_engine.exchange.target import Target
from cp_engine.plan.ir import Plan
from cp_engine.runtime import memory
from cp_engine.runtime.call import Call, Carried, HostMask, of_scale
from cp_engine.runtime.devices import of_tensors

RULE = ("rule", "a plan runs the call that it was proved for")


class Accept:
    """What the calls of one plan must be.

    Args:
        plan: what calls are held against.
        target: the rank that lives here.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan = plan
        self._read = deque[tuple[object, int, tuple[Mask, ...]]](
            maxlen=4
        )  # what the last objects of the host's stand for
        self._dtype, self._place = getattr(torch, plan.shape.dtype), of_tensors(target.device)
        (rank,) = target.ranks
        shape = plan.shape
        sizes = memory.sizes_of(plan, rank)
        self._sizes = {name: sizes[name][1:] for name in plan.inputs}  # any batch
        self._parameter_sizes = {name: sizes[name] for name in plan.parameters}
        self._is = {"causal": plan.mask.same_as(mask_of("causal", shape.sequence))}
        self._is["full"] = plan.mask.same_as(mask_of("full", shape.sequence))
        self._can_have_gqa = shape.kv_heads != shape.heads and "k" in plan.inputs

    def masks(self, call: Call) -> tuple[Mask, ...]:
        """The mask of a call, or one for each sequence of its batch."""
        size, batch, carried = self.plan.shape.sequence, call.tensors["q"].shape[0], call.mask
        if not isinstance(carried, HostMask):
            return (_mask(carried, size),)
        for source, rows, masks in self._read:  # a host's object is read once, and not once per layer
            if source is carried.source and rows == batch:
                return masks
        self._read.append((carried.source, batch, carried.read(carried.source, batch, size)))
        return self._read[-1][2]

    def require(self, call: Call) -> None:
        """Refuses a call that is not what the plan was proved for.

        Raises:
            CallError: everything in which the call differs.
        """
        tensors = call.tensors
        batch = _batch(call)
        if not (
            all(
                tensors[n].shape == (batch, *size)
                and tensors[n].dtype == self._dtype
                and tensors[n].device.type == self._place
                and tensors[n].layout is torch.strided
                for n, size in self._sizes.items()
            )
            and ((call.mask is True and self._is["causal"]) or self._carries_the_mask(call))
            and (call.enable_gqa or not self._can_have_gqa)
            and self._selects_alike(call)
            and call.head_ranks in (None, self.plan.shape.head_ranks)
            and (call.scale is None or 0 < call.scale < inf)
            and {n: tuple(x.shape) for n, x in call.parameters.items()} == self._parameter_sizes
        ):
            problems = self._differences(call)
            if problems:
                raise CallError(problems, self.plan.name)

    def _selects_alike(self, call: Call) -> bool:
        shape = self.plan.shape
        return call.topk is None or min(call.topk, shape.sequence) == shape.selected

    def _carries_the_mask(self, call: Call) -> bool:
        plan = self.plan
        if plan.is_mask_from_call:
            return True
        if isinstance(call.mask, bool):
            return self._is["causal" if call.mask else "full"]
        return all(m is plan.mask or m.same_as(plan.mask) for m in self.masks(call))

    def _differences(self, call: Call) -> list[Problem]:
        plan, problems, batch = self.plan, list[Problem](), _batch(call)
        shape = plan.shape
        for name, size in self._sizes.items():
            x, wanted = call.tensors[name], [batch, *size]
            if list(x.shape) != wanted:
                what = f"is {list(x.shape)}, and the plan is for {wanted}"
                problems.append(Problem(key=f"call.{name}", what=what, details=(RULE,)))
            if x.device.type != self._place:
                what = f"is on {x.device.type}, and the plan runs on {self._place}"
                problems.append(Problem(key=f"call.{name}", what=what, details=(RULE,)))
            if x.layout is not torch.strided:
                what = f"has the layout {x.layout}, and attention takes dense tensors"
                problems.append(Problem(key=f"call.{name}", what=what, tries=(f"{name}.to_dense()",)))
            if x.dtype != self._dtype:
                what = f"is {x.dtype}, and the plan is for {plan.shape.dtype}"
                tries = (f"shape.dtype={str(x.dtype)[6:]}",)
                problems.append(Problem(key=f"call.{name}", what=what, details=(RULE,), tries=tries))
        if not self._carries_the_mask(call):
            problems.append(self._other_mask(call))
        if not self._selects_alike(call):
            what = f"is {call.topk}, and the plan was proved for {shape.topk}"
            problems.append(Problem(key="call.topk", what=what, details=(RULE,), tries=(f"shape.topk={call.topk}",)))
        if call.head_ranks not in (None, shape.head_ranks):
            what = f"lie on {call.head_ranks} ranks, and the plan was proved for {shape.head_ranks}"
            problems.append(Problem(key="call.heads", what=what, details=(RULE,)))
        if call.scale is not None and not 0 < call.scale < inf:
            problems.append(of_scale(call.scale))
        if not call.enable_gqa and self._can_have_gqa:
            what = f"is False, with {plan.shape.heads} heads and {plan.shape.kv_heads} kv heads"
            problems.append(Problem(key="call.enable_gqa", what=what, tries=("enable_gqa=True",)))
        for name, wanted_size in self._parameter_sizes.items():
            found = call.parameters.get(name)
            if found is not None and tuple(found.shape) != wanted_size:
                what = f"is {list(found.shape)}, and the plan is for {list(wanted_size)}"
                problems.append(Problem(key=f"call.{name}", what=what, details=(RULE,)))
        attends = next((s.step.name for s in plan.steps if "out" in s.step.makes), "attend")
        for name in plan.parameters:
            if name not in call.parameters:
                what = "is missing, and the composition uses it"
                lines = [f"cp.steps.{attends}.sinks=false"] if name == "sinks" else []
                problems.append(Problem(key=f"call.{name}", what=what, details=(RULE,), tries=tuple(lines)))
        for name in call.parameters:
            if name not in plan.parameters:
                what = "is carried, and the composition does not use it"
                lines = [f"cp.steps.{attends}.sinks=true"] if name == "sinks" else []
                problems.append(Problem(key=f"call.{name}", what=what, details=(RULE,), tries=tuple(lines)))
        return problems

    def _other_mask(self, call: Call) -> Problem:
        plan = self.plan
        if isinstance(call.mask, bool):
            what = f"is {call.mask}, and the plan was proved for the mask {plan.mask.kind}"
            tries = (f"mask={'causal' if call.mask else 'full'}",)
            return Problem(key="call.is_causal", what=what, details=(RULE,), tries=tries)
        carried = ", ".join(dict.fromkeys(m.kind for m in self.masks(call)))
        name = " with other boundaries" if carried == plan.mask.kind else ""
        what = f"is {carried}{name}, and the plan was proved for the mask {plan.mask.kind}"
        return Problem(key="call.mask", what=what, details=(RULE,))


def _batch(call: Call) -> int:
    shape = call.tensors["q"].shape
    return shape[0] if shape else 1


def _mask(carried: Carried, size: int) -> Mask:
    if isinstance(carried, bool):
        return mask_of("causal" if carried else "full", size)
    assert not isinstance(carried, HostMask)
    try:
        return mask_of(carried, size)
    except ConfigError as error:
        problems = [replace(p, key=f"call.{p.key}") for p in error.problems]
        raise CallError(problems) from None
