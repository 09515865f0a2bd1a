"""DeepSeek sparse attention as a module: one process computes it as it is, an engine cuts it over ranks."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_engine.algebra.layout import Mesh
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.algebra.shape import Shape
from cp_engine.errors import CallError, ConfigError, Problem
from cp_engine.exchange.target import Target
from cp_engine.plan.ir import Composition, Plan
from cp_engine.plan.prove import prove
from cp_engine.primitives.sparse import IndexerLoss, LightningIndexer, Sparse
from cp_engine.primitives.table import Contiguous
from cp_engine.runtime import connect
from cp_engine.runtime.call import Call, short
from cp_engine.runtime.program import Program

TENSORS = ("q", "kv_latent", "k_rope", "q_index", "k_index", "w_index")


class SparseAttention(nn.Module):
    """Causal attention of each query to the keys that an indexer selects for it, in absorbed form.

    Args:
        topk: keys of a query, at least 1.
        is_dense: every visible key is selected, whatever `topk` says: the indexer learns from dense attention.

    Where heads are cut over ranks, as by tensor parallelism, each rank calls it with heads of its own and with all of the other
    tensors, and `heads` is the mesh of these ranks: the loss is that of all heads, the same on each, as is the gradient of the
    indexer's tensors; the gradients of kv_latent and k_rope are each rank's share of a sum.

    Raises:
        ConfigError: one of another type or size.
    """

    heads: DeviceMesh | None = None

    def __init__(self, topk: int, is_dense: bool = False) -> None:
        super().__init__()
        if not isinstance(topk, int) or topk < 1:
            raise ConfigError([Problem(key="topk", what=f"is {topk!r}, and a number of at least 1 is needed")])
        if not isinstance(is_dense, bool):
            raise ConfigError([Problem(key="is_dense", what=f"is {is_dense!r}, and True or False is needed")])
        self.topk, self.is_dense = topk, is_dense

    def forward(
        self,
        q: Tensor,
        kv_latent: Tensor,
        k_rope: Tensor,
        q_index: Tensor,
        k_index: Tensor,
        w_index: Tensor,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Selects and attends; the gradients of the indexer's tensors come from its loss alone.

        Args:
            q: [B, H, S, L + R].
            kv_latent: [B, 1, S, L], key and value of all heads.
            k_rope: [B, 1, S, R].
            q_index: [B, Hi, S, Di].
            k_index: [B, 1, S, Di].
            w_index: [B, Hi, S, 1], the scale of the index scores included.
            scale: factor on the scores of attention.

        Returns:
            out [B, H, S, L], and the indexer's loss, a scalar in float32 or wider: the sum over the call's queries of
            KL(attention of all heads || softmax of the index scores), both over the selected keys.
        """
        tensors = (q, kv_latent, k_rope, q_index, k_index, w_index)
        call = read_sparse(self, tensors, {"scale": scale})
        shape = shape_of(call)
        program = alone(shape, q.device.type, None if self.heads is None else self.heads.get_group())
        results = program.results({n: [x] for n, x in call.tensors.items()}, scale)
        return results["out"][0], results["indexer_loss"][0]


def read_sparse(module: nn.Module, args: Sequence[object], named: Mapping[str, object]) -> Call:
    """The call of `SparseAttention.forward`, the heads of the indexer side by side.

    Args:
        module: whose forward was called.
        args: positional arguments.
        named: arguments by name.

    Returns:
        The call; its result is out and the indexer's loss.

    Raises:
        CallError: an argument that is missing or unknown.
    """
    assert isinstance(module, SparseAttention)
    given = {**dict(zip(TENSORS, args, strict=False)), **named}
    found = {n: x for n, x in given.items() if n in TENSORS and isinstance(x, Tensor)}
    scale = given.get("scale")
    problems = [Problem(key=f"call.{n}", what="is missing") for n in TENSORS if n not in found]
    problems += [
        Problem(key=f"call.{n}", what=f"the attention call carries {n}={short(x)}, which no plan accounts for")
        for n, x in given.items()
        if n not in (*TENSORS, "scale")
    ]
    if not isinstance(scale, float | int) or isinstance(scale, bool) or not isfinite(scale):
        problems.append(Problem(key="call.scale", what=f"must be a finite number, not {short(scale)}"))
    if len(args) > len(TENSORS):
        what = f"the attention call carries {len(args)} positional arguments, and its tensors are {len(TENSORS)}"
        problems.append(Problem(key="call", what=what))
    problems = problems or size_problems(found)
    if problems:
        raise CallError(problems)
    assert isinstance(scale, float | int)
    return Call(
        tensors=side_by_side(found),
        scale=float(scale),
        topk=torch.iinfo(torch.int32).max if module.is_dense else module.topk,
        head_ranks=1 if module.heads is None else module.heads.size(),
        finish=lambda out, losses, sequence: (out, losses["indexer_loss"]),
    )


