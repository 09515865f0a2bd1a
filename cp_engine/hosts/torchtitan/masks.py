"""Engine masks from what a torchtitan 0.2.2 attention call carries: VarlenMetadata, or a BlockMask of torchtitan's own mask_mods.

A mask_mod is a function, so it is recognised by module and qualified name and its numbers are read from its closure. Then
everything that was read is compared with the function and with the block lists, so that an upstream change cannot go unnoticed.
What is not recognised is refused. Nothing here imports torchtitan.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from cp_engine.algebra.mask import Mask, intersection
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.errors import CallError, Problem

Rows = tuple[Mask, ...]
RULE = ("rule", "a mask is read or refused, never replaced by another")


def masks_of(carried: object, batch: int, size: int) -> Rows:
    """The masks of one attention call, to be asked once per object and not once per layer: it waits for the device.

    Args:
        carried: torchtitan's VarlenMetadata over [batch * size] tokens, or a BlockMask over [batch or 1, 1, size, size].
        batch: rows of the call.
        size: global sequence length in tokens.

    Returns:
        One mask per row; rows that see the same share one object.

    Raises:
        CallError: a mask that cannot be read, or that shows something else than what was read; all problems by name.
    """
    if (type(carried).__module__, type(carried).__qualname__) == (TITAN, "VarlenMetadata"):
        return _from_varlen(cast(VarlenMetadata, carried), batch, size)
    if type(carried) is BlockMask:
        return _from_blocks(carried, batch, size)
    allowed = ("allowed", "torchtitan's VarlenMetadata, or a BlockMask of its mask functions")
    what = f"is {_name(carried) if inspect.isroutine(carried) else f'a {type(carried).__name__}'}, which is not read"
    raise CallError([Problem(key="call.attention_masks", what=what, details=(allowed, RULE))])


# ------------------------------------------------------------------ VarlenMetadata
class VarlenMetadata(Protocol):
    """torchtitan's, as far as it is read: int32 borders of documents over the flattened batch, and the longest document."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


def _from_varlen(carried: VarlenMetadata, batch: int, size: int) -> Rows:
    """Causal documents: torchtitan's varlen wrapper always calls its kernel with window_size=(-1, 0)."""
    borders, of_keys = carried.cu_seq_q.tolist(), carried.cu_seq_k.tolist()
    key, problems = "call.attention_masks", list[Problem]()
    if borders != of_keys:
        what = "has other borders for keys than for queries"
        problems.append(Problem(key=f"{key}.cu_seq_k", what=what, details=(RULE,)))
    lengths = [b - a for a, b in pairwise(borders)]
    if not borders or borders[0] != 0 or borders[-1] != batch * size or min(lengths, default=0) < 0:
        shown = f"{borders[0]} .. {borders[-1]}" if borders else "nothing"
        what = f"is {shown}, and must rise from 0 to {batch * size} = {batch} rows x {size} tokens"
        problems.append(Problem(key=f"{key}.cu_seq_q", what=what, details=(RULE,)))
        raise CallError(problems)
    crossing = [row for row in range(1, batch) if row * size not in set(borders)]
    if crossing:
        what = f"has no border at {crossing[0] * size}: a document crosses from row {crossing[0] - 1} to {crossing[0]}"
        problems.append(Problem(key=f"{key}.cu_seq_q", what=what, details=(RULE,)))
    for name in ("max_q", "max_k"):
        if getattr(carried, name) < max(lengths):
            what = f"is {getattr(carried, name)}, and the longest document has {max(lengths)} tokens"
            problems.append(Problem(key=f"{key}.{name}", what=what, details=(RULE,)))
    if problems:
        raise CallError(problems)
    starts = sorted(set(borders))  # of documents that have tokens
    cut = np.searchsorted(starts, np.arange(batch + 1) * size)
    return _documents([[s - row * size for s in starts[cut[row] : cut[row + 1]]] for row in range(batch)], size, True)


def _documents(starts: list[list[int]], size: int, is_causal: bool) -> Rows:
    """One mask per row; rows with the same documents share it."""
    shared = {
        row: mask_of({"kind": "document", "starts": row, "causal": is_causal}, size)
        for row in dict.fromkeys(map(tuple, starts))
    }
    return tuple(shared[tuple(row)] for row in starts)


# ------------------------------------------------------------------ mask functions
@dataclass(kw_only=True)
class _Reader:
    """What nested mask functions show, as the masks of each of their parts."""

    batch: int
    size: int
    parts: list[Rows] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def read(self, mod: object, first: int = 0) -> None:
        """Adds a function's masks, for the rows from `first` on of what it closes over."""
        known = KNOWN.get((getattr(mod, "__module__", ""), getattr(mod, "__qualname__", "")))
        if known is None or not inspect.isfunction(mod):
            allowed = ("allowed", ", ".join(qualname.partition(".")[0] for _, qualname in KNOWN))
            self.refuse(f"holds the mask function {_name(mod)}, which is not read", allowed)
            return
        names, add = known
        values = inspect.getclosurevars(mod).nonlocals
        if set(values) != set(names):
            found, wanted = (", ".join(sorted(n)) or "nothing" for n in (values, names))
            self.refuse(f"holds {_name(mod)} over {found}, and it is known over {wanted}")
            return
        add(self, first, *(values[name] for name in names))

    def refuse(self, what: str, *details: tuple[str, str]) -> None:
        self.problems.append(Problem(key="call.block_mask", what=what, details=(*details, RULE)))

    def same(self, config: Mapping[str, object]) -> None:
        self.parts.append((mask_of(config, self.size),) * self.batch)

    def number(self, value: object, name: str) -> bool:
        if isinstance(value, int) and value >= 1:
            return True
        self.refuse(f"holds {name} {value!r}, and it must be at least 1")
        return False


