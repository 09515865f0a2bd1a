"""Pulse: says which rank a job waits for, where that is, and ends the job, before torch's timeout blames whoever waits.

Each rank marks where it is; a thread tells that through the store of the world, a few times in the bounded time, and looks at the
others only while its own rank stands still. A rank that no longer tells anything is stopped, or hangs without Python's lock; one
that tells, and is behind, hangs where its stack says.
"""

import faulthandler
import json
import re
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from cp_engine.errors import Problem, RankError

KEY = "cp_engine/pulse/{rank}"
SHARE = 8
"""How many times in the bounded time a rank tells where it is."""
MOST_SECONDS = 10.0
"""Between two beats."""
DONE = (2**31,)
WAITING = ("/torch/distributed/", "/cp_engine/runtime/connect.py", "/cp_engine/exchange/channel.py")
"""Files of the innermost calls of a rank that waits for another one."""
END_SECONDS = 10.0
"""How long a process that ends waits for the thread, which takes milliseconds unless the store is gone."""
FRAMES = 4
"""How many of the innermost calls of a rank the error shows."""
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


class Told(NamedTuple):
    """What a rank told last.

    Args:
        beat: how many times it told something.
        at: how far it is, in an order that all ranks have in common.
        place: the same in words.
        stack: of its main thread, innermost call first, if it stands still.
    """

    beat: int
    at: tuple[int, ...]
    place: str
    stack: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether its main thread is in an exchange."""
        return any(file in call for call in self.stack[:3] for file in WAITING)


class Pulse:
    """One rank's mark of where it is, and its view of the others.

    Args:
        seconds: for how long a rank may stand still while another one is behind; asked for at each look.
        passes: attention passes begun so far: a finer mark.
        fail: ends this process; called from a thread.
    """

    def __init__(
        self, seconds: Callable[[], float], passes: Callable[[], int], fail: Callable[[Exception], object]
    ) -> None:
        self._seconds, self._passes, self._fail = seconds, passes, fail
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        self._store = group.get_group_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs; the thread's, for the other one may be in use
        self._mark: tuple[tuple[int, ...], str] = ((0, 0), "before its first step")
        self._beat, self._seen = 0, dict[int, tuple[Told, float]]()
        self._still: tuple[tuple[int, ...], float] = ((), time.monotonic())
        is_ended = threading.Event()
        beating = threading.Thread(target=_run, args=(weakref.ref(self), is_ended), name="pulse", daemon=True)
        self.end = weakref.finalize(self, _end, beating, is_ended)
        """Stops telling and looking; also called when this process ends."""
        beating.start()

    def mark(self, *at: int, place: str) -> None:
        """Says where this rank is; costs an assignment.

        Args:
            at: how far, in an order that all ranks have in common.
            place: in words, as after "is".
        """
        self._mark = (at, place)

    def beat(self) -> float:
        """Tells where this rank is, and ends the job if it has waited too long; returns the seconds to the next beat."""
        bound = self._seconds()
        at, place = (*self._mark[0], self._passes()), self._mark[1]
        now = time.monotonic()
        if at != self._still[0]:
            self._still = at, now
            self._seen.clear()
        is_still = now - self._still[1] > bound / 2
        self._tell(Told(self._beat, at, place, stack_of_main_thread() if is_still else ()))
        if is_still:
            self._look(now)
            if now - self._still[1] > bound and (blamed := self._blamed(now, bound)) is not None:
                self._fail(self._error(blamed, now))
        return min(bound / SHARE, MOST_SECONDS)

    def close(self) -> None:
        """Tells that this rank has done its part, so that nobody waits for it, and stops."""
        self.end()
        with suppress(dist.DistError):  # of a job that failed: the store may be gone
            self._tell(Told(self._beat, DONE, "at its end"))

    def _tell(self, told: Told) -> None:
        self._beat += 1
        self._store.set(KEY.format(rank=self._rank), json.dumps(told))

    def _look(self, now: float) -> None:
        for rank in range(self._world):
            told = self._read(rank)
            if rank not in self._seen or told.beat != self._seen[rank][0].beat:
                self._seen[rank] = told, now

    def _read(self, rank: int) -> Told:
        key = KEY.format(rank=rank)
        if not self._store.check([key]):
            return Told(-1, (-1,), "where it began")
        beat, at, place, stack = json.loads(self._store.get(key))
        return Told(beat, tuple(at), place, tuple(stack))

    def _blamed(self, now: float, bound: float) -> int | None:
        """The rank that the others wait for: one that tells nothing any more, else the one that is behind; None if nobody is."""
        if any(told.at == DONE for told, _ in self._seen.values()):
            return None
        silent = [rank for rank, (_, since) in self._seen.items() if now - since > bound / 3]
        busy = [rank for rank, (told, _) in self._seen.items() if not told.waits]
        behind = min(silent or busy or self._seen, key=lambda rank: self._seen[rank][0].at)
        is_known = silent or 0 < len(busy) < len(self._seen)
        return behind if is_known or self._seen[behind][0].at != max(t.at for t, _ in self._seen.values()) else None

    def _error(self, blamed: int, now: float) -> RankError:
        states = {rank: told for rank, (told, _) in sorted(self._seen.items())}
        for rank, told in states.items():
            print(
                f"rank {rank} is {told.place}", *(told.stack or ("no stack",)), sep="\n  ", file=sys.stderr, flush=True
            )
        still, told = now - self._still[1], states[blamed]
        is_silent = now - self._seen[blamed][1] > self._seconds() / 3
        is_at = "tells nothing any more (stopped, or busy without Python's lock)" if is_silent else f"is {told.place}"
        what = f"{is_at}, and the others wait for it; nothing has gone on for {still:.0f} s"
        waiting = ", ".join(f"rank {r} is {states[r].place}" for r in [r for r in states if r != blamed][:4])
        calls = [("calls" if i == 0 else "", call) for i, call in enumerate(told.stack[:FRAMES])]
        details = (*([("last", told.place)] if is_silent else calls), ("others", waiting))
        rule = ("rule", f"launch.watch_seconds, {self._seconds():.0f} s here")
        return RankError([Problem(key=f"rank {blamed}", what=what, details=(*details, rule))], "", blamed)


def stack_of_main_thread() -> tuple[str, ...]:
    """The calls that this process's main thread is in, innermost first."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().split("\n\n")
    main = f"{threading.main_thread().ident:#018x}"
    frames = next((text for text in threads if main in text.partition("\n")[0]), threads[-1])
    return tuple(f"{m['file']}:{m['line']} {m['name']}" for m in FRAME.finditer(frames))


def _run(pulse: "weakref.ref[Pulse]", is_ended: threading.Event) -> None:
    seconds = 0.0
    while not is_ended.wait(seconds):
        here = pulse()
        if here is None:
            return
        try:
            seconds = here.beat()
        except dist.DistError:  # the world has ended, and with it who keeps its store
            return
        del here


def _end(beating: threading.Thread, is_ended: threading.Event) -> None:
    is_ended.set()
    if beating is not threading.current_thread():
        beating.join(END_SECONDS)
