"""Which of torchtitan's files read a key of its JobConfig, found in their syntax trees."""

import ast
import dataclasses
from functools import cache
from importlib.util import find_spec
from pathlib import Path

OTHER_PROGRAMS = (  # no run of this project calls these: flux and gpt_oss are no models of the shape table, and are refused
    "config/manager.py",
    "experiments/",
    "components/ft/",
    "models/flux/",
    "models/gpt_oss/",
)


def section_classes(node: object, prefix: str = "") -> dict[str, str]:
    """The name of the dataclass of every section of a JobConfig."""
    assert dataclasses.is_dataclass(node) and not isinstance(node, type)
    found = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            found[prefix + field.name] = type(value).__name__
            found |= section_classes(value, f"{prefix}{field.name}.")
    return found


def readers(keys: tuple[str, ...], classes: dict[str, str]) -> dict[str, list[str]]:
    """The files that read each key.

    Args:
        keys: dotted keys of the JobConfig.
        classes: dataclass of every section.

    Returns:
        By key, paths inside torchtitan's package, sorted; files of other programs left out.
    """
    found: dict[str, list[str]] = {key: [] for key in keys}
    for path, tree in sources():
        for section in classes:
            leaves = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
            for leaf in read_in(tree, section, classes[section]) & {*leaves, "*"}:
                for key in leaves.values() if leaf == "*" else [leaves[leaf]]:
                    found[key] += [path] if path not in found[key] else []
    return found


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """The files of the installed torchtitan that a run of this project may call."""
    spec = find_spec("torchtitan")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return tuple((p, ast.parse((folder / p).read_text())) for p in paths if not p.startswith(OTHER_PROGRAMS))


def read_in(tree: ast.Module, section: str, class_name: str) -> set[str]:
    """The names that a file reads of a section; `*` for all of them at once, by `asdict`."""
    facts = facts_of(tree)
    names = {name for name, kind in facts.parameters if (class_name, kind) in facts.imported}
    names |= {target for target, value in facts.assigned if is_section(value, section, set())}
    found = {name for owner, name in facts.attributes if is_section(owner, section, names)}
    return found | {"*" for value in facts.whole if is_section(value, section, names)}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a file does with names, each expression as its text.

    Args:
        imported: (name, name here).
        parameters: (name, annotation).
        assigned: (target, value).
        attributes: (owner, name) of each attribute that is read.
        whole: arguments of `asdict`.
    """

    imported: set[tuple[str, str]]
    parameters: set[tuple[str, str]]
    assigned: set[tuple[str, str]]
    attributes: set[tuple[str, str]]
    whole: set[str]


@cache
def facts_of(tree: ast.Module) -> Facts:
    """One walk over a file."""
    facts = Facts(set(), set(), set(), set(), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            facts.imported.update((alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            facts.parameters.add((node.arg, ast.unparse(node.annotation)))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            facts.assigned.update((ast.unparse(target), ast.unparse(node.value)) for target in targets)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            facts.attributes.add((ast.unparse(node.value), node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("asdict"):
            facts.whole.update(map(ast.unparse, node.args))
    return facts


def is_section(text: str, section: str, names: set[str]) -> bool:
    """Whether an expression is the section: `<config>.section`, or a name that holds it."""
    return text in names or text.endswith((f"config.{section}", f"self.{section}"))
