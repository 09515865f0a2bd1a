"""What SLURM says of a task: which node it is on, how many there are, and where the first one is."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from cp_engine.errors import ConfigError, Problem

LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
PORT, PORTS = 29500, 1000
"""Jobs that share a node have ports of their own: the first one plus the job's number modulo this many."""
RULE = ("rule", "launch=slurm reads what srun tells each task of its step")
TRIES = ("srun python launch.py launch=slurm ...", "launch=local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a step.

    Args:
        node: number of its node.
        nodes: how many the step has.
        task: its number in the step.
        tasks: how many the step has.
        local_task: its number on the node.
        local_tasks: how many the node has.
        host: the first node's name.
        port: of the job.
    """

    node: int
    nodes: int
    task: int
    tasks: int
    local_task: int
    local_tasks: int
    host: str
    port: int

    def as_rank(self) -> dict[str, str]:
        """The environment of a rank, for a step that has one task per rank."""
        return {
            "RANK": str(self.task),
            "LOCAL_RANK": str(self.local_task),
            "LOCAL_WORLD_SIZE": str(self.local_tasks),
            "WORLD_SIZE": str(self.tasks),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def task_of(environment: Mapping[str, str]) -> Task:
    """This task, from SLURM's variables.

    Args:
        environment: of the process.

    Raises:
        ConfigError: naming every variable that is missing or has a value that cannot be read.

    Source: slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES.
    """
    wanted = {  # those of the step first: a step may have fewer nodes and tasks than its job
        "node": ("SLURM_NODEID",),
        "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "task": ("SLURM_PROCID",),
        "tasks": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_task": ("SLURM_LOCALID",),
        "job": ("SLURM_JOB_ID",),
    }
    problems, numbers = list[Problem](), dict[str, int]()
    for name, variables in wanted.items():
        found = next((v for v in variables if v in environment), None)
        if found is None:
            problems.append(_problem(variables[-1], "not in the environment"))
        elif not environment[found].isdecimal():
            problems.append(_problem(found, f"is {environment[found]!r}, not a number"))
        else:
            numbers[name] = int(environment[found])
    listed = next((v for v in LISTS if environment.get(v)), None)
    if listed is None:
        problems.append(_problem(LISTS[-1], "not in the environment"))
    if problems:
        raise ConfigError(problems, "launch=slurm")
    assert listed is not None
    hosts = hosts_of(environment[listed])
    if len(hosts) != numbers["nodes"]:
        what = f"is {environment[listed]}, {len(hosts)} nodes, and the step has {numbers['nodes']}"
        raise ConfigError([_problem(listed, what)], "launch=slurm")
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    counts = counts_of(per_node)
    job, node = numbers.pop("job"), numbers["node"]
    return Task(
        **numbers,
        local_tasks=counts[node] if node < len(counts) else -(-numbers["tasks"] // numbers["nodes"]),
        host=hosts[0],
        port=PORT + job % PORTS,
    )


def hosts_of(nodelist: str) -> list[str]:
    """The names in a list of nodes such as `gpu[01-03,7],login`; by scontrol, where it is there."""
    if shutil.which("scontrol") is not None:
        command = ["scontrol", "show", "hostnames", nodelist]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()
    return [host for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist) for host in _expanded(part)]


def counts_of(tasks_per_node: str) -> list[int]:
    """How many tasks each node has, of `2(x3),1`."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    return [int(tasks) for tasks, nodes in parts for _ in range(int(nodes or 1))]


def _expanded(part: str) -> list[str]:
    """`a[1-2]b[3,4]` as its names; numbers keep their leading zeros."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    names = list[str]()
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        numbers = range(int(first), int(last) + 1) if dash else ()
        names += [f"{n:0{len(first)}d}" for n in numbers] if dash else [item]
    return [f"{before}{name}{tail}" for name in names for tail in _expanded(after)]


def _problem(variable: str, what: str) -> Problem:
    return Problem(key=variable, what=what, details=(RULE,), tries=TRIES)
