"""Which checkpoint a job continues from, and whether it can; nothing here imports torchtitan.

Decided once, before ranks start: torchtitan prefers whatever lies in the run's own folder to what was named.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cp_engine.errors import ConfigError, Problem
from cp_engine.hosts.torchtitan.checkpoint_files import (
    SAVING,
    metadata_of,
    require_safe,
    require_whole,
    step_of,
    steps_in,
)
from cp_engine.hosts.torchtitan.checkpoint_trust import Damaged, Unsafe
from cp_engine.job.checks.continued import of_another_job
from cp_engine.job.checks.keys import lookup, value_of

DUMP, INITIAL = "titan.job.dump_folder", "titan.checkpoint.initial_load_path"
EARLIER = ("rule", "an earlier run writes checkpoints with titan.checkpoint.enable=true")


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
    key, resume, base = "launch.resume", lookup(config, "launch.resume"), _run_folder(config, output_dir)
    folder, is_saving = str(value_of(config, "titan.checkpoint.folder")), value_of(config, "titan.checkpoint.enable")
    if value_of(config, "titan.checkpoint.create_seed_checkpoint") is True:
        return None
    search = _Search(digests=lookup(config, "launch.resume_check") != "sizes", is_read=_is_read(config))
    steps, load_step = steps_in(own := base / folder), value_of(config, "titan.checkpoint.load_step")
    if is_restart and (found := search.newest(steps, is_full=True)) is not None:
        return found
    if not isinstance(resume, str):
        if is_saving is not True or not (steps or _wanted(load_step)):
            weights, in_hf = lookup(config, INITIAL), value_of(config, "titan.checkpoint.initial_load_in_hf")
            if is_saving is True and isinstance(weights, str) and weights and in_hf is not True:
                search.require(Path(weights), INITIAL)
            return None
        key = "titan.checkpoint.load_step" if _wanted(load_step) else "titan.checkpoint.enable"
        resume = str(own / f"step-{load_step}" if _wanted(load_step) else base)
    found = search.chosen(resume, folder, key, own.resolve())
    if not is_restart:
        if steps:
            _refuse_mixing(found.path, own, steps, key, _elsewhere(config, output_dir))
        if problems := list(of_another_job(config, found.path)):
            raise ConfigError(problems)
    return found


def _run_folder(config: Mapping[str, object], output_dir: Path) -> Path:
    """Where torchtitan saves."""
    place = lookup(config, DUMP)
    return Path(place) if isinstance(place, str) and place else output_dir


def _elsewhere(config: Mapping[str, object], output_dir: Path) -> str:
    """What gives the run a folder that is new."""
    place = _run_folder(config, output_dir)
    free = next(new for n in itertools.count(2) if not (new := place.with_name(f"{place.name}-{n}")).exists())
    return f"{'hydra.run.dir' if place == output_dir else DUMP}={free}"


def _is_read(config: Mapping[str, object]) -> Callable[[str], bool]:
    """Which entries ranks may read, by name."""
    excluded = value_of(config, "titan.checkpoint.exclude_from_loading")
    left_out = set(excluded) if isinstance(excluded, list) else set()
    return lambda name: name.partition(".")[0] not in left_out


def _wanted(load_step: object) -> bool:
    return isinstance(load_step, int) and load_step >= 0


def _refuse_mixing(found: Path, own: Path, steps: Sequence[Path], key: str, elsewhere: str) -> None:
    """A run's folder holds the checkpoints of one run: the next resume would take the newest of them."""
    rule = ("rule", "a run's folder has the checkpoints of one run, of which the newest is continued")
    if found.parent != own.resolve():
        what = f"means {found}, and the run's folder has checkpoints of its own: {steps[-1]}"
    elif later := [step for step in steps if step_of(step) > step_of(found) and _is_whole(step)]:
        what = f"means {found}, and the run's folder has a later one, {later[-1].name}, which would be taken next time"
    else:
        return
    tries = (f"launch.resume={found} {elsewhere}", f"launch.resume={own.parent}")
    raise ConfigError([Problem(key=key, what=what, details=(rule,), tries=tries)])


