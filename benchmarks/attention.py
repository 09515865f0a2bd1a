"""Overhead of the engine against hand-written context parallelism, on CPU ranks with gloo.

    python benchmarks/attention.py                     # all cases, about 3 minutes; prints a table
    python benchmarks/attention.py --cases small --markdown docs/benchmarks.md

Every peer gets the same tokens, forward and backward run once per peer and round, in random order, with a barrier before each.
A round's time is that of the slowest rank. What is reported is the median over rounds of the ratio within a round, with the 90 %
interval of that median (bootstrap), so that a machine that slows down or is busy with other work changes both sides of a ratio.
"""

import argparse
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cp_engine
from cp_engine.primitives import exchange

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Case:
    """One attention call, batch 1, float32, causal."""

    sequence: int
    heads: int
    head_dim: int
    measure: str
    """`cpu` (main-thread CPU seconds) or `wall` (seconds)."""
    seconds: float
    bound: float


CASES = {"small": Case(16, 8, 64, "cpu", 20, 1.3), "large": Case(4096, 8, 64, "wall", 120, 1.03)}


# ------------------------------------------------------------------ by hand: Ulysses for equal heads, batch 1
class HandPacked(torch.autograd.Function):
    """q, k and v in one buffer, tokens outermost: one collective in, one out; attention on strided views."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = dist.get_world_size()
        _, h, s, d = q.shape
        send = torch.stack([x[0].view(p, h // p, s, d).transpose(1, 2) for x in (q, k, v)], 2)  # [p, s, 3, h/p, d]
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        q_, k_, v_ = receive.view(1, p * s, 3, h // p, d).permute(2, 0, 3, 1, 4)
        out, lse = flash(q_, k_, v_, 0.0, True)
        back = out[0].view(h // p, p, s, d).transpose(0, 1).contiguous()
        result = torch.empty_like(back)
        dist.all_to_all_single(result, back)
        ctx.save_for_backward(q_, k_, v_, out, lse)
        return result.view(1, h, s, d)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, ...]:
        p = dist.get_world_size()
        q, k, v, out, lse = ctx.saved_tensors
        _, h, s, d = dout.shape
        receive = torch.empty_like(dout)
        dist.all_to_all_single(receive, dout.contiguous())
        dout_ = receive.view(p, h // p, s, d).transpose(0, 1).reshape(1, h // p, p * s, d)
        grads = flash_backward(dout_, q, k, v, out, lse, 0.0, True)
        send = torch.stack([g[0].view(h // p, p, s, d).transpose(0, 1) for g in grads], 1)  # [p, 3, h/p, s, d]
        back = torch.empty_like(send)
        dist.all_to_all_single(back, send)
        return tuple(g.reshape(1, h, s, d) for g in back.unbind(1))


class HandSeparate(torch.autograd.Function):
    """One collective for each tensor; contiguous tensors for the kernel."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_, k_, v_ = (to_heads(x) for x in (q, k, v))
        out, lse = flash(q_, k_, v_, 0.0, True)
        ctx.save_for_backward(q_, k_, v_, out, lse)
        return to_sequence(out)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return tuple(to_sequence(g) for g in flash_backward(to_heads(dout), q, k, v, out, lse, 0.0, True))


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


# ------------------------------------------------------------------ measuring
def engine_for(case: Case) -> cp_engine.ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return cp_engine.compile("ulysses", mesh=mesh, sequence=case.sequence, heads=case.heads, head_dim=case.head_dim)


def measure(case: Case) -> dict[str, list[float]]:
    """The engine and the hand-written exchanges."""
    engine = engine_for(case)
    peers = {"engine": engine.call, "hand, packed": HandPacked.apply, "hand, separate": HandSeparate.apply}
    return rounds_of(case, engine, peers)


def measure_packing(sequence: int, seconds: float) -> dict[str, list[float]]:
    """The engine with q, k and v in one collective and with one for each, whatever their size."""
    case = Case(sequence, 8, 64, "wall", seconds, 0.0)
    engines = {}
    limit = exchange.PACKED_BYTES
    for name, bytes_limit in (("packed", 1 << 62), ("separate", 0)):
        exchange.PACKED_BYTES = bytes_limit
        engines[name] = engine_for(case)
    exchange.PACKED_BYTES = limit
    return rounds_of(case, engines["packed"], {name: engine.call for name, engine in engines.items()})


