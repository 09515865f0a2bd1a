"""Values of torchtitan's keys, and pairs of them, that every rank would refuse after the start; found by training with each."""

from collections.abc import Iterator, Mapping
from math import isfinite

from cp_engine.errors import Problem, suggest
from cp_engine.job.checks import packages
from cp_engine.job.checks.keys import shape_row, value_of
from cp_engine.job.checks.module_needs import OPTIMIZERS

COMPILED = ("model", "loss")
BACKENDS = ("inductor", "eager", "aot_eager")
"""Compilers that need no look into torch."""
DETERMINISM = ("default", "none")
AT_LEAST_ONE = {  # key -> what is counted, and what to write
    "training.gc_freq": ("step", 50),
    "metrics.log_freq": ("step", 1),
    "comm.init_timeout_seconds": ("second", 300),
    "comm.train_timeout_seconds": ("second", 100),
}


def check(config: Mapping[str, object]) -> Iterator[Problem]:
    """What torchtitan, or torch below it, would refuse on any machine.

    Args:
        config: the whole composed configuration.
    """
    yield from _optimizer_problems(config)
    yield from _profiling_problems(config)
    yield from _recomputation_problems(config)
    yield from _compiler_problems(config)
    yield from _checkpoint_problems(config)
    yield from _parallel_problems(config)
    yield from _schedule_problems(config)
    for name, (unit, usual) in AT_LEAST_ONE.items():
        key = f"titan.{name}"
        if (value := _number(config, name)) < 1:
            yield Problem(key=key, what=f"is {value}, less than 1 {unit}", tries=(f"{key}={usual}",))
    key, norm = "titan.training.max_norm", value_of(config, "titan.training.max_norm")
    if isinstance(norm, int | float) and not norm > 0:
        what = f"is {norm}, and gradients are scaled to that norm at most: none would be left"
        yield Problem(key=key, what=what, tries=(f"{key}=1.0", f"{key}=inf"))


def _optimizer_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    name, rate = value_of(config, "titan.optimizer.name"), value_of(config, "titan.optimizer.lr")
    if name not in OPTIMIZERS and not value_of(config, "titan.job.custom_config_module"):
        near = suggest(str(name), OPTIMIZERS) or OPTIMIZERS[-1]
        details, key = (("allowed", ", ".join(OPTIMIZERS)),), "titan.optimizer.name"
        what = f"{name!r} is no optimizer of torchtitan"
        yield Problem(key=key, what=what, details=details, tries=(f"{key}={near}",))
    if not (isinstance(rate, int | float) and isfinite(rate) and rate >= 0):
        yield Problem(key="titan.optimizer.lr", what=f"is {rate}, and a learning rate is a number from 0")
    key = "titan.optimizer.early_step_in_backward"
    for other in ("expert_parallel_degree", "pipeline_parallel_degree"):
        if value_of(config, key) is True and (degree := _number(config, f"parallelism.{other}")) > 1:
            what = f"is true, and titan.parallelism.{other} is {degree}; torchtitan steps in backward without it alone"
            yield Problem(key=key, what=what, tries=(f"{key}=false", f"titan.parallelism.{other}=1"))


def _schedule_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """A learning rate that has no value, or a negative one, in some step."""
    key, total = "titan.lr_scheduler.total_steps", value_of(config, "titan.lr_scheduler.total_steps")
    if isinstance(total, int) and total < (steps := _number(config, "training.steps")):
        what = f"is {total}, and training has {steps} steps: the schedule would end before"
        yield Problem(key=key, what=what, tries=(f"{key}={steps}", f"{key}=null"))
    key, share = "titan.lr_scheduler.decay_ratio", value_of(config, "titan.lr_scheduler.decay_ratio")
    if isinstance(share, int | float) and not 0 <= share <= 1:
        yield Problem(key=key, what=f"is {share}, which is no share of the steps: from 0 to 1", tries=(f"{key}=null",))
    key = "titan.lr_scheduler.warmup_steps"
    if (warmup := _number(config, "lr_scheduler.warmup_steps")) < 0:
        yield Problem(key=key, what=f"is {warmup}, less than 0", tries=(f"{key}=0",))


def _profiling_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    names = ("profile_freq", "profiler_warmup", "profiler_active")
    every, warmup, active = (_number(config, f"profiling.{name}") for name in names)
    key = "titan.profiling.profile_freq"
    is_profiled = value_of(config, "titan.profiling.enable_profiling") is True
    if is_profiled and every < warmup + active:
        what = f"is {every}, less than profiler_warmup {warmup} + profiler_active {active}"
        tries = (
            f"{key}={warmup + active}",
            *((f"titan.profiling.profiler_warmup={every - active}",) * (every > active)),
        )
        yield Problem(key=key, what=what, tries=tries)
    elif every < 1 and value_of(config, "titan.profiling.enable_memory_snapshot") is True:
        yield Problem(key=key, what=f"is {every}, less than 1 step", tries=(f"{key}=10",))


