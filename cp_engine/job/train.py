"""One rank of a training job: torchtitan's Trainer, the plan, and a line per step in `metrics.jsonl`."""

import gc
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from cp_engine.config.composition import degree_of, plan_from_config
from cp_engine.errors import ConfigError, Problem, RankError
from cp_engine.hosts.torchtitan.checkpoint_files import step_of
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.hosts.torchtitan.text import sources
from cp_engine.job.checks.job import shape_of
from cp_engine.job.checks.module_needs import without_spared_module
from cp_engine.job.checks.resume import Source, source_of
from cp_engine.job.launch.progress import LogFile, log_path
from cp_engine.job.launch.rank import leave
from cp_engine.runtime.devices import of_tensors, operators_of

if TYPE_CHECKING:  # the run imports it after the device is settled
    from cp_engine.hosts.torchtitan.trainer import CompositionTrainer, StepReport

METRICS = "metrics.jsonl"


def run(config: Mapping[str, object], fail: Callable[[Exception], object] | None = None) -> None:
    """Train on this rank; every rank of the job calls it with the same configuration.

    Args:
        config: the composed configuration, with `launch.output_dir` (an existing folder) and `launch.device`.
        fail: ends this process from a thread, when a rank does not go on; None is `leave`.

    Raises:
        ConfigError: what only torchtitan itself can tell is wrong.
    """
    with rank_process(config):
        from cp_engine.hosts.torchtitan.trainer import CompositionTrainer

        train_composition(config, CompositionTrainer, fail)


def train_composition(
    config: Mapping[str, object],
    trainer_class: "type[CompositionTrainer]",
    fail: Callable[[Exception], object] | None = None,
) -> None:
    """Plan, build the trainer, train; inside `rank_process`.

    Args:
        config: the composed configuration.
        trainer_class: the trainer, or one that records more.
        fail: as of `run`.
    """
    from cp_engine.hosts.torchtitan.companions import declared
    from cp_engine.hosts.torchtitan.host import hosted, job_config
    from cp_engine.hosts.torchtitan.saving import made_whole
    from cp_engine.hosts.torchtitan.spec import refuse_other_shape
    from cp_engine.hosts.torchtitan.trainer import Watching

    job = job_config(titan_of(config))
    with hosted(job, data=section(config, "data"), is_composed=True), ExitStack() as finish:
        shape = shape_of(config)
        refuse_other_shape(job, shape)
        plan = plan_from_config(section(config, "cp"), shape=shape, mask=section(config, "mask"))
        companions = declared(section(config, "data"))
        launch = section(config, "launch")
        kernels, goes_on = str(launch["device"]), launch["nonfinite"] == "go_on"
        seconds = launch["watch_seconds"]
        fail = fail or partial(leave, Path(str(launch["output_dir"])))
        watching = Watching(seconds=None if seconds is None else float(str(seconds)), fail=fail)
        trainer = trainer_class(job, plan, _writer(config, finish), kernels, companions, goes_on, watching)
        finish.callback(trainer.close)
        made_whole(trainer.checkpointer, source := _agreed_source(config))
        if _is_restart() and source is not None and step_of(source) >= job.training.steps:
            return  # a rank failed after the last step
        try:
            if job.checkpoint.create_seed_checkpoint:
                trainer.checkpointer.save(curr_step=0, last_step=True)
            else:
                trainer.train()
        except CheckpointException as error:  # of every rank, with a traceback for each that failed
            raise _of_checkpoint(error) from error


def _agreed_source(config: Mapping[str, object]) -> Path | None:
    """What rank 0 finds to continue from, on every rank; after a restart that is no longer what the launcher found."""
    found: list[Source | ConfigError | None] = [None]
    if dist.get_rank() == 0:
        launch = dict(section(config, "launch"))
        if launch.get("is_read") and not _is_restart():
            launch["resume_check"] = "sizes"  # the others wait, and the launcher has read every byte
        try:
            output_dir = Path(str(launch["output_dir"]))
            found = [source_of({**config, "launch": launch}, output_dir, is_restart=_is_restart())]
        except ConfigError as error:
            found = [error]  # for every rank
    dist.broadcast_object_list(found)
    if isinstance(found[0], ConfigError):
        raise found[0]
    if found[0] is None:
        return None
    logging.getLogger().info("resume %s", found[0].line())
    return found[0].path


def _is_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _of_checkpoint(error: CheckpointException) -> RankError:
    rank, (cause, _) = next(iter(error.failures.items()))
    text = next(iter(str(cause).splitlines()), "")
    what = f"could not be written or read: {type(cause).__name__}: {text}"
    return RankError(
        [Problem(key="checkpoint", what=what, details=(("ranks", ", ".join(map(str, error.failures))),))], "", rank
    )


