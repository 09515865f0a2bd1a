"""Strategies are data: no name in code, any name in YAML, own compositions, overrides with the predicted effect."""

import ast
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

import cp_engine
from cp_engine.config.compose import presets
from cp_engine.job import explain
from cp_engine.kernels.ascend.operators import shipped
from cp_engine.plan.ir import Plan
from tests.helpers import (
    CAUSAL,
    CONF,
    EVERY,
    assert_close,
    assert_equals_reference,
    computed,
    fitting,
    plan_of,
    small,
)

PACKAGE = Path(cp_engine.__file__).parent
TRANSLATOR = PACKAGE / "job" / "toml" / "translate.py"  # names presets, as its input format does
SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if p != TRANSLATOR)


# ------------------------------------------------------------------ no name in code
def words_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and every string that is not a docstring."""
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            yield line, node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
        for _, value in ast.iter_fields(node):
            names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
            if not isinstance(node, ast.Constant):
                yield from ((line, name) for name in names if isinstance(name, str))


def named(source: str, names: list[str]) -> list[tuple[int, str]]:
    """Words in which one of the names occurs, whole or as a part; short names (`ring`, as in `string`) as a word of its own."""
    return [(line, word) for line, word in words_of(ast.parse(source)) if any(occurs(name, word) for name in names)]


def occurs(name: str, word: str) -> bool:
    """Whether a name is in an identifier or a text."""
    if len(name) > 4:
        return name in re.sub(r"\s", " ", word.lower())
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", word)  # of snake_case and CamelCase
    return name in map(str.lower, words)


@pytest.mark.quick
@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_source_names_no_strategy(path: Path) -> None:
    source = path.read_text()
    for operator in shipped()[1]:  # the vendor calls one of them after rings
        source = source.replace(operator, "an_operator")
    assert named(source, [name for name in EVERY if name != "none"]) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = 'ulysses'",
        "x = f'cp={y} ulysses'",
        "ulysses = 1",
        "x.ulysses",
        "def ulysses(): ...",
        "class Ulysses: ...",
        "def f(ulysses): ...",
        "f(ulysses=1)",
        "from a import ulysses",
        "import b as ulysses",
        "def f(*, is_ulysses): ...",
        "match x:\n    case A(ulysses=1): ...",
        "try: ...\nexcept A as ulysses: ...",
        "x = 'ulyssesPlan'",
    ],
)
def test_search_finds_a_name_wherever_it_is(source: str) -> None:
    assert named(source, ["ulysses"]) != []
    assert (
        named(
            f"'''ulysses'''\n# ulysses\n{source.replace('ulysses', 'other').replace('Ulysses', 'Other')}", ["ulysses"]
        )
        == []
    )


@pytest.mark.parametrize(
    "source",
    ["x = 'cp=ring'", "ring = 1", "class Ring: ...", "class UspRing: ...", "def is_ring(): ...", "x.RING", "RINGSize"],
)
def test_search_finds_a_short_name_as_a_word(source: str) -> None:
    assert named(source, ["ring"]) != []


@pytest.mark.parametrize(
    "source", ["x = 'brings'", "string = 1", "class StringIO: ...", "def during(): ...", "x.RINGS"]
)
def test_search_leaves_longer_words_alone(source: str) -> None:
    assert named(source, ["ring"]) == []


# ------------------------------------------------------------------ any name in YAML
def renaming(names: list[str], seed: int) -> dict[str, str]:
    """A random name of the same length (so that tables keep their width) for each name, none of them a word."""
    generator = random.Random(seed)
    new: dict[str, str] = {}
    for name in names:
        while name not in new or new[name] in (*names, *(v for k, v in new.items() if k != name)):
            new[name] = "".join(generator.choices("jkqvwxz", k=len(name)))
    return new


def renamed(
    preset: Mapping[str, object], axes: Mapping[str, str], steps: Mapping[str, str], name: str
) -> dict[str, object]:
    """The same preset in other words: every place in which a composition can name a step or an axis."""

    def value(key: str, node: object) -> object:
        if key in ("axes", "over", "rotate", "sum") and isinstance(node, list):
            return [axes[a] for a in node]
        if key == "mesh" and isinstance(node, dict):
            return {axes[a]: size for a, size in node.items()}
        if key == "order" and isinstance(node, list):
            return [steps[s] for s in node]
        if key == "of" and isinstance(node, str):
            return steps[node]
        if key == "steps" and isinstance(node, dict):
            return {steps[s]: value("", fields) for s, fields in node.items()}
        if key == "defaults" and isinstance(node, list):
            return [entry if isinstance(entry, str) else {package(k): v for k, v in entry.items()} for entry in node]
        return {k: value(k, v) for k, v in node.items()} if isinstance(node, dict) else node

    def package(choice: str) -> str:
        group, _, where = choice.partition("@")
        if group.startswith("override /model"):  # the model that a preset is for is no part of it
            return choice
        parts = where.split(".")
        return f"{group}@{'.'.join([parts[0], *(steps[p] for p in parts[1:])])}"

    return {key: name if key == "name" else value(key, node) for key, node in preset.items()}


def mapped_back(node: object, words: Mapping[str, str]) -> object:
    if isinstance(node, dict):
        return {mapped_back(k, words): mapped_back(v, words) for k, v in node.items()}
    if isinstance(node, list):
        return [mapped_back(x, words) for x in node]
    return (
        re.sub("|".join(rf"\b{w}\b" for w in words), lambda m: words[m.group()], node)
        if isinstance(node, str)
        else node
    )


@pytest.mark.parametrize(("preset", "degree"), [(p, n) for p in EVERY for n in (1, 4) if n == 1 or p != "none"])
def test_renamed_preset_is_the_same_strategy(preset: str, degree: int, tmp_path: Path) -> None:
    content = yaml.safe_load((CONF / "cp" / f"{preset}.yaml").read_text())
    axes, steps = renaming(content["axes"], 1), renaming(content["order"], 2)
    name = renaming([preset], 3)[preset]
    (tmp_path / "cp").mkdir()
    (tmp_path / "cp" / f"{name}.yaml").write_text(yaml.safe_dump(renamed(content, axes, steps, name), sort_keys=False))

    shape = fitting(preset, small(heads=6, kv_heads=3, sequence=31, batch=2, v_head_dim=4))
    plan, other = (
        plan_of(preset, shape=shape, degree=degree),
        plan_of(name, shape=shape, degree=degree, config_dir=tmp_path),
    )
    assert not {name, *axes.values(), *steps.values()} & set(re.findall(r"\w+", explain.text(plan)))

    assert_close(computed(other), computed(plan), 1e-12)
    assert other.costs == plan.costs  # bytes, links, collectives, pairs and buffers
    back = {new: old for words in (axes, steps, {preset: name}) for old, new in words.items()}
    found, wanted = explain.data(other), explain.data(plan)
    assert found.pop("fingerprint") != wanted.pop("fingerprint")  # ranks must not mix them up
    assert mapped_back(found, back) == wanted
    assert mapped_back(explain.text(other), back) == explain.text(plan)


# ------------------------------------------------------------------ own compositions
OWN = """
defaults:
  - /layout@layout: zigzag
  - /collective@steps.split: all_to_all
  - /collective@steps.fetch: all_gather
  - /attention@steps.look: dense
  - /collective@steps.home: undo
  - _self_
