"""Checks of the composed configuration, all but `cp.*`, before any process starts."""

import math
from collections.abc import Iterator, Mapping

from cp_engine import devices, versions
from cp_engine.errors import ConfigError, Problem, suggest
from cp_engine.keys import ABSENT, key_problems, lookup, shape_row, shape_table, value_of
from cp_engine.shape import Shape
from cp_engine.world import data_parallel, degree_in, degrees, integer, world_size

# torchtitan keys that would have no effect beside a composition -> what to set instead.
REPLACED: Mapping[str, str] = {
    "titan.parallelism.context_parallel_load_balancer": "layout@cp.layout=zigzag",
    "titan.parallelism.context_parallel_rotate_method": "cp=<preset>",
}


def check(config: Mapping[str, object]) -> None:
    """Refuses a configuration that cannot run.

    Args:
        config: the composed configuration, resolved to plain containers.

    Raises:
        ConfigError: with all problems outside `cp.*`.
    """
    found = problems(config)
    if found:
        raise ConfigError(found)


def problems(config: Mapping[str, object]) -> list[Problem]:
    """Everything wrong outside `cp.*`: names and types first, then how the values fit together."""
    found = [*key_problems(config), *_replaced_problems(config)]
    if found:
        return found
    found = [*_degree_problems(config), *_head_problems(config), *_verify_problems(config)]
    if found or not needs_ranks(config):
        return found
    if found := list(versions.problems()):
        return found  # the checks that follow import them
    from cp_engine import data, verify_training  # here: they need torch, and planning does not
    from cp_engine.integrations import torchtitan

    found = [*_world_problems(config), *_length_problems(config), *shape_problems(config), *mask_problems(config)]
    found += [*torchtitan.check(config), *data.check(config)]
    return found + (verify_training.check(config) if config["mode"] == "verify" else [])


def _head_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """Tensor parallelism cuts heads before the engine sees them."""
    tensor = integer(config, "titan.parallelism.tensor_parallel_degree")
    name, flavor = str(value_of(config, "titan.model.name")), str(value_of(config, "titan.model.flavor"))
    row = shape_row(config)
    for size in ("heads", "kv_heads"):
        if not _is_whole(row, size) and int(str(row.get(size, 0))) % tensor:
            key = "titan.parallelism.tensor_parallel_degree"
            yield Problem(key=key, what=f"{tensor} does not divide {size} {row[size]} of {name} {flavor}")


def _is_whole(row: Mapping[str, object], size: str) -> bool:
    """Whether tensor parallelism leaves heads whole: the latent of a model with an indexer is one key for all heads."""
    return size == "kv_heads" and "topk" in row


def _verify_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """What a comparison would ignore."""
    if config["mode"] == "verify" and needs_ranks(config) and value_of(config, "verify.target") == "ranks":
        what = "is ranks, and verify.level=training has ranks of its own"
        yield Problem(key="verify.target", what=what, tries=("verify.target=process",))
    if config["mode"] != "verify" or needs_ranks(config):
        return
    if value_of(config, "launch.device") == devices.REHEARSAL:
        return  # which dtype its operators take depends on the plan
    rule = ("rule", "verify.level=attention computes in float64 on cpu, whatever the job's own dtype and device")
    for key, fine in (("shape.dtype", (None, "float64")), ("launch.device", ("auto", "cpu"))):
        if (value := value_of(config, key)) not in fine:
            yield Problem(key=key, what=f"is {value}", details=(rule,), tries=(f"{key}={fine[-1]}",))


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


def needs_ranks(config: Mapping[str, object]) -> bool:
    """Whether the mode starts processes; the others only plan, for any number of ranks."""
    return config["mode"] == "train" or (config["mode"] == "verify" and value_of(config, "verify.level") == "training")


