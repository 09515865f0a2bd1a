"""Call: an attention call as a host makes it, read into named tensors; what no plan accounts for is refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from torch import Tensor

from cp_engine.algebra.mask import Mask
from cp_engine.errors import CallError, Problem

ARGUMENTS = ("scale", "is_causal", "enable_gqa", "mask", "sinks", "dropout_p")
INSTEAD = {
    "attn_mask": ("is_causal=True", "mask={'kind': 'document', 'starts': [0, 100]}"),
    "softmax_scale": ("scale=...",),
    "causal": ("is_causal=True",),
}
"""What an argument of another attention function is called here; a mask is said in positions, since no rank holds all of it."""


@dataclass(frozen=True, slots=True)
class HostMask:
    """A host's own object for what a query may see, equal for all layers of a forward.

    Args:
        source: the object; known again by identity.
        read: (source, batch, sequence) -> one mask per sequence of the batch.
    """

    source: object
    read: Callable[[object, int, int], tuple[Mask, ...]]


Carried: TypeAlias = bool | Mask | Mapping[str, object] | str | HostMask
"""What a call says of visibility: causal or full, a mask or its configuration, or an object of the host's."""


def _out(out: Tensor, losses: Mapping[str, Tensor], sequence: int) -> Tensor:
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One attention call on local tensors.

    Args:
        tensors: name -> [B, heads, S_local, width].
        parameters: name -> a parameter of the model with one row per query head.
        scale: factor on the scores; None is head_dim ** -0.5.
        mask: what a query may see.
        enable_gqa: whether there may be fewer kv heads than heads.
        topk: keys that an indexer selects for a query; None where the module has none.
        head_ranks: ranks that hold heads of its queries, this one included, as `Shape.head_ranks`; None where the module does not know.
        finish: makes the module's result of out [B, H, S_local, Dv], the losses and the length of the whole sequence.
    """

    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    scale: float | None = None
    mask: Carried = True
    enable_gqa: bool = False
    topk: int | None = None
    head_ranks: int | None = None
    finish: Callable[[Tensor, Mapping[str, Tensor], int], object] = _out


def read(args: Sequence[object], named: Mapping[str, object]) -> Call:
    """The same of arguments alone; raises as `read_qkv` does."""
    reader = ArgumentReader(args, named)
    others = reader.others(ARGUMENTS)
    is_causal = reader.flag("is_causal", others, True)
    enable_gqa = reader.flag("enable_gqa", others, False)
    mask, sinks = others.get("mask"), others.get("sinks")
    if sinks is not None and not isinstance(sinks, Tensor):
        reader.problems.append(Problem(key="call.sinks", what=f"must be a tensor, not {short(sinks)}"))
    if not (mask is None or isinstance(mask, Mask | Mapping | str)):
        reader.problems.append(Problem(key="call.mask", what=f"must be a mask or its configuration, not {short(mask)}"))
    if others.get("dropout_p") not in (None, 0):
        what = f"is {short(others['dropout_p'])}, and the engine drops no attention weights"
        rule = (
            "rule",
            "every rank, backward and recompute would have to draw the same mask; none would be right alone",
        )
        reader.problems.append(Problem(key="call.dropout_p", what=what, details=(rule,), tries=("dropout_p=0.0",)))
    scale = reader.scale(others)
    tensors = reader.tensors()
    assert mask is None or isinstance(mask, Mask | Mapping | str)
    return Call(
        tensors=tensors,
        parameters={"sinks": sinks} if isinstance(sinks, Tensor) else {},
        scale=scale,
        mask=is_causal if mask is None else mask,
        enable_gqa=enable_gqa,
    )


class ArgumentReader:
    """Reads q, k, v and known arguments of a call, and collects what is wrong with it.

    Args:
        args: positional arguments, q, k, v.
        named: arguments by name.
    """

    def __init__(self, args: Sequence[object], named: Mapping[str, object]) -> None:
        self.problems: list[Problem] = []
        self._args, self._named = args, named

    def others(self, allowed: Sequence[str]) -> dict[str, object]:
        """The arguments beside q, k, v; unknown ones become problems."""
        found = {n: x for n, x in self._named.items() if n not in ("q", "k", "v")}
        self.problems += [
            Problem(
                key=f"call.{name}",
                what=f"the attention call carries {name}={short(value)}, which no plan accounts for",
                details=(("accepted", ", ".join(allowed)),),
                tries=tuple(line for line in INSTEAD.get(name, ()) if line.partition("=")[0] in allowed),
            )
            for name, value in found.items()
            if name not in allowed
        ]
        return found

    def flag(self, name: str, others: Mapping[str, object], default: bool) -> bool:
        """A bool among the arguments."""
        value = others.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(Problem(key=f"call.{name}", what=f"must be True or False, not {short(value)}"))
        return value is True

    def scale(self, others: Mapping[str, object]) -> float | None:
        """The factor on the scores, where one is given."""
        value = others.get("scale")
        if value is None:
            return None
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < inf:
            self.problems.append(of_scale(value))
            return None
        return float(value)

    def tensors(self) -> dict[str, Tensor]:
        """q, k and v; raises CallError with everything that was found wrong."""
        by_place = dict(zip("qkv", self._args, strict=False))
        given = {**by_place, **{n: x for n, x in self._named.items() if n in ("q", "k", "v")}}
        found = {n: x for n, x in given.items() if isinstance(x, Tensor)}
        self.problems += [
            Problem(key=f"call.{n}", what="is given twice, by position and by name")
            for n in by_place
            if n in self._named
        ]
        self.problems += [Problem(key=f"call.{n}", what="is missing") for n in "qkv" if n not in found]
        if len(self._args) > 3:
            what = f"the attention call carries {len(self._args)} positional arguments, and q, k, v are 3"
            self.problems.append(Problem(key="call", what=what))
        if self.problems:
            raise CallError(self.problems)
        return found


def of_scale(value: object) -> Problem:
    """The problem of a factor on the scores with which kernels return NaN, or the order of the scores turns round."""
    tries = (
        (f"call(-q, k, v, scale={-value})", "scale=None")
        if isinstance(value, float | int) and value < 0
        else ("scale=None",)
    )
    return Problem(key="call.scale", what=f"must be a finite number above 0, not {short(value)}", tries=tries)


def short(value: object) -> str:
    """A value in an error message."""
    return f"{type(value).__name__}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
