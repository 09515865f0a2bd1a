"""A loss function whose values may be added up: what ranks that hold parts of a batch rely on, checked on the first batch.

torchtitan divides the loss by the predicted tokens of all ranks, and gradients are summed over ranks. That is right where the loss
function sums over tokens; a mean over a rank's own tokens would grow with the number of ranks.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from cp_engine.errors import CallError, Problem

MOST = 128
"""Places along the cut dim that are compared: a mean shows in two of them."""
NAMES = ("batch", "sequence")


class SummedLoss:
    """A loss function that is compared, at its first call that can tell, with the sum over the two halves of that call.

    Args:
        function: (predictions, labels [B, S, ...]) -> a scalar.
        dims: along which ranks hold parts: 0, the batch; 1, the sequence.
    """

    def __init__(self, function: LossFunction, dims: Sequence[int]) -> None:
        self.function, self._left = function, list(dims)

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """The loss.

        Args:
            predictions: the model's result; its tensors that begin with labels' [B, S] belong to tokens.
            labels: [B, S, ...].

        Raises:
            CallError: the loss of the whole is not the sum of the losses of its halves.
        """
        for dim in tuple(self._left):
            if self._is_compared(predictions, labels, dim):
                self._left.remove(dim)
        loss: Tensor = self.function(predictions, labels)
        return loss

    def _is_compared(self, predictions: object, labels: Tensor, dim: int) -> bool:
        """Whether this batch could tell."""
        if labels.ndim <= dim:
            return False
        others = [d for d in range(labels.ndim) if d != dim]
        targets = (labels != IGNORE_INDEX).any(others) if others else labels != IGNORE_INDEX
        places = targets[: int(targets.nonzero()[0]) + MOST].nonzero().flatten().tolist() if targets.any() else []
        if len(places) < 2:
            return False
        start, middle, stop = places[0], places[len(places) // 2], places[-1] + 1
        whole, first, second = (
            self._of(predictions, labels, dim, a, b) for a, b in ((start, stop), (start, middle), (middle, stop))
        )
        if not all(torch.isfinite(x) for x in (whole, first, second)):
            return False
        parts = first.double() + second.double()
        # each of the three is rounded once to the loss' own dtype; what is summed inside is the same on both sides
        bound = (1e-4 + 4 * torch.finfo(whole.dtype).eps) * float(max(whole.abs(), first.abs() + second.abs()))
        if abs(float(whole.double() - parts)) > bound:
            raise CallError([self._problem(dim, float(whole), float(parts))])
        return True

    def _of(self, predictions: object, labels: Tensor, dim: int, start: int, stop: int) -> Tensor:
        def cut(x: object) -> object:
            belongs = isinstance(x, Tensor) and x.shape[: dim + 1] == labels.shape[: dim + 1]
            return x.detach().narrow(dim, start, stop - start) if isinstance(x, Tensor) and belongs else x

        devices = [labels.device] if labels.device.type == "cuda" else []
        # as it is written, since a graph would be made again for these sizes; and the numbers that it draws are put back
        with torch.no_grad(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            loss: Tensor = self.function(tree_map(cut, predictions), labels.narrow(dim, start, stop - start))
        return loss.detach()

    def _problem(self, dim: int, whole: float, parts: float) -> Problem:
        what = f"{whole:.6g} of some tokens, and {parts:.6g} as the sum over two halves of them, along the {NAMES[dim]}"
        rule = (
            "rule",
            "ranks hold parts of a batch and their losses are added up, so a loss function sums over tokens; "
            "torchtitan divides by the predicted tokens of all ranks",
        )
        tries = ('reduction="sum" in the loss function', "cp=none on one rank, where nothing is added up")
        return Problem(key=f"loss function {name_of(self.function)}", what=what, details=(rule,), tries=tries)


def name_of(function: object) -> str:
    """The name that a user knows a function by, also behind partial and torch.compile."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "_torchdynamo_orig_callable", function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', type(function).__module__)}.{name}"


def summed(build: Callable[..., LossFunction]) -> Callable[..., SummedLoss]:
    """The `build_loss_fn` of a TrainSpec, whose loss is checked where ranks hold parts of a batch.

    Args:
        build: the model's own.

    Returns:
        A function with torchtitan's signature.
    """

    def build_loss_fn(job_config: JobConfig, parallel_dims: ParallelDims) -> SummedLoss:
        dims = [0] * parallel_dims.dp_enabled + [1] * parallel_dims.cp_enabled
        return SummedLoss(build(job_config, parallel_dims=parallel_dims), dims)

    return build_loss_fn
