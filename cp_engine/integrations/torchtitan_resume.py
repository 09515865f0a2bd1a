"""`launch.resume`: which checkpoint it means, and whether the job can continue from it; nothing here imports torchtitan."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cp_engine import world
from cp_engine.bounded import yaml_of
from cp_engine.errors import ConfigError, Problem
from cp_engine.integrations.toml_rules import shipped_rules
from cp_engine.keys import ABSENT, lookup, value_of

OF_MODEL = {"titan.model.name": "model", "titan.model.flavor": "titan.model.flavor"}
"""What decides a checkpoint's parameters, and how it is chosen."""
CONVERTERS = "titan.model.converters"
OF_TEXT = ("data.dataset", "data.path", "data.field")
DATA = re.compile(r"dataloader\.dp_rank_(\d+)")
"""The place in the data of one data-parallel rank."""
SAVED, STARTED = Path(".hydra", "config.yaml"), Path(".hydra", "hydra.yaml")
"""What a run was told, in its folder, and how it was started."""


def check(config: Mapping[str, object]) -> list[Problem]:
    """Why the job cannot continue from what `launch.resume` names.

    Args:
        config: the whole composed configuration.

    Returns:
        One problem per fault; none without `launch.resume`.
    """
    resume = lookup(config, "launch.resume")
    if not isinstance(resume, str):
        return []
    problems, initial = list[Problem](), lookup(config, "titan.checkpoint.initial_load_path")
    if isinstance(initial, str):
        what = f"{resume} and titan.checkpoint.initial_load_path={initial} both name what to load"
        tries = ("launch.resume=null", "~titan.checkpoint.initial_load_path")
        problems.append(Problem(key="launch.resume", what=what, tries=tries))
    try:
        found = checkpoint_of(resume, str(value_of(config, "titan.checkpoint.folder")))
    except ConfigError as error:
        return [*problems, *error.problems]
    return [*problems, *_of_another_job(config, found)]


def _of_another_job(config: Mapping[str, object], checkpoint: Path) -> Iterator[Problem]:
    """What every rank would find out for itself, after the start."""
    step, steps = _step(checkpoint), value_of(config, "titan.training.steps")
    if isinstance(steps, int) and step >= steps:
        what = f"is {steps}, and {checkpoint} is at step {step}"
        yield Problem(key="titan.training.steps", what=what, tries=(f"titan.training.steps={step + 10}",))
    ranks = sum(DATA.fullmatch(name) is not None for name in _names(checkpoint))
    if ranks and ranks != (wanted := world.data_parallel(config)):
        what = f"is {wanted} data-parallel ranks, and {checkpoint} has the place in the data of {ranks}"
        key, copies = "titan.parallelism.data_parallel_shard_degree", "titan.parallelism.data_parallel_replicate_degree"
        shards, rest = divmod(ranks, int(str(value_of(config, copies))))
        tries = (f"{key}={shards}",) if not rest else (f"{key}={ranks} {copies}=1",)
        yield Problem(key=key if not rest else copies, what=what, tries=tries)
    run = next((folder for folder in checkpoint.parents if (folder / SAVED).is_file()), None)
    if run is not None:
        yield from _told_otherwise(config, checkpoint, run)


