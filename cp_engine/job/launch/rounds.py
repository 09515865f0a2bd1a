"""The rounds of a run: torch elastic's rendezvous, with ranks by node number, a store for each round, and one count of restarts."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from cp_engine.job.launch.course import Course
from cp_engine.job.launch.rank import Config, run_rank

BACKEND = "cp_engine"
COUNT = "TORCHELASTIC_RESTART_COUNT"
"""torch's agent counts the failures that it saw itself, each agent other ones; ranks get the number of the round."""
NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
LOOK_SECONDS = 1.0
ROUND_SECONDS = 60
"""How long nodes that have joined a round may take to say so in its store."""


class Over(Exception):
    """The run has ended: another node ended it or is silent, or no restart is left."""


class Rounds(RendezvousHandler):
    """What torch's agent asks for a place in each round.

    The c10d rendezvous orders nodes by their addresses, keeps one store for all rounds, in which a rank may find the address of a peer
    that has ended, and counts restarts per node. Here rank 0 stays on node 0 with its files, and ranks agree.

    Args:
        course: of the run; its attempt and the environment of its ranks are kept up to date.
        run_id: the name of the run.
    """

    def __init__(self, course: Course, run_id: str) -> None:
        self._course, self._is_started, self._looked = course, False, 0.0
        node, seconds = course.node, max(1, int(course.seconds))
        if course.meeting is None:
            self._base: dist.Store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        else:
            self._base = course.meeting.store
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"{node.host}:{node.port}",
            run_id=run_id,
            min_nodes=node.count,
            max_nodes=node.count,
            # c10d's name of a node; nobody connects to it
            local_addr=f"127.0.{node.index // 250}.{node.index % 250 + 1}",
            join_timeout=seconds,
        )
        self._inner = create_handler(self._base, C10dRendezvousBackend(self._base, run_id), parameters)
        self._server: dist.TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for all nodes, then agrees with them on the number of the round and on its store.

        Raises:
            Over: no restart is left.
        """
        course = self._course
        if self._is_started:
            course.failed()
            course.attempt += 1
            self._refuse_one_too_many()
        self._is_started = True
        info = self._next()
        store, node = info.store, course.node
        store.set_timeout(timedelta(seconds=ROUND_SECONDS))
        if node.index == 0:
            self._server = dist.TCPStore(node.host, 0, is_master=True, wait_for_workers=False)
            store.set("cp_engine/port", str(self._server.port))
        store.set(f"cp_engine/{node.index}", json.dumps(course.attempt))
        course.attempt = max(json.loads(store.get(f"cp_engine/{k}")) for k in range(node.count))
        self._refuse_one_too_many()
        course.environment[COUNT] = str(course.attempt)
        course.begins()
        where = RendezvousStoreInfo(master_addr=node.host, master_port=int(store.get("cp_engine/port")))
        return RendezvousInfo(store, node.index, node.count, where)

    def _next(self) -> RendezvousInfo:
        """A round of c10d's, without the store that it would keep for all rounds and not tell to a node that comes back."""
        before = os.environ.get(NO_STORE)
        os.environ[NO_STORE] = "1"
        try:
            return self._inner.next_rendezvous()
        finally:
            os.environ.pop(NO_STORE)
            if before is not None:
                os.environ[NO_STORE] = before

    def _refuse_one_too_many(self) -> None:
        if self._course.attempt > self._course.max_restarts:
            raise Over

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to the store of the round."""
        return True

    def num_nodes_waiting(self) -> int:
        """How many nodes want a new round; asked all the time while ranks run.

        Raises:
            Over: another node has ended the run, or says nothing any more.
        """
        meeting = self._course.meeting
        if meeting is not None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            if meeting.is_over() or meeting.silent(self._course.silent_seconds) is not None:
                raise Over
        return self._inner.num_nodes_waiting()

    def get_backend(self) -> str:
        """A name for events."""
        return BACKEND

    def is_closed(self) -> bool:
        """Whether no round will follow."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """No round will follow."""
        self._inner.set_closed()

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """The end."""
        return self._inner.shutdown()


def register() -> None:
    """Lets torch's launcher find `Rounds` by its name; once or more often."""
    rendezvous_handler_registry.register(BACKEND, _given)


def _given(parameters: RendezvousParameters) -> RendezvousHandler:
    handler = parameters.config["rounds"]
    assert isinstance(handler, RendezvousHandler)
    return handler


def run_rank_of_round(function: Callable[[Config], None], config: Config, environment: dict[str, str]) -> None:
    """One rank, which reads the number of the round where torch's ranks read it.

    Args:
        function: what the rank does.
        config: its argument, with `launch.output_dir`.
        environment: of the process that started the ranks.
    """
    os.environ[COUNT] = environment[COUNT]
    run_rank(function, config, environment)
