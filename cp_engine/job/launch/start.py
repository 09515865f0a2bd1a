"""Starts the ranks of a job, or joins those that torchrun started.

One place composes the configuration: the parent, or rank 0 under torchrun. The others are given the composed result
and the output folder, so that no rank can have another configuration or a folder of its own.
"""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks import job, nodes
from cp_engine.job.checks.keys import value_of
from cp_engine.job.checks.resume import source_of
from cp_engine.job.launch.course import Course
from cp_engine.job.launch.deaths import Deaths, end_path
from cp_engine.job.launch.failures import Ending, Interrupted
from cp_engine.job.launch.process import agent_log, end_children, environment, signals
from cp_engine.job.launch.progress import Watch
from cp_engine.job.launch.rank import Config, section
from cp_engine.runtime import devices

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining"),
    *("torch._inductor.compile_fx", "torch.nn.attention.varlen", "torch.utils.tensorboard"),
    *("datasets.distributed", "torchdata.stateful_dataloader"),
)
"""What torchtitan imports, and what takes all but a third of a second of its six: once for all CPU ranks, which are forked from there.
Not torchtitan itself, which settles on a device when it is imported."""
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
JOIN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def joins() -> bool:
    """Whether the ranks exist already: RANK is in the environment."""
    return "RANK" in os.environ


def check_environment() -> None:
    """Refuses an environment from which the ranks cannot find each other.

    Raises:
        ConfigError: naming the variables that are missing.
    """
    missing = [name for name in JOIN_VARIABLES if name not in os.environ]
    if joins() and missing:
        rule = ("rule", "with RANK set, all of " + " ".join(JOIN_VARIABLES) + " must be set")
        tries: tuple[str, ...] = ("torchrun --nproc-per-node 2 launch.py ...", "env -u RANK python launch.py ...")
        raise ConfigError(
            [Problem(key=", ".join(missing), what="not in the environment", details=(rule,), tries=tries)]
        )
    numbers = {name: os.environ[name] for name in NUMBERS if name in os.environ} if joins() else {}
    wrong = [
        Problem(key=name, what=f"is {value!r}, not a number", tries=("env -u RANK python launch.py ...",))
        for name, value in numbers.items()
        if not value.isdecimal()
    ]
    if wrong:
        raise ConfigError(wrong)
    if joins() and int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        what = f"is {numbers['RANK']}, and WORLD_SIZE is {numbers['WORLD_SIZE']}"
        raise ConfigError([Problem(key="RANK", what=what, details=(("rule", "ranks are numbered from 0"),))])
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not joins() and tasks != "1":
        what = f"not in the environment, but srun started {tasks} tasks; each would train a job of its own"
        tries = (
            "srun python launch.py launch=slurm ...",
            "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
            " MASTER_ADDR=<first node> MASTER_PORT=29500 python launch.py ...'",
        )
        raise ConfigError([Problem(key="RANK", what=what, tries=tries)])


