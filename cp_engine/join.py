"""Joining ranks that exist already: rank 0 composes and tells the others through the job's own key-value store."""

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cp_engine.devices import resolve
from cp_engine.elastic import watch
from cp_engine.endings import RankFailure
from cp_engine.errors import ConfigError, Problem
from cp_engine.integrations.torchtitan_resume import source_of
from cp_engine.progress import log_path
from cp_engine.ranks import Config, leave, redirect, section, train

if TYPE_CHECKING:
    from torch.distributed import Store

KEY = "cp_engine/job"
WAIT = timedelta(minutes=10)
"""How long the other ranks wait for rank 0's configuration."""


class Group:
    """The ranks that torchrun or SLURM started, before there is a process group.

    Attributes:
        rank: this process's global rank.
        world_size: number of ranks.
    """

    def __init__(self) -> None:
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Kept until the end: without torchrun's own store, rank 0 hosts it and the process group shares it.
        self._store: Store = next(rendezvous("env://"))[0]
        self._told = False

    def tell(self, message: Mapping[str, object]) -> None:
        """Rank 0 says once what all do: train a configuration, or exit."""
        if not self._told:
            self._store.set(KEY, json.dumps(message))
            self._told = True

    def follow(self) -> int:
        """The other ranks: wait for rank 0, train what it composed or exit as it does.

        Returns:
            The exit code.
        """
        self._store.wait([KEY], WAIT)
        message = json.loads(self._store.get(KEY))
        if "exit" in message:
            return int(message["exit"])
        run_joined(message["config"], out=None)
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
        if (source := source_of(config, output_dir)) is not None:
            settings["resume"] = str(source.path)
            print(f"{'resume':<9}{source.line()}", file=out, flush=True)
        config = {**config, "launch": settings}
        (output_dir / "ranks").mkdir(parents=True, exist_ok=True)
        self.tell({"config": config})
        run_joined(config, out=out)

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
        return {**config, "launch": {**settings, "nproc": self.world_size}}


def run_joined(config: Config, *, out: TextIO | None) -> None:
    """One rank of a joined job: its lines go to its log, rank 0's view to the terminal.

    Args:
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
