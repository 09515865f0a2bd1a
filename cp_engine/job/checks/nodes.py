"""The nodes of a job: which one this is, how many there are, and where they meet."""

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks import degrees, slurm
from cp_engine.job.checks.keys import value_of

ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
OF_TORCHRUN = {"launch.nodes": "2", "launch.node": "0", "launch.rendezvous": "HOST:29400"}
"""What launch=torchrun needs, and an example of each."""
GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: an interface's IPv4 address."""
LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a job.

    Args:
        index: its number, from 0; node 0 has rank 0 and hosts the store.
        count: how many there are.
        ranks: on each of them.
        host: node 0's name or address.
        port: where it listens.
        name: what this machine calls itself.
    """

    index: int
    count: int
    ranks: int
    host: str
    port: int
    name: str

    @property
    def all_ranks(self) -> int:
        """The ranks of all nodes."""
        return self.count * self.ranks

    @property
    def own(self) -> range:
        """The ranks of this node."""
        return range(self.index * self.ranks, (self.index + 1) * self.ranks)

    @property
    def is_on_loopback(self) -> bool:
        """Whether all nodes are this machine."""
        return self.host.startswith(LOOPBACK)

    def __str__(self) -> str:
        return f"node {self.index} ({self.name})"


def alone(ranks: int) -> Node:
    """The one node of a job on one machine."""
    return Node(index=0, count=1, ranks=ranks, host="localhost", port=0, name=socket.gethostname())


def interface_towards(host: str) -> str:
    """The network interface by which this machine reaches another one; empty where that is not known."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def is_met(config: Mapping[str, object]) -> bool:
    """Whether this process starts one node's ranks, and others those of other nodes."""
    return value_of(config, "launch.kind") != "local"


def of(config: Mapping[str, object]) -> Node:
    """This node, from the configuration or from SLURM.

    Args:
        config: the composed and checked configuration.

    Raises:
        ConfigError: SLURM did not start this process, or its nodes do not divide the ranks.
    """
    endpoint, ranks = value_of(config, "launch.rendezvous"), degrees.world_size(config)
    if value_of(config, "launch.kind") == "slurm":
        task = slurm.task_of(os.environ)
        if task.tasks > task.nodes:
            what = f"of {task.tasks} tasks on {task.nodes} nodes are ranks, which are known by launch=slurm on the command line"
            raise ConfigError([Problem(key="launch", what=what, tries=("launch=slurm",))])
        index, count, host, port = task.node, task.nodes, task.host, task.port
        if problem := _uneven(ranks, count):
            raise ConfigError([problem])
    else:
        index, count = (int(str(value_of(config, f"launch.{name}"))) for name in ("node", "nodes"))
        host, port = "", 0
    if endpoint is not None:
        found = ENDPOINT.fullmatch(str(endpoint))
        assert found is not None, "checked"
        host, port = found.group(1).strip("[]"), int(found.group(2))
    return Node(index=index, count=count, ranks=ranks // count, host=host, port=port, name=socket.gethostname())


def problems(config: Mapping[str, object], *, starts_ranks: bool) -> Iterator[Problem]:
    """What is wrong in `launch.*` about nodes and restarts.

    Args:
        config: names and types are right.
        starts_ranks: whether the job is to run; a plan needs no nodes.
    """
    kind, restarts = value_of(config, "launch.kind"), int(str(value_of(config, "launch.max_restarts")))
    given = {key: value for key in OF_TORCHRUN if (value := value_of(config, key)) is not None}
    needless = {"local": tuple(OF_TORCHRUN), "torchrun": (), "slurm": ("launch.nodes", "launch.node")}[str(kind)]
    for key in needless:
        if key in given:
            why = "starts ranks on this machine alone" if kind == "local" else "takes it from SLURM"
            what = f"is {given[key]}, and launch={kind} {why}"
            yield Problem(key=key, what=what, tries=("launch=torchrun", f"{key}=null"))
    if restarts < 0:
        yield Problem(key="launch.max_restarts", what=f"is {restarts}, less than 0", tries=("launch.max_restarts=0",))
    endpoint = given.get("launch.rendezvous")
    if endpoint is not None and kind != "local":
        found = ENDPOINT.fullmatch(str(endpoint))
        if found is None or not 0 < int(found.group(2)) < 2**16:
            what = f"is {endpoint}, not HOST:PORT with a port from 1 to 65535"
            yield Problem(key="launch.rendezvous", what=what, tries=("launch.rendezvous=HOST:29400",))
    if not starts_ranks:
        return
    if config["mode"] == "verify":
        for key, value, nothing in (("launch", kind, "local"), ("launch.max_restarts", restarts, 0)):
            if value != nothing:
                what = f"is {value}, and a comparison starts its ranks on this machine, once"
                yield Problem(key=key, what=what, tries=(f"{key}={nothing}",))
    if value_of(config, "launch.inline") is True and (restarts or kind != "local"):
        what = "is true, and a rank in this process cannot be restarted, nor be one of several nodes'"
        yield Problem(key="launch.inline", what=what, tries=("launch.inline=false",))
    if kind == "torchrun":
        for key, example in OF_TORCHRUN.items():
            if key not in given:
                yield Problem(key=key, what="has no value, and launch=torchrun needs one", tries=(f"{key}={example}",))
        index, count = given.get("launch.node"), given.get("launch.nodes")
        if isinstance(index, int) and isinstance(count, int) and not 0 <= index < count:
            what = f"is {index}, and the {count} nodes are numbered from 0 to {count - 1}"
            yield Problem(key="launch.node", what=what, tries=(f"launch.node={count - 1}",))
        if isinstance(count, int) and (problem := _uneven(degrees.world_size(config), count)):
            yield problem


def _uneven(ranks: int, count: int) -> Problem | None:
    if ranks % count == 0:
        return None
    what = f"is {count}, which does not divide {ranks} ranks"
    rule = ("rule", "every node has equally many ranks: cp x tp x pp x dp over launch.nodes")
    return Problem(key="launch.nodes", what=what, details=(rule,), tries=(f"launch.nodes={_divisor(ranks, count)}",))


def _divisor(ranks: int, near: int) -> int:
    return max(n for n in range(1, min(ranks, near) + 1) if ranks % n == 0)
