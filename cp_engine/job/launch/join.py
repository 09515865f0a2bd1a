"""Joining ranks that exist already: rank 0 composes and tells the others through the job's own key-value store."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cp_engine.errors import ConfigError, Problem
from cp_engine.job.launch import stores
from cp_engine.job.launch.failures import RankFailure
from cp_engine.job.launch.progress import log_path
from cp_engine.job.launch.rank import Config, leave, redirect, section
from cp_engine.job.launch.start import resumed, watch
from cp_engine.runtime.devices import resolve

if TYPE_CHECKING:
    from torch.distributed import Store

Train = Callable[[Config, Callable[[Exception], object]], None]
"""What a rank does: with a configuration, and with what ends its process from a thread."""
KEY = "cp_engine/job"
WAIT = timedelta(minutes=10)
"""How long the other ranks wait for rank 0's configuration."""


class Group:
    """The ranks that torchrun or SLURM started, before there is a process group.

    Args:
        seconds: how long to wait for rank 0, and rank 0 for the others.
        train: what each rank does.

    Raises:
        ConfigError: the port is taken, no store of rank 0 answers, or ranks do not come.

    Attributes:
        rank: this process's global rank.
        world_size: number of ranks.
        seconds: how long ranks wait for each other.
    """

    def __init__(self, seconds: int, train: Train) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.seconds, self._train = seconds, train
        # Kept until the end: without torchrun's own store, rank 0 hosts it and the process group shares it.
        self._store = self._opened()
        # torchrun keeps its store when it starts all ranks again: what was said to those before is not for these
        self._key = f"{KEY}/{self._store.add(f'{KEY}/starts/{self.rank}', 1)}"
        self._told = False
        self._store.set(f"{self._key}/{self.rank}", "")
        if self.rank == 0:
            self._refuse_absent(range(self.world_size))
        else:
            self._refuse_absent([0])

    def _opened(self) -> "Store":
        host, port, key = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), "MASTER_PORT"
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            tries = (f"MASTER_PORT={port + 1} python launch.py ...", "torchrun --nproc-per-node 2 launch.py ...")
            return stores.opened(host, port, key=key, tries=tries, is_shared=True)
        return stores.connected(host, port, self.seconds, key=f"MASTER_ADDR, {key}", who="rank 0")

    def _refuse_absent(self, ranks: Sequence[int]) -> None:
        """Waits for ranks to be here.

        Raises:
            ConfigError: some did not come in time; those that did are told.
        """
        keys = {rank: f"{self._key}/{rank}" for rank in ranks}
        if stores.until(lambda: self._store.check(list(keys.values())), self.seconds):
            return
        missing = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
        self.tell({"exit": 1})
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        came = f"{len(keys) - len(missing)} of {len(keys)} ranks" if self.rank == 0 else "a store, but not its rank 0"
        what = f"{came} came to {where} within {self.seconds} s; missing: {', '.join(missing)}"
        rule = ("rule", "every rank has its own RANK, and the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
        tries = ("launch.join_seconds=600",)
        raise ConfigError([Problem(key="WORLD_SIZE", what=what, details=(rule,), tries=tries)])

    def tell(self, message: Mapping[str, object]) -> None:
        """Rank 0 says once what all do: train a configuration, or exit."""
        if not self._told and self.rank == 0:
            self._store.set(self._key, json.dumps(message))
            self._told = True

    def follow(self) -> int:
        """The other ranks: wait for rank 0, train what it composed or exit as it does.

        Returns:
            The exit code.
        """
        try:
            self._store.wait([self._key], WAIT)
            message = json.loads(self._store.get(self._key))
        except RuntimeError as error:
            what = f"rank 0 ended, or was silent for {WAIT.total_seconds():g} s, before it said what to train"
            raise RankFailure(f"RankFailure: rank {self.rank} of {self.world_size} waited: {what}") from error
        if "exit" in message:
            return int(message["exit"])
        run_joined(self._train, message["config"], out=None)
        return 0

    def lead(self, config: Config, output_dir: Path, out: TextIO) -> None:
        """Rank 0: give the composed configuration to all ranks, train, and show the progress.

        Args:
            config: the composed configuration.
            output_dir: the one folder of the run; exists.
            out: where to show progress and summary.

        Raises:
            ConfigError: there is nothing to continue from.
        """
        settings = section(config, "launch")
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        settings |= {"output_dir": str(output_dir), "device": resolve(str(settings["device"]), local_ranks)}
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        resumed(config, settings, output_dir, out, is_restart=is_restart)
        config = {**config, "launch": settings}
        (output_dir / "ranks").mkdir(parents=True, exist_ok=True)
        self.tell({"config": config})
        run_joined(self._train, config, out=out)

    def adopt(self, config: Config) -> Config:
        """The configuration with launch.nproc from the environment, where it is open.

        Raises:
            ConfigError: if it is given and differs.
        """
        settings = section(config, "launch")
        if settings["nproc"] not in (None, self.world_size):
            what = f"is {settings['nproc']}, but WORLD_SIZE is {self.world_size}"
            tries = ("launch.nproc=null", f"torchrun --nproc-per-node {settings['nproc']} launch.py ...")
            raise ConfigError([Problem(key="launch.nproc", what=what, tries=tries)])
        if settings["join_seconds"] != self.seconds:
            what = f"is {settings['join_seconds']}, and ranks that exist already had met before that was read"
            rule = ("rule", "with RANK set it is typed on the command line, which every rank reads")
            line = f"launch.join_seconds={settings['join_seconds']}"
            raise ConfigError([Problem(key="launch.join_seconds", what=what, details=(rule,), tries=(line,))])
        if settings["max_restarts"]:
            what = f"is {settings['max_restarts']}, and ranks that exist already are restarted by what started them"
            tries = ("launch.max_restarts=0", "torchrun --max-restarts 3 launch.py ...")
            raise ConfigError([Problem(key="launch.max_restarts", what=what, tries=tries)])
        if settings["kind"] == "torchrun":
            what = "is torchrun, which starts the ranks, and RANK is in the environment"
            raise ConfigError([Problem(key="launch", what=what, tries=("env -u RANK python launch.py ...",))])
        return {**config, "launch": {**settings, "nproc": self.world_size}}


def run_joined(train: Train, config: Config, *, out: TextIO | None) -> None:
    """One rank of a joined job: its lines go to its log, rank 0's view to the terminal.

    Args:
        train: what the rank does.
        config: what rank 0 composed.
        out: for rank 0, where to show progress; None for the others.

    Raises:
        RankFailure: with this rank's own error; torchrun then ends the others.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    output_dir = Path(str(section(config, "launch")["output_dir"]))
    log = log_path(output_dir, rank)
    terminals = os.dup(1), os.dup(2)
    redirect(log)

    def fail(error: Exception) -> None:  # from a thread, where the main one hangs
        os.write(terminals[1], f"{_failure(rank, world_size, error, log)}\n".encode())
        leave(output_dir, error)

    try:
        if out is None:
            train(config, fail)
            return
        with os.fdopen(os.dup(terminals[0]), "w") as terminal:
            with watch(config, ranks=world_size, out=terminal, is_live=False) as shown:
                train(config, fail)
            print(shown.summary(), file=terminal, flush=True)
    except Exception as error:
        raise RankFailure(_failure(rank, world_size, error, log)) from error
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for terminal_copy, number in zip(terminals, (1, 2), strict=True):
            os.dup2(terminal_copy, number)
            os.close(terminal_copy)


def _failure(rank: int, ranks: int, error: Exception, log: Path) -> str:
    text = str(error) if str(error).startswith(type(error).__name__) else f"{type(error).__name__}: {error}"
    return f"RankFailure: rank {rank} of {ranks} failed\n  {text}\n  log  {log}"
