"""torchtitan-npu 0.2.2's sparse attention module as a call of the engine; nothing here imports that package.

Source: class DSV32_SDPA of torchtitan_npu/models/deepseek_v32/model/model.py, 0.2.2.post2.
"""

from collections.abc import Mapping, Sequence
from math import isfinite

import torch
from torch import Tensor, nn

from cp_engine.errors import CallError, Problem
from cp_engine.runtime.call import Call, short
from cp_engine.runtime.sparse_attention import side_by_side, size_problems

TENSORS = ("q", "k", "v", "q_indexer", "k_indexer", "weights")
ARGUMENTS = ("q", "k", "v", "attn_mask", "scale", "q_indexer", "k_indexer", "weights", "end_pos", "index_topk")


def read_absorbed(module: nn.Module, args: Sequence[object], named: Mapping[str, object]) -> Call:
    """The call of DSV32_SDPA in absorbed form: q, k and v are [B, heads, S, width], the indexer's tensors [B, S, heads, width].

    k holds the latent and the rotary key side by side, and v the latent once more; it travels once.

    Args:
        module: whose forward was called.
        args: positional arguments.
        named: arguments by name.

    Returns:
        The call; its result is (loss, out), the loss divided by the tokens of the whole sequence, so that the gradients of all ranks
        sum to those of one. torchtitan-npu divides by the tokens of a rank, and its trainer takes that back.

    Raises:
        CallError: an argument that no plan accounts for; keys that are expanded for every head.
    """
    given = {**dict(zip(ARGUMENTS, args, strict=False)), **named}
    found = {n: x for n, x in given.items() if n in TENSORS and isinstance(x, Tensor)}
    problems = [Problem(key=f"call.{n}", what="is missing") for n in TENSORS if n not in found]
    if given.get("q_indexer") is None and len(problems) <= 3:
        rule = (
            "rule",
            "the module attends to all keys without the indexer's tensors, and no plan of the engine does for it",
        )
        problems = [Problem(key="call.q_indexer", what="is missing", details=(rule,))]
    problems += [Problem(key=f"call.{n}", what="is given twice") for n in ARGUMENTS[: len(args)] if n in named]
    if len(args) > len(ARGUMENTS):
        problems.append(
            Problem(key="call", what=f"carries {len(args)} positional arguments, more than {len(ARGUMENTS)}")
        )
    for name in (*(n for n in given if n not in ARGUMENTS), "attn_mask"):
        if given.get(name) is not None:
            what = f"the attention call carries {name}={short(given[name])}, which no plan accounts for"
            problems.append(Problem(key=f"call.{name}", what=what))
    scale, topk = given.get("scale"), given.get("index_topk")
    if not isinstance(scale, float | int) or isinstance(scale, bool) or not isfinite(scale):
        problems.append(Problem(key="call.scale", what=f"must be a number, not {short(scale)}"))
    if not isinstance(topk, int) or isinstance(topk, bool):
        problems.append(Problem(key="call.index_topk", what=f"must be a whole number, not {short(topk)}"))
    problems = problems or _form_problems(found, given.get("end_pos"))
    if problems:
        raise CallError(problems)
    assert isinstance(scale, float | int) and isinstance(topk, int)
    width, batch = found["v"].shape[3], found["q"].shape[0]
    tensors = {
        "q": found["q"],
        "kv_latent": found["v"],
        "k_rope": found["k"][..., width:],
        "q_index": found["q_indexer"].transpose(1, 2),
        "k_index": found["k_indexer"].transpose(1, 2),
        "w_index": found["weights"].transpose(1, 2).unsqueeze(3),
    }
    problems = size_problems(tensors)
    if problems:
        raise CallError(problems)
    return Call(
        tensors=side_by_side(tensors),
        scale=float(scale),
        topk=topk,
        finish=lambda out, losses, sequence: (losses["indexer_loss"] / (batch * sequence), out),
    )


def _form_problems(found: Mapping[str, Tensor], end: object) -> list[Problem]:
    """Whether the tensors are of the absorbed form, whose key holds the value."""
    k, v = found["k"], found["v"]
    dims = {n: x.ndim for n, x in found.items()}
    if any(d != (3 if n == "weights" else 4) for n, d in dims.items()):
        return [Problem(key="call", what=f"has tensors of {dims} dims; all have four, and weights three")]
    rule = ("rule", "in absorbed form the latent is key and value of every head; model_args.enable_mla_absorb decides")
    if k.shape[1] != 1 or v.shape[1] != 1:
        what = f"k and v have {k.shape[1]} and {v.shape[1]} heads, and the engine takes the latent, one for all heads"
        return [Problem(key="call.k", what=what, details=(rule,))]
    # a comparison on a device would wait for it; a rehearsal on a CPU makes it
    is_compared = (
        k.device.type == "cpu" and k.shape[:3] == v.shape[:3] and k.shape[3] >= v.shape[3]
    )  # else sizes are refused
    if is_compared and not torch.allclose(k[..., : v.shape[3]], v, 0.0, 0.0, equal_nan=True):
        return [Problem(key="call.k", what="does not begin with v", details=(rule,))]
    if end is not None and end != found["q"].shape[2]:
        what = f"is {short(end)}, and the call has {found['q'].shape[2]} queries: keys of earlier calls are not taken"
        return [Problem(key="call.end_pos", what=what)]
    return []
