"""The command: composes a configuration with Hydra, then trains, explains, verifies or translates it."""

import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ENAMETOOLONG
from pathlib import Path
from typing import TYPE_CHECKING

from cp_engine.errors import ConfigError, CPError, Problem
from cp_engine.job.launch import stores
from cp_engine.job.launch.failures import Interrupted, RankFailure

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from cp_engine.job.launch.join import Group

# Everything else is imported where it is used: --help and --cfg are to be quick, and planning needs no torchtitan.

EMPTY = re.compile(r"[\w/@.]*=(null)?")
DIGITS = re.compile(r"\d{4301}")
JOIN_SECONDS = re.compile(r"\+{0,2}launch\.join_seconds=(\d+)")


def main() -> None:
    """What launch.py, `python -m cp_engine` and the console script `cp-engine` run."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while it ends
        code = 128 + signal.SIGPIPE
    stores.leave(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        arguments: without the program's name.

    Returns:
        The exit code: 0, 1 after an error, 128 + number after a signal (130 for Ctrl-C).
    """
    try:
        if "RANK" not in os.environ and "launch=slurm" in arguments:
            _take_rank_of_slurm()
        if "RANK" in os.environ:
            return _run_joined(arguments)
        return _run_hydra(arguments, None)
    except (CPError, RankFailure) as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"interrupted by {interrupted}; no process is left", file=sys.stderr)
        return 128 + interrupted.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _take_rank_of_slurm() -> None:
    """Where srun started a task per rank, the ranks exist; where it started one per node, or none, the launcher sees to it."""
    tasks, nodes = (os.environ.get(f"SLURM_{name}", "1") for name in ("STEP_NUM_TASKS", "STEP_NUM_NODES"))
    if tasks == nodes:
        return
    from cp_engine.job.checks.slurm import task_of

    task = task_of(os.environ)
    if task.tasks > task.nodes:
        os.environ.update(task.as_rank())


def _run_joined(arguments: Sequence[str]) -> int:
    """The ranks exist already: rank 0 composes, the others do what it says."""
    from cp_engine.job.launch.join import Group
    from cp_engine.job.launch.start import check_environment
    from cp_engine.job.toml.argument import SWEEPS
    from cp_engine.job.training import train

    check_environment()
    if SWEEPS & set(arguments):
        rule = ("rule", "a sweep starts new ranks for every job; ranks that exist already can only join one")
        raise ConfigError(
            [
                Problem(
                    key="-m",
                    what="cannot be used with RANK set",
                    details=(rule,),
                    tries=("env -u RANK python launch.py -m ...",),
                )
            ]
        )
    typed = [found.group(1) for a in arguments if (found := JOIN_SECONDS.fullmatch(a))]
    group = Group(int(typed[-1]) if typed else 300 if "launch=slurm" in arguments else 60, train)
    if group.rank != 0:
        return group.follow()
    code = 1
    try:
        code = _run_hydra(arguments, group)
    finally:
        group.tell({"exit": code})
    return code


def _run_hydra(arguments: Sequence[str], group: "Group | None") -> int:
    """Lets Hydra compose and run the jobs, one after the other."""
    import hydra
    import yaml
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from cp_engine.config import hydra_files
    from cp_engine.config.shipped import conf_dir
    from cp_engine.job import user_folder
    from cp_engine.job.modes import run_job
    from cp_engine.job.options import SOURCE, main_problems, parsed, prepared, require_few_jobs
    from cp_engine.job.toml import argument as toml_argument

    options, wrong = parsed(arguments)
    require_few_jobs(options.overrides)
    folders = user_folder.folders(options)
    if problems := [*main_problems(options), *(p for folder in folders for p in hydra_files.shadows(folder))]:
        raise ConfigError(problems, SOURCE)
    translation = toml_argument.translation_of(arguments, options.config_dir)
    if wrong:
        raise ConfigError(wrong, SOURCE)
    given = prepared(toml_argument.for_hydra(arguments, translation))
    failed: list[str] = []
    started: list[Path] = []
    unread: list[BrokenPipeError] = []

    def task(composed: "DictConfig") -> None:
        started.append(Path(HydraConfig.get().runtime.output_dir))
        try:
            if run_job(composed, HydraConfig.get(), group, translation):
                return
        except (CPError, RankFailure) as error:  # shown here, so that a sweep goes on to its next job
            if HydraConfig.get().runtime.choices.get("hydra/launcher") != "basic":
                raise  # in another process, whose launcher hands it back
            print(error, file=sys.stderr, flush=True)
            _remove_unused(Path(HydraConfig.get().runtime.output_dir), Path(HydraConfig.get().runtime.cwd))
        except BrokenPipeError as error:
            unread.append(error)  # past Hydra, which would print it
        overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        assert isinstance(overrides, list)
        failed.append(" ".join(str(o) for o in overrides if o != toml_argument.CHOSEN))

    with (
        hydra_files.reading(),
        toml_argument.registered(translation),
        _program_arguments(given),
        _full_error(),
        _root_logging(),
    ):
        try:
            user_folder.require_nothing_executed(parsed(given)[0], is_sweep=bool(toml_argument.SWEEPS & set(arguments)))
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(task)()
        except (HydraException, OmegaConfBaseException) as error:
            raise _hydra_error(error, given) from error
        except OSError as error:
            if started or isinstance(error, BrokenPipeError):
                raise
            if error.errno == ENAMETOOLONG and any(len(a) > 255 for a in given if not a.startswith("hydra.")):
                raise _hydra_error(error, given) from error
            what = f"the run's folder cannot be made: {error.strerror}{f': {error.filename}' if error.filename else ''}"
            raise ConfigError([Problem(key="hydra.run.dir", what=what, tries=("hydra.run.dir=...",))]) from error
        except yaml.YAMLError as error:
            raise ConfigError([Problem(key="a YAML file", what=" ".join(str(error).split()))]) from error
        except (ValueError, KeyError) as error:  # Hydra's own, which it does not call its errors
            if started:
                raise
            raise (_unstarted(error, arguments) or _hydra_error(error, given)) from error
        except (TypeError, AttributeError, AssertionError) as error:  # likewise
            if started:
                raise
            raise _hydra_error(error, given) from error
        except RecursionError as error:
            if started:
                raise
            raise (user_folder.circle(folders) or _hydra_error(error, given)) from error
    if toml_argument.SWEEPS & set(arguments):
        _remove_unused_sweep(started, Path.cwd())
    if unread:
        raise unread[0]
    if failed and toml_argument.SWEEPS & set(arguments):
        print("failed jobs:", *(f"  {job}" for job in failed), sep="\n", file=sys.stderr)
    return 1 if failed else 0


