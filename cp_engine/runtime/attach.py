"""Attach: routes the attention calls of module instances through an engine, and nothing else.

One wrapper per instance, set as its `forward`. It stays after the context is left (inert), so that activation checkpointing that
recomputes during a later backward repeats the call of its own forward; `detach` removes it. Classes and modules stay untouched.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Protocol

import torch
from torch import Tensor, nn

from cp_engine.errors import CallError, Problem
from cp_engine.runtime.call import Call
from cp_engine.runtime.dtensor import of_this_rank
from cp_engine.runtime.recompute import Memo, Result


class Engine(Protocol):
    """What an attached call goes to."""

    @property
    def sequence(self) -> int:
        """The length that the plan is for, in tokens."""

    @property
    def ranks(self) -> Sequence[int]:
        """World ranks of the plan."""

    def attend(self, call: Call, passed: Sequence[Memo] | None = None) -> Result:
        """The attention of one call, on local tensors, and what a recompute may use of it.

        Args:
            call: what the module was called with.
            passed: in a recompute, what the passes that it may repeat have left; None in a pass.
        """

    def attend_compiled(self, call: Call) -> Tensor:
        """The same while torch.compile traces the model."""


class Binding(Protocol):
    """How a module's attention call is read: (module, positional, by name) -> a Call."""

    def __call__(self, module: nn.Module, args: Sequence[object], named: Mapping[str, object]) -> Call: ...


class _Token:
    """Lives as long as the graph node that it is put on."""

    __slots__ = ("__weakref__", "memo")

    def __init__(self, memo: Memo | None) -> None:
        self.memo = memo


class Site:
    """The wrapper of one attention module.

    A checkpoint that recomputes a call must repeat it under the engine of its forward. The calls whose backward may still come are
    remembered with that engine: as long as their graph lives, or, where there is no graph (a reentrant checkpoint's forward looks like
    any other under no_grad), for good. When they disagree, recomputing is refused instead of guessed.
    """

    def __init__(self, module: nn.Module, plain: Callable[..., object], is_own: bool, binding: Binding) -> None:
        self.module, self.plain, self.is_own, self.binding = module, plain, is_own, binding
        self.active: list[Engine] = []
        self.users: list[Engine] = []  # engines that were attached and not closed: a recompute may still need them
        self.calls = 0  # that went to an engine; those of graphs are counted by the engine
        self._with_graph: list[tuple[Engine | None, weakref.ref[_Token]]] = []
        self._without_graph: list[Engine | None] = []
        self._evaluations: list[
            Engine | None
        ] = []  # likewise, in eval mode: asked only where nothing else is remembered

    def __call__(self, *args: object, **named: object) -> object:
        # The boundary to a host: whatever it passes must be seen here, to be refused by name instead of dropped.
        if torch.compiler.is_compiling():  # a graph is made once, so it can hold no count and no graph node of a call
            if not self.active:
                return self.plain(*args, **named)
            current = self.active[-1]
            call = of_this_rank(self.binding(self.module, args, named), current.ranks)
            return call.finish(current.attend_compiled(call), {}, current.sequence)
        is_recompute = torch._C._current_graph_task_id() != -1
        engine = self._of_forward() if is_recompute else (self.active[-1] if self.active else None)
        memo = None
        if engine is None:
            out = self.plain(*args, **named)
        else:
            call = of_this_rank(self.binding(self.module, args, named), engine.ranks)
            result = engine.attend(call, self._passed(engine) if is_recompute else None)
            out, memo = call.finish(result.out, result.losses, engine.sequence), result.memo
        if not is_recompute:
            self.calls += engine is not None
            self._remember(engine, out, memo)
        return out

    def _remember(self, engine: Engine | None, result: object, memo: Memo | None) -> None:
        found = result if isinstance(result, tuple) else (result,)  # a loss may come beside it, before or after
        out = next((x for x in reversed(found) if isinstance(x, Tensor) and x.grad_fn is not None), None)
        if out is not None and out.grad_fn is not None:
            token = _Token(memo)
            out.grad_fn.metadata["cp_engine"] = token  # type: ignore[index]  # a property, typed as a method
            self._with_graph = [(e, t) for e, t in self._with_graph if t() is not None]
            self._with_graph.append((engine, weakref.ref(token)))
            return
        calls = self._without_graph if self.module.training else self._evaluations
        if not any(e is engine for e in calls):
            calls.append(engine)

    def _passed(self, engine: Engine) -> list[Memo]:
        """What the passes under an engine whose backward is still to come have left."""
        tokens = [t() for e, t in self._with_graph if e is engine]
        return [t.memo for t in tokens if t is not None and t.memo is not None]

    def _of_forward(self) -> Engine | None:
        """The engine of the forward that is being recomputed."""
        pending = [e for e, t in self._with_graph if t() is not None] + self._without_graph
        engines = {id(e): e for e in pending or self._evaluations}
        if len(engines) > 1:
            name = type(self.module).__name__
            what = f"a checkpoint recomputes a call of {name}, which ran under {len(engines)} engines (or with and without one)"
            tries = (
                "backward inside the block of its forward, then leave it",
                "model.eval() for evaluations under no_grad",
            )
            raise CallError([Problem(key="context", what=what, tries=tries)])
        return next(iter(engines.values()), None)

    def forget(self, engine: Engine) -> None:
        """Drops the calls of an engine whose backwards are done."""
        self._with_graph = [(e, t) for e, t in self._with_graph if e is not engine]
        self._without_graph = [e for e in self._without_graph if e is not engine]
        self._evaluations = [e for e in self._evaluations if e is not engine]

    def leave(self, engine: Engine) -> None:
        """Ends one context of an engine; contexts of one model may be left in any order."""
        for i in range(len(self.active) - 1, -1, -1):
            if self.active[i] is engine:
                del self.active[i]
                return

    def __reduce__(self) -> tuple[object, ...]:
        what = f"{type(self.module).__name__} is attached to an engine, which cannot be saved with it"
        tries = ("engine.close()", "torch.save(model.state_dict(), ...)")
        raise CallError([Problem(key="context", what=what, tries=tries)])

    def __deepcopy__(self, memo: dict[int, object]) -> "Site":
        """A copy of the model is not attached to anything; its wrapper calls the copy's own forward."""
        copy = memo[id(self.module)]
        assert isinstance(copy, nn.Module)
        plain = deepcopy(self.plain, memo) if self.is_own else type(copy).forward.__get__(copy)
        return Site(copy, plain, self.is_own, self.binding)


def attach(module: nn.Module, binding: Binding) -> Site:
    """The wrapper of a module; made at the first call."""
    current = module.__dict__.get("forward")
    if isinstance(current, Site):
        return current
    site = Site(module, module.forward, current is not None, binding)
    module.forward = site  # type: ignore[method-assign, assignment]
    return site


def detach(site: Site, engine: Engine) -> None:
    """Ends an engine's use of a module; when it was the last one, the module is as it was before."""
    site.users = [e for e in site.users if e is not engine]
    site.forget(engine)
    if site.users or site.module.__dict__.get("forward") is not site:
        return
    if site.is_own:
        site.module.forward = site.plain  # type: ignore[method-assign, assignment]
    else:
        del site.module.__dict__["forward"]
