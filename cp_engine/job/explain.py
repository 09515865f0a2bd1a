"""Explain: a plan as data, and as a page of text for a person. Both come from the plan's own objects."""

from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO

from rich.console import Console
from rich.table import Table

from cp_engine.algebra.index_set import whole
from cp_engine.algebra.layout import Layout, cut_by, image
from cp_engine.algebra.shape import Shape
from cp_engine.algebra.tensors import INDEX, heads_per_head, shared, width
from cp_engine.plan.cost import max_over_mean, totals
from cp_engine.plan.facts import TRACED_RANKS, in_units, span
from cp_engine.plan.ir import Plan, PlannedStep
from cp_engine.primitives.table import LAYOUTS
from cp_engine.runtime.memory import peak


def data(plan: Plan, device: str = "cpu") -> dict[str, object]:
    """Everything that `text` shows, as plain data.

    Args:
        plan: what to explain.
        device: device type for which kernels are chosen.

    Returns:
        Mappings, lists, strings and numbers; bytes are per rank and call, largest rank first where one number is given.
    """
    shape, mesh, total = plan.shape, plan.mesh, totals(plan)
    ways = ("forward", "backward")
    return {
        "name": plan.name,
        "ranks": plan.degree,
        "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)),
        "mask": plan.mask.kind,
        "layout": plan.tokens,
        "shape": {k: getattr(shape, k) for k in shape.__dataclass_fields__},
        "entry": _layout(plan.entry, plan, plan.inputs[:2]),
        "head_groups": plan.head_groups,
        "losses": list(plan.losses),
        "steps": [_step(s, plan, i, device) for i, s in enumerate(plan.steps)],
        "bytes_sent": {**dict(zip(ways, map(max, total.sent), strict=True)), "per_rank": [list(x) for x in total.sent]},
        "link_bytes": dict(zip(ways, total.busiest_link, strict=True)),
        "collectives": dict(zip(ways, total.collectives, strict=True)),
        "score_pairs": _work(total.pairs),
        "index_scores": _work(total.index_pairs) if any(total.index_pairs) else None,
        "peak_bytes": None if plan.degree > TRACED_RANKS else asdict(peak(plan, device)),
        "idle_ranks": list(total.idle),
        "fingerprint": plan.fingerprint,
    }


def _work(per_rank: tuple[int, ...]) -> dict[str, object]:
    return {"per_rank": list(per_rank), "max_over_mean": max_over_mean(per_rank)}


def _step(planned: PlannedStep, plan: Plan, index: int, device: str) -> dict[str, object]:
    step, cost = planned.step, plan.costs[index]
    moved = step.moved
    out: dict[str, object] = {
        "step": step.name,
        "kind": step.kind,
        "tensors": list(moved),
        "after": {t: _layout(planned.layout_after(t), plan, (t,)) for t in moved},
        "bytes_sent": {"forward": max(cost.bytes_sent[0]), "backward": max(cost.bytes_sent[1])},
        "collectives": {"forward": cost.collectives[0], "backward": cost.collectives[1]},
        "buffer_bytes": max(cost.buffer_bytes),
    }
    for fact in step.facts(planned, plan, cost, device):
        out |= fact.data
    return out


def _layout(layout: Layout, plan: Plan, tensors: Sequence[str]) -> dict[str, object]:
    shape = plan.part
    return {
        "cut": {d: list(cut_by(plan.mesh, layout.of(d))) for d in ("sequence", "heads")},
        "local": {
            t: [
                shape.batch,
                span([image(h, heads_per_head(shape, t)).count for h in layout.heads]),
                span([s.count for s in layout.sequence]),
                width(shape, t),
            ]
            for t in tensors
        },
    }


# ------------------------------------------------------------------ text
def text(plan: Plan, device: str = "cpu") -> str:
    """A plan for people.

    Args:
        plan: what to show.
        device: device type for which kernels are chosen.

    Returns:
        Some 15 lines of plain text.
    """
    shape = plan.shape
    mesh = " x ".join(f"{a}={s}" for a, s in zip(plan.mesh.axes, plan.mesh.sizes, strict=True))
    ranks = f"{plan.degree} rank{'s' * (plan.degree != 1)}"
    heads = f"heads {shape.heads}" + (f"|{shape.kv_heads}" if shape.kv_heads != shape.heads else "")
    dims = f"head_dim {shape.head_dim}" + (f"|{shape.v_head_dim}" if shape.v_head_dim != shape.head_dim else "")
    has_latent = bool(shared(plan.inputs))
    latent = f", latent {shape.latent_dim}, rope {shape.rope_dim}" if has_latent else ""
    lines = [
        f"{plan.name}   {ranks}{f' ({mesh})' if mesh else ''}   tokens {plan.tokens}   mask {plan.mask.kind}",
        f"one call: batch {shape.batch}, sequence {shape.sequence}, {heads}, {dims}{latent}, {shape.dtype}",
        *([_indexer(shape)] if "q_index" in plan.inputs else []),
        "",
        _table(plan),
        "",
    ]
    for label, value in _facts(plan, device):
        lines.append(f"{label:<10} {value}")
    return "\n".join(lines)


def _indexer(shape: Shape) -> str:
    return f"indexer: {shape.index_heads} heads, head_dim {shape.index_dim}; it selects {shape.selected} keys for each query"


