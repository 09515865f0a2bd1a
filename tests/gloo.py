"""Real gloo ranks for tests: one spawn per module, then any number of functions on it."""

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cp_engine import elastic

TIMEOUT_SECONDS = 20


class World:
    """Ranks that wait for functions."""

    def __init__(self, ranks: int) -> None:
        context = mp.get_context("forkserver")  # torch is imported once for all worlds of a test process
        context.set_forkserver_preload(list(elastic.PRELOADED))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(rank, ranks, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:  # importing torch on a busy machine takes a minute: a slow start is no hang
            assert pipe.poll(180), "a rank does not start"
            pipe.recv()

    def run(self, function: Callable[..., object], *arguments: object, fails: bool = False) -> list[object]:
        """Calls an importable function on every rank, and returns what each returned; raises what any rank raised.

        With `fails`, the errors' texts are returned instead."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results = []
        for pipe in self.pipes:
            assert pipe.poll(3 * TIMEOUT_SECONDS), "a rank hangs"
            results.append(pipe.recv())
        errors = [text for is_error, text in results if is_error]
        if fails:
            assert len(errors) == len(results), f"{len(errors)} of {len(results)} ranks failed"
            return errors
        assert not errors, "\n".join(map(str, errors))
        return [value for _, value in results]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextmanager
def world(ranks: int) -> Iterator[World]:
    """A world of gloo ranks on loopback."""
    made = World(ranks)
    try:
        yield made
    finally:
        made.close()


def _rank(rank: int, ranks: int, port: int, pipe: "mp.connection.Connection") -> None:  # type: ignore[name-defined]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        function, arguments = job
        torch.manual_seed(0)
        try:
            pipe.send((False, function(*arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
    dist.destroy_process_group()
