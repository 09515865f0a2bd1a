"""`cp.recompute=skip_attention`: activation checkpointing repeats neither attention nor its exchanges, and the numbers stay."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cp_engine
from cp_engine.runtime.recompute import digests_of

SEQUENCE, HEADS, HEAD_DIM = 31, 4, 8
WIDTH = HEADS * HEAD_DIM
PRESETS = ("ulysses", "allgather_kv", "ring_zigzag", "needed_kv")
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
"""In float64, of sums of some hundred terms; what another pass left is other numbers by far."""


class Layers(nn.Module):
    """Two layers, each checkpointed as a whole."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64) for _ in range(2))
        self.attention = nn.ModuleList(cp_engine.Attention() for _ in range(2))
        self.mode = mode

    def layer(self, x: Tensor, i: int) -> Tensor:
        q, k, v = self.qkv[i](x).unflatten(2, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return x + self.attention[i](q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            if self.mode == "none":
                x = self.layer(x, i)
            else:
                x = checkpoint(self.layer, x, i, use_reentrant=self.mode == "reentrant")
        return x


def engine_of(
    preset: str, recompute: str, mask: object = "causal", overrides: tuple[str, ...] = ()
) -> cp_engine.ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return cp_engine.compile(
        preset,
        mesh=mesh,
        sequence=SEQUENCE,
        heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float64,
        mask=mask,
        overrides=[f"cp.recompute={recompute}", *overrides],
    )


def gradients(preset: str, recompute: str, mode: str, same: bool = False) -> tuple[list[Tensor], int, int]:
    """Two forwards of one model, then their backwards in the other order: gradients, and exchanges of each way."""
    engine, model = engine_of(preset, recompute), Layers(mode)
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    local = [engine.shard(x).requires_grad_() for x in (whole[:1] * 2 if same else whole)]
    with engine.context(model):
        outs = [model(x) for x in local]
        forward = engine.collectives
    for i, out in enumerate(outs):  # after the block is left, the first forward's backward first
        (out.square().sum() * (i + 1)).backward()
    found = [p.grad for p in model.parameters()] + [x.grad for x in local]
    backward = engine.collectives - forward
    engine.close()
    return found, forward, backward


def check_exchanges(preset: str) -> None:
    wanted, forward, backward = gradients(preset, "all", "none")
    for recompute, mode, repeated in (
        ("all", "non-reentrant", forward),
        ("skip_attention", "non-reentrant", 0),
        ("skip_attention", "none", 0),
        ("skip_attention", "reentrant", forward),  # its forward leaves no graph that anything could be kept with
    ):
        found, there, back = gradients(preset, recompute, mode)
        assert (there, back) == (forward, backward + repeated), (recompute, mode)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, **CLOSE, msg=f"{recompute}, {mode}")


@pytest.mark.parametrize("preset", PRESETS)
def test_recompute_repeats_no_exchange_and_gives_the_same_numbers(two, preset):
    two.run(check_exchanges, preset)


def check_equal_inputs() -> None:
    wanted, _, backward = gradients("ulysses", "all", "none", same=True)
    found, _, back = gradients("ulysses", "skip_attention", "non-reentrant", same=True)
    assert back == backward
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_two_passes_of_equal_inputs_keep_one_record_each(two):
    two.run(check_equal_inputs)


def check_other_numbers() -> None:
    """A recompute that is no repetition must not get what another pass left."""
    engine, attention = engine_of("ulysses", "skip_attention"), cp_engine.Attention()
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, HEADS, SEQUENCE, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    local = [engine.shard(x, dim=2).requires_grad_() for x in (q, k, v)]
    seen: list[int] = []

    def restless(*tensors: Tensor) -> Tensor:
        seen.append(len(seen))
        return attention(tensors[0] * (1.0 + len(seen)), *tensors[1:])

    with engine.context(attention):
        out = checkpoint(restless, *local, use_reentrant=False)
        forward = engine.collectives
        found = torch.autograd.grad(out.sum(), local)
    assert engine.collectives == 3 * forward  # the exchanges of the recompute and those of backward
    with engine.context(attention):
        again = attention(local[0] * 3.0, *local[1:])
        first = attention(local[0] * 2.0, *local[1:]).detach()
    torch.testing.assert_close(out.detach(), first, **CLOSE)
    wanted = torch.autograd.grad(again.sum(), local)
    torch.testing.assert_close(found[2], wanted[2], **CLOSE)
    engine.close()


def test_recompute_of_other_numbers_is_computed(two):
    two.run(check_other_numbers)


def check_exchanged_rows() -> None:
    """The same sequences in another order are other numbers, though a digest without places would be the same."""
    engine, attention = engine_of("ulysses", "skip_attention"), cp_engine.Attention()
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, HEADS, SEQUENCE, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(3)]
    local = [engine.shard(x, dim=2) for x in whole]
    calls = [[x.clone().requires_grad_() for x in local], [x.flip(0).clone().requires_grad_() for x in local]]
    upstream = torch.randn(local[2].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with engine.context(attention):
        wanted = [torch.autograd.grad(attention(*qkv), qkv, upstream) for qkv in calls]
        outs = [checkpoint(attention, *qkv, use_reentrant=False) for qkv in calls]
        found = [torch.autograd.grad(out, qkv, upstream) for out, qkv in zip(outs, calls, strict=True)]
    torch.testing.assert_close(found, wanted, **CLOSE)
    engine.close()


def test_sequences_in_another_order_are_other_numbers(two):
    two.run(check_exchanged_rows)


class Twice(nn.Module):
    """One attention, called twice with one q, k and v, and something else that differs."""

    def __init__(self, first: dict[str, object], second: dict[str, object]) -> None:
        super().__init__()
        self.attention, self.calls = cp_engine.Attention(), (first, second)
        self.weight = nn.Parameter(torch.ones(HEAD_DIM, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = (self.attention(q, k, v, **named) * self.weight for named in self.calls)
        return first.square() + second.tanh()


SINKS = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("first", "second", "mask", "overrides"),
    [
        ({"scale": 1.0}, {"scale": 0.1}, "causal", ()),
        ({"sinks": SINKS}, {"sinks": 2 * SINKS}, "causal", ("cp.steps.attend.sinks=true",)),
        (
            {"mask": {"kind": "document", "starts": [0, 9]}},
            {"mask": {"kind": "document", "starts": [0, 20]}},
            {"kind": "document"},
            (),
        ),
    ],
    ids=["scale", "sinks", "documents"],
)
def test_calls_that_differ_in_more_than_tensors_keep_a_record_each(two, first, second, mask, overrides):
    two.run(check_twice, first, second, mask, overrides)


def check_twice(first: dict[str, object], second: dict[str, object], mask: object, overrides: tuple[str, ...]) -> None:
    engine, model = engine_of("ulysses", "skip_attention", mask, overrides), Twice(first, second)
    whole = torch.randn(
        3, 2, HEADS, SEQUENCE, HEAD_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    found = []
    for is_checkpointed in (False, True):
        local = [x.clone().requires_grad_() for x in engine.shard(*whole, dim=2)]
        with engine.context(model):
            out = checkpoint(model, *local, use_reentrant=False) if is_checkpointed else model(*local)
            found.append(torch.autograd.grad(out.sum(), [*local, model.weight]))
    torch.testing.assert_close(*found, **CLOSE)
    engine.close()


def check_same_on_one_rank(is_swapped: bool) -> None:
    """Two passes that have the same tokens on rank 0, or the same numbers of v in other places, and others elsewhere."""
    engine, attention = engine_of("ulysses", "skip_attention"), cp_engine.Attention()
    whole = torch.randn(
        3, 1, HEADS, SEQUENCE, HEAD_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    other = whole.clone()
    if is_swapped:  # what a digest of rows and one of columns do not see
        whole[2, 0, 0, :2, :2] = torch.tensor([[1.0, 5.0], [5.0, 1.0]])
        other[2, 0, 0, :2, :2] = torch.tensor([[5.0, 1.0], [1.0, 5.0]])
    else:
        other[..., SEQUENCE // 2 + 1 :, :] *= 2
    calls = [[x.clone().requires_grad_() for x in engine.shard(*qkv, dim=2)] for qkv in (whole, other)]
    with engine.context(attention):
        wanted = [torch.autograd.grad(attention(*qkv).square().sum(), qkv) for qkv in calls]
        outs = [checkpoint(attention, *qkv, use_reentrant=False) for qkv in calls]
        found = [torch.autograd.grad(outs[i].square().sum(), calls[i]) for i in (1, 0)]
    torch.testing.assert_close(found[::-1], wanted, **CLOSE)
    engine.close()


@pytest.mark.parametrize("is_swapped", [False, True])
def test_passes_that_are_alike_on_one_rank_keep_a_record_each(two, is_swapped):
    two.run(check_same_on_one_rank, is_swapped)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_digest_tells_numbers_in_other_places_apart(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (8, 7):  # whole words of eight bytes, and not
        for _ in range(200):
            x = torch.ones(1, 1, 9, width, dtype=dtype)
            (a, b), (c, d) = (torch.randperm(n, generator=generator)[:2] for n in (9, width))
            y = x.clone()
            x[0, 0, a, c] = x[0, 0, b, d] = y[0, 0, a, d] = y[0, 0, b, c] = 5  # the same rows and columns, sorted
            assert digests_of([x]) != digests_of([y])
    z = torch.randn(2, 3, 9, 8, dtype=dtype)
    assert digests_of([z]) == digests_of([z.transpose(1, 2).contiguous().transpose(1, 2)])
    assert digests_of([z[1:]]) == digests_of([z[1:].clone()]) and digests_of([z[:0]]) == 0


def check_dropped_passes() -> None:
    """Ranks need not keep the same passes: one holds a loss that no backward follows, the other dropped it."""
    engine, attention = engine_of("ulysses", "skip_attention"), cp_engine.Attention()
    whole = torch.randn(
        3, 2, HEADS, SEQUENCE, HEAD_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    local = [x.clone().requires_grad_() for x in engine.shard(*whole, dim=2)]
    with engine.context(attention):
        wanted = torch.autograd.grad(attention(*local).square().sum(), local)
        left = [checkpoint(attention, *local, use_reentrant=False) for _ in range(2)]
        del left[dist.get_rank() :]
        before = engine.collectives
        out = checkpoint(attention, *local, use_reentrant=False)
        once = engine.collectives - before
        found = torch.autograd.grad(out.square().sum(), local)
    assert engine.collectives - before == 2 * once
    torch.testing.assert_close(found, wanted, **CLOSE)
    engine.close()


def test_ranks_may_keep_other_passes(two):
    two.run(check_dropped_passes)


def check_changed_in_place() -> None:
    """A record whose result the model changed after the call is no longer what the pass made."""
    engine, attention = engine_of("ulysses", "skip_attention"), cp_engine.Attention()
    weight = torch.linspace(1, 2, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(
        3, 2, HEADS, SEQUENCE, HEAD_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    local = [x.clone().requires_grad_() for x in engine.shard(*whole, dim=2)]

    def changing(*qkv: Tensor, is_in_place: bool = True) -> Tensor:
        out = attention(*(x * 1 for x in qkv))
        return ((out.mul_(weight) if is_in_place else out * weight) * weight).square()

    with engine.context(attention):
        wanted = torch.autograd.grad(changing(*local, is_in_place=False).sum(), [*local, weight])
        out = checkpoint(changing, *local, use_reentrant=False)
        found = torch.autograd.grad(out.sum(), [*local, weight])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    engine.close()


def test_what_a_model_changes_in_place_is_computed_again(two):
    two.run(check_changed_in_place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_strides_are_digested(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 9, 8, dtype=dtype)
    wide = torch.stack((x, x), -1).flatten(3)[..., ::2]
    assert digests_of([wide]) == digests_of([x])
    for other in (x[:, :1].expand(-1, 3, -1, -1), x[0, 0, :, 0], x.transpose(1, 2), x[..., 1:]):
        assert digests_of([other]) == digests_of([other.clone(memory_format=torch.contiguous_format)])


def check_released() -> None:
    engine, model = engine_of("allgather_kv", "skip_attention"), Layers("non-reentrant")
    x = engine.shard(torch.randn(1, SEQUENCE, WIDTH, dtype=torch.float64))
    with engine.context(model):
        out = model(x)
        tokens = [t() for m in model.attention for _, t in m.forward._with_graph]
        assert all(t is not None and t.memo.record is not None for t in tokens) and len(tokens) == 2
        out.sum().backward()
        assert all(t.memo.record is None for t in tokens)
        del out, tokens
        assert all(t() is None for m in model.attention for _, t in m.forward._with_graph)
    engine.close()


def test_what_is_kept_is_released_by_its_backward(two):
    two.run(check_released)