def _told_otherwise(config: Mapping[str, object], checkpoint: Path, run: Path) -> Iterator[Problem]:
    """What decides a checkpoint's parameters or its place in the text, and was something else in the run that wrote it."""
    told = _saved(run / SAVED)
    try:
        then = {key: OmegaConf.select(told, key) for key in (*OF_MODEL, CONVERTERS, *OF_TEXT)}
    except OmegaConfBaseException as error:
        what = f"cannot be compared with this job: {run / SAVED}: {str(error).splitlines()[0]}"
        yield Problem(key="launch.resume", what=what)
        return
    for key, option in OF_MODEL.items():
        before, now = then[key], value_of(config, key)
        if isinstance(before, str) and before != now:
            yield Problem(key=key, what=f"is {now}, and {checkpoint} is of {before}", tries=(f"{option}={before}",))
    old, new = _list(then[CONVERTERS]), _list(value_of(config, CONVERTERS))
    for name, row in shipped_rules().npu_converters.items():
        if row.get("renames") and (name in old) != (name in new):
            has, had = "has" if name in new else "lacks", "with" if name in old else "without"
            what = f"{has} {name}, which renames parameters, and {checkpoint} is of a run {had} it"
            yield Problem(key=CONVERTERS, what=what, tries=(f"'{CONVERTERS}=[{','.join(old)}]'",))
    for key in OF_TEXT if "data" in told else ():
        before, now = then[key], lookup(config, key)
        if key == "data.path" and isinstance(before, str) and (place := (_folder_of(run) / before).resolve()).exists():
            # where it does not exist the run's folders have moved, and what was typed is all that is known
            before, now = str(place), str(Path(now).resolve()) if isinstance(now, str) else now
        if now is not ABSENT and before != now:
            what = f"is {now or 'null'}, and {checkpoint} holds a place in the text of {before or 'null'}"
            weights = f"launch.resume=null titan.checkpoint.enable=true titan.checkpoint.initial_load_path={checkpoint}"
            yield Problem(key=key, what=what, tries=(f"{key}={before or 'null'}", weights))


def _list(x: object) -> list[str]:
    return [str(item) for item in x] if isinstance(x, Sequence) and not isinstance(x, str) else []


def _folder_of(run: Path) -> Path:
    """The folder in which a run was started."""
    file = run / STARTED
    found = OmegaConf.select(_saved(file), "hydra.runtime.cwd") if file.is_file() else None
    return Path(found) if isinstance(found, str) else Path.cwd()


def _saved(file: Path) -> DictConfig:
    """What a run left in its folder; raises ConfigError where that is no configuration."""
    tree = yaml_of(file)
    return OmegaConf.create(tree if isinstance(tree, dict) else {})


def checkpoint_of(resume: str, folder: str) -> Path:
    """The checkpoint that `launch.resume` means.

    Args:
        resume: output folder of an earlier run, or one of its `step-N` folders.
        folder: `titan.checkpoint.folder`.

    Returns:
        The `step-N` folder: the one named, or the newest of the run.

    Raises:
        ConfigError: there is none, or it holds only weights.
    """
    base = Path(resume)
    found = (
        [base]
        if _is_checkpoint(base)
        else sorted((step for step in _inside(base / folder) if _is_checkpoint(step)), key=_step)
    )
    if not found:
        what = f"no checkpoint in {base / folder}" if os.path.isdir(base) else f"there is no folder {base}"
        rule = "an earlier run writes checkpoints with titan.checkpoint.enable=true"
        raise ConfigError([Problem(key="launch.resume", what=what, details=(("rule", rule),))])
    full = [step for step in found if _holds_training_state(step)]
    if found[-1] not in full:
        what = f"{found[-1]} holds weights only: no optimizer, no step, no place in the data"
        rule = "the last step of a run is saved whole with titan.checkpoint.last_save_model_only=false"
        tries = (
            *(f"launch.resume={step}" for step in full[-1:]),
            f"titan.checkpoint.enable=true titan.checkpoint.initial_load_path={found[-1]}",
        )
        raise ConfigError([Problem(key="launch.resume", what=what, details=(("rule", rule),), tries=tries)])
    return found[-1].resolve()


def _inside(folder: Path) -> list[Path]:
    return list(folder.glob("step-*")) if os.path.isdir(folder) else []


def _is_checkpoint(folder: Path) -> bool:
    return _step(folder) >= 0 and os.path.isfile(folder / ".metadata")


def _step(folder: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match.group(1)) if match else -1


def _holds_training_state(folder: Path) -> bool:
    return any(name.startswith("train_state") for name in _names(folder))


def _names(folder: Path) -> list[str]:
    """Of everything that a checkpoint holds."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # here: most jobs resume from nothing

    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)
