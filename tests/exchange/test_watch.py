"""Ranks that do not make the same calls: each gets an error that says who did what, long before the group's timeout."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_engine
from cp_engine import ContextParallel, CPError
from tests.gloo import World
from tests.helpers import shipped

LENGTH, HEADS, WIDTH = 32, 4, 8


class Model(nn.Module):
    """Two layers of attention, with a parameter before them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first, self.second = cp_engine.Attention(), cp_engine.Attention()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * self.scale, x, x)
        return self.second(y, y, y)


def engine_on(ranks: tuple[int, ...], preset: str) -> ContextParallel:
    """An engine on a group of its own, which nobody needs afterwards, with a timeout far beyond a test's."""
    group = dist.new_group(ranks, timeout=timedelta(minutes=10), use_local_synchronization=True)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    composed = {**shipped(preset, ()), "mesh": {shipped(preset, ())["axes"][0]: len(ranks)}}
    return cp_engine.compile(composed, mesh=mesh, sequence=LENGTH, heads=HEADS, head_dim=WIDTH)


class Rank:
    """What one rank does with a model, step by step."""

    def __init__(self, ranks: tuple[int, ...], preset: str) -> None:
        self.cp, self.model = engine_on(ranks, preset), Model()
        self.is_odd = dist.get_rank() == ranks[-1]
        self.x = self.cp.shard(torch.randn(1, HEADS, LENGTH, WIDTH), dim=2)

    def forward(self) -> Tensor:
        with self.cp.context(self.model):
            return self.model(self.x).sum()

    def both(self) -> None:
        self.forward().backward()

    def sum(self) -> None:
        self.cp.sum_gradients(self.model)


def skips_backward(rank: Rank) -> None:
    loss = rank.forward()
    if not rank.is_odd:
        loss.backward()
    rank.sum()


def skips_the_second_backward(rank: Rank) -> None:
    rank.both()
    loss = rank.forward()
    if not rank.is_odd:
        loss.backward()
    rank.sum()


def skips_the_second_forward(rank: Rank) -> None:
    rank.both()
    if not rank.is_odd:
        rank.both()
    rank.sum()


def sums_twice(rank: Rank) -> None:
    rank.both()
    rank.sum()
    if rank.is_odd:
        rank.sum()
    rank.both()


def raises_after_its_forward(rank: Rank) -> None:
    with rank.cp.context(rank.model):
        loss = rank.model(rank.x).sum()
        if rank.is_odd:
            raise KeyError("no such sample")
        loss.backward()


def never_enters(rank: Rank) -> None:
    if rank.is_odd:
        rank.model(rank.x).sum().backward()
    else:
        rank.both()
    rank.sum()


def calls_with_another_length(rank: Rank) -> None:
    if rank.is_odd:
        rank.x = rank.x[:, :, 1:]
    rank.both()


def unshards_instead(rank: Rank) -> None:
    loss = rank.forward()
    if rank.is_odd:
        rank.cp.unshard(rank.x, dim=2)
    loss.backward()


def ends_a_step_early(rank: Rank) -> None:
    rank.both()
    if not rank.is_odd:
        rank.both()
    rank.cp.close()


def seen(case: Callable[[Rank], None], groups: dict[tuple[int, ...], str]) -> tuple[float, str]:
    """How long this rank took to its error, and what that said."""
    ranks = next(ranks for ranks in groups if dist.get_rank() in ranks)
    rank = Rank(ranks, groups[ranks])
    began = time.monotonic()
    try:
        case(rank)
        text = "no error"
    except (CPError, KeyError) as error:
        text = f"{type(error).__name__}: {error}"
    return time.monotonic() - began, text


SKIPPED = "rank {} skipped "
CASES = {
    skips_backward: ("sum_gradients  no backward has gone through this engine", "rank {} stopped"),
    skips_the_second_backward: (SKIPPED, SKIPPED + "backward pass of attention 3"),
    skips_the_second_forward: (SKIPPED, SKIPPED + "forward pass of attention 3"),
    sums_twice: ("summed in this step already", "rank {} stopped"),
    raises_after_its_forward: ("KeyError: 'no such sample'", "rank {} stopped"),
    never_enters: ("sum_gradients  no backward has gone through this engine", "rank {} stopped"),
    calls_with_another_length: ("call.q  is [1, 4, 15, 8], and the plan is for [1, 4, 16, 8]", "rank {} stopped"),
    unshards_instead: (SKIPPED, SKIPPED + "backward pass of attention 1"),
    ends_a_step_early: ("no error", SKIPPED + "forward pass of attention 3"),
}
"""What the rank that does otherwise is told, and what the others are."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_rank_that_does_otherwise_is_named_on_every_rank(four: World, case: Callable[[Rank], None]) -> None:
    found = four.run(seen, case, {(0, 1): "ulysses", (2, 3): "ring"})  # messages between two, and collectives
    for rank, (seconds, text) in enumerate(found):
        odd, others = (told.format(rank | 1) for told in CASES[case])
        assert (odd if rank % 2 else others) in text and seconds < 45, (rank, seconds, text)


def test_four_ranks_of_which_one_skips_its_second_backward_are_told_alike(four: World) -> None:
    for _, text in four.run(seen, skips_the_second_backward, {(0, 1, 2, 3): "allgather_kv"}):
        assert "rank 3 skipped backward pass of attention 3" in text and "and went on to sum of gradients 1" in text
        assert "rank 3  has begun 4 forward and 2 backward passes of attention, 1 sums of gradients" in text


def leftovers(end: str) -> tuple[bool, int]:
    """Whether an engine outlives its last name, without a collection of garbage, and the threads that outlive it."""
    before = set(threading.enumerate())
    gc.disable()
    try:
        engine = engine_on((0, 1, 2, 3), "ulysses")
        while_used = len(set(threading.enumerate()) - before)
        if end == "close":
            engine.close()
        alive = weakref.ref(engine)
        del engine
        return alive() is not None, len(set(threading.enumerate()) - before) - (while_used - 1)
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["close", "its last name"])
def test_an_engine_that_ended_leaves_neither_groups_nor_a_thread(four: World, end: str) -> None:
    # groups that end after the world keep gloo's threads, and those abort a process that has done its work
    assert four.run(leftovers, end) == [(False, 0)] * 4
