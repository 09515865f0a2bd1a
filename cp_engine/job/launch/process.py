"""The process that starts ranks, while it does: its signals, its environment, its agent's log, and no child left behind."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

from cp_engine.job.launch.progress import LogFile

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def agent_log(path: Path) -> Iterator[None]:
    """The agent's own messages go to a file: the terminal shows one error, the rank's."""
    handler = LogFile(path, delay=True)
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, before, strict=True):
            logger.propagate = propagates
            logger.removeHandler(handler)
        with suppress(OSError):  # of what it could not write
            handler.close()


def end_children() -> None:
    """No process stays behind, also when a second signal cut the agent's own shutdown short."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@contextmanager
def signals() -> Iterator[None]:
    """Keeps Ctrl-C from the ranks while they start, and puts this process's handlers back.

    The terminal sends Ctrl-C to every process of the group. A child inherits the mask of the thread that starts it, so
    with the signal blocked here no rank dies with a traceback on the terminal; the kernel delivers it to a
    thread that does not block it, and Python then runs the handler in this thread.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    resource_tracker.ensure_running()  # started later, it would unblock the signal in this thread
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
