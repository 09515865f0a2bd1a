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
    if kind == "document":  # without starts one document, as it is planned
        starts = torch.tensor(mask["starts"] if mask.get("starts") is not None else [0])
        document = torch.bucketize(torch.arange(size), starts, right=True)
        seen = document[:, None] == document[None, :]
        if mask.get("left") is not None:
            seen = seen & (k >= q - int(str(mask["left"])))
        if mask.get("right") is not None:
            seen = seen & (k <= q + int(str(mask["right"])))
        return seen & (k <= q) if mask.get("causal", True) else seen
    if kind == "block":
        length = int(str(mask["size"]))
        first = q - q % length  # of the query's own block
        seen = (k >= first) & (k < first + length)
        return seen & (k <= q) if mask.get("causal", True) else seen
    if kind == "both":
        parts = mask["of"]
        assert isinstance(parts, list | tuple)
        return torch.stack([visible(part, size) for part in parts]).all(0)
    raise NotImplementedError(f"no reference for the mask {kind!r}")


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Softmax attention, every head and every pair written out.

    Args:
        q: [B, H, S, D].
        k: [B, K, S, D]; K divides H.
        v: [B, K, S, Dv].
        seen: [S, S], True where the key is visible to the query.
        scale: factor on the scores.
        sinks: [H], one more score per head, whose value is 0.

    Returns:
        [B, H, S, Dv]; 0 for a query that sees nothing.
    """
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(share, 1)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    values = v.repeat_interleave(share, 1)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), 3).softmax(-1)[..., :-1]
    else:
        weights = torch.where(seen.any(-1)[:, None], scores, torch.zeros_like(scores)).softmax(-1) * seen
    return torch.einsum("bhqk,bhkd->bhqd", weights, values)


def expanded(kv_latent: Tensor, k_rope: Tensor, kv_up: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """k and v of multi-head latent attention, head by head.

    Args:
        kv_latent: [B, 1, S, L].
        k_rope: [B, 1, S, R], shared by all heads.
        kv_up: [H, Dnope + Dv, L].
        nope_dim: Dnope.

    Returns:
        [B, H, S, Dnope + R] and [B, H, S, Dv].
    """
    k, v = [], []
    for weight in kv_up:
        k.append(torch.cat((kv_latent @ weight[:nope_dim].T, k_rope), 3))
        v.append(kv_latent @ weight[nope_dim:].T)
    return torch.cat(k, 1), torch.cat(v, 1)


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, scale: float) -> dict[str, Tensor]:
    """out, dq, dk and dv under an upstream gradient; as `gradients_of` for q, k and v."""
    return gradients_of({"q": q, "k": k, "v": v}, dout, seen, scale)


def gradients_of(inputs: Mapping[str, Tensor], dout: Tensor, seen: Tensor, scale: float) -> dict[str, Tensor]:
    """out and the gradient of every input under an upstream gradient, by autograd through `attention`.

    Args:
        inputs: q and either k and v, or kv_latent, k_rope and kv_up; perhaps sinks. No gradient needs to be required.
        dout: [B, H, S, Dv].
        seen, scale: as in `attention`.

    Returns:
        `out`, and `d` + name for every input.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    q = leaves["q"]
    if "kv_latent" in leaves:
        latent, rope, up = leaves["kv_latent"], leaves["k_rope"], leaves["kv_up"]
        k, v = expanded(latent, rope, up, q.shape[3] - rope.shape[3])
    else:
        k, v = leaves["k"], leaves["v"]
    out = attention(q, k, v, seen, scale, leaves.get("sinks"))
    found = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}
