"""The one check that every composition has to pass: it is refused, or it is right in numbers, work, bytes and collectives."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.errors import CPError
from cp_engine.exchange.target import Target
from cp_engine.job.verify import reference
from cp_engine.job.verify.attention import inputs_of
from cp_engine.plan.cost import totals
from cp_engine.plan.ir import Plan
from cp_engine.plan.prove import prove
from cp_engine.runtime.program import Program
from tests.helpers import Counted, Post, assert_close
from tests.random.compositions import Case

BOUNDS = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 6e-2, "float16": 8e-3}
"""Largest error, for inputs of unit variance: absolute in float64, else relative to the largest element (some units of rounding)."""


class Escape(AssertionError):
    """A composition that compiled and is wrong, or that ended otherwise than with a CPError."""


def outcome(case: Case, *, by_threads: bool = False) -> str:
    """`right`, or the kind of the refusal; anything else is an Escape.

    Args:
        case: what is compiled, run with all ranks in this process and compared with dense attention.
        by_threads: also with a thread and a communicator per rank, whose bytes and collectives are compared with the plan.
    """
    try:
        try:
            plan = case.plan()
            program = Program(plan, Target(ranks=tuple(range(plan.degree)), device="cpu", communicator=None))
        except CPError as error:
            return type(error).__name__
        if case.called is None:
            right(plan, program, case.mask, by_threads=by_threads)
        else:  # as `PlannedAttention` does it: whatever boundaries a call brings, the composition is proved for them too
            assert plan.is_mask_from_call and plan.composition is not None
            again = prove(plan.composition, plan.shape, mask_of(case.called, plan.shape.sequence))
            assert again.entry == plan.entry, "the call's mask deals tokens otherwise"
            program = Program(again, program.target)
            right(again, program, case.called, by_threads=by_threads)
    except Exception as error:
        raise Escape(f"{type(error).__name__}: {error}\n{case!r}") from error
    return "right"


def right(plan: Plan, program: Program, mask: Mapping[str, object], *, by_threads: bool) -> None:
    """Numbers, work, bytes and collectives are those of dense attention and of the plan."""
    shape, seen, total = plan.shape, reference.visible(mask, plan.shape.sequence), totals(plan)
    assert sum(total.pairs) == int(seen.sum()) * shape.heads * shape.batch, "the work is not all visible pairs"
    dtype = getattr(torch, shape.dtype)
    tensors, dout = inputs_of(plan)
    tensors, dout = {n: x.to(dtype) for n, x in tensors.items()}, dout.to(dtype)
    exact = {n: x.double() for n, x in tensors.items()}
    wanted = reference.gradients_of(exact, dout.double(), seen, shape.head_dim**-0.5)
    require_close(together(plan, [results(plan, program, tensors, dout)]), wanted, shape.dtype)
    if by_threads:
        executed(plan, tensors, dout, wanted)


def require_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtype: str) -> None:
    """Values within the bound of a dtype."""
    largest = {n: 1.0 if dtype == "float64" else max(1.0, float(x.abs().max())) for n, x in wanted.items()}
    assert_close(
        {n: x / largest[n] for n, x in found.items()}, {n: x / largest[n] for n, x in wanted.items()}, BOUNDS[dtype]
    )


def results(
    plan: Plan,
    program: Program,
    tensors: Mapping[str, Tensor],
    dout: Tensor,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[Tensor]]:
    """out and the gradient of every input, one for each rank that lives here; `between` is called after forward."""
    ranks = program.target.ranks
    index = [torch.tensor(list(plan.entry.sequence[r]), dtype=torch.long) for r in ranks]
    given = {
        n: [(x.clone() if n in plan.parameters else x[:, :, i]).requires_grad_() for i in index]
        for n, x in tensors.items()
    }
    outs = program.run(given, plan.shape.head_dim**-0.5)
    between()
    leaves = [x for xs in given.values() for x in xs]
    grads = iter(torch.autograd.grad(outs, leaves, [dout[:, :, i] for i in index]))
    return {"out": [x.detach() for x in outs], **{f"d{n}": [next(grads) for _ in xs] for n, xs in given.items()}}


def together(plan: Plan, parts: Sequence[Mapping[str, Sequence[Tensor]]]) -> dict[str, Tensor]:
    """What ranks have, over the whole sequence; shares of parameters are summed."""
    back = torch.tensor([p for held in plan.entry.sequence for p in held]).argsort()
    found = {}
    for name in parts[0]:
        ranks = [x.double() for part in parts for x in part[name]]
        found[name] = torch.stack(ranks).sum(0) if name[1:] in plan.parameters else torch.cat(ranks, 2)[:, :, back]
    return found


class Links(Post):
    """Counts the bytes from rank to rank, forward and backward."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.bytes_sent = np.zeros((2, ranks, ranks), dtype=np.int64)
        self.way = [0] * ranks

    def exchange(self, group: tuple[int, ...], rank: int, parts: Mapping[int, Tensor]) -> list[Tensor]:
        for to, x in parts.items():
            self.bytes_sent[self.way[rank], rank, to] += x.nbytes * (to != rank)
        return super().exchange(group, rank, parts)


def executed(plan: Plan, tensors: Mapping[str, Tensor], dout: Tensor, wanted: Mapping[str, Tensor]) -> None:
    """A program for each rank, in a thread and with a communicator of its own, is as right and moves what was planned."""
    post = Links(plan.degree)

    def one(rank: int) -> tuple[dict[str, list[Tensor]], list[int]]:
        counter, forward = Counted(rank, post), [0]

        def between() -> None:
            post.way[rank], forward[0] = 1, counter.collectives

        try:
            program = Program(plan, Target(ranks=(rank,), device="cpu", communicator=counter))
            found = results(plan, program, tensors, dout, between)
        except BaseException:
            post.end()
            raise
        return found, [forward[0], counter.collectives - forward[0]]

    with ThreadPoolExecutor(plan.degree) as pool:
        done = list(pool.map(one, range(plan.degree)))
    require_close(together(plan, [found for found, _ in done]), wanted, plan.shape.dtype)
    total = totals(plan)
    for way, links in enumerate(post.bytes_sent):
        assert tuple(links.sum(1)) == total.sent[way], f"{links.sum(1)} bytes are sent, {total.sent[way]} are planned"
        assert links.max() == total.busiest_link[way], "the busiest link is not that of the plan"
        counted = {collectives[way] for _, collectives in done}
        assert counted == {total.collectives[way]}, f"{counted} collectives, {total.collectives[way]} are planned"
