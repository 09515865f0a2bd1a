"""Channels of real process groups: c10d called directly, and what leaves this rank counted where it leaves."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from cp_engine.exchange.channel import Pending
from cp_engine.exchange.watch import Watch


@dataclass(kw_only=True)
class Traffic:
    """What left this rank so far, its own part excluded, and the collectives that it took part in."""

    bytes_sent: int = 0
    collectives: int = 0


AGREED = 8
"""Numbers that a rank names at most where ranks agree."""


class GroupChannel:
    """One process group. It is called itself: torch.distributed's wrapper logs and re-checks for as long as a small call takes."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, watch: Watch | None = None) -> None:
        self.group, self.traffic = group, traffic
        self._explain = None if watch is None else watch.explain
        self.members, self.me = dist.get_world_size(group), dist.get_rank(group)
        self._world = dist.get_process_group_ranks(group)
        self._is_gloo = dist.get_backend(group) == "gloo"

    def all_to_all(self, send: Tensor, sent: list[int], received: list[int]) -> Pending:
        buffer = send.new_empty(sum(received))
        work = self.group.alltoall_base(buffer, send, received, sent)
        self.traffic.collectives += 1
        self.traffic.bytes_sent += (send.numel() - sent[self.me]) * send.element_size()
        return Pending(buffer, (work,), send, self._explain)

    def all_to_all_even(self, send: Tensor) -> Pending:
        buffer, splits = torch.empty_like(send), [send.numel() // self.members] * self.members
        # the splits are written out: a peer whose pieces lie differently in memory makes the same call with its own
        work = self.group.alltoall_base(buffer, send, splits, splits)
        self.traffic.collectives += 1
        self.traffic.bytes_sent += send.nbytes // self.members * (self.members - 1)
        return Pending(buffer, (work,), send, self._explain)

    def all_gather(self, send: Tensor) -> Pending:
        buffer = send.new_empty(self.members * send.numel())
        work = self.group._allgather_base(buffer, send)
        self.traffic.collectives += 1
        self.traffic.bytes_sent += (self.members - 1) * send.nbytes
        return Pending(buffer, (work,), send, self._explain)

    def shift(self, send: Tensor, to: int, source: int, received: int, tag: int) -> Pending:
        buffer = send.new_empty(received)
        if self._is_gloo:
            works = [self.group.send([send], to, tag)] if send.numel() else []
            works += [self.group.recv([buffer], source, tag)] if received else []
        else:  # both at once, or two ranks that first send wait for each other; matched by their order
            ops = [dist.P2POp(dist.isend, send, self._world[to], self.group, tag)] if send.numel() else []
            ops += [dist.P2POp(dist.irecv, buffer, self._world[source], self.group, tag)] if received else []
            works = dist.batch_isend_irecv(ops) if ops else []
        self.traffic.collectives += 1
        self.traffic.bytes_sent += send.nbytes
        return Pending(buffer, works, send, self._explain)


@dataclass(kw_only=True)
class GroupCommunicator:
    """The process groups of a plan on one rank.

    Args:
        ranks: world rank of each plan rank.
        groups: plan ranks of a group, ascending -> its process group.
        watch: tells apart ranks that make different calls; on gloo, where an exchange can be ended.
        traffic: counts what all channels send.
    """

    ranks: tuple[int, ...]
    groups: Mapping[tuple[int, ...], dist.ProcessGroup]
    watch: Watch | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def channel(self, group: tuple[int, ...]) -> GroupChannel:
        """The way to a group of plan ranks, ascending, of which this process is one."""
        return GroupChannel(self.groups[group], self.traffic, self.watch)

    def agree(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Which numbers every rank of the plan names; ascending, of the first few of each. Every rank asks, whatever it names.

        One exchange of the same size on every rank, which no plan counts.
        """
        named = [*numbers[:AGREED], *[-1] * (AGREED - len(numbers))]
        mine = torch.tensor(named, dtype=torch.int64, device=device)
        found = mine.new_empty(len(self.ranks) * AGREED)
        with self.explained():
            dist.all_gather_into_tensor(found, mine, group=self.groups[tuple(range(len(self.ranks)))])
        of_ranks = [set(row) for row in found.view(-1, AGREED).tolist()]
        return sorted(set.intersection(*of_ranks) - {-1})

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around collectives alone: one that fails says what the ranks did differently, where that is known."""
        try:
            yield
        except RuntimeError as error:
            if self.watch is not None:
                self.watch.explain(error)
            raise
