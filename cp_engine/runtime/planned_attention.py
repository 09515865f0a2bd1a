"""A plan that calls are held against: what a call carries must be what was proved, or it is refused by name."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from cp_engine.algebra.mask import Mask, mask_of
from cp_engine.errors import CallError, ConfigError, Problem
from cp_engine.exchange.redistribute import Target
from cp_engine.plan.ir import Plan
from cp_engine.plan.prove import prove
from cp_engine.runtime import compiled, memory
from cp_engine.runtime.call import Call, Carried, HostMask, of_scale
from cp_engine.runtime.devices import of_tensors
from cp_engine.runtime.program import Memo, Program, Result

PROGRAMS = 64
"""Lowered plans that are kept for masks that come with the calls: documents differ from batch to batch, not from layer to layer."""

PART = 2**16
"""Words that are digested at a time: what a processor has near it."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MIXER = tuple(n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of SplitMix64, as signed numbers."""

RULE = ("rule", "a plan runs the call that it was proved for")


class PlannedAttention:
    """The attention of one plan on the ranks of this process.

    Args:
        plan: what calls are held against.
        target: the ranks that live here and how to reach the others.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan, self._target = plan, target
        self.program = Program(plan, target)
        self._name, self._passes = compiled.name_of(self), 0
        self._of_masks: OrderedDict[Mask, Program] = OrderedDict()
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

    @property
    def runs_in_graphs(self) -> int:
        """How many forward passes compiled graphs made."""
        return self.program.compiled_runs

    @property
    def passes(self) -> tuple[int, int]:
        """How many forward and backward passes began."""
        programs = [self.program, *self._of_masks.values()]
        return sum(p.forwards for p in programs), sum(p.backwards for p in programs)

    def attend(self, call: Call, passed: Sequence[Memo] | None = None) -> Result:
        """Runs a call that is what the plan was proved for.

        Args:
            call: local tensors and what the call says about them.
            passed: in a recompute, what the passes that it may repeat have left; None in a pass.

        Returns:
            out [B, H, S_local, Dv], this rank's share of the plan's losses, and what a recompute may use.

        Raises:
            CallError: everything in which the call differs.
        """
        self._require_planned(call)
        programs = self._programs(call)
        tensors, parameters = call.tensors, call.parameters
        shape = self.plan.shape
        scale = shape.head_dim**-0.5 if call.scale is None else call.scale
        if len(programs) > 1:  # the sequences of a batch have masks of their own
            parts = [
                program.results({**{n: [x[i : i + 1]] for n, x in tensors.items()}, **_each(parameters)}, scale)
                for i, program in enumerate(programs)
            ]
            losses = {name: torch.stack([part[name][0] for part in parts]).sum() for name in self.plan.losses}
            return Result(torch.cat([part["out"][0] for part in parts]), None, losses)
        memo = self._memo(call, scale, passed)
        found = programs[0].results({**_each(tensors), **_each(parameters)}, scale, memo)
        return Result(found["out"][0], memo, {name: found[name][0] for name in self.plan.losses})

    def made(self, name: str, call: Call) -> Tensor:
        """A tensor that a step makes on the way, under the masks of the call; raises CallError as `attend` does."""
        self._require_planned(call)
        programs = self._programs(call)
        scale = self.plan.shape.head_dim**-0.5 if call.scale is None else call.scale
        rows = [slice(i, i + 1) for i in range(len(programs))] if len(programs) > 1 else [slice(None)]
        found = [
            program.made(name, {**{n: [x[r]] for n, x in call.tensors.items()}, **_each(call.parameters)}, scale)[0]
            for program, r in zip(programs, rows, strict=True)
        ]
        return torch.cat(found)

    def attend_compiled(self, call: Call) -> Tensor:
        """The same while torch.compile traces: one operator of the graph, which checks the call when the graph is made."""
        scale = self.plan.shape.head_dim**-0.5 if call.scale is None else call.scale
        return compiled.attend(call, self._name, scale)

    def require_in_graph(self, call: Call) -> None:
        """Refuses a call that differs from the plan, or that a graph, which is made once, cannot hold; raises CallError."""
        plan, problems = self.plan, []
        if plan.is_mask_from_call or not isinstance(call.mask, bool):
            problems.append(Problem(key="call.mask", what="comes with each call, and a compiled graph is made once"))
        if plan.recompute != "all":
            what = f"is {plan.recompute}, and in a compiled model the compiler decides what is recomputed"
            problems.append(Problem(key="cp.recompute", what=what, tries=("cp.recompute=all",)))
        if plan.losses:
            what = f"has {', '.join(plan.losses)} beside its result, which a compiled graph does not carry"
            problems.append(Problem(key="call", what=what))
        if problems:
            raise CallError(problems, plan.name)
        self._require_planned(call)

    def _memo(self, call: Call, scale: float, passed: Sequence[Memo] | None) -> Memo | None:
        """Where the pass leaves its record; in a recompute, the one that the same call left on every rank."""
        if self.plan.recompute != "skip_attention":
            return None
        given = {**call.tensors, **call.parameters}
        prints = torch.stack([_print(x.detach()) for x in given.values()])
        told = (scale, *given, *(self._masks(call) if self.plan.is_mask_from_call else ()))
        if passed is None:
            self._passes += 1
            return Memo(None, prints, told, number=self._passes)
        alike = [
            m
            for m in passed
            if m.is_intact and m.told == told and m.prints is not None and torch.equal(m.prints, prints)
        ]
        numbers = sorted(m.number for m in alike)
        for others in (self._target.communicator, self._target.heads):
            if others is not None:  # a rank may have the same tokens in two passes, and others not; or have dropped one
                numbers = others.agree(numbers, prints.device)
        return next((m for m in alike if m.number in numbers[:1]), Memo(None, prints, told))

    def _programs(self, call: Call) -> list[Program]:
        """The program of the call's mask, or one per sequence where their masks differ."""
        if not self.plan.is_mask_from_call:
            return [self.program]
        masks = dict.fromkeys(self._masks(call))
        found = {}
        for mask in masks:
            if mask not in self._of_masks:
                assert self.plan.composition is not None
                if not mask.is_within(self.plan.mask):
                    what = f"is {mask.kind}, and shows what the mask of the plan hides: {self.plan.mask.kind}"
                    raise CallError([Problem(key="call.mask", what=what, details=(RULE,))], self.plan.name)
                plan = prove(self.plan.composition, self.plan.shape, mask)
                self._of_masks[mask] = Program(plan, self._target)
            self._of_masks.move_to_end(mask)
            found[mask] = self._of_masks[mask]
        while len(self._of_masks) > PROGRAMS:
            _, program = self._of_masks.popitem(last=False)
            self.program.forwards += program.forwards
            self.program.backwards += program.backwards
        every = [found[m] for m in self._masks(call)]
        return every if len(found) > 1 else every[:1]

    def _masks(self, call: Call) -> tuple[Mask, ...]:
        size, batch, carried = self.plan.shape.sequence, call.tensors["q"].shape[0], call.mask
        if not isinstance(carried, HostMask):
            return (_mask(carried, size),)
        for source, rows, masks in self._read:  # a host's object is read once, and not once per layer
            if source is carried.source and rows == batch:
                return masks
        self._read.append((carried.source, batch, carried.read(carried.source, batch, size)))
        return self._read[-1][2]

    # -------------------------------------------------------------- what a call may be
    def _require_planned(self, call: Call) -> None:
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
        return all(m is plan.mask or m.same_as(plan.mask) for m in self._masks(call))

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
        carried = ", ".join(dict.fromkeys(m.kind for m in self._masks(call)))
        name = " with other boundaries" if carried == plan.mask.kind else ""
        what = f"is {carried}{name}, and the plan was proved for the mask {plan.mask.kind}"
        return Problem(key="call.mask", what=what, details=(RULE,))


