"""Which checkpoint a job continues from, and whether it can; nothing here imports torchtitan.

Decided once, before ranks start: torchtitan prefers whatever lies in the run's own folder to what was named.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cp_engine import world
from cp_engine.bounded import yaml_of
from cp_engine.errors import ConfigError, Problem
from cp_engine.integrations.checkpoint_files import (
    SAVING,
    Damaged,
    Unsafe,
    metadata_of,
    require_safe,
    require_whole,
    step_of,
    steps_in,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a job continues from.

    Args:
        path: a `step-N` folder, absolute.
        note: what a reader should know of the choice.
    """

    path: Path
    note: str = ""

    def line(self) -> str:
        """The line before the steps of a run that continues."""
        return f"step {step_of(self.path)} of {self.path.parent}" + (f"  ({self.note})" if self.note else "")


def source_of(config: Mapping[str, object], output_dir: Path, *, is_restart: bool = False) -> Source | None:
    """Decides what a job continues from, and reads as much of it as `launch.resume_check` says.

    Args:
        config: the whole composed configuration.
        output_dir: the job's folder.
        is_restart: the same run goes on after a rank ended it: its own newest checkpoint counts, if it has one.

    Returns:
        None where training begins anew, or from weights that torchtitan finds.

    Raises:
        ConfigError: nothing can be continued from what is named, or another checkpoint would be in the way.
    """
    key, resume, own = (
        "launch.resume",
        lookup(config, "launch.resume"),
        output_dir / str(value_of(config, "titan.checkpoint.folder")),
    )
    digests = lookup(config, "launch.resume_check") != "sizes"
    steps = steps_in(own)
    weights = lookup(config, "titan.checkpoint.initial_load_path")
    if isinstance(weights, str) and value_of(config, "titan.checkpoint.initial_load_in_hf") is not True:
        _read(Path(weights), "titan.checkpoint.initial_load_path", digests)
    if is_restart and (found := _newest(steps, digests)) is not None:
        return found
    if not isinstance(resume, str):
        load_step = value_of(config, "titan.checkpoint.load_step")
        if value_of(config, "titan.checkpoint.enable") is not True or not (steps or _wanted(load_step)):
            return None
        key = "titan.checkpoint.load_step" if _wanted(load_step) else "titan.checkpoint.enable"
        resume = str(own / f"step-{load_step}" if _wanted(load_step) else output_dir)
    found = _chosen(resume, str(value_of(config, "titan.checkpoint.folder")), digests, key)
    if not is_restart and steps:
        _refuse_mixing(found.path, own, steps, key)
    return found


def _wanted(load_step: object) -> bool:
    return isinstance(load_step, int) and load_step >= 0


def _refuse_mixing(found: Path, own: Path, steps: Sequence[Path], key: str) -> None:
    """A run's folder holds the checkpoints of one run: the next resume would take the newest of them."""
    rule = ("rule", "a run's folder has the checkpoints of one run, of which the newest is continued")
    if found.parent != own.resolve():
        what = f"means {found}, and the run's folder has checkpoints of its own: {steps[-1]}"
    elif later := [step for step in steps if step_of(step) > step_of(found) and _is_whole(step)]:
        what = f"means {found}, and the run's folder has a later one, {later[-1].name}, which would be taken next time"
    else:
        return
    tries = (f"launch.resume={found} hydra.run.dir=...", f"launch.resume={own.parent}")
    raise ConfigError([Problem(key=key, what=what, details=(rule,), tries=tries)])


def _is_whole(step: Path) -> bool:
    try:
        require_whole(step, digests=False)
    except (Damaged, Unsafe):
        return False
    return True


