"""Shape: the sizes of one attention call, and how wide each of its tensors is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cp_engine.algebra.layout import Layout, image

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""dtype -> bytes of one element."""

LATENT = ("kv_latent", "k_rope")
INDEX = ("q_index", "k_index", "w_index")
SHARED = (*LATENT, *INDEX, "topk", "target")
"""Tensors with one head that serves all query heads; the heads of an indexer lie side by side in it."""

MADE = ("out", "lse", "topk")
"""Tensors that only a step makes."""

WITHOUT_GRADIENT = ("topk", "target")
"""Tensors that travel and have no gradient."""

NEEDS: Mapping[str, tuple[str, ...]] = {
    "kv_latent": ("latent_dim",),
    "k_rope": ("rope_dim",),
    "q_index": ("index_heads", "index_dim", "topk"),
    "k_index": ("index_dim",),
    "w_index": ("index_heads",),
}
"""tensor -> the sizes without which a call cannot bring it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The attention call that a plan is for, in global sizes.

    Args:
        batch: sequences per call; bytes scale with it, nothing else does.
        sequence: global length in tokens.
        heads: query heads.
        kv_heads: key and value heads; divides heads.
        head_dim: of q and k.
        v_head_dim: of v and out.
        dtype: a key of BYTES.
        latent_dim: of the latent that k and v are expanded from; 0 where there is none.
        rope_dim: of the rotary key that all heads share, part of head_dim; 0 where there is none.
        index_heads: of the indexer that selects keys; 0 where there is none.
        index_dim: of each of them.
        topk: keys that it selects for a query; 0 where all are attended to.
        head_ranks: ranks beside those of the plan that hold as many heads of the same queries each, this one included: those of
            tensor parallelism, in a call whose indexer learns from all heads.
    """

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    latent_dim: int = 0
    rope_dim: int = 0
    index_heads: int = 0
    index_dim: int = 0
    topk: int = 0
    head_ranks: int = 1

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def selected(self) -> int:
        """Keys of a query's selection, at most."""
        return min(self.topk, self.sequence)

    def heads_per_head(self, tensor: str) -> int:
        """q heads per head of a tensor."""
        if tensor in SHARED:
            return self.heads
        return self.group_size if tensor in ("k", "v") else 1

    def width(self, tensor: str) -> int:
        """Elements per (head, position) of a tensor."""
        widths = {
            **{"q": self.head_dim, "k": self.head_dim, "kv_latent": self.latent_dim, "k_rope": self.rope_dim},
            **{"q_index": self.index_heads * self.index_dim, "k_index": self.index_dim, "w_index": self.index_heads},
            **{"topk": self.selected, "target": self.selected, "lse": 1},
        }
        return widths.get(tensor, self.v_head_dim)

    def bytes_of(self, tensor: str) -> int:
        """Bytes of one element: positions are int32, statistics at least float32, the rest has the call's dtype."""
        if tensor == "topk":
            return 4
        size = BYTES[self.dtype]
        return max(4, size) if tensor in ("target", "lse") else size


def part_of(shape: Shape, groups: int) -> Shape:
    """The call of one of several equal head groups."""
    return shape if groups == 1 else replace(shape, heads=shape.heads // groups, kv_heads=shape.kv_heads // groups)


def counts(layout: Layout, shape: Shape, tensor: str) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Elements of a tensor that each rank holds under a layout."""
    group, scale = shape.heads_per_head(tensor), shape.batch * shape.width(tensor)
    return np.array(
        [s.count * image(h, group).count * scale for s, h in zip(layout.sequence, layout.heads, strict=True)],
        dtype=np.int64,
    )
