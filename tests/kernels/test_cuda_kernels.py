"""The CUDA kernels: on a GPU against float64; without one, their operators' schemas, and what their sources say of memory.

`Operators` stands for the compiled kernels, which run on a GPU only. It computes attention in float64 from memory as their sources read
it: raw, where they ignore strides. So an adapter that hands over a wrong layout gets wrong numbers here too.
"""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_engine.algebra.tiles import Tile
from cp_engine.exchange.target import Target
from cp_engine.job.verify import reference
from cp_engine.job.verify.attention import inputs
from cp_engine.kernels.cuda_efficient import CUDAEfficient
from cp_engine.kernels.cuda_flash import CUDAFlash
from cp_engine.kernels.cudnn import CuDNN
from cp_engine.kernels.flex import Flex
from cp_engine.kernels.registry import KERNELS, Kernel, KernelRequest, hardware
from cp_engine.kernels.tiled import TiledAttention
from cp_engine.runtime.program import Program
from tests.helpers import plan_of, small
from tests.kernels.dense import (
    CASES,
    SCALE,
    Results,
    attention_of,
    band,
    by_tile,
    causal,
    dense,
    full,
    heads_last,
    random_qkv,
    run_kernel,
    run_tiles,
    seen_in,
    sets_of,
    visible_pairs,
)
from tests.kernels.test_kernels import strided_last_dim, strided_sequence

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative by norm: some roundings of scores and weights to 24 bits (three TF32 products), 11 bits and 8 bits."""

FLOOR = 0.05
"""Elements are compared as if they were at least this large: a gradient that cancels to 0 keeps the roundings of its terms."""

HALF = (torch.bfloat16, torch.float16)
DTYPES: dict[type, tuple[torch.dtype, ...]] = {
    CUDAFlash: HALF,
    CuDNN: HALF,
    CUDAEfficient: (torch.float32, *HALF),
    Flex: (torch.float32, *HALF),
}
aten = torch.ops.aten


def of_type(kind: type) -> Kernel:
    return next(k for k in KERNELS if type(k) is kind)


def pairs(*kinds: type) -> pytest.MarkDecorator:
    """Every kernel with every dtype that it computes."""
    both = []
    for kernel, dtype in ((of_type(t), d) for t in kinds for d in DTYPES[t]):
        # flex compiles for each dtype and shape, forward and backward
        marks = [pytest.mark.long] if kernel.name == "flex" and dtype != torch.bfloat16 else []
        both.append(pytest.param(kernel, dtype, id=f"{kernel.name}-{str(dtype)[6:]}", marks=marks))
    return pytest.mark.parametrize(("kernel", "dtype"), both)


def assert_near(found: Results, wanted: Results, dtype: torch.dtype) -> None:
    """Relative by norm; lse is -inf exactly where it should be, and absolute elsewhere."""
    lse, wanted_lse = found["lse"].double().cpu(), wanted["lse"].cpu()
    assert torch.equal(lse == -math.inf, wanted_lse == -math.inf)
    assert float((lse - wanted_lse).nan_to_num(nan=0.0).abs().max()) < 1e-3
    for name in ("out", "dq", "dk", "dv"):
        x, y = found[name].double().cpu(), wanted[name].cpu()
        assert x.shape == y.shape and bool(x.isfinite().all()), name
        size = max(float(y.norm()), FLOOR * y.numel() ** 0.5)
        error = float((x - y).norm()) / size
        assert error < BOUNDS[dtype], f"{name}: {error:.2e}"


# ------------------------------------------------------------------ the operators, as their sources read memory
def bound_to(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Arguments by the names of the operator's schema, with its defaults."""
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    assert set(given) <= set(names)
    return {a.name: given.get(a.name, a.default_value) for a in func._schema.arguments}


def require_aligned(x: Tensor) -> None:
    """16-byte rows, which vector loads need."""
    step = 16 // x.element_size()
    assert x.stride(3) == 1 and all(n % step == 0 for n in (x.storage_offset(), *x.stride()[:3]))


def raw(x: Tensor, *size: int) -> Tensor:
    """Memory from a tensor's first element on, as if it were contiguous; an error where it ends before that."""
    strides = [math.prod(size[i + 1 :]) for i in range(len(size))]
    return x.as_strided(size, strides, x.storage_offset())