name: own
mesh: {far: 3, near: 2}
axes: [far, near]
layout: {over: [far]}
order: [split, fetch, look, home]
steps:
  split: {axes: [near], tensors: [q, k, v], split: heads, concat: sequence}
  fetch: {axes: [far], tensors: [k, v], only: visible}
  home: {of: split, tensors: [out]}
"""


@pytest.mark.quick
def test_own_composition_is_found_and_right(tmp_path: Path) -> None:
    (tmp_path / "cp").mkdir()
    (tmp_path / "cp" / "own.yaml").write_text(OWN)
    assert "own" in presets(tmp_path) and "own" not in presets()
    plan = plan_of("own", shape=small(heads=6, kv_heads=2, sequence=31, batch=2), config_dir=tmp_path)
    assert plan.degree == 6
    assert_equals_reference(plan, CAUSAL)


def test_own_composition_may_replace_a_shipped_one_by_name(tmp_path: Path) -> None:
    (tmp_path / "cp").mkdir()
    (tmp_path / "cp" / "own.yaml").write_text(OWN)
    plan = plan_of("own", "cp.mesh.far=1", shape=small(sequence=8), config_dir=tmp_path)
    assert plan.degree == 2
    assert_equals_reference(plan, CAUSAL)


# ------------------------------------------------------------------ overrides, against numbers worked out by hand
# 2 ranks, 16 tokens, 4 heads of dim 8 in float32: a token of one tensor is 4 x 8 x 4 = 128 B, a rank holds 8 tokens
TOKEN = 128


def sent(plan: Plan, way: int = 0) -> list[list[int]]:
    """Bytes that each step sends, [steps][ranks]."""
    return [list(c.bytes_sent[way]) for c in plan.costs]


def pairs(plan: Plan) -> list[int]:
    return [sum(c.pairs[r] for c in plan.costs) for r in range(plan.degree)]


@pytest.mark.parametrize(
    ("layout", "work", "held"),
    [
        ("contiguous", [4 * 36, 4 * 100], [[*range(8)], [*range(8, 16)]]),
        ("zigzag", [4 * 68, 4 * 68], [[0, 1, 2, 3, 12, 13, 14, 15], [*range(4, 12)]]),
        ("striped", [4 * 64, 4 * 72], [[*range(0, 16, 2)], [*range(1, 16, 2)]]),
    ],
)
def test_layout_override_changes_positions_and_work(layout: str, work: list[int], held: list[list[int]]) -> None:
    plan = plan_of("allgather_kv", f"layout@cp.layout={layout}")
    assert [list(s) for s in plan.entry.sequence] == held
    assert pairs(plan) == work
    assert sent(plan) == [[2 * 8 * TOKEN] * 2, [0, 0]]
    assert explain.data(plan)["layout"] == layout
    assert_equals_reference(plan, CAUSAL)


def test_visible_override_sends_only_what_queries_see() -> None:
    plan = plan_of("allgather_kv", "cp.steps.gather.only=visible")
    assert sent(plan) == [[2 * 8 * TOKEN, 0], [0, 0]]  # rank 1 sees the keys of rank 0, and rank 0 none of rank 1's
    assert sent(plan, 1) == [[0, 2 * 8 * TOKEN], [0, 0]]
    assert_equals_reference(plan, CAUSAL)


def test_degree_override_changes_bytes() -> None:
    # 4 ranks hold 4 tokens each and keep one of 4 heads: 3/4 of q, k and v leave, and 3/4 of out comes back
    plan = plan_of("ulysses", "cp.degree=4")
    assert sent(plan) == [[3 * 3 * 4 * TOKEN // 4] * 4, [0] * 4, [3 * 4 * TOKEN // 4] * 4]
    assert plan_of("ulysses", "cp.mesh.ulysses=4").costs == plan.costs


def test_replaced_collective_changes_the_strategy() -> None:
    gather = plan_of("allgather_kv")
    exchange = plan_of(
        "allgather_kv",
        "collective@cp.steps.gather=all_to_all",
        "~cp.steps.gather.dim",
        "~cp.steps.gather.only",
        "cp.steps.gather.split=heads",
        "cp.steps.gather.concat=sequence",
        "cp.steps.gather.tensors=[q,k,v]",
        "+collective@cp.steps.back=undo",
        "cp.steps.back.of=gather",
        "cp.steps.back.tensors=[out]",
        "cp.order=[gather,attend,back]",
    )
    assert sent(gather) == [[2 * 8 * TOKEN] * 2, [0, 0]]
    assert sent(exchange) == [[3 * 4 * TOKEN] * 2, [0, 0], [4 * TOKEN] * 2]
    assert [c.collectives for c in exchange.costs] == [(1, 1), (0, 0), (1, 1)]
    assert exchange.costs == plan_of("ulysses").costs
    assert_equals_reference(exchange, CAUSAL)


def test_undo_replaced_by_the_exchange_that_it_is_costs_the_same() -> None:
    plan = plan_of(
        "ulysses",
        "collective@cp.steps.to_sequence=all_to_all",
        "~cp.steps.to_sequence.of",
        "cp.steps.to_sequence.axes=[ulysses]",
        "cp.steps.to_sequence.split=sequence",
        "cp.steps.to_sequence.concat=heads",
    )
    assert plan.costs == plan_of("ulysses").costs
    assert_equals_reference(plan, CAUSAL)


@pytest.mark.quick
def test_added_step_adds_its_bytes() -> None:
    plan = plan_of(
        "allgather_kv",
        "+collective@cp.steps.deal=reorder",
        "cp.steps.deal.to=striped",
        "cp.steps.deal.tensors=[q,k,v]",
        "+collective@cp.steps.back=undo",
        "cp.steps.back.of=deal",
        "cp.steps.back.tensors=[out]",
        "cp.order=[deal,gather,attend,back]",
    )
    # from halves to stripes: each rank keeps every second one of its 8 tokens
    assert sent(plan) == [[3 * 4 * TOKEN] * 2, [2 * 8 * TOKEN] * 2, [0, 0], [4 * TOKEN] * 2]
    assert pairs(plan) == [4 * 64, 4 * 72]
    assert [list(s) for s in plan.entry.sequence] == [[*range(8)], [*range(8, 16)]]
    assert_equals_reference(plan, CAUSAL)
