"""Calls of npu_fusion_attention and its gradient: their sizes, their values, and what the reference kernels give."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cp_engine.errors import KernelError, Problem
from cp_engine.kernels.ascend import dense_reference as reference
from cp_engine.kernels.ascend.layouts import COPIES
from cp_engine.kernels.ascend.operators import COMPRESSED

Arguments = Mapping[str, object]
ROUNDING = 1e-2
"""How far above 1 a row of softmax may sum by rounding of its statistics."""


def tensor(given: Arguments, name: str) -> Tensor:
    """An argument that is a tensor."""
    x = given[name]
    assert isinstance(x, Tensor)
    return x


def refusal(operator: str, argument: str, what: str, rule: str) -> KernelError:
    """The error of a value that the operator would misread."""
    return KernelError([Problem(key=f"npu.{operator}.{argument}", what=what, details=(("rule", rule),))])


def sizes(given: Arguments) -> dict[str, object]:
    """What follows from the layout; nothing for one that is not known."""
    q, k, v, layout = (*(tensor(given, n) for n in ("query", "key", "value")), given["input_layout"])
    heads = int(str(given["head_num"]))
    dims = {"BSH": 3, "SBH": 3, "BNSD": 4, "BSND": 4, "TND": 3}.get(str(layout))
    if dims is None or any(x.ndim != dims for x in (q, k, v)):
        return {"input_layout": f"{layout} of {q.ndim} dims"}
    if layout in ("BSH", "SBH"):
        width = q.shape[2] // max(1, heads)
        b, s = (0, 1) if layout == "BSH" else (1, 0)
        kv_heads = k.shape[2] // max(1, width)
        found = (heads, kv_heads, width, width, v.shape[2] // max(1, kv_heads), q.shape[b], q.shape[s], k.shape[s])
    else:
        n, s = {"BNSD": (1, 2), "BSND": (2, 1), "TND": (1, 0)}[str(layout)]
        batch = 1 if layout == "TND" else q.shape[0]
        found = (q.shape[n], k.shape[n], q.shape[-1], k.shape[-1], v.shape[-1], batch, q.shape[s], k.shape[s])
    names = ("heads", "kv_heads", "head_dim", "k_head_dim", "v_head_dim", "batch", "q_tokens", "k_tokens")
    facts: dict[str, object] = dict(zip(names, found, strict=True))
    rows = (found[6],) if layout == "TND" else (found[5], found[0], found[6])
    facts["statistics"] = [*rows, *([found[0]] if layout == "TND" else []), COPIES]
    facts["square"] = [found[6], found[7]]
    if layout in ("BSH", "SBH"):
        facts |= {"k_batch": k.shape[b], "v_batch": v.shape[b], "v_tokens": v.shape[s], "v_heads": found[1]}
    else:
        facts |= {"v_tokens": v.shape[s], "v_heads": v.shape[n]}
        facts |= {f"{x}_batch": 1 if layout == "TND" else t.shape[0] for x, t in (("k", k), ("v", v))}
    if isinstance(dy := given.get("dy"), Tensor) and layout not in ("BSH", "SBH"):
        facts["dy_width"] = dy.shape[-1]
    for name, ends in (("q", given["actual_seq_qlen"]), ("k", given["actual_seq_kvlen"])):
        listed = list(ends) if isinstance(ends, list | tuple) else []
        facts |= {f"end_{name}": listed[-1] if listed else None, f"sequences_{name}": len(listed)}
    if isinstance(mask := given["atten_mask"], Tensor):
        leads = [[], [1, 1], [facts["batch"], 1], [facts["batch"], facts["heads"]]]
        facts |= {"mask_lead": list(mask.shape[:-2]), "mask_leads": leads[:1] if layout == "TND" else leads}
    return facts


def compute(given: Arguments) -> object:
    """The forward operator."""
    masking = _masking("npu_fusion_attention", given)
    out, highest, total = reference.forward(
        *_call(given), masking, float(str(given["scale"])), str(given["softmax_layout"])
    )
    return out, highest, total, out.new_empty(0), 0, 0, 0


def compute_gradient(given: Arguments) -> object:
    """The gradient operator."""
    name = "npu_fusion_attention_grad"
    masking = _masking(name, given)
    q, k, v, heads, layout = _call(given)
    statistics = tensor(given, "softmax_max"), tensor(given, "softmax_sum")
    for argument, x in zip(("softmax_max", "softmax_sum"), statistics, strict=True):
        if not torch.allclose(x, x[..., :1].expand_as(x), rtol=0, atol=0, equal_nan=True):
            raise refusal(name, argument, "its last dim holds different values", "each statistic is there 8 times")
    dq, dk, dv, largest = reference.backward(
        (q, k, v),
        tensor(given, "dy"),
        heads,
        layout,
        masking,
        statistics,
        tensor(given, "attention_in"),
        float(str(given["scale_value"])),
        str(given["softmax_layout"]),
    )
    require_shares(name, largest)
    return dq, dk, dv, q.new_empty(0), q.new_empty(0)


def require_shares(operator: str, largest: float) -> None:
    """Weights made again from statistics are shares of 1; else these are not the statistics of these rows.

    What is not a number passes, and gives gradients that are none: pipeline stages learn their sizes from memory as they find it.
    """
    if largest > 1 + ROUNDING:
        what = f"give a row of softmax that sums to {largest:.3g}"
        raise refusal(operator, "softmax_max", what, "statistics are those of the same queries, keys and layout")


def _call(given: Arguments) -> tuple[Tensor, Tensor, Tensor, int, str]:
    q, k, v = (tensor(given, n) for n in ("query", "key", "value"))
    return q, k, v, int(str(given["head_num"])), str(given["input_layout"])


def _masking(operator: str, given: Arguments) -> reference.Masking:
    mode, mask = int(str(given["sparse_mode"])), given["atten_mask"]
    assert mask is None or isinstance(mask, Tensor)
    if mask is not None and mode in (2, 3, 4):
        upper = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu_(1)
        if not torch.equal(mask.bool(), upper):
            rule = "the compressed mask hides what is above the diagonal: triu(ones(2048, 2048), 1)"
            raise refusal(operator, "atten_mask", f"hides {int(mask.bool().sum())} of its elements", rule)
    ends = [given[n] for n in ("actual_seq_qlen", "actual_seq_kvlen")]
    ends_q, ends_k = (list(e) if isinstance(e, list | tuple) else None for e in ends)
    for name, found in (("actual_seq_qlen", ends_q), ("actual_seq_kvlen", ends_k)):
        if found is not None and any(b <= a for a, b in zip([0, *found], found, strict=False)):
            raise refusal(operator, name, f"is {found}", "ends of sequences ascend from the first, which is above 0")
    if ends_q is not None and ends_k is not None and len(ends_q) != len(ends_k):
        raise refusal(
            operator, "actual_seq_kvlen", f"has {len(ends_k)} ends", f"there are {len(ends_q)} sequences of queries"
        )
    bounds = int(str(given["pre_tockens"])), int(str(given["next_tockens"]))
    masking = reference.Masking(mode, mask, *bounds, ends_q, ends_k)
    facts = sizes(given)
    hidden = reference.hidden_rows(int(str(facts["q_tokens"])), int(str(facts["k_tokens"])), masking)
    if hidden:
        rule = "what the operator gives for a query without keys is not documented"
        raise refusal(operator, "atten_mask", f"hides every key from {hidden} queries", rule)
    return masking


def outline(given: Arguments) -> object:
    """Sizes of what the forward operator gives."""
    q, v, facts = tensor(given, "query"), tensor(given, "value"), sizes(given)
    width = (
        v.shape[-1]
        if given["input_layout"] not in ("BSH", "SBH")
        else int(str(facts["heads"])) * int(str(facts["v_head_dim"]))
    )
    rows = facts["statistics"]
    assert isinstance(rows, list)
    statistics = [q.new_empty(rows, dtype=torch.float32) for _ in range(2)]
    return q.new_empty((*q.shape[:-1], width)), *statistics, q.new_empty(0), 0, 0, 0


def outline_gradient(given: Arguments) -> object:
    """Sizes of what the gradient operator gives."""
    q, k, v = (tensor(given, n) for n in ("query", "key", "value"))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), q.new_empty(0), q.new_empty(0)


DENSE = {
    "npu_fusion_attention": (sizes, compute, outline),
    "npu_fusion_attention_grad": (sizes, compute_gradient, outline_gradient),
}
