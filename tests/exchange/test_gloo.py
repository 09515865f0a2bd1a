"""The same numbers, bytes and refusals on real gloo ranks: whole worlds of 2 and 4, and groups of 2 inside a world of 4."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import cp_engine
from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import plan_from_config
from cp_engine.errors import CallError, CPError
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.plan.cost import totals
from cp_engine.plan.ir import Plan
from cp_engine.runtime.call import Call
from cp_engine.runtime.context import ContextParallel
from tests.gloo import World, world
from tests.helpers import CAUSAL, PRESETS, begins_with_latent, fitting, local, varied

SHAPES = {
    "mha": (4, 4, 16, 16),
    "gqa 8/2": (8, 2, 16, 16),
    "gqa 6/3": (6, 3, 16, 16),
    "mla": (4, 4, 192, 128),
    "mqa": (4, 1, 16, 16),
    "two heads": (2, 1, 16, 16),
}
SPREAD = [p for p in PRESETS if p != "none"]
QKV = [p for p in SPREAD if not begins_with_latent(p)]
GATHER, EXCHANGE = "allgather_kv", "ulysses"


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
        elif name == "c10d::send":  # a hop; what comes in is another rank's
            self.bytes += sum(send.numel() * send.element_size() for send in args[0])
            self.collectives += 1
        elif name.startswith("c10d::") and "wait" not in name and name != "c10d::recv_":
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


def planned_traffic(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """(bytes, collectives) of a rank, forward and backward."""
    total = totals(plan)
    return [(total.sent[way][rank], total.collectives[way]) for way in (0, 1)]


def attended(engine: ContextParallel, tensors: Mapping[str, Tensor], mask: object) -> Tensor:
    """One call with what this rank brings: through `call` where that is q, k and v, else as an attached module makes it."""
    plan = engine.plan
    if plan.inputs == ("q", "k", "v"):
        return engine.call(**tensors, mask=mask, enable_gqa=True)
    parameters = {n: tensors[n] for n in plan.parameters}
    return engine.attend(Call(tensors={n: tensors[n] for n in plan.inputs}, parameters=parameters, mask=mask))[0]


def check_preset(
    cp: Mapping[str, object], shape: Shape, mask: Mapping[str, object], degree: int
) -> list[tuple[str, float]]:
    """Rows out of bounds of one plan on this rank, with executed bytes against planned ones."""
    plan = plan_from_config(cp, shape=shape, mask=mask, world_degree=degree)
    mesh = mesh_of(degree)
    engine = ContextParallel(plan, mesh)
    counted: list[tuple[int, int]] = []

    def attend(tensors: Mapping[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
        mine = local(plan, tensors, engine.rank)
        with Sent() as forward:
            out = attended(engine, mine, mask)
        with Sent() as backward:
            grads = torch.autograd.grad(out, list(mine.values()), engine.shard(dout, dim=2))
        counted.extend([(forward.bytes, forward.collectives), (backward.bytes, backward.collectives)])
        found = dict(zip((f"d{n}" for n in mine), grads, strict=True))
        for name in plan.parameters:  # each rank's gradient is its share of the sum
            dist.all_reduce(found[f"d{name}"], group=mesh.get_group())
        return {"out": out.detach(), **found}

    rows = verify.compare(attend, [engine.rank], plan, mask)
    bad = [(r.name, r.error) for r in rows if not r.is_good and r.name != "influence"]
    holds_last = shape.sequence - 1 in set(plan.entry.sequence[engine.rank])
    bad += [("influence", r.error) for r in rows if r.name == "influence" and holds_last and not r.is_good]
    planned, attends = planned_traffic(plan, engine.rank), len(counted) // 2
    if [b for b, _ in counted[:2]] != [b for b, _ in planned]:
        bad.append((f"executed {counted[:2]}, planned {planned}", float("nan")))
    elif [n for _, n in counted[:2]] != [n for _, n in planned] and not has_empty_hops(plan):
        bad.append((f"executed {counted[:2]}, planned {planned}", float("nan")))
    traffic = tuple(attends * sum(x) for x in zip(*planned, strict=True))
    if (engine.bytes_sent, engine.collectives) != traffic:
        bad.append((f"engine.bytes_sent {engine.bytes_sent}, collectives {engine.collectives}", float("nan")))
    engine.close()
    return bad


def has_empty_hops(plan: Plan) -> bool:
    """Whether a rank has no key to pass on: the hop is planned, and nothing is sent."""
    attends = next(s for s in plan.steps if "out" in s.step.makes)
    keys = attends.layout_before("k")
    return bool(attends.transfers) and not all(
        s.count and h.count for s, h in zip(keys.sequence, keys.heads, strict=True)
    )


# ------------------------------------------------------------------ parity and bytes
DOCUMENTS = {"kind": "document", "starts": [0, 1, 9, 16, 30]}
BLOCKS = {"kind": "both", "of": [{"kind": "block", "size": 12}, {"kind": "window", "left": 5, "right": 0}]}
# heads, sequence, batch, order, mask, head groups, sinks
CASES = [
    ("mha", 31, 1, "contiguous", CAUSAL, 1, False),
    ("gqa 8/2", 32, 3, "zigzag", CAUSAL, 1, False),
    ("gqa 6/3", 257, 1, "striped", CAUSAL, 1, False),
    ("mla", 31, 3, "zigzag", {"kind": "full"}, 1, False),
    ("gqa 6/3", 32, 1, "contiguous", {"kind": "full"}, 1, False),
    ("two heads", 31, 3, "contiguous", CAUSAL, 1, False),  # with four ranks, two have no head and only exchange
    ("mha", 3, 1, "contiguous", CAUSAL, 1, False),  # with four ranks, one has no token
    ("gqa 8/2", 31, 1, "balanced", DOCUMENTS, 2, True),
    ("mla", 64, 1, "zigzag", {"kind": "window", "left": 9, "right": 4}, 2, False),
    ("mqa", 31, 3, "striped", {"kind": "prefix", "length": 7}, 1, True),
    ("gqa 6/3", 31, 1, "reorder to balanced", {**DOCUMENTS, "causal": False, "left": 5}, 3, True),
    (
        "mha",
        30,
        1,
        "reorder to zigzag",
        BLOCKS,
        2,
        False,
    ),
]
every_case = pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i][:4])))


@pytest.mark.parametrize("preset", SPREAD)
@every_case
def test_out_gradients_and_bytes_are_those_of_the_plan(ranks, preset, case):
    check(ranks, preset, *CASES[case], degree=len(ranks.processes), turn=case)


MATRIX = (
    pytest.mark.parametrize("heads", ["mha", "gqa 8/2", "gqa 6/3", "mqa", "mla"]),
    pytest.mark.parametrize("sequence", [31, 32, 257]),
    pytest.mark.parametrize("batch", [1, 3]),
    pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "balanced"]),
    pytest.mark.parametrize("preset", SPREAD),
    pytest.mark.long,
)


def whole_matrix(test):
    for mark in MATRIX:
        test = mark(test)
    return test


@whole_matrix
def test_out_gradients_and_bytes_of_the_whole_matrix(ranks, preset, heads, sequence, batch, order):
    check(
        ranks,
        preset,
        heads,
        sequence,
        batch,
        order,
        CAUSAL,
        1,
        False,
        degree=len(ranks.processes),
        turn=sequence + batch,
    )


@whole_matrix
def test_out_gradients_and_bytes_of_the_whole_matrix_in_a_group_of_two(four, preset, heads, sequence, batch, order):
    check(four, preset, heads, sequence, batch, order, CAUSAL, 1, False, degree=2, turn=sequence + batch)


@pytest.mark.parametrize("preset", SPREAD)
@every_case
def test_out_and_gradients_in_a_group_of_two_inside_four_ranks(four, preset, case):
    check(four, preset, *CASES[case], degree=2, turn=case)


def test_one_rank_of_a_world_exchanges_nothing(four):
    check(four, "none", "mha", 31, 1, "contiguous", CAUSAL, 1, True, degree=1, turn=0)


def check(
    on: World,
    preset: str,
    heads: str,
    sequence: int,
    batch: int,
    order: str,
    mask: Mapping[str, object],
    groups: int,
    sinks: bool,
    *,
    degree: int,
    turn: int,
) -> None:
    h, kv, d, dv = SHAPES[heads]
    shape = Shape(batch=batch, sequence=sequence, heads=h, kv_heads=kv, head_dim=d, v_head_dim=dv, dtype="float64")
    groups = 1 if begins_with_latent(preset) else groups
    cp = varied(preset, degree, turn=turn, order=order, pipeline=groups, sinks=sinks)
    for rank, bad in enumerate(on.run(check_preset, cp, fitting(preset, shape), mask, degree)):
        assert bad == [], f"rank {rank}"


def named_axes(cp: Mapping[str, object], shape: Shape, names: tuple[str, str]) -> None:
    plan = plan_from_config(cp, shape=shape, mask="causal")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    engine = ContextParallel(plan, mesh)
    assert engine.rank == mesh.get_local_rank(plan.mesh.axes[0]) * 2 + mesh.get_local_rank(plan.mesh.axes[1])
    tensors, dout = verify.inputs_of(plan)
    mine = local(plan, tensors, engine.rank)
    out = attended(engine, mine, "causal")
    seen, scale = reference.visible(CAUSAL, shape.sequence), shape.head_dim**-0.5
    wanted = reference.gradients_of(tensors, dout, seen, scale)
    grads = torch.autograd.grad(out, list(mine.values()), engine.shard(dout, dim=2))
    for found, name in zip((out.detach(), *grads), ("out", "dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(found, engine.shard(wanted[name], dim=2), rtol=0, atol=1e-12)
    engine.close()


@pytest.mark.parametrize("preset", ["usp", "double_ring", "allgather_in_ulysses"])
def test_preset_of_two_axes_takes_a_mesh_with_their_names(four, preset):
    shape = Shape(batch=1, sequence=31, heads=4, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float64")
    cp = varied(preset, 4)
    four.run(named_axes, cp, shape, tuple(cp["axes"]))


def from_each_call(cp: Mapping[str, object], shape: Shape) -> None:
    """Each call's numbers, and the bytes of the plan that is made for its documents alone."""
    degree = dist.get_world_size()
    plan = plan_from_config(cp, shape=shape, mask={"kind": "document"}, world_degree=degree)
    engine = ContextParallel(plan, mesh_of(degree))
    tensors, dout = verify.inputs_of(plan)
    for starts in ([0, 1, 16, 30], [0], [0, 7, 8], [0, 1, 16, 30]):
        mask = {"kind": "document", "starts": starts}
        mine, before = local(plan, tensors, engine.rank), engine.bytes_sent
        out = attended(engine, mine, mask)
        seen = reference.visible(mask, shape.sequence)
        wanted = reference.gradients_of(tensors, dout, seen, shape.head_dim**-0.5)
        grads = torch.autograd.grad(out, list(mine.values()), engine.shard(dout, dim=2))
        for found, name in zip((out.detach(), *grads), ("out", *(f"d{n}" for n in mine)), strict=True):
            if name[1:] not in plan.parameters:
                torch.testing.assert_close(found, engine.shard(wanted[name], dim=2), rtol=0, atol=1e-12)
        alone = planned_traffic(plan_from_config(cp, shape=shape, mask=mask, world_degree=degree), engine.rank)
        assert engine.bytes_sent - before == sum(sent for sent, _ in alone)
    with pytest.raises(CallError, match=r"call\.mask\.starts"):
        attended(engine, mine, {"kind": "document", "starts": [3, 1]})
    engine.close()


