"""Pipeline stages of a torchtitan job: the schedule, and which layers each stage gets; every stage needs attention to attach to."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from cp_engine.errors import Problem, suggest
from cp_engine.job.checks.keys import shape_row, value_of

PARALLELISM = "titan.parallelism."
DEGREE, SCHEDULE = f"{PARALLELISM}pipeline_parallel_degree", f"{PARALLELISM}pipeline_parallel_schedule"
SINGLE = ("1F1B", "GPipe")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""torch's schedules with one stage on a rank, and with several; names in any case."""
IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
TWO_STAGES = ("ZBVZeroBubble", "DualPipeV")


def check(config: Mapping[str, object]) -> Iterator[Problem]:
    """What torchtitan or torch would refuse in every rank of a pipeline.

    Args:
        config: the whole composed configuration.
    """
    ranks = _number(config, DEGREE)
    if ranks < 2:
        return
    if shape_row(config).get("pipeline") is False:
        what = f"is {ranks}, and torchtitan 0.2.2 has no pipeline stages for {value_of(config, 'titan.model.name')}"
        yield Problem(key=DEGREE, what=what, tries=(f"{DEGREE}=1",))
        return
    key, file = f"{SCHEDULE}_csv", value_of(config, f"{SCHEDULE}_csv")
    if file and not os.path.isfile(str(file)):
        yield Problem(key=key, what=f"there is no file {file}, from {Path.cwd()}", tries=(f"{key}=''",))
    written = str(value_of(config, SCHEDULE))
    names = {name.lower(): name for name in (*SINGLE, *LOOPED)}
    if written.lower() not in names:
        near = names.get(str(suggest(written.lower(), names)), SINGLE[0])
        details = (("allowed", ", ".join(names.values())),)
        yield Problem(key=SCHEDULE, what=f"'{written}' is no schedule", details=details, tries=(f"{SCHEDULE}={near}",))
        return
    name = names[written.lower()]
    yield from _batch_problems(config, name, ranks)
    yield from _layer_problems(config, name, ranks)


def _batch_problems(config: Mapping[str, object], name: str, ranks: int) -> Iterator[Problem]:
    """Schedules that take a multiple of some number of micro batches, or more than so many."""
    size = max(1, _number(config, f"{PARALLELISM}pipeline_parallel_microbatch_size"))
    key, batch = "titan.training.local_batch_size", _number(config, "titan.training.local_batch_size")
    pieces = batch // size
    rounds = max(1, pieces // ranks)
    if name in IN_ROUNDS and pieces % rounds:
        what = f"is {batch}, {pieces} micro batches, and {name} takes a multiple of {rounds} on {ranks} ranks"
        yield Problem(key=key, what=what, tries=(f"{key}={pieces // rounds * rounds * size}",))
    if name == "DualPipeV" and pieces < 2 * ranks:
        what = f"is {batch}, {pieces} micro batches, and {name} takes {2 * ranks} or more on {ranks} ranks"
        yield Problem(key=key, what=what, tries=(f"{key}={2 * ranks * size}",))
    spread, recomputed = _number(config, f"{PARALLELISM}expert_parallel_degree"), "titan.activation_checkpoint.mode"
    overlaps = value_of(config, f"{PARALLELISM}pipeline_parallel_expert_parallel_overlap") is True
    if name == "DualPipeV" and overlaps and spread > 1 and value_of(config, recomputed) != "none":
        what = f"is {value_of(config, recomputed)}, and {name} with experts spread over ranks takes none"
        yield Problem(key=recomputed, what=what, tries=(f"{recomputed}=none",))


def _layer_problems(config: Mapping[str, object], name: str, ranks: int) -> Iterator[Problem]:
    """As many stages as the schedule takes, each with a layer."""
    layers, written = shape_row(config).get("layers"), value_of(config, f"{PARALLELISM}module_fqns_per_model_part")
    on_rank, key = (1 if name in SINGLE else 2), DEGREE
    if not isinstance(layers, int):
        return
    first, last = (
        _number(config, f"{PARALLELISM}pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")
    )
    per_stage = value_of(config, f"{PARALLELISM}pipeline_parallel_layers_per_stage")
    if isinstance(per_stage, int):
        key = f"{PARALLELISM}pipeline_parallel_layers_per_stage"
        stages = -(-(layers + first + last) // per_stage) if per_stage > 0 else 0
        fits = stages == ranks if name in SINGLE else stages and stages % ranks == 0 and stages // ranks >= 2
        if name in TWO_STAGES:
            fits = stages == 2 * ranks
        if not fits:
            what = f"is {per_stage}, which makes {stages} stages of {layers} layers on {ranks} ranks"
            rule = ("rule", f"{name} has {'one stage' if name in SINGLE else 'two stages or more'} on each rank")
            yield Problem(key=key, what=what, details=(rule,), tries=(f"{key}=null",))
            return
        on_rank = stages // ranks
    if isinstance(written, list):
        key = f"{PARALLELISM}module_fqns_per_model_part"
        held = [sum(str(module).startswith("layers.") for module in part) for part in written]
        if len(held) != on_rank * ranks:
            what = f"lists {len(held)} parts, and {name} on {ranks} ranks takes {on_rank * ranks}"
            yield Problem(key=key, what=what, tries=(f"{key}=null",))
            return
    else:
        held = layers_of_stages(on_rank * ranks, layers, first, last)
    if not all(held):
        what = f"leaves {held.count(0)} of {len(held)} stages without a layer: {layers} layers, {held} in each"
        rule = (
            "rule",
            "embedding and output take the place of pipeline_parallel_first_stage_less_layers and .._last_.. layers",
        )
        tries = (
            (f"{key}=null",)
            if key != DEGREE
            else tuple(
                f"{DEGREE}={n}"
                for n in range(ranks - 1, 0, -1)
                if n == 1 or all(layers_of_stages(on_rank * n, layers, first, last))
            )[:1]
        )
        yield Problem(key=key, what=what, details=(rule,), tries=tries)


def layers_of_stages(stages: int, layers: int, first: int, last: int) -> list[int]:
    """How many layers torchtitan gives to each stage.

    Args:
        stages: of the whole pipeline.
        layers: of the model.
        first: layers that the embedding counts for.
        last: layers that norm and output count for.

    Returns:
        A number for each stage; what is not left to be given is missing, so that a stage may have none.
    """
    if stages == 1:
        return [layers]
    each, more = divmod(layers + first + last, stages)
    shares = [each + (stage < more) for stage in range(stages)]
    shares[0], shares[-1], left, held = shares[0] - first, shares[-1] - last, layers, []
    for share in shares:
        held.append(max(0, min(share, left)))
        left -= held[-1]
    return held


def _number(config: Mapping[str, object], key: str) -> int:
    return int(str(value_of(config, key)))
