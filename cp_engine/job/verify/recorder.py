"""Trainers that write down losses, first gradients and expert statistics, to compare a composition with torchtitan alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig

from cp_engine.algebra.tensors import INDEX
from cp_engine.hosts.torchtitan.guard import WRAPPERS
from cp_engine.hosts.torchtitan.host import RecordedMetrics
from cp_engine.hosts.torchtitan.indexer_loss import IndexerTrainer, at_second_forward
from cp_engine.hosts.torchtitan.trainer import CompositionTrainer, loss_of_last_stage
from cp_engine.hosts.torchtitan.validation import Batch
from cp_engine.job.verify.attention import selecting
from cp_engine.job.verify.comparison import RECORDS, Record
from cp_engine.runtime.call import Call
from cp_engine.runtime.sparse_attention import SparseAttention, alone, read_sparse, shape_of


class StockRecorder(IndexerTrainer):
    """torchtitan's Trainer as it is; training also writes a record per pipeline stage into the dump folder.

    What it holds is said at `comparison.Record`.
    """

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """One micro batch; after the last one of step 1 gradients, expert statistics and selected keys are kept."""
        with ExitStack() as undo:
            if self.step == 1:
                self._selections: dict[str, dict[str, Tensor]] = {}
                for part in self.model_parts:
                    for name, module in part.named_modules():
                        if isinstance(module, SparseAttention):
                            hook = self._noting(WRAPPERS.sub("", name))
                            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            loss: Tensor = super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        if self.step == 1:  # overwritten until the last micro batch; clipping and the update of the bias come after
            self._gradients = {
                WRAPPERS.sub("", name): _whole(parameter.grad)
                for part in self.model_parts
                for name, parameter in part.named_parameters()
                if parameter.grad is not None
            }
            self._experts = _buffers(self.model_parts, "tokens_per_expert")
            mesh = self.parallel_dims.get_optional_mesh("loss")  # the ranks that hold other tokens
            if mesh is not None:
                for count in self._experts.values():
                    dist.all_reduce(count, group=mesh.get_group())
        return loss

    def _noting(self, name: str) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]:
        def note(module: nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
            if torch._C._current_graph_task_id() == -1:  # not a recompute
                with torch.no_grad():
                    self._selections[name] = {
                        n: x.cpu() for n, x in self.selection(read_sparse(module, args, named)).items()
                    }

        return note

    def selection(self, call: Call) -> dict[str, Tensor]:
        """`topk` and the indexer's tensors of a call, over the whole sequence."""
        program = alone(
            replace(shape_of(call), head_ranks=1), self.device.type
        )  # what is selected does not depend on heads
        (topk,) = program.made("topk", {n: [x] for n, x in call.tensors.items()}, 1.0)
        return {"topk": topk, **{n: call.tensors[n] for n in INDEX}}

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One step; its loss is kept."""
        super().train_step(data_iterator)
        self._losses.append(loss_of_last_stage(self))
        found = self.mean_indexer_loss()
        self._indexer += [] if found is None else [found]

    def train(self) -> None:
        """Train and write the record, on the first rank of each pipeline stage."""
        self._losses: list[float] = []
        self._indexer: list[float] = []
        attends_plainly = getattr(self.model_args, "attn_type", "sdpa") == "sdpa"
        if attends_plainly and self.job_config.validation.enable and type(self.validator) is Validator:
            self.validator.post_dataloading_process = _without_masks
        for part in self.model_parts if self.parallel_dims.pp_enabled else ():
            at_second_forward(part, partial(_forget_experts, part))
        super().train()
        stage_ranks = dist.get_world_size() // self.parallel_dims.pp  # the stage is the major axis of torchtitan's mesh
        stage, rank = divmod(dist.get_rank(), stage_ranks)
        spread = _spread(self._gradients)
        assert isinstance(self.metrics_processor, RecordedMetrics)
        if rank == 0:
            experts = self._experts | _buffers(self.model_parts, "expert_bias")
            record = Record(
                losses=self._losses,
                indexer_losses=self._indexer,
                selections=self._selections,
                validation_losses=self.metrics_processor.validation_losses,
                gradients=self._gradients,
                spread=spread,
                experts={name: buffer.cpu() for name, buffer in experts.items()},
            )
            torch.save(record, Path(self.job_config.job.dump_folder) / RECORDS.replace("*", str(stage)))


class RoundedRecorder(StockRecorder):
    """The same record of torchtitan as it is, from weights of which each is the float before or after that of the checkpoint.

    Args:
        job_config: as torchtitan's Trainer takes it, with a checkpoint to begin with.
        seed: of which weights grow.
    """

    def __init__(self, job_config: JobConfig, seed: int) -> None:
        super().__init__(job_config)
        self._generator = torch.Generator().manual_seed(seed)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One step; before the first one, the weights that were loaded are moved."""
        if self.step == 1:
            for part in self.model_parts:
                one_rounding_away(part.parameters(), self._generator)
        super().train_step(data_iterator)


