"""What the engine's tests share: plans by name, their numbers with all ranks in this process, and strict comparison."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet, Run, run
from cp_engine.algebra.mask import Mask
from cp_engine.algebra.shape import Shape
from cp_engine.config.compose import compose
from cp_engine.config.composition import plan_from_config, read
from cp_engine.exchange.channel import Pending
from cp_engine.exchange.target import Target
from cp_engine.job.verify import reference
from cp_engine.job.verify.attention import inputs_of
from cp_engine.plan.cost import totals
from cp_engine.plan.ir import Plan
from cp_engine.runtime.program import Program

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")

CONF = Path(__file__).parents[1] / "conf"
EVERY = sorted(path.stem for path in (CONF / "cp").glob("*.yaml"))
SPARSE = [name for name in EVERY if "sparse_attention" in (CONF / "cp" / f"{name}.yaml").read_text()]
"""Those that attend to selected keys."""
PRESETS = [name for name in EVERY if name not in SPARSE]
SMALL = Shape(batch=1, sequence=16, heads=4, kv_heads=4, head_dim=8, v_head_dim=8, dtype="float32")
CAUSAL = {"kind": "causal"}


def small(**changes: int | str) -> Shape:
    """A small attention call with some sizes changed; kv_heads and v_head_dim follow heads and head_dim."""
    if "heads" in changes:
        changes.setdefault("kv_heads", changes["heads"])
    if "head_dim" in changes:
        changes.setdefault("v_head_dim", changes["head_dim"])
    return replace(SMALL, **changes)


@cache
def shipped(preset: str, overrides: tuple[str, ...]) -> Mapping[str, object]:
    """A preset of the project; composing one takes longer than planning it."""
    return compose(preset, overrides)


def factored(degree: int, axes: int) -> list[tuple[int, ...]]:
    """All sizes of so many axes that multiply to a degree; those that use most axes come first."""
    if axes < 2:
        return [(degree,)] if axes else [()] * (degree == 1)
    sizes = [(n, *rest) for n in range(1, degree + 1) if degree % n == 0 for rest in factored(degree // n, axes - 1)]
    return sorted(sizes, key=lambda found: found.count(1))


def sized(cp: Mapping[str, object], degree: int, turn: int = 0) -> dict[str, object]:
    """A composition with so many ranks, factored over its axes; `turn` chooses among the ways to do so."""
    axes = cp["axes"]
    assert isinstance(axes, list)
    ways = factored(degree, len(axes))
    return {**cp, "mesh": dict(zip(axes, ways[turn % len(ways)], strict=True))}


def mesh_for(preset: str, degree: int, turn: int = 0) -> tuple[str, ...]:
    """The same as overrides of a shipped preset, such as `cp.mesh.ring=2 cp.mesh.ulysses=2`."""
    mesh = sized(shipped(preset, ()), degree, turn)["mesh"]
    assert isinstance(mesh, dict)
    return tuple(f"cp.mesh.{axis}={size}" for axis, size in mesh.items())


def varied(
    preset: str,
    degree: int,
    *,
    turn: int = 0,
    order: str = "",
    head_groups: int = 1,
    sinks: bool = False,
    kernel: str = "auto",
    recompute: str = "all",
) -> dict[str, object]:
    """A preset with some choices changed as data, which takes no time; what overrides do is tested elsewhere.

    Args:
        preset: of the project.
        degree, turn: see `sized`.
        order: a layout (none: the preset's own), or `reorder to` one, for which the steps are wrapped in a reorder and its undo.
        pipeline, sinks, kernel, recompute: keys of a composition and of its attention.
    """
    cp = sized(shipped(preset, ()), degree, turn)
    steps, names, layout = cp["steps"], cp["order"], cp["layout"]
    assert isinstance(steps, dict) and isinstance(names, list) and isinstance(layout, dict)
    steps = {**steps, "attend": {**steps["attend"], "kernel": kernel, "sinks": sinks}}
    kind, _, to = order.partition(" to ")
    if to:
        steps["deal"] = {"kind": "reorder", "to": few_chunks(to), "tensors": list(begins_with(preset))}
        steps["deal_back"] = {"kind": "undo", "of": "deal", "tensors": ["out"]}
        kind, names = "contiguous", ["deal", *names, "deal_back"]
    layout = {**layout, **few_chunks(kind)} if kind else layout
    return {**cp, "steps": steps, "order": names, "layout": layout, "head_groups": head_groups, "recompute": recompute}


def few_chunks(order: str) -> dict[str, object]:
    """An order; balanced in 3 chunks per rank in place of 8, which takes fewer kernel calls."""
    return {"kind": order, **({"chunks": 3} if order == "balanced" else {})}


@cache
def begins_with(preset: str) -> tuple[str, ...]:
    """The tensors that a preset's calls bring."""
    return read(shipped(preset, ()), None).inputs


def begins_with_latent(preset: str) -> bool:
    """Whether a preset expands k and v itself."""
    return "kv_latent" in begins_with(preset)


def fitting(preset: str, shape: Shape) -> Shape:
    """The call with what the preset begins with: where that is a latent, its sizes, and a key and a value for every head; where
    keys are selected, one key head, and an indexer."""
    if preset in SPARSE:
        sizes = {"latent_dim": 12, "rope_dim": 4, "index_heads": 3, "index_dim": 8, "topk": 7}
        return replace(shape, kv_heads=1, head_dim=16, v_head_dim=12, **sizes)
    if not begins_with_latent(preset):
        return shape
    latent_dim, rope_dim = (64, 64) if shape.head_dim > 64 else (12, max(1, shape.head_dim // 2))
    return replace(shape, kv_heads=shape.heads, latent_dim=latent_dim, rope_dim=rope_dim)


def plan_of(
    preset: str | Mapping[str, object],
    *overrides: str,
    shape: Shape = SMALL,
    mask: Mapping[str, object] | Mask | str = "causal",
    degree: int | None = None,
    turn: int = 0,
    config_dir: Path | None = None,
) -> Plan:
    """The plan of a preset (or of a `cp` node) for a call, on so many ranks (see `sized`)."""
    if isinstance(preset, str):
        preset = compose(preset, overrides, config_dir) if config_dir is not None else shipped(preset, overrides)
    cp = preset if degree is None else sized(preset, degree, turn)
    return plan_from_config(cp, shape=shape, mask=mask, world_degree=degree)


def in_float64(plan: Plan) -> Plan:
    return replace(plan, shape=replace(plan.shape, dtype="float64"))


def local(plan: Plan, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What one rank brings: its tokens of every input, and whole parameters of its own."""
    held = torch.tensor(list(plan.entry.sequence[rank]), dtype=torch.long)
    mine = {n: x[:, :, held] if n in plan.inputs else x.clone() for n, x in tensors.items()}
    return {n: x.requires_grad_() for n, x in mine.items()}


def together(plan: Plan, ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole sequences from every rank's tokens; of parameters, whose gradients are shares, the sum."""
    back = torch.cat([torch.tensor(list(held), dtype=torch.long) for held in plan.entry.sequence]).argsort()
    shares = {f"d{n}" for n in plan.parameters}
    return {
        n: torch.stack([r[n] for r in ranks]).sum(0) if n in shares else torch.cat([r[n] for r in ranks], 2)[:, :, back]
        for n in ranks[0]
    }


def computed(plan: Plan, seed: int = 0, scale: float | None = None) -> dict[str, Tensor]:
    """out and the gradient of every input of a plan in float64 over whole sequences, with every rank in this process."""
    plan, ranks = in_float64(plan), range(plan.degree)
    program = Program(plan, Target(ranks=tuple(ranks), device="cpu", communicator=None))
    tensors, dout = inputs_of(plan, seed)
    given = [local(plan, tensors, r) for r in ranks]
    outs = program.run(
        {n: [x[n] for x in given] for n in tensors}, plan.shape.head_dim**-0.5 if scale is None else scale
    )
    douts = [dout[:, :, list(held)] for held in plan.entry.sequence]
    grads = iter(torch.autograd.grad(outs, [x for rank in given for x in rank.values()], douts))
    return together(plan, [{"out": out.detach(), **{f"d{n}": next(grads) for n in tensors}} for out in outs])


def expected(plan: Plan, mask: Mapping[str, object], seed: int = 0) -> dict[str, Tensor]:
    """What dense float64 attention gives for the inputs of `computed`."""
    tensors, dout = inputs_of(in_float64(plan), seed)
    seen = reference.visible(mask, plan.shape.sequence)
    return reference.gradients_of(tensors, dout, seen, plan.shape.head_dim**-0.5)


def assert_equals_reference(plan: Plan, mask: Mapping[str, object], bound: float = 1e-12) -> None:
    """A plan's out and gradients are those of the reference."""
    assert_close(computed(plan), expected(plan, mask), bound)


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], bound: float) -> None:
    """Same names, shapes and, to an absolute bound, values; not-a-number is never close."""
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        error = float((found[name] - tensor).abs().max()) if tensor.numel() else 0.0
        assert error <= bound, f"{name}: {error:.2e} > {bound:.0e}"


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

    def all_to_all(self, send: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        assert send.is_contiguous() and sum(sent) == send.numel()
        arrived = self._exchange(list(send.flatten().split(list(sent))))
        assert [x.numel() for x in arrived] == list(received)
        return Pending(torch.cat(arrived))

    def all_to_all_even(self, send: Tensor) -> Pending:
        assert send.is_contiguous() and send.numel() % self.members == 0
        return Pending(torch.cat(self._exchange(list(send.flatten().chunk(self.members)))).view_as(send))

    def all_gather(self, send: Tensor) -> Pending:
        assert send.is_contiguous()
        return Pending(torch.cat(self._exchange([send.flatten()] * self.members)))

    def shift(self, send: Tensor, to: int, source: int, received: int, tag: int) -> Pending:
        assert send.is_contiguous() and send.ndim == 1 and tag < 16
        arrived = self._exchange([send if i == to else send[:0] for i in range(self.members)], to_self=to == self.me)
        assert arrived[source].numel() == received
        return Pending(arrived[source])

    def _exchange(self, parts: list[Tensor], to_self: bool = False) -> list[Tensor]:
        assert not to_self, "a hop leaves its rank"
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
            barrier = self.barriers.setdefault(group, threading.Barrier(len(group), timeout=300))
            self.boxes.update({(group, rank, to): x for to, x in parts.items()})
        barrier.wait()
        arrived = [self.boxes[group, source, rank].clone() for source in group]
        barrier.wait()
        return arrived

    def end(self) -> None:
        for barrier in self.barriers.values():
            barrier.abort()


def computed_by_threads(plan: Plan) -> tuple[dict[str, Tensor], list[list[tuple[int, int]]]]:
    """The same as `computed` with one program for each rank, and (bytes, collectives) as [way][rank]."""
    plan = in_float64(plan)
    tensors, dout = inputs_of(plan)
    post = Post(plan.degree)
    counters = [Counted(r, post) for r in range(plan.degree)]

    def one(rank: int) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        counter = counters[rank]
        try:
            program = Program(plan, Target(ranks=(rank,), device="cpu", communicator=counter))
            given = local(plan, tensors, rank)
            (out,) = program.run({n: [x] for n, x in given.items()}, plan.shape.head_dim**-0.5)
            forward = counter.bytes_sent, counter.collectives
            upstream = dout[:, :, list(plan.entry.sequence[rank])]
            grads = torch.autograd.grad(out, list(given.values()), upstream)
        except BaseException:
            post.end()
            raise
        found = {"out": out.detach(), **{f"d{n}": g for n, g in zip(given, grads, strict=True)}}
        return found, [forward, (counter.bytes_sent - forward[0], counter.collectives - forward[1])]

    with ThreadPoolExecutor(plan.degree) as pool:
        done = list(pool.map(one, range(plan.degree)))
    return together(plan, [found for found, _ in done]), [[counted[way] for _, counted in done] for way in (0, 1)]


def executed(plan: Plan) -> None:
    """Runs every rank with a communicator of its own: same numbers, and bytes and collectives as planned."""
    plan = in_float64(plan)
    tensors, counted = computed_by_threads(plan)
    assert_close(tensors, computed(plan), 1e-12)
    planned = totals(plan)
    for way in (0, 1):
        assert counted[way] == [(sent, planned.collectives[way]) for sent in planned.sent[way]]


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
