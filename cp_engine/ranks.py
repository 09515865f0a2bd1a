"""One rank's process: its log, the error it leaves for the parent, and how the parent finds which rank failed first."""

import atexit
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from cp_engine.endings import Ending
from cp_engine.errors import RankError
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
RESERVED = 2**14
"""Bytes of the file in which a rank says how it ended, taken before it starts: there may be no space left when it has to."""
SECONDS_LEFT = 5.0
"""The other ranks have this long to end after one ended the run. Torch's agent gives them 30, and sees an exit code of 0 as a job done."""
FULL = 2**24
"""A disk with fewer bytes left is said to be full: that may be why a run ended, whatever its error says."""
LOST = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|Socket (closed|Timeout)|[Tt]imed out|timeout|remote process exited|nccl\w*Error"
)
"""In the error of a rank whose peer is gone."""


class Deaths:
    """Which ranks ended, in which order and how, seen from outside; a context manager around the agent.

    A killed rank writes no error, and the agent may first see a peer that lost its connection.

    Args:
        output_dir: the job's folder.
        ranks: number of ranks.

    Attributes:
        has_ended_run: that the agent was told to end the ranks, by SIGTERM to this process.
    """

    def __init__(self, output_dir: Path, ranks: int) -> None:
        self.output_dir, self.ranks = output_dir, ranks
        self._processes: list[BaseProcess] = []
        self._seen: dict[int, float] = {}
        self._before = 0
        self.has_ended_run = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deaths", daemon=True)

    def __enter__(self) -> "Deaths":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look(0.0)

    def begin(self) -> None:
        """Before ranks are started, for the first time or again: those of before are not counted."""
        with self._lock:
            for rank in range(self.ranks):
                end_path(self.output_dir, rank).write_text(" " * RESERVED)
            self._before = max([self._before, *map(_number, self._processes)])
            self._processes, self._seen = [], {}

    def first(self, flagged: Ending | None) -> Ending | None:
        """How the rank ended that ended the run.

        Args:
            flagged: what the agent saw first; None where all ended, for all that it knows, well.

        Returns:
            The first of those that did not end as a consequence; None if all ended well.
        """
        self._look(0.0)
        written = _written(self.output_dir, self.ranks)
        endings = [ending for ending in written.values() if ending.message]
        with self._lock:
            order = sorted(self._seen, key=self._seen.__getitem__)
            for rank in order:
                code = self._processes[rank].exitcode or 0
                # the agent ends the others by SIGTERM, then by SIGKILL, after it saw one end
                is_agents = code in (-signal.SIGTERM, -signal.SIGKILL) and rank != order[0]
                if rank not in written and not (is_agents and (flagged is None or flagged.rank != rank)):
                    seconds = self._seen[rank] - SECONDS_SEEN_LATE * (code != -signal.SIGABRT)
                    endings.append(Ending(rank=rank, seconds=seconds, message=_how(code)))
        if flagged is not None and flagged.rank not in (ending.rank for ending in endings):
            endings.append(flagged)
        return min(endings, key=lambda ending: (ending.is_consequence, ending.seconds), default=None)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look(0.05)
            if any(time.time() - seconds > SECONDS_LEFT for seconds in self._seen.values()):
                self._end_late()

    def _end_late(self) -> None:
        """Ends what is left of a run that a rank has ended."""
        written = _written(self.output_dir, self.ranks)
        late = time.time() - SECONDS_LEFT
        ended = [r for r, seconds in self._seen.items() if seconds < late and (r not in written or written[r].message)]
        if not ended:
            return
        for rank, process in enumerate(self._processes):
            if rank not in self._seen and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(
                        process.pid, signal.SIGKILL
                    )  # also of a rank that is stopped, and keeps a SIGTERM for later
        if not self.has_ended_run and any(self._processes[rank].exitcode == 0 for rank in ended):
            self.has_ended_run = True
            os.kill(os.getpid(), signal.SIGTERM)  # what the agent ends for

    def _look(self, seconds: float) -> None:
        with self._lock:
            if len(self._processes) < self.ranks:
                started = [c for c in multiprocessing.active_children() if c.name.startswith(NAMES)]
                self._processes = sorted((c for c in started if _number(c) > self._before), key=_number)
            whole = self._processes if len(self._processes) == self.ranks else []
            waiting = {process.sentinel: rank for rank, process in enumerate(whole) if rank not in self._seen}
        # not their exit codes: of a forked rank the first reader takes it, and that has to be the agent
        ended = wait(list(waiting), seconds) if waiting else []
        if not waiting:
            self._stop.wait(seconds)
        with self._lock:
            for sentinel in ended:
                rank = waiting[sentinel]  # type: ignore[index]  # of what was waited for
                if rank < len(self._processes) and self._processes[rank].sentinel == sentinel:
                    self._seen.setdefault(rank, time.time())


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}" + " before its job was done" * (code == 0)
    hint = {signal.SIGKILL: " (often: out of memory)", signal.SIGABRT: " (its log may say why)"}.get(
        signal.Signals(-code)
    )
    return f"killed by {signal.Signals(-code).name}{hint or ''}"


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
    except BaseException as error:  # a checkpoint's is no Exception
        _write_end(output_dir, rank, error)  # before the log, for which there may be no space
        with suppress(OSError):
            traceback.print_exc()
            _flush()
        os._exit(1)  # destructors of a broken process group can wait for the other ranks, or abort
    _write_end(output_dir, rank, None)
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


