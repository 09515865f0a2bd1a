"""What training asks of a job beside names and types, checked before any process starts, and said of a job that is only planned."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cp_engine.errors import Problem, numbered, suggest
from cp_engine.job.checks import reads
from cp_engine.job.checks.degrees import data_parallel, degrees, integer, world_size
from cp_engine.job.checks.keys import ABSENT, lookup, shape_row, shape_table, value_of

SIZES = ("batch", "sequence", "heads", "kv_heads", "head_dim", "v_head_dim")
LATENT_SIZES = ("latent_dim", "rope_dim", "index_heads", "index_dim", "topk")
"""Sizes that only multi-head latent attention has, and only one with an indexer."""

PATHS = re.compile(
    r"data\.path|datasets\.[\w-]+\.(path|tokenizer)|titan\.(validation\.dataset_path|parallelism\.pipeline_parallel_schedule_csv)"
)
"""What lies on one machine, and may lie elsewhere on another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Why a job would not train.

    Args:
        refused: faults of the job, on whatever machine.
        here: what this machine lacks for it: packages, folders, a device of the kind. How many devices it has is no part of this.
        hypothetical: keys of a call that is only planned, which the job would not make; nothing is said of these.
    """

    refused: tuple[Problem, ...] = ()
    here: tuple[Problem, ...] = ()
    hypothetical: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For a reader, below a plan; empty where the job would train."""
        told = (
            ("training", "would refuse this job", self.refused),
            ("here", "training would not start on this machine", self.here),
        )
        shown = [
            [f"{label:<10} {what}: {len(found)} problem{'s' * (len(found) != 1)}", *numbered(found)]
            for label, what, found in told
            if found
        ]
        return [line for block in shown for line in block]

    def data(self) -> dict[str, object]:
        """The same as plain data."""

        def plain(found: Sequence[Problem]) -> list[dict[str, object]]:
            return [{"key": p.key, "what": p.what, "details": dict(p.details), "tries": list(p.tries)} for p in found]

        return {"refused": plain(self.refused), "here": plain(self.here), "hypothetical": list(self.hypothetical)}


def of_training(config: Mapping[str, object], typed: Sequence[str] = (), *, is_planned: bool = False) -> Refusals:
    """What training would refuse of a configuration whose names, types and degrees are right.

    Args:
        config: the composed configuration.
        typed: overrides of the command line, which are to have an effect.
        is_planned: the job does not train now. `shape.*`, and a mask other than causal, then ask for a call that is only planned.

    Returns:
        What is wrong with the job, and what this machine lacks for it.
    """
    from cp_engine.hosts.torchtitan.text import sources  # here: these need torch, and `--help` does not
    from cp_engine.job.checks import here as torchtitan_here
    from cp_engine.job.checks import torchtitan

    hypothetical = tuple(_only_planned(config)) if is_planned else ()
    found = list(_world_problems(config))
    if not any(key.startswith("shape.") for key in hypothetical):
        found += [
            *_length_problems(config),
            *_watch_problems(config),
            *_model_problems(config),
            *shape_problems(config),
        ]
    if "mask" not in hypothetical:
        found += mask_problems(config)
    found += [*torchtitan.check(config), *sources.check(config), *reads.idle(config, typed)]
    devices, packages = list(torchtitan_here.device(config)), list(torchtitan_here.packages(config))
    is_chosen = value_of(config, "launch.device") != "auto"  # else it depends on the machine
    of_job = [p for p in found if not PATHS.fullmatch(p.key)] + devices * is_chosen
    of_machine = [p for p in found if PATHS.fullmatch(p.key)] + devices * (not is_chosen) + packages
    return Refusals(refused=tuple(of_job), here=tuple(of_machine), hypothetical=hypothetical)


def _only_planned(config: Mapping[str, object]) -> Iterator[str]:
    """What is chosen of a call that no job makes."""
    keys = (f"shape.{name}" for name in (*SIZES, *LATENT_SIZES, "dtype"))
    yield from (key for key in keys if value_of(config, key) is not None)
    if lookup(config, "mask.kind") != "causal" and any(mask_problems(config)):
        yield "mask"


def mask_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """A plan for another mask than the model's calls carry would be refused in the ranks."""
    flavor, attention = str(value_of(config, "titan.model.flavor")), shape_row(config).get("attention", "sdpa")
    kind, starts = lookup(config, "mask.kind"), lookup(config, "mask.starts")
    if attention == "sdpa" and kind != "causal":
        yield Problem(key="mask", what=f"is {kind}, and the model's attention is causal", tries=("mask=causal",))
    if attention != "sdpa" and (kind != "document" or starts not in (None, ABSENT)):
        what = f"is {kind}, and '{flavor}' attends with {attention}, whose calls bring a mask of each batch"
        rule = ("rule", "documents without starts are taken from each call")
        yield Problem(key="mask", what=what, details=(rule,), tries=("mask=document",))
        return
    for name, default in (("causal", True), ("left", None), ("right", None)) if attention != "sdpa" else ():
        if (value := lookup(config, f"mask.{name}")) not in (default, None, ABSENT):
            what = f"is {str(value).lower()}, and has no effect: each call of '{flavor}' brings its whole mask"
            yield Problem(key=f"mask.{name}", what=what, tries=(f"mask.{name}={'true' if default else 'null'}",))