def _table(plan: Plan) -> str:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    shape = "local shape" if plan.head_groups == 1 else "local shape, one group"
    for name in ("step", "layout after", shape, "sent, forward", "backward"):
        table.add_column(name, no_wrap=True, overflow="ignore")
    entry = plan.entry
    index = [t for t in plan.inputs if t in INDEX]
    kinds = [[t for t in plan.inputs if t not in index]]
    if index:  # too many for one line
        kinds = [["q"], [t for t in kinds[0] if t != "q"], index]
    for names in kinds:
        is_first = names is kinds[0]
        cuts = _cuts(entry, plan) if is_first else "as q"
        shown = (f"{','.join(names)}: {cuts}", _shapes(entry, plan, names))
        table.add_row("(input)" if is_first else "", *shown, "", "")
    for planned, cost in zip(plan.steps, plan.costs, strict=True):
        moved = planned.step.moved
        after = {_cuts(planned.layout_after(t), plan): None for t in moved}
        table.add_row(
            f"{planned.step.name}",
            f"{','.join(moved)}: {'; '.join(after)}"
            if moved
            else f"{','.join(planned.step.losses)}: this rank's share",
            _shapes(planned.layout_after(moved[0]), plan, moved) if moved else "",
            *(
                in_units(max(cost.bytes_sent[way]) * plan.head_groups) if cost.collectives[way] else "-"
                for way in (0, 1)
            ),
        )
    console = Console(file=StringIO(), width=1000, color_system=None)  # never cut; a terminal may wrap
    console.print(table)
    file = console.file
    assert isinstance(file, StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))


def _cuts(layout: Layout, plan: Plan) -> str:
    """Which axes cut which dim, such as `seq/cp (zigzag) heads`."""
    parts = []
    for dim, short in (("sequence", "seq"), ("heads", "heads")):
        axes = cut_by(plan.mesh, layout.of(dim))
        order = _order(layout, plan) if axes and dim == "sequence" else "contiguous"
        order = "" if order == "contiguous" else f" ({order})"
        parts.append(short + (f"/{','.join(axes)}" if axes else "") + order)
    return " ".join(parts)


def _order(layout: Layout, plan: Plan) -> str:
    """How the tokens of a layout are dealt, in the words of the layout group."""
    if layout.sequence == plan.entry.sequence:
        return plan.tokens.split()[0]  # over which axes, the first line says
    axes = cut_by(plan.mesh, layout.sequence)
    for kind, order in LAYOUTS.items():
        if order().divide(plan.mesh, [whole(plan.shape.sequence)] * plan.degree, axes, plan.mask) == layout.sequence:
            return kind
    is_dealt = sum(layout.sequence[r].count for r in plan.mesh.groups(axes)[0]) <= plan.shape.sequence
    return "mixed" if is_dealt else "needed"  # ranks hold the same positions: those that their queries see


def _shapes(layout: Layout, plan: Plan, tensors: Sequence[str]) -> str:
    shape = plan.part
    heads = list(
        dict.fromkeys(str(span([image(h, heads_per_head(shape, t)).count for h in layout.heads])) for t in tensors)
    )
    each = [str(width(shape, t)) for t in tensors]
    widths = "|".join(each if shared(tensors) else dict.fromkeys(each))
    return f"[{shape.batch}, {'|'.join(heads)}, {span([s.count for s in layout.sequence])}, {widths}]"


def _facts(plan: Plan, device: str) -> list[tuple[str, str]]:
    said = [
        (planned.step.name, fact)
        for planned, cost in zip(plan.steps, plan.costs, strict=True)
        for fact in planned.step.facts(planned, plan, cost, device)
        if fact.label
    ]
    facts = [(fact.label, f"{step}: {fact.text}") for step, fact in sorted(said, key=lambda row: row[1].is_traffic)]
    if plan.head_groups > 1:
        group = f"{plan.part.heads}|{plan.part.kv_heads}" if plan.part.group_size > 1 else f"{plan.part.heads}"
        facts.append(("groups", f"{plan.head_groups} of {group} heads: one computes while others travel"))
    total = totals(plan)
    if any(cost.collectives[0] for cost in plan.costs):
        sent, links = [in_units(max(x)) for x in total.sent], [in_units(x) for x in total.busiest_link]
        busiest = f"busiest link {links[0]}, {links[1]}"
        facts.append(("sent", f"{sent[0]} forward, {sent[1]} backward per rank; {busiest}"))
    for name, work in (("score pairs", total.pairs), ("index scores", total.index_pairs)):
        if any(work) or work is total.pairs:
            facts.append(("work", f"{sum(work):,} {name}; max/mean over ranks {_balance(work)}"))
    if plan.degree <= TRACED_RANKS:
        held = peak(plan, device)
        sizes = (
            f"{in_units(held.forward)} forward, {in_units(held.backward)} backward, {in_units(held.kept)} kept between"
        )
        facts.append(("memory", f"{sizes} them, beside the call's own tensors"))
    if total.idle:
        shown = ", ".join(map(str, total.idle[:8]))
        shown += f" and {len(total.idle) - 8} more" if len(total.idle) > 8 else ""
        facts.append(("idle", f"rank {shown}: no head or no token is left for them; they only exchange"))
    proved = "every visible (query, key) pair is computed once"
    if "topk" in {t for s in plan.steps for t in s.step.makes}:
        proved = "any visible key may be selected, a selected one is attended to once"
    facts.append(("proved", f"{proved}, and out returns to q's layout"))
    return facts


def _balance(work: tuple[int, ...]) -> str:
    ratio = max_over_mean(work)
    return f"{ratio:.2f}" + (f", rank {work.index(max(work))} has most" if ratio > 1.005 else "")
