"""Facts: what a step says of itself on the page of `mode=explain`, as lines for a person and as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TRACED_RANKS = 64
"""Plans of more ranks are not traced: a ring has as many hops as ranks, each some milliseconds to trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line.

    Args:
        label: such as `kernel`, `operator`, `exchange`.
        text: behind it; the step's name comes before.
        data: keys and values of the step in `explain.format=json`.
        is_traffic: whether it is about what travels; such lines follow those of all steps.
    """

    label: str
    text: str
    data: Mapping[str, object] = field(default_factory=dict)
    is_traffic: bool = False


def span(counts: Sequence[int]) -> int | str:
    """One number where all ranks agree, else `least..most`."""
    return counts[0] if len(set(counts)) == 1 else f"{min(counts)}..{max(counts)}"


def in_units(count: int) -> str:
    """Bytes for people, in binary units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"