def shape_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """`shape.*` describes a call that is only planned; a run makes the call of its model."""
    rule = ("rule", "shape.* is for explain and verify; a run attends as its model and titan.training say")
    instead = {"sequence": "titan.training.seq_len", "batch": "titan.training.local_batch_size"}
    for name in (*SIZES, *LATENT_SIZES, "dtype"):
        value = value_of(config, f"shape.{name}")
        if value is not None:
            meant = {**instead, "dtype": "titan.training.mixed_precision_param"}.get(name)
            tries = (f"shape.{name}=null", *((f"shape.{name}=null {meant}={value}",) if meant else ()))
            yield Problem(
                key=f"shape.{name}", what=f"is {value}, and has no effect on a run", details=(rule,), tries=tries
            )


def _world_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """The number of ranks is the product of the degrees; a free dp_shard takes what is left."""
    from cp_engine.config.reader import MOST_RANKS  # here: `--help` and `--cfg` need no schema

    ranks, factors = world_size(config), degrees(config)
    needed = math.prod(factors.values())
    free = integer(config, "titan.parallelism.data_parallel_shard_degree") < 0
    if ranks != needed and not (free and ranks % needed == 0):
        shown = " x ".join(f"{key.removeprefix('titan.parallelism.')} {value}" for key, value in factors.items())
        what = f"{ranks} is not {'a multiple of ' if free else ''}{needed} = {shown}"
        rule = (
            "rule",
            "launch.nproc = cp x tp x pp x dp_replicate x dp_shard; dp_shard -1 takes the ranks that are left",
        )
        yield Problem(
            key="launch.nproc", what=what, details=(rule,), tries=(f"launch.nproc={needed}", "launch.nproc=null")
        )
    elif ranks > MOST_RANKS:
        yield Problem(key="launch.nproc", what=f"is {ranks}, and a job has at most {MOST_RANKS} ranks")
    if lookup(config, "launch.inline") is True and ranks != 1:
        yield Problem(
            key="launch.inline",
            what=f"runs in this process, which is one rank, not {ranks}",
            tries=("launch.inline=false", "cp=none launch.nproc=1"),
        )


def _watch_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """A bound that torch's own timeout would come before, or that nothing can keep."""
    seconds, timeout = lookup(config, "launch.watch_seconds"), integer(config, "titan.comm.train_timeout_seconds")
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and not 1 <= seconds < timeout:
        what = f"is {seconds}, and must be at least 1 and below titan.comm.train_timeout_seconds, {timeout}"
        longer = (f"titan.comm.train_timeout_seconds={int(2 * seconds)}",) if timeout <= seconds < math.inf else ()
        yield Problem(key="launch.watch_seconds", what=what, tries=("launch.watch_seconds=null", *longer))


def _length_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """What torchtitan asserts in every rank, said before any starts."""
    factors = degrees(config)
    degree, tensor = factors["cp.mesh"], factors["titan.parallelism.tensor_parallel_degree"]
    length, step = integer(config, "titan.training.seq_len"), 2 * degree * tensor
    if length % step:
        near = [n for n in (length // step * step, (length // step + 1) * step) if n]
        yield Problem(
            key="titan.training.seq_len",
            what=f"{length} is not divisible by {step} = 2 x cp {degree} x tp {tensor}",
            details=(("rule", "torchtitan 0.2.2 asks for seq_len % (tp x 2 x cp) == 0, whatever the composition"),),
            tries=tuple(f"titan.training.seq_len={n}" for n in near),
        )
    batch = integer(config, "titan.training.local_batch_size")
    total = integer(config, "titan.training.global_batch_size")
    micro = integer(config, "titan.parallelism.pipeline_parallel_microbatch_size")
    if factors["titan.parallelism.pipeline_parallel_degree"] > 1 and (micro < 1 or batch % micro):
        key = "titan.parallelism.pipeline_parallel_microbatch_size"
        yield Problem(key=key, what=f"{micro} does not divide local_batch_size {batch}", tries=(f"{key}=1",))
    data = data_parallel(config)
    if total == 0 or (total > 0 and total % (batch * data)):
        yield Problem(
            key="titan.training.global_batch_size",
            what=f"{total} is not a multiple of {batch * data} = local_batch_size {batch} x dp {data}",
            tries=("titan.training.global_batch_size=-1",),
        )


def _model_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """A model whose calls are not known."""
    if not shape_row(config):
        yield unknown_model(str(value_of(config, "titan.model.name")), str(value_of(config, "titan.model.flavor")), [])


def unknown_model(name: str, flavor: str, missing: list[str]) -> Problem:
    """The problem of a model or flavor that the table of shapes does not have, with the sizes that would do in its place."""
    table = shape_table()
    key, word, allowed = ("name", name, table) if name not in table else ("flavor", flavor, table[name])
    near = suggest(word, allowed) or (next(iter(allowed), None) if key == "flavor" else None)
    return Problem(
        key=f"titan.model.{key}",
        what=f"'{word}' is not in the table of attention shapes",
        details=(("allowed", ", ".join(allowed)),),
        tries=(
            *((f"titan.model.{key}={near}",) if near else ()),
            *((" ".join(f"shape.{m}=..." for m in missing),) if missing else ()),
        ),
    )
