"""Tensors of an attention call, one row of data each: heads, width, dtype, gradient, and the sizes that a call of it needs.

A package adds a row under the entry-point group `cp_engine.tensors`, as `name = "module:ROW"`, for a step that makes or takes a tensor
of its own. Nothing else in the engine lists tensors.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from cp_engine.algebra.layout import Layout, image
from cp_engine.algebra.shape import BYTES, Shape
from cp_engine.errors import ConfigError, Problem, installed

GROUP = "cp_engine.tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tensor [B, heads, S, width], as steps name it.

    Args:
        name: of the tensor.
        heads: `q` query heads, `kv` key and value heads, `one` that serves all query heads.
        width: elements per head and position.
        dtype: `call` the call's, `int32`, or `statistic`: the call's, at least float32.
        has_gradient: whether a gradient of it travels back.
        is_made: whether only a step makes it; else a call brings it where no earlier step made it.
        needs: sizes of the shape without which a call cannot bring it.
        rule: why, for a person.
    """

    name: str
    heads: Literal["q", "kv", "one"]
    width: Callable[[Shape], int]
    dtype: Literal["call", "int32", "statistic"] = "call"
    has_gradient: bool = True
    is_made: bool = False
    needs: tuple[str, ...] = ()
    rule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the model that a step needs, with one row per query head.

    Args:
        name: as steps name it.
        size: of the tensor.
        scale: of random numbers that give attention of unit variance.
    """

    name: str
    size: Callable[[Shape], tuple[int, ...]]
    scale: Callable[[Shape], float] = lambda shape: 1.0


INDEX = ("q_index", "k_index", "w_index")
"""What an indexer selects keys by."""
LATENT = "only multi-head latent attention has a latent from which k and v are expanded"
INDEXER = "only a model with an indexer selects keys"


def _head_dim(shape: Shape) -> int:
    return shape.head_dim


def _v_head_dim(shape: Shape) -> int:
    return shape.v_head_dim


def _selected(shape: Shape) -> int:
    return shape.selected


ROWS = (
    Row(name="q", heads="q", width=_head_dim),
    Row(name="k", heads="kv", width=_head_dim),
    Row(name="v", heads="kv", width=_v_head_dim),
    Row(name="out", heads="q", width=_v_head_dim, is_made=True),
    Row(name="lse", heads="q", width=lambda shape: 1, dtype="statistic", is_made=True),
    Row(name="kv_latent", heads="one", width=lambda shape: shape.latent_dim, needs=("latent_dim",), rule=LATENT),
    Row(name="k_rope", heads="one", width=lambda shape: shape.rope_dim, needs=("rope_dim",), rule=LATENT),
    Row(
        name="q_index",
        heads="one",  # the heads of an indexer lie side by side
        width=lambda shape: shape.index_heads * shape.index_dim,
        needs=("index_heads", "index_dim", "topk"),
        rule=INDEXER,
    ),
    Row(name="k_index", heads="one", width=lambda shape: shape.index_dim, needs=("index_dim",), rule=INDEXER),
    Row(name="w_index", heads="one", width=lambda shape: shape.index_heads, needs=("index_heads",), rule=INDEXER),
    Row(name="topk", heads="one", width=_selected, dtype="int32", has_gradient=False, is_made=True),
    Row(name="target", heads="one", width=_selected, dtype="statistic", has_gradient=False),
)
PARAMETERS = (
    Parameter(
        name="kv_up",
        size=lambda shape: (shape.heads, shape.head_dim - shape.rope_dim + shape.v_head_dim, shape.latent_dim),
        scale=lambda shape: shape.latent_dim**-0.5,
    ),
    Parameter(name="sinks", size=lambda shape: (shape.heads,)),
)
_ROWS: Mapping[str, Row] = {row.name: row for row in ROWS}
_PARAMETERS: Mapping[str, Parameter] = {row.name: row for row in PARAMETERS}


def row(tensor: str) -> Row:
    """The row of a tensor.

    Raises:
        ConfigError: there is none, or a package adds one that is none.
    """
    found = _ROWS.get(tensor) or _installed(tuple(sys.path)).get(tensor)
    if not isinstance(found, Row):
        raise ConfigError([_unknown(tensor)])
    return found


def parameter(name: str) -> Parameter:
    """The row of a parameter; raises ConfigError."""
    found = _PARAMETERS.get(name) or _installed(tuple(sys.path)).get(name)
    if not isinstance(found, Parameter):
        raise ConfigError([_unknown(name)])
    return found


def _unknown(name: str) -> Problem:
    rule = ("rule", f"a package adds a Row or a Parameter of cp_engine.algebra.tensors under the entry points {GROUP}")
    return Problem(key=f"{GROUP}: {name}", what="no row describes it", details=(rule,))


@cache
def _installed(path: tuple[str, ...]) -> Mapping[str, Row | Parameter]:
    """Rows that other packages add; looked up once for each path."""
    return installed(GROUP, _faults)


def _faults(name: str, found: object, others: Mapping[str, Row | Parameter]) -> Iterator[tuple[str, str]]:
    if not isinstance(found, Row | Parameter) or found.name != name:
        yield f"is {found!r}", "a tensor is a Row or a Parameter of cp_engine.algebra.tensors, under its own name"
    elif name in {*_ROWS, *_PARAMETERS}:
        yield f"{name} is a tensor of the engine", "a name stands for one tensor"


def heads_per_head(shape: Shape, tensor: str) -> int:
    """Query heads per head of a tensor."""
    return {"q": 1, "kv": shape.group_size, "one": shape.heads}[row(tensor).heads]


def width(shape: Shape, tensor: str) -> int:
    """Elements per head and position of a tensor."""
    return row(tensor).width(shape)


def element_bytes(shape: Shape, tensor: str) -> int:
    """Bytes of one element of a tensor."""
    size = BYTES[shape.dtype]
    return {"call": size, "int32": 4, "statistic": max(4, size)}[row(tensor).dtype]


def size_of(shape: Shape, tensor: str, positions: int) -> tuple[int, int, int, int]:
    """[B, heads, positions, width] of a tensor with all its heads."""
    return shape.batch, shape.heads // heads_per_head(shape, tensor), positions, width(shape, tensor)


def counts(layout: Layout, shape: Shape, tensor: str) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Elements of a tensor that each rank holds under a layout."""
    group, scale = heads_per_head(shape, tensor), shape.batch * width(shape, tensor)
    return np.array(
        [s.count * image(h, group).count * scale for s, h in zip(layout.sequence, layout.heads, strict=True)],
        dtype=np.int64,
    )


def shared(tensors: Iterable[str]) -> list[str]:
    """Those with one head that serves all query heads."""
    return [tensor for tensor in tensors if row(tensor).heads == "one"]
