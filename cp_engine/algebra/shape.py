"""Shape: the sizes of one attention call."""

from dataclasses import dataclass, replace

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""dtype -> bytes of one element."""


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


def part_of(shape: Shape, groups: int) -> Shape:
    """The call of one of several equal head groups."""
    return shape if groups == 1 else replace(shape, heads=shape.heads // groups, kv_heads=shape.kv_heads // groups)
