"""Target: the ranks that live in this process, and how the others are reached."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cp_engine.exchange.channel import Channel


class Communicator(Protocol):
    """Reaches the other ranks of a plan."""

    def channel(self, group: tuple[int, ...]) -> Channel:
        """The way to a group of plan ranks, ascending, of which this process is one."""

    def agree(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Which numbers every rank of the plan names; ascending, of the first few of each. Every rank asks, whatever it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a plan runs.

    Args:
        ranks: the plan's ranks that live in this process; all of them without a communicator.
        device: device type, such as `cpu`.
        communicator: reaches the other ranks.
        heads: reaches the ranks that hold the other heads of the same queries, `Shape.head_ranks` in all; None where there are none.
    """

    ranks: tuple[int, ...]
    device: str
    communicator: Communicator | None
    heads: Communicator | None = None
