"""Masks that come with the calls: what of a plan would be wrong for another mask than the one that it was proved for."""

from cp_engine.errors import LayoutError, Problem
from cp_engine.plan.ir import Plan


def require_any_mask(plan: Plan) -> None:
    """A plan holds for every mask that a call may bring, where it was proved for the one that shows most.

    What follows from the mask must follow from it last: tokens are dealt before there is a call, and a gather that leaves out what
    nobody sees must not be followed by a step that brings those keys to other queries.

    Args:
        plan: proved for one document that fills the sequence.

    Raises:
        LayoutError: a layout or a step that another mask would make wrong.
    """
    composition, problems = plan.composition, []
    assert composition is not None
    layout = composition.layout
    if layout.looks_at_mask:
        what = f"{layout.kind} deals tokens by their work, and the mask comes with each call, after that"
        tries = ("layout@cp.layout=zigzag", "'mask.starts=[0,...]'")
        problems.append(Problem(key="cp.layout", what=what, tries=tries))
    taken_back = {s.takes_back for s in composition.steps if "out" in getattr(s, "tensors", ())}
    for step in composition.steps:
        if step.deals_by_mask and step.name not in taken_back:
            what = (
                "deals tokens by their work, and is not taken back; the mask that it follows from comes with each call"
            )
            rule = ("rule", "out returns to q's layout whatever mask a call brings")
            problems.append(Problem(key=f"cp.steps.{step.name}", what=what, details=(rule,)))
    attends = next(s for s in plan.steps if "out" in s.step.makes)
    queries = attends.layout_before("q").sequence
    met = {t.tensor: t.after for t in attends.transfers}
    for planned in plan.steps:
        step = planned.step
        if not step.looks_at_mask:
            continue
        others = [
            t
            for t in planned.transfers
            if t.after.sequence != met.get(t.tensor, attends.layout_before(t.tensor)).sequence
        ]
        if others or planned.layout_before("q").sequence != queries:
            what = "leaves out keys that a later step brings to other queries, and what they see comes with each call"
            rule = ("rule", "with a mask from each call, leaving keys out is the last step that moves tokens")
            key = f"cp.steps.{step.name}.only"
            problems.append(Problem(key=key, what=what, details=(rule,), tries=(f"{key}=all",)))
    if problems:
        raise LayoutError(problems, f"cp={composition.name}")
