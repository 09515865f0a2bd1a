"""The same numbers, bytes and refusals on real gloo ranks: whole worlds of 2 and 4, and groups of 2 inside a world of 4."""

from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import cp_engine
from cp_engine import verify
from cp_engine.compose import compose, presets
from cp_engine.plan import Shape
from cp_engine.runtime import ContextParallel
from cp_engine.schema import plan_from_config
from tests.gloo import World, world

SHAPES = {
    "mha": (4, 4, 16, 16),
    "gqa 8/2": (8, 2, 16, 16),
    "gqa 6/3": (6, 3, 16, 16),
    "mla": (4, 4, 192, 128),
    "two heads": (2, 1, 16, 16),
}
SPREAD = [p for p in presets() if p != "none"]


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with world(4) as made:
        yield made


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with world(2) as made:
        yield made


@pytest.fixture(params=["two", "four"])
def ranks(request: pytest.FixtureRequest) -> World:
    return request.getfixturevalue(request.param)


# ------------------------------------------------------------------ run on the ranks
class Sent(TorchDispatchMode):
    """Counts collectives, and bytes that leave this rank, from the tensors and splits that c10d gets."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.collectives = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::alltoall_base_":
            _, send, group, _, splits = args[:5]
            own = splits[dist.ProcessGroup.unbox(group).rank()] if splits else send.numel() // group_size(group)
            self.bytes += (send.numel() - own) * send.element_size()
            self.collectives += 1
        elif name == "c10d::_allgather_base_":
            _, send, group = args[:3]
            self.bytes += send.numel() * send.element_size() * (group_size(group) - 1)
            self.collectives += 1
        elif name.startswith("c10d::") and "wait" not in name:
            raise AssertionError(f"an exchange that nobody planned: {name}")
        return func(*args, **(kwargs or {}))


def group_size(group: object) -> int:
    return dist.ProcessGroup.unbox(group).size()


def mesh_of(degree: int):
    """This rank's group of `degree` in the world."""
    world_size = dist.get_world_size()
    if degree == world_size:
        return init_device_mesh("cpu", (degree,), mesh_dim_names=("cp",))
    return init_device_mesh("cpu", (world_size // degree, degree), mesh_dim_names=("dp", "cp"))["cp"]


def check_preset(cp: Mapping[str, object], shape: Shape, mask: str, degree: int) -> list[tuple[str, float]]:
    """Rows out of bounds of one plan on this rank, with executed bytes against planned ones."""
    plan = plan_from_config(cp, shape=shape, mask=mask, world_degree=degree)
    engine = ContextParallel(plan, mesh_of(degree))
    counted: list[tuple[int, int]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
        local = [x.requires_grad_() for x in engine.shard(q, k, v, dim=2)]
        with Sent() as forward:
            out = engine.call(*local, is_causal=mask == "causal", enable_gqa=True)
        with Sent() as backward:
            dq, dk, dv = torch.autograd.grad(out, local, engine.shard(dout, dim=2))
        counted.extend([(forward.bytes, forward.collectives), (backward.bytes, backward.collectives)])
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    rows = verify.compare(attend, [plan.entry.sequence[engine.rank]], shape, {"kind": mask})
    bad = [(r.name, r.error) for r in rows if not r.is_good and r.name != "influence"]
    holds_last = shape.sequence - 1 in set(plan.entry.sequence[engine.rank])
    bad += [("influence", r.error) for r in rows if r.name == "influence" and holds_last and not r.is_good]
    planned = [
        (sum(c.bytes_sent[way][engine.rank] for c in plan.costs), sum(c.collectives[way] for c in plan.costs))
        for way in (0, 1)
    ]
    if counted[:2] != planned:
        bad.append((f"executed {counted[:2]}, planned {planned}", float("nan")))
    if engine.bytes_sent != 2 * sum(b for b, _ in planned):  # compare() attends twice
        bad.append((f"engine.bytes_sent {engine.bytes_sent}", float("nan")))
    engine.close()
    return bad


# ------------------------------------------------------------------ parity and bytes
CASES = [
    ("mha", 31, 1, "contiguous", "causal"),
    ("gqa 8/2", 32, 3, "zigzag", "causal"),
    ("gqa 6/3", 257, 1, "striped", "causal"),
    ("mla", 31, 3, "zigzag", "full"),
    ("gqa 6/3", 32, 1, "contiguous", "full"),
    ("two heads", 31, 3, "contiguous", "causal"),  # with four ranks, two have no head and only exchange
    ("mha", 3, 1, "contiguous", "causal"),  # with four ranks, one has no token
]


@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("heads,sequence,batch,order,mask", CASES)
def test_out_gradients_and_bytes_are_those_of_the_plan(ranks, preset, heads, sequence, batch, order, mask):
    check(ranks, preset, heads, sequence, batch, order, mask, degree=len(ranks.processes))


@pytest.mark.long
@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("heads", ["mha", "gqa 8/2", "gqa 6/3", "mla"])
@pytest.mark.parametrize("sequence", [31, 32, 257])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_out_gradients_and_bytes_of_the_whole_matrix(ranks, preset, heads, sequence, batch, order):
    check(ranks, preset, heads, sequence, batch, order, "causal", degree=len(ranks.processes))


@pytest.mark.long
@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("heads", ["mha", "gqa 8/2", "gqa 6/3", "mla"])
@pytest.mark.parametrize("sequence", [31, 32, 257])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_out_gradients_and_bytes_of_the_whole_matrix_in_a_group_of_two(four, preset, heads, sequence, batch, order):
    check(four, preset, heads, sequence, batch, order, "causal", degree=2)


@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("heads,sequence,batch,order,mask", CASES)
def test_out_and_gradients_in_a_group_of_two_inside_four_ranks(four, preset, heads, sequence, batch, order, mask):
    check(four, preset, heads, sequence, batch, order, mask, degree=2)


def test_one_rank_of_a_world_exchanges_nothing(four):
    check(four, "none", "mha", 31, 1, "contiguous", "causal", degree=1)


def check(on: World, preset: str, heads: str, sequence: int, batch: int, order: str, mask: str, degree: int) -> None:
    h, kv, d, dv = SHAPES[heads]
    cp = compose(preset, [f"layout@cp.layout={order}"])
    shape = Shape(batch=batch, sequence=sequence, heads=h, kv_heads=kv, head_dim=d, v_head_dim=dv, dtype="float64")
    for rank, bad in enumerate(on.run(check_preset, cp, shape, mask, degree)):
        assert bad == [], f"rank {rank}"


def check_half(cp: Mapping[str, object], shape: Shape, degree: int) -> tuple[list[object], list[object]]:
    plan = plan_from_config(cp, shape=shape, mask="causal", world_degree=degree)
    engine = ContextParallel(plan, mesh_of(degree))
    q, k, v, dout = (x.to(torch.bfloat16) for x in verify.inputs(shape))
    local = [x.requires_grad_() for x in engine.shard(q, k, v, dim=2)]
    with Sent() as forward:
        out = engine.call(*local, enable_gqa=True)
    with Sent() as backward:
        out.backward(engine.shard(dout, dim=2))
    engine.close()
    executed = [(forward.bytes, forward.collectives), (backward.bytes, backward.collectives)]
    planned = [
        (sum(c.bytes_sent[w][engine.rank] for c in plan.costs), sum(c.collectives[w] for c in plan.costs))
        for w in (0, 1)
    ]
    assert out.dtype == local[0].grad.dtype == local[1].grad.dtype == torch.bfloat16
    return executed, planned


@pytest.mark.parametrize("preset", SPREAD)
def test_gradients_of_half_types_that_are_summed_travel_in_float32_and_are_planned_so(ranks, preset):
    shape = Shape(batch=2, sequence=33, heads=4, kv_heads=1, head_dim=16, v_head_dim=16, dtype="bfloat16")
    for executed, planned in ranks.run(check_half, compose(preset), shape, len(ranks.processes)):
        assert executed == planned


def any_strides(cp: Mapping[str, object], shape: Shape) -> None:
    """Inputs as hosts bring them, and the gradient that a sum sends back (strides 0)."""
    engine = ContextParallel(plan_from_config(cp, shape=shape, mask="causal"), mesh_of(dist.get_world_size()))
    q, k, v, _ = verify.inputs(shape)
    whole = [x.requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True).sum(), whole)
    for kind in ("transposed", "expanded heads"):
        local = [x.detach() for x in engine.shard(q, k, v, dim=2)]
        if kind == "transposed":  # [B, S, H, D] in memory
            local = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local]
        else:  # one head for all
            local = [x[:, :1].expand(-1, x.shape[1], -1, -1) for x in local]
        local = [x.requires_grad_() for x in local]
        out = engine.call(*local, enable_gqa=True)
        grads = torch.autograd.grad(out.sum(), local)
        for found, w in zip(grads, wanted, strict=True):
            if kind == "transposed":
                torch.testing.assert_close(found, engine.shard(w, dim=2), rtol=0, atol=1e-12)
    engine.close()


@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("sequence", [16, 18])
def test_inputs_and_gradients_of_any_strides(ranks, preset, sequence):
    shape = Shape(batch=2, sequence=sequence, heads=4, kv_heads=4, head_dim=8, v_head_dim=8, dtype="float64")
    degree = len(ranks.processes)
    ranks.run(any_strides, {**compose(preset), "degree": degree}, shape)


def doubled_exchange(cp: Mapping[str, object], shape: Shape) -> list[tuple[str, float]]:
    from cp_engine.c10d import GroupChannel

    names = ("all_to_all", "all_to_all_even", "all_gather")
    once = {name: getattr(GroupChannel, name) for name in names}

    def doubled(name: str):
        def twice(self, *arguments):
            once[name](self, *arguments)
            return once[name](self, *arguments)

        return twice

    for name in names:
        setattr(GroupChannel, name, doubled(name))
    try:
        return check_preset(cp, shape, "causal", dist.get_world_size())
    finally:
        for name in names:
            setattr(GroupChannel, name, once[name])


def test_a_doubled_exchange_is_found_by_the_count_though_the_numbers_are_right(four):
    for preset, sequence in ((p, s) for p in SPREAD for s in (31, 32)):
        shape = Shape(batch=1, sequence=sequence, heads=4, kv_heads=4, head_dim=16, v_head_dim=16, dtype="float64")
        for bad in four.run(doubled_exchange, compose(preset), shape):
            assert bad and all("executed" in name or "bytes_sent" in name for name, _ in bad)


# ------------------------------------------------------------------ start-up, tokens, gradients
def other_plan(preset: str) -> None:
    cp_engine.compile(
        preset, mesh=mesh_of(dist.get_world_size()), sequence=32 + dist.get_rank() // 3, heads=4, head_dim=16
    )


def test_ranks_with_different_plans_all_get_the_same_error_naming_the_key(four):
    for text in four.run(other_plan, SPREAD[0], fails=True):
        assert "shape.sequence  differs between ranks" in text and "rank 3  33" in text


def whole_and_back(order: str) -> None:
    engine = cp_engine.compile(
        SPREAD[0],
        mesh=mesh_of(dist.get_world_size()),
        sequence=31,
        heads=4,
        head_dim=16,
        overrides=[f"layout@cp.layout={order}"],
    )
    x = torch.arange(31.0).expand(3, 31).clone().requires_grad_()
    labels = torch.arange(31).expand(3, 31)
    mine, mine_too = engine.shard(x, labels)
    assert torch.equal(mine.long(), mine_too)
    together = engine.unshard(mine)
    assert torch.equal(together, x)
    assert torch.equal(engine.unshard(mine_too.T, dim=0), labels.T)
    weight = torch.randn(3, 31, generator=torch.Generator().manual_seed(0))
    (together * weight).sum().backward()  # the same loss on every rank
    expected = torch.zeros_like(x)
    held = list(engine.plan.entry.sequence[engine.rank])
    expected[:, held] = weight[:, held] * dist.get_world_size()
    torch.testing.assert_close(x.grad, expected)
    engine.close()


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_unshard_puts_tokens_back_and_its_gradient_is_the_sum_over_ranks(ranks, order):
    ranks.run(whole_and_back, order)


def half_gradients_of_unshard() -> None:
    """256 + 1 + 1 + 1 is 256 when it is rounded to bfloat16 after each addition, and 260 when it is rounded once."""
    engine = cp_engine.compile(SPREAD[0], mesh=mesh_of(4), sequence=31, heads=4, head_dim=16)
    mine = engine.shard(torch.zeros(1, 31, dtype=torch.bfloat16)).requires_grad_()
    upstream = torch.full((1, 31), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    engine.unshard(mine).backward(upstream)
    assert mine.grad.dtype == torch.bfloat16 and torch.equal(mine.grad, torch.full_like(mine, 260.0))
    engine.close()


def test_gradients_of_half_types_are_summed_in_float32(four):
    four.run(half_gradients_of_unshard)


class Toy(torch.nn.Module):
    """Embedding, one attention with rotary-free positions, a head: enough for parameter gradients."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, heads * width)
        self.position = torch.nn.Embedding(64, heads * width)
        self.q, self.k, self.v = (torch.nn.Linear(heads * width, n * width) for n in (heads, kv_heads, kv_heads))
        self.attention = cp_engine.Attention()
        self.head = torch.nn.Linear(heads * width, 50)
        self.width = width

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(positions)
        q, k, v = (f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.head(self.attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2) + x)


def toy_gradients(preset: str, order: str) -> None:
    tokens = torch.randint(50, (3, 31), generator=torch.Generator().manual_seed(1))
    positions, labels = torch.arange(31).expand(3, 31), tokens.roll(-1, 1)
    model, plain = Toy().double(), Toy().double()
    torch.nn.functional.cross_entropy(plain(tokens, positions).flatten(0, 1), labels.flatten()).backward()
    engine = cp_engine.compile(
        preset,
        mesh=mesh_of(dist.get_world_size()),
        sequence=31,
        heads=4,
        kv_heads=2,
        head_dim=8,
        dtype=torch.float64,
        overrides=[f"layout@cp.layout={order}"],
    )
    with engine.context(model):
        mine, mine_labels, mine_positions = engine.shard(tokens, labels, positions)
        logits = model(mine, mine_positions)
        loss = (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine_labels.flatten(), reduction="sum")
            / labels.numel()
        )
        loss.backward()
    engine.sum_gradients(model)
    for (name, p), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-11, atol=1e-13, msg=name)
    with pytest.raises(cp_engine.CPError, match="summed"):
        engine.sum_gradients(model)
    model.zero_grad()
    engine.close()


@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_parameter_gradients_are_those_of_one_process_and_are_summed_once(ranks, preset, order):
    ranks.run(toy_gradients, preset, order)


def gradient_on_one_rank() -> None:
    """A parameter that only the first rank's tokens reach, as an expert's weight can be."""
    rank = dist.get_rank()
    engine = cp_engine.compile(
        SPREAD[0], mesh=mesh_of(dist.get_world_size()), sequence=31, heads=4, kv_heads=2, head_dim=8
    )
    model = Toy()
    model.extra = torch.nn.Parameter(torch.ones(3))
    tokens, positions = torch.zeros(1, 31, dtype=torch.long), torch.arange(31).expand(1, 31)
    with engine.context(model):
        loss = model(*engine.shard(tokens, positions)).sum()
        (loss + 2 * model.extra.sum() if rank == 0 else loss).backward()
    assert (model.extra.grad is None) == (rank != 0)
    engine.sum_gradients(model)
    assert torch.equal(model.extra.grad, torch.full((3,), 2.0))
    engine.close()


def test_a_gradient_that_one_rank_has_reaches_all(two):
    two.run(gradient_on_one_rank)


def already_reduced(wrapper: str) -> None:
    size = dist.get_world_size()
    mesh = mesh_of(size)
    engine = cp_engine.compile(SPREAD[0], mesh=mesh, sequence=31, heads=4, kv_heads=2, head_dim=8)
    model: torch.nn.Module = Toy()
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(cp_engine.CPError, match="already"):
        engine.sum_gradients(model)
    engine.close()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_sum_gradients_is_refused_where_a_wrapper_reduces_over_the_cp_ranks(four, wrapper):
    four.run(already_reduced, wrapper)


def two_models() -> None:
    """Model A over pairs, model B over all four, nested."""
    a = cp_engine.compile(SPREAD[0], mesh=mesh_of(2), sequence=30, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    b = cp_engine.compile(
        SPREAD[-1], mesh=mesh_of(4), sequence=31, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64
    )
    first, second = Toy().double(), Toy().double()
    tokens = torch.randint(50, (1, 31), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(31).expand(1, 31)
    wanted = Toy().double()(tokens, positions), Toy().double()(tokens[:, :30], positions[:, :30])
    with a.context(first), b.context(second):
        got_a = a.unshard(first(*a.shard(tokens[:, :30], positions[:, :30])))
        got_b = b.unshard(second(*b.shard(tokens, positions)))
    torch.testing.assert_close(got_a, wanted[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(got_b, wanted[0], rtol=0, atol=1e-12)
    a.close()
    b.close()


def test_two_models_with_two_presets_and_groups_live_side_by_side(four):
    four.run(two_models)


def recompute_after_exit(preset: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    tokens = torch.randint(50, (2, 31), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(31).expand(2, 31)
    engine = cp_engine.compile(
        preset, mesh=mesh_of(dist.get_world_size()), sequence=31, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64
    )
    gradients = []
    for inside in (True, False):
        model = Toy().double()
        x, p = engine.shard(tokens, positions)

        def block(e: Tensor, model: Toy = model) -> Tensor:
            q, k, v = (f(e).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (model.q, model.k, model.v))
            return model.head(model.attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

        with engine.context(model):
            loss = checkpoint(block, model.embed(x) + model.position(p), use_reentrant=reentrant).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    engine.close()


@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_after_the_exit_recomputes_with_the_plan_of_its_forward(four, preset, reentrant):
    four.run(recompute_after_exit, preset, reentrant)
