"""What the engine's tests share: plans by name, their numbers with all ranks in this process, and strict comparison."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from cp_engine import reference
from cp_engine.compose import compose
from cp_engine.index_set import IndexSet, Run, run
from cp_engine.lower import Program
from cp_engine.plan import Plan, Shape
from cp_engine.redistribute import Target
from cp_engine.schema import plan_from_config
from cp_engine.verify import inputs

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(path.stem for path in (CONF / "cp").glob("*.yaml"))
SMALL = Shape(batch=1, sequence=16, heads=4, kv_heads=4, head_dim=8, v_head_dim=8, dtype="float32")
CAUSAL = {"kind": "causal"}


def small(**changes: int | str) -> Shape:
    """A small attention call with some sizes changed; kv_heads and v_head_dim follow heads and head_dim."""
    if "heads" in changes:
        changes.setdefault("kv_heads", changes["heads"])
    if "head_dim" in changes:
        changes.setdefault("v_head_dim", changes["head_dim"])
    return replace(SMALL, **changes)


@lru_cache
def shipped(preset: str, overrides: tuple[str, ...]) -> Mapping[str, object]:
    """A preset of the project; composing one takes longer than planning it."""
    return compose(preset, overrides)


def plan_of(
    preset: str | Mapping[str, object],
    *overrides: str,
    shape: Shape = SMALL,
    mask: Mapping[str, object] | str = "causal",
    degree: int | None = None,
    config_dir: Path | None = None,
) -> Plan:
    """The plan of a preset (or of a `cp` node) for a call."""
    if isinstance(preset, str):
        preset = compose(preset, overrides, config_dir) if config_dir is not None else shipped(preset, overrides)
    return plan_from_config(preset, shape=shape, mask=mask, world_degree=degree)


def computed(plan: Plan, seed: int = 0, scale: float | None = None) -> dict[str, Tensor]:
    """out, dq, dk, dv of a plan in float64 over whole sequences, with every rank in this process."""
    plan = replace(plan, shape=replace(plan.shape, dtype="float64"))
    program = Program(plan, Target(ranks=tuple(range(plan.degree)), device="cpu", communicator=None))
    *qkv, dout = inputs(plan.shape, seed)
    index = [torch.tensor(list(held), dtype=torch.long) for held in plan.entry.sequence]
    local = [[x[:, :, i].requires_grad_() for i in index] for x in qkv]
    outs = program(*local, plan.shape.head_dim**-0.5 if scale is None else scale)
    flat = torch.autograd.grad(outs, [x for xs in local for x in xs], [dout[:, :, i] for i in index])
    n, back = plan.degree, torch.cat(index).argsort()
    parts = {"out": outs, "dq": flat[:n], "dk": flat[n : 2 * n], "dv": flat[2 * n :]}
    return {name: torch.cat([x.detach() for x in xs], 2)[:, :, back] for name, xs in parts.items()}


def expected(shape: Shape, mask: Mapping[str, object], seed: int = 0) -> dict[str, Tensor]:
    """What dense float64 attention gives for the inputs of `computed`."""
    *qkv, dout = inputs(shape, seed)
    return reference.gradients(*qkv, dout, reference.visible(mask, shape.sequence), shape.head_dim**-0.5)


def assert_equals_reference(plan: Plan, mask: Mapping[str, object], bound: float = 1e-12) -> None:
    """A plan's out and gradients are those of the reference."""
    assert_close(computed(plan), expected(plan.shape, mask), bound)


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], bound: float) -> None:
    """Same names, shapes and, to an absolute bound, values; not-a-number is never close."""
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        error = float((found[name] - tensor).abs().max()) if tensor.numel() else 0.0
        assert error <= bound, f"{name}: {error:.2e} > {bound:.0e}"