@pytest.mark.parametrize("order", ["", "reorder to balanced"])
@pytest.mark.parametrize("preset", SPREAD)
def test_documents_of_each_call_are_those_that_are_computed(four, preset, order):
    shape = Shape(batch=2, sequence=31, heads=4, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float64")
    four.run(from_each_call, varied(preset, 4, order=order), fitting(preset, shape))


def check_half(cp: Mapping[str, object], shape: Shape, degree: int) -> tuple[list[object], list[object]]:
    plan = plan_from_config(cp, shape=shape, mask="causal", world_degree=degree)
    engine = ContextParallel(plan, mesh_of(degree))
    tensors, dout = verify.inputs_of(plan)
    mine = local(plan, {n: x.to(torch.bfloat16) for n, x in tensors.items()}, engine.rank)
    with Sent() as forward:
        out = attended(engine, mine, "causal")
    with Sent() as backward:
        out.backward(engine.shard(dout.to(torch.bfloat16), dim=2))
    engine.close()
    executed = [(forward.bytes, forward.collectives), (backward.bytes, backward.collectives)]
    assert {out.dtype, *(x.grad.dtype for x in mine.values())} == {torch.bfloat16}
    return executed, planned_traffic(plan, engine.rank)


@pytest.mark.parametrize("preset", SPREAD)
def test_gradients_of_half_types_that_are_summed_travel_in_float32_and_are_planned_so(ranks, preset):
    shape = Shape(batch=2, sequence=33, heads=4, kv_heads=1, head_dim=16, v_head_dim=16, dtype="bfloat16")
    degree = len(ranks.processes)
    for executed, planned in ranks.run(check_half, varied(preset, degree), fitting(preset, shape), degree):
        assert executed == planned


def any_strides(cp: Mapping[str, object], shape: Shape) -> None:
    """Inputs as hosts bring them, and the gradient that a sum sends back (strides 0)."""
    plan = plan_from_config(cp, shape=shape, mask="causal")
    engine = ContextParallel(plan, mesh_of(dist.get_world_size()))
    tensors, dout = verify.inputs_of(plan)
    seen, scale = reference.visible(CAUSAL, shape.sequence), shape.head_dim**-0.5
    wanted = reference.gradients_of(tensors, torch.ones_like(dout), seen, scale)
    for kind in ("transposed", "expanded heads"):
        mine = {n: x.detach() for n, x in local(plan, tensors, engine.rank).items()}
        if kind == "transposed":  # [B, S, H, D] in memory
            mine.update({n: mine[n].transpose(1, 2).contiguous().transpose(1, 2) for n in plan.inputs})
        else:  # one head for all
            mine.update({n: mine[n][:, :1].expand(-1, mine[n].shape[1], -1, -1) for n in plan.inputs})
        mine = {n: x.requires_grad_() for n, x in mine.items()}
        grads = torch.autograd.grad(attended(engine, mine, "causal").sum(), list(mine.values()))
        for found, name in zip(grads, mine, strict=True):
            if kind == "transposed" and name in plan.inputs:
                torch.testing.assert_close(found, engine.shard(wanted[f"d{name}"], dim=2), rtol=0, atol=1e-12)
    engine.close()


@pytest.mark.parametrize("preset", SPREAD)
@pytest.mark.parametrize("sequence", [16, 18])
def test_inputs_and_gradients_of_any_strides(ranks, preset, sequence):
    shape = Shape(batch=2, sequence=sequence, heads=4, kv_heads=4, head_dim=8, v_head_dim=8, dtype="float64")
    ranks.run(any_strides, varied(preset, len(ranks.processes)), fitting(preset, shape))


def doubled_exchange(cp: Mapping[str, object], shape: Shape) -> list[tuple[str, float]]:
    from cp_engine.runtime.connect import GroupChannel

    names = ("all_to_all", "all_to_all_even", "all_gather", "shift")
    once = {name: getattr(GroupChannel, name) for name in names}

    def doubled(name: str):
        def twice(self, *arguments):
            once[name](self, *arguments).wait()
            return once[name](self, *arguments)

        return twice

    for name in names:
        setattr(GroupChannel, name, doubled(name))
    try:
        return check_preset(cp, shape, CAUSAL, dist.get_world_size())
    finally:
        for name in names:
            setattr(GroupChannel, name, once[name])


def test_a_doubled_exchange_is_found_by_the_count_though_the_numbers_are_right(four):
    for preset, sequence in ((p, s) for p in SPREAD for s in (31, 32)):
        shape = Shape(batch=1, sequence=sequence, heads=4, kv_heads=4, head_dim=16, v_head_dim=16, dtype="float64")
        for bad in four.run(doubled_exchange, varied(preset, 4), fitting(preset, shape)):
            assert bad and all("executed" in name or "bytes_sent" in name for name, _ in bad)


# ------------------------------------------------------------------ start-up, tokens, gradients
def other_plan(preset: str) -> str:
    with pytest.raises(CPError) as caught:
        cp_engine.compile(
            preset, mesh=mesh_of(dist.get_world_size()), sequence=32 + dist.get_rank() // 3, heads=4, head_dim=16
        )
    assert_in_step()
    return str(caught.value)


def assert_in_step() -> None:
    """No rank has left a collective that the others did not take part in."""
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(ranks, torch.tensor([dist.get_rank()]))
    assert ranks.tolist() == list(range(dist.get_world_size()))


def test_ranks_with_different_plans_all_get_the_same_error_naming_the_key(four):
    (text,) = set(four.run(other_plan, GATHER))
    assert "shape.sequence  differs between ranks" in text and "rank 3  33" in text


def whole_and_back(order: str) -> None:
    engine = cp_engine.compile(
        GATHER,
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
    engine = cp_engine.compile(GATHER, mesh=mesh_of(4), sequence=31, heads=4, head_dim=16)
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


def toy_gradients(cp: Mapping[str, object]) -> None:
    tokens = torch.randint(50, (3, 31), generator=torch.Generator().manual_seed(1))
    positions, labels = torch.arange(31).expand(3, 31), tokens.roll(-1, 1)
    model, plain = Toy().double(), Toy().double()
    torch.nn.functional.cross_entropy(plain(tokens, positions).flatten(0, 1), labels.flatten()).backward()
    engine = cp_engine.compile(
        cp, mesh=mesh_of(dist.get_world_size()), sequence=31, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64
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


@pytest.mark.parametrize("preset", QKV)
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "balanced"])
def test_parameter_gradients_are_those_of_one_process_and_are_summed_once(ranks, preset, order):
    ranks.run(toy_gradients, varied(preset, len(ranks.processes), order=order))


def gradient_on_one_rank() -> None:
    """A parameter that only the first rank's tokens reach, as an expert's weight can be."""
    rank = dist.get_rank()
    engine = cp_engine.compile(
        GATHER, mesh=mesh_of(dist.get_world_size()), sequence=31, heads=4, kv_heads=2, head_dim=8
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
    engine = cp_engine.compile(GATHER, mesh=mesh, sequence=31, heads=4, kv_heads=2, head_dim=8)
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
    a = cp_engine.compile(GATHER, mesh=mesh_of(2), sequence=30, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    b = cp_engine.compile(EXCHANGE, mesh=mesh_of(4), sequence=31, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
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


def recompute_after_exit(cp: Mapping[str, object], reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    tokens = torch.randint(50, (2, 31), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(31).expand(2, 31)
    sizes = {"batch": 2, "sequence": 31, "heads": 4, "kv_heads": 2, "head_dim": 8}
    engine = cp_engine.compile(cp, mesh=mesh_of(dist.get_world_size()), **sizes, dtype=torch.float64)
    gradients, traffic = [], [(0, 0)]
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
        traffic.append((engine.bytes_sent, engine.collectives))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    (forward, hops), (backward, hops_back) = planned_traffic(engine.plan, engine.rank)
    engine.close()
    whole = 2 if engine.plan.recompute == "all" else 1  # forward passes of the composition in a step
    steps = [(b - a, m - n) for (a, n), (b, m) in pairwise(traffic)]
    assert steps == [(whole * forward + backward, whole * hops + hops_back)] * 2


@pytest.mark.parametrize("preset", QKV)
@pytest.mark.parametrize(("reentrant", "recompute"), [(True, "all"), (False, "all"), (False, "skip_attention")])
def test_backward_after_the_exit_recomputes_with_the_plan_of_its_forward(four, preset, reentrant, recompute):
    four.run(recompute_after_exit, varied(preset, 4, recompute=recompute), reentrant)
