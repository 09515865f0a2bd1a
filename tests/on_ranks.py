"""What gloo ranks run: a preset against dense attention with its bytes counted, a toy model, and whether ranks are in step."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import cp_engine
from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import plan_from_config
from cp_engine.job.verify import attention as verify
from cp_engine.plan.cost import totals
from cp_engine.plan.ir import Plan
from cp_engine.runtime.call import Call
from cp_engine.runtime.context import ContextParallel
from tests.gloo import World
from tests.helpers import PRESETS, begins_with_latent, fitting, local, varied

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
    cp = varied(preset, degree, turn=turn, order=order, head_groups=groups, sinks=sinks)
    for rank, bad in enumerate(on.run(check_preset, cp, fitting(preset, shape), mask, degree)):
        assert bad == [], f"rank {rank}"


def assert_in_step() -> None:
    """No rank has left a collective that the others did not take part in."""
    ranks = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(ranks, torch.tensor([dist.get_rank()]))
    assert ranks.tolist() == list(range(dist.get_world_size()))


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
