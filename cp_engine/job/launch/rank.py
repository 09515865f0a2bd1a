"""One rank's process: its log, the error it leaves for the parent, and how the parent finds which rank failed first."""

import atexit
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from cp_engine.job.launch.deaths import end_path, write_end
from cp_engine.job.launch.failures import Ending
from cp_engine.job.launch.progress import last_lines, log_path

Config = dict[str, object]

SET_BY_AGENT = re.compile(
    "((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCH_NCCL_ASYNC_ERROR_HANDLING|TORCHELASTIC_.*)$"
)
"""What torch's agent puts into the environment of a rank."""
LOG_LINES = 15
"""How many lines of a failed rank's log the error shows."""
FULL = 2**24
"""A disk with fewer bytes left is said to be full: that may be why a run ended, whatever its error says."""


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
        write_end(output_dir, rank, error)  # before the log, for which there may be no space
        with suppress(OSError):
            traceback.print_exc()
            _flush()
        os._exit(1)  # destructors of a broken process group can wait for the other ranks, or abort
    write_end(output_dir, rank, None)
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
        write_end(output_dir, rank, error)
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


def redirect(path: Path) -> None:
    """Sends this process's standard output and error to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


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
