"""What `verify.level=training` asks of a job: two runs in float32 from one set of weights."""

from collections.abc import Mapping

from cp_engine.errors import Problem
from cp_engine.job.checks.keys import shape_row, value_of
from cp_engine.job.checks.torchtitan import titan_value
from cp_engine.runtime import devices


def comparison_problems(config: Mapping[str, object]) -> list[Problem]:
    """What of a configuration a comparison of two training runs cannot do.

    Args:
        config: the composed configuration.

    Returns:
        One problem per fault.
    """
    problems = []
    for name, default in (("mixed_precision_param", "bfloat16"), ("dtype", "float32")):
        dtype, key = titan_value(config, f"training.{name}", default), f"titan.training.{name}"
        if dtype != "float32":
            what = f"is {dtype}; both runs are compared in float32, where a difference means something"
            problems.append(Problem(key=key, what=what, tries=(f"{key}=float32",)))
    attention, device = shape_row(config).get("attention", "sdpa"), str(value_of(config, "launch.device"))
    if attention != "sdpa" and devices.of_tensors(devices.resolve(device, 1) if device == "auto" else device) == "cpu":
        what = f"attends with {attention}, which torchtitan alone cannot train with on a CPU"
        problems.append(Problem(key="titan.model.flavor", what=what, tries=("verify.level=attention",)))
    if (experts := shape_row(config).get("experts")) is not None:
        what = f"computes its experts in {experts} whatever the job says; both runs are compared in float32"
        problems.append(Problem(key="titan.model.flavor", what=what, tries=("verify.level=attention",)))
    if value_of(config, "launch.resume") is not None:
        what = "the comparison starts from weights of its own"
        problems.append(Problem(key="launch.resume", what=what, tries=("launch.resume=null",)))
    return problems
