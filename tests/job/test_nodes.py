"""Several machines, as several launchers on loopback: they meet, train as one, restart, and each says what went wrong.

Everything is real but the network and SLURM: processes are given the environment that srun would give them.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cp_engine.errors import ConfigError
from cp_engine.job.checks import nodes
from cp_engine.job.checks.slurm import counts_of, hosts_of, task_of
from tests.conftest import LAUNCH, PATIENCE, Result, clean_environment

SMALL = ("titan.training.seq_len=64", "titan.training.local_batch_size=1", "cp=ulysses", "cp.degree=4")
BOUND = 1e-6
"""Of losses on two nodes against those on one: the same ranks make the same sums."""
SLACK = 60.0
"""Seconds for a start on a busy machine, beside a bound that is waited for."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launcher:
    """One node's command, or one rank's, in a folder of its own or one of all."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.files = [(folder / f"{id(self)}.{name}").open("w+") for name in ("out", "err")]
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(LAUNCH), *arguments],
            cwd=folder,
            env=clean_environment(OMP_NUM_THREADS="1", **environment),
            stdout=self.files[0],
            stderr=self.files[1],
            start_new_session=True,
        )

    @property
    def out(self) -> str:
        return Path(self.files[0].name).read_text()

    @property
    def err(self) -> str:
        return Path(self.files[1].name).read_text()

    def sees(self, pattern: str) -> None:
        """Waits until a line is shown."""
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, self.out, re.MULTILINE):
            assert self.process.poll() is None and time.monotonic() < end, self.out + self.err
            time.sleep(0.05)

    def ends(self, timeout: float = PATIENCE) -> Result:
        self.process.wait(timeout)
        return Result(self.process.returncode, self.out, self.err)


Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts launchers; those that a test leaves are killed with their ranks."""
    started: list[Launcher] = []

    def begin(*arguments: str, folder: str = ".", **environment: str) -> Launcher:
        started.append(Launcher(tmp_path / folder, *arguments, **environment))
        return started[-1]

    yield begin
    for launcher in started:
        if launcher.process.poll() is None:
            os.killpg(launcher.process.pid, signal.SIGKILL)
            launcher.process.wait()
        for file in launcher.files:
            file.close()


def of_node(index: int, port: int, *more: str) -> tuple[str, ...]:
    """The command line of one of two nodes."""
    nodes = ("launch=torchrun", "launch.nodes=2", f"launch.node={index}", f"launch.rendezvous=localhost:{port}")
    return (*nodes, *SMALL, *more)