def _causal(reader: _Reader, first: int) -> None:
    reader.same({"kind": "causal"})


def _window(reader: _Reader, first: int, window_size: object) -> None:
    if reader.number(window_size, "window_size"):  # torchtitan counts the query itself
        reader.same({"kind": "window", "left": cast(int, window_size) - 1, "right": 0})


def _block(reader: _Reader, first: int, fixed_block_size: object) -> None:
    if reader.number(fixed_block_size, "fixed_block_size"):
        reader.same({"kind": "block", "size": fixed_block_size, "causal": False})


def _document(reader: _Reader, first: int, sequence_indices: object) -> None:
    shape = tuple(sequence_indices.shape) if isinstance(sequence_indices, Tensor) else ()
    if len(shape) != 2 or shape[0] < first + reader.batch or shape[1] != reader.size:
        rows = f"rows {first}..{first + reader.batch}" if first else f"{reader.batch} rows"
        reader.refuse(f"numbers documents of shape {list(shape)}, and the call has {rows} of {reader.size} tokens")
        return
    steps = cast(Tensor, sequence_indices)[first : first + reader.batch].diff(dim=1).cpu().numpy()
    if (steps < 0).any():
        reader.refuse("numbers documents that do not rise, so one of them may have several parts")
        return
    reader.parts.append(_documents([[0, *(np.nonzero(row)[0] + 1).tolist()] for row in steps], reader.size, False))


def _every(reader: _Reader, first: int, mask_mods: object) -> None:
    for mod in cast(tuple[object, ...], mask_mods):
        reader.read(mod, first)


def _microbatch(reader: _Reader, first: int, block_mask: BlockMask, idx: int) -> None:
    reader.read(block_mask.mask_mod, first + idx)


TITAN = "torchtitan.models.attention"
KNOWN: Mapping[tuple[str, str], tuple[tuple[str, ...], Callable[..., None]]] = {
    (TITAN, "get_causal_mask_mod.<locals>._causal_mask"): ((), _causal),
    (TITAN, "get_document_mask_mod.<locals>.document_mask"): (("sequence_indices",), _document),
    (TITAN, "get_sliding_window_mask_mod.<locals>.sliding_window_mod"): (("window_size",), _window),
    (TITAN, "get_fixed_block_mask_mod.<locals>.blocked_mask_mod"): (("fixed_block_size",), _block),
    ("torch.nn.attention.flex_attention", "and_masks.<locals>.and_mask"): (("mask_mods",), _every),
    (
        "torch.distributed.pipelining.microbatch",  # cuts the batch, and shifts what the function is asked for
        "_split_block_mask.<locals>.create_mask_mod.<locals>.batch_offset_mask_mod",
    ): (("block_mask", "idx"), _microbatch),
}
"""(module, qualified name) -> (the names that it closes over, what they mean)."""


def _name(mod: object) -> str:
    module, name = getattr(mod, "__module__", None), getattr(mod, "__qualname__", None)
    return f"{module}.{name}" if module and name else f"a {type(mod).__module__}.{type(mod).__qualname__}"


# ------------------------------------------------------------------ BlockMask
def _from_blocks(carried: BlockMask, batch: int, size: int) -> Rows:
    reader = _Reader(batch=batch, size=size)
    rows, heads = carried.kv_num_blocks.shape[:-1] if carried.kv_num_blocks.dim() == 3 else (0, 0)
    if rows not in (1, batch) or heads != 1 or tuple(carried.seq_lengths) != (size, size):
        what = f"is for {rows} rows, {heads} heads and lengths {list(carried.seq_lengths)}"
        reader.refuse(f"{what}, and the call has {batch} rows and {size} tokens", ("rule", "one mask for all heads"))
    reader.read(carried.mask_mod)
    if reader.problems:
        raise CallError(reader.problems)
    met: dict[tuple[int, ...], Mask] = {}
    masks = []
    for parts in zip(*(reader.parts or [(mask_of("full", size),) * batch]), strict=True):
        same = tuple(map(id, parts))  # the parts are shared by the rows that have them in common
        met.setdefault(same, reduce(intersection, parts) if same not in met else met[same])
        masks.append(met[same])
    for row, mask in enumerate(masks):
        _compare_function(carried, row, mask, reader)
        _compare_blocks(carried, row, mask, reader)
    if reader.problems:
        raise CallError(reader.problems)
    return tuple(masks)


