"""The proof: every step's layouts are inferred, compared with what it needs, and all problems are reported together.

1. available     what a step delivers is held by exactly one rank of each group               (Exchange.infer)
2. exactly once  every visible (query head, query, key) triple is computed by one rank, once   (Dense.infer, one_copy)
3. returned      out ends in the layout in which q came                                        (prove)
"""

from collections.abc import Sequence
from math import gcd

from cp_engine.algebra.index_set import IndexSet, union, whole
from cp_engine.algebra.layout import Layout
from cp_engine.algebra.mask import Mask
from cp_engine.algebra.shape import Shape, part_of
from cp_engine.algebra.tensors import row, shared
from cp_engine.algebra.transfer import Transfer
from cp_engine.errors import CoverageError, Faulty, LayoutError, Problem, calling, is_foreign, named, require
from cp_engine.plan.ir import Composition, Plan, PlannedStep, Step
from cp_engine.plan.refusals import not_returned, refusal, source
from cp_engine.plan.state import Refused, State, require_layout


def prove(composition: Composition, shape: Shape, mask: Mask) -> Plan:
    """Infers every layout and proves the three parts above.

    Args:
        composition: what to prove.
        shape: the attention call, in global sizes.
        mask: what queries may see.

    Returns:
        The plan; equal on every rank.

    Raises:
        CPError: LayoutError or CoverageError with the problem's key, layouts, rule and what to try.
    """
    mesh, inputs = composition.mesh, composition.inputs
    _require_inputs(composition, inputs, shape)
    part = part_of(shape, composition.head_groups)
    with named("cp.layout", source(composition)), calling(composition.layout, "spread"):
        sequence = composition.layout.spread(mesh, shape.sequence, mask)
    entry = Layout(sequence, (whole(part.heads),) * mesh.degree)
    state = State(mesh=mesh, shape=part, mask=mask, layouts=dict.fromkeys(inputs, entry))
    planned, losses = [], set[str]()
    for step in composition.steps:
        before = state
        try:
            _require_new(step, state, losses)
            state, transfers = _inferred(step, state, composition)
            if "out" in state.layouts and "out" not in before.layouts:
                one_copy(state.layouts["out"], part)
        except Refused as refused:
            raise refusal(refused, step, composition, before, shape) from None
        planned.append(
            PlannedStep(
                step=step, before=tuple(before.layouts.items()), after=tuple(state.layouts.items()), transfers=transfers
            )
        )
    if "out" not in state.layouts:
        raise CoverageError(
            [
                Problem(
                    key="cp.order",
                    what="no step attends, so nothing makes out",
                    details=(("rule", "a composition attends once"),),
                )
            ],
            source(composition),
        )
    if state.layouts["out"] != entry:
        raise CoverageError([not_returned(state, entry, composition)], source(composition))
    _require_gradients(composition)
    return Plan(
        name=composition.name,
        mesh=mesh,
        shape=shape,
        mask=mask,
        tokens=str(composition.layout),
        entry=entry,
        steps=tuple(planned),
        inputs=inputs,
        parameters=tuple(dict.fromkeys(p for s in composition.steps for p in s.parameters)),
        losses=tuple(name for s in composition.steps for name in s.losses),
        recompute=composition.recompute,
        head_groups=composition.head_groups,
        composition=composition,
    )


def _inferred(step: Step, state: State, composition: Composition) -> tuple[State, tuple[Transfer, ...]]:
    """The state after a step and its transfers, whatever package the step is of; raises Refused, or PrimitiveError."""
    rule = "infer returns the State after the step, and a tuple of Transfers"
    with named(f"cp.steps.{step.name}", source(composition)), calling(step, "infer"):
        found = step.infer(state)
        if is_foreign(step):
            require(step, "infer", found, tuple, rule)
            if len(found) != 2:
                raise Faulty(step, "infer", f"returned {len(found)} things, not 2", rule)
            require(step, "infer", found[0], State, rule)
            require(step, "infer", found[1], tuple, rule)
            for transfer in found[1]:
                require(step, "infer", transfer, Transfer, rule)
            for layout in found[0].layouts.values():
                require_layout(step, "infer", layout, state)
            if left := [name for name in step.makes if name not in found[0].layouts]:
                rule = "after a step there are the tensors that its class makes"
                raise Faulty(step, "infer", f"made no layout of {', '.join(left)}", rule)
    return found