def _unstarted(error: ValueError | KeyError, arguments: Sequence[str]) -> ConfigError | None:
    """What keeps Hydra from starting a job: options that exclude each other, a group without an option, a setting of its own."""
    text = " ".join(str(error).split())
    if text.startswith("Config group override"):
        empty = [a.partition("=")[0] for a in arguments if EMPTY.fullmatch(a)]
        problems = [Problem(key=key, what="needs one of its options", tries=("--help",)) for key in empty]
        return ConfigError(problems or [Problem(key="options", what=text)], "the command line")
    if long := [a.partition("=")[0] for a in arguments if DIGITS.search(a)]:
        what = "has a number of more than 4,300 digits, which Python does not read"
        return ConfigError([Problem(key=key, what=what) for key in long], "the command line")
    if text.startswith("Only one of"):
        return ConfigError([Problem(key="options", what=text)])
    if isinstance(error, KeyError):
        return ConfigError([Problem(key="hydra.job.env_copy", what=f"{text} is not in the environment")])
    if "onfigure" not in text:  # the word of the logging module, in all that it refuses
        return None
    cause = f": {error.__cause__}" if error.__cause__ else ""
    return ConfigError([Problem(key="hydra.job_logging", what=f"{text}{cause}", tries=("hydra/job_logging=default",))])


def _remove_unused(folder: Path, typed_in: Path, left: str = ".hydra") -> None:
    """A job that was refused before it started, or only printed, leaves no folder, and a sweep of such jobs leaves none.

    Args:
        folder: of the job, or of the sweep.
        typed_in: where the command was typed, which stays.
        left: what Hydra wrote into the folder.
    """
    if not folder.is_dir() or folder.samefile(typed_in) or {p.name for p in folder.iterdir()} - {left}:
        return
    with suppress(OSError):  # somebody else may use it meanwhile
        if (folder / left).is_dir():
            shutil.rmtree(folder / left)
        (folder / left).unlink(missing_ok=True)
        for each in (folder, folder.parent, folder.parent.parent):
            if each.is_symlink() or each.samefile(typed_in) or any(each.iterdir()):
                return
            each.rmdir()


def _remove_unused_sweep(jobs: Sequence[Path], typed_in: Path) -> None:
    for folder in jobs:
        if folder.is_dir() and not folder.samefile(typed_in) and not any(folder.iterdir()):
            folder.rmdir()
    for sweep in {folder.parent for folder in jobs}:
        if (sweep / "multirun.yaml").is_file():
            _remove_unused(sweep, typed_in, "multirun.yaml")


@contextmanager
def _program_arguments(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv  # where Hydra looks
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _root_logging() -> Iterator[None]:
    """Hydra gives the root logger a file in the run's folder, which may be removed; a program that goes on gets its own back."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = list(handlers)
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers = handlers
        root.setLevel(level)


@contextmanager
def _full_error() -> Iterator[None]:
    """Hydra reads this: it then raises its errors instead of printing them and exiting."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def _hydra_error(error: Exception, arguments: Sequence[str]) -> ConfigError:
    from cp_engine.config.shipped import conf_dir
    from cp_engine.job.hydra_errors import config_error
    from cp_engine.job.options import parsed
    from cp_engine.job.toml.argument import SWEEPS

    options, sweep = parsed(arguments)[0], bool(SWEEPS & set(arguments))
    return config_error(error, options.overrides, conf=conf_dir(), extra=options.config_dir, sweep=sweep)