def shape_of(config: Mapping[str, object]) -> Shape:
    """The attention call that the configured model makes on one tensor-parallel rank.

    Args:
        config: the composed configuration; what `shape.*` sets wins over the model's own.

    Returns:
        Sizes before context parallelism cuts anything.

    Raises:
        ConfigError: if the model is not in the table and `shape.*` leaves a size open.
    """
    tensor = integer(config, "titan.parallelism.tensor_parallel_degree")
    pipeline = integer(config, "titan.parallelism.pipeline_parallel_degree")
    batch = "pipeline_parallel_microbatch_size" if pipeline > 1 else ""
    sizes: dict[str, int] = {
        "batch": integer(config, f"titan.parallelism.{batch}" if batch else "titan.training.local_batch_size"),
        "sequence": integer(config, "titan.training.seq_len"),
    }
    model, flavor = str(value_of(config, "titan.model.name")), str(value_of(config, "titan.model.flavor"))
    row = shape_row(config)
    for name in ("heads", "kv_heads"):
        if name in row:
            sizes[name] = int(str(row[name])) // (1 if _is_whole(row, name) else tensor) or 1
    for name in ("head_dim", "v_head_dim", *LATENT_SIZES):
        if name in row:
            sizes[name] = int(str(row[name]))
    names = (*SIZES, *LATENT_SIZES)
    sizes.update({name: integer(config, f"shape.{name}") for name in names if value_of(config, f"shape.{name}")})
    missing = [name for name in SIZES if name not in sizes]
    if missing:
        raise ConfigError([_unknown_model(model, flavor, missing)])
    dtype = value_of(config, "shape.dtype") or value_of(config, f"titan.training.{_dtype_key(config)}")
    return Shape(**sizes, dtype=str(dtype))


def _dtype_key(config: Mapping[str, object]) -> str:
    """FSDP casts the parameters where cp or dp_shard is above 1, autocast those of a single rank; nothing those of tp or pp alone."""
    parallelism = "titan.parallelism."
    names = ("tensor_parallel_degree", "pipeline_parallel_degree")
    alone = any(integer(config, parallelism + name) > 1 for name in names)
    copies = integer(config, f"{parallelism}data_parallel_replicate_degree")
    sharded = degree_in(config["cp"]) > 1 or data_parallel(config) > copies
    return "dtype" if alone and not sharded else "mixed_precision_param"


SIZES = ("batch", "sequence", "heads", "kv_heads", "head_dim", "v_head_dim")
LATENT_SIZES = ("latent_dim", "rope_dim", "index_heads", "index_dim", "topk")
"""Sizes that only multi-head latent attention has, and only one with an indexer."""


def _replaced_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    for key, instead in REPLACED.items():
        if lookup(config, key) is not ABSENT:
            rule = ("rule", "the composition decides this; torchtitan's own key would have no effect")
            yield Problem(key=key, what="has no effect beside cp", details=(rule,), tries=(f"~{key}", instead))


def _degree_problems(config: Mapping[str, object]) -> list[Problem]:
    """The context-parallel degree is set in one place, the composition."""
    from cp_engine.schema import degree_of  # here: `--help` and `--cfg` need no schema

    key, cp = "titan.parallelism.context_parallel_degree", config["cp"]
    try:
        degree = degree_of(cp if isinstance(cp, Mapping) else {})
    except ConfigError as error:
        return list(error.problems)
    titan = lookup(config, key)
    if titan in (ABSENT, degree):
        return []
    rule = (
        "rule",
        "the context-parallel degree is the size of the composition's mesh; torchtitan's key may only agree",
    )
    return [
        Problem(
            key=key,
            what=f"is {titan}, but cp.mesh has {degree} ranks",
            details=(rule,),
            tries=(f"~{key}", f"cp.degree={titan}"),
        )
    ]


def _world_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """The number of ranks is the product of the degrees; a free dp_shard takes what is left."""
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
    if lookup(config, "launch.inline") is True and ranks != 1:
        yield Problem(
            key="launch.inline",
            what=f"runs in this process, which is one rank, not {ranks}",
            tries=("launch.inline=false", "cp=none launch.nproc=1"),
        )


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
    if total > 0 and total % (batch * data):
        yield Problem(
            key="titan.training.global_batch_size",
            what=f"{total} is not a multiple of {batch * data} = local_batch_size {batch} x dp {data}",
            tries=("titan.training.global_batch_size=-1",),
        )
    name, flavor = str(value_of(config, "titan.model.name")), str(value_of(config, "titan.model.flavor"))
    if not shape_row(config):
        yield _unknown_model(name, flavor, [])


def _unknown_model(name: str, flavor: str, missing: list[str]) -> Problem:
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