def _recomputation_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    mode = value_of(config, "titan.activation_checkpoint.mode")
    key = "titan.activation_checkpoint.selective_ac_option"
    option = str(value_of(config, key))
    if mode == "selective" and option != "op" and not (option.isdigit() and int(option) > 0):
        what = f"is {option!r}, neither op nor a number of layers above 0"
        yield Problem(key=key, what=what, tries=(f"{key}=op", f"\"{key}='2'\""))
    key = "titan.activation_checkpoint.determinism_check"
    if mode in ("selective", "full") and (kind := value_of(config, key)) not in DETERMINISM:
        what, details = f"{kind!r} is not a choice", (("allowed", ", ".join(DETERMINISM)),)
        yield Problem(key=key, what=what, details=details, tries=(f"{key}=default",))
    if mode == "memory_budget" and not compiles_model(config):
        what, key = "is memory_budget, which the compiler of the model keeps to", "titan.activation_checkpoint.mode"
        on = value_of(config, "titan.compile.enable") is True
        with_model = "'titan.compile.components=[model,loss]'" if on else "titan.compile.enable=true"
        yield Problem(key=key, what=what, tries=(with_model, f"{key}=selective"))


def _compiler_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    key, components = "titan.compile.components", value_of(config, "titan.compile.components")
    if value_of(config, "titan.compile.enable") is not True or not isinstance(components, list):
        return
    if unknown := [name for name in components if name not in COMPILED]:
        fixed = dict.fromkeys(suggest(str(name), COMPILED) or name for name in components)
        what, details = (
            f"has {', '.join(map(str, unknown))}, which nothing compiles",
            (("allowed", ", ".join(COMPILED)),),
        )
        left = [name for name in fixed if name in COMPILED] or list(COMPILED)
        yield Problem(key=key, what=what, details=details, tries=(f"'{key}=[{','.join(left)}]'",))
    row = shape_row(config)
    if "model" in components and "topk" in row and "package" not in row:  # this engine's own model
        what = "includes model, and a graph could not count the indexer's loss once per forward"
        yield Problem(key=key, what=what, tries=("titan.compile.enable=false", "++titan.compile.components=[loss]"))
    key, backend = "titan.compile.backend", str(value_of(config, "titan.compile.backend"))
    if backend not in BACKENDS and not value_of(config, packages.IMPORT):
        import torch.compiler  # here: it takes seconds, and few jobs name another

        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            near = suggest(backend, known) or BACKENDS[0]
            what, details = f"'{backend}' is no backend of torch.compile here", (("allowed", ", ".join(known)),)
            yield Problem(key=key, what=what, details=details, tries=(f"{key}={near}",))


def _checkpoint_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    if value_of(config, "titan.checkpoint.enable") is not True:
        return
    key = "titan.checkpoint.keep_latest_k"
    if _number(config, "checkpoint.keep_latest_k") == 1:
        what = "is 1, and the last one may be in the middle of being written: torchtitan keeps 2 or more, or 0 for all"
        yield Problem(key=key, what=what, tries=(f"{key}=2", f"{key}=0"))
    key = "titan.checkpoint.initial_load_in_hf_quantized"
    if value_of(config, key) is True and value_of(config, "titan.checkpoint.initial_load_in_hf") is not True:
        what, instead = (
            "is true, and only a Hugging Face checkpoint is quantized",
            "titan.checkpoint.initial_load_in_hf",
        )
        yield Problem(key=key, what=what, tries=(f"{instead}=true", f"{key}=false"))
    key = "titan.checkpoint.interval"
    if (every := _number(config, "checkpoint.interval")) < 1:
        yield Problem(key=key, what=f"is {every}, less than 1 step", tries=(f"{key}=500",))


def _parallel_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    key = "titan.parallelism.enable_async_tensor_parallel"
    if value_of(config, key) is True and _number(config, "parallelism.tensor_parallel_degree") > 1:
        what = "is true, and torchtitan overlaps tensor parallelism in a compiled model alone"
        rule = (
            "rule",
            "a model that is compiled beside tensor parallelism is refused: torch 2.13 loses a gradient there",
        )
        yield Problem(key=key, what=what, details=(rule,), tries=(f"{key}=false",))


def compiles_model(config: Mapping[str, object]) -> bool:
    """Whether the model's layers are compiled."""
    components = value_of(config, "titan.compile.components")
    return value_of(config, "titan.compile.enable") is True and isinstance(components, list) and "model" in components


def _number(config: Mapping[str, object], name: str) -> int:
    return int(str(value_of(config, f"titan.{name}")))
