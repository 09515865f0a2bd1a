"""Attach: routes the attention calls of module instances through an engine, and nothing else.

One wrapper per instance, set as its `forward`. It stays after the context is left (inert), so that activation checkpointing that
recomputes during a later backward repeats the call of its own forward; `detach` removes it. Classes and modules stay untouched.
"""

import weakref
from collections.abc import Callable, Iterable
from copy import deepcopy
from math import isfinite
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_engine.errors import CallError, Problem

HOST_CLASSES = frozenset({("torchtitan.models.attention", "ScaledDotProductAttentionWrapper")})
"""(module, class) of attention modules of hosts: forward(q, k, v, *, scale, is_causal, enable_gqa) over [B, H, S, D]."""

ARGUMENTS = ("scale", "is_causal", "enable_gqa")


class Attention(nn.Module):
    """Scaled dot-product attention as a module, for models of one's own; plain PyTorch until an engine is attached."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        is_causal: bool = True,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attends.

        Args:
            q: [B, H, S, D].
            k: [B, K, S, D].
            v: [B, K, S, Dv].
            scale: factor on the scores; None is D ** -0.5.
            is_causal: whether a query sees only keys up to its own position.
            enable_gqa: whether K may be less than H.

        Returns:
            [B, H, S, Dv].
        """
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)


class Engine(Protocol):
    """What an attached call goes to."""

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, is_causal: bool, enable_gqa: bool
    ) -> Tensor:
        """The attention call of one site, on local tensors."""


class _Token:
    """Lives as long as the graph node that it is put on."""

    __slots__ = ("__weakref__",)


class Site:
    """The wrapper of one attention module.

    A checkpoint that recomputes a call must repeat it under the engine of its forward. The calls whose backward may still come are
    remembered with that engine: as long as their graph lives, or, where there is no graph (a reentrant checkpoint's forward looks like
    any other under no_grad), for good. When they disagree, recomputing is refused instead of guessed.
    """

    def __init__(self, module: nn.Module, plain: Callable[..., Tensor], is_own: bool) -> None:
        self.module, self.plain, self.is_own = module, plain, is_own
        self.active: list[Engine] = []
        self.users: list[Engine] = []  # engines that were attached and not closed: a recompute may still need them
        self.calls = 0
        self._with_graph: list[tuple[Engine | None, weakref.ref[_Token]]] = []
        self._without_graph: list[Engine | None] = []
        self._evaluations: list[
            Engine | None
        ] = []  # likewise, in eval mode: asked only where nothing else is remembered

    def __call__(self, *args: Tensor, **named: object) -> Tensor:
        # The boundary to a host: whatever it passes must be seen here, to be refused by name instead of dropped.
        is_recompute = torch._C._current_graph_task_id() != -1
        engine = self._of_forward() if is_recompute else (self.active[-1] if self.active else None)
        if engine is None:
            out = self.plain(*args, **named)
        else:
            q, k, v, scale, is_causal, enable_gqa = _bound(args, named)
            out = engine.call(q, k, v, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)
        if not is_recompute:
            self.calls += engine is not None
            self._remember(engine, out)
        return out

    def _remember(self, engine: Engine | None, out: Tensor) -> None:
        if isinstance(out, Tensor) and out.grad_fn is not None:
            token = _Token()
            out.grad_fn.metadata["cp_engine"] = token  # type: ignore[index]  # a property, typed as a method
            self._with_graph = [(e, t) for e, t in self._with_graph if t() is not None]
            self._with_graph.append((engine, weakref.ref(token)))
            return
        calls = self._without_graph if self.module.training else self._evaluations
        if not any(e is engine for e in calls):
            calls.append(engine)

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
        return Site(copy, plain, self.is_own)


def _bound(
    args: tuple[Tensor, ...], named: dict[str, object]
) -> tuple[Tensor, Tensor, Tensor, float | None, bool, bool]:
    """q, k, v and the known arguments of a call; everything else is refused by name."""
    tensors = dict(zip("qkv", args, strict=False))
    tensors.update({n: x for n, x in named.items() if n in ("q", "k", "v") and isinstance(x, Tensor)})
    others = {n: x for n, x in named.items() if n not in ("q", "k", "v")}
    problems = [
        Problem(
            key=f"call.{name}",
            what=f"the attention call carries {name}={_short(value)}, which no plan accounts for",
            details=(("accepted", ", ".join(ARGUMENTS)),),
        )
        for name, value in others.items()
        if name not in ARGUMENTS
    ]
    twice = [n for n in dict(zip("qkv", args, strict=False)) if n in named]
    problems += [Problem(key=f"call.{n}", what="is given twice, by position and by name") for n in twice]
    problems += [Problem(key=f"call.{n}", what="is missing") for n in "qkv" if n not in tensors]
    if len(args) > 3:
        problems.append(
            Problem(key="call", what=f"the attention call carries {len(args)} positional arguments, and q, k, v are 3")
        )
    scale, is_causal, enable_gqa = others.get("scale"), others.get("is_causal", True), others.get("enable_gqa", False)
    is_number = isinstance(scale, float | int) and not isinstance(scale, bool) and isfinite(scale)
    if not (scale is None or is_number):
        problems.append(Problem(key="call.scale", what=f"must be a finite number, not {_short(scale)}"))
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, bool):
            problems.append(Problem(key=f"call.{name}", what=f"must be True or False, not {_short(value)}"))
    if problems:
        raise CallError(problems)
    factor = None if scale is None else float(scale)  # type: ignore[arg-type]
    return tensors["q"], tensors["k"], tensors["v"], factor, bool(is_causal), bool(enable_gqa)


def _short(value: object) -> str:
    return f"{type(value).__name__}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def find(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The attention modules at or below some modules, each once.

    Raises:
        CallError: there is none below one of them.
    """
    found: dict[int, nn.Module] = {}
    for module in modules:
        below = [m for m in module.modules() if is_site(m)]
        if not below:
            hosts = ", ".join(["cp_engine.Attention", *(f"{a}.{b}" for a, b in sorted(HOST_CLASSES))])
            what = f"{type(module).__name__} has no attention module that the engine can attach to"
            raise CallError([Problem(key="context", what=what, details=(("accepted", hosts),))])
        found.update({id(m): m for m in below})
    return list(found.values())


def is_site(module: nn.Module) -> bool:
    """Whether a module is an attention call that the engine understands."""
    names = {(c.__module__, c.__qualname__) for c in type(module).__mro__}
    return isinstance(module, Attention) or bool(names & HOST_CLASSES)


def attach(module: nn.Module) -> Site:
    """The wrapper of a module; made at the first call."""
    current = module.__dict__.get("forward")
    if isinstance(current, Site):
        return current
    site = Site(module, module.forward, current is not None)
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
