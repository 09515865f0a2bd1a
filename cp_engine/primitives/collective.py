"""Collectives: all_to_all cuts one dim and joins another, all_gather joins one, reorder deals tokens anew, undo takes back."""

from dataclasses import dataclass, replace

from cp_engine.algebra.layout import Layout, contiguous, cut
from cp_engine.plan import fields
from cp_engine.plan.state import Passed, Refused, State
from cp_engine.plan.token_layout import TokenLayout
from cp_engine.primitives.exchange import Exchange

DIMS = ("sequence", "heads")


@dataclass(frozen=True, kw_only=True)
class AllToAll(Exchange):
    """Cuts one dim by the axes and joins the other: seq/a heads -> seq heads/a. Source: arXiv 2309.14509, section 3.

    Args:
        axes: mesh axes, major first.
        split: the dim that is cut contiguously; the first ranks hold one more.
        concat: the dim that is joined.
    """

    kind = "all_to_all"
    axes: tuple[str, ...] = fields.axes()
    split: str = fields.choice(*DIMS)
    concat: str = fields.choice(*DIMS)

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.axes

    def axes_of(self, state: State, tensor: str) -> tuple[str, ...]:
        return self.axes

    def destination(self, state: State, tensor: str) -> Layout:
        if self.split == self.concat:
            raise Refused(
                f"split and concat are both {self.split}",
                rule="an all_to_all cuts one dim and joins the other",
                tries=(f"{{key}}.concat={'heads' if self.split == 'sequence' else 'sequence'}",),
            )
        layout = state.layout(tensor)
        together = self.joined(state, tensor, self.concat, self.axes)
        try:
            parts = cut(state.mesh, layout.of(self.split), self.axes, contiguous)
        except ValueError as error:
            raise Refused(
                f"{tensor} cannot be cut along {self.split}: {error}",
                rule="the ranks along the axes share out what all of them hold",
            ) from None
        return layout.replaced(self.concat, together).replaced(self.split, parts)


@dataclass(frozen=True, kw_only=True)
class AllGather(Exchange):
    """Joins one dim: k seq/a -> k seq. Source: Llama 3, arXiv 2407.21783, section 3.3.2.

    Args:
        axes: mesh axes, major first.
        dim: the dim that is joined.
        only: `all`, or `visible`: only the key ranges that the rank's queries can see.
    """

    kind = "all_gather"
    axes: tuple[str, ...] = fields.axes()
    dim: str = fields.choice(*DIMS, default="sequence")
    only: str = fields.choice("all", "visible", default="all")

    @property
    def looks_at_mask(self) -> bool:
        return self.only == "visible"

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.axes

    def axes_of(self, state: State, tensor: str) -> tuple[str, ...]:
        return self.axes

    def history(self, state: State, tensor: str) -> tuple[Passed, ...]:
        *before, last = super().history(state, tensor)
        return (*before, replace(last, whole="only=all" if self.only == "visible" else ""))

    def destination(self, state: State, tensor: str) -> Layout:
        together = self.joined(state, tensor, self.dim, self.axes)
        if self.only == "visible":
            if self.dim != "sequence" or tensor not in ("k", "v"):
                raise Refused(
                    f"only: visible was asked for {tensor} along {self.dim}",
                    rule="what a query can see are positions of k and v along the sequence",
                    tries=("{key}.only=all",),
                )
            queries = state.layout("q").sequence
            together = tuple(state.mask.needed(q, k) for q, k in zip(queries, together, strict=True))
        return state.layout(tensor).replaced(self.dim, together)


@dataclass(frozen=True, kw_only=True)
class Undo(Exchange):
    """Takes an exchange back: the layout after it -> the layout before it. The result inherits what q went through.

    Args:
        of: the name of the step.
    """

    kind = "undo"
    of: str = fields.step_name()

    @property
    def takes_back(self) -> str:
        return self.of

    def axes_of(self, state: State, tensor: str) -> tuple[str, ...]:
        return self._taken_back(state, tensor).axes

    def destination(self, state: State, tensor: str) -> Layout:
        return self._taken_back(state, tensor).before

    def history(self, state: State, tensor: str) -> tuple[Passed, ...]:
        return state.history[tensor][:-1]

    def _taken_back(self, state: State, tensor: str) -> Passed:
        state.layout(tensor)
        history = state.history.get(tensor, ())
        if not history:
            raise Refused(
                f"{tensor} did not go through {self.of!r}",
                rule="undo takes back an exchange that its tensors, or q before them, went through",
            )
        if history[-1].step != self.of:
            raise Refused(
                f"{tensor} went through {', '.join(p.step for p in history)}; the last one is {history[-1].step!r}, not {self.of!r}",
                rule="nested exchanges are taken back in reverse order",
                tries=(f"{{key}}.of={history[-1].step}",),
            )
        return history[-1]


@dataclass(frozen=True, kw_only=True)
class Reorder(Exchange):
    """Deals tensors in another order for attention only: seq in one order -> seq in another; `undo` brings the result back.

    Args:
        to: the other order, and the axes that it cuts first (None: all of `over`).
        over: the axes whose ranks exchange tokens; None is all of them.
    """

    kind = "reorder"
    to: TokenLayout = fields.layout()
    over: tuple[str, ...] | None = fields.axes(default=None)

    @property
    def used_axes(self) -> tuple[str, ...]:
        return self.over or ()

    @property
    def deals_by_mask(self) -> bool:
        return self.to.looks_at_mask

    def axes_of(self, state: State, tensor: str) -> tuple[str, ...]:
        return state.mesh.axes if self.over is None else self.over

    def destination(self, state: State, tensor: str) -> Layout:
        axes = self.axes_of(state, tensor)
        first = axes if self.to.over is None else self.to.over
        if not set(first) <= set(axes):
            raise Refused(
                f"to deals over {', '.join(first)}, and the ranks exchange tokens along {', '.join(axes)}",
                rule="tokens are dealt over axes whose ranks exchange them",
                tries=(f"'{{key}}.over=[{','.join(a for a in state.mesh.axes if a in {*first, *axes})}]'",),
            )
        together = self.joined(state, tensor, "sequence", axes)
        return state.layout(tensor).replaced("sequence", self.to.divide(state.mesh, together, axes, state.mask))
