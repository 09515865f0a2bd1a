"""A plan that calls are held against: what a call carries must be what was proved, or it is refused by name."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cp_engine.algebra.mask import Mask
from cp_engine.errors import CallError, Problem
from cp_engine.exchange.target import Target
from cp_engine.plan.ir import Plan
from cp_engine.plan.prove import prove
from cp_engine.runtime import compiled
from cp_engine.runtime.accept import RULE, Accept
from cp_engine.runtime.call import Call
from cp_engine.runtime.program import Program
from cp_engine.runtime.recompute import Memo, Result, memo_of_pass, memo_of_recompute

PROGRAMS = 64
"""Lowered plans that are kept for masks that come with the calls: documents differ from batch to batch, not from layer to layer."""


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
        self._accept = Accept(plan, target)

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
        self._accept.require(call)
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
        self._accept.require(call)
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
        self._accept.require(call)

    def _memo(self, call: Call, scale: float, passed: Sequence[Memo] | None) -> Memo | None:
        """Where the pass leaves its record; in a recompute, the one that the same call left on every rank."""
        if self.plan.recompute != "skip_attention":
            return None
        given = {**call.tensors, **call.parameters}
        said = (scale, *given, *(self._accept.masks(call) if self.plan.is_mask_from_call else ()))
        if passed is not None:
            return memo_of_recompute(given.values(), said, passed, (self._target.communicator, self._target.heads))
        self._passes += 1
        return memo_of_pass(given.values(), said, self._passes)

    def _programs(self, call: Call) -> list[Program]:
        """The program of the call's mask, or one per sequence where their masks differ."""
        if not self.plan.is_mask_from_call:
            return [self.program]
        masks = dict.fromkeys(self._accept.masks(call))
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
        every = [found[m] for m in self._accept.masks(call)]
        return every if len(found) > 1 else every[:1]


def _each(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    return {name: [x] for name, x in tensors.items()}
