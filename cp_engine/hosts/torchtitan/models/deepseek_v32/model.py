"""torchtitan's DeepSeek-V3 model with sparse attention in its blocks."""

from copy import copy
from typing import cast

import torch
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model, TransformerBlock

from cp_engine.hosts.torchtitan.models.deepseek_v32.args import DeepSeekV32ModelArgs
from cp_engine.hosts.torchtitan.models.deepseek_v32.attention import Attention
from cp_engine.hosts.torchtitan.models.deepseek_v32.indexer import IndexerLoss


class Block(TransformerBlock):  # type: ignore[misc]
    """torchtitan's transformer block (norms, mixture of experts or dense layer) with sparse attention.

    Args:
        layer_id: counted from 0.
        args: sizes of the model.
        indexer_loss: the model part's own.
    """

    def __init__(self, layer_id: int, args: DeepSeekV32ModelArgs, indexer_loss: IndexerLoss) -> None:
        super().__init__(layer_id, args)
        self.attention = Attention(args, indexer_loss)
        self.is_warm_up = args.warm_up

    def forward(
        self, x: Tensor, freqs_cis: Tensor, attention_masks: None = None, positions: Tensor | None = None
    ) -> Tensor:
        """The block; in the warm-up stage only the residual path and the indexer are differentiated.

        Args:
            x: [B, S, dim].
            freqs_cis: complex [longest sequence, rope / 2].
            attention_masks: must be None.
            positions: [1, S] or [B, S]; None is 0 .. S - 1.

        Returns:
            [B, S, dim].
        """
        if not self.is_warm_up:
            out: Tensor = super().forward(x, freqs_cis, attention_masks, positions)
            return out
        # Each attention carries its indexer's loss into the residual path, so backward needs no other way through the layer.
        x = x + self.attention(self.attention_norm(x.detach()), freqs_cis, attention_masks, positions)
        feed_forward = self.moe if self.moe_enabled else self.feed_forward
        return x + cast(Tensor, feed_forward(self.ffn_norm(x.detach())))

    def init_weights(self, buffer_device: torch.device) -> None:
        """Draw all weights, and make the buffers.

        Args:
            buffer_device: where buffers will be used.
        """
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        self.attention.init_weights(self.weight_init_std, buffer_device)
        if self.moe_enabled:
            self.moe.init_weights(self.weight_init_std, buffer_device)
        else:
            self.feed_forward.init_weights(self.weight_init_std)


class DeepSeekV32Model(DeepSeekV3Model):  # type: ignore[misc]
    """DeepSeek-V3.2.

    In training mode, `indexer_loss.weight` must be set before each forward.

    Args:
        args: sizes of the model; `warm_up` freezes everything but the indexers.
    """

    def __init__(self, args: DeepSeekV32ModelArgs) -> None:
        without_blocks = copy(args)
        without_blocks.n_layers = 0  # upstream's would have dense attention
        super().__init__(without_blocks)
        self.model_args = args
        self.indexer_loss = IndexerLoss()
        for layer_id in range(args.n_layers):
            self.layers[str(layer_id)] = Block(layer_id, args, self.indexer_loss)
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)  # upstream leaves the last norm its own epsilon
        if args.warm_up:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".indexer." in name)
