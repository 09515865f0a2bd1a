"""One rank's process: its log, the error it leaves for the parent, and how the parent finds which rank failed first."""

import atexit
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from cp_engine.endings import Ending
from cp_engine.progress import last_lines, log_path

Config = dict[str, object]

NAMES = ("SpawnProcess", "ForkServerProcess")
"""How Python calls the processes that it starts."""
SET_BY_AGENT = re.compile(
    "((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCH_NCCL_ASYNC_ERROR_HANDLING|TORCHELASTIC_.*)$"
)
"""What torch's agent puts into the environment of a rank."""
LOG_LINES = 15
"""How many lines of a failed rank's log the error shows."""
SECONDS_SEEN_LATE = 1.0
"""A killed rank counts as earlier by this much: its peers may write their error before its death is seen."""


class Deaths:
    """Which ranks were killed, and when, seen from outside; a context manager around the agent.

    A killed rank writes no error, and the agent may first see a peer that lost its connection.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[BaseProcess] = []
        self._seen: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deaths", daemon=True)

    def __enter__(self) -> "Deaths":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def again(self) -> None:
        """All ranks are started anew: the processes that are known have ended."""
        self._processes, self._seen = [], {}

    def endings(self) -> list[Ending]:
        """The ranks that a signal killed, other than the agent's own."""
        self._look()
        killed = []
        for rank, seconds in self._seen.items():
            code = self._processes[rank].exitcode or 0
            if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
                hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
                message = f"killed by {signal.Signals(-code).name}{hint}"
                killed.append(Ending(rank=rank, seconds=seconds - SECONDS_SEEN_LATE, message=message))
        return killed

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._look()

    def _look(self) -> None:
        if len(self._processes) < self.ranks:
            children = [child for child in multiprocessing.active_children() if child.name.startswith(NAMES)]
            self._processes = sorted(children, key=_number)
            return
        for rank, process in enumerate(self._processes):
            # not its exit code: of a forked rank the first reader takes it, and that has to be the agent
            if rank not in self._seen and wait([process.sentinel], 0):
                self._seen[rank] = time.time()


def _number(child: BaseProcess) -> int:
    """In which order children were started: of `SpawnProcess-2` or `ForkServerProcess-1:2` the 2."""
    return int(child.name.rpartition("-")[2].rpartition(":")[2])


def section(config: Mapping[str, object], name: str) -> Config:
    """A copy of one mapping of the configuration."""
    node = config[name]
    assert isinstance(node, Mapping)
    return {str(key): value for key, value in node.items()}


def run_rank(function: Callable[[Config], None], config: Config, environment: Mapping[str, str]) -> None:
    """One rank: its lines go to its own log, its error into a file that the parent reads.

    Args:
        function: what the rank does.
        config: its argument, with `launch.output_dir`.
        environment: of the process that started the ranks.
    """
    _take_environment(environment)
    _end_with_parent()
    output_dir, rank = Path(str(section(config, "launch")["output_dir"])), int(os.environ["RANK"])
    redirect(log_path(output_dir, rank))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what torch sends when the parent dies; must not wait for Python
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        function(config)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        _write_error(output_dir, rank, error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # destructors of a broken process group can wait for the other ranks, or abort
    # gloo's threads can outlive the process group, and abort a process that has done its work while it ends
    atexit.register(_leave)


def _take_environment(environment: Mapping[str, str]) -> None:
    """The starting process's environment: a forked rank comes with that of the server that it was forked from."""
    for name in set(os.environ) - set(environment):
        if not SET_BY_AGENT.match(name):
            del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if not SET_BY_AGENT.match(name)})
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():  # read when torch was loaded, which may have been there
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _end_with_parent() -> None:
    """Ends this rank when the process that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch(sentinel: int) -> None:
            wait([sentinel])
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, args=(parent.sentinel,), name="parent", daemon=True).start()


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train(config: Config) -> None:
    """The training job of this rank."""
    from cp_engine.train import run  # here: it imports torchtitan, which takes seconds

    run(config)


def redirect(path: Path) -> None:
    """Sends this process's standard output and error to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def error_path(output_dir: Path, rank: int) -> Path:
    """Where a rank writes the error that ended it."""
    return output_dir / "ranks" / f"rank{rank}.error.json"


def _write_error(output_dir: Path, rank: int, error: BaseException) -> None:
    text, kind = str(error), type(error).__name__
    message = text if text.startswith(kind) else f"{kind}: {text}"
    error_path(output_dir, rank).write_text(json.dumps({"message": message, "seconds": time.time()}))


def failure_text(output_dir: Path, ending: Ending, ranks: int) -> str:
    """The error of a rank with the end of its log.

    Args:
        output_dir: the job's folder.
        ending: of the rank that failed first.
        ranks: number of ranks.
    """
    log = log_path(output_dir, ending.rank)
    lines = [f"RankFailure: rank {ending.rank} of {ranks} ended the run"]
    lines += [f"  {line}" for line in ending.message.splitlines()]
    return "\n".join([*lines, f"  log  {log}", *(f"    | {line}" for line in last_lines(log, LOG_LINES))])


def written(output_dir: Path, ranks: int) -> list[Ending]:
    """The errors that ranks wrote down before they ended."""
    endings = []
    for rank in range(ranks):
        path = error_path(output_dir, rank)
        if path.exists():
            row = json.loads(path.read_text())
            endings.append(Ending(rank=rank, seconds=row["seconds"], message=row["message"]))
    return endings
