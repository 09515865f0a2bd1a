"""Operators of a mixture of experts, composed of torch operators, which have their gradients where torch_npu's have.

torchtitan-npu's converters `npu_permute` and `npu_gmm` call them. `sorted_indices` says of each choice of each token in which row it is:
argsort of argsort of the choices. Source: torch_npu 2.13.0, its docstrings and shape functions; MoeTokenPermute of CANN's ops-transformer.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cp_engine.kernels.ascend.dense_calls import refusal, tensor

Arguments = Mapping[str, object]
SORTABLE = 2**24 - 1
"""Expert numbers are sorted as float32."""


def permute_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_moe_token_permute."""
    tokens, indices = tensor(given, "tokens"), tensor(given, "indices")
    if tokens.ndim != 2 or indices.ndim not in (1, 2):
        return {}
    choices = 1 if indices.ndim == 1 else indices.shape[1]
    return {"token_rows": tokens.shape[0], "index_rows": indices.shape[0], "choices": choices, "numel": indices.numel()}


def permute(given: Arguments) -> object:
    """npu_moe_token_permute: each token once per choice, in the order of the experts, and where each choice went."""
    tokens, indices = tensor(given, "tokens"), tensor(given, "indices")
    flat, kept = indices.flatten(), given["num_out_tokens"]
    if flat.numel() and not (0 <= int(flat.min()) and int(flat.max()) < SORTABLE):
        what = f"holds experts {int(flat.min())} to {int(flat.max())}"
        raise refusal("npu_moe_token_permute", "indices", what, f"experts are numbers from 0, below {SORTABLE}")
    order = flat.argsort(stable=True)
    assert kept is None or isinstance(kept, int)
    rows = order[: kept or len(order)] // (1 if indices.ndim == 1 else indices.shape[1])
    return tokens.double().index_select(0, rows).to(tokens.dtype), order.argsort().int()


def unpermute_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_moe_token_unpermute, and of the same with a routing map."""
    permuted, indices, probs = tensor(given, "permuted_tokens"), tensor(given, "sorted_indices"), given["probs"]
    found: dict[str, object] = {"rows": permuted.shape[0], "indices": indices.numel()} if permuted.ndim == 2 else {}
    return found | ({"probabilities": probs.numel()} if isinstance(probs, Tensor) else {})


def unpermute(given: Arguments) -> object:
    """npu_moe_token_unpermute: of each token the rows of its choices, each times its probability, summed."""
    permuted, indices, probs = tensor(given, "permuted_tokens"), tensor(given, "sorted_indices"), given["probs"]
    _require_permutation("npu_moe_token_unpermute", "sorted_indices", indices)
    rows = permuted.double().index_select(0, indices.long())
    if isinstance(probs, Tensor):
        rows = (rows.unflatten(0, probs.shape) * probs.double().unsqueeze(-1)).sum(1)
    return rows.to(permuted.dtype)


def unpermute_mapped(given: Arguments) -> object:
    """_npu_moe_token_unpermute_with_routing_map without a map: the same, and what its gradient takes."""
    permuted, indices = tensor(given, "permuted_tokens"), tensor(given, "sorted_indices")
    _require_permutation("_npu_moe_token_unpermute_with_routing_map", "sorted_indices", indices)
    return permuted.index_select(0, indices.long()), indices.clone(), indices.clone(), permuted.new_empty(0)


def mapped_gradient_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_moe_token_unpermute_with_routing_map_grad."""
    grad, indices = tensor(given, "unpermuted_tokens_grad"), tensor(given, "out_index")
    return {"rows": grad.shape[0], "indices": indices.numel()} if grad.ndim == 2 else {}


def mapped_gradient(given: Arguments) -> object:
    """npu_moe_token_unpermute_with_routing_map_grad without a map: each row of the gradient where its token was."""
    grad, indices = tensor(given, "unpermuted_tokens_grad"), tensor(given, "out_index")
    name = "npu_moe_token_unpermute_with_routing_map_grad"
    _require_permutation(name, "out_index", indices)
    if not torch.equal(indices, tensor(given, "permuted_token_id")):
        raise refusal(name, "permuted_token_id", "differs from out_index", "without a routing map both are one index")
    return torch.empty_like(grad).index_copy_(0, indices.long(), grad), grad.new_empty(0)


