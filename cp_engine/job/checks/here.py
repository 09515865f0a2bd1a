"""What a job needs of the machine that trains it: packages, and a device that can do what is asked; nothing here imports them."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from cp_engine.errors import Problem
from cp_engine.job.checks import module_needs
from cp_engine.job.checks import packages as torchtitan_packages
from cp_engine.job.checks.keys import value_of
from cp_engine.job.checks.module_needs import CONVERTERS, KNOWN
from cp_engine.job.checks.values import compiles_model
from cp_engine.runtime.devices import of_tensors, resolve

PACKAGES = ("torchtitan", "triton", "torchdata", "datasets", "tokenizers", "tyro", "tensorboard")
"""What importing torchtitan's trainer and models imports, beside torch."""
OPTIONAL = (  # (keys with the value that asks for it, package, what to install)
    (("checkpoint.last_save_in_hf", True), "safetensors", "safetensors"),
    (("checkpoint.initial_load_in_hf", True), "safetensors", "safetensors"),
    (("metrics.enable_wandb", True), "wandb", "wandb"),
    (("parallelism.expert_parallel_comm_backend", "deepep"), "deep_ep", ""),
)
EMULATE = "titan.quantize.linear.float8.emulate"
QUANTIZE = "quantize."
FLOAT8 = "quantize.linear.float8"


def packages(config: Mapping[str, object]) -> Iterator[Problem]:
    """Packages that the job needs, and that are not installed.

    Args:
        config: the whole composed configuration.
    """
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if absent:
        what = f"training needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed"
        rule = (
            "rule",
            "the models and the trainer are torchtitan's; planning, and verify.level=attention, need none of it",
        )
        tries = ('pip install "cp-engine[torchtitan]"', 'pip install -c constraints.txt ".[torchtitan]"')
        yield Problem(key="titan", what=what, details=(rule,), tries=tries)
    for (name, value), package, distribution in OPTIONAL:
        key = f"titan.{name}"
        is_on = name.partition(".")[0] != "checkpoint" or value_of(config, "titan.checkpoint.enable")
        if is_on and value_of(config, key) == value and find_spec(package) is None:
            default = "false" if value is True else "standard"
            what = f"is {'true' if value is True else value}, and the package {package} is not installed"
            tries = (*((f"pip install {distribution}",) if distribution else ()), f"{key}={default}")
            yield Problem(key=key, what=what, tries=tries)
    if (quantized := _quantized(config)) and find_spec("torchao") is None:
        what = f"has {', '.join(quantized)}, and the package torchao is not installed"
        yield Problem(key=CONVERTERS, what=what, tries=("pip install torchao", _without(config, quantized)))
    key = torchtitan_packages.IMPORT
    module = str(value_of(config, key) or "")
    if module and find_spec(module.partition(".")[0]) is None:
        what = f"imports {module}, and there is no {module.partition('.')[0]} to import from here"
        yield Problem(key=key, what=what, tries=(f"~{key}",))
    yield from module_needs.missing(config)


def device(config: Mapping[str, object]) -> Iterator[Problem]:
    """What is asked for, and the job's device cannot do.

    Args:
        config: the whole composed configuration.
    """
    wanted = str(value_of(config, "launch.device"))
    found = resolve("auto", 1) if wanted == "auto" else wanted
    yield from torchtitan_packages.of_device(config, found)
    if of_tensors(found) == "cpu":
        yield from _on_cpu(config, found)


def _on_cpu(config: Mapping[str, object], name: str) -> Iterator[Problem]:
    """What torchtitan does with an accelerator alone."""
    for key, why in (
        (
            "profiling.enable_memory_snapshot",
            "it records an accelerator's caching allocator, which a CPU does not have",
        ),
        ("training.enable_cpu_offload", "parameters are in the memory of the CPU already"),
        ("training.gc_debug", "it records an accelerator's allocator where a garbage collection leaves cycles"),
    ):
        if value_of(config, f"titan.{key}") is True:
            what = f"is true, and launch.device is {name}"
            yield Problem(key=f"titan.{key}", what=what, details=(("rule", why),), tries=(f"titan.{key}=false",))
    key = "titan.checkpoint.async_mode"
    if value_of(config, "titan.checkpoint.enable") is True and value_of(config, key) == "async_with_pinned_mem":
        what = f"is async_with_pinned_mem, which copies from an accelerator, and launch.device is {name}"
        yield Problem(key=key, what=what, tries=(f"{key}=async", f"{key}=disabled"))
    key = "titan.parallelism.pipeline_parallel_schedule"
    is_staged = int(str(value_of(config, "titan.parallelism.pipeline_parallel_degree"))) > 1
    if is_staged and str(value_of(config, key)).lower() == "dualpipev":
        what = f"is {value_of(config, key)}, which overlaps on an accelerator's streams, and launch.device is {name}"
        yield Problem(key=key, what=what, tries=(f"{key}=ZBVZeroBubble", f"{key}=1F1B"))
    quantized = _quantized(config)
    if quantized and quantized != [FLOAT8]:
        rule = ("rule", f"a CPU can only emulate {FLOAT8}: titan.model.converters=[{FLOAT8}] {EMULATE}=true")
        what = f"has {', '.join(q for q in quantized if q != FLOAT8)}, and launch.device is {name}"
        yield Problem(key=CONVERTERS, what=what, details=(rule,), tries=(_without(config, quantized),))
    elif quantized and value_of(config, EMULATE) is not True:
        what = f"has {FLOAT8}, and launch.device is {name}, which has no float8 multiplication"
        yield Problem(key=CONVERTERS, what=what, tries=(f"{EMULATE}=true", _without(config, quantized)))
    elif quantized and compiles_model(config):
        what, key = (
            f"includes model, and {FLOAT8} is emulated only in a model that is not compiled",
            "titan.compile.components",
        )
        yield Problem(key=key, what=what, tries=("++titan.compile.components=[loss]", "titan.compile.enable=false"))


def _quantized(config: Mapping[str, object]) -> list[str]:
    """torchtitan's own quantizing converters of the job, which torchao provides."""
    converters = value_of(config, CONVERTERS)
    return [name for name in converters if name in KNOWN] if isinstance(converters, list) else []


def _without(config: Mapping[str, object], left_out: list[str]) -> str:
    converters = value_of(config, CONVERTERS)
    assert isinstance(converters, list)
    return f"'{CONVERTERS}=[{','.join(c for c in converters if c not in left_out)}]'"
