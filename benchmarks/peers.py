"""Context parallelism written by hand, as one would for one model: what the engine is compared with. Causal, batch 1, even sizes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The kernel; v is widened to the width of q."""
    out, lse = _flash(q, k, widened(v, q.shape[3]), 0.0, is_causal)
    return out[..., : v.shape[3]], lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width = q.shape[3]
    wide = (widened(dout, width), q, k, widened(v, width), widened(out, width))
    dq, dk, dv = _flash_backward(*wide, lse, 0.0, is_causal)
    return dq, dk, dv[..., : v.shape[3]]


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a partial result to (out, lse)."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


# ------------------------------------------------------------------ Ulysses
class UlyssesPacked(torch.autograd.Function):
    """q, k and v in one buffer, tokens outermost: one collective in, one out; attention on strided views."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p, s = dist.get_world_size(), q.shape[2]
        heads, widths = q.shape[1] // p, [q.shape[3], k.shape[3], v.shape[3]]
        send = torch.cat([x[0].view(p, heads, s, x.shape[3]).transpose(1, 2) for x in (q, k, v)], 3)  # [p, s, h/p, all]
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        q_, k_, v_ = receive.view(1, p * s, heads, sum(widths)).transpose(1, 2).split(widths, 3)
        out, lse = flash(q_, k_, v_, True)
        back = out[0].view(heads, p, s, widths[2]).transpose(0, 1).contiguous()
        result = torch.empty_like(back)
        dist.all_to_all_single(result, back)
        ctx.save_for_backward(q_, k_, v_, out, lse)
        return result.view(1, p * heads, s, widths[2])

    @staticmethod
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor, ...]:
        p = dist.get_world_size()
        q, k, v, out, lse = ctx.saved_tensors
        _, h, s, d = dout.shape
        receive = torch.empty_like(dout)
        dist.all_to_all_single(receive, dout.contiguous())
        dout_ = receive.view(p, h // p, s, d).transpose(0, 1).reshape(1, h // p, p * s, d)
        grads = flash_backward(dout_, q, k, v, out, lse, True)
        send = torch.cat([g[0].view(h // p, p, s, g.shape[3]).transpose(0, 1) for g in grads], 3)  # [p, h/p, s, all]
        back = torch.empty_like(send)
        dist.all_to_all_single(back, send)
        return tuple(g.reshape(1, h, s, g.shape[3]) for g in back.split([g.shape[3] for g in grads], 3))


class UlyssesSeparate(torch.autograd.Function):
    """One collective for each tensor; contiguous tensors for the kernel."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_, k_, v_ = (to_heads(x) for x in (q, k, v))
        out, lse = flash(q_, k_, v_, True)
        ctx.save_for_backward(q_, k_, v_, out, lse)
        return to_sequence(out)

    @staticmethod
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return tuple(to_sequence(g) for g in flash_backward(to_heads(dout), q, k, v, out, lse, True))


