"""Training on ranks that this process starts; what a rank does is imported there, since it takes seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from cp_engine.job.checks import degrees
from cp_engine.job.launch.process import environment
from cp_engine.job.launch.rank import Config, section
from cp_engine.job.launch.start import resumed, run_ranks, watch
from cp_engine.runtime import devices


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
    ranks = degrees.world_size(config)
    settings = section(config, "launch")
    settings |= {"output_dir": str(output_dir), "device": devices.resolve(str(settings["device"]), ranks)}
    resumed(config, settings, output_dir, out)
    config, restarts = {**config, "launch": settings}, int(str(settings["max_restarts"]))
    with watch(config, ranks=ranks, out=out, is_live=not settings["inline"]) as shown:
        notes = list[str]()
        if settings["inline"]:
            _inline(config)
        else:
            notes = run_ranks(train, config, output_dir, ranks=ranks, max_restarts=restarts, say=shown.say)
    print(shown.summary(notes), file=out, flush=True)


def train(config: Config, fail: Callable[[Exception], object] | None = None) -> None:
    """The training job of this rank.

    Args:
        config: the composed configuration.
        fail: ends this process from a thread; None is `leave`.
    """
    from cp_engine.job.train import run

    run(config, fail)


def _inline(config: Config) -> None:
    """One rank in this process, with its terminal, for a debugger."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with environment(one):
        train(config)
