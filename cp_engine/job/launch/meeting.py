"""How the nodes of a job meet: who came, whether all composed the same, which folder is the run's, and who failed first.

Node 0 hosts the store and decides; the others take its verdict. Every node writes that it is alive, so that one that was killed is
told from one that is busy.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import uuid4

from cp_engine.errors import ConfigError, Problem, shown
from cp_engine.job.checks.nodes import Node
from cp_engine.job.launch import stores
from cp_engine.job.launch.failures import Ending

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BEAT_SECONDS = 1.0
DEAD_SECONDS = 15.0
"""A node that has not written for this long is gone; torch's rendezvous drops it after as long."""
REPORT_SECONDS = 20.0
"""How long a failed run waits for what the other nodes have to say; their ranks have some seconds to end."""
LEAVE_SECONDS = 10.0
"""How long node 0 keeps the store for the others after the end."""
UNSET, PACKAGE = "not set", "package "
SHOWN = 20
"""How many differing keys an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What holds for all nodes.

    Args:
        folder: of the run.
        attempt: how often the run was started before.
        names: of the machines, by node.
        token: of this meeting.
    """

    folder: str
    attempt: int
    names: tuple[str, ...]
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a round ended on one node.

    Args:
        node: its number.
        ending: of its rank that failed first; None where the node itself was lost.
        text: the error as it is shown.
    """

    node: int
    ending: Ending | None
    text: str


class Meeting:
    """This node's place among the nodes of a job; a context manager.

    Args:
        node: which one this is.
        seconds: how long to wait for node 0, and node 0 for the others.
    """

    def __init__(self, node: Node, seconds: float) -> None:
        self.node = node
        self._seconds = seconds
        self.store: TCPStore = self._store()
        self._beat = threading.Event()
        self._seen = dict[int, tuple[bytes, float]]()
        self._heard = 0.0
        self._thread = threading.Thread(target=self._live, name="alive", daemon=True)

    def _store(self) -> "TCPStore":
        node, key = self.node, "launch.rendezvous"
        if node.index == 0:
            return stores.opened(node.host, node.port, key=key, tries=(f"{key}={node.host}:{node.port + 1}",))
        return stores.connected(node.host, node.port, self._seconds, key=key, who=f"node 0 of {node.count} nodes")

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beat.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_SECONDS)
        try:
            self.store.set(f"left/{self.node.index}", "")
            if self.node.index == 0:  # the store goes with this process
                came = [k for k in range(self.node.count) if self.store.check([f"offer/{k}"])]
                stores.until(lambda: self.store.check([f"left/{k}" for k in came]), LEAVE_SECONDS)
        except RuntimeError:  # node 0 is gone
            pass

    def agree(self, config: Mapping[str, object], folder: str, attempt: int) -> Agreed:
        """Waits for all nodes, compares what they composed, and settles on one folder.

        Args:
            config: what must be the same everywhere.
            folder: of the run, if this node decides.
            attempt: how many rounds this node has behind it.

        Raises:
            ConfigError: nodes did not come, composed other configurations, or two have one number.
            RuntimeError: node 0 is gone.
        """
        node = self.node
        self._take_place()
        self._thread.start()
        own = flat(config)
        offer = {"config": own, "folder": folder, "attempt": attempt, "name": node.name}
        self.store.set(f"offer/{node.index}", json.dumps(offer))
        if node.index == 0:
            self.store.set("verdict", json.dumps(self._verdict()))
        elif not stores.until(lambda: self.store.check(["verdict"]), self._seconds + stores.LEAST_SECONDS):
            raise self._absent([0])
        verdict = json.loads(self.store.get("verdict"))
        if "missing" in verdict:
            raise self._absent(verdict["missing"])
        first = json.loads(self.store.get("offer/0"))
        differing = verdict["differing"] or _differing(first["config"], {node.index: own})
        if differing:
            raise self._different(differing, verdict["names"])
        return Agreed(**{name: verdict[name] for name in ("folder", "attempt", "token")}, names=tuple(verdict["names"]))

    def _verdict(self) -> dict[str, object]:
        """What node 0 finds when all have come, or the time is over."""
        keys = [f"offer/{k}" for k in range(self.node.count)]
        if not stores.until(lambda: self.store.check(keys), self._seconds):
            return {"missing": [k for k, key in enumerate(keys) if not self.store.check([key])]}
        offers = [json.loads(self.store.get(key)) for key in keys]
        # a node that outlived node 0 knows the folder of the run that goes on
        eldest = max(offers, key=lambda offer: int(offer["attempt"]))
        return {
            "differing": _differing(offers[0]["config"], {k: o["config"] for k, o in enumerate(offers) if k}),
            "folder": eldest["folder"],
            "attempt": eldest["attempt"],
            "names": [offer["name"] for offer in offers],
            "token": uuid4().hex,
        }

    def _absent(self, missing: Sequence[int]) -> ConfigError:
        node = self.node
        came = node.count - len(missing)
        names = ", ".join(f"node {k}" for k in missing)
        what = (
            f"{came} of {node.count} nodes came to {node.host}:{node.port} within {self._seconds:g} s; missing: {names}"
        )
        rule = "every node runs the same command with its own launch.node; the bound is launch.join_seconds"
        command = f"python launch.py launch=torchrun launch.nodes={node.count} launch.node={missing[0]}"
        tries = (f"{command} launch.rendezvous={node.host}:{node.port} ...", "launch.join_seconds=900")
        return ConfigError([Problem(key="launch.nodes", what=what, details=(("rule", rule),), tries=tries)])

    def _different(self, differing: Mapping[str, Mapping[str, Sequence[str]]], names: Sequence[str]) -> ConfigError:
        rule = ("rule", "all nodes compose the same configuration, but for launch.node")
        problems = []
        for index, keys in differing.items():
            for key, (wanted, got) in list(keys.items())[:SHOWN]:
                there = names[int(index)] if int(index) != self.node.index else self.node.name
                what = f"is {wanted} on node 0 ({names[0]}), and {got} on node {index} ({there})"
                tries = () if wanted == UNSET or key.startswith(PACKAGE) else (f"{key}={wanted}",)
                problems.append(Problem(key=key, what=what, details=(rule,), tries=tries))
        return ConfigError(problems, f"{self.node}")

    def _take_place(self) -> None:
        """Each number is one node's; one that was killed gives its place to the one that is started for it."""
        index = self.node.index
        mine = json.dumps({"id": uuid4().hex, "name": self.node.name, "pid": os.getpid()})
        found = self.store.compare_set(f"agent/{index}", "", mine).decode()
        while found != mine:
            if self._is_alive(index, DEAD_SECONDS):
                other = json.loads(found)
                what = f"is {index}, and {other['name']} (process {other['pid']}) is node {index} already"
                raise ConfigError([Problem(key="launch.node", what=what, tries=(f"launch.node={index + 1}",))])
            found = self.store.compare_set(f"agent/{index}", found, mine).decode()

    def _is_alive(self, index: int, seconds: float) -> bool:
        """Whether another node writes that it is alive."""
        before = self._beats(index)
        return stores.until(lambda: self._beats(index) != before, seconds)

    def _beats(self, index: int) -> bytes:
        key = f"alive/{index}"
        return self.store.get(key) if self.store.check([key]) else b""

    def silent(self, seconds: float) -> int | None:
        """A node that has not written for a while that it is alive; asked again and again.

        Args:
            seconds: how long.

        Returns:
            Its number, if there is one.
        """
        now = time.monotonic()
        for k in range(self.node.count):
            beats = self._beats(k)
            if beats != self._seen.get(k, (b"", 0.0))[0]:
                self._seen[k] = beats, now
            elif k in self._seen and now - self._seen[k][1] > seconds:
                return k
        return None

    def watch_node_0(self, seconds: float, fail: Callable[[], None]) -> None:
        """Ends this process where node 0's store does not answer: its machine takes what is sent, and torch's client waits for good.

        Args:
            seconds: how long it may not answer.
            fail: ends it, from a thread.
        """

        def watch() -> None:
            while not self._beat.wait(BEAT_SECONDS):
                if self._thread.is_alive() and time.monotonic() - self._heard > seconds:
                    fail()

        if self.node.index:
            threading.Thread(target=watch, name="node 0", daemon=True).start()

    def _live(self) -> None:
        try:
            own = self.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
            while True:
                own.set(f"alive/{self.node.index}", str(time.time()))
                own.check(["over"])  # waits for an answer, for ever where node 0 is stopped
                self._heard = time.monotonic()
                if self._beat.wait(BEAT_SECONDS):
                    return
        except RuntimeError:  # node 0 is gone, which this node's launcher finds out for itself
            pass

    def is_over(self) -> bool:
        """Whether a node has ended the run for all."""
        return bool(self.store.check(["over"]))

    def report(self, attempt: int, ending: Ending | None, text: str) -> None:
        """Tells the others how a round ended here.

        Args:
            attempt: the round's number.
            ending: of the first rank; None where no rank failed here.
            text: the error as it is shown.
        """
        row = {"ending": None if ending is None else asdict(ending), "text": text}
        self.store.set(f"report/{attempt}/{self.node.index}", json.dumps(row))

    def end(self) -> None:
        """Ends the run on all nodes: they look at it once a second."""
        self.store.set("over", str(self.node.index))

    def first(self, attempt: int, *, is_last: bool) -> Report | None:
        """The node and rank that ended a round: one that is lost, else the rank that failed first by the nodes' clocks.

        Args:
            attempt: the round's number.
            is_last: whether the nodes are still to report, as at the end of the run; else all that live have.
        """
        keys = {k: f"report/{attempt}/{k}" for k in range(self.node.count)}
        if is_last:
            stores.until(lambda: self.store.check(list(keys.values())), REPORT_SECONDS)
        reports = list[Report]()
        for k, key in keys.items():
            if self.store.check([key]):
                row = json.loads(self.store.get(key))
                if row["ending"] is not None:
                    reports.append(Report(node=k, ending=Ending(**row["ending"]), text=row["text"]))
            elif not is_last or not self._is_alive(k, 3 * BEAT_SECONDS):
                return Report(node=k, ending=None, text="")
        return min(reports, key=lambda report: report.ending.order() if report.ending else (False, 0.0), default=None)


def flat(node: object, key: str = "") -> dict[str, object]:
    """Dotted keys and values of nested mappings."""
    if not isinstance(node, Mapping) or not node:
        return {key: node}
    return {k: v for name, child in node.items() for k, v in flat(child, f"{key}.{name}" if key else str(name)).items()}


def _differing(
    first: Mapping[str, object], others: Mapping[int, Mapping[str, object]]
) -> dict[str, dict[str, list[str]]]:
    """By node, the keys whose values are not node 0's, with both."""
    result = dict[str, dict[str, list[str]]]()
    for index, config in others.items():
        keys = [key for key in {**first, **config} if first.get(key) != config.get(key)]
        if keys:
            result[str(index)] = {key: [_shown(first, key), _shown(config, key)] for key in keys}
    return result


def _shown(config: Mapping[str, object], key: str) -> str:
    return shown(config[key]) if key in config else UNSET