def to_heads(x: Tensor) -> Tensor:
    p, (_, h, s, d) = dist.get_world_size(), x.shape
    receive = torch.empty(p, h // p, s, d)
    dist.all_to_all_single(receive, x.contiguous())
    return receive.transpose(0, 1).reshape(1, h // p, p * s, d)


def to_sequence(x: Tensor) -> Tensor:
    p, (_, h, s, d) = dist.get_world_size(), x.shape
    send = x[0].reshape(h, p, s // p, d).transpose(0, 1).contiguous()
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    return receive.view(1, p * h, s // p, d)


# ------------------------------------------------------------------ zigzag: rank r holds chunks r and 2P-1-r
class RingZigzag(torch.autograd.Function):
    """k and v in one buffer go round; backward sends them round again, and the gradients after them."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p, r, half = dist.get_world_size(), dist.get_rank(), q.shape[2] // 2
        home = block = torch.cat((k.flatten(), v.flatten()))
        out = lse = q
        for hop in range(p):
            if hop + 1 < p:
                coming, works = sent_on(block)
            k_, v_ = block[: k.numel()].view_as(k), block[k.numel() :].view_as(v)
            if hop == 0:
                out, lse = (x.contiguous() for x in flash(q, k_, v_, True))
            elif hop <= r:  # keys of an earlier rank: its first chunk is before both of ours
                merge(out, lse, *flash(q, k_[:, :, :half], v_[:, :, :half], False))
            else:  # of a later rank: all of them are before our second chunk
                merge(out[:, :, half:], lse[:, :, half:], *flash(q[:, :, half:], k_, v_, False))
            if hop + 1 < p:
                block = arrived(coming, works)
        ctx.save_for_backward(q, home, out, lse)
        ctx.shapes = k.shape, v.shape
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor, ...]:
        p, r = dist.get_world_size(), dist.get_rank()
        q, block, out, lse = ctx.saved_tensors
        k_shape, v_shape = ctx.shapes
        half, size = q.shape[2] // 2, k_shape.numel()
        total, dq = torch.zeros_like(block), q
        following, following_works = (total, ())
        for hop in range(p):
            if hop + 1 < p:
                coming, works = sent_on(block)
            k, v = block[:size].view(k_shape), block[size:].view(v_shape)
            rows, keys = slice(None), slice(None)
            if 0 < hop <= r:
                keys = slice(0, half)
            elif hop:
                rows = slice(half, None)
            parts = (x[:, :, rows] for x in (dout, q, out, lse))
            dout_, q_, out_, lse_ = parts
            grads = flash_backward(dout_, q_, k[:, :, keys], v[:, :, keys], out_, lse_, hop == 0)
            if hop == 0:
                dq = grads[0]
            else:
                dq[:, :, rows] += grads[0]
                total = arrived(following, following_works)
            total[:size].view(k_shape)[:, :, keys] += grads[1]
            total[size:].view(v_shape)[:, :, keys] += grads[2]
            following, following_works = sent_on(total)
            if hop + 1 < p:
                block = arrived(coming, works)
        total = arrived(following, following_works)
        return dq, total[:size].view(k_shape), total[size:].view(v_shape)


def sent_on(block: Tensor) -> tuple[Tensor, Sequence[dist.Work]]:
    p, r, coming = dist.get_world_size(), dist.get_rank(), torch.empty_like(block)
    ops = [dist.P2POp(dist.isend, block, (r + 1) % p), dist.P2POp(dist.irecv, coming, (r - 1) % p)]
    return coming, dist.batch_isend_irecv(ops)


def arrived(coming: Tensor, works: Sequence[dist.Work]) -> Tensor:
    for work in works:
        work.wait()
    return coming


class GatherZigzag(torch.autograd.Function):
    """All keys and values in sequence order on every rank; backward returns each rank its own keys' gradients and sums them."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p, r, half = dist.get_world_size(), dist.get_rank(), q.shape[2] // 2
        send = torch.cat((k.flatten(), v.flatten()))
        receive = torch.empty(p, send.numel())
        dist.all_gather_into_tensor(receive.view(-1), send)
        whole = []
        for part, x in zip(receive.split([k.numel(), v.numel()], 1), (k, v), strict=True):
            chunks = part.view(p, *x.shape[:2], 2, half, x.shape[3])
            ordered = torch.cat((chunks[:, :, :, 0], chunks[:, :, :, 1].flip(0)))
            whole.append(ordered.permute(1, 2, 0, 3, 4).reshape(*x.shape[:2], 2 * p * half, x.shape[3]))
        outs, lses = [], []
        for i, before in enumerate((r * half, (2 * p - 1 - r) * half)):
            q_ = q[:, :, i * half : (i + 1) * half]
            out, lse = flash(q_, *(x[:, :, before : before + half] for x in whole), True)
            if before:
                merge(out, lse, *flash(q_, *(x[:, :, :before] for x in whole), False))
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
        ctx.save_for_backward(q, *whole, out, lse)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor, ...]:
        p, r = dist.get_world_size(), dist.get_rank()
        q, k, v, out, lse = ctx.saved_tensors
        half = q.shape[2] // 2
        dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
        for i, before in enumerate((r * half, (2 * p - 1 - r) * half)):
            rows = [x[:, :, i * half : (i + 1) * half] for x in (dout, q, out, lse)]
            spans = [(slice(before, before + half), True), *([(slice(0, before), False)] if before else [])]
            dq = torch.zeros_like(rows[1])
            for span, is_causal in spans:
                grads = flash_backward(rows[0], rows[1], k[:, :, span], v[:, :, span], rows[2], rows[3], is_causal)
                dq += grads[0]
                dk[:, :, span] += grads[1]
                dv[:, :, span] += grads[2]
            dqs.append(dq)
        send = []
        for g in (dk, dv):
            chunks = g.view(*g.shape[:2], 2 * p, half, g.shape[3])
            pairs = torch.stack((chunks[:, :, :p], chunks[:, :, p:].flip(2)), 3)  # [1, K, p, 2, half, D]
            send.append(pairs.permute(2, 0, 1, 3, 4, 5).flatten(1))
        packed = torch.cat(send, 1)
        receive = torch.empty_like(packed)
        dist.all_to_all_single(receive, packed)
        own = receive.sum(0).split([x.shape[1] for x in send])
        shapes = [(*g.shape[:2], 2 * half, g.shape[3]) for g in (dk, dv)]
        return torch.cat(dqs, 2), *(x.view(s) for x, s in zip(own, shapes, strict=True))


# ------------------------------------------------------------------ multi-head latent attention
def expanded(latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of all heads for this rank's tokens, as a model expands them before an attention call.

    Args:
        latent: [1, 1, s, L].
        rope: [1, 1, s, R].
        up: [H, Dnope + Dv, L]; Dnope and Dv are equal here.
    """
    kv = (latent[0, 0] @ up.flatten(0, 1).T).view(1, -1, *up.shape[:2]).transpose(1, 2)
    nope, v = kv.chunk(2, 3)
    return torch.cat((nope, rope.expand(*nope.shape[:3], -1)), 3), v
