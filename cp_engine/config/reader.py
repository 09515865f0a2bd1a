"""Reader: names, types and values of a composition, field by field; it collects problems instead of raising."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from cp_engine.algebra.layout import Mesh
from cp_engine.config.shipped import RENAMED
from cp_engine.errors import SHOWN, Problem, calling, letters, named, shown, suggest
from cp_engine.plan.fields import Place, kind_of
from cp_engine.plan.ir import Step
from cp_engine.plan.token_layout import TokenLayout
from cp_engine.primitives.table import installed

P = TypeVar("P", TokenLayout, Step)

MOST_RANKS = 2048
"""A plan has tables of ranks x ranks."""
MOST_STEPS, MOST_AXES = 64, 16


class Reader:
    """Collects problems while reading."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.table = installed()

    def add(self, key: str, what: str, details: Sequence[tuple[str, str]] = (), tries: Sequence[str] = ()) -> None:
        self.problems.append(Problem(key=key, what=what, details=tuple(details), tries=tuple(tries)))

    def unknown(self, where: str, node: Mapping[str, object], allowed: Sequence[str]) -> None:
        for key in node:
            if new := RENAMED.get(f"{where}.{key}"):
                self.add(
                    f"{where}.{key}", f"is named {new} now", tries=(f"'~{where}.{key}' ++{new}={shown(node[key])}",)
                )
            elif key not in allowed:
                near = suggest(key, allowed) if len(self.problems) < SHOWN else None
                right = f" ++{where}.{near}={shown(node[key])}" if near else ""
                tries = (f"'~{where}.{key}'{right}",)
                details = (("allowed", ", ".join(allowed)), *letters(key))
                self.add(f"{where}.{key}", "unknown key", details=details, tries=tries)

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value or not value.isprintable():
            self.add(key, f"must be a name, not {value!r}")
            return ""
        return value

    def one_of(self, key: str, value: object, allowed: Sequence[object]) -> bool:
        if any(type(value) is type(a) and value == a for a in allowed):  # 1 == 1.0 == True, and only one is meant
            return True
        near = suggest(str(value), [str(a) for a in allowed]) or allowed[0]
        self.add(
            key,
            f"{value!r} is not a choice",
            details=(("allowed", ", ".join(map(str, allowed))),),
            tries=(f"{key}={near}",),
        )
        return False

    def names(self, key: str, value: object) -> tuple[str, ...] | None:
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        self.add(
            key,
            f"must be a list of names, not {value!r}",
            tries=(f"'{key}=[{value}]'",) if isinstance(value, str) else (),
        )
        return None

    # -------------------------------------------------------------- mesh
    def mesh(self, cp: Mapping[str, object], world_degree: int | None) -> Mesh:
        sizes, axes = cp.get("mesh"), self.names("cp.axes", cp.get("axes"))
        if not isinstance(sizes, Mapping):
            named: tuple[str, ...] = axes or ("cp",)
            is_degree = isinstance(sizes, int) and len(named) == 1
            whole = f"'~cp.mesh' '+cp.mesh={{{', '.join(f'{a}: 2' for a in named)}}}'"
            fix = f"cp.degree={sizes}" if is_degree else whole
            self.add("cp.mesh", f"must map each axis to its size, not {sizes!r}", tries=(fix,))
            return Mesh(axes=named, sizes=(1,) * len(named))
        for axis, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                self.add(
                    f"cp.mesh.{axis}", f"must be a whole number of ranks, not {size!r}", tries=(f"cp.mesh.{axis}=2",)
                )
        if len(sizes) > MOST_AXES:
            self.add("cp.mesh", f"has {len(sizes):,} axes, and a mesh has at most {MOST_AXES}")
        elif axes is not None and sorted(axes) != sorted(sizes):
            self.add(
                "cp.axes",
                f"[{', '.join(axes)}] is not an order of the mesh axes [{', '.join(sizes)}]",
                details=(("rule", "axes lists every axis of mesh once, major first"),),
                tries=(f"'cp.axes=[{','.join(sizes)}]'",),
            )
        if self.problems or axes is None:
            return Mesh(axes=tuple(sizes), sizes=(1,) * len(sizes))
        mesh, given = Mesh(axes=axes, sizes=tuple(sizes[a] for a in axes)), cp.get("degree")
        if isinstance(given, int) and world_degree is not None and given != world_degree:
            tries = (f"cp.degree={world_degree}", "cp.degree=null")
            self.add("cp.degree", f"is {given}, and the device mesh has {world_degree} ranks", tries=tries)
            return mesh
        for key, degree in (("cp.degree", cp.get("degree")), ("the device mesh", world_degree)):
            mesh = self._resized(mesh, key, degree)
        if mesh.degree > MOST_RANKS:
            key = "cp.mesh" if given is None else "cp.degree"
            self.add(key, f"asks for {mesh.degree} ranks, and a plan is for at most {MOST_RANKS}")
        return mesh

    def _resized(self, mesh: Mesh, key: str, degree: object) -> Mesh:
        if degree is None:
            return mesh
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            self.add(key, f"must be a whole number of ranks, not {degree!r}")
        elif len(mesh.axes) == 1:
            return Mesh(axes=mesh.axes, sizes=(degree,))
        elif degree != mesh.degree:
            product = " x ".join(f"{a}={s}" for a, s in zip(mesh.axes, mesh.sizes, strict=True)) or "one rank"
            self.add(
                key,
                f"asks for {degree} ranks, and the mesh has {mesh.degree} ({product})",
                details=(
                    (
                        "rule",
                        "with one axis the degree sets it; with several the sizes are given and must multiply to it",
                    ),
                ),
                tries=("cp.degree=null", *resizing(mesh, degree)),
            )
        return mesh

    # -------------------------------------------------------------- layout and steps
    def layout(self, cp: Mapping[str, object], mesh: Mesh) -> TokenLayout | None:
        return self.layout_of("cp.layout", cp.get("layout"), mesh)

    def layout_of(self, key: str, node: object, mesh: Mesh) -> TokenLayout | None:
        orders = {k: c for k, c in self.table.items() if issubclass(c, TokenLayout)}
        whole = node
        if isinstance(node, str):
            node = {"kind": node}
        if not isinstance(node, Mapping):
            self.add(key, f"must be a layout, not {node!r}", tries=(f"+layout@{key}={next(iter(orders))}",))
            return None
        kind = node.get("kind")
        if not isinstance(kind, str) or kind not in orders:
            near = suggest(str(kind), orders) or next(iter(orders))
            field = f"{key}.kind" if isinstance(whole, Mapping) else key
            self.add(field, f"{kind!r} is not a layout", (("allowed", ", ".join(orders)),), (f"{field}={near}",))
            return None
        return self.built(key, orders[kind], {k: v for k, v in node.items() if k != "kind"}, mesh, ())

    def steps(self, cp: Mapping[str, object], mesh: Mesh) -> tuple[Step, ...]:
        nodes, order = cp["steps"], self.names("cp.order", cp["order"])
        if not isinstance(nodes, Mapping):
            self.add("cp.steps", f"must map each step's name to its fields, not {nodes!r}")
            return ()
        if len(nodes) > MOST_STEPS:
            self.add("cp.steps", f"has {len(nodes):,} steps, and a composition has at most {MOST_STEPS}")
            return ()
        self.order(order, list(nodes))
        built = {}
        kinds = {k: c for k, c in self.table.items() if issubclass(c, Step)}
        for name, node in nodes.items():
            key = f"cp.steps.{name}"
            if not isinstance(node, Mapping):
                self.add(key, f"must be a step with a kind, not {node!r}")
                continue
            kind = node.get("kind")
            if not isinstance(kind, str) or kind not in kinds:
                near = suggest(str(kind), kinds)
                self.add(
                    f"{key}.kind",
                    f"{kind!r} is not a step",
                    (("allowed", ", ".join(kinds)),),
                    (f"{key}.kind={near}",) if near else (),
                )
                continue
            is_ordered = order is not None and sorted(order) == sorted(nodes)
            earlier = [n for n in (order if is_ordered and order else nodes) if n != name]
            rest = {k: v for k, v in node.items() if k != "kind"}
            step = self.built(key, kinds[kind], rest, mesh, earlier, {"name": name})
            if step is not None:
                built[name] = step
        return tuple(built[n] for n in order or () if n in built)

    def order(self, order: Sequence[str] | None, steps: Sequence[str]) -> None:
        """Every step once, and nothing else; each problem comes with a list that can be pasted."""
        if order is None:
            return
        missing = [name for name in steps if name not in order]
        meant = {n: suggest(n, missing) or suggest(n, steps) for n in order if n not in steps}
        fixed = list(dict.fromkeys(m for n in order if (m := meant.get(n, n)) is not None))
        pasted = f"'cp.order=[{','.join(fixed)}]'"
        for i, name in enumerate(order):
            if name in order[:i]:
                self.add(f"cp.order[{i}]", f"{name!r} is there twice", (("rule", "every step runs once"),), (pasted,))
            elif name in meant:
                self.add(
                    f"cp.order[{i}]", f"{name!r} is not one of the steps", (("allowed", ", ".join(steps)),), (pasted,)
                )
        for name in missing:
            if name not in meant.values():  # else the misspelt word says it already
                tries = (f"'cp.order=[{','.join([*fixed, name])}]'", f"'~cp.steps.{name}'")
                self.add(f"cp.steps.{name}", "is not in cp.order", (("rule", "every step runs once"),), tries)

    def built(
        self,
        key: str,
        kind: type[P],
        node: Mapping[str, object],
        mesh: Mesh,
        steps: Sequence[str],
        given: Mapping[str, str] | None = None,
    ) -> P | None:
        """A primitive from its fields, which its dataclass declares; `given` ones are not the configuration's."""
        given = given or {}
        declared = {f.name: f for f in fields(kind) if f.name not in given}
        types = get_type_hints(kind)  # a module may write its annotations as strings
        count = len(self.problems)
        self.unknown(key, node, list(declared))
        values: dict[str, Any] = {**given}  # each checked against its field's declaration
        for name, f in declared.items():
            of, at = kind_of(types[name], f), Place(key=f"{key}.{name}", mesh=mesh, steps=steps, default=f.default)
            if name in node and node[name] != "???":
                values[name] = of.read(self, node[name], at)
            elif f.default is MISSING:
                self.add(at.key, f"has no value, and {kind.kind} needs one", (("allowed", of.allowed(at)),))
        if len(self.problems) != count:
            return None
        with named(key), calling(kind, "__init__"):
            return kind(**values)


def resizing(mesh: Mesh, degree: int) -> list[str]:
    """Lines that would bring a mesh to a degree: the one axis, or any of several; none where there is none."""
    if len(mesh.axes) == 1:
        return [f"cp.degree={degree}"]
    tries = []
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        wanted, rest = divmod(degree * size, mesh.degree)
        tries += [f"cp.mesh.{axis}={wanted}"] if wanted and not rest else []
    return tries
