"""DeepSeek-V3.2 on one process: its attention against a dense one written here, and what torchtitan asks of a model."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_engine.errors import CallError, ConfigError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.hosts.torchtitan.models.deepseek_v32.rotary import hadamard_signs, rotate_hadamard, rotate_pairs

BATCH, LENGTH, THETAS = 2, 24, (1.0, 0.13)
SMALL = {
    "vocab_size": 50,
    "dim": 24,
    "inter_dim": 32,
    "moe_inter_dim": 16,
    "n_layers": 2,
    "n_dense_layers": 1,
    "n_heads": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2 * len(THETAS),
    "v_head_dim": 5,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 5,
    "max_seq_len": 64,
}


@pytest.fixture(scope="module")
def titan() -> Iterator[SimpleNamespace]:
    """What is tested, imported where torchtitan can be: on CPU inside the stand-ins, which its experts need too."""
    with cpu_shims():
        from torchtitan.config import JobConfig
        from torchtitan.distributed.activation_checkpoint import apply_ac
        from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb
        from torchtitan.models.moe import MoEArgs

        from cp_engine.hosts.torchtitan.models.deepseek_v32 import attention, indexer, model, spec

        def sizes(**changes: object) -> spec.DeepSeekV32ModelArgs:
            experts = MoEArgs(num_experts=4, top_k=2, use_grouped_mm=False, score_before_experts=False)
            return spec.DeepSeekV32ModelArgs(**{**SMALL, "moe_args": experts, **changes})

        yield SimpleNamespace(
            sizes=sizes,
            Model=model.DeepSeekV32Model,
            Attention=attention.Attention,
            IndexerLoss=indexer.IndexerLoss,
            get_train_spec=spec.get_train_spec,
            JobConfig=JobConfig,
            apply_ac=apply_ac,
            apply_rotary_emb=apply_rotary_emb,
        )


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomized(module: nn.Module) -> nn.Module:
    """The module in float64, with weights large enough that attention is far from uniform."""
    module.double().train()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=i) * 2 / parameter.shape[-1] ** 0.5)
    return module


def table() -> Tensor:
    """Unit numbers of every position, complex128."""
    angles = torch.outer(torch.arange(64, dtype=torch.float64), torch.tensor(THETAS, dtype=torch.float64))
    return torch.polar(torch.ones_like(angles), angles)


def require_close(name: str, got: Tensor | None, expected: Tensor, bound: float = 1e-10, is_zero: bool = False) -> None:
    """Within a bound, relative to the largest value (absolute where all are to be zero)."""
    assert got is not None, f"{name} has none"
    largest = float(expected.abs().max())
    assert is_zero or largest > 1e-6, f"{name} is near zero, which shows nothing"
    error = float((got - expected).abs().max()) / (1.0 if is_zero else largest)
    assert error <= bound, f"{name} is off by {error:.1e}"


def require_same(name: str, got: Tensor, expected: Tensor) -> None:
    """The same sums made once more, be they near zero: two runs of one computation in float64."""
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()), msg=name)


# --- a dense implementation, which shares no code with the model ---


def turned(x: Tensor, positions: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rope on [B, S, H, R], pair by pair."""
    first, second = [], []
    for i, theta in enumerate(THETAS):
        a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + len(THETAS))
        cos, sin = torch.cos(positions * theta)[..., None], torch.sin(positions * theta)[..., None]
        first.append(x[..., a] * cos - x[..., b] * sin)
        second.append(x[..., a] * sin + x[..., b] * cos)
    ordered = [y for pair in zip(first, second, strict=True) for y in pair] if is_interleaved else [*first, *second]
    return torch.stack(ordered, -1)


def explicit_hadamard(size: int) -> Tensor:
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def index_scores(p: Mapping[str, Tensor], x: Tensor, latent: Tensor, positions: Tensor) -> Tensor:
    """I [B, S, S], without a mask."""
    heads, size, rope = SMALL["index_n_heads"], SMALL["index_head_dim"], 2 * len(THETAS)
    q = (latent @ p["indexer.wq_b.weight"].T).reshape(BATCH, LENGTH, heads, size)
    k = x @ p["indexer.wk.weight"].T
    centred = k - k.mean(-1, keepdim=True)
    k = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6)
    k = (k * p["indexer.k_norm.weight"] + p["indexer.k_norm.bias"]).unsqueeze(2)
    q, k = (
        torch.cat((turned(y[..., :rope], positions, is_interleaved=False), y[..., rope:]), -1) @ explicit_hadamard(size)
        for y in (q, k)
    )
    products = torch.einsum("bthd,bsd->bths", q, k[:, :, 0])
    weights = x @ p["indexer.weights_proj.weight"].T / math.sqrt(heads * size)
    return torch.einsum("bths,bth->bts", products.clamp(min=0), weights)


