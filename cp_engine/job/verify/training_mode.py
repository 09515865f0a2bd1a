"""`verify.level=training`: torchtitan alone without context parallelism against the composition, with whatever else is parallel."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cp_engine.config.composition import degree_of
from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks import degrees
from cp_engine.job.checks.comparison import comparison_problems
from cp_engine.job.checks.torchtitan import titan_value
from cp_engine.job.launch import start
from cp_engine.job.train import rank_process, section, titan_of, train_composition
from cp_engine.job.verify.comparison import compare
from cp_engine.job.verify.table import show
from cp_engine.runtime import devices

if TYPE_CHECKING:  # the runs import it after the device is settled
    from torchtitan.config import JobConfig

    from cp_engine.job.verify.recorder import StockRecorder

STEPS = 5
ROUNDED = (1, 2)  # seeds of the runs that tell what rounding does
REFERENCES = ("parallel", "single")  # verify.reference: torchtitan with the job's dp, tp and pp, or on one rank
OF_EXPERTS = ("context_parallel_degree", "expert_parallel_degree")  # experts may be spread over context-parallel ranks
OF_RANKS = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "expert_tensor_parallel_degree",
)

Config = dict[str, object]


def run(config: Config) -> bool:
    """Train both, print the comparison.

    Both run 5 steps in float32 from one checkpoint, written by the first before its first step, over the same global batch.
    Everything else of the job is as configured. A float32 model that trains lets roundings grow, some models beyond the bounds:
    where step 1 agrees and a later one does not, it is measured what one rounding of the first weights does to torchtitan alone.

    Args:
        config: the composed configuration, with `launch.output_dir`.

    Returns:
        Whether losses and gradients agree within the bounds.

    Raises:
        ConfigError: a job that cannot be compared.
    """
    stock, composed = prepare(config)
    output, ranks = Path(str(section(config, "launch")["output_dir"])), degrees.world_size(config)
    alone = 1 if is_single(config) else ranks // degree_of(section(config, "cp"))
    print(f"1/2 torchtitan alone, {STEPS} steps: context parallel 1, {alone} rank{'s' * (alone != 1)}", flush=True)
    start.run_ranks(run_stock, stock, output / "stock", ranks=alone)
    print(f"2/2 the composition, {STEPS} steps: {ranks} ranks\n", flush=True)
    start.run_ranks(run_composition, composed, output / "composition", ranks=ranks)
    comparison = compare(output / "stock", output / "composition")
    if comparison.is_in_doubt:
        print(
            "Step 1 agrees, a later step does not. Rounding grows while a model trains; how fast it does here:",
            flush=True,
        )
        rounded = [output / f"rounded{seed}" for seed in ROUNDED]
        for seed, folder in zip(ROUNDED, rounded, strict=True):
            print(f"{2 + seed}/4 torchtitan alone, {STEPS} steps: from weights one rounding away", flush=True)
            start.run_ranks(partial(run_rounded, seed=seed), _loading(config, folder), folder, ranks=alone)
        print(flush=True)
        comparison = compare(output / "stock", output / "composition", rounded)
    model, name = titan_value(config, "model.name"), section(config, "cp").get("name")
    show(comparison, f"{model}: torchtitan alone against {name} on {ranks} ranks, float32, same weights")
    return comparison.is_within_bounds


def prepare(config: Config) -> tuple[Config, Config]:
    """The configurations of the two runs; makes their folders.

    Args:
        config: the composed configuration, with `launch.output_dir`.

    Returns:
        Of `run_stock` and of `run_composition`.

    Raises:
        ConfigError: a job that cannot be compared.
    """
    problems = comparison_problems(config)
    if problems:
        raise ConfigError(problems, "verify.level=training")
    output = Path(str(section(config, "launch")["output_dir"]))
    if (output / "stock").exists():  # its checkpoint would be continued
        what = f"{output} holds an earlier comparison"
        raise ConfigError([Problem(key="hydra.run.dir", what=what, tries=("~hydra.run.dir",))], "verify.level=training")
    stock = _job(config, output / "stock", {"enable": True, "interval": STEPS + 1})
    return stock, _loading(config, output / "composition")


def is_single(config: Mapping[str, object]) -> bool:
    """Whether the reference is one rank, with the batch of all data-parallel ranks."""
    return section(config, "verify").get("reference", REFERENCES[0]) == "single"


def run_stock(config: Config) -> None:
    """One rank of torchtitan alone.

    Args:
        config: what `run` made of the configuration.
    """
    with rank_process(config):
        from cp_engine.job.verify.recorder import StockRecorder

        train_alone(config, StockRecorder)


def run_rounded(config: Config, seed: int) -> None:
    """One rank of torchtitan alone, from weights that are one rounding away.

    Args:
        config: what `run` made of the configuration.
        seed: of which weights grow.
    """
    with rank_process(config):
        from cp_engine.job.verify.recorder import RoundedRecorder

        train_alone(config, partial(RoundedRecorder, seed=seed))


def train_alone(config: Config, trainer_class: "Callable[[JobConfig], StockRecorder]") -> None:
    """torchtitan's own attention, no context parallelism, our text; inside `rank_process`.

    Args:
        config: what `run` made of the configuration.
        trainer_class: makes the trainer, which may do more.
    """
    from cp_engine.hosts.torchtitan.host import hosted, job_config

    titan = job_config(titan_of(config))
    for name in (*OF_EXPERTS, *(OF_RANKS if is_single(config) else ())):
        setattr(titan.parallelism, name, 1)
    if is_single(config):
        for batch in (titan.training, titan.validation):
            batch.local_batch_size *= degrees.data_parallel(config)
    with hosted(titan, data=section(config, "data"), is_composed=False):
        trainer = trainer_class(titan)
        try:
            # the weights of every run; one that loads them saves nothing
            trainer.checkpointer.save(curr_step=0, last_step=True)
            trainer.train()
        finally:
            trainer.close()


def run_composition(config: Config) -> None:
    """One rank of the composition.

    Args:
        config: what `run` made of the configuration.
    """
    with rank_process(config):
        from cp_engine.job.verify.recorder import CompositionRecorder

        train_composition(config, CompositionRecorder)


def _loading(config: Config, output: Path) -> Config:
    """A job that begins with the weights that torchtitan alone began with."""
    weights = output.parent / "stock" / "checkpoint" / "step-0"
    return _job(config, output, {"enable": True, "load_only": True, "initial_load_path": str(weights)})


def _job(config: Config, output: Path, checkpoint: Config) -> Config:
    changed = deepcopy(config)
    launch, titan = changed["launch"], changed["titan"]
    assert isinstance(launch, dict) and isinstance(titan, dict)
    output.mkdir(parents=True)
    launch.update(output_dir=str(output), device=devices.resolve(str(launch["device"]), degrees.world_size(config)))
    titan["checkpoint"] = checkpoint
    titan.setdefault("job", {})["dump_folder"] = str(output)
    titan["training"].update(steps=STEPS, mixed_precision_param="float32", dtype="float32")
    titan.setdefault("metrics", {})["log_freq"] = 1
    if titan_value(config, "debug.seed", None) is None:  # a verdict that can be repeated
        titan.setdefault("debug", {})["seed"] = 0
    return changed
