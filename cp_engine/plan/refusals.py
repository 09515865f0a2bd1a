"""Refusals: the text of a composition that the proof refuses, with layouts and lines to paste."""

from collections.abc import Mapping, Sequence

from cp_engine.algebra.layout import Layout, Mesh
from cp_engine.algebra.shape import Shape
from cp_engine.errors import CPError, Problem
from cp_engine.plan.ir import Composition, Step
from cp_engine.plan.state import Refused, State


def source(composition: Composition) -> str:
    """What an error says that it is in."""
    return f"cp={composition.name}"


def describe(layout: Layout, mesh: Mesh, rank: int) -> str:
    """What one rank holds, for an error message."""
    return f"sequence {layout.sequence[rank]}, heads {layout.heads[rank]} at {mesh.coordinate(rank)}"


def refusal(refused: Refused, step: Step, composition: Composition, state: State, shape: Shape) -> CPError:
    """The error of a step that cannot be, with its key, its place and the layouts before it.

    Args:
        refused: the bare reason.
        step: which one.
        composition: that it is of.
        state: before it.
        shape: the attention call, in global sizes.
    """
    key = f"cp.steps.{step.name}"
    names = [s.name for s in composition.steps]
    here = names.index(step.name)
    free = next(name for name in ("added", *(f"added_{i}" for i in range(1, len(names) + 1))) if name not in names)
    words = {
        "{key}": key,
        "{name}": step.name,
        "{free}": free,
        "{with}": ",".join([*names[:here], free, *names[here:]]),
        "{without}": ",".join(n for n in names if n != step.name),
    }
    rank = min(1, state.mesh.degree - 1) if refused.rank is None else refused.rank
    shown = [(tensor, layout) for tensor, layout in state.layouts.items() if tensor in refused.shows]
    layouts = [
        ("layout" if i == 0 else "", f"{tensor} holds {describe(layout, state.mesh, rank)}")
        for i, (tensor, layout) in enumerate(shown)
    ]
    mesh = " ".join(f"{a}={s}" for a, s in zip(state.mesh.axes, state.mesh.sizes, strict=True)) or "of one rank"
    at = f"{key} ({step.kind})   mesh {mesh}   mask {state.mask.kind}   sequence={shape.sequence}"
    problem = Problem(
        key=key,
        what=str(refused),
        details=(("at", at), *refused.details, *layouts, ("rule", refused.rule)),
        tries=tuple(_filled(t, words) for t in refused.tries),
    )
    return refused.kind([problem], source(composition))


def _filled(line: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        line = line.replace(word, value)
    return line


def not_returned(state: State, entry: Layout, composition: Composition) -> Problem:
    """The problem of an out that does not end in the layout in which q came.

    Args:
        state: after the last step.
        entry: the layout of q at the beginning.
        composition: that leaves it so.
    """
    out, rank = state.layouts["out"], min(1, state.mesh.degree - 1)
    left = state.history.get("out", ())
    tries: Sequence[str] = ()
    if left:
        back = f"{left[-1].step}_back"
        order = ",".join([*(s.name for s in composition.steps), back])
        tries = (
            f"+collective@cp.steps.{back}=undo cp.steps.{back}.of={left[-1].step} 'cp.steps.{back}.tensors=[out]' 'cp.order=[{order}]'",
        )
    return Problem(
        key="cp.order",
        what="out does not end in the layout in which q came"
        + (f": {', '.join(p.step for p in left)} is not taken back" if left else ""),
        details=(
            ("layout", f"q came with  {describe(entry, state.mesh, rank)}"),
            ("", f"out ends with {describe(out, state.mesh, rank)}"),
            ("rule", "the model gets its result where its queries were"),
        ),
        tries=tuple(tries),
    )
