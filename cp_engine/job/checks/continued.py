"""Whether a job is the one that a checkpoint is of; nothing here imports torchtitan."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cp_engine.config.bounded import yaml_of
from cp_engine.errors import Problem
from cp_engine.hosts.torchtitan.checkpoint_files import metadata_of, step_of
from cp_engine.hosts.torchtitan.checkpoint_trust import DATA
from cp_engine.job.checks import degrees
from cp_engine.job.checks.keys import ABSENT, lookup, value_of
from cp_engine.job.checks.rules import shipped_rules

OF_MODEL = {"titan.model.name": "model", "titan.model.flavor": "titan.model.flavor"}
"""What decides a checkpoint's parameters, and how it is chosen."""
CONVERTERS = "titan.model.converters"
OF_TEXT = ("data.dataset", "data.path", "data.field")
SAVED, STARTED = Path(".hydra", "config.yaml"), Path(".hydra", "hydra.yaml")
"""What a run was told, in its folder, and how it was started."""


def of_another_job(config: Mapping[str, object], checkpoint: Path) -> Iterator[Problem]:
    """What every rank would find out for itself, after the start.

    Args:
        config: the whole composed configuration.
        checkpoint: of one step, whole.
    """
    step, steps = step_of(checkpoint), value_of(config, "titan.training.steps")
    if isinstance(steps, int) and step >= steps:
        what = f"is {steps}, and {checkpoint} is at step {step}"
        yield Problem(key="titan.training.steps", what=what, tries=(f"titan.training.steps={step + 10}",))
    ranks = sum(DATA.fullmatch(name) is not None for name in metadata_of(checkpoint).state_dict_metadata)
    if ranks and ranks != (wanted := degrees.data_parallel(config)):
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