def leave(output_dir: Path, error: Exception) -> None:
    """Ends this rank by an error that a thread knows of: the main thread waits for another rank, or hangs.

    Args:
        output_dir: the job's folder.
        error: for this rank's log, and for the parent that started it.
    """
    if end_path(output_dir, rank := int(os.environ["RANK"])).exists():
        _write_end(output_dir, rank, error)
    with suppress(OSError):
        print(error, file=sys.stderr, flush=True)
    os._exit(1)


def _leave() -> None:
    with suppress(OSError):
        _flush()
    os._exit(0)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def train(config: Config, fail: Callable[[Exception], object] | None = None) -> None:
    """The training job of this rank.

    Args:
        config: the composed configuration.
        fail: ends this process from a thread; None is `leave`.
    """
    from cp_engine.train import run  # here: it imports torchtitan, which takes seconds

    run(config, fail)


def redirect(path: Path) -> None:
    """Sends this process's standard output and error to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def end_path(output_dir: Path, rank: int) -> Path:
    """Where a rank writes how it ended, while the ranks run."""
    return output_dir / "ranks" / f"rank{rank}.end.json"


def _write_end(output_dir: Path, rank: int, error: BaseException | None) -> None:
    message = ""
    if error is not None:
        text, kind = str(error), type(error).__name__
        message = (text if text.startswith(kind) else f"{kind}: {text}")[: RESERVED // 8]
    is_lost = isinstance(error, RuntimeError | ConnectionError) and LOST.search(message) is not None
    named = error.rank if isinstance(error, RankError) else rank
    row = {"rank": named, "message": message, "seconds": time.time(), "is_consequence": is_lost}
    with end_path(output_dir, rank).open("r+") as file:  # in place: no space is needed for it
        file.write(json.dumps(row).ljust(RESERVED)[:RESERVED])


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
    space = shutil.disk_usage(output_dir)
    if space.free < FULL:
        lines.append(f"  disk {space.free / 2**20:.1f} MiB left of {space.total / 2**20:,.0f}, in {output_dir}")
    return "\n".join([*lines, f"  log  {log}", *(f"    | {line}" for line in last_lines(log, LOG_LINES))])


def _written(output_dir: Path, ranks: int) -> dict[int, Ending]:
    """What ranks wrote down before they ended; no message of one that ended well."""
    rows = {
        rank: end_path(output_dir, rank).read_text() for rank in range(ranks) if end_path(output_dir, rank).exists()
    }
    return {rank: Ending(**json.loads(row)) for rank, row in rows.items() if row.strip()}
