"""Watch: ranks that no longer make the same calls are told so, instead of waiting for each other until a timeout.

Each rank counts what it has begun. Ranks that run the same program are never one ahead in one count and behind in another, so two
ranks that are will wait for each other for good. Counts are compared through the store of the process group, by a thread, and only
while a rank stands still: a step that goes on costs nothing. Reading counts is no proof of waiting, and needs none.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from cp_engine.errors import CallError, CPError, Problem

TICK_SECONDS = 1.0
PATIENCE_TICKS = 4
"""How often a rank that stands still for long looks at the others."""
END_SECONDS = 10.0
"""How long an engine that ends waits for its thread, which looks in milliseconds unless the store is gone."""
GRACE_SECONDS = 3.0
"""How long another rank may take from an error to its next call: it may have caught the error, and go on."""
TAG = 2**20
"""Of messages that nobody sends; those of exchanges are below 16."""

RULE = ("rule", "every rank of a plan makes the same calls in the same order, also one whose tokens have no labels")


class Begun(NamedTuple):
    """What a rank has begun so far.

    Args:
        closes: 1 when the engine is closed.
        sums: of gradients.
        unshards: calls of `unshard`.
        forward: passes through the plan; one per attention call, and per recompute.
        backward: likewise.
    """

    closes: int = 0
    sums: int = 0
    unshards: int = 0
    forward: int = 0
    backward: int = 0

    def __str__(self) -> str:
        passes = f"{self.forward} forward and {self.backward} backward passes of attention"
        return f"has begun {passes}, {self.sums} sums of gradients, {self.unshards} calls of unshard"


NAMES = (
    "close of the engine",
    "sum of gradients",
    "call of unshard",
    "forward pass of attention",
    "backward pass of attention",
)


class _State(NamedTuple):
    """What a rank has told: its counts, and the error at which it stopped, if it has begun nothing since."""

    begun: Begun
    error: str | None = None


def enter(group: dist.ProcessGroup) -> str:
    """Makes this rank's entry in the store of a group; returns its key, empty where exchanges cannot be ended from outside."""
    if dist.get_backend(group) != "gloo":
        return ""
    key = uuid4().hex
    group.get_group_store().set(key, json.dumps(_State(Begun())))
    return key