def section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """One group of the configuration."""
    value = config[name]
    assert isinstance(value, Mapping), f"{name} is a group"
    return value


def titan_of(config: Mapping[str, object]) -> dict[str, object]:
    """The `titan` node with what the rest of the configuration decides: degree, folder, whether checkpoints are read.

    Args:
        config: the composed configuration.
    """
    titan = deepcopy(dict(section(config, "titan")))
    launch = section(config, "launch")
    _section_of(titan, "parallelism")["context_parallel_degree"] = degree_of(section(config, "cp"))
    _section_of(titan, "job").setdefault("dump_folder", launch["output_dir"])
    _section_of(titan, "metrics").setdefault("disable_color_printing", True)  # the log is a file
    if (dataset := sources.dataset_of(config)) is not None:
        training = _section_of(titan, "training")
        training.update(dataset=dataset, dataset_path=sources.place_of(config, dataset, "path"))
        if (tokenizer := sources.place_of(config, dataset, "tokenizer")) is not None:
            _section_of(titan, "model").setdefault("hf_assets_path", tokenizer)
    if launch.get("resume") is not None:
        checkpoint = _section_of(titan, "checkpoint")
        if not checkpoint.get("enable"):
            checkpoint.update(enable=True, load_only=True)
    return without_spared_module(config, titan)


@contextmanager
def rank_process(config: Mapping[str, object]) -> Iterator[None]:
    """What torchtitan changes in a process, undone on every exit, so that the next job of a sweep finds it clean.

    That is: the environment, the root logger, the garbage collector, determinism, the process group, and on CPU
    the stand-ins for what the CPU backend lacks. torchtitan's log goes to the rank's own log file.

    Args:
        config: the composed configuration.

    Raises:
        ConfigError: torchtitan was imported for another device before.
    """
    launch = section(config, "launch")
    with ExitStack() as undo:
        undo.callback(_restore_environment, dict(os.environ))
        if gc.isenabled():
            undo.callback(gc.enable)
        undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        _log_to_file(undo, log_path(Path(str(launch["output_dir"])), int(os.environ["RANK"])))
        device = of_tensors(str(launch["device"]))
        if device == "cpu":
            undo.enter_context(cpu_shims())
        undo.enter_context(operators_of(str(launch["device"])))
        from cp_engine.hosts.torchtitan.host import device_in_use

        if device_in_use() != device:
            what = f"is {launch['device']}, and torchtitan was imported for {device_in_use()} in this process"
            raise ConfigError([Problem(key="launch.device", what=what, tries=(f"launch.device={device_in_use()}",))])
        undo.callback(_leave_group)
        yield


def _writer(config: Mapping[str, object], finish: ExitStack) -> Callable[["StepReport"], None]:
    if os.environ["RANK"] != "0":
        return lambda report: None
    path = Path(str(section(config, "launch")["output_dir"])) / METRICS
    opened: list[TextIO] = []

    def write(report: "StepReport") -> None:
        if not opened:  # a run that continues in its own folder repeats the steps after its checkpoint
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            whole = (line for line in lines if line.endswith("\n"))  # a killed run may have left half a line
            kept = [line for line in whole if json.loads(line)["step"] < report.step]
            if kept != lines:  # as a new file, which tells the one that follows it
                path.with_suffix(".new").write_text("".join(kept), encoding="utf-8")
                path.with_suffix(".new").replace(path)
            opened.append(finish.enter_context(path.open("a", encoding="utf-8")))
        row = {name: value for name, value in asdict(report).items() if value is not None}  # most steps do not validate
        finite = {
            name: value if math.isfinite(value) else None for name, value in row.items()
        }  # JSON has no other numbers
        opened[0].write(json.dumps(finite) + "\n")
        opened[0].flush()  # the parent process follows this file

    return write


def _section_of(titan: dict[str, object], name: str) -> dict[str, object]:
    value = titan.setdefault(name, {})
    assert isinstance(value, dict), f"titan.{name} is a section"
    return value


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _restore_environment(before: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _log_to_file(undo: ExitStack, path: Path) -> None:
    # torchtitan logs to the root logger, and its own set-up would take the caller's handlers away
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    undo.callback(handler.close)
    undo.callback(root.setLevel, root.level)
    undo.callback(setattr, root, "handlers", root.handlers)
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    undo.callback(logging.captureWarnings, False)
    logging.captureWarnings(True)
