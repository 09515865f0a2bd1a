"""What people do wrong in a composition: one thing changed at a time."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

from tests.random.compositions import TENSORS, Case, Node, maybe, order, some


def mutated(random: Random, whole: Case) -> tuple[str, Case]:
    """A case with one thing changed, and what that is."""
    if maybe(random, 3):
        mask = deepcopy(whole.mask)
        _junk(random, mask)
        return "junk mask", replace(whole, mask=mask, called=None)
    for name in random.sample(list(MUTATIONS), len(MUTATIONS)) if whole.cp["order"] else ():
        cp = deepcopy(whole.cp)
        MUTATIONS[name](random, cp)
        if cp != whole.cp:
            return name, replace(whole, cp=cp)
    return "nothing", whole


def _drop_step(random: Random, cp: Node) -> None:
    name = random.choice(cp["order"])
    cp["order"].remove(name)
    del cp["steps"][name]


def _exchange_steps(random: Random, cp: Node) -> None:
    order, (i, j) = cp["order"], random.choices(range(len(cp["order"])), k=2)
    order[i], order[j] = order[j], order[i]


def _repeat_step(random: Random, cp: Node) -> None:
    name = random.choice(cp["order"])
    cp["steps"]["again"] = deepcopy(cp["steps"][name])
    cp["order"].insert(random.randint(0, len(cp["order"])), "again")


def _with(cp: Node, field: str) -> list[Node]:
    return [node for node in cp["steps"].values() if node.get(field)]


def _swap_dims(random: Random, cp: Node) -> None:
    for node in some(random, _with(cp, "split"))[:1]:
        node["split"], node["concat"] = node["concat"], node["split"]


def _other_axes(random: Random, cp: Node) -> None:
    """One axis of one list replaced, dropped or added, or the list in another order."""
    lists = [
        (n, key) for n in [*cp["steps"].values(), cp["layout"]] for key in ("axes", "over", "rotate") if n.get(key)
    ]
    if not lists:
        return
    node, key = random.choice(lists)
    axes, others = list(node[key]), [a for a in cp["axes"] if a not in node[key]]
    what = random.choice(["replace", "drop", "add", "order"])
    if what in ("drop", "replace"):
        axes.remove(random.choice(axes))
    if what in ("add", "replace") and others:
        axes.insert(random.randint(0, len(axes)), random.choice(others))
    node[key] = random.sample(axes, len(axes)) if what == "order" else axes


def _wrong_undo(random: Random, cp: Node) -> None:
    for node in some(random, _with(cp, "of"))[:1]:
        node["of"] = random.choice(cp["order"])


def _undo_order(random: Random, cp: Node) -> None:
    undone = _with(cp, "of")
    for node, of in zip(undone, random.sample([n["of"] for n in undone], len(undone)), strict=True):
        node["of"] = of


def _drop_tensor(random: Random, cp: Node) -> None:
    for node in some(random, _with(cp, "tensors"))[:1]:
        node["tensors"] = random.sample(node["tensors"], max(1, len(node["tensors"]) - 1))


def _other_tensors(random: Random, cp: Node) -> None:
    for node in some(random, _with(cp, "tensors"))[:1]:
        node["tensors"] = some(random, TENSORS)


def _other_layout(random: Random, cp: Node) -> None:
    node = random.choice([cp["layout"], *(n["to"] for n in _with(cp, "to"))])
    other = order(random, cp["axes"])
    if maybe(random, 50):
        other["over"] = node["over"]
    node.clear()
    node.update(other)


def _only(random: Random, cp: Node) -> None:
    for node in some(random, [n for n in cp["steps"].values() if n["kind"] == "all_gather"])[:1]:
        node.update(random.choice([{"only": "all"}, {"only": "visible"}, {"dim": "heads"}, {"dim": "sequence"}]))


def _gather_queries(random: Random, cp: Node) -> None:
    """Each query on several ranks, and out taken back from there."""
    gathers = [name for name, node in cp["steps"].items() if node["kind"] == "all_gather"]
    for name in some(random, gathers)[:1]:
        cp["steps"][name].update(tensors=["q", "k", "v"], only="all")
        if maybe(random, 70):
            cp["steps"]["give_back"] = {"kind": "undo", "of": name, "tensors": ["out"]}
            after = max(cp["order"].index(n) for n in cp["order"] if n == name or cp["steps"][n]["kind"] == "dense")
            cp["order"].insert(random.randint(after + 1, len(cp["order"])), "give_back")


def _rotate(random: Random, cp: Node) -> None:
    for node in cp["steps"].values():
        if node["kind"] == "dense":
            node["rotate"] = some(random, cp["axes"], least=0)


def _mesh(random: Random, cp: Node) -> None:
    cp["axes"] = random.sample(cp["axes"], len(cp["axes"]))


def _pipeline(random: Random, cp: Node) -> None:
    cp["head_groups"] = random.randint(1, 4)


def _places(node: object) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree of mappings and lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, value in items for place in [(node, key), *_places(value)]]


def _junk(random: Random, cp: Node) -> None:
    """A value of any type anywhere; keys of any name."""
    container, key = random.choice(_places(cp))
    values = [None, True, 0, -1, 2, 0.5, "", "q", "a", "???", [], ["a"], [1], [["a"]], {}, {"kind": "dense"}, {1: 2}]
    if isinstance(container, dict) and maybe(random, 30):
        container[random.choice(["kind", "axes", "of", "unknown", "", 1])] = container.pop(key)
    elif maybe(random, 20):
        del container[key]
    else:
        container[key] = random.choice(values)


MUTATIONS: dict[str, Callable[[Random, Node], None]] = {
    "step dropped": _drop_step,
    "steps exchanged": _exchange_steps,
    "step repeated": _repeat_step,
    "dims swapped": _swap_dims,
    "other axes": _other_axes,
    "undo of another step": _wrong_undo,
    "undos in another order": _undo_order,
    "tensor dropped": _drop_tensor,
    "other tensors": _other_tensors,
    "other layout": _other_layout,
    "other keys gathered": _only,
    "queries gathered": _gather_queries,
    "other rotation": _rotate,
    "other order of axes": _mesh,
    "other pipeline": _pipeline,
    "junk": _junk,
}
