"""Overhead of the engine against hand-written context parallelism, on CPU ranks with gloo.

    python benchmarks/attention.py                     # all cases, about 8 minutes; prints a table
    python benchmarks/attention.py --cases small ring --markdown docs/benchmarks.md

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

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cp_engine
from cp_engine.primitives import exchange
from cp_engine.runtime.call import Call


@dataclass(frozen=True)
class Case:
    """One attention call, batch 1, float32, causal.

    Args:
        preset: of the engine.
        sequence, heads, kv_heads, head_dim, v_head_dim: of the call.
        peers: names in PEERS.
        bound: the bar, against the peer with the lowest median, or against `judge` where that is named.
        measure: `cpu` (main-thread CPU seconds) or `wall` (seconds).
        seconds: how long rounds are repeated.
    """

    preset: str
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    peers: tuple[str, ...]
    bound: float
    measure: str = "wall"
    seconds: float = 60
    judge: str = ""
    overrides: tuple[str, ...] = ()


BOTH = ("by hand, packed", "by hand, separate")
ZIGZAG = ("layout@cp.layout=zigzag",)
CASES = {
    "small": Case("ulysses", 16, 8, 8, 64, 64, BOTH, 1.3, "cpu", 20, BOTH[0]),
    "ulysses": Case("ulysses", 4096, 8, 8, 64, 64, BOTH, 1.03),
    "ulysses mla": Case("ulysses", 2048, 16, 16, 192, 128, BOTH, 1.03),
    "ring": Case("ring_zigzag", 2048, 8, 8, 64, 64, ("by hand, zigzag ring",), 1.03),
    "ring long": Case("ring_zigzag", 4096, 8, 8, 64, 64, ("by hand, zigzag ring",), 1.03),
    "gather": Case("allgather_kv", 4096, 8, 8, 64, 64, ("by hand, zigzag gather",), 1.03, overrides=ZIGZAG),
    "gather gqa": Case("allgather_kv", 4096, 16, 4, 64, 64, ("by hand, zigzag gather",), 1.03, overrides=ZIGZAG),
    "latent": Case("mla_ulysses", 2048, 16, 16, 192, 128, ("ulysses, expanding first",), 1.0),
}
HAND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "by hand, packed": peers.UlyssesPacked.apply,
    "by hand, separate": peers.UlyssesSeparate.apply,
    "by hand, zigzag ring": peers.RingZigzag.apply,
    "by hand, zigzag gather": peers.GatherZigzag.apply,
}
LATENT_DIM, ROPE_DIM = 512, 64
"""Of DeepSeek-V3."""


# ------------------------------------------------------------------ measuring
def engine_for(case: Case, preset: str | None = None) -> cp_engine.ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return cp_engine.compile(
        preset or case.preset,
        mesh=mesh,
        sequence=case.sequence,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        latent_dim=LATENT_DIM,
        rope_dim=ROPE_DIM,
        overrides=case.overrides,
    )


def measure(case: Case) -> dict[str, list[float]]:
    """The engine and its peers."""
    engine = engine_for(case)
    if engine.plan.inputs != ("q", "k", "v"):
        return measure_latent(case, engine)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return engine.call(q, k, v, enable_gqa=case.kv_heads != case.heads)

    return rounds_of(case, engine, {"engine": call, **{name: HAND[name] for name in case.peers}})


def measure_latent(case: Case, engine: cp_engine.ContextParallel) -> dict[str, list[float]]:
    """From the latent: gathered and expanded for the rank's own heads, or expanded for all heads and exchanged."""
    exchange_expanded = engine_for(case, "ulysses")

    def gathered(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
        tensors = {"q": q, "kv_latent": latent, "k_rope": rope}
        return engine.attend(Call(tensors=tensors, parameters={"kv_up": up}))[0]

    def exchanged(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
        return exchange_expanded.call(q, *peers.expanded(latent, rope, up))

    torch.manual_seed(0)
    nope = case.head_dim - ROPE_DIM
    sizes = {"q": (case.heads, case.head_dim), "latent": (1, LATENT_DIM), "rope": (1, ROPE_DIM)}
    leaves = [engine.shard(torch.randn(1, h, case.sequence, d), dim=2) for h, d in sizes.values()]
    leaves.append(torch.randn(case.heads, nope + case.v_head_dim, LATENT_DIM) * LATENT_DIM**-0.5)
    dout = engine.shard(torch.randn(1, case.heads, case.sequence, case.v_head_dim), dim=2)
    attends = {"engine": gathered, case.peers[0]: exchanged}
    return rounds_over(case, attends, [x.requires_grad_() for x in leaves], dout, shared=1)


def measure_packing(sequence: int, seconds: float) -> dict[str, list[float]]:
    """The engine with q, k and v in one collective and with one for each, whatever their size."""
    case = Case("ulysses", sequence, 8, 8, 64, 64, (), 0.0, seconds=seconds)
    engines = {}
    limit = exchange.PACKED_BYTES
    for name, bytes_limit in (("packed", 1 << 62), ("separate", 0)):
        exchange.PACKED_BYTES = bytes_limit
        engines[name] = engine_for(case)
    exchange.PACKED_BYTES = limit
    return rounds_of(case, engines["packed"], {name: engine.call for name, engine in engines.items()})


def rounds_of(
    case: Case, engine: cp_engine.ContextParallel, attends: dict[str, Callable[..., Tensor]]
) -> dict[str, list[float]]:
    """As `rounds_over`, for q, k and v."""
    torch.manual_seed(0)
    sizes = (
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.v_head_dim),
        (case.heads, case.v_head_dim),
    )
    *leaves, dout = (engine.shard(torch.randn(1, h, case.sequence, d), dim=2) for h, d in sizes)
    return rounds_over(case, attends, [x.requires_grad_() for x in leaves], dout)


def rounds_over(
    case: Case, attends: dict[str, Callable[..., Tensor]], leaves: list[Tensor], dout: Tensor, shared: int = 0
) -> dict[str, list[float]]:
    """Per peer, one number per round: that of the slowest rank. The last `shared` leaves are whole on every rank."""
    results: dict[str, list[Tensor]] = {}
    for name, attend in attends.items():  # the same numbers, or no measurement
        out = attend(*leaves)
        results[name] = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        for x in results[name][len(leaves) + 1 - shared :]:
            dist.all_reduce(x)
        for a, b in zip(results[name], results[next(iter(attends))], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    order, rng, rounds = list(attends), random.Random(0), {n: [] for n in attends}
    clock = time.thread_time if case.measure == "cpu" else time.perf_counter
    for attend in list(attends.values()) * (20 if case.sequence < 512 else 1):
        torch.autograd.grad(attend(*leaves), leaves, dout)
    start = time.perf_counter()
    while True:
        rng.shuffle(order)
        for name in order:
            dist.barrier()
            before = clock()
            torch.autograd.grad(attends[name](*leaves), leaves, dout)
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
    best = case.judge or min(others, key=lambda n: statistics.median(rounds[n]))
    heads = f"H{case.heads}" + (f"|{case.kv_heads}" if case.kv_heads != case.heads else "")
    width = f"D{case.head_dim}" + (f"|{case.v_head_dim}" if case.v_head_dim != case.head_dim else "")
    rows = []
    for other in (n for n in rounds if n != "engine"):
        middle, low, high = ratio(rounds["engine"], rounds[other])
        bar = f"<= {case.bound}" if other == best else ""
        rows.append(
            f"| {name}: {case.preset} S{case.sequence} {heads} {width} | {case.measure} | {other} | "
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
