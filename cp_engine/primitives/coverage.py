"""Coverage: whether the keys that a rank holds are all that its queries can see, and what to try where they are not."""

from collections.abc import Sequence

from cp_engine.algebra.index_set import whole
from cp_engine.algebra.layout import Layout, cut_by, joined
from cp_engine.errors import CoverageError
from cp_engine.plan.state import Refused, State


def require_same_layout(state: State, tensors: Sequence[str], rule: str) -> None:
    """Several tensors are in one layout; raises Refused with the first rank where they are not.

    Args:
        state: before the step.
        tensors: that have to be on the same rank, token by token and head by head.
        rule: why, in one sentence.
    """
    first, *others = (state.layout(t) for t in tensors)
    for rank in range(state.mesh.degree):
        if any((x.sequence[rank], x.heads[rank]) != (first.sequence[rank], first.heads[rank]) for x in others):
            raise Refused(
                f"{' and '.join(tensors)} are in different layouts at {state.mesh.coordinate(rank)}",
                rule=rule,
                kind=CoverageError,
                rank=rank,
                shows=tensors,
            )


def require_coverage(state: State, q: Layout, k: Layout, keys: Sequence[str], rule: str) -> None:
    """Every key that a rank's queries can see is there; keys are held once because sets hold positions once.

    Args:
        state: before the step.
        q: the layout of the queries.
        k: that of the keys.
        keys: the tensors that keys are made of.
        rule: why they have to be there, in one sentence.

    Raises:
        Refused: with how many pairs are missing, and where.
    """
    everything = whole(state.shape.sequence)
    checked: dict[object, tuple[int, int]] = {}
    missing: list[tuple[int, int, int]] = []
    for rank, (queries, held, heads) in enumerate(zip(q.sequence, k.sequence, q.heads, strict=True)):
        if (queries, held) not in checked:
            checked[queries, held] = state.mask.count(queries, held), state.mask.count(queries, everything)
        there, wanted = checked[queries, held]
        if there != wanted and heads.count:
            missing.append((rank, there * heads.count, wanted * heads.count))
    if missing:
        raise _uncovered(state, q, k, missing, keys, rule)


def _uncovered(
    state: State, q: Layout, k: Layout, missing: list[tuple[int, int, int]], keys: Sequence[str], rule: str
) -> Refused:
    total = state.mask.count(everything := whole(state.shape.sequence), everything) * state.shape.heads
    lost = sum(wanted - there for _, there, wanted in missing)
    details = []
    for i, (rank, _, _) in enumerate(missing[:2]):
        seen = state.mask.needed(q.sequence[rank], everything)
        rest = len(missing) - 2
        more = f"   (and {rest} rank{'s' * (rest != 1)} more)" if i == 1 and rest > 0 else ""
        what = f"queries {q.sequence[rank]} see keys {seen}, and {k.sequence[rank]} are held{more}"
        details.append(("missing" if i == 0 else "", f"at {state.mesh.coordinate(rank)}: {what}"))
    return Refused(
        f"would not see {_percent(lost, total)} % of the visible (query, key) pairs: {lost} of {total}",
        rule=rule,
        details=details,
        tries=_completing(state, k, keys),
        kind=CoverageError,
        shows=("q", keys[0], "out"),
    )


def _percent(part: int, total: int) -> str:
    """A share that is neither nothing nor everything, and does not read so."""
    percent = round(100 * part / total)
    return "less than 1" if percent == 0 else "more than 99" if percent == 100 and part != total else str(percent)


def _completing(state: State, met: Layout, keys: Sequence[str]) -> tuple[str, ...]:
    """Lines that would bring the missing keys: a gather that left some out takes all, or one more gather."""
    left_out = [p for p in state.history.get(keys[0], ()) if p.whole]
    if left_out:
        return (f"cp.steps.{left_out[-1].step}.{left_out[-1].whole}",)
    axes = cut_by(state.mesh, met.sequence)
    if not axes or any(len({met.heads[r] for r in group}) > 1 for group in state.mesh.groups(axes)):
        return ()
    try:
        joined(state.mesh, met.sequence, axes)
    except ValueError:
        return ()
    gather = f"+collective@cp.steps.{{free}}=all_gather 'cp.steps.{{free}}.axes=[{','.join(axes)}]'"
    return (f"{gather} 'cp.steps.{{free}}.tensors=[{','.join(keys)}]' 'cp.order=[{{with}}]'",)