def swiglu_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_swiglu."""
    x, dim = tensor(given, "input"), given["dim"]
    assert isinstance(dim, int)
    return {"halved": x.shape[dim] if -x.ndim <= dim < x.ndim else None}


def swiglu(given: Arguments) -> object:
    """npu_swiglu: the first half of a dim times its sigmoid times the second half."""
    x, dim = tensor(given, "input"), given["dim"]
    assert isinstance(dim, int)
    gate, up = x.double().chunk(2, dim)
    found: Tensor = gate * gate.sigmoid() * up
    return found.to(x.dtype)


def grouped_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_grouped_matmul: of the one x and the one weight, and how rows are grouped."""
    lists = _lists(given)
    found: dict[str, object] = {"count": [len(tensors) for tensors in lists]}
    if found["count"] != [1, 1]:
        return found
    (x,), (weight,) = lists
    left, right = (str(t.dtype).removeprefix("torch.") for t in (x, weight))
    found |= {"dims": [x.ndim, weight.ndim], "left_dtype": left, "right_dtype": right}
    if x.ndim == 2 and weight.ndim == 3 and given["group_type"] == 0:
        found |= {"width": x.shape[1], "weight_width": weight.shape[1], "weight_groups": weight.shape[0]}
    elif x.ndim == 2 and weight.ndim == 2 and given["group_type"] == 2:
        found |= {"width": x.shape[1], "weight_width": weight.shape[0]}
    groups = given["group_list"]
    return found | ({"groups": groups.numel()} if isinstance(groups, Tensor) else {})


def grouped_matmul(given: Arguments) -> object:
    """npu_grouped_matmul: each group of rows times its weight, or, grouped along what is summed over, a product for each group."""
    (x,), (weight,) = _lists(given)
    counts, is_summed = tensor(given, "group_list"), given["group_type"] == 2
    ends = counts.cumsum(0).tolist() if given["group_list_type"] == 1 else counts.tolist()
    rows = x.shape[1] if is_summed else x.shape[0]
    starts = [0, *ends[:-1]]
    if any(a > b for a, b in zip(starts, ends, strict=True)) or max(ends, default=0) > rows:
        raise refusal("npu_grouped_matmul", "group_list", f"is {counts.tolist()}", f"groups fit into the {rows} rows")
    left, right = x.double(), weight.double()
    if is_summed:
        parts = [left[:, a:b] @ right[a:b] for a, b in zip(starts, ends, strict=True)]
        return [torch.stack(parts).to(x.dtype)]
    out = left.new_full((rows, weight.shape[2]), torch.nan)  # rows of no group are left as they were
    for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
        out[a:b] = left[a:b] @ right[i]
    return [out.to(x.dtype)]


def _lists(given: Arguments) -> tuple[list[Tensor], list[Tensor]]:
    x, weight = given["x"], given["weight"]
    assert isinstance(x, list) and isinstance(weight, list)
    return x, weight


def _require_permutation(operator: str, name: str, indices: Tensor) -> None:
    """Each row is named once."""
    if not torch.equal(indices.long().sort().values, torch.arange(indices.numel())):
        raise refusal(operator, name, "names a row twice or not at all", "it is what npu_moe_token_permute gave")


WITHOUT_GRADIENT = (
    "npu_grouped_matmul",
    "_npu_moe_token_unpermute_with_routing_map",
    "npu_moe_token_unpermute_with_routing_map_grad",
)
"""For which torch_npu registers none: a program that calls them brings its own."""

EXPERTS = {
    "npu_moe_token_permute": (permute_sizes, permute),
    "npu_moe_token_unpermute": (unpermute_sizes, unpermute),
    "_npu_moe_token_unpermute_with_routing_map": (unpermute_sizes, unpermute_mapped),
    "npu_moe_token_unpermute_with_routing_map_grad": (mapped_gradient_sizes, mapped_gradient),
    "npu_swiglu": (swiglu_sizes, swiglu),
    "npu_grouped_matmul": (grouped_sizes, grouped_matmul),
}
"""Operator -> (sizes that follow from its arguments, what it computes)."""
