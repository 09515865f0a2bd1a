"""How torchtitan describes a model: as registered or shipped with the engine, and the attention call that follows from its sizes.

Importing this imports torchtitan, on CPU inside `cpu_shims`.
"""

import importlib

import torchtitan.models
from torchtitan.config import JobConfig
from torchtitan.protocols import train_spec as specs
from torchtitan.protocols.model import BaseModelArgs

from cp_engine.algebra.shape import Shape
from cp_engine.errors import ConfigError, Problem
from cp_engine.hosts.torchtitan.models import OWN


def spec_of(job_config: JobConfig) -> specs.TrainSpec:
    """How torchtitan trains the job's model: as registered or brought by its config module, else one that ships with the engine."""
    name, module = job_config.model.name, job_config.job.custom_config_module
    is_brought = bool(module) and name in torchtitan.models._supported_models
    if name in OWN and name not in specs._extra_train_specs and not is_brought:
        own: specs.TrainSpec = importlib.import_module(OWN[name]).get_train_spec()
        return own
    return specs.get_train_spec(name)


def refuse_other_shape(job_config: JobConfig, shape: Shape) -> None:
    """Compare what was planned for with the model that torchtitan will build.

    Args:
        job_config: the job.
        shape: the shape of the plan, with the heads of one tensor-parallel rank.

    Raises:
        ConfigError: a size that differs, or an attention that the engine cannot attach to.
    """
    model = job_config.model
    known = spec_of(job_config).model_args
    if model.flavor not in known:
        raise ConfigError(
            [
                Problem(
                    key="titan.model.flavor",
                    what=f"{model.name} has no {model.flavor!r}",
                    details=(("allowed", ", ".join(known)),),
                )
            ]
        )
    problems = []
    tensor = job_config.parallelism.tensor_parallel_degree
    for key, size in _attention_sizes(known[model.flavor], tensor).items():
        if getattr(shape, key) != size:
            what = f"planned for {getattr(shape, key)}, and {model.name} {model.flavor} has {size}"
            problems.append(Problem(key=f"shape.{key}", what=what, tries=(f"shape.{key}=null", f"shape.{key}={size}")))
    if problems:
        raise ConfigError(problems)


def _attention_sizes(args: BaseModelArgs, tensor: int) -> dict[str, int]:
    sizes = vars(args)
    heads = int(sizes["n_heads"])
    kv_heads = int(sizes.get("n_kv_heads") or heads)
    if "index_topk" in sizes:  # in absorbed form: the latent is the one key and value head
        latent, rope = int(sizes["kv_lora_rank"]), int(sizes["qk_rope_head_dim"])
        selected = int(sizes["max_seq_len"] if sizes.get("warm_up") else sizes["index_topk"])
        index = {
            "index_heads": int(sizes["index_n_heads"]),
            "index_dim": int(sizes["index_head_dim"]),
            "topk": selected,
        }
        return {"heads": heads // tensor, "kv_heads": 1, "head_dim": latent + rope, "v_head_dim": latent, **index}
    if "qk_nope_head_dim" in sizes:  # multi-head latent attention: the rotary part is appended to each key
        head_dim = int(sizes["qk_nope_head_dim"]) + int(sizes["qk_rope_head_dim"])
        v_head_dim = int(sizes["v_head_dim"])
    else:
        head_dim = v_head_dim = int(sizes.get("head_dim") or int(sizes["dim"]) // heads)
    return {"heads": heads // tensor, "kv_heads": kv_heads // tensor, "head_dim": head_dim, "v_head_dim": v_head_dim}