def selected(scores: Tensor, topk: int) -> list[list[list[int]]]:
    """Of each query the keys with the highest scores, at equal score the first."""
    values = scores.tolist()
    return [[sorted(range(t + 1), key=lambda s: (-row[s], s))[:topk] for t, row in enumerate(rows)] for rows in values]


def ties_at_the_cut(scores: Tensor, chosen: Sequence[Sequence[Sequence[int]]]) -> int:
    values, count = scores.tolist(), 0
    for rows, keys in zip(values, chosen, strict=True):
        for t, (row, picked) in enumerate(zip(rows, keys, strict=True)):
            left = [row[s] for s in range(t + 1) if s not in picked]
            count += bool(left) and max(left) == min(row[s] for s in picked)
    return count


def dense_attention(
    p: Mapping[str, Tensor], x: Tensor, positions: Tensor, topk: int, factor: float, eps: float
) -> tuple[Tensor, Tensor, int]:
    """Output [B, S, dim], loss, and how many queries have a tie at the cut."""
    heads, nope, rope = SMALL["n_heads"], SMALL["qk_nope_head_dim"], 2 * len(THETAS)
    q_latent = rms(x @ p["wq_a.weight"].T, p["q_norm.weight"], eps)
    scores = index_scores(p, x.detach(), q_latent.detach(), positions)
    chosen = selected(scores, topk)
    is_seen = torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    for b, rows in enumerate(chosen):
        for t, keys in enumerate(rows):
            is_seen[b, t, keys] = True
    q = (q_latent @ p["wq_b.weight"].T).reshape(BATCH, LENGTH, heads, nope + rope)
    q = torch.cat((q[..., :nope], turned(q[..., nope:], positions, is_interleaved=True)), -1)
    down = x @ p["wkv_a.weight"].T
    k_rope = turned(down[..., None, -rope:], positions, is_interleaved=True)
    expanded = rms(down[..., :-rope], p["kv_norm.weight"], eps) @ p["wkv_b.weight"].T
    expanded = expanded.reshape(BATCH, LENGTH, heads, nope + SMALL["v_head_dim"])
    k = torch.cat((expanded[..., :nope], k_rope.expand(-1, -1, heads, -1)), -1)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * factor / math.sqrt(nope + rope)
    distribution = logits.masked_fill(~is_seen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhts,bshd->bthd", distribution, expanded[..., nope:]).reshape(BATCH, LENGTH, -1)
    target = distribution.sum(1).detach()
    target = target / target.sum(-1, keepdim=True)
    loss = torch.zeros((), dtype=torch.float64)
    for b, rows in enumerate(chosen):
        for t, keys in enumerate(rows):
            loss = loss + F.kl_div(scores[b, t, keys].log_softmax(-1), target[b, t, keys], reduction="sum")
    return out @ p["wo.weight"].T, loss, ties_at_the_cut(scores.detach(), chosen)


@pytest.mark.parametrize(
    ("changes", "topk", "factor"),
    [
        ({}, 5, 1.0),
        ({"index_topk": 40}, LENGTH, 1.0),
        ({"index_topk": 1}, 1, 1.0),
        ({"warm_up": True}, LENGTH, 1.0),
        ({"original_seq_len": 32, "rope_factor": 8.0, "mscale": 0.7}, 5, (0.07 * math.log(8) + 1) ** 2),
    ],
    ids=["topk=5", "topk above the length", "topk=1", "dense warm-up", "yarn scale"],
)
@pytest.mark.parametrize("is_moved", [False, True], ids=["in order", "given positions"])
def test_attention_is_that_of_the_dense_implementation(
    titan: SimpleNamespace, changes: dict[str, object], topk: int, factor: float, is_moved: bool
) -> None:
    args, shared = titan.sizes(**changes), titan.IndexerLoss()
    module = randomized(titan.Attention(args, shared))
    shared.weight = torch.tensor(0.37, dtype=torch.float64)
    x = random(BATCH, LENGTH, args.dim, seed=100).requires_grad_()
    upstream = random(args.dim, LENGTH, BATCH, seed=101).permute(2, 1, 0)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) * 2 + 7]) if is_moved else None
    out = module(x, table(), None, positions)
    out.backward(upstream)

    p = {name: y.detach().clone().requires_grad_() for name, y in module.named_parameters()}
    again = x.detach().clone().requires_grad_()
    places = (torch.arange(LENGTH).expand(BATCH, -1) if positions is None else positions).double()
    expected, loss, ties = dense_attention(p, again, places, topk, factor, args.norm_eps)
    ((expected * upstream).sum() + 0.37 * loss).backward()

    assert ties > 0 or topk == LENGTH, "no selection depends on the tie rule"
    require_close("out", out.detach(), expected.detach())
    require_close("x", x.grad, _grad(again))
    # over a single key every distribution is the same, so that the loss and all gradients through it are zero
    require_close("loss", shared.take(), loss.detach(), is_zero=topk == 1)
    for name, parameter in module.named_parameters():
        require_close(
            name, parameter.grad, _grad(p[name]), is_zero=topk == 1 and not name.startswith(("wkv", "kv", "wo"))
        )


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


