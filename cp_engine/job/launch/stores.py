"""The key-value store through which ranks or nodes find each other: opened at a port, or found at one, within a bound.

torch's own client waits for good where something listens and does not answer, and writes C++ stack traces where something
else does; both end here with the address and what was found there.
"""

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from cp_engine.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch.distributed import TCPStore

TICK_SECONDS = 0.2
OPERATION_SECONDS = 60
"""How long an operation of the store may take."""
THREAD = "store"
LEAST_SECONDS = 5.0
"""How long what listens may take to answer, also where it came at the last moment."""


def opened(host: str, port: int, *, key: str, tries: tuple[str, ...], is_shared: bool = False) -> "TCPStore":
    """A store that this process hosts.

    Args:
        host: a name of this machine, by which the others know it.
        port: to listen at.
        key: what gives the address, for messages.
        tries: what to paste where the port is taken.
        is_shared: whether torch opens the same store once more in this process.

    Raises:
        ConfigError: the port cannot be listened at, or the address does not lead to this process.
    """
    if reason := _not_free(port):
        what = f"port {port} cannot be opened on {socket.gethostname()}: {reason}"
        rule = ("look at", f"ss -ltnp 'sport = :{port}', which says what listens there")
        raise ConfigError([Problem(key=key, what=what, details=(rule,), tries=tries)])
    store, reason = _made(host, port, LEAST_SECONDS, LEAST_SECONDS, is_host=True, is_shared=is_shared)
    if store is None:
        what = f"{host}:{port} is to be a store of this process on {socket.gethostname()}, and does not lead to it: {reason}"
        raise ConfigError([Problem(key=key, what=what, details=_looks(host, port))])
    return store


def connected(host: str, port: int, seconds: float, *, key: str, who: str) -> "TCPStore":
    """A store that another process hosts.

    Args:
        host: its machine.
        port: where it listens.
        seconds: how long to wait for it.
        key: what gives the address, for messages.
        who: the process that is to host it.

    Raises:
        ConfigError: nothing listened there in time, or something that is no store.
    """
    end = time.monotonic() + seconds
    while True:
        left = max(end - time.monotonic(), 0.0)
        try:
            socket.create_connection((host, port), timeout=LEAST_SECONDS).close()
            store, reason = _made(host, port, min(left, LEAST_SECONDS) or 1.0, left, is_host=False)
            if store is not None:
                return store
        except OSError as error:
            reason = f"nothing listens there ({error.strerror or error})"
        if time.monotonic() > end:
            what = f"no store of {who} answered at {host}:{port} within {seconds:g} s: {reason}"
            raise ConfigError([Problem(key=key, what=what, details=_looks(host, port))])
        time.sleep(TICK_SECONDS)


def leave(code: int) -> None:
    """Ends the process where torch did not come back: its thread would abort the interpreter that ends around it.

    Args:
        code: for the system.
    """
    if any(thread.name == THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def until(is_there: Callable[[], bool], seconds: float) -> bool:
    """Waits for something to be in a store; returns whether it came in time."""
    end = time.monotonic() + seconds
    while not (found := is_there()) and time.monotonic() < end:
        time.sleep(TICK_SECONDS)
    return found


def _looks(host: str, port: int) -> tuple[tuple[str, str], ...]:
    return (("look at", f"ss -ltnp 'sport = :{port}' on {host}, the firewall between, and whether the name is right"),)


def _not_free(port: int) -> str:
    """Why nothing can listen at a port; empty where something can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's own: what has ended does not hold it
        try:
            probe.bind(("", port))
        except OSError as error:
            return "something listens there already" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def _made(
    host: str, port: int, attempt: float, seconds: float, *, is_host: bool, is_shared: bool = False
) -> tuple["TCPStore | None", str]:
    """A store within a bound, or why there is none; in a thread, since torch does not come back from a silent listener.

    torch takes up to twice the seconds of an attempt, and `LEAST_SECONDS` more are waited for that.
    """
    from torch.distributed import TCPStore

    made, failed = list[TCPStore](), list[str]()

    def make() -> None:
        try:
            made.append(
                TCPStore(
                    host,
                    port,
                    is_master=is_host,
                    timeout=timedelta(seconds=attempt),
                    wait_for_workers=False,
                    multi_tenant=is_shared,
                )
            )
        except (RuntimeError, ValueError) as error:
            failed.append(str(error).splitlines()[0])

    thread = threading.Thread(target=make, name=THREAD, daemon=True)
    with _without_cpp_traces():
        thread.start()
        thread.join(seconds + LEAST_SECONDS)
    if made:
        made[0].set_timeout(timedelta(seconds=OPERATION_SECONDS))
        return made[0], ""
    return None, f"what listens there is no store ({failed[0]})" if failed else "what listens there says nothing"


@contextmanager
def _without_cpp_traces() -> Iterator[None]:
    """Standard error goes nowhere: torch's C++ code writes a stack trace for each attempt."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
