"""The communicator of real process groups: calls c10d directly, and counts what leaves this rank where it leaves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_engine.errors import CallError, Problem
from cp_engine.exchange.process_group import GroupCommunicator
from cp_engine.exchange.watch import Watch, enter, said
from cp_engine.plan.ir import Plan

T = TypeVar("T")


def global_ranks(mesh: DeviceMesh, plan: Plan) -> tuple[int, ...]:
    """The world rank of every rank of a plan.

    Args:
        mesh: 1-D over all ranks of the plan, or N-D with the names of the plan's axes in any order.
        plan: whose ranks are meant.

    Raises:
        CallError: sizes or names do not fit.
    """
    names, table = mesh.mesh_dim_names or (), mesh.mesh
    if table.ndim > 1:
        if sorted(names) != sorted(plan.mesh.axes):
            what = f"has the axes [{', '.join(names)}], and the plan's are [{', '.join(plan.mesh.axes)}]"
            raise CallError(
                [Problem(key="mesh", what=what, details=(("rule", "a mesh of one axis, or with the plan's names"),))],
                plan.name,
            )
        table = table.permute([names.index(a) for a in plan.mesh.axes])
        if tuple(table.shape) != plan.mesh.sizes:
            sizes = dict(zip(plan.mesh.axes, table.shape, strict=True))
            planned = dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True))
            raise CallError([Problem(key="mesh", what=f"has sizes {sizes}, and the plan's are {planned}")], plan.name)
    if table.numel() != plan.degree:
        what = f"has {table.numel()} ranks, and the plan is for {plan.degree}"
        raise CallError([Problem(key="mesh", what=what, tries=(f"cp.degree={table.numel()}",))], plan.name)
    return tuple(int(r) for r in table.flatten())


def connect(plan: Plan, mesh: DeviceMesh) -> tuple[GroupCommunicator, int]:
    """Makes the process groups of a plan and compares the plan between its ranks.

    Args:
        plan: equal on all ranks.
        mesh: holds the calling rank.

    Returns:
        The communicator and this process's plan rank.

    Raises:
        CallError: on every rank, when the ranks hold different plans or the mesh does not fit.
    """
    ranks = global_ranks(mesh, plan)
    me = ranks.index(dist.get_rank())
    is_ascending = list(ranks) == sorted(ranks)
    if mesh.ndim > 1 or not is_ascending:
        _level(mesh)
    everyone = mesh.get_group() if mesh.ndim == 1 and is_ascending else _group(ranks)
    key = enter(everyone)  # before anybody knows it
    keys = _require_equal(plan, everyone, ranks, key)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(plan.degree)): everyone}
    for step in plan.steps:
        for transfer in step.transfers:
            if set(map(len, transfer.groups)) != {1}:
                _level(mesh)
            mine = next(tuple(sorted(g)) for g in transfer.groups if me in g)
            if len(mine) > 1 and mine not in groups:
                groups[mine] = _group([ranks[r] for r in mine])
    for members, group in groups.items():
        order = [ranks.index(r) for r in dist.get_process_group_ranks(group)]
        if order != list(members):
            what = f"lists world ranks {ranks}, which are not ascending along its axes"
            raise CallError(
                [
                    Problem(
                        key="mesh",
                        what=what,
                        details=(("rule", "this torch numbers the ranks of a group in ascending order"),),
                    )
                ],
                plan.name,
            )
    watch = Watch(everyone.get_group_store(), keys, ranks, me, groups, plan.name) if key else None
    return GroupCommunicator(ranks=ranks, groups=groups, watch=watch), me


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Per world, the groups that were made of its ranks. They live as long as it: a group that is destroyed and made again gets the
same name, under which the store still has the addresses of the old one, so that a rank which reads them first hangs."""