def assert_identical(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


# ------------------------------------------------------------------ several ranks as threads
class Counted:
    """A communicator between threads of this process; counts what its rank sends, as the real one does."""

    def __init__(self, rank: int, post: "Post") -> None:
        self.rank, self.post = rank, post
        self.bytes_sent = self.collectives = 0

    def channel(self, group: tuple[int, ...]) -> "ThreadChannel":
        assert group == tuple(sorted(group)) and self.rank in group
        return ThreadChannel(group, self)


class ThreadChannel:
    """One group of threads."""

    def __init__(self, group: tuple[int, ...], rank: Counted) -> None:
        self.group, self.rank = group, rank
        self.members, self.me = len(group), group.index(rank.rank)

    def all_to_all(self, send: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert send.is_contiguous() and sum(sent) == send.numel()
        arrived = self._exchange(list(send.flatten().split(list(sent))))
        assert [x.numel() for x in arrived] == list(received)
        return torch.cat(arrived)

    def all_to_all_even(self, send: Tensor) -> Tensor:
        assert send.is_contiguous() and send.numel() % self.members == 0
        return torch.cat(self._exchange(list(send.flatten().chunk(self.members)))).view_as(send)

    def all_gather(self, send: Tensor) -> Tensor:
        assert send.is_contiguous()
        return torch.cat(self._exchange([send.flatten()] * self.members))

    def _exchange(self, parts: list[Tensor]) -> list[Tensor]:
        self.rank.collectives += 1
        self.rank.bytes_sent += sum(x.nbytes for i, x in enumerate(parts) if i != self.me)
        return self.rank.post.exchange(self.group, self.rank.rank, dict(zip(self.group, parts, strict=True)))


class Post:
    """Where threads leave what they send; a rank that fails ends the others."""

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()
        self.barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self.boxes: dict[tuple[tuple[int, ...], int, int], Tensor] = {}
        self.ranks = ranks

    def exchange(self, group: tuple[int, ...], rank: int, parts: Mapping[int, Tensor]) -> list[Tensor]:
        with self.lock:
            barrier = self.barriers.setdefault(group, threading.Barrier(len(group), timeout=20))
            self.boxes.update({(group, rank, to): x for to, x in parts.items()})
        barrier.wait()
        arrived = [self.boxes[group, source, rank].clone() for source in group]
        barrier.wait()
        return arrived

    def end(self) -> None:
        for barrier in self.barriers.values():
            barrier.abort()


def computed_by_threads(plan: Plan) -> tuple[dict[str, Tensor], list[list[tuple[int, int]]]]:
    """out, dq, dk, dv in float64 with one program for each rank, and (bytes, collectives) as [way][rank]."""
    plan = replace(plan, shape=replace(plan.shape, dtype="float64"))
    *qkv, dout = inputs(plan.shape)
    post = Post(plan.degree)
    counters = [Counted(r, post) for r in range(plan.degree)]
    index = [torch.tensor(list(held), dtype=torch.long) for held in plan.entry.sequence]

    def one(rank: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
        counter = counters[rank]
        try:
            program = Program(plan, Target(ranks=(rank,), device="cpu", communicator=counter))
            local = [x[:, :, index[rank]].requires_grad_() for x in qkv]
            (out,) = program(*([x] for x in local), plan.shape.head_dim**-0.5)
            forward = counter.bytes_sent, counter.collectives
            grads = torch.autograd.grad(out, local, dout[:, :, index[rank]])
        except BaseException:
            post.end()
            raise
        return [out.detach(), *grads], [forward, (counter.bytes_sent - forward[0], counter.collectives - forward[1])]

    with ThreadPoolExecutor(plan.degree) as pool:
        done = list(pool.map(one, range(plan.degree)))
    back = torch.cat(index).argsort()
    tensors = {n: torch.cat([d[0][i] for d in done], 2)[:, :, back] for i, n in enumerate(("out", "dq", "dk", "dv"))}
    return tensors, [[d[1][way] for d in done] for way in (0, 1)]


# ------------------------------------------------------------------ index sets, from positions and at random
def index_set(positions: Iterable[int], size: int) -> IndexSet:
    """The set of some positions in that order, one run each: says nothing about how runs are merged."""
    return IndexSet(tuple(Run(p, 1) for p in positions), size)


@st.composite
def runs(draw: st.DrawFn, size: int = 40) -> Run:
    """Any run inside a dim."""
    start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 7))
    return run(start, draw(st.integers(1, (size - 1 - start) // step + 1)), step)


@st.composite
def index_sets(draw: st.DrawFn, size: int = 40, most: int = 4) -> IndexSet:
    """Any set of positions as disjoint runs, sorted by their first position as all sets of the engine are."""
    taken: set[int] = set()
    chosen = []
    for r in draw(st.lists(runs(size), max_size=most)):
        members = set(range(r.start, r.stop, r.step))
        if not members & taken:
            taken |= members
            chosen.append(r)
    return IndexSet(tuple(sorted(chosen, key=lambda r: r.start)), size)


@st.composite
def partitions(draw: st.DrawFn, size: int = 40, most: int = 5) -> list[list[int]]:
    """Some disjoint lists of positions, each ascending; together they need not be everything."""
    owner = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
    return [[p for p in range(size) if owner[p] == i] for i in range(most)]


@st.composite
def masks(draw: st.DrawFn, size: int = 40) -> dict[str, object]:
    """Any mask over a dim, as configuration."""
    kind = draw(st.sampled_from(("full", "causal", "window", "prefix", "document", "document with window")))
    if kind == "window":
        return {"kind": kind, "left": draw(st.integers(0, size)), "right": draw(st.integers(0, size))}
    if kind == "prefix":
        return {"kind": kind, "length": draw(st.integers(0, size + 2))}
    if kind.startswith("document"):
        starts = [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=4)))] if size > 1 else [0]
        left = {"left": draw(st.integers(0, size))} if kind.endswith("window") else {}
        return {"kind": "document", "starts": starts, **left}
    return {"kind": kind}


def sees(mask: Mapping[str, object], q: int, k: int) -> bool:
    """Whether query q may see key k, said once more, position by position."""
    match mask:
        case {"kind": "full"}:
            return True
        case {"kind": "causal"}:
            return k <= q
        case {"kind": "window", "left": int(left), "right": int(right)}:
            return q - left <= k <= q + right
        case {"kind": "prefix", "length": int(length)}:
            return k <= q or k < length
        case {"kind": "document", "starts": list(starts)}:
            left = mask.get("left")
            same = sum(s <= q for s in starts) == sum(s <= k for s in starts)
            return same and k <= q and (not isinstance(left, int) or q - k <= left)
    raise AssertionError(mask)