def rounds_of(
    case: Case, engine: cp_engine.ContextParallel, peers: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]
) -> dict[str, list[float]]:
    """Per peer, one number per round: that of the slowest rank."""
    torch.manual_seed(0)
    shape = (1, case.heads, case.sequence, case.head_dim)
    q, k, v, dout = (engine.shard(torch.randn(shape), dim=2) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results = {}
    for name, attend in peers.items():  # the same numbers, or no measurement
        out = attend(*leaves)
        results[name] = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        for a, b in zip(results[name], results[next(iter(peers))], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    order, rng, rounds = list(peers), random.Random(0), {n: [] for n in peers}
    clock = time.thread_time if case.measure == "cpu" else time.perf_counter
    for attend in list(peers.values()) * (20 if case.sequence < 512 else 1):
        torch.autograd.grad(attend(*leaves), leaves, dout)
    start = time.perf_counter()
    while True:
        rng.shuffle(order)
        for name in order:
            dist.barrier()
            before = clock()
            torch.autograd.grad(peers[name](*leaves), leaves, dout)
            took = torch.tensor([clock() - before], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            rounds[name].append(took.item())
        stop = torch.tensor([float(time.perf_counter() - start > case.seconds)])
        dist.broadcast(stop, 0)
        if stop.item():
            return rounds


def ratio(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Median over rounds of a / b, and its 90 % interval."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), medians[50], medians[950]


def report(case: Case, name: str, rounds: dict[str, list[float]]) -> list[str]:
    """Markdown rows of one case."""
    others = [n for n in rounds if n != "engine"]
    if case.measure == "cpu":
        others = ["hand, packed"]  # the bar for small messages
    best = min(others, key=lambda n: statistics.median(rounds[n]))
    rows = []
    for other in (n for n in rounds if n != "engine"):
        middle, low, high = ratio(rounds["engine"], rounds[other])
        bar = f"<= {case.bound}" if other == best else ""
        rows.append(
            f"| {name}: S{case.sequence} H{case.heads} D{case.head_dim} | {case.measure} | {other} | "
            f"{statistics.median(rounds['engine']) * 1e3:.3f} | {statistics.median(rounds[other]) * 1e3:.3f} | "
            f"{middle:.3f} [{low:.3f}, {high:.3f}] | {bar} | {len(rounds[other])} |"
        )
    return rows


def rank_main(rank: int, ranks: int, port: int, names: list[str], packing: bool, markdown: str | None) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    lines = [
        f"{ranks} gloo ranks, float32, causal, forward and backward, torch {torch.__version__}, 1 thread per rank",
        "",
        "| case | measure | peer | engine ms | peer ms | engine / peer, 90 % interval | bar | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        lines += report(CASES[name], name, measure(CASES[name]))
    if packing:
        lines += [
            "",
            "q, k and v in one collective or in one each (H8 D64, wall seconds; the engine packs up to 1 MiB per rank)",
            "",
        ]
        lines += [
            "| sequence | sent per rank | packed ms | separate ms | packed / separate, 90 % interval | rounds |",
            "|---|---|---|---|---|---|",
        ]
    for sequence in (16, 256, 1024, 2048, 4096) if packing else ():
        found = measure_packing(sequence, 8 if sequence < 2048 else 25)
        middle, low, high = ratio(found["packed"], found["separate"])
        sent = 3 * 8 * 64 * 4 * sequence // ranks * (ranks - 1) // ranks
        times = [statistics.median(found[n]) * 1e3 for n in ("packed", "separate")]
        lines.append(
            f"| {sequence} | {sent / 2**10:.0f} KiB | {times[0]:.3f} | {times[1]:.3f} | "
            f"{middle:.3f} [{low:.3f}, {high:.3f}] | {len(found['packed'])} |"
        )
    if rank == 0:
        print("\n".join(lines))
        if markdown:
            Path(markdown).write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--packing", action="store_true", help="also compare packed with separate exchanges")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--markdown", help="also write the table to this file")
    given = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(rank_main, (given.ranks, free, given.cases, given.packing, given.markdown), nprocs=given.ranks)
