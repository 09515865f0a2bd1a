"""DeepSeek sparse attention against dense causal attention of the same model, one CPU rank, forward and backward.

    python benchmarks/sparse.py                        # about 3 minutes; prints a table
    python benchmarks/sparse.py --sequence 16384 --topk 512

Dense is what the model would do without an indexer: k and v expanded from the latent for every head, and PyTorch's flash attention.
Both get the same latent; the expansion is timed with the dense one, the indexer and its loss with the sparse one. Runs alternate; what is
reported is the median of the ratios within a round.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_engine.kernels.sparse import torch_ops
from cp_engine.runtime.sparse_attention import SparseAttention


@dataclass(frozen=True)
class Model:
    """The sizes of one attention layer."""

    heads: int
    latent: int
    rope: int
    nope: int
    value: int
    index_heads: int
    index_dim: int


MODELS = {
    "debugmodel": Model(8, 128, 16, 32, 32, 4, 32),
    "671B with 16 heads": Model(16, 512, 64, 128, 128, 8, 128),
}
PARTS = {
    "select": "select",
    "attend": "attend",
    "learn": "loss of the indexer, with its gradients",
    "attend_backward": "attend, backward",
}


def tensors_of(model: Model, sequence: int) -> dict[str, Tensor]:
    sizes = {
        "q": (model.heads, sequence, model.latent + model.rope),
        "kv_latent": (1, sequence, model.latent),
        "k_rope": (1, sequence, model.rope),
        "q_index": (model.index_heads, sequence, model.index_dim),
        "k_index": (1, sequence, model.index_dim),
        "w_index": (model.index_heads, sequence, 1),
    }
    return {name: torch.randn(1, *size, requires_grad=True) for name, size in sizes.items()}


def dense_of(model: Model, tensors: dict[str, Tensor], sequence: int) -> Callable[[], None]:
    """Expands the latent for every head and attends, forward and backward."""
    q = torch.randn(1, model.heads, sequence, model.nope + model.rope, requires_grad=True)
    up = torch.randn(model.heads, model.nope + model.value, model.latent, requires_grad=True)
    dout = torch.randn(1, model.heads, sequence, model.value)
    latent, rope = tensors["kv_latent"], tensors["k_rope"]
    wider = model.nope + model.rope - model.value

    def run() -> None:
        k, v = torch.einsum("bosl,hdl->bhsd", latent, up).split([model.nope, model.value], 3)
        k = torch.cat((k, rope.expand(1, model.heads, sequence, model.rope)), 3)
        out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, wider)), is_causal=True)[..., : model.value]
        torch.autograd.grad(out, [q, latent, rope, up], dout)

    return run


def sparse_of(model: Model, tensors: dict[str, Tensor], topk: int) -> Callable[[], None]:
    attention = SparseAttention(topk)
    dout = torch.randn(1, model.heads, tensors["q"].shape[2], model.latent)

    def run() -> None:
        out, loss = attention(*tensors.values(), scale=(model.nope + model.rope) ** -0.5)
        torch.autograd.grad([out, loss], list(tensors.values()), [dout, torch.ones_like(loss)])

    return run


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Seconds in each part of the sparse path."""
    seconds: dict[str, float] = defaultdict(float)
    before = {name: getattr(torch_ops, name) for name in PARTS}

    def timed(name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            begin = time.perf_counter()
            result = before[name](*arguments)
            seconds[name] += time.perf_counter() - begin
            return result

        return call

    for name in PARTS:
        setattr(torch_ops, name, timed(name))
    try:
        yield seconds
    finally:
        for name, function in before.items():
            setattr(torch_ops, name, function)


def measure(name: str, sequence: int, topk: int, rounds: int) -> list[str]:
    torch.manual_seed(0)
    model = MODELS[name]
    tensors = tensors_of(model, sequence)
    runs = {"sparse": sparse_of(model, tensors, topk), "dense": dense_of(model, tensors, sequence)}
    times: dict[str, list[float]] = {n: [] for n in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for each, run in runs.items():
            begin = time.perf_counter()
            run()
            times[each].append(time.perf_counter() - begin)
    ratio = statistics.median(a / b for a, b in zip(times["sparse"], times["dense"], strict=True))
    with timed_parts() as parts:
        runs["sparse"]()
    total = sum(parts.values())
    shares = ", ".join(f"{PARTS[n]} {100 * parts[n] / total:.0f} %" for n in PARTS)
    medians = [statistics.median(times[n]) for n in ("sparse", "dense")]
    return [f"| {name} | {sequence} | {topk} | {medians[0]:.2f} | {medians[1]:.2f} | {ratio:.2f} | {shares} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--topk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | sequence | keys | sparse s | dense s | sparse / dense | where the sparse time goes |")
    print("|---|---|---|---|---|---|---|")
    for name in MODELS:
        print("\n".join(measure(name, given.sequence, given.topk, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
