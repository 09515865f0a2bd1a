"""Multi-head latent attention in absorbed form, over the keys that the indexer selects."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.utils import trunc_normal_

from cp_engine.errors import CallError, Problem
from cp_engine.hosts.torchtitan.models.deepseek_v32.args import DeepSeekV32ModelArgs
from cp_engine.hosts.torchtitan.models.deepseek_v32.indexer import Indexer, IndexerLoss, carry
from cp_engine.hosts.torchtitan.models.deepseek_v32.rotary import rotate_pairs
from cp_engine.runtime.sparse_attention import SparseAttention


def here(x: Tensor) -> Tensor:
    """What this rank holds of a tensor that tensor parallelism spreads; of one that every rank holds whole, each rank's gradient is
    its share of the sum, since each computes with heads of its own."""
    if not isinstance(x, DTensor):
        return x
    local: Tensor = x.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in x.placements])
    return local


class Attention(nn.Module):
    """torchtitan's DeepSeek-V3 attention (same parameters, names and scale), sparse.

    Keys and values are never expanded for a head: the expansion `wkv_b` moves to the other side of both products, so that
    the latent is key and value of every head. Not a subclass of torchtitan's attention, which the engine may attach to as
    a dense one.

    Args:
        args: sizes of the model.
        indexer_loss: the model part's own.

    Source: torchtitan/models/deepseek_v3/model/model.py, v0.2.2; class MLA (the branch for decoding) of
        deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py.
    """

    def __init__(self, args: DeepSeekV32ModelArgs, indexer_loss: IndexerLoss) -> None:
        super().__init__()
        self.n_heads, self.latent_dim, self.rope_dim = args.n_heads, args.kv_lora_rank, args.qk_rope_head_dim
        self.nope_dim, self.v_head_dim = args.qk_nope_head_dim, args.v_head_dim
        self.q_lora_rank = args.q_lora_rank  # read by torchtitan's plan for tensor parallelism
        self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(args.q_lora_rank, eps=args.norm_eps)
        self.wq_b = nn.Linear(args.q_lora_rank, self.n_heads * (self.nope_dim + self.rope_dim), bias=False)
        self.wkv_a = nn.Linear(args.dim, self.latent_dim + self.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(self.latent_dim, eps=args.norm_eps)
        self.wkv_b = nn.Linear(self.latent_dim, self.n_heads * (self.nope_dim + self.v_head_dim), bias=False)
        self.wo = nn.Linear(self.n_heads * self.v_head_dim, args.dim, bias=False)
        self.indexer = Indexer(args)
        self.inner_attention = SparseAttention(args.index_topk, is_dense=args.warm_up)
        self.indexer_loss = indexer_loss
        self.softmax_scale: float = (self.nope_dim + self.rope_dim) ** -0.5
        if args.max_seq_len > args.original_seq_len:
            self.softmax_scale *= (0.1 * args.mscale * math.log(args.rope_factor) + 1.0) ** 2

    def forward(
        self, x: Tensor, freqs_cis: Tensor, attention_masks: None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Attention, causal; in training its backward also trains the indexer.

        Args:
            x: [B, S, dim].
            freqs_cis: complex [longest sequence, rope / 2].
            attention_masks: must be None.
            positions: [1, S] or [B, S]; None is 0 .. S - 1.

        Returns:
            [B, S, dim].

        Raises:
            CallError: a mask; or in training, `indexer_loss.weight` is not set.
        """
        if attention_masks is not None:
            what = f"is a {type(attention_masks).__name__}, and sparse attention is causal and takes no mask"
            raise CallError([Problem(key="call.attention_masks", what=what)])
        weight = self.indexer_loss.require_weight() if self.training and torch.is_grad_enabled() else None
        q_latent = self.q_norm(self.wq_a(x))
        latent, k_rope = self.wkv_a(x).split([self.latent_dim, self.rope_dim], -1)
        # from here on what this rank computes, which under tensor parallelism are some of the heads
        q, latent, k_rope, up = (
            here(y) for y in (self.wq_b(q_latent), self.kv_norm(latent), k_rope, self.wkv_b.weight)
        )
        read, q_latent, freqs_cis = (here(y) for y in (x.detach(), q_latent.detach(), freqs_cis))
        positions = None if positions is None else here(positions)
        q_index, k_index, w_index = self.indexer(read, q_latent, freqs_cis, positions)
        q_nope, q_rope = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim)).split([self.nope_dim, self.rope_dim], -1)
        q_rope, k_rope = (
            rotate_pairs(y, freqs_cis, positions, interleaved=True) for y in (q_rope, k_rope.unsqueeze(2))
        )
        up_k, up_v = up.unflatten(0, (q_nope.shape[2], -1)).split([self.nope_dim, self.v_head_dim], 1)
        q = torch.cat((torch.einsum("bshn,hnl->bhsl", q_nope, up_k), q_rope.transpose(1, 2)), -1)
        latent = latent.to(q.dtype).unsqueeze(1)  # under autocast a norm returns float32
        out, loss = self.inner_attention(
            q,
            latent,
            k_rope.transpose(1, 2),
            q_index=q_index,
            k_index=k_index,
            w_index=w_index,
            scale=self.softmax_scale,
        )
        out = self.wo(torch.einsum("bhsl,hvl->bshv", out, up_v).flatten(2))
        if self.training:
            self.indexer_loss.add(loss)
        return out if weight is None else carry(out, loss, weight)

    def init_weights(self, init_std: float, buffer_device: torch.device) -> None:
        """Draw the weights as torchtitan does, then the indexer's.

        Args:
            init_std: of the output projection; it falls with depth.
            buffer_device: where buffers will be used.
        """
        for linear in (self.wkv_a, self.wkv_b, self.wq_a, self.wq_b):
            trunc_normal_(linear.weight, mean=0.0, std=0.02)
        trunc_normal_(self.wo.weight, mean=0.0, std=init_std)
        self.kv_norm.reset_parameters()
        self.q_norm.reset_parameters()
        self.indexer.init_weights(buffer_device)