def weights(q: Tensor, k: Tensor, bias: Tensor | None, ahead: int | None, scale: float) -> Tensor:
    """Scores in float64; with `ahead`, query i sees keys up to i + ahead."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if bias is not None:
        scores = scores + bias.double()
    if ahead is not None:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(ahead)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def differentiated(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Tensor, scale: float
) -> list[Tensor]:
    share = q.shape[1] // k.shape[1]
    k_, v_ = (x.double().repeat_interleave(share, 1) for x in (k, v))
    p = (scores - lse.double()[..., None]).exp()
    ds = p * (dout.double() @ v_.mT - (dout.double() * out.double()).sum(-1, keepdim=True)) * scale
    grads = (ds @ k_, ds.mT @ q.double(), p.mT @ dout.double())
    return [g.unflatten(1, (x.shape[1], -1)).sum(2).to(q.dtype) for g, x in zip(grads, (q, k, v), strict=True)]


class Operators(TorchDispatchMode):
    """flash, efficient and cuDNN attention on CPU tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.plans: dict[object, tuple[tuple[int, ...], ...]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::_scaled_dot_product_").replace("_attention", "")
        if not hasattr(self, name) or name == func._schema.name:
            return func(*args, **(kwargs or {}))
        self.calls.append(name)
        a = bound_to(func, args, kwargs or {})
        assert a["dropout_p"] == 0.0 and a["scale"] is not None
        return getattr(self, name)(a)

    def flash(self, a: dict) -> tuple:
        q, k, v = a["query"], a["key"], a["value"]
        assert q.dtype in HALF and q.shape[3] == k.shape[3] == v.shape[3] <= 256 and q.shape[3] % 8 == 0
        for x in (q, k, v):
            require_aligned(x)
        scores = weights(q, k, None, k.shape[2] - q.shape[2] if a["is_causal"] else None, a["scale"])
        out, lse = self._attended(scores, v, q)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse, None, None, q.shape[2], k.shape[2], *[lse] * 3

    def flash_backward(self, a: dict) -> tuple:
        q, k, v = a["query"], a["key"], a["value"]
        assert (a["cum_seq_q"], a["cum_seq_k"], a["max_q"], a["max_k"]) == (None, None, q.shape[2], k.shape[2])
        for x in (q, k, v, a["grad_out"], a["out"]):
            require_aligned(x)
            assert x.dtype == q.dtype and x.shape[3] == q.shape[3]
        assert a["logsumexp"].dtype == torch.float32
        lse = raw(a["logsumexp"], *q.shape[:3])  # mha_bwd takes its data pointer
        scores = weights(q, k, None, k.shape[2] - q.shape[2] if a["is_causal"] else None, a["scale"])
        return tuple(differentiated(a["grad_out"], q, k, v, a["out"], lse, scores, a["scale"]))

    def efficient(self, a: dict) -> tuple:
        q, k, v = self._efficient_operands(a)
        assert a["compute_log_sumexp"]
        scores = weights(q, k, a["attn_bias"], 0 if a["is_causal"] else None, a["scale"])
        out, lse = self._attended(scores, v, q)
        padded = torch.full((*q.shape[:2], -(-q.shape[2] // 32) * 32), math.inf)
        padded[:, :, : q.shape[2]] = lse.masked_fill(lse == -math.inf, 0.0)  # fully hidden rows: log 1
        return out.transpose(1, 2).contiguous().transpose(1, 2), padded, lse, lse

    def efficient_backward(self, a: dict) -> tuple:
        q, k, v = self._efficient_operands(a)
        (b, h, s, _), width, lse = q.shape, v.shape[3], a["logsumexp"]
        require_aligned(a["grad_out_"])
        require_aligned(a["out"])
        assert lse.dtype == torch.float32 and lse.shape[2] % 32 == 0 and all(n % 8 == 0 for n in lse.stride()[:2])
        rows = lse.as_strided((b, h, lse.shape[2]), (lse.stride(0), lse.stride(1), 1), lse.storage_offset())
        assert bool((rows[:, :, s:] == math.inf).all())  # padded queries score 0: their weights must vanish
        # o_strideM() is head_dim_value * num_heads
        out = a["out"].as_strided(
            (b, h, s, width), (a["out"].stride(0), a["out"].stride(1), h * width, 1), a["out"].storage_offset()
        )
        scores = weights(q, k, a["attn_bias"], 0 if a["is_causal"] else None, a["scale"])
        grads = differentiated(a["grad_out_"], q, k, v, out, rows[:, :, :s], scores, a["scale"])
        assert a["grad_input_mask"] == [True, True, True, False]
        return *grads, None

    def cudnn(self, a: dict) -> tuple:
        q, k, v = a["query"], a["key"], a["value"]
        self._require_cudnn(q, k, v)
        assert a["attn_bias"] is None and a["compute_log_sumexp"]
        out, lse = self._attended(weights(q, k, None, 0 if a["is_causal"] else None, a["scale"]), v, q)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], lse, lse, None

    def cudnn_backward(self, a: dict) -> tuple:
        q, k, v, lse = a["query"], a["key"], a["value"], a["logsumexp"]
        self._require_cudnn(q, k, v)
        assert (a["attn_bias"], a["cum_seq_q"], a["cum_seq_k"]) == (None, None, None)
        assert (a["max_q"], a["max_k"]) == (q.shape[2], k.shape[2])
        # plans are cached by what MHAParams holds: q, k and v, but not out, dout and lse
        key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), a["is_causal"])
        made = tuple(x.stride() for x in (a["out"], a["grad_out"], lse))
        plan = self.plans.setdefault(key, made)
        assert lse.shape == (*q.shape[:3], 1) and lse.dtype == torch.float32
        out, dout, lse = (
            x.as_strided(x.shape, s, x.storage_offset())
            for x, s in zip((a["out"], a["grad_out"], lse), plan, strict=True)
        )
        scores = weights(q, k, None, 0 if a["is_causal"] else None, a["scale"])
        return tuple(differentiated(dout, q, k, v, out, lse[..., 0], scores, a["scale"]))

    @staticmethod
    def _attended(scores: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        lse = scores.logsumexp(-1)
        p = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        out = p @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        return out.to(q.dtype), lse.float()

    @staticmethod
    def _efficient_operands(a: dict) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, bias = a["query"], a["key"], a["value"], a["attn_bias"]
        assert q.shape[1] == k.shape[1] == v.shape[1] and q.dtype != torch.float64
        step = 16 // q.element_size()
        for x in (q, k, v):
            require_aligned(x)
            assert x.shape[3] % step == 0
        if bias is not None:
            require_aligned(bias)
            assert bias.dtype == q.dtype and bias.shape == (*q.shape[:3], k.shape[2])
        return q, k, v

    @staticmethod
    def _require_cudnn(q: Tensor, k: Tensor, v: Tensor) -> None:
        widths = (q.shape[3], v.shape[3])
        assert q.dtype in HALF and all(n % 8 == 0 for n in widths) and (max(widths) <= 128 or widths == (192, 128))
        assert q.shape[2] > 1 and k.shape[2] > 1


modelled = (CUDAFlash, CuDNN, CUDAEfficient)
SHAPES = [(4, 4, 16, 16), (6, 3, 192, 128), (4, 1, 20, 12)]
"""heads, kv_heads, head_dim, v_head_dim."""
TILES = [
    full(128, 256),
    full(11, 19),
    full(1, 23),
    causal(128),
    causal(17),
    causal(1),
    band(9, 20, -11, -3),
    band(128, 70, -5, 30),
    band(9, 9, 3, 5),  # queries 0, 1 and 2 see nothing
    band(5, 5, 7, 9),  # nobody sees anything
]


def random_call(tile: Tile, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    names = ("heads", "kv_heads", "head_dim", "v_head_dim")
    made = random_qkv(tile.q.count, tile.k.count, **dict(zip(names, shape, strict=True)))
    return tuple(x.to(device, dtype) for x in made)


@pairs(*modelled)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=by_tile)
def test_operands_are_what_the_operators_read(
    kernel: Kernel, dtype: torch.dtype, tile: Tile, shape: tuple[int, ...]
) -> None:
    tensors = random_call(tile, shape, dtype)
    with Operators() as operators:
        found = run_kernel(kernel, tensors, tile)
    assert {found[n].dtype for n in ("out", "dq", "dk", "dv")} == {dtype}
    assert found["lse"].dtype == torch.float32
    assert_near(found, dense(*tensors, seen_in(tile)), dtype)
    assert len(operators.calls) == 2


def shifted(x: Tensor) -> Tensor:
    """The same values in rows that start between multiples of 16 bytes."""
    return torch.cat([x[..., :1], x, x[..., :4]], -1)[..., 1:-4]


def offset(x: Tensor) -> Tensor:
    """The same values, one element further on in memory."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


VIEWS = [strided_last_dim, strided_sequence, heads_last, shifted, offset]


@pairs(*modelled)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("head_dim", [12, 16])
def test_strided_operands_are_what_the_operators_read(
    kernel: Kernel, dtype: torch.dtype, view: Callable[[Tensor], Tensor], head_dim: int
) -> None:
    for tile in (causal(128), band(128, 128, 0, 30)):
        tensors = random_call(tile, (4, 2, head_dim, head_dim), dtype)
        with Operators():
            found = run_kernel(kernel, tuple(view(x) for x in tensors), tile)
        assert_near(found, dense(*tensors, seen_in(tile)), dtype)


@pairs(*modelled)
def test_final_out_and_lse_in_any_layout_are_what_the_operators_read(kernel: Kernel, dtype: torch.dtype) -> None:
    """After merging, out and lse are slices of larger tensors, in another layout on every call."""
    tile = causal(128)
    q, k, v, dout = random_call(tile, (4, 2, 16, 16), dtype)
    wanted = dense(q, k, v, dout, seen_in(tile))
    with Operators():
        out, lse = kernel.forward(q, k, v, tile, SCALE)
        for layout in (Tensor.contiguous, heads_last, lambda x: torch.cat([x, x], 2)[:, :, :128]):
            wide = torch.cat([lse, lse], 2)[:, :, :128]
            dq, dk, dv = kernel.backward(layout(dout), q, k, v, layout(out), wide, tile, SCALE)
            assert_near({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, wanted, dtype)


@pairs(*modelled)
@pytest.mark.parametrize(("queries", "keys", "mask"), CASES)
def test_merged_tiles_of_the_operators_equal_dense(
    kernel: Kernel,
    dtype: torch.dtype,
    queries: range,
    keys: range,
    mask: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cp_engine.algebra.tiles.ROWS", 3)
    held, there = sets_of(queries, keys)
    tensors = tuple(x.to(dtype) for x in random_qkv(held.count, there.count, kv_heads=2))
    with Operators():
        found = run_tiles(attention_of(held, there, mask, kernel), tensors)
    assert_near(found, dense(*tensors, visible_pairs(held, there, mask)), dtype)


@pytest.mark.parametrize(
    ("kernel", "tile", "operator"),
    [
        (CUDAFlash(), full(7, 9), "flash"),
        (CUDAFlash(), causal(9), "flash"),
        (CUDAFlash(), band(9, 9, 0, 3), "efficient"),
        (CuDNN(), full(128, 256), "cudnn"),
        (CuDNN(), causal(128), "cudnn"),
        (CuDNN(), full(1, 128), "efficient"),
        (CuDNN(), full(128, 1), "efficient"),
        (CuDNN(), band(128, 128, 0, 3), "efficient"),
        (CUDAEfficient(), causal(9), "efficient"),
    ],
    ids=lambda x: by_tile(x) if isinstance(x, Tile) else getattr(x, "name", x),
)
def test_tile_goes_to_the_operator_that_the_kernel_declares(kernel: Kernel, tile: Tile, operator: str) -> None:
    with Operators() as operators:
        run_kernel(kernel, random_call(tile, (4, 2, 16, 16), torch.bfloat16), tile)
    assert operators.calls == [operator, f"{operator}_backward"]


@pytest.mark.parametrize(("version", "operator"), [(None, "efficient"), (91500, "efficient"), (91501, "cudnn")])
def test_odd_lengths_go_to_cudnn_from_the_version_that_takes_them(
    version: int | None, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    with Operators() as operators:
        run_kernel(CuDNN(), random_call(causal(130), (4, 2, 16, 16), torch.bfloat16), causal(130))
    assert operators.calls == [operator, f"{operator}_backward"]


@pairs(*modelled)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", [full(128, 256), causal(128), causal(17), band(100, 200, -70, 9)], ids=by_tile)
def test_calls_bind_to_the_schemas(kernel: Kernel, dtype: torch.dtype, tile: Tile, shape: tuple[int, ...]) -> None:
    """PyTorch's own shape functions of these operators accept the calls; meta tensors have no memory to compute with."""
    tensors = random_call(tile, shape, dtype, "meta")
    found = run_kernel(kernel, tensors, tile)
    q, k, v, dout = tensors
    wanted = {"out": dout.shape, "lse": q.shape[:3], "dq": q.shape, "dk": k.shape, "dv": v.shape}
    assert {n: x.shape for n, x in found.items()} == wanted
    assert {n: x.dtype for n, x in found.items()} == {**dict.fromkeys(found, dtype), "lse": torch.float32}


# ------------------------------------------------------------------ on a GPU
gpu_kernels = pairs(CUDAFlash, CuDNN, CUDAEfficient, Flex)
GPU_TILES = [*TILES, full(300, 517), causal(300), band(128, 900, -777, -13)]


def require(kernel: Kernel, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Skips what this GPU is refused for by name; on an H200 with cuDNN 9.11 that is nothing of SHAPES."""
    call = KernelRequest(
        device="cuda", dtype=str(dtype)[6:], head_dim=shape[2], v_head_dim=shape[3], hardware=hardware("cuda")
    )
    reason = kernel.refusal(call)
    if reason is not None:
        pytest.skip(f"{kernel.name} {reason}")


@needs_gpu
@gpu_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", GPU_TILES, ids=by_tile)
def test_kernel_equals_float64_on_a_gpu(kernel: Kernel, dtype: torch.dtype, tile: Tile, shape: tuple[int, ...]) -> None:
    require(kernel, dtype, shape)
    tensors = random_call(tile, shape, dtype, "cuda")
    found = run_kernel(kernel, tensors, tile)
    assert {found[n].dtype for n in ("out", "dq", "dk", "dv")} == {dtype} and found["lse"].dtype == torch.float32
    assert_near(found, dense(*(x.cpu() for x in tensors), seen_in(tile)), dtype)


@needs_gpu
@gpu_kernels
@pytest.mark.parametrize("view", VIEWS)
def test_kernel_reads_strided_tensors_right_on_a_gpu(
    kernel: Kernel, dtype: torch.dtype, view: Callable[[Tensor], Tensor]
) -> None:
    for tile in (causal(128), full(128, 128), band(128, 128, 0, 30)):
        tensors = random_call(tile, (4, 2, 16, 16), dtype, "cuda")
        found = run_kernel(kernel, tuple(view(x) for x in tensors), tile)
        assert_near(found, dense(*(x.cpu() for x in tensors), seen_in(tile)), dtype)


@needs_gpu
@gpu_kernels
@pytest.mark.parametrize(("queries", "keys", "mask"), CASES)
def test_merged_tiles_equal_float64_on_a_gpu(
    kernel: Kernel,
    dtype: torch.dtype,
    queries: range,
    keys: range,
    mask: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cp_engine.algebra.tiles.ROWS", 3)
    held, there = sets_of(queries, keys)
    tensors = tuple(x.to("cuda", dtype) for x in random_qkv(held.count, there.count, kv_heads=2))
    attention: TiledAttention = attention_of(held, there, mask, kernel)
    found = run_tiles(attention, tensors)
    assert_near(found, dense(*(x.cpu() for x in tensors), visible_pairs(held, there, mask)), dtype)


@needs_gpu
@gpu_kernels
@pytest.mark.parametrize("preset", ["ulysses", "allgather_kv"])
@pytest.mark.parametrize("mask", [{"kind": "causal"}, {"kind": "window", "left": 40, "right": 0}], ids=str)
def test_composition_on_a_gpu_equals_float64(
    kernel: Kernel, dtype: torch.dtype, preset: str, mask: dict[str, object]
) -> None:
    """All ranks in this process, their tensors on the GPU."""
    require(kernel, dtype, (8, 4, 64, 64))
    shape = small(batch=2, sequence=257, heads=8, kv_heads=4, head_dim=64, dtype=str(dtype)[6:])
    overrides = ("cp.degree=4", "layout@cp.layout=zigzag", f"cp.steps.attend.kernel={kernel.name}")
    plan = plan_of(preset, *overrides, shape=shape, mask=mask)
    program = Program(plan, Target(ranks=tuple(range(4)), device="cuda", communicator=None))
    q, k, v, dout = (x.to("cuda", dtype) for x in inputs(shape))
    index = [torch.tensor(list(held)) for held in plan.entry.sequence]
    local = [[x[:, :, i.cuda()].requires_grad_() for i in index] for x in (q, k, v)]
    outs = program(*local, 0.125)
    flat = torch.autograd.grad(outs, [x for xs in local for x in xs], [dout[:, :, i.cuda()] for i in index])
    back = torch.cat(index).argsort()
    parts = {"out": outs, "dq": flat[:4], "dk": flat[4:8], "dv": flat[8:]}
    found = {n: torch.cat([x.detach().cpu() for x in xs], 2)[:, :, back] for n, xs in parts.items()}
    wide = [x.double().cpu() for x in (q, k, v, dout)]
    wanted = reference.gradients(*wide, reference.visible(mask, 257), 0.125)
    nothing = torch.zeros(1)
    assert_near({**found, "lse": nothing}, {**wanted, "lse": nothing}, dtype)
