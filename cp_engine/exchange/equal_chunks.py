"""Even exchanges: where every member's piece is one equal chunk, a tensor is packed and unpacked by one strided copy, or by none.

The general exchange makes one copy per piece, which for small messages costs more than the collective. Here the pieces of all
members, the own one included, are one view [P, B, h, s, D] of the tensor:

    before [B, P h, s, D] --view--> [P, B, h, s, D] --collective--> [P, B, h, s, D] --view or one copy--> [B, h, P s, D]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_engine.algebra.index_set import Run
from cp_engine.algebra.transfer import Block, Transfer
from cp_engine.exchange.channel import Channel

HEADS, SEQUENCE = 1, 2


@dataclass(frozen=True, slots=True)
class Even:
    """How one tensor is cut and put together.

    Args:
        tensor: its name.
        cut: the dim of which member i gets chunk i; None: every member gets all of it.
        join: the dim of which member i brings chunk i; None: what the members bring is summed.
    """

    tensor: str
    cut: int | None
    join: int | None


def even(transfer: Transfer, rank: int, group: tuple[int, ...]) -> Even | None:
    """The even form of a transfer for one rank; None where pieces are uneven, several or out of order.

    Only this rank's memory is concerned: peers may use the general form, since what they send each other is the same.

    Args:
        transfer: of one tensor.
        rank: the plan rank.
        group: its group, ascending.
    """
    sent, received = [transfer.blocks(rank, r) for r in group], [transfer.blocks(r, rank) for r in group]
    if any(len(blocks) != 1 for blocks in (*sent, *received)):
        return None
    is_summed = transfer.is_adjoint and transfer.is_replicating
    cut = _chunked([b for (b,) in sent], transfer, rank, is_source=True)
    join = _chunked([b for (b,) in received], transfer, rank, is_source=False)
    if cut == "uneven" or join == "uneven" or (join is None) != is_summed or (cut is None) != transfer.is_even_gather:
        return None
    assert not isinstance(cut, str) and not isinstance(join, str)
    return Even(transfer.tensor, cut, join)


def _chunked(blocks: list[Block], transfer: Transfer, rank: int, *, is_source: bool) -> int | str | None:
    """The dim along which block i is chunk i and the other dim whole; None where every block is everything."""
    layout = transfer.source if is_source else transfer.result
    heads, sequence = transfer.kv_count(layout.heads[rank]), layout.sequence[rank].count
    head_runs = [b.heads_from if is_source else b.heads_to for b in blocks]
    sequence_runs = [b.sequence_from if is_source else b.sequence_to for b in blocks]
    n = len(blocks)
    chunks = (_chunks(heads, n), _chunks(sequence, n))
    if head_runs == [Run(0, heads)] * n:
        if sequence_runs == [Run(0, sequence)] * n:
            return None
        return SEQUENCE if sequence_runs == chunks[1] else "uneven"
    return HEADS if head_runs == chunks[0] and sequence_runs == [Run(0, sequence)] * n else "uneven"


def _chunks(size: int, n: int) -> list[Run]:
    return [Run(i * (size // n), size // n) for i in range(n)] if size % n == 0 else []


def start(
    evens: Sequence[Even], tensors: Sequence[Tensor], channel: Channel, *, is_gather: bool
) -> Callable[[], list[Tensor]]:
    """Sends tensors of one dtype off in one collective.

    Tensors of one shape are stacked: one copy in and one out for all of them.

    Args:
        evens: how each is cut and joined.
        tensors: each [B, H, S, D].
        channel: the group.
        is_gather: every member gets all of every tensor.

    Returns:
        What waits for the collective and gives the tensors after it, contiguous.
    """
    members = channel.members
    send_all = channel.all_gather if is_gather else channel.all_to_all_even
    if len(tensors) == 1:  # the most frequent case, and the fewest calls
        view = _cut(tensors[0], evens[0].cut, members)
        # reshape keeps a stride of 0 (the gradient of a sum), which c10d refuses on this rank while its peers wait
        one = send_all(view.reshape(-1).contiguous())
        return lambda: [_join(one.wait().view(members, *view.shape[1:]), evens[0].join, 0)]
    stacks: list[list[Tensor]] = []
    joins: list[int | None] = []
    for x, e in zip(tensors, evens, strict=True):
        view = _cut(x, e.cut, members)
        if stacks and stacks[-1][0].shape == view.shape and joins[-1] == e.join:
            stacks[-1].append(view)
        else:
            stacks.append([view])
            joins.append(e.join)
    packed = [torch.stack(views, 1) for views in stacks]
    if len(packed) == 1:
        pending = send_all(packed[0].view(-1))
        return lambda: list(_join(pending.wait().view(members, *packed[0].shape[1:]), joins[0], 1).unbind(0))
    pending = send_all(torch.cat([x.flatten(1) for x in packed], 1).view(-1))
    shapes = [x.shape[1:] for x in packed]

    def finish() -> list[Tensor]:
        rows = pending.wait().view(members, -1)
        out: list[Tensor] = []
        for part, shape, join in zip(rows.split_with_sizes([s.numel() for s in shapes], 1), shapes, joins, strict=True):
            out += _join(part.view(members, *shape), join, 1).unbind(0)
        return out

    return finish


def _cut(x: Tensor, dim: int | None, members: int) -> Tensor:
    """[P, B, h, s, D] as a view; [1, B, H, S, D] where nothing is cut."""
    (b, h, s, d), (sb, sh, ss, sd) = x.shape, x.stride()
    if dim is None:
        return x.unsqueeze(0)
    if dim == HEADS:
        h //= members
        return x.as_strided((members, b, h, s, d), (h * sh, sb, sh, ss, sd), x.storage_offset())
    s //= members
    return x.as_strided((members, b, h, s, d), (s * ss, sb, sh, ss, sd), x.storage_offset())


def _join(x: Tensor, dim: int | None, stacked: int) -> Tensor:
    """[P, B, h, s, D] -> one tensor; with `stacked` 1, [P, n, B, h, s, D] -> n of them, [n, B, H, S, D]."""
    p, *lead, h, s, d = x.shape
    if dim is None:
        return x.sum(0)
    if dim == HEADS:
        x = x.permute(1, 2, 0, 3, 4, 5) if stacked else x.transpose(0, 1)
        return x.reshape(*lead, p * h, s, d)
    x = x.permute(1, 2, 3, 0, 4, 5) if stacked else x.permute(1, 2, 0, 3, 4)
    return x.reshape(*lead, h, p * s, d)
