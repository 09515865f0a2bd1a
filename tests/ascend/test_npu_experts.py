"""The stand-in's operators of a mixture of experts against loops over tokens in float64, with their gradients."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cp_engine.errors import KernelError
from cp_engine.kernels.ascend.stand_in import stand_in

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
"""dtype -> half a unit in its last place, and a little more."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    with stand_in():
        yield


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= DTYPES[found.dtype] * expected.norm() and expected.norm() > 0


def in_order_of_experts(indices: list[list[int]]) -> list[tuple[int, int]]:
    """(token, choice) of each row: experts ascending, tokens in their order."""
    return sorted(((t, k) for t, row in enumerate(indices) for k in range(len(row))), key=lambda x: indices[x[0]][x[1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [None, 0, 5, -2])
def test_permuting_sends_each_token_to_each_of_its_experts(dtype: torch.dtype, kept: int | None) -> None:
    tokens = torch.randn(5, 6, dtype=dtype, requires_grad=True)
    indices = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1], [3, 0]])
    rows = in_order_of_experts(indices.tolist())
    found, where = torch.ops.npu.npu_moe_token_permute(tokens, indices, kept)
    assert where.dtype == torch.int32 and where.tolist() == [rows.index((t, k)) for t in range(5) for k in range(2)]
    rows = rows[: kept or 10]
    assert torch.equal(found, torch.stack([tokens[t] for t, _ in rows]))
    upstream = torch.randn(len(rows), 6, dtype=dtype)
    (found,) = torch.autograd.grad(found, tokens, upstream)
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for (t, _), row in zip(rows, upstream.double(), strict=True):
        expected[t] += row
    close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermuting_sums_the_choices_of_each_token(dtype: torch.dtype) -> None:
    indices = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])
    where = torch.ops.npu.npu_moe_token_permute(torch.randn(4, 6), indices)[1]
    rows, probs = torch.randn(8, 6, dtype=dtype, requires_grad=True), torch.randn(4, 2, dtype=dtype, requires_grad=True)
    upstream = torch.randn(4, 6, dtype=dtype)
    out = torch.ops.npu.npu_moe_token_unpermute(rows, where, probs)
    found = (out, *torch.autograd.grad(out, (rows, probs), upstream))
    expected = tuple(torch.zeros_like(x, dtype=torch.float64) for x in found)
    for t in range(4):
        for k in range(2):
            r = int(where[2 * t + k])
            expected[0][t] += probs[t, k].double() * rows[r].double()
            expected[1][r] = probs[t, k].double() * upstream[t].double()
            expected[2][t, k] = rows[r].double() @ upstream[t].double()
    for a, b in zip(found, expected, strict=True):
        close(a, b.detach())
    each = torch.ops.npu.npu_moe_token_unpermute(rows, where)
    mapped, *saved, none = torch.ops.npu._npu_moe_token_unpermute_with_routing_map(rows.detach(), where, [8, 6])
    assert torch.equal(each, rows[where.long()]) and torch.equal(mapped, each) and none.numel() == 0
    grad = torch.randn(8, 6, dtype=dtype)
    (expected_grad,) = torch.autograd.grad(each, rows, grad)
    given = (grad, *saved, None, None, None, False, [8, 6])
    assert torch.equal(torch.ops.npu.npu_moe_token_unpermute_with_routing_map_grad(*given)[0], expected_grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu_is_its_formula(dtype: torch.dtype, dim: int) -> None:
    x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    out = torch.ops.npu.npu_swiglu(x, dim)
    wide = x.detach().double().requires_grad_()
    half = wide.shape[dim] // 2
    gate, up = wide.narrow(dim, 0, half), wide.narrow(dim, half, half)
    expected = gate / (1 + torch.exp(-gate)) * up
    upstream = torch.randn_like(out)
    close(out.detach(), expected.detach())
    close(torch.autograd.grad(out, x, upstream)[0], torch.autograd.grad(expected, wide, upstream.double())[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[2, 0, 5], [0, 0, 7], [1, 2, 3]])
def test_grouped_products_are_those_of_each_group(dtype: torch.dtype, counts: list[int]) -> None:
    x, weight, other = torch.randn(7, 6, dtype=dtype), torch.randn(3, 6, 5, dtype=dtype), torch.randn(7, 5, dtype=dtype)
    ends = torch.tensor(counts).cumsum(0)
    named = {"split_item": 2, "group_type": 0}
    (found,) = torch.ops.npu.npu_grouped_matmul([x], [weight], group_list=ends, group_list_type=0, **named)
    of_counts = {"group_list": torch.tensor(counts), "group_list_type": 1}
    (again,) = torch.ops.npu.npu_grouped_matmul([x], [weight], **of_counts, **named)
    used = int(ends[-1])
    assert found[used:].isnan().all()  # what is in no group is not written
    expert = [e for e, n in enumerate(counts) for _ in range(n)]
    for rows in (found[:used], again[:used]):
        close(rows, torch.stack([x[i].double() @ weight[e].double() for i, e in enumerate(expert)]))
    summed = {"split_item": 3, "group_type": 2}
    (found,) = torch.ops.npu.npu_grouped_matmul([x.T], [other], **of_counts, **summed)
    expected = torch.zeros(3, 6, 5, dtype=torch.float64)
    for i, e in enumerate(expert):
        expected[e] += torch.outer(x[i].double(), other[i].double())
    close(found, expected)


def test_values_that_the_operators_would_misread_are_refused() -> None:
    npu, x, weight = torch.ops.npu, torch.randn(4, 6), torch.randn(2, 6, 5, requires_grad=True)
    calls = (
        (npu.npu_moe_token_permute, (x, torch.tensor([0, 1, -1, 2])), {}, "holds experts -1 to 2"),
        (npu.npu_moe_token_permute, (x, torch.tensor([0, 1, 2**24, 2])), {}, "below 16777215"),
        (npu.npu_moe_token_unpermute, (x, torch.tensor([0, 1, 1, 2])), {}, "names a row twice or not at all"),
        (
            npu._npu_moe_token_unpermute_with_routing_map,
            (x, torch.tensor([0, 1, 1, 2]), [4, 6]),
            {},
            "names a row twice",
        ),
        (npu.npu_grouped_matmul, ([x], [weight.detach()]), {"group_list": torch.tensor([3, 2])}, "fit into the 4 rows"),
        (
            npu.npu_grouped_matmul,
            ([x], [weight.detach()]),
            {"group_list": torch.tensor([5, -1])},
            "fit into the 4 rows",
        ),
        (npu.npu_grouped_matmul, ([x], [weight]), {"group_list": torch.tensor([3, 1])}, "the operator has no gradient"),
        (
            npu.npu_moe_token_unpermute_with_routing_map_grad,
            (x, torch.tensor([0, 1, 3, 2]), torch.tensor([0, 1, 2, 3]), None, None, None, False, [4, 6]),
            {},
            "differs from out_index",
        ),
    )
    for operator, args, named, said in calls:
        named = {"split_item": 2, "group_type": 0, "group_list_type": 1, **named} if named else {}
        with pytest.raises(KernelError, match=said):
            operator(*args, **named)