# --- rotations ---


@pytest.mark.parametrize("size", [1, 2, 32, 128])
def test_hadamard_rotation_is_the_explicit_one(size: int) -> None:
    x = random(3, 5, size, seed=size)
    rotated = rotate_hadamard(x, hadamard_signs(size))
    require_close("rotated", rotated, x @ explicit_hadamard(size), 1e-14 * size)
    require_close("rotated twice", rotate_hadamard(rotated, hadamard_signs(size)), x, 1e-14 * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_rope_is_that_of_torchtitan(titan: SimpleNamespace, dtype: torch.dtype, rows: int | None) -> None:
    x, freqs = random(3, 24, 2, 4, seed=1).to(dtype), table().to(torch.complex64)
    positions = None if rows is None else torch.stack([torch.arange(24) + 5 * i for i in range(rows)])
    found, wanted = rotate_pairs(x, freqs, positions, interleaved=True), titan.apply_rotary_emb(x, freqs, positions)
    assert found.dtype == wanted.dtype == dtype
    require_close("rotated", found, wanted, 4 * torch.finfo(dtype).eps)  # two products and a sum, in two orders


def test_rope_of_the_indexer_pairs_the_halves() -> None:
    x = random(2, 24, 3, 4, seed=2)
    places = torch.arange(24, dtype=torch.float64).expand(2, -1)
    rotated = rotate_pairs(x, table(), None, interleaved=False)
    require_close("halves", rotated, turned(x, places, is_interleaved=False), 1e-14)
    assert not torch.allclose(rotated, turned(x, places, is_interleaved=True))


# --- the loss on its way to the trainer ---


def small_model(titan: SimpleNamespace, **changes: object) -> nn.Module:
    """In float64, with drawn weights and a weight for the loss."""
    torch.manual_seed(0)
    model = titan.Model(titan.sizes(**changes)).double().train()
    with torch.no_grad():
        model.init_weights()
    model.indexer_loss.weight = torch.tensor(1.0, dtype=torch.float64)
    return model


def gradients(model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of one step by name, and the indexer loss that was counted."""
    tokens = torch.arange(2 * 33).reshape(2, 33) * 7 % 50
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    names = {n.replace("_checkpoint_wrapped_module.", ""): x for n, x in model.named_parameters()}
    return {n: x.grad for n, x in names.items() if x.grad is not None}, model.indexer_loss.take()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_counts_the_loss_once(titan: SimpleNamespace, use_reentrant: bool) -> None:
    shared = titan.IndexerLoss()
    module = randomized(titan.Attention(titan.sizes(), shared))
    shared.weight = torch.tensor(0.5, dtype=torch.float64)
    x = random(BATCH, LENGTH, 24, seed=3).requires_grad_()
    module(x, table()).sum().backward()
    plain, counted = [_grad(y).clone() for y in module.parameters()], shared.take()
    module.zero_grad()
    checkpoint(module, x, table(), use_reentrant=use_reentrant).sum().backward()
    require_close("loss", shared.take(), counted)
    for expected, (name, parameter) in zip(plain, module.named_parameters(), strict=True):
        require_close(name, _grad(parameter), expected)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_of_torchtitan_changes_no_gradient(titan: SimpleNamespace, mode: str) -> None:
    expected, counted = gradients(small_model(titan))
    model, options = small_model(titan), titan.JobConfig().activation_checkpoint
    options.mode, options.selective_ac_option = mode, "op"
    titan.apply_ac(model, options, op_sac_save_list={torch.ops.aten.mm.default})
    got, again = gradients(model)
    require_close("loss", again, counted)
    assert got.keys() == expected.keys() == dict(small_model(titan).named_parameters()).keys()
    for name, x in expected.items():
        require_same(name, got[name], x)


def test_training_without_a_weight_is_refused(titan: SimpleNamespace) -> None:
    model = small_model(titan)
    model.indexer_loss.weight = None
    tokens = torch.arange(2 * 32).reshape(2, 32) % 50
    with pytest.raises(CallError, match=r"model\.indexer_loss\.weight = torch\.tensor"):
        model(tokens)
    trained = model.eval()(tokens)
    with torch.no_grad():
        require_close("logits", model(tokens), trained)
    assert model.indexer_loss.take() == 0  # evaluation is not counted


def test_the_indexer_learns_from_its_loss_alone(titan: SimpleNamespace) -> None:
    model = small_model(titan)
    whole, counted = gradients(model)
    model.zero_grad()
    model.indexer_loss.weight = torch.zeros((), dtype=torch.float64)
    without, again = gradients(model)
    require_close("loss", again, counted)
    for name, x in whole.items():
        if ".indexer." in name:
            assert x.abs().max() > 0
            assert without[name].abs().max() == 0
        else:
            require_same(name, without[name], x)


def test_each_copy_of_a_model_has_a_loss_of_its_own(titan: SimpleNamespace) -> None:
    model = small_model(titan)
    part = copy.deepcopy(model)
    assert part.indexer_loss is not model.indexer_loss
    for one in (model, part):
        assert all(layer.attention.indexer_loss is one.indexer_loss for layer in one.layers.values())
    gradients(part)
    assert model.indexer_loss.take() == 0


def test_warm_up_trains_the_indexer_against_dense_attention(titan: SimpleNamespace) -> None:
    sparse, warm = small_model(titan, index_topk=64), small_model(titan, warm_up=True)
    expected, counted = gradients(sparse)  # every visible key is selected
    differentiated: list[bool] = []
    warm.layers["1"].ffn_norm.register_forward_pre_hook(lambda _, given: differentiated.append(given[0].requires_grad))
    got, again = gradients(warm)
    assert differentiated == [False]  # backward takes the residual path and the indexers, nothing else of a layer
    assert got.keys() == {name for name in expected if ".indexer." in name}
    require_close("loss", again, counted)
    for name, x in got.items():
        require_close(name, x, expected[name])
    assert {n for n, x in warm.named_parameters() if x.requires_grad} == got.keys()


# --- what torchtitan asks of a model ---

LAYER = (
    """
input_layernorm.weight
post_attention_layernorm.weight
self_attn.q_a_proj.weight
self_attn.q_a_layernorm.weight
self_attn.q_b_proj.weight
self_attn.kv_a_proj_with_mqa.weight
self_attn.kv_a_layernorm.weight
self_attn.kv_b_proj.weight
self_attn.o_proj.weight
self_attn.indexer.wq_b.weight
self_attn.indexer.wk.weight
self_attn.indexer.k_norm.weight
self_attn.indexer.k_norm.bias
self_attn.indexer.weights_proj.weight
mlp.gate.weight
mlp.gate.e_score_correction_bias
mlp.shared_experts.gate_proj.weight
mlp.shared_experts.up_proj.weight
mlp.shared_experts.down_proj.weight
""".split()
    + [f"mlp.experts.{i}.{kind}_proj.weight" for i in range(8) for kind in ("gate", "up", "down")]
)


def test_checkpoint_names_are_those_of_hugging_face_and_lead_back(titan: SimpleNamespace) -> None:
    spec = titan.get_train_spec()
    args = spec.model_args["debugmodel"]
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
    adapter = spec.state_dict_adapter(args, None)
    theirs = adapter.to_hf(model.state_dict())
    assert sorted(n for n in theirs if n.startswith("model.layers.2.")) == sorted(f"model.layers.2.{n}" for n in LAYER)
    assert {n for n in theirs if ".layers." not in n} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    ours = adapter.from_hf(theirs)
    assert ours.keys() == model.state_dict().keys()
    assert all(torch.equal(ours[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("flavor", ["debugmodel", "debugmodel_warm_up"])
def test_weights_are_complete_after_the_meta_device_and_follow_the_seed(titan: SimpleNamespace, flavor: str) -> None:
    spec = titan.get_train_spec()
    states = []
    for seed in (0, 0, 1):
        with torch.device("meta"):
            model = spec.model_cls(spec.model_args[flavor])
        model.to_empty(device="cpu")
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):  # memory that nobody wrote may hold anything
                x.fill_(torch.nan)
            torch.manual_seed(seed)
            model.init_weights(torch.device("cpu"))
        states.append({**dict(model.named_parameters()), **dict(model.named_buffers())})
        assert not any("hadamard" in name or "freqs" in name for name in model.state_dict())
    assert not any(x.isnan().any() for x in states[0].values())
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
    for kind in ("wq_b", "wk", "weights_proj"):
        name = f"layers.3.attention.indexer.{kind}.weight"
        assert not torch.equal(states[0][name], states[2][name])
        assert float(states[0][name].detach().std()) == pytest.approx(states[0][name].shape[-1] ** -0.5, rel=0.1)
    signs = states[0]["layers.3.attention.indexer.hadamard"].double() / math.sqrt(32)
    require_close("hadamard", signs, explicit_hadamard(32), 1e-7)


def test_the_public_sizes_give_the_public_shapes(titan: SimpleNamespace) -> None:
    spec = titan.get_train_spec()
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args["671B"])
    shapes = {name: list(x.shape) for name, x in model.state_dict().items()}
    layer = "layers.60.attention."
    assert {name.removeprefix(layer): shape for name, shape in shapes.items() if name.startswith(layer)} == {
        "wq_a.weight": [1536, 7168],
        "q_norm.weight": [1536],
        "wq_b.weight": [24576, 1536],
        "wkv_a.weight": [576, 7168],
        "kv_norm.weight": [512],
        "wkv_b.weight": [32768, 512],
        "wo.weight": [7168, 16384],
        "indexer.wq_b.weight": [8192, 1536],
        "indexer.wk.weight": [128, 7168],
        "indexer.k_norm.weight": [128],
        "indexer.k_norm.bias": [128],
        "indexer.weights_proj.weight": [64, 7168],
    }
    assert shapes["layers.60.moe.experts.w1"] == [256, 2048, 7168]
    assert shapes["layers.2.feed_forward.w1.weight"] == [18432, 7168]
    assert len(model.layers) == 61
    total = sum(x.numel() for x in model.parameters())
    indexers = sum(x.numel() for name, x in model.named_parameters() if ".indexer." in name)
    assert (total - indexers) // 10**9 == 671
    assert indexers == 61 * (8192 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168)
    assert not any(x.device.type != "meta" for x in model.parameters())
    counts = [model.model_args.get_nparams_and_flops(model, length) for length in (4096, 8192)]
    assert counts[0][0] == counts[1][0] == total
    assert counts[1][1] - counts[0][1] == 6 * 61 * 64 * 128 * 4096  # 2048 keys are attended to, and all are scored


def test_every_size_that_does_not_fit_is_named(titan: SimpleNamespace) -> None:
    with pytest.raises(ConfigError) as caught:
        titan.sizes(q_lora_rank=0, index_topk=0, index_head_dim=12, attn_type="flex")
    names = ("q_lora_rank", "index_topk", "index_head_dim", "attn_type")
    assert [p.key for p in caught.value.problems] == [f"model_args.{name}" for name in names]
    assert caught.value.problems[2].tries == ("index_head_dim=16",)


def test_jobs_that_do_not_know_the_indexer_are_refused(titan: SimpleNamespace) -> None:
    args, job = titan.sizes(), titan.JobConfig()
    args.update_from_config(job)
    assert args.max_seq_len == job.training.seq_len
    job.parallelism.context_parallel_degree = 2
    job.compile.enable = True
    with pytest.raises(ConfigError) as caught:
        args.update_from_config(job)
    names = ("parallelism.context_parallel_degree", "compile.components")
    assert [p.key for p in caught.value.problems] == [f"titan.{name}" for name in names]


def test_a_mask_is_refused(titan: SimpleNamespace) -> None:
    with pytest.raises(CallError, match=r"call\.attention_masks"):
        small_model(titan)(torch.zeros(1, 8, dtype=torch.int64), torch.ones(8, 8, dtype=torch.bool))
