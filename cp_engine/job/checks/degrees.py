"""The number of ranks of a job, and what it is the product of."""

import math
from collections.abc import Mapping

from cp_engine.errors import ConfigError
from cp_engine.job.checks.keys import value_of


def world_size(config: Mapping[str, object]) -> int:
    """The number of ranks: launch.nproc, else cp x tp x pp x dp (dp_shard -1 counts as 1)."""
    given = value_of(config, "launch.nproc")
    return int(str(given)) if given else math.prod(degrees(config).values())


def data_parallel(config: Mapping[str, object]) -> int:
    """The number of ranks that read different rows: what is left of the ranks beside cp x tp x pp."""
    factors = degrees(config)
    names = ("cp.mesh", "titan.parallelism.tensor_parallel_degree", "titan.parallelism.pipeline_parallel_degree")
    return world_size(config) // math.prod(factors[name] for name in names)


def ranks_text(config: Mapping[str, object]) -> str:
    """The product rule of a job's ranks, for a reader."""
    factors, given = degrees(config), value_of(config, "launch.nproc")
    shown = [f"{_short(key)} {value}" for key, value in factors.items() if value > 1] or ["1"]
    needed, free = math.prod(factors.values()), integer(config, "titan.parallelism.data_parallel_shard_degree") < 0
    rest = " x dp_shard, which takes the ranks that are left: any multiple of " if free else " = "
    return f"{' x '.join(shown)}{rest}{needed}" + (f"; launch.nproc={given}" if given else "")


def _short(key: str) -> str:
    """`cp`, `tp`, `pp`, `dp_replicate`, `dp_shard`."""
    name = key.removeprefix("titan.parallelism.").removesuffix("_degree").removesuffix(".mesh")
    words = {"tensor_parallel": "tp", "pipeline_parallel": "pp"}
    return words.get(name, name.replace("data_parallel", "dp"))


def degrees(config: Mapping[str, object]) -> dict[str, int]:
    """The factors of the number of ranks, by key; a free dp_shard counts as 1."""
    parallelism = "titan.parallelism."
    return {
        "cp.mesh": degree_in(config["cp"]),
        f"{parallelism}tensor_parallel_degree": integer(config, f"{parallelism}tensor_parallel_degree"),
        f"{parallelism}pipeline_parallel_degree": integer(config, f"{parallelism}pipeline_parallel_degree"),
        f"{parallelism}data_parallel_replicate_degree": integer(config, f"{parallelism}data_parallel_replicate_degree"),
        f"{parallelism}data_parallel_shard_degree": max(1, integer(config, f"{parallelism}data_parallel_shard_degree")),
    }


def degree_in(cp: object) -> int:
    """The ranks of a composition; 1 where it cannot be read, which is reported elsewhere."""
    from cp_engine.config.composition import degree_of

    try:
        return degree_of(cp if isinstance(cp, Mapping) else {})
    except ConfigError:
        return 1


def integer(config: Mapping[str, object], key: str) -> int:
    """A value of the configuration, or torchtitan's default, as a number."""
    return int(str(value_of(config, key)))
