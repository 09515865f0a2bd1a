"""torchtitan with the text of the data group and, for a composition, without its own context parallelism, for the time of one job.

Importing this imports torchtitan (11 s on a small machine), on CPU inside `cpu_shims`.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import get_type_hints

import torch
import torchtitan.components.validate
import torchtitan.distributed.context_parallel
import torchtitan.train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import build_validator
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import train_spec as specs
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.utils import device_type

from cp_engine.errors import ConfigError, Problem, suggest
from cp_engine.hosts.torchtitan import npu as torchtitan_npu
from cp_engine.hosts.torchtitan.cpu_shims import reduce_by_sum
from cp_engine.hosts.torchtitan.loss import summed
from cp_engine.hosts.torchtitan.spec import spec_of
from cp_engine.hosts.torchtitan.text.loader import ByteTokenizer, loader_builder
from cp_engine.hosts.torchtitan.tied_weights import sharded_once
from cp_engine.hosts.torchtitan.validation import text_builder
from cp_engine.runtime.known_modules import QKV, site_of
from cp_engine.runtime.sparse_attention import TENSORS


class RecordedMetrics(MetricsProcessor):
    """torchtitan's metrics, which also keep the last loss that was logged, and the loss of each validation."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        self.last_loss = float("nan")
        self.validation_losses: list[float] = []

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, object] | None = None,
    ) -> None:
        """Log as upstream does, and keep the mean loss (the logged maximum is wrong under context parallelism)."""
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        self.last_loss = float(global_avg_loss)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, object] | None = None) -> None:
        """Log as upstream does, and keep the loss."""
        super().log_validation(loss, step, extra_metrics)
        self.validation_losses.append(float(loss))


@contextmanager
def hosted(job_config: JobConfig, *, data: Mapping[str, object], is_composed: bool) -> Iterator[None]:
    """Give torchtitan our text, and unless `is_composed` is false our context parallelism, for one job.

    Args:
        job_config: the job.
        data: the `data` group.
        is_composed: false leaves torchtitan's model and parallelism as they are.

    Raises:
        ConfigError: a model that the engine cannot attach to.
    """
    name = job_config.model.name
    if job_config.experimental.custom_import:  # before the model is looked up: it may register that model
        importlib.import_module(job_config.experimental.custom_import)
    spec = spec_of(job_config)
    if spec.build_metrics_processor_fn is not None:
        raise ConfigError(
            [Problem(key="titan.model.name", what=f"{name} brings metrics of its own, so no loss could be recorded")]
        )
    with ExitStack() as undo:
        if torchtitan_npu.is_host(job_config):
            undo.enter_context(torchtitan_npu.as_host(job_config))
        _register(
            undo,
            name,
            dataclasses.replace(
                spec,
                # copies, because torchtitan writes the job's values into them
                model_args={
                    n: _unguarded(deepcopy(a)) if is_composed else deepcopy(a) for n, a in spec.model_args.items()
                },
                parallelize_fn=_parallelize_with(spec.parallelize_fn, is_composed),
                **_text_of(data),
                build_loss_fn=summed(spec.build_loss_fn) if is_composed else spec.build_loss_fn,
                build_metrics_processor_fn=_recorded_metrics,
                build_validator_fn=spec.build_validator_fn or build_validator,  # DeepSeek-V3 brings none
            ),
        )
        if is_composed:  # CompositionTrainer cuts the batch itself, companions included
            _swap(undo, torchtitan.train, "prepare_context_parallel_input", _leave_whole)
        if data.get("dataset") is None:
            _swap(undo, torchtitan.components.validate, "build_text_validation_dataloader", text_builder(data))
        yield


def _text_of(data: Mapping[str, object]) -> dict[str, Callable[..., object]]:
    """The builders of loader and tokenizer; none for a data set of torchtitan's, which the model's own builders read."""
    if data.get("dataset") is not None:
        return {}
    path = None if data["path"] is None else str(data["path"])
    return {"build_dataloader_fn": loader_builder(path, str(data["field"])), "build_tokenizer_fn": _byte_tokenizer}


def job_config(titan: Mapping[str, object]) -> JobConfig:
    """torchtitan's configuration from the `titan` node, extended by its config module.

    Args:
        titan: only what differs from torchtitan's defaults.

    Raises:
        ConfigError: keys that torchtitan does not have, all of them.
    """
    problems: list[Problem] = []
    job, section = JobConfig(), titan.get("job")
    module = section.get("custom_config_module") if isinstance(section, Mapping) else None
    if module:  # as torchtitan's own parser does it
        job = ConfigManager._merge_configs(JobConfig, importlib.import_module(str(module)).JobConfig)()
    _fill(job, titan, "titan", problems)
    if problems:
        raise ConfigError(problems)
    return job


