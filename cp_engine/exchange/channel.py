"""Channel: how flat buffers move inside one group of ranks. Every send returns at once and is waited for where it is needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """Something in flight."""

    def wait(self) -> object:
        """Returns when it has arrived (or, on an accelerator, when the stream will see that it has)."""


@dataclass(slots=True)
class Pending:
    """A buffer that is on its way; made for every message, so it is not frozen, which takes three times as long.

    Args:
        buffer: where it arrives.
        works: what has to end before it is there.
        kept: what is being read until then.
        explain: raises why it did not arrive, where that is known.
    """

    buffer: Tensor
    works: Sequence[Work] = ()
    kept: Tensor | None = None
    explain: Callable[[RuntimeError], None] | None = None

    def wait(self) -> Tensor:
        """The buffer, complete."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            if self.explain is not None:
                self.explain(error)
            raise
        return self.buffer


class Channel(Protocol):
    """Moves flat buffers inside one group of plan ranks; the calling process is one of them.

    Members are numbered by their place in the group, ascending.
    """

    members: int

    def all_to_all(self, send: Tensor, sent: list[int], received: list[int]) -> Pending:
        """Sends `sent[i]` elements to member i; `received[i]` come in from member i, member by member."""

    def all_to_all_even(self, send: Tensor) -> Pending:
        """Sends each member an equal part, itself included; what comes in lies member by member."""

    def all_gather(self, send: Tensor) -> Pending:
        """Everybody's buffer, member by member."""

    def shift(self, send: Tensor, to: int, source: int, received: int, tag: int) -> Pending:
        """Sends a buffer to one member and receives `received` elements from another.

        Args:
            send: flat.
            to: the member that gets it.
            source: the member whose buffer comes in.
            received: elements that come in.
            tag: tells messages between the same two members apart; below 16.
        """