def side_by_side(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `SparseAttention.forward` as a plan takes them: q_index [B, 1, S, Hi * Di] and w_index [B, 1, S, Hi]."""
    batch, _, length, _ = tensors["q"].shape
    found = {n: tensors[n].transpose(1, 2).reshape(batch, 1, length, -1) for n in ("q_index", "w_index")}
    return {**tensors, **found}


def size_problems(tensors: Mapping[str, Tensor]) -> list[Problem]:
    """Where the tensors of a call do not fit each other."""
    q, heads, index_heads = tensors["q"], tensors["q"].shape[1], tensors["q_index"].shape[1]
    latent, rope, width = tensors["kv_latent"].shape[-1], tensors["k_rope"].shape[-1], tensors["q_index"].shape[-1]
    sizes = {
        "q": (heads, latent + rope),
        "kv_latent": (1, latent),
        "k_rope": (1, rope),
        "q_index": (index_heads, width),
        "k_index": (1, width),
        "w_index": (index_heads, 1),
    }
    wanted = {n: (q.shape[0], h, q.shape[2], w) for n, (h, w) in sizes.items()}
    problems = [
        Problem(key=f"call.{n}", what=f"is {list(x.shape)}, and beside the others it has to be {list(wanted[n])}")
        for n, x in tensors.items()
        if tuple(x.shape) != wanted[n]
    ]
    if not q.numel():
        problems.append(Problem(key="call.q", what=f"is {list(q.shape)}, and has nothing in it"))
    return problems + [
        Problem(key=f"call.{n}", what=f"is {x.dtype}, and q is {q.dtype}")
        for n, x in tensors.items()
        if x.dtype != q.dtype or not x.dtype.is_floating_point
    ]


def shape_of(call: Call) -> Shape:
    """The shape of a call whose tensors are whole."""
    t = call.tensors
    batch, heads, sequence, head_dim = t["q"].shape
    index_heads = t["w_index"].shape[3]
    return Shape(
        batch=batch,
        sequence=sequence,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        v_head_dim=t["kv_latent"].shape[3],
        dtype=str(t["q"].dtype)[6:],
        latent_dim=t["kv_latent"].shape[3],
        rope_dim=t["k_rope"].shape[3],
        index_heads=index_heads,
        index_dim=t["q_index"].shape[3] // index_heads,
        topk=min(call.topk or 0, sequence),
        head_ranks=call.head_ranks or 1,
    )


def plan_alone(shape: Shape) -> Plan:
    """The same steps on one rank, by the kernels that `auto` takes."""
    steps = (LightningIndexer(name="select"), Sparse(name="attend"), IndexerLoss(name="learn"))
    mesh = Mesh(axes=(), sizes=())
    composition = Composition(name="alone", mesh=mesh, layout=Contiguous(), steps=steps, recompute="all")
    return prove(composition, shape, mask_of("causal", shape.sequence))


@lru_cache(maxsize=32)
def alone(shape: Shape, device: str, heads: dist.ProcessGroup | None = None) -> Program:
    """That plan, to be run in this process, beside those of a group that hold other heads of the same queries."""
    plan = plan_alone(shape)
    others = None if heads is None else connect.beside(plan, 0, heads)
    return Program(plan, Target(ranks=(0,), device=device, communicator=None, heads=others))
