"""The planned peak of memory against what the allocator saw, on two gloo ranks at sequence 8192."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from cp_engine.runtime import memory
from cp_engine.runtime.call import Call
from cp_engine.runtime.context import ContextParallel
from tests.helpers import plan_of, small

SEQUENCE = 8192
SHAPE = small(sequence=SEQUENCE, heads=2, head_dim=64)
WINDOW = {"kind": "window", "left": 100, "right": 0}


CALLS = 3


def measured(preset: str, mask: Mapping[str, object] | str, overrides: tuple[str, ...]) -> int:
    """Most bytes that lived at once during forward and backward of this rank, beside the call's own tensors.

    Of several calls the least: gloo's own thread lets go of a sent buffer when it gets to run, which on a busy machine is later.
    """
    plan = plan_of(preset, *overrides, shape=SHAPE, mask=mask)
    engine = ContextParallel(plan, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))
    sizes = memory.sizes_of(plan, engine.rank)
    tensors = {n: torch.randn(sizes[n], requires_grad=True) for n in plan.inputs}
    dout = torch.randn(*sizes["q"][:3], plan.shape.v_head_dim)
    found = []
    for _ in range(CALLS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            out = engine.attend(Call(tensors=tensors, mask=plan.mask)).out
            grads = torch.autograd.grad(out, list(tensors.values()), dout)
        found.append(most_held(profiled))
        del out, grads
    engine.close()
    return min(found)


def most_held(profiled: profile) -> int:
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    "preset,mask,overrides",
    [
        pytest.param("ring", "causal", (), marks=pytest.mark.long),
        ("ring_zigzag", "causal", ()),
        pytest.param("allgather_kv", "causal", (), marks=pytest.mark.long),
        ("allgather_kv", "causal", ("layout@cp.layout=zigzag",)),
        pytest.param("ulysses", "causal", (), marks=pytest.mark.long),
        ("ulysses", "causal", ("cp.head_groups=2",)),
        ("window_halo", WINDOW, ()),
    ],
)
def test_peak_bytes_are_those_of_the_plan(two, preset, mask, overrides):
    planned = memory.peak(plan_of(preset, *overrides, shape=SHAPE, mask=mask))
    found = two.run(measured, preset, mask, overrides)[planned.rank]
    assert found == pytest.approx(max(planned.forward, planned.backward), rel=0.1), f"{found:,} bytes, {planned}"


def test_partial_tiles_allocate_no_square_of_the_sequence(two):
    most = max(two.run(measured, "window_halo", WINDOW, ()))
    assert most < SEQUENCE * SEQUENCE / 2  # one bit for every pair would already be more than an eighth of this bound
    assert memory.peak(plan_of("ring_striped", shape=SHAPE, mask=WINDOW)).backward < SEQUENCE * SEQUENCE / 2
    scores = SEQUENCE // 2 * SEQUENCE // 2 * 4
    assert most < scores, f"{most:,} bytes; the scores of one head of one rank would take {scores:,}"