def _compare_function(carried: BlockMask, row: int, mask: Mask, reader: _Reader) -> None:
    q, k = _positions(mask)
    ours = _shown(mask, q, k)
    device = carried.kv_num_blocks.device
    b, h, q_index, k_index = (torch.from_numpy(x).to(device) for x in (np.full_like(q, row), np.zeros_like(q), q, k))
    theirs = carried.mask_mod(b, h, q_index, k_index).expand(q_index.shape).cpu().numpy()
    wrong = np.nonzero(ours != theirs)[0]
    if len(wrong):
        q_, k_ = q[wrong[0]], k[wrong[0]]
        what = f"{'shows' if theirs[wrong[0]] else 'hides'} key {k_} from query {q_} of row {row}"
        read = f"read as {mask.kind}, which does not ({len(wrong)} of {len(q)} tried pairs differ)"
        reader.refuse(f"{what}, and was {read}")


def _positions(mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """Pairs at which a wrong reading would show: all of a short sequence; of a long one every pair of neighbours (so every border
    of a document), both sides of every edge of every band, and 512 at random."""
    size = mask.size
    if size <= 64:
        q, k = np.indices((size, size)).reshape(2, -1)
        return q, k
    bands = np.array([(b.q0, b.q1, b.k0, b.k1, b.low, b.high) for b in mask.bands]).reshape(-1, 6)
    q0, q1, k0, k1, low, high = bands.T[:, :, None, None]
    q = np.concatenate([q0, (q0 + q1) // 2, q1 - 1], 1)
    k = np.concatenate([x + 0 * q for x in (k0 - 1, k0, k1 - 1, k1, q - low, q - low + 1, q - high, q - high - 1)], 2)
    neighbours, random = np.arange(1, size), np.random.default_rng(0)
    far, near = random.integers(size, size=(2, 256)), random.integers(size, size=256)
    qs = [(q + 0 * k).ravel(), neighbours, far[0], near]
    ks = [k.ravel(), neighbours - 1, far[1], near - random.integers(-8, 9, size=256)]
    q, k = np.concatenate(qs), np.concatenate(ks)
    inside = (k >= 0) & (k < size)
    return q[inside], k[inside]


def _shown(mask: Mask, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Which pairs a mask shows, bool like q."""
    order = np.argsort(q, kind="stable")
    q, k, shown = q[order], k[order], np.zeros(len(q), dtype=bool)
    for b in mask.bands:
        its = slice(*np.searchsorted(q, [b.q0, b.q1]))
        ahead = q[its] - k[its]
        shown[its] |= (k[its] >= b.k0) & (k[its] < b.k1) & (ahead >= b.low) & (ahead <= b.high)
    return shown[np.argsort(order)]


def _compare_blocks(carried: BlockMask, row: int, mask: Mask, reader: _Reader) -> None:
    """flex skips blocks that are not listed and does not ask the function inside those listed as full."""
    row %= carried.kv_num_blocks.shape[0]
    n, m = (-(-mask.size // length) for length in carried.BLOCK_SIZE)
    some, every = np.zeros((2, n, m), dtype=bool)
    q, k = (np.arange(count) * length for count, length in zip((n, m), carried.BLOCK_SIZE, strict=True))
    q_end, k_end = (np.minimum(x + length, mask.size) for x, length in zip((q, k), carried.BLOCK_SIZE, strict=True))
    for b in mask.bands:
        i, j = slice(*_met(q, q_end, b.q0, b.q1)), slice(*_met(k, k_end, b.k0, b.k1))
        first, last = np.maximum(q[i], b.q0)[:, None], np.minimum(q_end[i], b.q1)[:, None] - 1
        left, right = np.maximum(k[j], b.k0), np.minimum(k_end[j], b.k1) - 1
        some[i, j] |= (last - left >= b.low) & (first - right <= b.high)
        whole = (q[i] >= b.q0)[:, None] & (q_end[i] <= b.q1)[:, None] & (k[j] >= b.k0) & (k_end[j] <= b.k1)
        every[i, j] |= whole & (first - right >= b.low) & (last - left <= b.high)
    full = _listed(carried.full_kv_num_blocks, carried.full_kv_indices, row, (n, m))
    listed = full | _listed(carried.kv_num_blocks, carried.kv_indices, row, (n, m))
    for is_wrong, what in ((listed != some, "lists other blocks"), (full & ~every, "lists other blocks as full")):
        if is_wrong.any():
            at = " ".join(map(str, np.argwhere(is_wrong)[0]))
            reader.refuse(f"{what} for row {row} than {mask.kind} has: {is_wrong.sum()}, the first at block {at}")


def _met(starts: np.ndarray, ends: np.ndarray, first: int, stop: int) -> tuple[int, int]:
    return int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(starts, stop))


def _listed(counts: Tensor | None, indices: Tensor | None, row: int, shape: tuple[int, int]) -> np.ndarray:
    table = np.zeros(shape, dtype=bool)
    if counts is not None and indices is not None:
        count, index = counts[row, 0].cpu().numpy(), indices[row, 0].cpu().numpy()
        q_block, place = np.nonzero(np.arange(index.shape[1]) < count[:, None])
        table[q_block, index[q_block, place]] = True
    return table