def metrics(folder: Path) -> list[dict[str, float]]:
    (run,) = folder.glob("outputs/*/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "one line per step"
    return rows


@contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """Something that listens and is no store: it says nothing, or what is given."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return
                if answer:
                    kept[-1].sendall(answer)
                    kept.pop().close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


# ------------------------------------------------------------------ what is refused
def test_a_node_that_never_comes_is_named_within_the_bound(start: Start) -> None:
    port, begun = free_port(), time.monotonic()
    result = start(*of_node(0, port, "launch.join_seconds=2")).ends(2 + SLACK)
    assert result.code == 1 and time.monotonic() - begun < 2 + SLACK
    assert f"launch.nodes  1 of 2 nodes came to localhost:{port} within 2 s; missing: node 1" in result.err
    assert f"launch.node=1 launch.rendezvous=localhost:{port}" in result.err and "Traceback" not in result.err


def test_node_0_that_never_comes_is_named_within_the_bound(start: Start) -> None:
    result = start(*of_node(1, port := free_port(), "launch.join_seconds=2")).ends(2 + SLACK)
    assert result.code == 1 and "Traceback" not in result.err
    assert f"no store of node 0 of 2 nodes answered at localhost:{port} within 2 s: nothing listens" in result.err


@pytest.mark.long
def test_nodes_that_compose_otherwise_are_refused_with_the_keys(start: Start, tmp_path: Path) -> None:
    port = free_port()
    both = [
        start(*of_node(0, port)),
        start(*of_node(1, port, "titan.optimizer.lr=2e-3", "titan.training.gc_freq=7", "launch.verbose=true")),
    ]
    for result in [launcher.ends() for launcher in both]:
        assert result.code == 1 and "2 problems" in result.err
        assert re.search(r"titan.optimizer.lr  is 0.001 on node 0 \(.*\), and 0.002 on node 1", result.err), result.err
        assert re.search(r"titan.training.gc_freq  is not set on node 0 \(.*\), and 7 on node 1", result.err)
    assert not (tmp_path / "outputs").exists(), "no folder is left of a job that was refused"


@pytest.mark.long
def test_two_nodes_of_one_number_are_refused(start: Start) -> None:
    port, more = free_port(), ("launch.nodes=3", "cp.degree=6", "titan.training.seq_len=96", "launch.join_seconds=120")
    start(*of_node(0, port, *more))
    both = [start(*of_node(1, port, *more)) for _ in range(2)]
    done = next(ended(both))
    assert done.process.returncode == 1
    assert re.search(r"launch.node  is 1, and .* \(process \d+\) is node 1 already", done.err), done.err


def ended(launchers: list[Launcher]) -> Iterator[Launcher]:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for launcher in launchers:
            if launcher.process.poll() is not None:
                yield launcher
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "http"])
def test_a_port_where_something_else_listens(start: Start, answer: bytes) -> None:
    with listener(answer) as port:
        zero, one = (start(*of_node(index, port, "launch.join_seconds=2")) for index in (0, 1))
        result = zero.ends(2 + SLACK)
        assert result.code == 1 and "Traceback" not in result.err
        assert re.search(
            rf"launch.rendezvous  port {port} cannot be opened on .*: something listens there already", result.err
        )
        assert f"launch.rendezvous=localhost:{port + 1}" in result.err
        result = one.ends(2 + SLACK)
        said = "is no store" if answer else "says nothing"
        assert result.code == 1 and f"localhost:{port} within 2 s: what listens there {said}" in result.err
        assert "frame #" not in result.err and "Traceback" not in result.err


def of_rank(rank: int, port: int) -> dict[str, str]:
    """The environment of one of two ranks that exist already."""
    rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **rendezvous}


@pytest.mark.long
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "http"])
def test_ranks_that_exist_find_their_port_taken(start: Start, answer: bytes) -> None:
    with listener(answer) as port:
        zero, one = (start("launch.join_seconds=2", **of_rank(rank, port)) for rank in (0, 1))
        result = zero.ends(2 + SLACK)
        assert result.code == 1 and "Traceback" not in result.err
        assert f"MASTER_PORT  port {port} cannot be opened" in result.err
        assert f"MASTER_PORT={port + 1} python launch.py" in result.err
        result = one.ends(2 + SLACK)
        assert result.code == 1 and "frame #" not in result.err and "Traceback" not in result.err
        assert f"MASTER_ADDR, MASTER_PORT  no store of rank 0 answered at localhost:{port} within 2 s" in result.err


@pytest.mark.long
def test_ranks_that_exist_wait_no_longer_than_the_bound(start: Start) -> None:
    port = free_port()
    alone = start("launch.join_seconds=2", **of_rank(0, port)).ends(2 + SLACK)
    assert alone.code == 1 and "1 of 2 ranks came" in alone.err and "missing: 1" in alone.err
    alone = start("launch.join_seconds=2", **of_rank(1, port)).ends(2 + SLACK)
    assert alone.code == 1 and f"localhost:{port} within 2 s: nothing listens there" in alone.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch.nodes=2"], ["launch.nodes  is 2, and launch=local", "launch=torchrun"]),
        (
            ["launch=torchrun"],
            ["3 problems", "launch.nodes=2", "launch.node=0", "launch.rendezvous=HOST:29400"],
        ),
        (
            ["launch=torchrun", "launch.nodes=3", "launch.node=3", "launch.rendezvous=nowhere", "cp.degree=4"],
            ["launch.nodes  is 3, which does not divide 4 ranks", "launch.node  is 3", "not HOST:PORT"],
        ),
        (["launch.max_restarts=-1"], ["launch.max_restarts  is -1"]),
        (["launch.inline=true", "cp=none", "launch.max_restarts=1"], ["launch.inline  is true, and a rank in this"]),
        (["mode=verify", "verify.level=training", "launch.max_restarts=1"], ["a comparison starts its ranks on this"]),
        (["launch=slurm"], ["SLURM_NODEID  not in the environment", "SLURM_JOB_NODELIST", "launch=local"]),
        (
            ["-m", "launch=torchrun", "launch.nodes=2", "launch.node=0", "launch.rendezvous=h:1", "cp=ulysses,ring"],
            ["-m  starts one job after the other"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_nodes_that_cannot_be_are_refused(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: list[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    result = command(*arguments)
    assert result.code == 1 and "Traceback" not in result.err
    missing = [text for text in said if text not in result.err]
    assert not missing, result.err


def test_the_interface_that_leads_to_a_node_is_found() -> None:
    assert nodes.interface_towards("127.0.0.1") == "lo"
    assert nodes.interface_towards("no.such.host.invalid") == ""


# ------------------------------------------------------------------ what SLURM says
def test_lists_of_nodes_are_read_without_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert hosts_of("a") == ["a"]
    assert hosts_of("gpu[01-03,7],login,x-[9-10]-y[1,2]") == [
        *("gpu01", "gpu02", "gpu03", "gpu7", "login", "x-9-y1", "x-9-y2", "x-10-y1", "x-10-y2")
    ]
    assert counts_of("2(x3),1") == [2, 2, 2, 1]


STEP = {
    "SLURM_JOB_ID": "41007",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_a_step_is_read_before_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    task = task_of(STEP)
    assert (task.node, task.nodes, task.host, task.port) == (1, 2, "n3", 29507)
    assert task.as_rank()["RANK"] == "3" and task.as_rank()["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(ConfigError, match="is n3, 1 nodes, and the step has 2"):
        task_of({**STEP, "SLURM_STEP_NODELIST": "n3"})
    with pytest.raises(ConfigError, match="SLURM_NODEID  is 'first', not a number"):
        task_of({**STEP, "SLURM_NODEID": "first"})


def of_task(node: int, task: int, tasks: int) -> dict[str, str]:
    """What srun gives a task of a step on two nodes, which are both this machine."""
    return {
        **{"SLURM_JOB_ID": str(free_port()), "SLURM_NODEID": str(node), "SLURM_STEP_NUM_NODES": "2"},
        **{"SLURM_PROCID": str(task), "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_LOCALID": str(task % (tasks // 2))},
        **{"SLURM_STEP_NODELIST": "localhost,localhost", "SLURM_STEP_TASKS_PER_NODE": f"{tasks // 2}(x2)"},
    }


@pytest.mark.long
def test_slurm_starts_a_task_per_node(start: Start, tmp_path: Path) -> None:
    more = ("launch=slurm", f"launch.rendezvous=localhost:{free_port()}", "titan.training.steps=1", *SMALL)
    both = [start(*more, **of_task(node, node, 2)) for node in (0, 1)]
    results = [launcher.ends() for launcher in both]
    assert [result.code for result in results] == [0, 0], results
    assert results[0].out.count("step 1/1") == 1 and "step 1/1" not in results[1].out
    assert len(metrics(tmp_path)) == 1


@pytest.mark.long
def test_slurm_starts_a_task_per_rank(start: Start, tmp_path: Path) -> None:
    more = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    places = [{"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)} for k in (0, 1)]
    step = of_task(0, 0, 2)
    arguments = ("launch=slurm", "titan.training.steps=1", *SMALL, "cp.degree=2")
    ranks = [start(*arguments, **{**step, **more, **place}) for place in places]
    results = [launcher.ends() for launcher in ranks]
    assert [result.code for result in results] == [0, 0], results
    assert len(metrics(tmp_path)) == 1


# ------------------------------------------------------------------ two nodes train
@pytest.mark.long
def test_two_nodes_train_as_one(start: Start, tmp_path: Path) -> None:
    port, steps = free_port(), "titan.training.steps=3"
    both = [start(*of_node(index, port, steps), folder="two") for index in (1, 0)]
    one, zero = (launcher.ends() for launcher in both)
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    assert zero.out.count("step 3/3") == 1 and zero.out.count("done     3 steps") == 1
    assert "step 3/3" not in one.out and "the summary is on node 0" in one.out
    (run,) = (tmp_path / "two").glob("outputs/*/*")
    assert {path.name for path in (run / "ranks").glob("rank*")} == {f"rank{rank}.log" for rank in range(4)}
    assert (run / ".hydra" / "config.yaml").exists()
    alone = start(steps, *SMALL, folder="one").ends()
    assert alone.code == 0, alone.err
    for two, four in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert abs(two["loss"] - four["loss"]) <= BOUND


@pytest.mark.long
def test_a_node_with_a_disk_of_its_own_says_so(start: Start, tmp_path: Path) -> None:
    private = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs none {tmp_path}/run && cd {tmp_path}/run && exec "$@"',
        "sh",
    ]
    (tmp_path / "run").mkdir()
    if subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount")
    port, steps = free_port(), "titan.training.steps=1"
    zero = start(*of_node(0, port, steps), folder="run")
    environment = clean_environment(OMP_NUM_THREADS="1")
    command = [*private, sys.executable, str(LAUNCH), *of_node(1, port, steps)]
    one = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (zero.ends().code, one.returncode) == (0, 0), zero.err + one.stderr
    (run,) = (tmp_path / "run").glob("outputs/*/*")
    assert f"does not see node 0's {run}: it has one of its own there" in one.stdout
    assert {path.name for path in (run / "ranks").glob("rank*")} == {"rank0.log", "rank1.log"}


FAULTY = """
import os, signal
if os.environ["RANK"] == "3" and os.environ["TORCHELASTIC_RESTART_COUNT"] in os.environ["FAULTY"].split():
    {}
"""


@pytest.mark.long
def test_the_error_of_a_rank_is_shown_on_its_node_and_on_node_0(start: Start, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY.format("raise ValueError('nothing could know this before')"))
    port, environment = free_port(), {"FAULTY": "0", "PYTHONPATH": f"{LAUNCH.parent}{os.pathsep}{tmp_path}"}
    more = ("titan.experimental.custom_import=faulty", "launch.join_seconds=120")
    both = [start(*of_node(index, port, *more), **environment) for index in (0, 1)]
    for result in [launcher.ends() for launcher in both]:
        assert result.code == 1
        shown = r"RankFailure: rank 3 of 4 on node 1 \(.*\) ended the run\n  ValueError: nothing could know this before"
        assert re.search(shown, result.err), result.err
        assert result.err.count("RankFailure") == 1 and "    | ValueError: nothing could" in result.err


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_ranks_are_started_again_and_agree_on_how_often(start: Start, tmp_path: Path, count: int) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY.format("os.kill(os.getpid(), signal.SIGKILL)"))
    environment = {"FAULTY": "0 1", "PYTHONPATH": f"{LAUNCH.parent}{os.pathsep}{tmp_path}"}
    more = ("titan.experimental.custom_import=faulty", "launch.max_restarts=2", "titan.training.steps=2")
    port = free_port()
    commands = [of_node(index, port, *more) for index in (0, 1)] if count == 2 else [(*SMALL, *more)]
    launchers = [start(*arguments, **environment) for arguments in commands]
    results = [launcher.ends() for launcher in launchers]
    assert [result.code for result in results] == [0] * count, results
    for restart in (1, 2):
        assert results[0].out.count(f"restart {restart} of 2: rank 3 of 4: killed by SIGKILL") == 1, results[0].out
    assert "restarts 2 of 2" in results[0].out
    assert len(metrics(tmp_path)) == 2
    (run,) = tmp_path.glob("outputs/*/*")
    assert {path.name for path in (run / "ranks").glob("rank3*")} == {
        *("rank3.log", "rank3.round0.log", "rank3.round1.log")
    }


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_was_killed_is_started_again_and_the_run_ends_well(
    start: Start, tmp_path: Path, killed: int
) -> None:
    port, more = free_port(), ("launch.max_restarts=1", "titan.training.steps=6")
    both = [start(*of_node(index, port, *more)) for index in (0, 1)]
    both[0].sees("step 2/6")
    both[killed].process.kill()
    both[killed] = start(*of_node(killed, port, *more))
    results = [launcher.ends() for launcher in both]
    assert [result.code for result in results] == [0, 0], results
    said = "restart 1 of 1: node 1 was lost, and has come back" if killed else "restart 1 of 1: node 0"
    assert said in results[killed != 1].out, results
    assert results[0].out.count("done     ") == 1 and "restarts 1 of 1" in results[0].out
    assert metrics(tmp_path)[-1]["step"] == 6


@pytest.mark.long
def test_a_node_that_was_killed_for_good_is_named(start: Start) -> None:
    port = free_port()
    both = [start(*of_node(index, port, "titan.training.steps=10000")) for index in (0, 1)]
    both[0].sees("step +2/")
    both[1].process.kill()
    result = both[0].ends()
    assert result.code == 1 and re.search(r"RankFailure: node 1 \(.*\) was lost", result.err), result.err


@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_node_whose_launcher_is_stopped_is_named(start: Start, stopped: int) -> None:
    port, more = free_port(), ("titan.training.steps=10000", "launch.watch_seconds=10")
    both = [start(*of_node(index, port, *more)) for index in (0, 1)]
    both[0].sees("step +2/")
    both[stopped].process.send_signal(signal.SIGSTOP)
    result = both[1 - stopped].ends(10 + 2 * SLACK)
    assert result.code == 1 and re.search(rf"RankFailure: node {stopped} \(.*\) was lost", result.err), result.err
    assert "Traceback" not in result.err


@pytest.mark.long
def test_ctrl_c_on_one_node_ends_the_run_on_both(start: Start) -> None:
    port = free_port()
    both = [start(*of_node(index, port, "titan.training.steps=10000")) for index in (0, 1)]
    both[0].sees("step +1/")
    both[1].process.send_signal(signal.SIGINT)
    assert both[1].ends().code == 130
    result = both[0].ends()
    assert result.code == 1 and re.search(r"node 1 \(.*\) was interrupted by SIGINT", result.err), result.err
