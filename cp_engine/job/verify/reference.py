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


def selection(inputs: Mapping[str, Tensor], seen: Tensor, count: int) -> Tensor:
    """Which keys an indexer selects: a stable sort of all scores, so that of equal ones the lowest position comes first.

    Args:
        inputs: q_index [B, 1, S, heads x D], k_index [B, 1, S, D], w_index [B, 1, S, heads].
        seen: [S, S].
        count: keys of a query.

    Returns:
        bool [B, S, S].
    """
    scores = index_scores(inputs).detach().masked_fill(~seen, -torch.inf)
    first = scores.sort(dim=2, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, first, True) & seen


def index_scores(inputs: Mapping[str, Tensor]) -> Tensor:
    """[B, S, S], head by head."""
    q, k, w = (inputs[name][:, 0] for name in ("q_index", "k_index", "w_index"))
    q = q.unflatten(2, (w.shape[2], -1))
    each = [w[:, :, h, None] * (q[:, :, h] @ k.mT).relu() for h in range(q.shape[2])]
    return torch.stack(each).sum(0)


def sparse(inputs: Mapping[str, Tensor], seen: Tensor, scale: float, count: int) -> tuple[Tensor, Tensor]:
    """Attention to the selected keys, and the indexer's loss.

    Args:
        inputs: q [B, H, S, L + R], kv_latent [B, 1, S, L], k_rope [B, 1, S, R], and those of `selection`.
        seen: [S, S].
        scale: factor on the scores.
        count: keys of a query.

    Returns:
        out [B, H, S, L], and the sum over queries of KL(attention of all heads || softmax of the indexer's scores).
    """
    chosen = selection(inputs, seen, count)
    keys = torch.cat((inputs["kv_latent"], inputs["k_rope"]), 3)
    scores = (inputs["q"] @ keys.mT * scale).masked_fill(~chosen.unsqueeze(1), -torch.inf)
    blind = ~chosen.any(2)  # queries that see nothing
    weights = scores.masked_fill(blind[:, None, :, None], 0.0).softmax(3).masked_fill(~chosen.unsqueeze(1), 0.0)
    wanted = weights.detach().mean(1)
    found = index_scores(inputs).masked_fill(~chosen, -torch.inf).masked_fill(blind.unsqueeze(2), 0.0).log_softmax(2)
    losses = torch.nn.functional.kl_div(found.masked_fill(~chosen, 0.0), wanted, reduction="none")
    return weights @ inputs["kv_latent"], losses.sum()


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, scale: float) -> dict[str, Tensor]:
    """out, dq, dk and dv under an upstream gradient; as `gradients_of` for q, k and v."""
    return gradients_of({"q": q, "k": k, "v": v}, dout, seen, scale)


def gradients_of(
    inputs: Mapping[str, Tensor], dout: Tensor, seen: Tensor, scale: float, count: int = 0, dloss: float = 1.0
) -> dict[str, Tensor]:
    """out and the gradient of every input under an upstream gradient, by autograd through `attention`.

    Args:
        inputs: q and either k and v, or kv_latent, k_rope and kv_up, or those of `sparse`; perhaps sinks. No gradient needs to be
            required.
        dout: [B, H, S, Dv].
        seen, scale: as in `attention`.
        count: keys that an indexer selects for a query, where the inputs have one.
        dloss: the gradient of its loss.

    Returns:
        `out`, `indexer_loss` where there is an indexer, and `d` + name for every input.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    q = leaves["q"]
    if "q_index" in leaves:
        out, loss = sparse(leaves, seen, scale, count)
        found = torch.autograd.grad((out, loss), list(leaves.values()), (dout, torch.full_like(loss, dloss)))
        grads = {f"d{name}": g for name, g in zip(leaves, found, strict=True)}
        return {"out": out.detach(), "indexer_loss": loss.detach(), **grads}
    if "kv_latent" in leaves:
        latent, rope, up = leaves["kv_latent"], leaves["k_rope"], leaves["kv_up"]
        k, v = expanded(latent, rope, up, q.shape[3] - rope.shape[3])
    else:
        k, v = leaves["k"], leaves["v"]
    out = attention(q, k, v, seen, scale, leaves.get("sinks"))
    found = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}
