"""How a run can end other than well."""

import signal
from dataclasses import dataclass


class RankFailure(Exception):
    """A rank ended the run; the text names it and shows its error."""


class Interrupted(KeyboardInterrupt):  # not an Exception: Hydra would take it for a failed job and start the next
    """A signal ended the run.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one rank ended badly.

    Args:
        rank: global rank.
        seconds: wall clock, to find the first: the others then lose their peer and fail too.
        message: kind and text of its error, or how its process ended.
        is_consequence: an error that a rank has when another one is gone.
    """

    rank: int
    seconds: float
    message: str
    is_consequence: bool = False

    def order(self) -> tuple[bool, float]:
        """What comes first in this order ended the run."""
        return self.is_consequence, self.seconds