def run_ranks(
    function: Callable[[Config], None],
    config: Config,
    output_dir: Path,
    *,
    ranks: int,
    max_restarts: int = 0,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Starts ranks that each call a function, and returns when all have ended well.

    Args:
        function: importable by name; called with the configuration.
        config: with `launch.output_dir` and a resolved `launch.device`.
        output_dir: the ranks' logs go to `ranks/` in it.
        ranks: how many, all on this machine.
        max_restarts: how often all are started again after one has failed.
        say: shows a line about a restart.

    Returns:
        Lines for a summary.

    Raises:
        RankFailure: with the error of the rank that failed first.
        Interrupted: by Ctrl-C or a signal; no process is left.
    """
    node = nodes.alone(ranks)
    with prepared(node, output_dir) as deaths:
        going_on = partial(after_restart, config, output_dir)
        course = Course(node, output_dir, deaths, say, max_restarts=max_restarts, going_on=going_on)
        run_course(function, config, output_dir, course)
    return course.notes()


def resumed(config: Config, settings: Config, output_dir: Path, out: TextIO, *, is_restart: bool = False) -> None:
    """Decides what a job continues from, and says it.

    Args:
        config: the composed configuration.
        settings: its `launch`, of which `resume` becomes the checkpoint itself.
        output_dir: the job's folder.
        out: where to say it.
        is_restart: of a run that has begun.

    Raises:
        ConfigError: there is nothing that can be continued from.
    """
    if (source := source_of(config, output_dir, is_restart=is_restart)) is not None:
        settings |= {"resume": str(source.path), "is_read": True}
        print(f"{'resume':<9}{source.line()}", file=out, flush=True)


def after_restart(config: Config, output_dir: Path) -> str:
    """What ranks that are started again continue from, in words.

    Args:
        config: the composed configuration.
        output_dir: the job's folder.

    Raises:
        ConfigError: what there is cannot be continued from.
    """
    settings = {**section(config, "launch"), "resume_check": "sizes"}  # rank 0 reads every byte
    source = source_of({**config, "launch": settings}, output_dir, is_restart=True)
    return "begins anew" if source is None else f"continues from {source.line()}"


@contextmanager
def prepared(node: nodes.Node, output_dir: Path) -> Iterator[Deaths]:
    """A process that may start ranks: its signals, its environment, and an eye on who ends.

    Raises:
        ConfigError: the run's folder cannot be written to.
    """
    deaths = Deaths(output_dir, node.own)
    try:
        (output_dir / "ranks").mkdir(parents=True, exist_ok=True)
        deaths.begin()
    except OSError as error:
        what = f"cannot be written to: {error.strerror}: {output_dir / 'ranks'}"
        raise ConfigError([Problem(key="hydra.run.dir", what=what, tries=("hydra.run.dir=...",))]) from error
    try:
        # The thread of `deaths` first: it is the one that does not block Ctrl-C.
        with deaths, environment(_worker_environment(node)), signals():
            yield deaths
    finally:
        for rank in node.own:
            end_path(output_dir, rank).unlink(missing_ok=True)


def watch(config: Mapping[str, object], *, ranks: int, out: TextIO, is_live: bool = True) -> Watch:
    """The view of a job that is about to start; `is_live` allows a bar."""
    settings = section(config, "launch")
    return Watch(
        Path(str(settings["output_dir"])),
        steps=int(str(value_of(config, "titan.training.steps"))),
        ranks=ranks,
        out=out,
        verbose=bool(settings["verbose"]),
        is_live=is_live,
    )


def _worker_environment(node: nodes.Node) -> dict[str, str]:
    """What the ranks, and the agent that starts them, find in their environment unless the user set it."""
    wanted = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // node.ranks))}
    # on loopback no host name has to resolve, and nothing listens outside
    interface = "lo" if node.is_on_loopback else nodes.interface_towards(node.host)
    if interface in [name for _, name in socket.if_nameindex()]:
        wanted["GLOO_SOCKET_IFNAME"] = interface
    return {name: value for name, value in wanted.items() if name not in os.environ}


def run_course(function: Callable[[Config], None], config: Config, output_dir: Path, course: Course) -> None:
    """Runs the elastic agent in this thread until the ranks have ended; inside `prepared`.

    Args:
        function: what each rank does.
        config: its argument.
        output_dir: the run's folder.
        course: of the run on this node.

    Raises:
        RankFailure: with the error of this node's rank that failed first.
        Interrupted: by Ctrl-C or a signal; no process is left.
        Over: of `rounds`, where another node ended the run.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from cp_engine.job.launch import rounds

    rounds.register()
    node = course.node
    course.environment.update(os.environ)
    is_forked = (
        devices.of_tensors(str(section(config, "launch")["device"])) == "cpu"
    )  # a GPU must not be touched before a fork
    multiprocessing.set_forkserver_preload(list(PRELOADED) if job.needs_ranks(config) else ["torch.distributed"])
    settings = LaunchConfig(
        min_nodes=node.count,
        max_nodes=node.count,
        nproc_per_node=node.ranks,
        rdzv_backend=rounds.BACKEND,
        rdzv_endpoint=f"{node.host}:{node.port}",
        rdzv_configs={"rounds": rounds.Rounds(course, output_dir.name)},
        run_id=output_dir.name,
        max_restarts=course.max_restarts,
        start_method="forkserver" if is_forked else "spawn",
        logs_specs=_logs_specs(output_dir),
    )
    try:
        with agent_log(output_dir / "ranks" / f"agent{node.index or ''}.log"):
            elastic_launch(settings, rounds.run_rank_of_round)(function, config, course.environment)
        if not course.is_done():
            raise course.failure()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGINT:
            raise Interrupted(signal.SIGINT) from error  # Ctrl-C reached the rank before its parent
        flagged = Ending(rank=rank, seconds=time.time(), message=f"ended with exit code {failure.exitcode}")
        raise course.failure(flagged) from error
    except SignalException as error:
        if course.is_ended_here():
            raise course.failure() from error
        raise Interrupted(error.sigval) from error
    except KeyboardInterrupt as error:
        raise Interrupted(signal.SIGINT) from error
    finally:
        end_children()


def _logs_specs(output_dir: Path) -> "LogsSpecs":
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        """Ranks write their own log file, one for output and errors in the order they came, and how they ended."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            unused = {rank: "" for rank in envs}
            return LogsDest(stdouts=unused, stderrs=dict(unused), error_files=dict(unused))

        @property
        def root_log_dir(self) -> str:
            return str(output_dir / "ranks")

    return RankLogs()
