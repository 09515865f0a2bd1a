"""A composition inside torch.compile: one custom operator forward and one backward, which the compiler does not look into.

Tracing through the composition would freeze every exchange into the graph as it is; as an operator it runs the code that eager mode
runs, with the same packing, overlap and counts. An operator takes tensors, numbers and texts, so a program is known to it by a name.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cp_engine.exchange.operation import Sketch
from cp_engine.plan.ir import Plan
from cp_engine.runtime.call import Call
from cp_engine.runtime.program import Program


class Planned(Protocol):
    """A plan with its program, and the check of a call."""

    plan: Plan
    program: Program

    def require_in_graph(self, call: Call) -> None:
        """Refuses a call that differs from the plan, or that a graph cannot hold."""


_PLANNED: WeakValueDictionary[str, Planned] = WeakValueDictionary()  # the only way to name an object in a graph


def name_of(planned: Planned) -> str:
    """The name by which operators in a graph know a plan, for as long as it lives.

    It follows from the plan and the rank: compilers keep graphs on disk by their constants, and a graph has the plan's sizes in it. It
    is a text, which is always a constant: a number that differs between calls becomes a variable of the graph.
    """
    text = f"{planned.plan.fingerprint} {planned.program.target.ranks}"
    number = int(sha256(text.encode()).hexdigest()[:12], 16)
    while f"{number:x}" in _PLANNED:  # another engine with the same plan
        number += 1
    _PLANNED[f"{number:x}"] = planned
    return f"{number:x}"


def attend(call: Call, plan: str, scale: float) -> Tensor:
    """Attends, as one operator; it checks the call when the graph is made.

    Args:
        call: of one rank.
        plan: its name.
        scale: factor on the scores.

    Returns:
        [B, H, S_local, Dv].
    """
    given = {**call.tensors, **call.parameters}
    mask = ("full", "causal")[call.mask] if isinstance(call.mask, bool) else "another mask"
    arguments = ",".join(given), ",".join(call.parameters), mask, call.enable_gqa
    results: list[Tensor] = torch.ops.cp_engine.attend(list(given.values()), *arguments, plan, scale)
    return results[0]


@torch.library.custom_op("cp_engine::attend", mutates_args=())
def _attend(
    inputs: Sequence[Tensor], names: str, parameters: str, mask: str, enable_gqa: bool, plan: str, scale: float
) -> list[Tensor]:
    program = _PLANNED[plan].program
    given = dict(zip(names.split(","), inputs, strict=True))
    program.compiled_runs += 1
    record = program.forward({name: [given[name]] for name in program.inputs}, scale)
    saved = _saved(program, given)
    fresh = [x for x, sketch in zip(record.saved, saved, strict=True) if isinstance(sketch, Sketch)]
    return _apart([*record.outs, *fresh], inputs)


@_attend.register_fake
def _(
    inputs: Sequence[Tensor], names: str, parameters: str, mask: str, enable_gqa: bool, plan: str, scale: float
) -> list[Tensor]:
    planned, given = _PLANNED[plan], dict(zip(names.split(","), inputs, strict=True))
    own = {n: x for n, x in given.items() if n in parameters.split(",")}
    tensors = {n: x for n, x in given.items() if n not in own}
    carried = mask if mask == "another mask" else mask == "causal"
    planned.require_in_graph(Call(tensors=tensors, parameters=own, mask=carried, enable_gqa=enable_gqa))
    outs = planned.program.outline({n: [_sketch(given[n])] for n in planned.program.inputs})[1]
    made = [s for s in _saved(planned.program, given) if isinstance(s, Sketch)]
    return [inputs[0].new_empty(s.size, dtype=s.dtype) for s in (*outs, *made)]


@torch.library.custom_op("cp_engine::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor, inputs: Sequence[Tensor], names: str, made: Sequence[Tensor], plan: str, scale: float
) -> list[Tensor]:
    program, rest = _PLANNED[plan].program, iter(made)
    given = dict(zip(names.split(","), inputs, strict=True))
    saved = tuple(next(rest) if isinstance(s, Sketch) else given[s] for s in _saved(program, given))
    grads = program.backward([dout], saved, program.sizes, scale)
    return _apart([grads[name][0].to(x.dtype) for name, x in given.items()], (dout, *inputs, *made))


@_attend_backward.register_fake
def _(
    dout: Tensor, inputs: Sequence[Tensor], names: str, made: Sequence[Tensor], plan: str, scale: float
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _apart(results: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Results as an operator has to give them: contiguous, as its fake says, and sharing memory with nothing."""
    taken, apart = {x.untyped_storage().data_ptr() for x in others}, []
    for x in results:
        is_taken = x.untyped_storage().data_ptr() in taken
        apart.append(x.clone(memory_format=torch.contiguous_format) if is_taken else x.contiguous())
        taken.add(apart[-1].untyped_storage().data_ptr())
    return apart


def _sketch(x: Tensor) -> Sketch:
    return Sketch(tuple(x.shape), x.dtype)


def _saved(program: Program, given: Mapping[str, Tensor]) -> list[Sketch | str]:
    """What a forward pass saves: an input by its name, or the size of something new."""
    sketches = {n: _sketch(given[n]) for n in program.inputs}
    saved, _ = program.outline({n: [s] for n, s in sketches.items()})
    names = {id(s): n for n, s in sketches.items()}
    return [names.get(id(s), s) for s in saved]


def _setup(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Sequence[Tensor], str, str, str, bool, str, float],
    output: list[Tensor],
) -> None:
    tensors, names, *_, plan, scale = inputs
    ctx.names, ctx.plan, ctx.scale, ctx.count = names, plan, scale, len(tensors)  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors, *output[1:])


def _backward(
    ctx: torch.autograd.function.FunctionCtx, grads: Sequence[Tensor]
) -> tuple[list[Tensor], None, None, None, None, None, None]:
    tensors: Sequence[Tensor] = ctx.saved_tensors  # type: ignore[attr-defined]
    n, plan, scale = ctx.count, ctx.plan, ctx.scale  # type: ignore[attr-defined]
    inputs, made = list(tensors[:n]), list(tensors[n:])
    found = torch.ops.cp_engine.attend_backward(grads[0], inputs, ctx.names, made, plan, scale)  # type: ignore[attr-defined]
    return found, None, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_setup)