def _require_new(step: Step, state: State, losses: set[str]) -> None:
    """Nothing is made twice: the first one would be lost, and its gradient with it."""
    again = [name for name in (*step.makes, *step.losses) if name in (*state.layouts, *losses)]
    if again:
        raise Refused(
            f"makes {', '.join(again)} once more", rule="a composition attends once, and each loss is made once"
        )
    losses |= set(step.losses)


def _require_gradients(composition: Composition) -> None:
    """Whatever is moved gets a gradient that can go back; raises LayoutError."""
    problems = []
    for i, step in enumerate(composition.steps):
        after = composition.steps[i + 1 :]
        for tensor in getattr(step, "tensors", ()):
            given = any(tensor in (s.consumes if s.differentiates is None else s.differentiates) for s in after)
            if tensor != "out" and row(tensor).has_gradient and not given:
                what = f"moves {tensor}, and no later step gives a gradient of it"
                rule = ("rule", "a tensor is moved for a step that computes with it")
                problems.append(Problem(key=f"cp.steps.{step.name}.tensors", what=what, details=(rule,)))
    if problems:
        raise LayoutError(problems, source(composition))


def _require_inputs(composition: Composition, inputs: Sequence[str], shape: Shape) -> None:
    """The call has the tensors that the steps begin with, and head groups are equal; raises LayoutError."""
    problems = []
    of_one_head = shared(inputs)
    begins: dict[str, str] = {}
    for tensor in inputs:
        for field in row(tensor).needs:
            begins.setdefault(field, tensor)
    for field, tensor in begins.items():
        if getattr(shape, field) < 1:
            what = f"is {getattr(shape, field)}, and {_maker(composition, tensor)} begins with {tensor}"
            problems.append(Problem(key=f"shape.{field}", what=what, details=(("rule", row(tensor).rule),)))
    attends = [s for s in composition.steps if "out" in s.makes]
    dense = [s for s in attends if "topk" not in s.uses]
    if shape.topk > 0 and dense:
        what = f"attends to every visible key, and the model selects {shape.topk} of them for each query"
        rule = ("rule", "a model with an indexer is trained with the attention that it selects for")
        tries = ("a composition with lightning_indexer and sparse_attention", "a model without an indexer")
        problems.append(Problem(key=f"cp.steps.{dense[0].name}", what=what, details=(rule,), tries=tries))
    n = composition.head_groups
    if n > 1 and (shape.heads % n or shape.kv_heads % n or of_one_head):
        common = gcd(shape.heads, shape.kv_heads)
        legal = [i for i in range(1, common + 1) if common % i == 0 and not (of_one_head and i > 1)]
        why = (
            f"{' and '.join(of_one_head)} have one head each"
            if of_one_head
            else f"{shape.heads} heads | {shape.kv_heads} kv heads"
        )
        problems.append(
            Problem(
                key="cp.head_groups",
                what=f"{n} does not divide the heads: {why}",
                details=(
                    ("allowed", ", ".join(map(str, legal))),
                    ("rule", "head groups are equal, and each has kv heads of its own"),
                ),
                tries=(f"cp.head_groups={max(i for i in legal if i <= n)}",),
            )
        )
    if problems:
        raise LayoutError(problems, source(composition))


def _maker(composition: Composition, tensor: str) -> str:
    return next(f"cp.steps.{s.name}" for s in composition.steps if tensor in (*s.consumes, *s.uses))


def one_copy(out: Layout, shape: Shape) -> None:
    """Every (query head, query) is attended for on one rank: with more copies the adjoint would be wrong.

    Raises:
        Refused: with the numbers.
    """
    copies = sum(s.count * h.count for s, h in zip(out.sequence, out.heads, strict=True))
    rule = "each query of each head is attended for on one rank"
    rows = shape.sequence * shape.heads
    if copies != rows:
        how = f"{copies // rows} times" if copies % rows == 0 else f"{copies} times in all"
        what = f"the {rows} (head, query) rows would be computed {how}, on several ranks at once"
        raise Refused(what, rule=rule, kind=CoverageError)
    by_heads: dict[IndexSet, list[IndexSet]] = {}
    for positions, heads in zip(out.sequence, out.heads, strict=True):
        if heads.count:
            by_heads.setdefault(heads, []).append(positions)
    for heads, sets in by_heads.items():
        try:
            union(sets, shape.sequence)
        except ValueError as error:
            raise Refused(
                f"heads {heads}: queries are computed twice: {error}", rule=rule, kind=CoverageError
            ) from None
