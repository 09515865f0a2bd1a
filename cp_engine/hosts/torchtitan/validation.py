"""Validation of a composition: torchtitan's settings and parts, the batch cut by the plan, the loss over all targets.

torchtitan 0.2.2's own loop counts the targets of a context-parallel rank as if they were all: its loss is as many times too big as
there are ranks, and not a number where a rank holds no target.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum

from cp_engine.hosts.torchtitan.text.loader import TextLoader
from cp_engine.hosts.torchtitan.text.rows import Rows

Batch = tuple[dict[str, Tensor], Tensor]
Cut = Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Tensor, dict[str, Tensor], dict[str, object]]]


class CompositionValidator(BaseValidator):
    """Validates on each rank's part of the batch; the loss is the one of the whole batch on one rank.

    Args:
        upstream: what torchtitan built: text, loss function, contexts and pipeline schedule are taken from it.
        cut: batch of whole sequences -> inputs, labels, companions and arguments of this rank; as for training.
        report: called on every rank with the loss.
    """

    def __init__(self, upstream: Validator, cut: Cut, report: Callable[[float], None]) -> None:
        super().__init__(upstream.job_config)
        self.text = upstream.validation_dataloader
        self._upstream, self._cut, self._report = upstream, cut, report

    @torch.no_grad()
    def validate(self, model_parts: Sequence[nn.Module], step: int) -> None:
        """Mean over `validation.steps` batches of each batch's mean over its targets, whichever rank holds them."""
        for part in model_parts:
            part.eval()
        steps = range(self.job_config.validation.steps)  # first in zip, so that no batch is read and dropped
        losses = [self._of_batch(model_parts, *batch) for _, batch in zip(steps, self.text, strict=False)]
        for part in model_parts:
            part.train()
        dims = self._upstream.parallel_dims
        loss = dist_sum(torch.stack(losses).mean(), dims.get_optional_mesh("loss"))
        if dims.pp_enabled:
            loss = of_last_stage(loss, bool(self._upstream.pp_has_last_stage), losses[0].device)
        self._upstream.metrics_processor.log_validation(loss=loss, step=step)
        self._report(loss)

    def _of_batch(self, model_parts: Sequence[nn.Module], input_dict: dict[str, Tensor], labels: Tensor) -> Tensor:
        upstream, device = self._upstream, next(model_parts[0].parameters()).device
        upstream.metrics_processor.ntokens_since_last_log += labels.numel()
        labels = labels.to(device)
        targets = _targets(labels, upstream.parallel_dims)  # before the batch is cut
        moved = {name: tensor.to(device) for name, tensor in input_dict.items()}
        inputs, labels, companions, arguments = self._cut(moved, labels)
        with ExitStack() as contexts:
            contexts.enter_context(upstream.validation_context())
            if upstream.pp_schedule is None:
                contexts.enter_context(upstream.maybe_enable_amp)
                loss: Tensor = upstream.loss_fn(model_parts[0](inputs, **companions, **arguments), labels)
                return loss / targets
            losses: list[Tensor] = []
            first = ((inputs,), companions) if upstream.pp_has_first_stage else ((), {})
            last = (labels, losses) if upstream.pp_has_last_stage else (None, None)
            upstream.pp_schedule.eval(*first[0], **first[1], **arguments, target=last[0], losses=last[1])
            return torch.stack(losses).sum().to(device) / targets if losses else torch.zeros((), device=device)


def _targets(labels: Tensor, dims: ParallelDims) -> float:
    """How many tokens of a batch are predicted, over all data-parallel ranks; 1 where none is, whose loss is 0."""
    own = (labels != IGNORE_INDEX).sum()
    return max(1.0, float(dist_sum(own, dims.get_optional_mesh("batch"))))


def of_last_stage(loss: float, has_last_stage: bool, device: torch.device) -> float:
    """A loss on every rank that only the ranks of the last pipeline stage know."""
    known = torch.tensor(loss if has_last_stage else float("-inf"), dtype=torch.float64, device=device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    return float(known.item())


class ValidationText:
    """The same rows at every validation, so that two losses of a run can be compared."""

    def __init__(self, make: Callable[[], TextLoader]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._make())


class ValidationTextBuilder(Protocol):
    """What torchtitan's validator calls."""

    def __call__(
        self, *, job_config: JobConfig, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, infinite: bool
    ) -> ValidationText:
        """The text of one rank."""


def text_builder(data: Mapping[str, object]) -> ValidationTextBuilder:
    """Our text in the place of torchtitan's `build_text_validation_dataloader`.

    Args:
        data: the `data` group; `validation.dataset_path` names another folder.

    Returns:
        A function with torchtitan's signature.
    """

    def build(
        *, job_config: JobConfig, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, infinite: bool
    ) -> ValidationText:
        settings = job_config.validation
        path = settings.dataset_path or (None if data["path"] is None else str(data["path"]))

        def make() -> TextLoader:
            rows = Rows(
                path=path, field=str(data["field"]), sequence=settings.seq_len, rank=dp_rank, world=dp_world_size
            )
            options = {**asdict(settings.dataloader), "batch_size": settings.local_batch_size}
            return TextLoader(rows, dp_rank=dp_rank, dp_world_size=dp_world_size, **options)

        return ValidationText(make)

    return build
