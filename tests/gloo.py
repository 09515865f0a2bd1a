"""Real gloo ranks for tests: one spawn per module, then any number of functions on it, and a new spawn after one that failed."""

import faulthandler
import multiprocessing.connection as connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cp_engine.job.launch import start as elastic

HANG_SECONDS = 900
"""What no function takes, on the busiest machine (one took 300 with 15 processes for each core). Only what hangs is waited for."""
GRACE_SECONDS = 3
"""After one rank failed the others most likely wait for it; whatever else they have to say takes no longer."""
WAITING = ("torch/distributed/", "cp_engine/exchange/channel.py")
"""Files of the innermost calls of a rank that waits for another one; whatever it says there, the other one failed first."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Args:
        rank: whose failure it is.
        when: by the clock that all processes of a machine share.
        how: in a few words.
        text: its traceback or stack.
        innermost: the files of the last calls that it was in.
    """

    rank: int
    when: float
    how: str
    text: str = ""
    innermost: str = ""

    @property
    def is_consequence(self) -> bool:
        return any(file in self.innermost for file in WAITING)


class World:
    """Ranks that wait for functions.

    Args:
        ranks: how many.
        hang: seconds after which a function that is still running is said to hang.
        grace: seconds that the others have after one rank failed.
    """

    def __init__(self, ranks: int, hang: float = HANG_SECONDS, grace: float = GRACE_SECONDS) -> None:
        self.ranks, self.hang, self.grace = ranks, hang, grace
        self._start()

    def run(self, function: Callable[..., object], *arguments: object) -> list[object]:
        """Calls an importable function on every rank, and returns what each returned.

        What a rank raises, an end of its process or a hang is an error that tells first of the rank that failed first; the next
        function then finds new processes, for a rank that failed may have left its part of a collective undone.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            with suppress(BrokenPipeError):  # it ended since the last function: seen below
                pipe.send((function, arguments))
        values, failures = self._ends(self.hang)
        if failures:
            self._end()
            first, *others = sorted(failures, key=lambda f: (f.is_consequence, f.when))
            said = [f"rank {first.rank} of {self.ranks} {first.how}\n{first.text}"]
            raise AssertionError("\n".join([*said, *(f"then rank {f.rank} {f.how}\n{f.text}" for f in others)]))
        return [values[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
        self._end()

    def _start(self) -> None:
        context = mp.get_context("forkserver")  # torch is imported once for all worlds of a test process
        context.set_forkserver_preload(list(elastic.PRELOADED))
        # a port that nobody else has
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.stacks, self.processes = [], [], []
        for rank in range(self.ranks):
            here, there = context.Pipe()
            stack, told = context.Pipe(duplex=False)
            given = (rank, self.ranks, self.store.port, self.hang, there, told)
            process = context.Process(target=_rank, args=given, daemon=True)
            process.start()
            there.close()  # so that a process that ends is seen as the end of what it sends
            told.close()
            self.pipes.append(here)
            self.stacks.append(stack)
            self.processes.append(process)
        _, failures = self._ends(HANG_SECONDS)  # importing torch takes a minute on a busy machine
        if failures:
            self._end()
            raise AssertionError(f"ranks do not start\n{failures}")

    def _ends(self, seconds: float) -> tuple[dict[int, object], list[Failure]]:
        """What ranks returned, and how the others failed; a rank that is still running when time is up ends."""
        values, failures = dict[int, object](), list[Failure]()
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        end = time.monotonic() + seconds
        try:
            while waiting and (left := end - time.monotonic()) > 0:
                for pipe in connection.wait(list(waiting), left):
                    rank = waiting.pop(pipe)
                    try:
                        found = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        found = Failure(rank, time.monotonic(), f"ended with exit code {self._ended(rank)}")
                    if isinstance(found, Failure):
                        failures.append(found)
                        end = min(end, time.monotonic() + self.grace)
                    else:
                        (values[rank],) = found
        except BaseException:  # interrupted, or a value that cannot be read here: what is on its way is nobody's
            self._end()
            raise
        return values, [*failures, *map(self._stopped, waiting.values())]

    def _stopped(self, rank: int) -> Failure:
        """Ends a rank, which says where it is, innermost call first."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        self._ended(rank)
        stack = "".join(iter(lambda: os.read(self.stacks[rank].fileno(), 2**16).decode(), ""))
        return Failure(rank, time.monotonic(), "was still running, here", stack, "".join(stack.splitlines()[1:4]))

    def _ended(self, rank: int) -> int | None:
        process = self.processes[rank]
        process.join(60)
        process.kill()
        process.join()
        return process.exitcode

    def _end(self) -> None:
        """Leaves no process."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in (*self.pipes, *self.stacks):
            pipe.close()
        self.pipes, self.stacks, self.processes, self.store = [], [], [], None


@contextmanager
def world(ranks: int, **seconds: float) -> Iterator[World]:
    """A world of gloo ranks on loopback; see World."""
    made = World(ranks, **seconds)
    try:
        yield made
    finally:
        made.close()


def _rank(
    rank: int, ranks: int, port: int, hang: float, pipe: connection.Connection, told: connection.Connection
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    faulthandler.register(signal.SIGUSR1, told.fileno(), all_threads=False, chain=True)  # says where, and ends
    torch.set_num_threads(1)
    # Longer than any function may take: a rank that waits for one that hangs does not fail before that one is found.
    store, timeout = dist.TCPStore("127.0.0.1", port, is_master=False), timedelta(seconds=hang + 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    pipe.send((None,))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        torch.manual_seed(0)
        try:
            pipe.send((function(*arguments),))
        except BaseException as error:  # what pytest raises where nothing was raised is no Exception
            innermost = "".join(frame.filename for frame in traceback.extract_tb(error.__traceback__)[-3:])
            pipe.send(Failure(rank, time.monotonic(), "failed", traceback.format_exc(), innermost))
    dist.destroy_process_group()
