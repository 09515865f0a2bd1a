"""What the operators refuse, as a table of rules over the arguments of a call; stricter than the vendor's shape functions.

A rule is `{"rule": why, "require": [fact, relation, value]}`, with conditions of the same form in `when`. Facts are the arguments
themselves, PARTS of tensors such as `name.dtype`, and the sizes that follow from the layout.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from cp_engine.errors import KernelError, Problem

Facts = Mapping[str, object]
PARTS = ("dtype", "size", "dims", "is_contiguous", "has_whole_rows", "last", "rows")
"""What a rule may say of a tensor."""


def relations() -> Mapping[str, Callable[..., bool]]:
    """The words of the table."""
    return {
        "is": lambda a, b: a == b,
        "is not": lambda a, b: a != b,
        "is one of": lambda a, b: a in b,
        "at most": lambda a, b: a <= b,
        "at least": lambda a, b: a >= b,
        "more than": lambda a, b: a > b,
        "divides": lambda a, b: a > 0 and b % a == 0,
        "is a multiple of": lambda a, b: a % b == 0,
        "is a power of two": lambda a: a > 0 and a & (a - 1) == 0,
        "is set": lambda a: a is not None,
        "is absent": lambda a: a is None,
    }


def rule_table() -> dict[str, list[dict[str, object]]]:
    """Operator -> its rules."""
    table: dict[str, list[dict[str, object]]] = json.loads((Path(__file__).parent / "rules.json").read_text())
    return table


def require(
    operator: str, arguments: Mapping[str, object], sizes: Facts, rules: Sequence[Mapping[str, object]]
) -> None:
    """Refuses a call that the operator would reject or misread.

    Args:
        operator: its name.
        arguments: all of them, by name.
        sizes: what follows from them.
        rules: of the operator.

    Raises:
        KernelError: with every rule that is broken.
    """
    facts = {**arguments, **sizes, **dict(_of_tensors(arguments))}
    problems = []
    for rule in rules:
        conditions = rule.get("when", [])
        assert isinstance(conditions, list)
        if all(_holds(facts, condition) for condition in conditions) and not _holds(facts, rule["require"]):
            problems.append(broken(operator, rule, facts))
    if problems:
        raise KernelError(problems)


def broken(operator: str, rule: Mapping[str, object], facts: Facts) -> Problem:
    """The problem of a rule that does not hold."""
    wanted = rule["require"]
    assert isinstance(wanted, list)
    value = facts[wanted[0]]
    shown = "a tensor" if isinstance(value, Tensor) else repr(value)
    compared = [f"{facts[w['fact']]!r} ({w['fact']})" if isinstance(w, Mapping) else repr(w) for w in wanted[2:]]
    what = f"is {shown}, and must {' '.join([infinitive(wanted[1]), *compared])}"
    return Problem(key=f"npu.{operator}.{wanted[0]}", what=what, details=(("rule", str(rule["rule"])),))


def infinitive(relation: str) -> str:
    """A word of the table behind `must`."""
    return {"divides": "divide", "is not": "not be"}.get(
        relation, f"be {relation.removeprefix('is')}".replace("  ", " ").strip()
    )


def _holds(facts: Facts, condition: object) -> bool:
    assert isinstance(condition, list)
    name, relation, *wanted = condition
    if not {name, *(w["fact"] for w in wanted if isinstance(w, Mapping))} <= set(facts):
        return True  # sizes of a tensor whose dims another rule refuses
    values = [facts[w["fact"]] if isinstance(w, Mapping) else w for w in wanted]
    return relations()[relation](facts[name], *values)


def _of_tensors(arguments: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            yield from ((f"{name}.{part}", None) for part in PARTS)
            continue
        yield f"{name}.dtype", str(x.dtype).removeprefix("torch.")
        yield f"{name}.size", list(x.shape)
        yield f"{name}.dims", x.ndim
        yield f"{name}.is_contiguous", x.is_contiguous()
        yield f"{name}.has_whole_rows", x.ndim == 0 or x.shape[-1] < 2 or x.stride(-1) == 1
        yield f"{name}.last", list(x.shape[-2:])
        yield f"{name}.rows", list(x.shape[:-1])