def _is_whole(step: Path) -> bool:
    try:
        require_whole(step, digests=False)
    except (Damaged, Unsafe):
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """How checkpoints are read before ranks start.

    Args:
        digests: every byte; else only sizes are compared.
        is_read: of the name of an entry, whether ranks read it.
    """

    digests: bool
    is_read: Callable[[str], bool]

    def require(self, step: Path, key: str) -> bool:
        """Whether a checkpoint that is named by a key is sealed; refuses one that is damaged or not safe to read."""
        try:
            is_sealed = require_whole(step, digests=self.digests)
            require_safe(step, self.is_read)
        except (Damaged, Unsafe) as error:
            tries: tuple[str, ...] = ()
            if key == "launch.resume" and isinstance(error, Damaged):
                before = [s for s in steps_in(step.parent) if s != step and _is_whole(s) and _holds_training_state(s)]
                tries = tuple(f"launch.resume={s}" for s in before[-1:])
            what = f"{step} {error}" if isinstance(error, Damaged) else f"{step} is not safe to read: {error}"
            raise ConfigError([Problem(key=key, what=what, tries=tries)]) from error
        return is_sealed

    def newest(self, steps: Sequence[Path], key: str = "launch.resume", *, is_full: bool = False) -> Source | None:
        """The newest whole checkpoint, with what is said of those that were passed over; refuses one that is not safe to read.

        Args:
            steps: the oldest first.
            key: that says where they are.
            is_full: pass over weights alone, with which training only begins.
        """
        passed = []
        for step in reversed(steps):
            try:
                is_sealed = require_whole(step, digests=self.digests)
                require_safe(step, self.is_read)
                if is_full and step_of(step) > 0 and not _holds_training_state(step):
                    raise Damaged("holds weights only")
            except Damaged as error:
                passed.append(f"{step.name} {error}")
                continue
            except Unsafe as error:
                what = f"{step} is not safe to read: {error}"
                raise ConfigError([Problem(key=key, what=what)]) from error
            notes = [*passed, *(() if is_sealed else (f"{step.name} has no digests, so only sizes were compared",))]
            return Source(path=step.resolve(), note="; ".join(notes))
        return None

    def chosen(self, resume: str, folder: str, key: str = "launch.resume", own: Path | None = None) -> Source:
        """The checkpoint that `launch.resume` means: the one named, or the newest whole one of the run.

        Args:
            resume: output folder of an earlier run, or one of its `step-N` folders.
            folder: `titan.checkpoint.folder`.
            key: that says so.
            own: the folder of checkpoints of the run itself.

        Raises:
            ConfigError: there is none, it is damaged or not safe to read, or it holds only weights.
        """
        base = Path(resume)
        if not os.path.isdir(base):  # Path's own method raises for a name that is too long
            raise ConfigError([Problem(key=key, what=f"there is no folder {base}", details=(EARLIER,))])
        if step_of(base) >= 0:
            is_sealed = self.require(base, key)
            note = "" if is_sealed else "it has no digests, so only sizes were compared"
            found: Source | None = Source(path=base.resolve(), note=note)
        else:
            found = self.newest(steps_in(base / folder), key)
        if found is None:
            steps = steps_in(base / folder)
            what = f"no checkpoint in {base / folder}"
            if steps:
                what = f"no whole checkpoint in {base / folder}: {_damage(steps[-1])}"
            elif next((base / folder).glob(f"{SAVING}*"), None) is not None:
                what += ", only a save that was not finished"
            raise ConfigError([Problem(key=key, what=what, details=(EARLIER,))])
        is_begun = (
            step_of(found.path) == 0 and found.path.parent == own
        )  # a seed, of which torchtitan takes the weights
        if not is_begun and not _holds_training_state(found.path):
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
    problems, initial = list[Problem](), lookup(config, INITIAL)
    if isinstance(initial, str):
        what = f"{resume} and titan.checkpoint.initial_load_path={initial} both name what to load"
        tries = ("launch.resume=null", "~titan.checkpoint.initial_load_path")
        problems.append(Problem(key="launch.resume", what=what, tries=tries))
    try:
        search = _Search(digests=False, is_read=_is_read(config))
        found = search.chosen(resume, str(value_of(config, "titan.checkpoint.folder")))
    except ConfigError as error:
        return [*problems, *error.problems]
    return [*problems, *of_another_job(config, found.path)]


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
