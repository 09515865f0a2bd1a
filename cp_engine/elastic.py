"""Starts the ranks of a job, or joins those that torchrun started.

One place composes the configuration: the parent, or rank 0 under torchrun. The others are given the composed result
and the output folder, so that no rank can have another configuration or a folder of its own.
"""

import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cp_engine import devices, job, world
from cp_engine.endings import Ending, Interrupted, RankFailure
from cp_engine.errors import ConfigError, Problem
from cp_engine.integrations.torchtitan_resume import source_of
from cp_engine.keys import value_of
from cp_engine.progress import LogFile, Watch
from cp_engine.ranks import (
    Config,
    Deaths,
    end_path,
    failure_text,
    run_rank,
    section,
    train,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PRELOADED = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining"),
    *("torch._inductor.compile_fx", "torch.nn.attention.varlen", "torch.utils.tensorboard"),
    *("datasets.distributed", "torchdata.stateful_dataloader"),
)
"""What torchtitan imports, and what takes all but a third of a second of its six: once for all CPU ranks, which are forked from there.
Not torchtitan itself, which settles on a device when it is imported."""
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
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not joins() and tasks != "1":
        what = f"not in the environment, but srun started {tasks} tasks; each would train a job of its own"
        tries = (
            "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
            " MASTER_ADDR=<first node> MASTER_PORT=29500 python launch.py ...'",
        )
        raise ConfigError([Problem(key="RANK", what=what, tries=tries)])


def launch(config: Config, output_dir: Path, *, out: TextIO) -> None:
    """Trains on new ranks, shows progress, and returns when all have ended well.

    Args:
        config: the composed configuration.
        output_dir: the job's folder; exists.
        out: where to show progress and summary.

    Raises:
        ConfigError: there is nothing to continue from, or the folder cannot be written to.
        RankFailure: with the error of the rank that failed first.
        Interrupted: by Ctrl-C or a signal; no process is left.
    """
    ranks = world.world_size(config)
    settings = section(config, "launch")
    settings |= {"output_dir": str(output_dir), "device": devices.resolve(str(settings["device"]), ranks)}
    if (source := source_of(config, output_dir)) is not None:
        settings["resume"] = str(source.path)
        print(f"{'resume':<9}{source.line()}", file=out, flush=True)
    config = {**config, "launch": settings}
    with watch(config, ranks=ranks, out=out, is_live=not settings["inline"]) as shown:
        if settings["inline"]:
            _inline(config)
        else:
            run_ranks(train, config, output_dir, ranks=ranks)
    print(shown.summary(), file=out, flush=True)


def run_ranks(function: Callable[[Config], None], config: Config, output_dir: Path, *, ranks: int) -> None:
    """Starts ranks that each call a function, and returns when all have ended well.

    Args:
        function: importable by name; called with the configuration.
        config: with `launch.output_dir` and a resolved `launch.device`.
        output_dir: the ranks' logs go to `ranks/` in it.
        ranks: how many, all on this machine.

    Raises:
        RankFailure: with the error of the rank that failed first.
        Interrupted: by Ctrl-C or a signal; no process is left.
    """
    deaths = Deaths(output_dir, ranks)
    try:
        (output_dir / "ranks").mkdir(parents=True, exist_ok=True)
        deaths.begin()
    except OSError as error:
        what = f"cannot be written to: {error.strerror}: {output_dir / 'ranks'}"
        raise ConfigError([Problem(key="hydra.run.dir", what=what, tries=("hydra.run.dir=...",))]) from error
    # The thread of `deaths` first: it is the one that does not block Ctrl-C.
    try:
        with deaths, _environment(_worker_environment(ranks)), _signals():
            _spawn(function, config, output_dir, deaths)
    finally:
        for rank in range(ranks):
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


def _worker_environment(ranks: int) -> dict[str, str]:
    """What the ranks, and the agent that starts them, find in their environment unless the user set it."""
    wanted = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    if "lo" in [name for _, name in socket.if_nameindex()]:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: no host name has to resolve, nothing listens outside
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _spawn(function: Callable[[Config], None], config: Config, output_dir: Path, deaths: Deaths) -> None:
    """Runs the elastic agent in this thread until the ranks have ended."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    is_forked = (
        devices.of_tensors(str(section(config, "launch")["device"])) == "cpu"
    )  # a GPU must not be touched before a fork
    multiprocessing.set_forkserver_preload(list(PRELOADED) if job.needs_ranks(config) else ["torch.distributed"])
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=deaths.ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        run_id=output_dir.name,
        max_restarts=0,
        start_method="forkserver" if is_forked else "spawn",
        logs_specs=_logs_specs(output_dir, deaths),
    )
    try:
        with _agent_log(output_dir / "ranks" / "agent.log"):
            elastic_launch(settings, run_rank)(function, config, dict(os.environ))
        if (early := deaths.first(None)) is not None:
            raise RankFailure(failure_text(output_dir, early, deaths.ranks))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGINT:
            raise Interrupted(signal.SIGINT) from error  # Ctrl-C reached the rank before its parent
        first = deaths.first(Ending(rank=rank, seconds=time.time(), message=f"ended with exit code {failure.exitcode}"))
        assert first is not None
        raise RankFailure(failure_text(output_dir, first, deaths.ranks)) from error
    except SignalException as error:
        if deaths.has_ended_run and (early := deaths.first(None)) is not None:
            raise RankFailure(failure_text(output_dir, early, deaths.ranks)) from error
        raise Interrupted(error.sigval) from error
    except KeyboardInterrupt as error:
        raise Interrupted(signal.SIGINT) from error
    finally:
        _end_children()


def _logs_specs(output_dir: Path, deaths: Deaths) -> "LogsSpecs":
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        """Ranks write their own log file, one for output and errors in the order they came, and how they ended."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            deaths.begin()
            unused = {rank: "" for rank in envs}
            return LogsDest(stdouts=unused, stderrs=dict(unused), error_files=dict(unused))

        @property
        def root_log_dir(self) -> str:
            return str(output_dir / "ranks")

    return RankLogs()


@contextmanager
def _agent_log(path: Path) -> Iterator[None]:
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


def _end_children() -> None:
    """No process stays behind, also when a second signal cut the agent's own shutdown short."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@contextmanager
def _signals() -> Iterator[None]:
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
def _environment(values: Mapping[str, str]) -> Iterator[None]:
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


def _inline(config: Config) -> None:
    """One rank in this process, with its terminal, for a debugger."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with _environment(one):
        train(config)
