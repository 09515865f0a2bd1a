"""Calls of the operators of DeepSeek sparse attention: their sizes, their values, and what the reference kernels give."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cp_engine.kernels.ascend import sparse_reference as reference
from cp_engine.kernels.ascend.dense_calls import refusal, require_shares, tensor

Arguments = Mapping[str, object]


def index_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_lightning_indexer."""
    q, k = tensor(given, "query"), tensor(given, "key")
    if q.ndim != 4 or k.ndim != 4:
        return {}
    facts: dict[str, object] = {"heads": q.shape[2], "head_dim": q.shape[3], "kv_heads": k.shape[2]}
    facts |= {"batch": q.shape[0], "k_batch": k.shape[0], "k_head_dim": k.shape[3]}
    return facts | {"q_tokens": q.shape[1], "k_tokens": k.shape[1], "rows_heads": list(q.shape[:3])}


def sparse_sizes(given: Arguments) -> dict[str, object]:
    """Of the three operators that attend to selected keys."""
    q, k, indices = tensor(given, "query"), tensor(given, "key"), tensor(given, "sparse_indices")
    rope = given.get("query_rope")
    if q.ndim != 4 or k.ndim != 4 or indices.ndim != 4:
        return {}
    facts: dict[str, object] = {
        "heads": q.shape[2],
        "head_dim": q.shape[3],
        "kv_heads": k.shape[2],
        "batch": q.shape[0],
    }
    facts |= {"q_tokens": q.shape[1], "k_tokens": k.shape[1], "selected": indices.shape[3]}
    k_rope = given.get("key_rope")
    facts |= {"k_batch": k.shape[0], "k_head_dim": k.shape[3], "key_index_size": [*k.shape[:2], 1, 128]}
    facts["k_rope_dim"] = k_rope.shape[-1] if isinstance(k_rope, Tensor) else None
    facts |= {"rope_dim": rope.shape[-1] if isinstance(rope, Tensor) else None, "rows_one": [*q.shape[:2], 1]}
    facts["statistics"] = [q.shape[0], 1, *q.shape[1:3]]
    for name, lengths, whole in (("query", "query", q), ("key", "kv", k)):
        given_, full = given.get(f"actual_seq_lengths_{lengths}"), [whole.shape[1]] * whole.shape[0]
        is_known = isinstance(given_, Tensor) and given_.device.type != "meta"
        facts |= {
            f"{name}_full": full,
            f"{name}_lengths": tensor(given, f"actual_seq_lengths_{lengths}").tolist() if is_known else full,
        }
    if "query_index" in given:
        q_index = tensor(given, "query_index")
        facts |= {
            "index_heads": q_index.shape[-2],
            "index_dim": q_index.shape[-1],
            "rows_index_heads": list(q_index.shape[:3]),
        }
    return facts


def select(given: Arguments) -> object:
    """npu_lightning_indexer."""
    q, k, w = (tensor(given, n) for n in ("query", "key", "weights"))
    found = reference.select(q, k, w, int(str(given["sparse_count"])), int(str(given["sparse_mode"])))
    return found, q.new_empty(0)


def attend(given: Arguments) -> object:
    """npu_sparse_flash_attention; without return_softmax_lse there are no statistics."""
    name = "npu_sparse_flash_attention"
    _require_indices(name, given)
    out, highest, total = reference.attend(*_keys(given), tensor(given, "sparse_indices"), *_how(given))
    nothing = out.new_empty(0, dtype=torch.float32)
    return (out, highest, total) if given["return_softmax_lse"] else (out, nothing, nothing.clone())


def attend_gradient(given: Arguments) -> object:
    """npu_sparse_flash_attention_grad."""
    name = "npu_sparse_flash_attention_grad"
    _require_indices(name, given)
    grads, largest = reference.attend_backward(
        _keys(given),
        tensor(given, "sparse_indices"),
        tensor(given, "d_out"),
        tensor(given, "out"),
        _statistics(given),
        *_how(given),
    )
    require_shares(name, largest)
    return grads


def learn(given: Arguments) -> object:
    """npu_sparse_lightning_indexer_grad_kl_loss."""
    name = "npu_sparse_lightning_indexer_grad_kl_loss"
    _require_indices(name, given)
    index = tensor(given, "query_index"), tensor(given, "key_index"), tensor(given, "weights")
    *grads, loss, largest = reference.learn(
        _keys(given), index, tensor(given, "sparse_indices"), _statistics(given), *_how(given)
    )
    require_shares(name, largest)
    return (*grads, loss)


def _keys(given: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, q_rope, k_rope = (tensor(given, n) for n in ("query", "key", "query_rope", "key_rope"))
    return q, k, q_rope, k_rope


def _statistics(given: Arguments) -> tuple[Tensor, Tensor]:
    return tensor(given, "softmax_max"), tensor(given, "softmax_sum")


def _how(given: Arguments) -> tuple[float, int]:
    return float(str(given["scale_value"])), int(str(given["sparse_mode"]))


def _require_indices(operator: str, given: Arguments) -> None:
    """Indices are keys that the query may see, each once, with -1 behind the last one, and every query has one."""
    indices, keys = tensor(given, "sparse_indices")[:, :, 0].long(), tensor(given, "key").shape[1]
    name, is_there = "sparse_indices", indices >= 0
    if int(indices.amax()) >= keys or int(indices.amin()) < -1:
        raise refusal(
            operator, name, f"lie in {int(indices.amin())} .. {int(indices.amax())}", f"there are {keys} keys"
        )
    if bool((is_there[..., 1:] & ~is_there[..., :-1]).any()):
        raise refusal(operator, name, "have -1 before a key", "-1 stands behind the last selected key only")
    ordered = indices.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        raise refusal(operator, name, "name a key twice", "each key is selected once")
    picked = reference.chosen(tensor(given, "sparse_indices"), keys, _how(given)[1])
    hidden = int((~picked.any(-1)).sum())
    if hidden:
        rule = "what the operator gives for a query without keys is not documented"
        raise refusal(operator, name, f"leave {hidden} queries without a key that they may see", rule)


def outline_selection(given: Arguments) -> object:
    """Sizes of what npu_lightning_indexer gives."""
    q = tensor(given, "query")
    return q.new_empty((*q.shape[:2], 1, int(str(given["sparse_count"]))), dtype=torch.int32), q.new_empty(0)


def outline_attention(given: Arguments) -> object:
    """Sizes of what npu_sparse_flash_attention gives."""
    q = tensor(given, "query")
    size = (q.shape[0], 1, *q.shape[1:3]) if given["return_softmax_lse"] else (0,)
    return torch.empty_like(q), *(q.new_empty(size, dtype=torch.float32) for _ in range(2))


def outline_gradient(given: Arguments) -> object:
    """Sizes of what npu_sparse_flash_attention_grad gives."""
    return tuple(torch.empty_like(tensor(given, n)) for n in ("query", "key", "value", "query_rope", "key_rope"))


def outline_learning(given: Arguments) -> object:
    """Sizes of what npu_sparse_lightning_indexer_grad_kl_loss gives."""
    index = [tensor(given, n) for n in ("query_index", "key_index", "weights")]
    return *(torch.empty_like(x) for x in index), index[0].new_empty(1, dtype=torch.float32)


SPARSE = {
    "npu_lightning_indexer": (index_sizes, select, outline_selection),
    "npu_sparse_flash_attention": (sparse_sizes, attend, outline_attention),
    "npu_sparse_flash_attention_grad": (sparse_sizes, attend_gradient, outline_gradient),
    "npu_sparse_lightning_indexer_grad_kl_loss": (sparse_sizes, learn, outline_learning),
}
