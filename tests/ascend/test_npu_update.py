"""Merging by npu_ring_attention_update: against the formula, with queries that saw nothing, in strategies, and where it is missing."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cp_engine.errors import KernelError
from cp_engine.job import explain
from cp_engine.job.verify import attention as verify
from cp_engine.kernels.ascend.operators import registered, shipped
from cp_engine.kernels.ascend.stand_in import stand_in
from cp_engine.kernels.npu_merge import OperatorMerge
from cp_engine.kernels.registry import KERNELS
from cp_engine.primitives.dense import Dense
from cp_engine.runtime import devices
from tests.ascend.npu_calls import Recorded
from tests.ascend.test_npu import MASKS, SHAPE
from tests.ascend.test_npu_rules import refused, update
from tests.helpers import fitting, plan_of

UPDATE = "npu_ring_attention_update"
BY_UPDATE = "cp.steps.attend.kernel=npu_fusion_update"


@pytest.fixture
def operators() -> Iterator[None]:
    with stand_in():
        yield


@pytest.fixture
def older() -> Iterator[None]:
    """A torch_npu that registers attention and not the update, as 2.10.0."""
    library = torch.library.Library("npu", "FRAGMENT")
    library.define(shipped()[1]["npu_fusion_attention"])
    yield
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.usefixtures("operators")
def test_update_follows_the_vendors_formula(is_packed: bool, dtype: torch.dtype) -> None:
    call = update(is_packed=is_packed)
    call |= {n: x.to(dtype) for n, x in call.items() if n.endswith("attn_out") and isinstance(x, Tensor)}
    out, highest, total = torch.ops.npu.npu_ring_attention_update(**call)
    out1, out2 = (x.double() for n, x in call.items() if n.endswith("attn_out") and isinstance(x, Tensor))
    m1, m2 = (x.double() for n, x in call.items() if n.endswith("softmax_max") and isinstance(x, Tensor))
    s1, s2 = (x.double() for n, x in call.items() if n.endswith("softmax_sum") and isinstance(x, Tensor))
    m = torch.where(m1 > m2, m1, m2)
    s = s1 * torch.exp(m1 - m) + s2 * torch.exp(m2 - m)
    shares = [(s1 * torch.exp(m1 - m) / s)[..., 0], (s2 * torch.exp(m2 - m) / s)[..., 0]]
    if is_packed:  # [T, N] beside [T, N, D]
        a, b = (x.unsqueeze(2) for x in shares)
    else:  # [B, N, S] beside [S, B, N D]
        a, b = (x.permute(2, 0, 1).repeat_interleave(4, 2) for x in shares)
    assert (out.dtype, highest.dtype, total.dtype) == (dtype, torch.float32, torch.float32)
    assert (highest.double() - m).abs().max() < 1e-6 and (total.double() - s).abs().max() < 1e-5
    assert (out.double() - (out1 * a + out2 * b)).abs().max() < {torch.float32: 1e-6}.get(dtype, 2e-2)
    sizes = torch.ops.npu.npu_ring_attention_update(
        **{n: x.to("meta") if isinstance(x, Tensor) else x for n, x in call.items()}
    )
    assert [(x.shape, x.dtype) for x in sizes] == [(x.shape, x.dtype) for x in (out, highest, total)]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.usefixtures("operators")
def test_statistics_that_are_of_no_softmax_are_not_merged(is_packed: bool) -> None:
    call = update(is_packed=is_packed)
    for part in ("prev", "cur"):
        highest, total = call[f"{part}_softmax_max"], call[f"{part}_softmax_sum"]
        assert isinstance(highest, Tensor) and isinstance(total, Tensor)
        blind = highest.clone()
        blind[1, 2] = -torch.inf
        said = refused(UPDATE, {**call, f"{part}_softmax_max": blind})
        assert f"{part}_softmax_max" in said and "a query that saw no key is not documented" in said
        assert f"{part}_softmax_sum" in refused(UPDATE, {**call, f"{part}_softmax_sum": total * 0})
        said = refused(UPDATE, {**call, f"{part}_softmax_max": highest + torch.arange(8)})
        assert "holds different values" in said


@pytest.mark.parametrize("ends", [[3, 8], [0, 3, 7], [0, 5, 3, 8], [0, 3, 3, 8]])
@pytest.mark.usefixtures("operators")
def test_ends_of_packed_parts_ascend_from_0_to_the_last_token(ends: list[int]) -> None:
    call = {**update(is_packed=True), "actual_seq_qlen": torch.tensor(ends)}
    assert "ascend from 0 to the last of 8 tokens" in refused(UPDATE, call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("operators")
def test_parts_of_a_softmax_merge_to_the_whole_and_blind_queries_change_nothing(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 3, 10, 12, generator=generator, dtype=torch.float64) * 20
    v = torch.randn(2, 3, 12, 4, generator=generator).to(dtype).double()
    scores[:, :, 2, :5] = -math.inf  # saw nothing before
    scores[:, :, 3, 5:] = -math.inf  # sees nothing now
    scores[:, :, 4] = -math.inf  # never sees anything

    def attended(keys: slice) -> tuple[Tensor, Tensor]:
        lse = scores[..., keys].logsumexp(-1)
        return (scores[..., keys] - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp() @ v[:, :, keys], lse

    (out1, lse1), (out2, lse2), (wanted, wanted_lse) = (attended(slice(*s)) for s in ((0, 5), (5, 12), (0, 12)))
    out = torch.zeros(2, 3, 20, 4)
    lse = torch.full((2, 3, 20), -math.inf)
    rows = slice(1, 20, 2)  # a stripe of a result: written in place, and nothing beside it
    out[:, :, rows], lse[:, :, rows] = out1.float(), lse1.float()
    part = out2.to(dtype)
    OperatorMerge().add(out[:, :, rows], lse[:, :, rows], part, lse2.float())
    assert (out[:, :, rows].double() - wanted).abs().max() < (2e-6 if dtype == torch.float32 else 2e-2)
    seen = wanted_lse.isfinite()
    assert torch.equal(lse[:, :, rows].isfinite(), seen) and int((~seen).sum()) == 6
    assert (lse[:, :, rows].double() - wanted_lse)[seen].abs().max() < 1e-5
    assert bool((lse[:, :, rows][~seen] == -math.inf).all()) and bool((out[:, :, rows][~seen] == 0).all())
    assert bool((out[:, :, ::2] == 0).all()) and bool((lse[:, :, ::2] == -math.inf).all())
    torch.testing.assert_close(out[:, :, 5], out2.to(dtype).float()[:, :, 2])
    torch.testing.assert_close(out[:, :, 7], out1.float()[:, :, 3])


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m["kind"])
@pytest.mark.parametrize(
    ("preset", "degree"),
    [("ring", 3), ("ring_zigzag", 2), ("ring_striped", 3), ("double_ring", 4), ("usp", 4), ("allgather_kv", 3)],
)
@pytest.mark.usefixtures("operators")
def test_strategies_compute_attention_with_the_update(preset: str, degree: int, mask: dict[str, object]) -> None:
    plan = plan_of(preset, BY_UPDATE, shape=fitting(preset, SHAPE), mask=mask, degree=degree)
    rows = verify.in_one_process(plan, mask, devices.REHEARSAL, "float32")
    assert [row for row in rows if not row.is_good] == []


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.usefixtures("operators")
def test_operator_is_called_once_for_each_part_that_is_merged(degree: int) -> None:
    tensors, dout = verify.inputs_of(plan_of("ring_zigzag", shape=SHAPE, degree=degree))
    calls = {}
    for kernel in ("npu_fusion", "npu_fusion_update"):
        plan = plan_of("ring_zigzag", f"cp.steps.attend.kernel={kernel}", shape=SHAPE, degree=degree)
        with Recorded() as recorded:
            verify.runner(plan, devices.REHEARSAL)(tensors, dout)
        calls[kernel] = recorded.of(UPDATE)
        assert len(recorded.of("npu_fusion_attention_grad")) == degree**2
    assert calls["npu_fusion"] == [] and len(calls["npu_fusion_update"]) == degree * (degree - 1)
    given = calls["npu_fusion_update"][0]
    assert f"{UPDATE} {given['input_layout']}" == OperatorMerge().describe()


@pytest.mark.usefixtures("operators")
def test_plan_says_what_merges_where_something_is_merged() -> None:
    text = explain.text(plan_of("ring_zigzag", BY_UPDATE, shape=SHAPE, degree=2), "npu")
    assert "(no mask); merged by npu_ring_attention_update SBH" in text
    assert "kernel     attend: npu_fusion_update (named in the configuration)" in text
    text = explain.text(plan_of("ring_zigzag", shape=SHAPE, degree=2), "npu")  # auto
    assert "(no mask); merged in float32 by lse" in text
    assert "kernel     attend: npu_fusion (npu_fusion_attention of torch_npu)" in text
    assert "merged" not in explain.text(plan_of("ulysses", BY_UPDATE, shape=SHAPE, degree=2), "npu")


def attend_of(kernel: str) -> Dense:
    plan = plan_of("ring", f"cp.steps.attend.kernel={kernel}", shape=SHAPE, degree=2)
    (step,) = (s.step for s in plan.steps if isinstance(s.step, Dense))
    return step


@pytest.mark.usefixtures("older")
def test_a_torch_npu_without_the_update_is_refused_where_the_kernel_is_chosen() -> None:
    with devices.operators_of("npu"):  # what the loaded torch_npu lacks is not made up
        with pytest.raises(KernelError) as caught:
            attend_of("npu_fusion_update").kernel_for(SHAPE, "npu")
        assert attend_of("npu_fusion").kernel_for(SHAPE, "npu")[0].name == "npu_fusion"
        assert attend_of("auto").kernel_for(SHAPE, "npu")[0].name == "npu_fusion"
        with pytest.raises(KernelError, match="is not registered by the torch_npu of this process"):
            registered(UPDATE)
    (problem,) = caught.value.problems
    assert problem.key == "cp.steps.attend.kernel" and problem.tries == ("cp.steps.attend.kernel=auto",)
    assert (
        "npu_ring_attention_update, which the torch_npu of this process does not register; 2.13.0 does" in problem.what
    )


def test_a_plan_on_a_machine_without_torch_npu_takes_the_update() -> None:
    kernel, _ = attend_of("npu_fusion_update").kernel_for(SHAPE, "npu")
    assert kernel.name == "npu_fusion_update"


def test_two_kernels_differ_in_their_data_alone() -> None:
    one, other = (next(k for k in KERNELS if k.name == n) for n in ("npu_fusion", "npu_fusion_update"))
    assert type(one) is type(other) and (one.limits.merge, other.limits.merge) == (None, OperatorMerge())
