"""The lightning indexer: what it scores keys with, and how its loss reaches the trainer."""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torchtitan.models.utils import trunc_normal_

from cp_engine.errors import CallError, Problem
from cp_engine.hosts.torchtitan.models.deepseek_v32.args import DeepSeekV32ModelArgs
from cp_engine.hosts.torchtitan.models.deepseek_v32.rotary import hadamard_signs, rotate_hadamard, rotate_pairs


class Indexer(nn.Module):
    """Queries, keys and head weights of the index scores I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s]).

    The public code rounds q and k to 8 bits and keeps their scales in w; training here does not round.

    Args:
        args: sizes of the model.

    Source: DeepSeek-V3.2 report, equation 1; class Indexer of deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py.
    """

    hadamard: Tensor

    def __init__(self, args: DeepSeekV32ModelArgs) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.rope_dim = args.index_n_heads, args.index_head_dim, args.qk_rope_head_dim
        self.wq_b = nn.Linear(args.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(args.dim, self.n_heads, bias=False)
        self.register_buffer("hadamard", hadamard_signs(self.head_dim), persistent=False)

    def forward(
        self, x: Tensor, q_latent: Tensor, freqs_cis: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What scores are made from.

        Args:
            x: [B, S, dim], detached: the indexer does not train the model.
            q_latent: [B, S, q_lora_rank], normalised, detached.
            freqs_cis: complex [longest sequence, rope / 2].
            positions: [1, S] or [B, S]; None is 0 .. S - 1.

        Returns:
            q_index [B, Hi, S, Di], k_index [B, 1, S, Di] and w_index [B, Hi, S, 1], all in q_index's dtype;
            the scale (Di * Hi) ** -0.5 is in w_index.
        """
        q = self.wq_b(q_latent).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(x)).unsqueeze(2).to(q.dtype)  # under autocast a norm returns float32
        q, k = (self._rotate(y, freqs_cis, positions).transpose(1, 2) for y in (q, k))
        w = self.weights_proj(x) * (self.head_dim * self.n_heads) ** -0.5
        return q, k, w.transpose(1, 2).unsqueeze(-1)

    def _rotate(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        turned, rest = x.split([self.rope_dim, self.head_dim - self.rope_dim], -1)
        turned = rotate_pairs(turned, freqs_cis, positions, interleaved=False)
        return rotate_hadamard(torch.cat((turned, rest), -1), self.hadamard)

    def init_weights(self, buffer_device: torch.device) -> None:
        """Draw the weights, and make the buffer where it will be used.

        The deviation follows the width: torchtitan's 0.02 is about that of the public sizes, and in a narrow model it would begin
        with scores near zero, which no selection follows from.

        Args:
            buffer_device: where buffers will be used.
        """
        for linear in (self.wq_b, self.wk, self.weights_proj):
            trunc_normal_(linear.weight, mean=0.0, std=linear.in_features**-0.5)
        self.k_norm.reset_parameters()
        with torch.device(buffer_device):
            self.hadamard = hadamard_signs(self.head_dim)


class IndexerLoss:
    """What the attention modules of one model part share: the weight of their loss, and its sum for the log.

    A plain object, so that a deep copy of a model (one for each pipeline stage) has one of its own.

    Args:
        weight: scalar, `indexer_loss_coeff / global token count`, set by the trainer before each forward and left until
            the backward ends (a recompute reads it again).
    """

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Count one call's loss for the log; a recompute under activation checkpointing is not counted again.

        Args:
            loss: scalar, the sum over the call's tokens.
        """
        if torch._C._current_graph_task_id() != -1:  # inside a backward: it repeats a call that was counted
            return
        self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()

    def take(self) -> Tensor:
        """The sum of all losses since the last `take`, over tokens and layers.

        Returns:
            A scalar; zero where no call was counted, as in a pipeline stage without layers.
        """
        taken, self._sum = self._sum, None
        return torch.zeros((), device=None if self.weight is None else self.weight.device) if taken is None else taken

    def require_weight(self) -> Tensor:
        """The weight.

        Raises:
            CallError: nobody has set it.
        """
        if self.weight is None:
            rule = "the loss is divided by the tokens of all ranks, which only the trainer knows"
            raise CallError(
                [
                    Problem(
                        key="model.indexer_loss.weight",
                        what="is None, and the model is in training mode with gradients enabled",
                        details=(("rule", rule),),
                        tries=("model.indexer_loss.weight = torch.tensor(coefficient / global_tokens)", "model.eval()"),
                    )
                ]
            )
        return self.weight


class Carry(torch.autograd.Function):
    """Hands a loss its gradient in the backward of another tensor.

    So the loss needs no way to the trainer of its own: FSDP's hooks, activation checkpointing and pipeline stages see its
    backward inside that of the layer.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, out: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight.detach().to(loss).expand_as(loss))
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]  # not in torch's stub
        return grad, weight, None


def carry(out: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
    """A tensor as it is, whose backward also runs that of `weight * loss`.

    Args:
        out: any shape.
        loss: scalar.
        weight: scalar; the gradient of the loss.

    Returns:
        out.
    """
    carried: Tensor = Carry.apply(out, loss, weight)
    return carried
