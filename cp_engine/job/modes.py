"""What one composed job does: train, explain, verify or translate."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.types import RunMode
from omegaconf import DictConfig

from cp_engine.config.compose import plain
from cp_engine.errors import ConfigError, CPError, Problem
from cp_engine.job.checks import hydra_keys
from cp_engine.job.checks.keys import lookup
from cp_engine.job.checks.paths import from_where_typed
from cp_engine.job.checks.trust import settled, typed_in
from cp_engine.runtime.devices import operators_of, resolve

if TYPE_CHECKING:
    from hydra.conf import HydraConf

    from cp_engine.job.checks.training import Refusals
    from cp_engine.job.launch.join import Group
    from cp_engine.job.toml.translation import Translation
    from cp_engine.plan.ir import Plan

# The rest is imported where it is used: planning needs no torchtitan and no process group.


def run_job(
    composed: DictConfig, hydra: "HydraConf", group: "Group | None", translation: "Translation | None" = None
) -> bool:
    """One job: check everything, then do what `mode` says.

    Args:
        composed: Hydra's result.
        hydra: its own configuration, with the job's folder and the folder in which the command was typed.
        group: the ranks that exist already; None to start new ones.
        translation: of the TOML that the command line names.

    Returns:
        False if verify found a difference; it has shown where.

    Raises:
        CPError: with every problem of the configuration, or what verify found.
        RankFailure: a rank ended the run.
    """
    output_dir, wrong = Path(hydra.runtime.output_dir), list(hydra_keys.problems(cast(DictConfig, hydra)))
    typed = typed_in(hydra)
    config = settled(from_where_typed(plain(composed), Path(hydra.runtime.cwd)), typed)
    if config.get("toml") is not None and translation is None:
        what, rule = (
            f"is {config['toml']}, and was not translated",
            ("rule", "a TOML is named on the command line, as toml=FILE"),
        )
        raise ConfigError([Problem(key="toml", what=what, details=(rule,), tries=("toml=FILE",))])
    for name, was in translation.flags.items() if translation is not None else ():
        key = f"translate.{name}"
        if (value := lookup(config, key)) != was:
            what, rule = f"is {value}, and the file was translated with {was}", ("rule", "it is typed beside toml=")
            shown = f"[{','.join(value)}]" if isinstance(value, list) else str(value).lower()
            raise ConfigError([Problem(key=key, what=what, details=(rule,), tries=(f"{key}={shown}",))])
    if config.get("mode") == "translate":
        from cp_engine.job.toml import mode as translate_mode

        if wrong:
            raise ConfigError(wrong)
        translate_mode.run(config, translation, lambda: _refusals(config, typed))
        return True
    if group is not None and config.get("mode") == "train":
        config = group.adopt(config)
    if config.get("mode") == "train":
        wrong += _of_a_sweep(hydra, config)
    plan = planned(config, typed, wrong)
    if config["mode"] == "verify":
        _show(translation, config)
        return _verify(plan, config, output_dir)
    _explain(plan, config, translation, typed)
    if config["mode"] == "train":
        _train(config, output_dir, group)
    return True


def _of_a_sweep(hydra: "HydraConf", config: Mapping[str, object]) -> list[Problem]:
    """Jobs of a sweep that runs here would each wait for the other nodes; those that a launcher submits have nodes of their own."""
    kind, launcher = lookup(config, "launch.kind"), hydra.runtime.choices.get("hydra/launcher")
    if hydra.mode != RunMode.MULTIRUN or kind not in ("torchrun", "slurm") or launcher != "basic":
        return []
    tries = ("hydra/launcher=submitit_slurm",) if kind == "slurm" else ("launch=local",)
    return [Problem(key="-m", what=f"starts one job after the other, and launch={kind} one on all nodes", tries=tries)]


def planned(config: Mapping[str, object], typed: Sequence[str] = (), wrong: Sequence[Problem] = ()) -> "Plan":
    """The proved plan of a configuration.

    Args:
        config: as plain containers.
        typed: overrides of the command line.
        wrong: what is wrong outside the configuration.

    Raises:
        CPError: every problem of all parts of the configuration together.
    """
    from cp_engine.config.composition import plan_from_config
    from cp_engine.job.checks import job

    found = [*wrong, *job.problems(config, typed)]
    try:
        shape = job.shape_of(config)
    except (ConfigError, ValueError, ArithmeticError) as error:  # of a wrong type or 0: `found` has it
        if found:
            raise ConfigError(found) from error
        raise
    cp, mask = config.get("cp"), config.get("mask")
    try:
        plan = plan_from_config(
            cp if isinstance(cp, Mapping) else {}, shape=shape, mask=mask if isinstance(mask, Mapping) else str(mask)
        )
    except CPError as error:
        if not found:
            raise
        known = {problem.key for problem in found}  # and a shape that follows from a wrong key is not a second fault
        more = [p for p in error.problems if p.key not in known and not p.key.startswith("shape.")]
        raise ConfigError([*found, *more], error.source) from error
    if found:
        raise ConfigError(found)
    return plan


def _show(translation: "Translation | None", config: Mapping[str, object]) -> None:
    """What a TOML asks for, of how many ranks, and what a run can do without."""
    from cp_engine.job.checks import degrees
    from cp_engine.job.checks.module_needs import notes
    from cp_engine.job.toml import experiment

    if translation is not None:
        print(experiment.summary(translation), f"ranks      {degrees.ranks_text(config)}", sep="\n")
    said = [*notes(config)]
    print(*(f"{'' if i else 'note':<10} {line}\n" for i, line in enumerate(said)), sep="", end="")
    if translation is not None or said:
        print(flush=True)


def _refusals(config: Mapping[str, object], typed: Sequence[str]) -> "Refusals":
    """What training would refuse of a configuration that is only translated, its plan included."""
    from cp_engine.job.checks import job
    from cp_engine.job.checks.training import Refusals, of_training

    train, refusals = job.as_training(config), Refusals()
    try:
        if not job.first_problems(train):
            refusals = of_training(train, typed)
        planned(train, typed)
    except CPError as error:
        others = (p for p in error.problems if p not in (*refusals.refused, *refusals.here))
        return replace(refusals, refused=(*refusals.refused, *others))
    return refusals


def _explain(
    plan: "Plan", config: Mapping[str, object], translation: "Translation | None", typed: Sequence[str]
) -> None:
    from cp_engine.job import explain
    from cp_engine.job.checks.training import of_training

    settings, device, is_planned = config["explain"], _device(config), config["mode"] == "explain"
    assert isinstance(settings, Mapping)
    with operators_of(device):
        if is_planned and settings["format"] == "json":
            refusals = of_training(config, typed, is_planned=True)
            print(json.dumps({**explain.data(plan, device=device), "training": refusals.data()}, indent=2))
            return
        _show(translation, config)
        print(explain.text(plan, device=device), flush=True)
    told = of_training(config, typed, is_planned=True).lines() if is_planned else []
    if told:
        print("", *told, sep="\n", flush=True)


def _device(config: Mapping[str, object]) -> str:
    """Whose kernels a plan names; unlike a run, a plan may have more ranks than this machine has GPUs."""
    settings = config["launch"]
    assert isinstance(settings, Mapping)
    return resolve("auto", 1) if settings["device"] == "auto" else str(settings["device"])


def _verify(plan: "Plan", config: dict[str, object], output_dir: Path) -> bool:
    from cp_engine.job.checks.job import needs_ranks

    if not needs_ranks(config):
        from cp_engine.job.verify import attention_mode

        return attention_mode.run(config, plan, output_dir)
    if "RANK" in os.environ:
        rule = ("rule", "this comparison starts ranks of its own, for two runs")
        problem = Problem(
            key="RANK", what="is in the environment", details=(rule,), tries=("env -u RANK python launch.py",)
        )
        raise ConfigError([problem])
    from cp_engine.job.verify import training_mode

    settings = config["launch"]
    assert isinstance(settings, Mapping)
    return training_mode.run({**config, "launch": {**settings, "output_dir": str(output_dir)}})


def _train(config: dict[str, object], output_dir: Path, group: "Group | None") -> None:
    from cp_engine.job import training
    from cp_engine.job.checks import nodes
    from cp_engine.job.launch.start import check_environment

    if group is not None:
        group.lead(config, output_dir, sys.stdout)
        return
    if nodes.is_met(config):
        from cp_engine.job.launch import node

        node.launch(training.train, config, output_dir, out=sys.stdout)
        return
    check_environment()
    training.launch(config, output_dir, out=sys.stdout)
