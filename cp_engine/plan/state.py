"""State: what is known between two steps of a composition, and how a step refuses it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cp_engine.algebra.index_set import IndexSet
from cp_engine.algebra.layout import Layout, Mesh
from cp_engine.algebra.mask import Mask
from cp_engine.algebra.shape import Shape
from cp_engine.errors import CPError, Faulty, LayoutError, Reason, require


class Refused(Reason):
    """The bare reason why a step cannot be; the step loop adds its key and the layouts.

    Args:
        what: the fact, with both numbers.
        rule: the rule in one sentence.
        details: further labelled lines.
        tries: lines that can be pasted; `{key}` becomes the step's dotted key.
        kind: which error the user sees.
        rank: the rank whose layouts the message shows; None is the second, where a remainder or a shift is seen.
        shows: the tensors whose layouts it shows, where they exist.
    """

    def __init__(
        self,
        what: str,
        *,
        rule: str,
        details: Sequence[tuple[str, str]] = (),
        tries: Sequence[str] = (),
        kind: type[CPError] = LayoutError,
        rank: int | None = None,
        shows: Sequence[str] = ("q", "k", "out"),
    ) -> None:
        super().__init__(what)
        self.what, self.rule, self.details, self.tries = what, rule, tuple(details), tuple(tries)
        self.kind, self.rank, self.shows = kind, rank, tuple(shows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """An exchange that a tensor went through: the step's name, its axes and the layout before it.

    Args:
        whole: the field and value with which it would have left nothing out; empty where it left nothing out.
    """

    step: str
    axes: tuple[str, ...]
    before: Layout
    whole: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known between two steps.

    Args:
        layouts: tensor -> layout now.
        history: tensor -> exchanges that it went through and that no `undo` has taken back.
    """

    mesh: Mesh
    shape: Shape
    mask: Mask
    layouts: Mapping[str, Layout]
    history: Mapping[str, tuple[Passed, ...]] = field(default_factory=dict)

    def layout(self, tensor: str) -> Layout:
        """The layout of a tensor now."""
        if tensor not in self.layouts:
            raise Refused(
                f"there is no tensor {tensor!r} before this step",
                rule="a step moves tensors that the call brings or an earlier step makes",
                details=(("tensors", ", ".join(self.layouts)),),
            )
        return self.layouts[tensor]


def require_layout(step: object, method: str, layout: object, state: State) -> None:
    """A layout that a step made is one of this mesh and this call; raises Faulty."""
    rule = "a Layout has the positions and the heads of each rank, out of the whole sequence and all heads"
    require(step, method, layout, Layout, rule)
    assert isinstance(layout, Layout)
    for dim, size in (("sequence", state.shape.sequence), ("heads", state.shape.heads)):
        sets = layout.of(dim)
        if len(sets) != state.mesh.degree:
            raise Faulty(step, method, f"returned {len(sets)} shares of {dim} for {state.mesh.degree} ranks", rule)
        for held in sets:
            require(step, method, held, IndexSet, rule)
            if held.size != size:
                raise Faulty(step, method, f"returned a share of {held.size} {dim}, and there are {size}", rule)