class Watch:
    """One rank's view of the ranks of a plan.

    Args:
        store: of a group that holds all of them.
        keys: of every plan rank's entry in the store.
        ranks: world rank of each plan rank.
        me: this process's plan rank.
        groups: the process groups of the plan that this rank is in.
        source: the plan's name, for messages.
    """

    def __init__(
        self,
        store: dist.Store,
        keys: Sequence[str],
        ranks: Sequence[int],
        me: int,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        source: str,
    ) -> None:
        self._store, self._keys, self._ranks, self._me = store, list(keys), ranks, me
        self._groups, self._source = groups, source
        self._counts: Callable[[], Callable[[], Begun] | None] = lambda: None
        self._stop: Callable[[], object] = lambda: None
        self._error = _State(Begun())  # the last one here
        self._seen: tuple[_State, float] | None = None  # another rank's error, and since when it is known here
        self._reason: CallError | None = None
        self._last, self._ticks, self._patience = Begun(), 0, 1
        self._own: dist.Store | None = None

    def start(self, engine: object, begun: Callable[[], Begun]) -> None:
        """Begins to look, until `end`, until nobody holds the engine, or until this process ends.

        Args:
            engine: what uses the groups.
            begun: its method that counts what this rank has begun.
        """
        # weakly: in a circle the engine would keep its groups, and gloo's threads, until a garbage collection
        self._counts = weakref.WeakMethod(begun)
        is_ended = threading.Event()
        looking = threading.Thread(target=_look, args=(weakref.ref(self), is_ended), daemon=True)
        looking.start()
        # waits for the thread: one that is in the store while the interpreter or the world ends aborts the process
        self._stop = weakref.finalize(engine, _end, looking, is_ended)

    def end(self) -> None:
        """Looks no more, and lets the others know what this rank has begun, for good."""
        self._stop()
        self._tell()

    def _begun(self) -> Begun:
        method = self._counts()
        return self._last if method is None else method()

    def __enter__(self) -> None:
        """Lets the others know of an error that leaves this block: the reason, if they wait for this rank in vain."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._reason is None:
            self._error = _State(self._begun(), said(error))
            self._tell()

    def _tell(self) -> None:
        if dist.is_initialized():
            with suppress(RuntimeError):  # the store may be gone with the rank that kept it
                self._publish(self._store, self._state(self._begun()))

    def explain(self, error: RuntimeError) -> None:
        """Raises why an exchange failed, if ranks made different calls or one of them stopped; nothing where that is not known.

        Args:
            error: of a collective.
        """
        if self._reason is None:
            with suppress(RuntimeError):  # of a store that is gone nothing can be learned
                self._publish(self._store, self._state(self._begun()))
                self._reason = self._difference(self._read(self._store), 0.0)
        if self._reason is not None:
            raise self._reason from error

    def tick(self) -> bool:
        """Looks at the others if this rank stands still; returns whether to look again."""
        begun = self._begun()
        try:
            if begun != self._last or begun == Begun():
                self._last, self._ticks, self._patience = begun, 0, 1
                self._withdraw(begun)
                return True
            self._ticks += 1
            if self._ticks < self._patience:
                return True
            self._ticks, self._patience = 0, 1 if self._seen else min(2 * self._patience, PATIENCE_TICKS)
            self._publish(self._connection(), self._state(begun))  # twice the same counts, so those of one moment
            self._reason = self._reason or self._difference(self._read(self._connection()), GRACE_SECONDS)
        except RuntimeError:  # the world has ended
            return False
        if self._reason is not None:
            self._end_exchanges()
        return self._reason is None

    def _end_exchanges(self) -> None:
        """Ends what waits in these groups, as their timeout would: in gloo a message that does not come in time ends all others."""
        for members, group in self._groups.items():
            peer = next(i for i, rank in enumerate(members) if rank != self._me)
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, TAG).wait(timedelta(milliseconds=1))

    def _connection(self) -> dist.Store:
        if self._own is None:  # the thread's: the other one may be in use
            self._own = self._store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        return self._own

    def _withdraw(self, begun: Begun) -> None:
        """Takes an error back when this rank goes on after it."""
        error = self._error
        if error.error is not None and error.begun != begun:
            self._publish(self._connection(), _State(error.begun))
            if self._error is error:
                self._error = _State(error.begun)

    def _state(self, begun: Begun) -> _State:
        return self._error if self._error.begun == begun else _State(begun)

    def _publish(self, store: dist.Store, state: _State) -> None:
        store.set(self._keys[self._me], json.dumps(state))

    def _read(self, store: dist.Store) -> list[_State]:
        rows = store.multi_get(self._keys)
        return [_State(Begun(*begun), error) for begun, error in map(json.loads, rows)]

    def _difference(self, states: Sequence[_State], grace: float) -> CallError | None:
        """What ends the calls of this rank: counts that cannot both be right, or a rank that stopped where this one went on."""
        order = sorted(range(len(states)), key=lambda rank: sum(states[rank].begun))
        for x, y in pairwise(order):
            if any(a > b for a, b in zip(states[x].begun, states[y].begun, strict=True)):
                return self._different(states, x, y)
        mine = states[self._me].begun
        stopped = [r for r in order if states[r].error is not None and sum(states[r].begun) <= sum(mine)]
        is_shared = self._error.error is not None and any(states[r].begun == self._error.begun for r in stopped)
        if not stopped or is_shared:
            self._seen = None
            return None  # what stopped this rank too is no difference
        first = states[stopped[0]]
        if self._seen is None or self._seen[0] != first:
            self._seen = first, time.monotonic()
        if time.monotonic() - self._seen[1] < grace:
            return None
        what = f"rank {self._ranks[stopped[0]]} stopped, and rank {self._ranks[self._me]} waits for it: {first.error}"
        return self._error_of(what, states, (stopped[0], self._me))

    def _different(self, states: Sequence[_State], x: int, y: int) -> CallError:
        ahead = next(i for i, (a, b) in enumerate(zip(states[x].begun, states[y].begun, strict=True)) if a != b)
        if states[x].begun[ahead] < states[y].begun[ahead]:
            x, y = y, x  # now x went on to something
        behind = next(i for i, (a, b) in enumerate(zip(states[x].begun, states[y].begun, strict=True)) if a < b)
        went, without = (f"{NAMES[i]} {states[r].begun[i]}" for i, r in ((ahead, x), (behind, y)))
        what = f"rank {self._ranks[x]} skipped {without}, which rank {self._ranks[y]} has begun, and went on to {went}"
        return self._error_of(what, states, (x, y))

    def _error_of(self, what: str, states: Sequence[_State], ranks: Sequence[int]) -> CallError:
        shown = tuple((f"rank {self._ranks[r]}", str(states[r].begun)) for r in sorted(ranks))
        return CallError([Problem(key="ranks", what=what, details=(*shown, RULE))], self._source)


def said(error: BaseException) -> str:
    """An error in a line, for other ranks."""
    if isinstance(error, CPError):
        return f"{type(error).__name__}: {error.problems[0].key}  {error.problems[0].what}"
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _end(looking: threading.Thread, is_ended: threading.Event) -> None:
    is_ended.set()
    if looking is not threading.current_thread():
        looking.join(END_SECONDS)


def _look(watch: "weakref.ref[Watch]", is_ended: threading.Event) -> None:
    while not is_ended.wait(TICK_SECONDS):
        here = watch()
        if here is None or not here.tick():
            return
        del here  # between two looks nothing is kept alive
