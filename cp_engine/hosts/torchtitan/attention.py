"""torchtitan 0.2.2's attention modules as calls of the engine: what each passes, under the names that a plan has for it.

Nothing here imports torchtitan. Source: torchtitan/models/attention.py and torchtitan/models/deepseek_v3/model/model.py, v0.2.2.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_engine.errors import CallError, Problem
from cp_engine.hosts.torchtitan.masks import masks_of
from cp_engine.runtime.call import ArgumentReader, Call, HostMask, short


def read_flex(module: nn.Module, args: Sequence[object], named: Mapping[str, object]) -> Call:
    """The call of FlexAttentionWrapper: (q, k, v, *, score_mod, block_mask, scale, return_lse, enable_gqa).

    Args:
        module: whose forward was called.
        args: q, k, v.
        named: arguments by name.

    Returns:
        The call, with the masks that block_mask stands for.

    Raises:
        CallError: what the engine does not compute, all of it by name.
    """
    reader = ArgumentReader(args, named)
    others = reader.others(("score_mod", "block_mask", "scale", "return_lse", "enable_gqa"))
    for name, why in (("score_mod", "changes scores"), ("return_lse", "asks for lse of this rank's tokens alone")):
        if others.get(name) not in (None, False):
            what = f"{short(others[name])} {why}, which no plan accounts for"
            reader.problems.append(Problem(key=f"call.{name}", what=what))
    enable_gqa, scale = reader.flag("enable_gqa", others, False), reader.scale(others)
    mask = False if others.get("block_mask") is None else HostMask(others["block_mask"], masks_of)
    return Call(tensors=reader.tensors(), scale=scale, mask=mask, enable_gqa=enable_gqa)


def read_varlen(module: nn.Module, args: Sequence[object], named: Mapping[str, object]) -> Call:
    """The call of VarlenAttentionWrapper: (xq, xk, xv, attention_masks, scale), packed documents, each causal.

    Args:
        module: whose forward was called.
        args: positional arguments.
        named: arguments by name.

    Returns:
        The call; its result is [B * S_local, H, Dv], as the wrapper's.

    Raises:
        CallError: an argument that is missing or unknown.
    """
    names = {"xq": "q", "xk": "k", "xv": "v"}
    place = (*args[:3], *(named.get(n) for n in list(names)[len(args[:3]) :]))
    rest = dict(zip(("attention_masks", "scale"), args[3:], strict=False))
    rest.update({n: x for n, x in named.items() if n not in names})
    reader = ArgumentReader(place, rest)
    others = reader.others(("attention_masks", "scale"))
    if others.get("attention_masks") is None:
        reader.problems.append(Problem(key="call.attention_masks", what="is missing"))
    scale, mask = reader.scale(others), HostMask(others.get("attention_masks"), masks_of)
    return Call(tensors=reader.tensors(), scale=scale, mask=mask, enable_gqa=True, finish=_packed)


def _packed(out: Tensor, losses: Mapping[str, Tensor], sequence: int) -> Tensor:
    return out.transpose(1, 2).flatten(0, 1)


class LatentAttention(Protocol):
    """torchtitan's multi-head latent attention, as far as it is read."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    softmax_scale: float
    wq: nn.Module
    wq_a: nn.Module
    wq_b: nn.Module
    q_norm: nn.Module
    wkv_a: nn.Module
    kv_norm: nn.Module
    wkv_b: nn.Linear
    wo: nn.Module


def read_latent(module: nn.Module, args: Sequence[object], named: Mapping[str, object]) -> Call:
    """The call of DeepSeek-V3's attention module: (x, freqs_cis, attention_masks, positions), with its projections up to the latent.

    Args:
        module: whose forward was called.
        args: positional arguments.
        named: arguments by name.

    Returns:
        q, kv_latent, k_rope and the parameter kv_up; finishing it is the output projection.

    Raises:
        CallError: an expansion that is no plain matrix, or is sharded over heads; an unknown argument.
    """
    given = dict(zip(("x", "freqs_cis", "attention_masks", "positions"), args, strict=False))
    given.update(named)
    m = cast(LatentAttention, module)
    _require_plain(m.wkv_b, set(given) - {"x", "freqs_cis", "attention_masks", "positions"})
    x, frequencies, positions = cast(Tensor, given["x"]), given["freqs_cis"], given.get("positions")
    carried = given.get("attention_masks")
    rotated = sys.modules[type(module).__module__].apply_rotary_emb
    batch, length, _ = x.shape
    q = m.wq(x) if m.q_lora_rank == 0 else m.wq_b(m.q_norm(m.wq_a(x)))
    q_nope, q_rope = q.view(batch, length, -1, m.qk_head_dim).split([m.qk_nope_head_dim, m.qk_rope_head_dim], -1)
    q = torch.cat((q_nope, rotated(q_rope, frequencies, positions)), -1)
    latent, k_rope = m.wkv_a(x).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
    latent, k_rope = m.kv_norm(latent), rotated(k_rope.unsqueeze(2), frequencies, positions)
    weight = m.wkv_b.weight.to(latent.dtype)  # under autocast parameters stay wide, and a linear layer casts them
    return Call(
        tensors={"q": q.transpose(1, 2), "kv_latent": latent.unsqueeze(1), "k_rope": k_rope.transpose(1, 2)},
        parameters={"kv_up": weight.view(-1, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)},
        scale=m.softmax_scale,
        mask=True if carried is None else HostMask(carried, masks_of),
        finish=lambda out, losses, sequence: m.wo(out.transpose(1, 2).reshape(batch, length, -1)),
    )


def _require_plain(linear: nn.Module, unknown: set[str]) -> None:
    problems = [Problem(key=f"call.{n}", what="is an argument that no plan accounts for") for n in sorted(unknown)]
    rule = ("rule", "the engine expands the latent itself, for the heads of each rank, with the layer's own matrix")
    if type(linear) is not nn.Linear or linear.bias is not None:
        what = f"is a {type(linear).__name__}" + (" with a bias" if isinstance(linear, nn.Linear) else "")
        problems.append(Problem(key="wkv_b", what=what, details=(rule,), tries=("a composition without expand",)))
    elif isinstance(linear.weight, DTensor):
        what = f"is sharded over {linear.weight.device_mesh}"
        problems.append(Problem(key="wkv_b", what=what, details=(rule,), tries=("a composition without expand",)))
    if problems:
        raise CallError(problems)