def device_in_use() -> str:
    """The device that torchtitan chose when it was imported."""
    return str(device_type)


def _fill(node: object, values: Mapping[str, object], key: str, problems: list[Problem]) -> None:
    assert dataclasses.is_dataclass(node) and not isinstance(node, type)
    names = [field.name for field in dataclasses.fields(node)]
    hints = get_type_hints(type(node))
    for name, value in values.items():
        if name not in names:
            near = suggest(name, names)
            problems.append(
                Problem(
                    key=f"{key}.{name}", what="torchtitan has no such key", tries=(f"{key}.{near}",) if near else ()
                )
            )
        elif dataclasses.is_dataclass(hints[name]):
            assert isinstance(value, Mapping), f"{key}.{name} is a section"
            _fill(getattr(node, name), value, f"{key}.{name}", problems)
        else:
            setattr(node, name, value)


def _parallelize_with(upstream: specs.ParallelizeFunction, is_composed: bool) -> specs.ParallelizeFunction:
    def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
        parallelized: nn.Module
        with sharded_once(model, upstream):
            if is_composed:
                parallelized = _without_own_context_parallelism(upstream, model, parallel_dims, job_config)
            else:
                parallelized = upstream(model, parallel_dims, job_config)
        if device_type == "cpu":
            reduce_by_sum(parallelized)
        return parallelized

    return parallelize


def _without_own_context_parallelism(
    upstream: specs.ParallelizeFunction, model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    attentions = _attentions(model)
    given: list[nn.Module] = []
    with ExitStack() as undo:
        for module in (
            sys.modules[upstream.__module__],
            torchtitan.distributed.context_parallel,
        ):  # where models import it from
            if hasattr(module, "apply_cp_to_attention_module"):
                _swap(undo, module, "apply_cp_to_attention_module", _keep_in(given))
        parallelized: nn.Module = upstream(model, parallel_dims, _without_degree(job_config))
    if parallel_dims.cp_enabled:
        _refuse_left_out(attentions, given)
    return parallelized


def _unguarded(args: BaseModelArgs) -> BaseModelArgs:
    """Arguments whose own check does not see the context-parallel degree: it refuses attention that torchtitan cannot cut."""
    update = args.update_from_config

    def update_from_config(job_config: JobConfig) -> None:
        update(_without_degree(job_config))

    args.update_from_config = update_from_config  # of this instance; the class stays as it is
    return args


def _without_degree(job_config: JobConfig) -> JobConfig:
    parallelism = dataclasses.replace(job_config.parallelism, context_parallel_degree=1)
    return dataclasses.replace(job_config, parallelism=parallelism)


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if any(site_of(module, tensors) is not None for tensors in (QKV, TENSORS))
    }


def _refuse_left_out(attentions: Mapping[str, nn.Module], given: Sequence[nn.Module]) -> None:
    left_out = [name for name, module in attentions.items() if module not in given]
    if left_out or not attentions:
        what = (
            f"torchtitan parallelizes {len(given)} of the model's {len(attentions)} attention modules over the sequence"
        )
        raise ConfigError(
            [Problem(key="titan.model.name", what=what, details=(("missing", ", ".join(left_out) or "all"),))]
        )


def _keep_in(given: list[nn.Module]) -> Callable[..., None]:
    def apply_cp_to_attention_module(
        attention_modules: Sequence[nn.Module],
        cp_mesh: DeviceMesh,
        attention_type: str,
        *,
        job_config: JobConfig | None = None,  # these three are torchtitan-npu's
        model_args: BaseModelArgs | None = None,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        given.extend(attention_modules)  # the engine attaches later, to the finished model

    return apply_cp_to_attention_module


def _leave_whole(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    extra_kwargs: dict[str, object],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    return inputs, labels, extra_kwargs


def _byte_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    return ByteTokenizer()


def _recorded_metrics(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: BaseModelArgs
) -> MetricsProcessor:
    return RecordedMetrics(job_config, parallel_dims)


def _register(undo: ExitStack, name: str, spec: specs.TrainSpec) -> None:
    registered = specs._extra_train_specs  # upstream can register a name only once, and has no way to take it back
    before = registered.pop(name, None)

    def restore() -> None:
        registered.pop(name, None)
        if before is not None:
            registered[name] = before

    undo.callback(restore)
    specs.register_train_spec(name, spec)


def _swap(undo: ExitStack, module: object, name: str, value: Callable[..., object]) -> None:
    undo.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)