def _group(world_ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of some ranks, numbered in this order where torch can, made by them alone and once."""
    world = dist.group.WORLD
    assert world is not None
    groups = _GROUPS.setdefault(world, {})
    if tuple(world_ranks) not in groups:
        is_ordered = "sort_ranks" in signature(dist.new_group).parameters
        ordered: dict[str, Any] = (
            {"sort_ranks": False} if is_ordered and list(world_ranks) != sorted(world_ranks) else {}
        )
        groups[tuple(world_ranks)] = dist.new_group(list(world_ranks), use_local_synchronization=True, **ordered)
    return groups[tuple(world_ranks)]


def _level(mesh: DeviceMesh) -> None:
    """Makes ranks that have different numbers of process groups have as many, by groups of one rank.

    The name under which ranks find each other in a group that they make by themselves holds the number of groups that each of
    them has: ranks with different numbers would wait for each other until the timeout. Source: torch.distributed.distributed_c10d,
    `_hash_ranks_to_str`.
    """
    mine = len(dist.distributed_c10d._world.pg_names)  # type: ignore[attr-defined]  # not in torch's stubs
    for _ in range(max(_of_all(mesh, [mine])) - mine):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _of_all(mesh: DeviceMesh, mine: list[T]) -> list[T]:
    """What all ranks of a mesh have, by the groups of its dims."""
    for group in mesh.get_all_groups():
        found: list[list[T]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        mine = [row for rows in found for row in rows]
    return mine


@contextmanager
def together(mesh: DeviceMesh | None, source: str = "") -> Iterator[None]:
    """Leaves this block by an error on every rank of a mesh if one rank does: nobody waits for a rank that was refused alone.

    Args:
        mesh: of the ranks that all enter this block; None for one rank.
        source: of what is made, for the message.

    Raises:
        Exception: this rank's own.
        CallError: where only others were refused, with what they were told.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if isinstance(mesh, DeviceMesh) and dist.is_initialized() and dist.get_rank() in mesh.mesh:
        told = _of_all(mesh, [] if error is None else [(dist.get_rank(), said(error))])
        if told and error is None:
            rank, text = min(told)
            what = f"rank {rank} was refused, and the others with it: {text}"
            raise CallError([Problem(key="ranks", what=what)], source)
    if error is not None:
        raise error


def beside(plan: Plan, rank: int, group: dist.ProcessGroup) -> GroupCommunicator:
    """Reaches the ranks that hold the other heads of the queries of this one, and compares the plan between them.

    Args:
        plan: equal on all of them.
        rank: this process's plan rank, the same on all of them.
        group: of these ranks.

    Raises:
        CallError: the group does not fit, or plans or plan ranks differ.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) != plan.shape.head_ranks:
        what = f"has {len(ranks)} ranks, and the heads of a query lie on {plan.shape.head_ranks}"
        raise CallError([Problem(key="heads", what=what)], plan.name)
    _require_equal(plan, group, ranks, "")
    places = [-1] * len(ranks)
    dist.all_gather_object(places, rank, group=group)
    if len(set(places)) > 1:
        what, rule = f"joins the plan ranks {places}", ("rule", "its ranks hold the same queries")
        raise CallError([Problem(key="heads", what=what, details=(rule,))], plan.name)
    return GroupCommunicator(ranks=ranks, groups={tuple(range(len(ranks))): group})


def _require_equal(plan: Plan, group: dist.ProcessGroup, ranks: tuple[int, ...], key: str) -> list[str]:
    """The same error on every rank, naming what differs, instead of a hang in the first exchange; the key of each plan rank."""
    mine: dict[str, str] = {
        "torch": torch.__version__,
        "cp.mesh": str(dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True))),
        "cp.layout": plan.tokens,
        "mask": str(plan.mask),
        **{f"shape.{k}": str(getattr(plan.shape, k)) for k in plan.shape.__dataclass_fields__},
        **{f"cp.steps.{s.step.name}": repr(s.step) for s in plan.steps},
        "cp.order": ", ".join(s.step.name for s in plan.steps),
        "plan": plan.fingerprint,
    }
    found: list[tuple[str, dict[str, str]]] = [("", {})] * dist.get_world_size(group)
    dist.all_gather_object(found, (key, mine), group=group)
    everyone = [row for _, row in found]
    problems: list[Problem] = []
    for name in dict.fromkeys(k for d in everyone for k in d):
        values = [d.get(name, "nothing") for d in everyone]
        if len(set(values)) > 1 and not (name == "plan" and problems):
            shown = tuple((f"rank {r}", v) for r, v in zip(dist.get_process_group_ranks(group), values, strict=True))
            problems.append(Problem(key=name, what="differs between ranks", details=shown[:4]))
    if problems:
        raise CallError(problems, plan.name)
    by_rank = dict(zip(dist.get_process_group_ranks(group), (k for k, _ in found), strict=True))
    return [by_rank[rank] for rank in ranks]
