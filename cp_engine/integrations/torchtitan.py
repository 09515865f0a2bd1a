"""What a torchtitan 0.2.2 job may ask for; nothing here imports torchtitan, so the launcher can check it first."""

import re
from collections.abc import Mapping
from pathlib import Path

from cp_engine.errors import ConfigError, Problem
from cp_engine.schema import degree_of

STAND_INS = (  # (keys of titan.*, what decides instead, what to write)
    ("training.dataset", "the text is chosen by the data group", "data.path"),
    ("training.dataset_path", "the text is chosen by the data group", "data.path"),
    ("model.tokenizer_path", "text is read byte by byte, without a tokenizer file", "data.path"),
    ("job.config_file", "torchtitan's own argument parser does not run", "titan"),
    ("job.custom_config_module", "torchtitan's own argument parser does not run", "titan"),
    ("experimental.custom_args_module", "torchtitan's own argument parser does not run", "titan"),
)


def titan_value(config: Mapping[str, object], key: str, default: object = None) -> object:
    """One value below `titan`.

    Args:
        config: the whole composed configuration.
        key: dotted key below `titan`.
        default: torchtitan's default, for a key that is not written.

    Returns:
        What is written, else the default.
    """
    node: object = config.get("titan", {})
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def check(config: Mapping[str, object]) -> list[Problem]:
    """What of a job this integration cannot do, or would silently ignore.

    Args:
        config: the whole composed configuration.

    Returns:
        One problem per fault. Names, types and lengths of `titan.*` are checked in `cp_engine.job`.
    """
    cp = config["cp"]
    assert isinstance(cp, Mapping)
    degree = degree_of(cp)
    problems = []
    for key, reason, instead in STAND_INS:
        if titan_value(config, key) not in (None, ""):
            details = (("rule", f"{reason}; setting both could only be ignored"), ("see", instead))
            what = f"is {titan_value(config, key)!r}, and would have no effect"
            problems.append(Problem(key=f"titan.{key}", what=what, details=details, tries=(f"~titan.{key}",)))
    if titan_value(config, "model.hf_assets_path") is not None and not any(
        titan_value(config, f"checkpoint.{key}") for key in ("initial_load_in_hf", "last_save_in_hf")
    ):
        what = "names a tokenizer, and text is read byte by byte; it is used only with Hugging Face checkpoints"
        problems.append(Problem(key="titan.model.hf_assets_path", what=what, tries=("~titan.model.hf_assets_path",)))
    if degree > 1 and titan_value(config, "validation.enable"):
        what = f"torchtitan 0.2.2 would report a validation loss that is {degree} times too big at cp degree {degree}"
        problems.append(Problem(key="titan.validation.enable", what=what, tries=("titan.validation.enable=false",)))
    if titan_value(config, "comm.mode", "default") != "default":
        what = f"is {titan_value(config, 'comm.mode')!r}; the engine's collectives need real ranks"
        problems.append(Problem(key="titan.comm.mode", what=what, tries=("titan.comm.mode=default",)))
    components = titan_value(config, "compile.components", ["model", "loss"])
    if titan_value(config, "compile.enable") and isinstance(components, list) and "model" in components:
        what = "includes model; the engine calls its collectives directly, and torch.compile cannot trace them"
        tries = ("++titan.compile.components=[loss]", "titan.compile.enable=false")
        problems.append(Problem(key="titan.compile.components", what=what, tries=tries))
    problems += _check_resume(config)
    return problems


def _check_resume(config: Mapping[str, object]) -> list[Problem]:
    launch = config.get("launch", {})
    assert isinstance(launch, Mapping)
    resume = launch.get("resume")
    if resume is None:
        return []
    problems = []
    initial = titan_value(config, "checkpoint.initial_load_path")
    if initial is not None:
        what = f"{resume} and titan.checkpoint.initial_load_path={initial} both name what to load"
        problems.append(
            Problem(key="launch.resume", what=what, tries=("launch.resume=null", "~titan.checkpoint.initial_load_path"))
        )
    try:
        checkpoint_of(str(resume), str(titan_value(config, "checkpoint.folder", "checkpoint")))
    except ConfigError as error:
        problems += error.problems
    return problems


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
        else sorted((step for step in (base / folder).glob("step-*") if _is_checkpoint(step)), key=_step)
    )
    if not found:
        what = f"no checkpoint in {base / folder}" if base.is_dir() else f"there is no folder {base}"
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


def _is_checkpoint(folder: Path) -> bool:
    return _step(folder) >= 0 and (folder / ".metadata").is_file()


def _step(folder: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match.group(1)) if match else -1


def _holds_training_state(folder: Path) -> bool:
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # here: most jobs resume from nothing

    return any(name.startswith("train_state") for name in FileSystemReader(folder).read_metadata().state_dict_metadata)
