"""The reference of `verify`: dense attention in one process, written out. It imports nothing from the engine."""

from collections.abc import Mapping

import torch
from torch import Tensor


def visible(mask: Mapping[str, object], size: int) -> Tensor:
    """Which keys each query may see, bool [size, size].

    Args:
        mask: `kind` and its fields, as in the configuration.
        size: sequence length in tokens.

    Raises:
        NotImplementedError: a kind that the reference has no independent definition of.
    """
    q, k = torch.arange(size)[:, None], torch.arange(size)[None, :]
    kind = mask["kind"]
    if kind == "full":
        return torch.ones(size, size, dtype=torch.bool)
    if kind == "causal":
        return k <= q
    if kind == "window":
        return (k >= q - int(str(mask["left"]))) & (k <= q + int(str(mask["right"])))
    if kind == "prefix":
        return (k <= q) | (k < int(str(mask["length"])))
    if kind == "document":
        starts = torch.tensor(mask["starts"])
        document = torch.bucketize(torch.arange(size), starts, right=True)
        seen = (k <= q) & (document[:, None] == document[None, :])
        return seen if mask.get("left") is None else seen & (q - k <= int(str(mask["left"])))
    raise NotImplementedError(f"no reference for the mask {kind!r}")


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Softmax attention, every head and every pair written out.

    Args:
        q: [B, H, S, D].
        k: [B, K, S, D]; K divides H.
        v: [B, K, S, Dv].
        seen: [S, S], True where the key is visible to the query.
        scale: factor on the scores.

    Returns:
        [B, H, S, Dv]; 0 for a query that sees nothing.
    """
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(share, 1)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1)[:, None], scores, torch.zeros_like(scores)).softmax(-1) * seen
    return torch.einsum("bhqk,bhkd->bhqd", weights, v.repeat_interleave(share, 1))


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, scale: float) -> dict[str, Tensor]:
    """out, dq, dk and dv under an upstream gradient, by autograd through `attention`.

    Args:
        q, k, v, seen, scale: as in `attention`; no gradient needs to be required.
        dout: [B, H, S, Dv].

    Returns:
        Tensors in the shapes of out, q, k and v.
    """
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(leaves[0], leaves[1], leaves[2], seen, scale)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
