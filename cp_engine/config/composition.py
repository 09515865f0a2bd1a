"""Schema: a composed configuration becomes a typed Composition, and with a shape and a mask a proved Plan.

Every name, type and value is checked here, and all problems are reported together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from cp_engine.algebra.mask import Mask
from cp_engine.algebra.mask_kinds import is_from_call, mask_of
from cp_engine.algebra.shape import BYTES, Shape
from cp_engine.config.reader import Reader
from cp_engine.errors import ConfigError, Problem
from cp_engine.plan.fields import KIND, Axes
from cp_engine.plan.ir import Composition, Plan, Step, used_axes
from cp_engine.plan.mask_per_call import require_any_mask
from cp_engine.plan.prove import prove

RECOMPUTE = ("all", "skip_attention")
"""What activation checkpointing may repeat."""

MOST = {"batch": 2**20, "sequence": 2**28, "topk": 2**28}
MOST_HEADS = 2**16
"""Of a size, and of all others: what a plan is made of in seconds."""
MOST_BYTES = 2**50
"""Of the largest tensor of a call; bytes are summed as numbers of 64 bits."""
MOST_COUNTED = 2**20
"""Parts of a mask x ranks: pairs are counted for each."""

KEYS = ("name", "mesh", "axes", "order", "steps", "layout", "degree", "head_groups", "recompute")


def plan_from_config(
    cp: Mapping[str, object],
    *,
    shape: Shape,
    mask: Mapping[str, object] | str | Mask,
    world_degree: int | None = None,
) -> Plan:
    """Reads, checks and proves a composition.

    Args:
        cp: the composed `cp` node, as plain data.
        shape: the attention call, in global sizes.
        mask: kind, or a mapping with `kind` and its fields.
        world_degree: number of ranks there are, where that is known; None takes what the mesh says.

    Returns:
        The plan.

    Raises:
        CPError: all problems of the first stage that fails: names and types, then layouts and coverage.
    """
    composition = read(cp, world_degree)
    check_shape(shape)
    positions = mask_of(mask, shape.sequence)
    if len(positions.bands) * composition.mesh.degree > MOST_COUNTED:
        what = f"has {len(positions.bands):,} parts and the composition {composition.mesh.degree:,} ranks"
        rule = ("rule", f"parts x ranks are at most {MOST_COUNTED:,}: visible pairs are counted for each")
        raise ConfigError([Problem(key="mask", what=what, details=(rule,))])
    plan = prove(composition, shape, positions)
    if isinstance(mask, Mask) or not is_from_call(mask):
        return plan
    require_any_mask(plan)
    return replace(plan, is_mask_from_call=True)


def degree_of(cp: Mapping[str, object]) -> int:
    """The number of ranks of a composition, `cp.degree` applied.

    Raises:
        ConfigError: the composition cannot be read.
    """
    return read(cp, None).mesh.degree


def read(cp: Mapping[str, object], world_degree: int | None) -> Composition:
    """The typed composition; raises ConfigError with every problem."""
    unnamed = list(_unnamed(cp, "cp"))
    if unnamed:
        raise ConfigError(unnamed)
    if "steps" not in cp or "order" not in cp:
        what = "no composition is chosen" if "steps" not in cp else "the list of its steps is missing"
        raise ConfigError(
            [
                Problem(
                    key="cp",
                    what=what,
                    details=(("rule", "a preset, or mesh, axes, order and steps"),),
                    tries=("cp=none",),
                )
            ]
        )
    reader = Reader()
    reader.unknown("cp", cp, KEYS)
    name = reader.text("cp.name", cp.get("name"))
    mesh = reader.mesh(cp, world_degree)
    steps = reader.steps(cp, mesh)
    layout = reader.layout(cp, mesh)
    reader.one_of("cp.recompute", cp.get("recompute", "all"), RECOMPUTE)
    head_groups = cp.get("head_groups", 1)
    if not isinstance(head_groups, int) or isinstance(head_groups, bool) or head_groups < 1:
        reader.add(
            "cp.head_groups", f"must be a number of head groups, not {head_groups!r}", tries=("cp.head_groups=1",)
        )
    if not reader.problems and layout is not None:
        used = {a for s in steps for a in used_axes(s)} | set(layout.over or ())
        for axis in mesh.axes:
            if axis not in used:
                others = ",".join(a for a in mesh.axes if a != axis)
                reader.add(
                    f"cp.mesh.{axis}",
                    "no step and no layout uses this axis",
                    details=(("rule", "every axis splits something"), ("used", ", ".join(sorted(used)) or "none")),
                    tries=(
                        *(f"'{key}=[{axis}]'" for key in _open_axes(steps)),
                        *((f"'~cp.mesh.{axis}' 'cp.axes=[{others}]'",) if others else ()),
                    ),
                )
    if reader.problems or layout is None:
        raise ConfigError(reader.problems, f"cp={cp.get('name') or 'composition'}")
    recompute = str(cp.get("recompute", "all"))
    assert isinstance(head_groups, int)
    return Composition(name=name, mesh=mesh, layout=layout, steps=steps, recompute=recompute, head_groups=head_groups)


def _open_axes(steps: Sequence[Step]) -> Iterator[str]:
    """Keys of steps that may name axes, and name none."""
    for step in steps:
        named = [f.name for f in fields(step) if isinstance(f.metadata.get(KIND), Axes)]
        yield from (f"cp.steps.{step.name}.{name}" for name in named if getattr(step, name) == ())


def _unnamed(node: Mapping[str, object], where: str) -> Iterator[Problem]:
    """Keys that YAML allows and that name nothing, such as `1: 2`."""
    for key, value in node.items():
        if not isinstance(key, str) or not key.isprintable():
            yield Problem(key=f"{where}.{key}", what=f"must be a name, not {key!r}")
        elif isinstance(value, Mapping):
            yield from _unnamed(value, f"{where}.{key}")


def check_shape(shape: Shape) -> None:
    """Refuses sizes that no attention has; raises ConfigError with every problem."""
    reader = Reader()
    for key in ("batch", "sequence", "heads", "kv_heads", "head_dim", "v_head_dim"):
        value = getattr(shape, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            reader.add(f"shape.{key}", f"must be a whole number of at least 1, not {value!r}")
    for key in ("latent_dim", "rope_dim", "index_heads", "index_dim", "topk"):
        value = getattr(shape, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            reader.add(f"shape.{key}", f"must be a whole number, 0 or more, not {value!r}")
    if not reader.problems:
        _check_largest(shape, reader)
    if not reader.problems and shape.rope_dim > shape.head_dim:
        reader.add("shape.rope_dim", f"is {shape.rope_dim}, and a whole key has head_dim {shape.head_dim}")
    reader.one_of("shape.dtype", shape.dtype, tuple(BYTES))
    if not reader.problems and shape.heads % shape.kv_heads:
        legal = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        reader.add(
            "shape.kv_heads",
            f"{shape.kv_heads} kv heads do not divide {shape.heads} heads",
            details=(("allowed", ", ".join(map(str, legal))), ("rule", "each kv head serves equally many query heads")),
        )
    if reader.problems:
        raise ConfigError(reader.problems)


def _check_largest(shape: Shape, reader: Reader) -> None:
    """Refuses sizes that nothing has, and that would take for ever to plan."""
    for key in (f.name for f in fields(shape) if f.name not in ("dtype", "head_ranks")):
        value, most = getattr(shape, key), MOST.get(key, MOST_HEADS)
        if value > most:
            reader.add(f"shape.{key}", f"is {value}, and a plan is for at most {most:,}")
    widths = (shape.heads * shape.head_dim, shape.heads * shape.v_head_dim, shape.index_heads * shape.index_dim)
    widest = max(*widths, shape.latent_dim, shape.selected)
    size = shape.batch * shape.sequence * widest * max(BYTES.values())
    if not reader.problems and size > MOST_BYTES:
        what = f"makes a tensor of {size:,} bytes in float64, and a plan is for at most {MOST_BYTES:,}"
        sizes = (("sizes", f"batch {shape.batch}, sequence {shape.sequence}, {widest} numbers for each token"),)
        reader.add("shape", what, sizes)