def _read(step: Path, key: str, digests: bool) -> bool:
    """Whether a checkpoint that is named by a key is sealed; refuses one that is damaged or not safe to read."""
    try:
        is_sealed = require_whole(step, digests=digests)
        require_safe(step)
    except (Damaged, Unsafe) as error:
        tries: tuple[str, ...] = ()
        if key == "launch.resume" and isinstance(error, Damaged):
            before = [s for s in steps_in(step.parent) if s != step and _is_whole(s) and _holds_training_state(s)]
            tries = tuple(f"launch.resume={s}" for s in before[-1:])
        what = f"{step} {error}" if isinstance(error, Damaged) else f"{step} is not safe to read: {error}"
        raise ConfigError([Problem(key=key, what=what, tries=tries)]) from error
    return is_sealed


def _newest(steps: Sequence[Path], digests: bool, key: str = "launch.resume") -> Source | None:
    """The newest whole checkpoint, with what is said of those that were passed over; refuses one that is not safe to read."""
    passed = []
    for step in reversed(steps):
        try:
            is_sealed = require_whole(step, digests=digests)
            require_safe(step)
        except Damaged as error:
            passed.append(f"{step.name} {error}")
            continue
        except Unsafe as error:
            what = f"{step} is not safe to read: {error}"
            raise ConfigError([Problem(key=key, what=what)]) from error
        notes = [*passed, *(() if is_sealed else (f"{step.name} has no digests, so only sizes were compared",))]
        return Source(path=step.resolve(), note="; ".join(notes))
    return None


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
        found = _chosen(resume, str(value_of(config, "titan.checkpoint.folder")), digests=False)
    except ConfigError as error:
        return [*problems, *error.problems]
    return [*problems, *_of_another_job(config, found.path)]


def _of_another_job(config: Mapping[str, object], checkpoint: Path) -> Iterator[Problem]:
    """What every rank would find out for itself, after the start."""
    step, steps = step_of(checkpoint), value_of(config, "titan.training.steps")
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


def _chosen(resume: str, folder: str, digests: bool, key: str = "launch.resume") -> Source:
    """The checkpoint that `launch.resume` means: the one named, or the newest whole one of the run.

    Args:
        resume: output folder of an earlier run, or one of its `step-N` folders.
        folder: `titan.checkpoint.folder`.
        digests: read every byte.
        key: that says so.

    Raises:
        ConfigError: there is none, it is damaged or not safe to read, or it holds only weights.
    """
    base = Path(resume)
    if step_of(base) >= 0 and base.is_dir():
        is_sealed = _read(base, key, digests)
        note = "" if is_sealed else "it has no digests, so only sizes were compared"
        found: Source | None = Source(path=base.resolve(), note=note)
    else:
        found = _newest(steps_in(base / folder), digests, key)
    if found is None:
        steps = steps_in(base / folder)
        what = f"no checkpoint in {base / folder}" if base.is_dir() else f"there is no folder {base}"
        if steps:
            what = f"no whole checkpoint in {base / folder}: {_damage(steps[-1])}"
        elif next((base / folder).glob(f"{SAVING}*"), None) is not None:
            what += ", only a save that was not finished"
        rule = "an earlier run writes checkpoints with titan.checkpoint.enable=true"
        raise ConfigError([Problem(key=key, what=what, details=(("rule", rule),))])
    if not _holds_training_state(found.path):
        others = [
            s for s in steps_in(found.path.parent) if s != found.path and _is_whole(s) and _holds_training_state(s)
        ]
        what = f"{found.path} holds weights only: no optimizer, no step, no place in the data"
        rule = "the last step of a run is saved whole with titan.checkpoint.last_save_model_only=false"
        tries = (
            *(f"launch.resume={step}" for step in others[-1:]),
            f"titan.checkpoint.enable=true titan.checkpoint.initial_load_path={found.path}",
        )
        raise ConfigError([Problem(key=key, what=what, details=(("rule", rule),), tries=tries)])
    return found


def _damage(step: Path) -> str:
    try:
        require_whole(step, digests=True)
    except (Damaged, Unsafe) as error:
        return f"{step.name} {error}"
    return step.name


def _holds_training_state(folder: Path) -> bool:
    return any(name.startswith("train_state") for name in _names(folder))


def _names(folder: Path) -> list[str]:
    """Of everything that a checkpoint holds."""
    return list(metadata_of(folder).state_dict_metadata)
