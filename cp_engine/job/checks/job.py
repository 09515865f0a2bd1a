"""Checks of the composed configuration, all but `cp.*`, before any process starts."""

from collections.abc import Iterator, Mapping, Sequence

from cp_engine.algebra.shape import Shape
from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks import nodes, versions
from cp_engine.job.checks import reads as torchtitan_reads
from cp_engine.job.checks.degrees import data_parallel, degree_in, integer
from cp_engine.job.checks.keys import ABSENT, key_problems, lookup, shape_row, value_of
from cp_engine.job.checks.training import LATENT_SIZES, SIZES, of_training, unknown_model
from cp_engine.runtime import devices

OF_A_MODE = {  # key -> the mode that reads it, and the value that asks for nothing
    "verify.level": ("verify", "attention"),
    "verify.target": ("verify", "process"),
    "verify.reference": ("verify", "parallel"),
    "explain.format": ("explain", "text"),
    "translate.to": ("translate", "experiment"),
    "translate.force": ("translate", False),
    "out": ("translate", None),
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


def problems(config: Mapping[str, object], typed: Sequence[str] = ()) -> list[Problem]:
    """Everything wrong outside `cp.*`: names and types first, then how the values fit together.

    Args:
        config: the composed configuration, resolved to plain containers.
        typed: overrides of the command line, which are to have an effect.

    Returns:
        One problem per fault.
    """
    found = first_problems(config)
    if found or not needs_ranks(config):
        return found
    if found := list(versions.problems(config)):
        return found  # the checks that follow import them
    from cp_engine.job.checks.comparison import comparison_problems  # here: it needs torch, and planning does not

    refusals = of_training(config, typed)
    found = [*refusals.refused, *refusals.here]
    return found + (comparison_problems(config) if config["mode"] == "verify" else [])


def first_problems(config: Mapping[str, object]) -> list[Problem]:
    """Names, types and degrees, which a plan asks for too."""
    found = [*key_problems(config), *torchtitan_reads.replaced(config)]
    of_values = (_mode_problems, _degree_problems, _head_problems, _verify_problems, _node_problems)
    return found or [problem for problems_of in of_values for problem in problems_of(config)]


def as_training(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the run that would follow, without what another mode reads."""
    result: dict[str, object] = {**config, "mode": "train"}
    for key, (_, nothing) in OF_A_MODE.items():
        section, _, name = key.rpartition(".")
        node = result.get(section)
        if isinstance(node, Mapping):
            result[section] = {**node, name: nothing}
        elif not section:
            result[name] = nothing
    return result


def _mode_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """What another mode reads: `verify.level=training` without `mode=verify` would train, and compare nothing."""
    for key, (mode, nothing) in OF_A_MODE.items():
        value, chosen = value_of(config, key), config["mode"]
        if value != nothing and chosen != mode:
            what = f"is {torchtitan_reads.shown(value)}, and mode={chosen} does not read it"
            yield Problem(key=key, what=what, tries=(f"mode={mode}", torchtitan_reads.assigned(key, nothing)))


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
    if (reference := value_of(config, "verify.reference")) != "parallel":
        what = f"is {reference}, and verify.level=attention compares with dense attention in one process"
        tries = ("verify.level=training", "verify.reference=parallel")
        yield Problem(key="verify.reference", what=what, tries=tries)
    if value_of(config, "launch.device") == devices.REHEARSAL:
        return  # which dtype its operators take depends on the plan
    rule = ("rule", "verify.level=attention computes in float64 on cpu, whatever the job's own dtype and device")
    for key, fine in (("shape.dtype", (None, "float64")), ("launch.device", ("auto", "cpu"))):
        if (value := value_of(config, key)) not in fine:
            yield Problem(key=key, what=f"is {value}", details=(rule,), tries=(f"{key}={fine[-1]}",))


def _node_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    yield from nodes.problems(config, starts_ranks=needs_ranks(config))


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
    if "topk" in row:  # whose loss needs all heads of a query
        sizes["head_ranks"] = tensor
    names = (*SIZES, *LATENT_SIZES)
    sizes.update({name: integer(config, f"shape.{name}") for name in names if value_of(config, f"shape.{name}")})
    missing = [name for name in SIZES if name not in sizes]
    if missing:
        raise ConfigError([unknown_model(model, flavor, missing)])
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


def _degree_problems(config: Mapping[str, object]) -> list[Problem]:
    """The context-parallel degree is set in one place, the composition."""
    from cp_engine.config.composition import read
    from cp_engine.config.reader import resizing  # here: `--help` and `--cfg` need no schema

    key, cp = "titan.parallelism.context_parallel_degree", config["cp"]
    try:
        mesh = read(cp if isinstance(cp, Mapping) else {}, None).mesh
    except ConfigError as error:
        return list(error.problems)
    titan = lookup(config, key)
    if titan in (ABSENT, mesh.degree):
        return []
    rule = (
        "rule",
        "the context-parallel degree is the size of the composition's mesh; torchtitan's key may only agree",
    )
    return [
        Problem(
            key=key,
            what=f"is {titan}, but cp.mesh has {mesh.degree} rank{'s' * (mesh.degree != 1)}",
            details=(rule,),
            tries=(f"~{key}", *resizing(mesh, int(str(titan)))),
        )
    ]
