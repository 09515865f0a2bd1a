"""Parity and speed of every attention kernel on one device, with all ranks of a composition in this process.

    python benchmarks/kernels.py                              # one GPU: under 5 minutes, most of it compiling flex
    python benchmarks/kernels.py --markdown docs/kernels.md
    python benchmarks/kernels.py --device cpu                 # the CPU kernels; no measurement of anything else

Parity is against dense attention in float64, relative by norm, under a random upstream gradient, with a bound for each dtype; exit code
1 where one is exceeded. The time is the median of one forward and backward of the whole composition; the exchange within the process is
in it, the same for all kernels. A kernel that cannot do a case is named with its reason. Where the time is up, cases are named as not
measured; flex, which compiles for each dtype and shape, comes last.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cp_engine.algebra.shape import Shape
from cp_engine.config.compose import compose
from cp_engine.config.composition import plan_from_config
from cp_engine.exchange.target import Target
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.kernels.registry import KERNELS, Kernel, KernelRequest, hardware
from cp_engine.plan.ir import Plan
from cp_engine.runtime.program import Program

BOUNDS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative by norm: some roundings of scores and weights to the bits of each dtype."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A composition with a mask and the heads of one model."""

    name: str
    preset: str
    overrides: tuple[str, ...]
    mask: Mapping[str, object]
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


