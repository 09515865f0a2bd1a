"""The stand-in for Ascend's operators refuses what they would refuse: one broken call per rule, and the known traps."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cp_engine.errors import KernelError
from cp_engine.kernels.ascend.experts import EXPERTS
from cp_engine.kernels.ascend.operators import bound, shipped
from cp_engine.kernels.ascend.rules import rule_table
from cp_engine.kernels.ascend.stand_in import stand_in

Call = dict[str, object]
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    with stand_in():
        yield


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def fused() -> Call:
    q, k, v = random(2, 4, 8, 16), random(2, 2, 8, 16), random(2, 2, 8, 8)
    given: Call = {"query": q, "key": k, "value": v, "head_num": 4, "input_layout": "BNSD", "scale": 0.25}
    return given | {"atten_mask": COMPRESSED, "sparse_mode": 2}


def fused_gradient() -> Call:
    given = fused()
    out, highest, total, *_ = torch.ops.npu.npu_fusion_attention(**given)
    given["scale_value"] = given.pop("scale")
    return given | {"dy": random(2, 4, 8, 8), "softmax_max": highest, "softmax_sum": total, "attention_in": out}


def indexer() -> Call:
    half = torch.bfloat16
    q, k, w = random(2, 8, 4, 128, dtype=half), random(2, 8, 1, 128, dtype=half), random(2, 8, 4, dtype=half)
    return {"query": q, "key": k, "weights": w, "sparse_count": 4, "sparse_mode": 3}


def attention() -> Call:
    half = torch.bfloat16
    latent = random(2, 8, 1, 512, dtype=half)
    indices, _ = torch.ops.npu.npu_lightning_indexer(**indexer())
    given: Call = {"query": random(2, 8, 4, 512, dtype=half), "key": latent, "value": latent, "sparse_indices": indices}
    given |= {"query_rope": random(2, 8, 4, 64, dtype=half), "key_rope": random(2, 8, 1, 64, dtype=half)}
    return given | {"scale_value": 0.04, "sparse_block_size": 1, "attention_mode": 2, "return_softmax_lse": True}


def attention_gradient() -> Call:
    given = attention()
    out, highest, total = torch.ops.npu.npu_sparse_flash_attention(**given)
    del given["return_softmax_lse"]
    given |= {"d_out": random(2, 8, 4, 512, dtype=torch.bfloat16), "out": out, "layout": "BSND"}
    return given | {"softmax_max": highest, "softmax_sum": total}


def learning() -> Call:
    half = torch.bfloat16
    index: Call = {"query_index": random(1, 4, 8, 128, dtype=half), "key_index": random(1, 4, 1, 128, dtype=half)}
    index["weights"] = random(1, 4, 8, dtype=half)
    indices = torch.full((1, 4, 1, 1024), -1, dtype=torch.int32)
    for i in range(4):
        indices[0, i, 0, : i + 1] = torch.arange(i + 1)
    given: Call = {"query": random(1, 4, 32, 512, dtype=half), "key": random(1, 4, 1, 512, dtype=half)}
    given |= {"query_rope": random(1, 4, 32, 64, dtype=half), "key_rope": random(1, 4, 1, 64, dtype=half)}
    named = {"scale_value": 0.04, "sparse_indices": indices}
    value: Call = {"value": given["key"], "attention_mode": 2, "return_softmax_lse": True, "sparse_block_size": 1}
    _, highest, total = torch.ops.npu.npu_sparse_flash_attention(**given, **named, **value)
    return given | named | index | {"softmax_max": highest, "softmax_sum": total}


def update(*, is_packed: bool = False) -> Call:
    """Two parts of a softmax: what two calls with statistics give."""
    sizes = ((8, 3, 64), (8, 3, 8)) if is_packed else ((8, 2, 12), (2, 3, 8, 8))
    given: Call = {"input_layout": "TND", "input_softmax_layout": "TND"} if is_packed else {"input_layout": "SBH"}
    for i, part in enumerate(("prev", "cur")):
        out, statistic = random(*sizes[0]) + i, random(*sizes[1])[..., :1].expand(sizes[1])
        statistics = {f"{part}_softmax_max": statistic - i, f"{part}_softmax_sum": statistic.exp() + 1}
        given |= {f"{part}_attn_out": out, **{n: x.contiguous() for n, x in statistics.items()}}
    return given | ({"actual_seq_qlen": torch.tensor([0, 3, 8])} if is_packed else {})


def norm() -> Call:
    return {"input": random(2, 8, 16), "gamma": random(16), "epsilon": 1e-6}


def rotary(mode: str = "interleave") -> Call:
    turns = random(1, 8, 1, 16)
    return {"input": random(2, 8, 4, 16), "r1": turns.cos(), "r2": turns.sin(), "rotary_mode": mode}


CHOICES = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])


def rows() -> tuple[Tensor, Tensor]:
    """Tokens that were permuted, and where each choice went."""
    permuted, indices = torch.ops.npu.npu_moe_token_permute(random(4, 6), CHOICES)
    return permuted, indices


def unpermuting() -> Call:
    permuted, indices = rows()
    return {"permuted_tokens": permuted, "sorted_indices": indices, "probs": random(4, 2)}


def mapped() -> Call:
    permuted, indices = rows()
    return {"permuted_tokens": permuted, "sorted_indices": indices, "restore_shape": [8, 6]}


def mapped_gradient() -> Call:
    grad, indices = rows()
    given: Call = {"unpermuted_tokens_grad": grad, "out_index": indices, "permuted_token_id": indices}
    absent = dict.fromkeys(("routing_map", "permuted_tokens", "probs"))
    return {**given, **absent, "drop_and_pad": False, "restore_shape": [8, 6]}


def grouped() -> Call:
    named = {"group_list": torch.tensor([2, 0, 6]), "group_list_type": 1, "group_type": 0, "split_item": 2}
    return {"x": [random(8, 6)], "weight": [random(3, 6, 5)], **named}


BASES: dict[str, Callable[[], Call]] = {
    "npu_fusion_attention": fused,
    "npu_fusion_attention_grad": fused_gradient,
    "npu_ring_attention_update": update,
    "npu_lightning_indexer": indexer,
    "npu_sparse_flash_attention": attention,
    "npu_sparse_flash_attention_grad": attention_gradient,
    "npu_sparse_lightning_indexer_grad_kl_loss": learning,
    "npu_rms_norm": norm,
    "npu_rotary_mul": rotary,
    "npu_moe_token_permute": lambda: {"tokens": random(4, 6), "indices": CHOICES},
    "npu_moe_token_unpermute": unpermuting,
    "_npu_moe_token_unpermute_with_routing_map": mapped,
    "npu_moe_token_unpermute_with_routing_map_grad": mapped_gradient,
    "npu_swiglu": lambda: {"input": random(4, 6)},
    "npu_grouped_matmul": grouped,
}


def strided(x: object) -> Tensor:
    assert isinstance(x, Tensor)
    return torch.stack((x, x), -1)[..., 0]


def changes(name: str, base: Call) -> Iterator[Call]:
    """Changes of a call that is taken, each of which breaks a rule or more."""
    tensors = {n: x for n, x in base.items() if isinstance(x, Tensor)}
    for n, x in tensors.items():
        yield {n: strided(x)}
        yield {n: x.double() if x.is_floating_point() else x.to(torch.int64)}
        yield {n: x.float() if x.dtype != torch.float32 else x.bfloat16()}
        yield {n: x.unsqueeze(0).contiguous()}
        for dim in range(x.ndim):
            yield {n: torch.cat((x, x[(slice(None),) * dim + (slice(0, 1),)]), dim).contiguous()}
    if "fusion" in name:
        yield from fused_changes(base)
    elif "norm" in name:
        yield {"epsilon": 0.0}
    elif "rotary" in name:
        yield from rotary_changes()
    elif "update" in name:
        yield from update_changes(base)
    elif name in EXPERTS:
        yield from expert_changes(name, base)
    else:
        yield from sparse_changes(name, base)
    schema = torch._C.parse_schema(shipped()[1][name])
    for argument in schema.arguments:  # what a call leaves out is set, and what it sets is left out
        kind = str(argument.type)
        if argument.name not in base and kind.startswith("Optional"):
            others = {"List[Tensor]": [torch.zeros(4)], "List[int]": [8], "int": 1}
            yield {argument.name: next((x for t, x in others.items() if t in kind), torch.zeros(4))}
        elif kind.startswith("Optional") and argument.name in base:
            yield {argument.name: None}


def fused_changes(base: Call) -> Iterator[Call]:
    q, k, v = (base[n] for n in ("query", "key", "value"))
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    yield {"input_layout": "SHB"}
    yield {"query": q.double(), "key": k.double(), "value": v.double()}
    yield {"head_num": 3}
    yield {"value": random(2, 2, 8, 17)}
    for dim, size in ((0, 0), (2, 0), (2, 1048577), (1, 257), (3, 769)):
        sizes = [1, 1, 1, 1]
        sizes[dim] = size
        yield {
            "query": torch.zeros(sizes),
            "key": torch.zeros(sizes),
            "value": torch.zeros(sizes),
            "head_num": sizes[1],
        }
    yield {"sparse_mode": 6}
    yield {"atten_mask": None}
    for bound_ in ("pre_tockens", "next_tockens"):
        yield {"atten_mask": None, "sparse_mode": 0, bound_: 0}
    yield {"atten_mask": COMPRESSED.float()}
    yield {"atten_mask": COMPRESSED[:1024, :1024].contiguous()}
    yield {"atten_mask": torch.zeros(8, 9, dtype=torch.bool), "sparse_mode": 1}
    packed = {n: x.transpose(1, 2).flatten(0, 1).contiguous() for n, x in (("query", q), ("key", k), ("value", v))}
    yield {**packed, "input_layout": "TND"}
    yield {**packed, "input_layout": "TND", "actual_seq_qlen": [8, 15], "actual_seq_kvlen": [8, 15]}
    many = {"actual_seq_qlen": [*range(1, 1026)], "actual_seq_kvlen": [*range(1, 1026)]}
    yield {**packed, "input_layout": "TND", **many}
    ends = {"actual_seq_qlen": [8, 16], "actual_seq_kvlen": [8, 16]}
    yield {**packed, "input_layout": "TND", **ends, "atten_mask": torch.zeros(16, 16).bool(), "sparse_mode": 1}
    for lead in ((2,), (3, 1), (2, 3), (1, 4)):
        yield {"atten_mask": torch.zeros(*lead, 8, 8).bool(), "sparse_mode": 1}
    yield {"softmax_layout": "TND"}
    yield {"softmax_layout": "NTD"}
    yield {"inner_precise": 3}
    yield {n: torch.zeros(2**21 + 1, 1, 1, 1) for n in ("query", "key", "value")} | {"head_num": 1}
    yield {"keep_prob": 0.9}


def rotary_changes() -> Iterator[Call]:
    for x, turns in (
        ((2, 8, 4, 16), (1, 8, 1, 18)),  # wider
        ((2, 8, 4, 16), (1, 7, 1, 16)),  # shorter
        ((2, 8, 4, 16), (2, 8, 1, 16)),  # of each batch
        ((2, 8, 4, 15), (1, 8, 1, 15)),
        ((2, 8, 4, 896), (1, 8, 1, 896)),
        ((250, 8, 4, 16), (1, 8, 1, 16)),
    ):
        yield {"input": torch.zeros(x), "r1": torch.zeros(turns), "r2": torch.zeros(turns)}
    yield {"rotary_mode": "third"}


def update_changes(base: Call) -> Iterator[Call]:
    yield {"input_layout": "BNSD"}
    yield {"input_softmax_layout": "TND"}
    nothing = {n: x.new_zeros(0, *x.shape[1:]) for n, x in base.items() if isinstance(x, Tensor) and x.ndim == 3}
    statistics = {n: x.new_zeros(2, 3, 0, 8) for n, x in base.items() if isinstance(x, Tensor) and x.ndim == 4}
    yield {**nothing, **statistics}
    yield {n: x[..., :-1].contiguous() for n, x in base.items() if n.endswith("attn_out") and isinstance(x, Tensor)}
    packed = update(is_packed=True)
    yield {**packed, "actual_seq_qlen": None}
    yield {**packed, "actual_seq_qlen": torch.tensor([0, 8], dtype=torch.int32)}
    yield {**packed, "input_softmax_layout": ""}
    yield {**packed, "prev_softmax_max": base["prev_softmax_max"]}
    for heads, width in ((257, 64), (3, 832), (3, 65)):
        sizes = {"attn_out": (8, heads, width), "softmax_max": (8, heads, 8), "softmax_sum": (8, heads, 8)}
        yield {**packed, **{f"{part}_{n}": torch.ones(s) for n, s in sizes.items() for part in ("prev", "cur")}}


def expert_changes(name: str, base: Call) -> Iterator[Call]:
    for argument, value in (("padded_mode", True), ("drop_and_pad", True), ("restore_shape", [8, 5])):
        if argument in shipped()[1][name]:
            yield {argument: value}
    for argument in ("routing_map", "permuted_tokens", "probs"):
        if argument in base:
            yield {argument: torch.zeros(8, 6)}
    if name == "npu_moe_token_permute":
        yield {"indices": CHOICES.float()}
        yield {"indices": torch.zeros(4, 513, dtype=torch.int64)}
        yield {"tokens": torch.zeros(2**15, 1), "indices": torch.zeros(2**15, 512, dtype=torch.int64)}
    elif "unpermute" in name:
        (indices,) = (x for n, x in base.items() if n in ("sorted_indices", "out_index"))
        assert isinstance(indices, Tensor)
        yield {n: indices.float() for n in ("sorted_indices", "out_index") if n in base}
    elif name == "npu_swiglu":
        yield {"dim": 2}
        yield {"input": random(4, 7)}
        yield {"input": random(1, 1, 1, 1, 1, 1, 1, 1, 2)}
    else:
        (x,), (weight,) = base["x"], base["weight"]  # type: ignore[misc]
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        for other in ([x, x], [x.double()], [x.bfloat16()], [x[0]], [x[:, :-1]]):
            yield {"x": other}
        yield {"weight": [weight[:2]]}
        yield {"group_type": -1}
        yield {"group_type": 2}
        for argument, value in (("group_list_type", 2), ("split_item", 0), ("act_type", 1), ("group_list", None)):
            yield {argument: value}
        yield {"group_list": torch.tensor([2, 0, 6], dtype=torch.int32)}


def sparse_changes(name: str, base: Call) -> Iterator[Call]:
    for argument, value in (
        ("layout", "TND"),
        ("layout_query", "TND"),
        ("layout_key", "TND"),
        ("layout_kv", "TND"),
        ("sparse_mode", 1),
        ("sparse_count", 0),
        ("sparse_count", 9216),
        ("sparse_count", 2500),
        ("pre_tokens", 3),
        ("next_tokens", 3),
        ("return_value", True),
        ("attention_mode", 0),
        ("sparse_block_size", 2),
    ):
        if any(a.name == argument for a in torch._C.parse_schema(shipped()[1][name]).arguments):
            yield {argument: value}
    q, k = base["query"], base["key"]
    assert isinstance(q, Tensor) and isinstance(k, Tensor)
    for heads in (129, 256):
        yield {"query": q.new_zeros(*q.shape[:2], heads, q.shape[3])}
    yield {"key": k[:, :-1].contiguous()}  # fewer keys than queries
    for argument in ("actual_seq_lengths_query", "actual_seq_lengths_kv"):
        if argument in shipped()[1][name]:
            yield {argument: torch.full((2,), 7, dtype=torch.int32)}
    if "kl" in name:
        indices = base["sparse_indices"]
        assert isinstance(indices, Tensor)
        for selected in (512, 1500, 9216):
            yield {"sparse_indices": indices.new_full((1, 4, 1, selected), -1)}
        yield {"query": q.new_zeros(1, 8193, 32, 1)}
        yield {"key": k.new_zeros(1, 131073, 1, 1)}
        yield {"query": q.new_zeros(257, 1, 1, 1)}


@pytest.mark.parametrize("name", BASES)
def test_every_rule_is_broken_by_a_call_and_named(name: str) -> None:
    base = BASES[name]()
    getattr(torch.ops.npu, name)(**base)  # this one is taken
    broken = set()
    for change in changes(name, base):
        try:
            getattr(torch.ops.npu, name)(**{**base, **change})  # some changes give another call that is taken
        except KernelError as error:
            broken |= {(p.key.rpartition(f"{name}.")[2], dict(p.details)["rule"]) for p in error.problems}
        except RuntimeError as error:
            assert str(error).startswith(f"npu::{name}() Expected a value of type"), error  # by the schema
    rules = {(rule["require"][0], rule["rule"]) for rule in rule_table()[name]}  # type: ignore[index]
    assert rules - broken == set()


def test_every_operator_of_the_stand_in_has_rules() -> None:
    assert set(rule_table()) == set(shipped()[1]) == set(BASES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotary_embedding_are_their_formulas_with_their_gradients(dtype: torch.dtype) -> None:
    bound_, given = (
        {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype],
        {n: x for n, x in norm().items() if n != "epsilon"},
    )
    x, gamma = (t.to(dtype).requires_grad_() for t in given.values() if isinstance(t, Tensor))
    out, factor = torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)
    expected = torch.nn.functional.rms_norm(x.double(), (16,), gamma.double(), 1e-6)
    upstream = random(2, 8, 16).to(dtype)
    close(
        torch.autograd.grad(out, (x, gamma), upstream),
        torch.autograd.grad(expected, (x, gamma), upstream.double()),
        bound_,
    )
    close((out, factor[..., 0]), (expected, (x.double().square().mean(-1) + 1e-6).rsqrt()), bound_)
    for mode in ("half", "interleave"):
        call = {n: t.to(dtype) if isinstance(t, Tensor) else t for n, t in rotary(mode).items()}
        x, cos, sin = call["input"], call["r1"], call["r2"]
        assert isinstance(x, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)
        wide = x.double()
        pairs = [(i, i + 8) for i in range(8)] if mode == "half" else [(2 * i, 2 * i + 1) for i in range(8)]
        turned = torch.empty_like(wide)
        for i, j in pairs:  # (x_i, x_j) -> (-x_j, x_i)
            turned[..., i], turned[..., j] = -wide[..., j], wide[..., i]
        close((torch.ops.npu.npu_rotary_mul(**call),), (cos.double() * wide + sin.double() * turned,), bound_)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound_: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= bound_ * b.double().norm()


def test_merging_by_the_operator_has_no_gradient() -> None:
    call = update()
    out = call["prev_attn_out"]
    assert isinstance(out, Tensor)
    said = refused("npu_ring_attention_update", {**call, "prev_attn_out": out.clone().requires_grad_()})
    assert "the operator has no gradient" in said


def refused(name: str, call: Call) -> str:
    with pytest.raises(KernelError) as caught:
        getattr(torch.ops.npu, name)(**call)
    return str(caught.value)


@pytest.mark.quick
def test_known_traps_of_dense_attention_are_refused() -> None:
    call, gradient = fused(), fused_gradient()
    assert "the mode is ignored and attention is full" in refused("npu_fusion_attention", {**call, "atten_mask": None})
    lower = ~COMPRESSED  # PyTorch's sense of a mask
    assert "hides what is above the diagonal" in refused("npu_fusion_attention", {**call, "atten_mask": lower})
    blind = torch.zeros(8, 8, dtype=torch.bool)
    blind[3] = True
    said = refused("npu_fusion_attention", {**call, "atten_mask": blind, "sparse_mode": 1})
    assert "hides every key from 1 queries" in said
    highest = gradient["softmax_max"]
    assert isinstance(highest, Tensor)
    said = refused("npu_fusion_attention_grad", {**gradient, "softmax_max": highest - 3})
    assert "sums to" in said and "statistics are those of the same queries" in said
    said = refused("npu_fusion_attention_grad", {**gradient, "softmax_max": highest + torch.arange(8) * 1e-3})
    assert "holds different values" in said
    unset = {
        n: torch.full_like(x, torch.nan) for n, x in gradient.items() if isinstance(x, Tensor) and x.dtype != torch.bool
    }
    assert torch.ops.npu.npu_fusion_attention_grad(**{**gradient, **unset})[0].isnan().any()
    said = refused("npu_fusion_attention_grad", {**gradient, "softmax_max": highest[..., 0].contiguous()})
    assert "each statistic is there 8 times" in said


def test_statistics_of_packed_tokens_lie_head_by_head_unless_asked() -> None:
    q, k, v = random(16, 4, 16), random(16, 2, 16), random(16, 2, 8)
    ends: Call = {"actual_seq_qlen": [6, 16], "actual_seq_kvlen": [6, 16]}
    call: Call = {"query": q, "key": k, "value": v, "head_num": 4, "input_layout": "TND", "scale": 0.25, **ends}
    call |= {"atten_mask": COMPRESSED, "sparse_mode": 3}
    out, by_head, total, *_ = torch.ops.npu.npu_fusion_attention(**call)
    _, by_token, _, *_ = torch.ops.npu.npu_fusion_attention(**call, softmax_layout="TND")
    torch.testing.assert_close(by_head.reshape(4, 16, 8).transpose(0, 1), by_token)
    assert not torch.allclose(by_head, by_token)
    call["scale_value"] = call.pop("scale")
    gradient: Call = call | {
        "dy": torch.ones_like(out),
        "attention_in": out,
        "softmax_max": by_head,
        "softmax_sum": total,
    }
    torch.ops.npu.npu_fusion_attention_grad(**gradient)
    assert "sums to" in refused("npu_fusion_attention_grad", {**gradient, "softmax_layout": "TND"})


def test_positional_and_misspelt_arguments_fail_at_the_schema() -> None:
    call = fused()
    q, k, v = (call[n] for n in ("query", "key", "value"))
    with pytest.raises(RuntimeError, match=r"sparse_mod"):
        torch.ops.npu.npu_fusion_attention(q, k, v, 4, "BNSD", sparse_mod=2)
    half = attention()
    positional = [half[n] for n in ("query", "key", "value", "sparse_indices", "scale_value")]
    with pytest.raises(RuntimeError, match=r"positional|argument"):  # what follows scale_value goes by keyword
        torch.ops.npu.npu_sparse_flash_attention(*positional, half["query_rope"])


@pytest.mark.parametrize("name", ["npu_lightning_indexer", "npu_sparse_lightning_indexer_grad_kl_loss"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_weights_of_the_other_half_type_are_refused(name: str, half: torch.dtype) -> None:
    call = BASES[name]()
    halved = {n: x.to(half) for n, x in call.items() if isinstance(x, Tensor) and x.dtype == torch.bfloat16}
    other = torch.bfloat16 if half == torch.float16 else torch.float16
    for dtype in (half, torch.float32):
        getattr(torch.ops.npu, name)(**{**call, **halved, "weights": halved["weights"].to(dtype)})
    said = refused(name, {**call, **halved, "weights": halved["weights"].to(other)})
    assert "weights are of q's dtype or float32" in said


def test_indices_that_no_query_may_see_are_refused() -> None:
    call = attention()
    name, indices = "npu_sparse_flash_attention", call["sparse_indices"]
    assert isinstance(indices, Tensor)
    for wrong, said in (
        (indices + 100, "there are 8 keys"),
        (indices.flip(-1).contiguous(), "-1 stands behind"),
        (indices.clamp(min=0), "name a key twice"),
        (torch.full_like(indices, -1), "leave 16 queries without a key"),
    ):
        assert said in refused(name, {**call, "sparse_indices": wrong})


def test_arguments_by_name_have_the_defaults_of_the_schema() -> None:
    schema = torch.ops.npu.npu_lightning_indexer.default._schema
    given = bound(schema, (1, 2), {"sparse_count": 7})
    assert (given["query"], given["key"], given["sparse_count"], given["sparse_mode"]) == (1, 2, 7, 3)