class CompositionRecorder(StockRecorder, CompositionTrainer):
    """The same record from training with a composition."""

    def selection(self, call: Call) -> dict[str, Tensor]:
        """As that of one process; every rank of the composition takes part."""
        plan, mine = self.cp.plan, self.cp.made("topk", call)
        everyone: list[Tensor] = [mine]
        if plan.degree > 1:
            everyone = [mine] * plan.degree
            dist.all_gather_object(everyone, mine, group=self.parallel_dims.get_mesh("cp").get_group())
        topk = mine.new_full((mine.shape[0], 1, plan.shape.sequence, mine.shape[3]), -1)
        for positions, part in zip(selecting(plan), everyone, strict=True):
            topk[:, :, list(positions)] = part
        whole = {n: self.cp.unshard(call.tensors[n].contiguous(), dim=2) for n in INDEX}
        return {"topk": topk, **whole}


@torch.no_grad()
def one_rounding_away(parameters: Iterable[Tensor], generator: torch.Generator) -> None:
    """Move every number to the float before or after it, in place.

    Args:
        parameters: float32.
        generator: draws which number grows, alike on ranks that hold parts of the same sizes.
    """
    for parameter in parameters:
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        grows = torch.rand(held.shape, generator=generator).to(held.device) < 0.5
        held.copy_(torch.nextafter(held, torch.where(grows, torch.inf, -torch.inf)))


def _without_masks(
    input_dict: dict[str, Tensor], labels: Tensor, model_parts: Sequence[nn.Module]
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, object]]:
    """A batch as in training; torchtitan's validator also makes masks, which DeepSeek-V3 then refuses."""
    return input_dict["input"], labels, {name: x for name, x in input_dict.items() if name != "input"}, {}


def _forget_experts(part: nn.Module) -> None:
    """Start the counts of step 1 anew: torchtitan counts where the router sends tokens that do not exist, and the bias follows."""
    for buffer in _named(part, "tokens_per_expert").values():
        buffer.zero_()


def _whole(gradient: Tensor) -> Tensor:
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.detach().to("cpu", torch.float64, copy=True)


def _buffers(parts: Sequence[nn.Module], kind: str) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for part in parts for name, buffer in _named(part, kind).items()}


def _named(part: nn.Module, kind: str) -> dict[str, Tensor]:
    return {WRAPPERS.sub("", name): buffer for name, buffer in part.named_buffers() if name.endswith(f".{kind}")}


def _spread(gradients: dict[str, Tensor]) -> dict[str, float]:
    """How far ranks that hold the same parameter are apart; a gradient that was not summed differs between them."""
    norms = {name: gradient.norm().item() for name, gradient in gradients.items()}
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, norms)
    spread = {}
    for name, norm in norms.items():
        held = [other[name] for other in everyone if name in other]
        spread[name] = (max(held) - min(held)) / norm if norm else max(held)
    return spread
