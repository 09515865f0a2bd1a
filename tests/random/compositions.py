"""Random compositions with the calls that they are for.

Everything is drawn from a `random.Random`: a seeded one in the long run (`python -m tools.run_random`), hypothesis' own in the
tests, so that both draw the same cases. Most compositions are plausible: each mesh axis gets one way in which keys meet queries,
in any order. The others take any steps with any fields.
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from math import prod
from random import Random
from typing import Any, TypeVar

from cp_engine.algebra.mask_kinds import KINDS, is_from_call
from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import RECOMPUTE, plan_from_config
from cp_engine.plan.fields import KIND, Choice, OfLayout, StepName
from cp_engine.plan.ir import Plan
from cp_engine.primitives.table import LAYOUTS, STEPS

Node = dict[str, Any]  # as YAML gives it
T = TypeVar("T")
MESHES = [
    (1,),
    (2,),
    (3,),
    (4,),
    (5,),
    (6,),
    (8,),
    (12,),
    (2, 2),
    (2, 3),
    (3, 2),
    (1, 4),
    (4, 2),
    (2, 5),
    (4, 3),
    (2, 6),
]
CUBES = [(2, 2, 2), (2, 2, 3), (3, 2, 2), (1, 2, 3), (2, 1, 4), (2, 3, 1)]
HEADS = [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (6, 3), (6, 2), (6, 1), (7, 7), (8, 2), (9, 3), (12, 4), (5, 1)]
TENSORS = ("q", "k", "v", "out", "kv_latent", "k_rope")


@dataclass(frozen=True)
class Case:
    """A composition with the call that it is for.

    Args:
        cp: the composition.
        shape: of the call.
        mask: what it is planned for.
        called: the mask of the call, where the plan leaves document boundaries to it.
    """

    cp: Node
    shape: Shape
    mask: Node
    called: Node | None = None

    def plan(self) -> Plan:
        return plan_from_config(self.cp, shape=self.shape, mask=self.mask)


def case(random: Random) -> Case:
    """A composition and its call."""
    sizes = random.choice(MESHES if maybe(random, 75) else CUBES) if maybe(random, 97) else ()
    axes = list("abc"[: len(sizes)])
    is_latent = maybe(random, 15)
    shape = call(random, prod(sizes), is_latent=is_latent)
    steps = plausible(random, axes, is_latent=is_latent) if maybe(random, 80) else anything(random, axes)
    common = [n for n in (2, 3, 4) if shape.kv_heads % n == 0]
    cp: Node = {
        "name": "random",
        "mesh": dict(zip(axes, sizes, strict=True)),
        "axes": random.sample(axes, len(axes)),
        "layout": order(random, axes),
        "order": list(steps),
        "steps": steps,
        "head_groups": random.choice(common or [2]) if maybe(random, 3 if is_latent else 17) else 1,
        "recompute": random.choice(RECOMPUTE),
    }
    planned = mask(random, shape.sequence)
    return Case(cp, shape, planned, called(random, shape.sequence, planned) if is_from_call(planned) else None)


# ------------------------------------------------------------------ calls and masks
def some(random: Random, items: Sequence[T], least: int = 1) -> list[T]:
    """Some of the items, at least that many, in any order."""
    return random.sample(list(items), random.randint(min(least, len(items)), len(items)))


def maybe(random: Random, percent: int) -> bool:
    return random.randint(1, 100) <= percent


def call(random: Random, ranks: int, *, is_latent: bool) -> Shape:
    """An attention call; in a third of them everything divides, so that exchanges are even."""
    if maybe(random, 33):
        heads, kv_heads = (n * ranks for n in random.choice([(1, 1), (2, 1), (2, 2)][: 3 if ranks < 8 else 1]))
        sequence = 2 * ranks * random.randint(1, max(1, 35 // ranks))
    else:
        heads, kv_heads = random.choice(HEADS)
        sequence = random.randint(1, 12 if maybe(random, 20) else 70)
    head_dim = random.randint(4, 8)
    return Shape(
        batch=random.choice([1, 1, 3]),
        sequence=sequence,
        heads=heads,
        kv_heads=heads if is_latent else kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if maybe(random, 70) else random.randint(4, 8),
        dtype="float64" if maybe(random, 85) else random.choice(["float32", "bfloat16", "float16"]),
        latent_dim=random.randint(3, 6) if is_latent else 0,
        rope_dim=random.randint(1, head_dim) if is_latent else 0,
    )


def mask(random: Random, size: int, *, is_part: bool = False) -> Node:
    kinds = [k for k in KINDS if not (is_part and k == "both")]
    kind = random.choice([*kinds, "causal", "causal"])
    return {"kind": kind, **MASKS[kind](random, size)}


def called(random: Random, size: int, planned: Node) -> Node:
    """A mask with the boundaries that it leaves open."""
    if planned["kind"] == "both":
        return {**planned, "of": [called(random, size, part) for part in planned["of"]]}
    is_open = planned["kind"] == "document" and "starts" not in planned
    return {**planned, "starts": _starts(random, size)} if is_open else planned


def _starts(random: Random, size: int) -> list[int]:
    return [0, *sorted(random.sample(range(1, size), random.randint(0, min(5, size - 1))))]


def _document(random: Random, size: int) -> Node:
    is_causal = maybe(random, 70)
    out: Node = {"causal": is_causal, **({"starts": _starts(random, size)} if maybe(random, 60) else {})}
    for side in ("left", "right") if not is_causal else ("left",):
        if maybe(random, 30):
            out[side] = _tokens(random, size)
    return out


def _tokens(random: Random, size: int) -> int:
    return random.randint(0, size if maybe(random, 30) else 1 + size // 4)


MASKS: dict[str, Callable[[Random, int], Node]] = {
    "full": lambda random, size: {},
    "causal": lambda random, size: {},
    "window": lambda random, size: {"left": _tokens(random, size), "right": _tokens(random, size)},
    "prefix": lambda random, size: {"length": random.randint(0, size + 2)},
    "document": _document,
    "block": lambda random, size: {"size": 1 + _tokens(random, size), "causal": maybe(random, 60)},
    "both": lambda random, size: {"of": [mask(random, size, is_part=True) for _ in range(random.randint(1, 3))]},
}
"""kind -> random fields of it, for every kind of `cp_engine.algebra.mask`."""


# ------------------------------------------------------------------ compositions
def plausible(random: Random, axes: Sequence[str], *, is_latent: bool) -> dict[str, Node]:
    """Steps in which each axis gets one way in which keys meet queries; nearly all of them compile."""
    steps: dict[str, Node] = {}
    through: list[str] = []  # what q goes through, and out has to take back
    keys = ["kv_latent", "k_rope"] if is_latent else ["k", "v"]

    def add(node: Node) -> None:
        steps[name := f"{node['kind']}_{len(steps)}"] = node
        if "q" in node.get("tensors", ()):
            through.append(name)

    ways: list[tuple[str, list[str]]] = []
    for axis in random.sample(list(axes), len(axes)):
        way = random.choice(["heads", "heads", "gather", "gather", "rotate", "rotate", "exotic"])
        if ways and ways[-1][0] == way and maybe(random, 60):
            ways[-1][1].append(axis)
        else:
            ways.append((way, [axis]))
    left = list(axes)  # those that still cut the sequence of q, k and v
    expands_at = len(ways) if maybe(random, 50) else random.randint(0, len(ways))
    for i, (way, group) in enumerate(ways):
        if is_latent and i == expands_at:
            add({"kind": "expand"})
            keys = ["k", "v"]
        if left and maybe(random, 20):
            add(reorder(random, left, ["q", *keys]))
        if way == "heads" and keys == ["k", "v"]:
            for tensors in random.choice(
                [[["q", "k", "v"]], [["q"], ["k", "v"]], [["v", "k"], ["q"]], [["k"], ["q"], ["v"]]]
            ):
                add(to_heads(group, tensors))
        elif way in ("heads", "gather"):
            only = "visible" if keys == ["k", "v"] and maybe(random, 70 if i == len(ways) - 1 else 10) else "all"
            for tensors in random.choice([[keys], [keys], [[t] for t in reversed(keys)]]):
                add(to_heads(group, tensors) if way == "heads" and maybe(random, 30) else gather(group, tensors, only))
            if way == "heads":  # the latent serves all heads
                add(to_heads(group, ["q"]))
        elif way == "exotic":  # to heads and joined again, which is a gather of every position and every head
            add(to_heads(group, keys))
            add({**gather(group, keys, "all"), "dim": "heads"})
        left = [a for a in left if a not in group or way == "rotate"]
    if is_latent and expands_at == len(ways):
        add({"kind": "expand"})
    whole = [a for way, group in ways if way in ("gather", "exotic") for a in group]
    if whole and maybe(random, 15):  # the ranks along these have the same k and v: q may go anywhere among them
        add(reorder(random, whole, ["q"]))
    rotate = [a for way, group in ways if way == "rotate" for a in group]
    add({"kind": "dense", "rotate": rotate, "kernel": kernel(random), "sinks": maybe(random, 10)})
    for name in reversed(through):
        node = steps[name]
        if node["kind"] == "all_to_all" and name == through[0] and maybe(random, 30):  # nothing is left to take back
            add({**node, "tensors": ["out"], "split": "sequence", "concat": "heads"})
        else:
            add({"kind": "undo", "of": name, "tensors": ["out"]})
    return steps


def order(random: Random, axes: Sequence[str]) -> Node:
    over = some(random, axes) if axes and maybe(random, 50) else None
    out = {"kind": random.choice(list(LAYOUTS)), "over": over}
    return {**out, "chunks": random.randint(1, 4)} if out["kind"] == "balanced" and maybe(random, 70) else out


def to_heads(axes: list[str], tensors: list[str]) -> Node:
    return {"kind": "all_to_all", "axes": axes, "tensors": tensors, "split": "heads", "concat": "sequence"}


def gather(axes: list[str], tensors: list[str], only: str) -> Node:
    return {"kind": "all_gather", "axes": axes, "tensors": tensors, "only": only}


def reorder(random: Random, axes: Sequence[str], tensors: list[str]) -> Node:
    among = some(random, axes)
    return {"kind": "reorder", "to": order(random, among), "over": among, "tensors": tensors}


def kernel(random: Random) -> str:
    return random.choice(["auto", "auto", "math", "cpu_flash"])


def anything(random: Random, axes: Sequence[str]) -> dict[str, Node]:
    """Any steps with any fields that can be read; nearly all of them are refused."""
    names = [f"step_{i}" for i in range(random.randint(1, 5))]
    attends = random.choice(names)
    return {n: step(random, "dense" if n == attends else random.choice(list(STEPS)), axes, names) for n in names}


def step(random: Random, kind: str, axes: Sequence[str], names: Sequence[str]) -> Node:
    """One step: what its dataclass declares, drawn field by field."""
    out: Node = {"kind": kind}
    for f in fields(STEPS[kind]):
        if f.name == "name" or (f.default is not MISSING and maybe(random, 60)):
            continue
        if f.name in ("axes", "over", "rotate"):
            out[f.name] = some(random, axes)
        elif isinstance(kind := f.metadata.get(KIND), OfLayout):
            out[f.name] = order(random, axes)
        elif isinstance(kind, StepName):
            out[f.name] = random.choice(names)
        elif f.name == "tensors":
            out[f.name] = random.choice([["q", "k", "v"], ["k", "v"], ["q"], ["out"], some(random, TENSORS)])
        elif f.type is bool:
            out[f.name] = maybe(random, 50)
        elif isinstance(kind, Choice):
            out[f.name] = random.choice(list(kind.names))
    return out
