"""torchtitan's own Trainer, with a composition in the place of its context parallelism.

Importing this imports torchtitan, on CPU inside `cpu_shims`.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from cp_engine.errors import ConfigError, Problem
from cp_engine.hosts.torchtitan.companions import Declared, to_cut
from cp_engine.hosts.torchtitan.cpu_shims import experts_ordered_on
from cp_engine.hosts.torchtitan.guard import Guard
from cp_engine.hosts.torchtitan.host import RecordedMetrics
from cp_engine.hosts.torchtitan.indexer_loss import IndexerTrainer
from cp_engine.hosts.torchtitan.validation import Batch, CompositionValidator, of_last_stage
from cp_engine.plan.ir import Plan
from cp_engine.runtime.context import ContextParallel
from cp_engine.runtime.pulse import Pulse


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one logged step is reported with, the same on every rank but for `seconds`.

    Args:
        step: counted from 1.
        loss: mean over the predicted tokens of all ranks.
        tokens_per_second: of the whole job.
        cp_bytes_sent: by the engine's collectives in this step, summed over ranks; a rank's own part excluded.
        seconds: wall time of the step.
        validation_loss: mean over the predicted tokens of the validation batches; None at a step without validation.
        indexer_loss: mean over tokens and layers; None for a model without indexers.
    """

    step: int
    loss: float
    tokens_per_second: float
    cp_bytes_sent: int
    seconds: float
    validation_loss: float | None = None
    indexer_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What happens when a rank does not go on.

    Args:
        seconds: that the others wait for it; None for nine tenths of torchtitan's timeout that holds.
        fail: ends this process.
    """

    seconds: float | None
    fail: Callable[[Exception], object]


class CompositionTrainer(IndexerTrainer):
    """Trains with the attention of one plan.

    Args:
        job_config: torchtitan's configuration; its context-parallel degree is the plan's.
        plan: the compiled composition.
        report: called on every rank after each logged step, and after its validation if there is one.
        kernels: device whose kernels are chosen; None is the job's.
        companions: what is cut with the tokens; none but `positions` if nothing is said.
        goes_on: where a loss is not finite.
        watching: for how long a rank may stand still while another one is behind, and what ends this process then.

    Raises:
        ConfigError: a model that brings a validation of its own.
    """

    validator: BaseValidator

    def __init__(
        self,
        job_config: JobConfig,
        plan: Plan,
        report: Callable[[StepReport], None],
        kernels: str | None = None,
        companions: Declared | None = None,
        goes_on: bool = False,
        watching: Watching | None = None,
    ) -> None:
        self._watching, self._pulse = watching, None
        super().__init__(job_config)
        mesh, heads = (self.parallel_dims.get_optional_mesh(name) for name in ("cp", "tp"))
        self.cp = ContextParallel(plan, mesh, self.device.type, kernels, heads)
        self._report = report
        self._declared = companions or Declared()
        self._guard, self._goes_on = Guard(self.parallel_dims, self.device, plan.name), goes_on
        if job_config.validation.enable:
            if type(self.validator) is not Validator:
                what = f"is true, and {job_config.model.name} validates with {type(self.validator).__name__}, which cannot be cut"
                tries = ("titan.validation.enable=false",)
                raise ConfigError([Problem(key="titan.validation.enable", what=what, tries=tries)])
            self.validator = CompositionValidator(self.validator, self.post_dataloading_process, self._validated)

    _pulse: Pulse | None

    def init_distributed(self) -> ParallelDims:
        """The process groups, and from then on a mark of where this rank is."""
        dims = super().init_distributed()
        if (watching := self._watching) is not None and dims.world_size > 1:
            comm = self.job_config.comm

            def bound() -> float:  # after a first step torchtitan shortens the timeout; after a resume there is none
                is_shortened = self._has_trained and self.step > 1 and self._began == 1
                return watching.seconds or 0.9 * (
                    comm.train_timeout_seconds if is_shortened else comm.init_timeout_seconds
                )

            self._pulse = Pulse(bound, lambda: self._passes() if dims.pp == 1 else 0, watching.fail)
        return dims

    _has_trained, _began = False, 0

    def _passes(self) -> int:
        return self.cp.passes if hasattr(self, "cp") else 0  # __init__ is not done

    def _at(self, phase: int, doing: str) -> None:
        if self._pulse is not None:
            self._pulse.mark(self.step, phase, place=f"in step {self.step}, {doing}")

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, object]]:
        """Cut tokens, labels, positions and the companions that are declared per-token by the plan's layout.

        Args:
            input_dict: `input` [B, S] and companions; those that are cut are [B, S, ...].
            labels: [B, S], already shifted.

        Returns:
            Inputs and labels [B, local_sequence], companions of the first pipeline stage, arguments of every stage.

        Raises:
            CallError: a companion that has the sequence length and is not declared, or is to be cut and has another length.
            RankError: ranks that share the sequence read different text.
        """
        self._at(2, "in a pass over a batch")
        self._guard.require_same_text(self.step, input_dict, labels)
        inputs, labels, companions, arguments = super().post_dataloading_process(input_dict, labels)
        batch, sequence = inputs.shape
        positions = companions.pop("positions", None)  # documents that restart at 0 keep doing so, in every stage
        if self.cp.plan.degree == 1:
            return inputs, labels, companions, arguments if positions is None else {**arguments, "positions": positions}
        if positions is None:
            positions = torch.arange(sequence, device=inputs.device).expand(batch, sequence)
        names = to_cut(companions, sequence, self._declared)
        cut = self.cp.shard(inputs, labels, positions, *(companions[name] for name in names), dim=1)
        companions.update(zip(names, cut[3:], strict=True))
        return cut[0], cut[1], companions, {**arguments, "positions": cut[2]}

    def train(self) -> None:
        """Train with the plan attached to every attention of the model, for as long as training runs."""
        with experts_ordered_on(self.device), self.cp.context(*self.model_parts):
            super().train()

    def should_continue_training(self) -> bool:
        """Whether a step is left.

        Raises:
            ConfigError: the checkpoint that was loaded leaves no step to train.
        """
        has_step_left: bool = super().should_continue_training()
        if not has_step_left and not self._has_trained:
            what = f"is {self.job_config.training.steps}, and the checkpoint is already at step {self.step}"
            raise ConfigError(
                [Problem(key="titan.training.steps", what=what, tries=(f"titan.training.steps={self.step + 10}",))]
            )
        return has_step_left

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Loss and gradients of one batch, before they change a weight.

        Raises:
            RankError: on every rank, where the loss of one is not finite.
        """

        def once() -> torch.Tensor:
            loss: torch.Tensor = super(CompositionTrainer, self).forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
            return loss

        loss = once()
        if not self._goes_on:
            self._guard.require_finite(self.step, loss, once, self.model_parts)
        self._at(3, "after a pass over a batch")
        return loss

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One step, reported if torchtitan logs it; by its validation if one follows."""
        self._at(1, "reading its rows")
        if not self._has_trained:
            self._guard.require_same_weights(self.model_parts)
            self._has_trained, self._began = True, self.step
        started, sent, seen = time.perf_counter(), self.cp.bytes_sent, self.ntokens_seen
        super().train_step(data_iterator)
        self._at(4, "after the optimizer's step")
        if not self.metrics_processor.should_log(self.step):
            return
        total = torch.tensor(self.cp.bytes_sent - sent, dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        loss = loss_of_last_stage(self)
        seconds = time.perf_counter() - started
        tokens = (self.ntokens_seen - seen) * self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
        self._step_report = StepReport(
            step=self.step,
            loss=loss,
            tokens_per_second=tokens / seconds,
            cp_bytes_sent=int(total.item()),
            seconds=seconds,
            indexer_loss=self.mean_indexer_loss(),
        )
        if not (self.job_config.validation.enable and self.validator.should_validate(self.step)):
            self._report(self._step_report)

    def close(self) -> None:
        """Finish checkpoints and metrics, and detach the engine."""
        super().close()
        if self._pulse is not None:
            self._pulse.close()
        if hasattr(self, "cp"):  # torchtitan's __init__ may have failed
            self.cp.close()

    def _validated(self, loss: float) -> None:
        self._report(replace(self._step_report, validation_loss=loss))


def loss_of_last_stage(trainer: IndexerTrainer) -> float:
    """The loss that torchtitan logged, on every rank; pipeline stages before the last one log a placeholder."""
    assert isinstance(trainer.metrics_processor, RecordedMetrics)
    loss = trainer.metrics_processor.last_loss
    if not trainer.parallel_dims.pp_enabled:
        return loss
    return of_last_stage(loss, trainer.pp_has_last_stage, trainer.device)
