"""How the ranks of a launcher ended: what each wrote about itself, and what is seen from outside of one that could not."""

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from cp_engine.errors import RankError
from cp_engine.job.launch.failures import Ending

NAMES = ("SpawnProcess", "ForkServerProcess")
"""How Python calls the processes that it starts."""
SECONDS_SEEN_LATE = 1.0
"""A killed rank counts as earlier by this much: its peers may write their error before its death is seen."""
RESERVED = 2**14
"""Bytes of the file in which a rank says how it ended, taken before it starts: there may be no space left when it has to."""
SECONDS_LEFT = 5.0
"""The other ranks have this long to end after one ended the run. Torch's agent gives them 30, and sees an exit code of 0 as a job done."""
LOST = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|Socket (closed|Timeout)|[Tt]imed out|timeout|remote process exited|nccl\w*Error"
)
"""In the error of a rank whose peer is gone."""


class Deaths:
    """Which ranks ended, in which order and how, seen from outside; a context manager around the agent.

    A killed rank writes no error, and the agent may first see a peer that lost its connection.

    Args:
        output_dir: the job's folder.
        own: the ranks that this process starts.

    Attributes:
        has_ended_run: that the agent was told to end the ranks, by SIGTERM to this process.
    """

    def __init__(self, output_dir: Path, own: range) -> None:
        self.output_dir, self.own = output_dir, own
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
            for rank in self.own:
                end_path(self.output_dir, rank).write_text(" " * RESERVED)
            self._before = max([self._before, *map(_number, self._processes)])
            self._processes, self._seen = [], {}

    def first(self, flagged: Sequence[Ending] = (), *, is_alone: bool = True) -> Ending | None:
        """How the rank ended that ended the run, as far as the ranks of this process tell.

        Args:
            flagged: what the agent saw first; none where all ended, for all that it knows, well.
            is_alone: no other node has ranks, for whose sake the agent could have ended all of these.

        Returns:
            The first of those that did not end as a consequence; None if all ended well.
        """
        self._look(0.0)
        written, named = self._written(), [ending.rank for ending in flagged]
        endings = [ending for ending in written.values() if ending.message]
        with self._lock:
            order = sorted(self._seen, key=self._seen.__getitem__)
            for rank in order:
                code = self._processes[rank - self.own.start].exitcode or 0
                # the agent ends the others by SIGTERM, then by SIGKILL, after it saw one end
                is_first = rank == order[0] and (is_alone or code != -signal.SIGTERM)
                is_agents = code in (-signal.SIGTERM, -signal.SIGKILL) and not is_first
                if rank not in written and not (is_agents and rank not in named):
                    seconds = self._seen[rank] - SECONDS_SEEN_LATE * (code != -signal.SIGABRT)
                    endings.append(Ending(rank=rank, seconds=seconds, message=_how(code)))
        told = [ending.rank for ending in endings]
        endings += [ending for ending in flagged if ending.rank not in told and ending.rank not in written]
        return min(endings, key=Ending.order, default=None)

    def are_done(self) -> bool:
        """Whether every rank said that it ended well."""
        written = self._written()
        return len(written) == len(self.own) and not any(ending.message for ending in written.values())

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look(0.05)
            if any(time.time() - seconds > SECONDS_LEFT for seconds in self._seen.values()):
                self._end_late()

    def _end_late(self) -> None:
        """Ends what is left of a run that a rank has ended."""
        written = self._written()
        late = time.time() - SECONDS_LEFT
        ended = [r for r, seconds in self._seen.items() if seconds < late and (r not in written or written[r].message)]
        if not ended:
            return
        for rank, process in zip(self.own, self._processes, strict=False):
            if rank not in self._seen and process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # also one that is stopped, and keeps a SIGTERM for later
        if not self.has_ended_run and any(self._processes[rank - self.own.start].exitcode == 0 for rank in ended):
            self.has_ended_run = True
            os.kill(os.getpid(), signal.SIGTERM)  # what the agent ends for

    def _look(self, seconds: float) -> None:
        with self._lock:
            if len(self._processes) < len(self.own):
                started = [c for c in multiprocessing.active_children() if c.name.startswith(NAMES)]
                self._processes = sorted((c for c in started if _number(c) > self._before), key=_number)
            whole = zip(self.own, self._processes, strict=True) if len(self._processes) == len(self.own) else ()
            waiting = {process.sentinel: rank for rank, process in whole if rank not in self._seen}
        # not their exit codes: of a forked rank the first reader takes it, and that has to be the agent
        ended = wait(list(waiting), seconds) if waiting else []
        if not waiting:
            self._stop.wait(seconds)
        with self._lock:
            for sentinel in ended:
                rank = waiting[sentinel]  # type: ignore[index]  # of what was waited for
                known = self._processes[rank - self.own.start : rank - self.own.start + 1]
                if known and known[0].sentinel == sentinel:  # else others have been started since
                    self._seen.setdefault(rank, time.time())

    def _written(self) -> dict[int, Ending]:
        """What ranks wrote down before they ended; no message of one that ended well."""
        paths = {rank: end_path(self.output_dir, rank) for rank in self.own}
        rows = {rank: path.read_text() for rank, path in paths.items() if path.exists()}
        return {rank: Ending(**json.loads(row)) for rank, row in rows.items() if row.strip()}


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


def end_path(output_dir: Path, rank: int) -> Path:
    """Where a rank writes how it ended, while the ranks run."""
    return output_dir / "ranks" / f"rank{rank}.end.json"


def write_end(output_dir: Path, rank: int, error: BaseException | None) -> None:
    """Says how a rank ended.

    Args:
        output_dir: the job's folder.
        rank: this one.
        error: that ended it; None if it ended well.
    """
    message = ""
    if error is not None:
        text, kind = str(error), type(error).__name__
        message = (text if text.startswith(kind) else f"{kind}: {text}")[: RESERVED // 8]
    is_lost = isinstance(error, RuntimeError | ConnectionError) and LOST.search(message) is not None
    named = error.rank if isinstance(error, RankError) else rank
    row = {"rank": named, "message": message, "seconds": time.time(), "is_consequence": is_lost}
    with end_path(output_dir, rank).open("r+") as file:  # in place: no space is needed for it
        file.write(json.dumps(row).ljust(RESERVED)[:RESERVED])