def _batch(call: Call) -> int:
    shape = call.tensors["q"].shape
    return shape[0] if shape else 1


def _each(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    return {name: [x] for name, x in tensors.items()}


def _print(x: Tensor) -> Tensor:
    """A digest that knows where numbers are; torch's own is the same for the same numbers in another order.

    The bits, eight bytes at a time and with their place, go through a mixer, and what comes out is summed.
    Source of the mixer's form and factors: Steele, Lea and Flood, OOPSLA 2014, figure 8 (SplitMix64).
    """
    flat, size = x.contiguous().flatten(), x.element_size()
    if flat.numel() * size % 8:
        words = flat.view(BITS[size]).to(torch.int64)
    else:
        words = (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)
    total = words.new_zeros(())
    places = torch.arange(1, min(PART, len(words)) + 1, device=x.device) * MIXER[0]
    for part in words.split(PART):
        mixed = part + places[: len(part)]
        for shift, factor in ((30, MIXER[1]), (27, MIXER[2]), (32, MIXER[0])):
            mixed.mul_(factor).bitwise_xor_(mixed >> shift)
        total = total * MIXER[0] + mixed.sum()
    return total


def _mask(carried: Carried, size: int) -> Mask:
    if isinstance(carried, bool):
        return mask_of("causal" if carried else "full", size)
    assert not isinstance(carried, HostMask)
    try:
        return mask_of(carried, size)
    except ConfigError as error:
        problems = [replace(p, key=f"call.{p.key}") for p in error.problems]
        raise CallError(problems) from None