ZIGZAG = ("cp.degree=4", "layout@cp.layout=zigzag")
CASES = (
    Case(
        name="gathered keys, zigzag, causal",  # full and causal tiles, merged
        preset="allgather_kv",
        overrides=ZIGZAG,
        mask={"kind": "causal"},
        heads=32,
        kv_heads=8,
        head_dim=128,
        v_head_dim=128,
    ),
    Case(
        name="gathered keys, zigzag, window",  # partial tiles
        preset="allgather_kv",
        overrides=ZIGZAG,
        mask={"kind": "window", "left": 127, "right": 0},
        heads=32,
        kv_heads=8,
        head_dim=128,
        v_head_dim=128,
    ),
    Case(
        name="heads exchanged, causal, MLA",  # one causal tile for each rank
        preset="ulysses",
        overrides=("cp.degree=4",),
        mask={"kind": "causal"},
        heads=32,
        kv_heads=32,
        head_dim=192,
        v_head_dim=128,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is computed.

    Args:
        parity: sequence length of the comparison, whose reference builds heads x sequence x sequence scores.
        speed: sequence length that is timed.
        rounds: forward and backward passes that are timed.
        share: one in how many heads is kept.
        dtypes: that kernels are tried with.
    """

    parity: int
    speed: int
    rounds: int
    share: int
    dtypes: tuple[str, ...]


SIZES = {
    "cuda": Sizes(parity=1024, speed=8192, rounds=10, share=1, dtypes=("bfloat16", "float16", "float32")),
    "cpu": Sizes(parity=257, speed=1024, rounds=3, share=4, dtypes=("bfloat16", "float32")),
    "smoke": Sizes(parity=160, speed=40, rounds=1, share=4, dtypes=("bfloat16", "float32")),
}


# ------------------------------------------------------------------ one composition
def plan_of(case: Case, kernel: Kernel, dtype: str, sequence: int, share: int) -> Plan:
    shape = Shape(
        batch=1,
        sequence=sequence,
        heads=case.heads // share,
        kv_heads=case.kv_heads // share,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        dtype=dtype,
    )
    config = compose(case.preset, (*case.overrides, f"cp.steps.attend.kernel={kernel.name}"))
    return plan_from_config(config, shape=shape, mask=case.mask)


class Ranks:
    """Every rank of a plan on one device, with its tokens."""

    def __init__(self, plan: Plan, device: str, tensors: Sequence[Tensor]) -> None:
        everyone = tuple(range(plan.degree))
        self.program = Program(plan, Target(ranks=everyone, device=device, communicator=None))
        self.index = [torch.tensor(list(held), device=device) for held in plan.entry.sequence]
        self.scale = plan.shape.head_dim**-0.5
        *qkv, dout = tensors
        self.local = [[x[:, :, i].requires_grad_() for i in self.index] for x in qkv]
        self.douts = [dout[:, :, i] for i in self.index]

    def run(self) -> dict[str, list[Tensor]]:
        """out, dq, dk and dv of every rank."""
        outs = self.program(self.local[0], self.local[1], self.local[2], self.scale)
        flat = torch.autograd.grad(outs, [x for xs in self.local for x in xs], self.douts)
        n = len(self.index)
        return {"out": outs, "dq": list(flat[:n]), "dk": list(flat[n : 2 * n]), "dv": list(flat[2 * n :])}


def parity(plan: Plan, mask: Mapping[str, object], device: str) -> dict[str, float]:
    """The error of each result, relative by norm, against float64 on the same rounded inputs."""
    tensors = [x.to(device, getattr(torch, plan.shape.dtype)) for x in verify.inputs(plan.shape)]
    ranks = Ranks(plan, device, tensors)
    found = ranks.run()
    seen = reference.visible(mask, plan.shape.sequence).to(device)
    q, k, v, dout = (x.double() for x in tensors)
    wanted = reference.gradients(q, k, v, dout, seen, ranks.scale)
    order = torch.cat(ranks.index)
    errors = {}
    for name, parts in found.items():
        expected = wanted[name][:, :, order]
        errors[name] = float((torch.cat([x.detach() for x in parts], 2).double() - expected).norm() / expected.norm())
    return errors


def milliseconds(plan: Plan, device: str, rounds: int) -> float:
    """The median of a forward and backward pass, after one that compiles and warms up."""
    shape, dtype = plan.shape, getattr(torch, plan.shape.dtype)
    sizes = (
        (shape.heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.v_head_dim),
        (shape.heads, shape.v_head_dim),
    )
    torch.manual_seed(0)
    ranks = Ranks(plan, device, [torch.randn(1, h, shape.sequence, d, device=device, dtype=dtype) for h, d in sizes])
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    ranks.run()
    taken = []
    for _ in range(rounds):
        wait()
        before = time.perf_counter()
        ranks.run()
        wait()
        taken.append((time.perf_counter() - before) * 1e3)
    return median(taken)


# ------------------------------------------------------------------ the table
def refusal(case: Case, kernel: Kernel, dtype: str, device: str) -> str | None:
    return kernel.refusal(
        KernelRequest(
            device=device,
            dtype=dtype,
            head_dim=case.head_dim,
            v_head_dim=case.v_head_dim,
            hardware=hardware(device),
        )
    )


def measure(device: str, sizes: Sizes, minutes: float) -> tuple[list[tuple[str, ...]], bool]:
    """One row for each case, kernel and dtype, and whether every error is within its bound."""
    rows: list[tuple[str, ...]] = []
    is_good, end = True, time.perf_counter() + 60 * minutes
    kernels = [k for k in KERNELS if device in (k.limits.devices or (device,))]
    for kernel in sorted(kernels, key=lambda k: k.name == "flex"):
        for dtype in sizes.dtypes:
            for case in CASES:
                head = (case.name, kernel.name, dtype)
                reason = refusal(case, kernel, dtype, device)
                if reason is not None:
                    rows.append((*head, *[""] * 4, "", reason))
                elif time.perf_counter() > end:
                    rows.append((*head, *[""] * 4, "", f"not measured: {minutes:g} minutes are over"))
                else:
                    plan = plan_of(case, kernel, dtype, sizes.parity, sizes.share)
                    errors = parity(plan, case.mask, device)
                    fits = all(e <= BOUNDS[dtype] for e in errors.values())  # not-a-number does not
                    is_good &= fits
                    longer = plan_of(case, kernel, dtype, sizes.speed, sizes.share)
                    took = milliseconds(longer, device, sizes.rounds)
                    numbers = (f"{errors[n]:.1e}" for n in ("out", "dq", "dk", "dv"))
                    rows.append((*head, *numbers, f"{took:.2f}", "" if fits else f"WRONG: above {BOUNDS[dtype]:.0e}"))
    names = [case.name for case in CASES]
    return sorted(rows, key=lambda row: names.index(row[0])), is_good


HEADER = ("case", "kernel", "dtype", "out", "dq", "dk", "dv", "ms", "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sequence", type=int, help="length that is timed")
    parser.add_argument("--minutes", type=float, default=4.0, help="no case is begun later")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only whether everything runs")
    parser.add_argument("--markdown", help="also write the table to this file")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu runs the CPU kernels")
    sizes = SIZES["smoke" if given.smoke else given.device]
    if given.sequence is not None:
        sizes = replace(sizes, speed=given.sequence)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    start = time.perf_counter()
    rows, is_good = measure(given.device, sizes, given.minutes)
    title = (
        f"{name}, torch {torch.__version__}, 4 ranks in one process; parity at {sizes.parity} tokens, "
        f"time at {sizes.speed}, heads / {sizes.share}; {time.perf_counter() - start:.0f} s"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for i, label in enumerate(HEADER):
        table.add_column(label, justify="right" if 3 <= i < 8 else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table, highlight=False)
    if given.markdown:
        lines = [title, "", *("| " + " | ".join(r) + " |" for r in (HEADER, ("---",) * len(HEADER), *rows))]
        Path(given.markdown).write_text("\n".join(lines) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
