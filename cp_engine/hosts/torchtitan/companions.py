"""Companions of a batch's tokens: which of them a rank takes its part of, and which it takes whole, as `data` declares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cp_engine.errors import CallError, Problem

RULE = ("rule", "what belongs to tokens is cut with them, along dim 1, and anything else is whole on every rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What `data.cut` and `data.whole` name.

    Args:
        cut: [B, S, ...], cut as the tokens are. `positions` always are.
        whole: left as they are.
    """

    cut: Sequence[str] = ()
    whole: Sequence[str] = ()


def declared(data: Mapping[str, object]) -> Declared:
    """The companions that the `data` group names."""
    cut, whole = data.get("cut", []), data.get("whole", [])
    assert isinstance(cut, Sequence) and isinstance(whole, Sequence)
    return Declared(cut=[str(n) for n in cut], whole=[str(n) for n in whole])


def to_cut(companions: Mapping[str, object], sequence: int, known: Declared) -> list[str]:
    """The names of the companions that are cut with the tokens.

    Args:
        companions: of one batch.
        sequence: length of its tokens.
        known: what is declared.

    Returns:
        Names, in the order of the batch.

    Raises:
        CallError: one that has the sequence length and is not declared; one that is to be cut and has another length along dim 1.
    """
    problems, names = [], []
    for name, x in companions.items():
        shape = list(x.shape) if isinstance(x, Tensor) else []
        if name in known.cut:
            names.append(name)
            if len(shape) < 2 or shape[1] != sequence:
                what = (
                    f"is {shape or type(x).__name__}, and data.cut names it: it would have to be [B, {sequence}, ...]"
                )
                problems.append(
                    Problem(key=f"batch.{name}", what=what, details=(RULE,), tries=(f"'data.whole=[{name}]'",))
                )
        elif name not in known.whole and sequence in shape:
            what = f"is {shape}, which has the sequence length {sequence}, and nothing says whether it belongs to the tokens"
            lines = [_line("whole", known.whole, name)]
            if len(shape) > 1 and shape[1] == sequence:
                lines.insert(0, _line("cut", known.cut, name))
            problems.append(Problem(key=f"batch.{name}", what=what, details=(RULE,), tries=tuple(lines)))
    if problems:
        raise CallError(problems)
    return names


def _line(key: str, names: Sequence[str], name: str) -> str:
    return f"'data.{key}=[{','.join([*names, name])}]'"
