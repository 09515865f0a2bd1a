"""The gloo ranks of the tests: a function that fails says where and why, and leaves usable ranks for the next one."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.gloo import HANG_SECONDS, world


def ranks_summed() -> float:
    found = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(found)
    return found.item()


def asserts() -> None:
    assert dist.get_rank() != 1, "one and one is three"
    dist.barrier()


def raises_nothing() -> None:
    if dist.get_rank() == 1:
        with pytest.raises(ValueError):
            pass
    dist.barrier()


def asserts_after_another_gave_up() -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.1))
    if dist.get_rank() == 1:
        time.sleep(1)
        raise AssertionError("too late")
    dist.barrier(group)


def leaves_python() -> None:
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def leaves_a_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    raise AssertionError("on every rank")


@pytest.mark.parametrize(
    ("function", "how", "why"),
    [
        (asserts, "failed", "AssertionError: one and one is three"),
        (raises_nothing, "failed", "DID NOT RAISE"),
        (asserts_after_another_gave_up, "failed", "too late"),
        (leaves_python, "failed", "SystemExit: 3"),
        (dies, "ended with exit code 3", ""),
        (hangs, "was still running, here", "in hangs"),
    ],
)
def test_a_rank_that_fails_is_told_of_first_and_the_next_function_finds_usable_ranks(
    function: Callable[[], None], how: str, why: str
) -> None:
    with world(3, hang=5.0 if function is hangs else HANG_SECONDS, grace=1.0) as three:
        assert three.run(ranks_summed) == [3.0, 3.0, 3.0]
        with pytest.raises(AssertionError) as caught:
            three.run(function)
        first = str(caught.value).split("\nthen rank ")[0]
        assert first.startswith(f"rank 1 of 3 {how}\n") and why in first, caught.value
        assert three.run(ranks_summed) == [3.0, 3.0, 3.0]


def test_what_a_failed_function_left_in_the_group_does_not_meet_the_next() -> None:
    with world(2, grace=1.0) as two:
        with pytest.raises(AssertionError, match=r"rank [01] of 2 failed(.|\n)*then rank [01] failed"):
            two.run(leaves_a_collective)
        assert two.run(ranks_summed) == [1.0, 1.0]
