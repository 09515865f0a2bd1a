"""Operators of a model beside attention, composed of torch operators, which have their gradients: norm, rotary embedding, experts.

torchtitan-npu's converters `npu_rms_norm` and `npu_rope` call them. Source: torch_npu 2.13.0, docstring of npu_rotary_mul.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from cp_engine.kernels.ascend.dense_calls import tensor
from cp_engine.kernels.ascend.experts import EXPERTS

Arguments = Mapping[str, object]


def norm_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_rms_norm."""
    x, gamma = tensor(given, "input"), tensor(given, "gamma")
    return {"normed": list(x.shape[x.ndim - gamma.ndim :]) if gamma.ndim <= x.ndim else None}


def norm(given: Arguments) -> object:
    """npu_rms_norm: the rows divided by their root mean square, times gamma, and float32 [..., 1] what they were multiplied by."""
    x, gamma = tensor(given, "input"), tensor(given, "gamma")
    dims = tuple(range(-gamma.ndim, 0))
    epsilon = given["epsilon"]
    assert isinstance(epsilon, float)
    factor = (x.double().square().mean(dims, keepdim=True) + epsilon).rsqrt()
    return (x.double() * factor * gamma.double()).to(x.dtype), factor.float()


def rotary_sizes(given: Arguments) -> dict[str, object]:
    """Of npu_rotary_mul: over how many rows of the input one row of r1 counts, and how many of its dims vary."""
    x, r1 = tensor(given, "input"), tensor(given, "r1")
    if x.ndim != 4 or r1.ndim != 4:
        return {}
    pairs = list(zip(x.shape[:3], r1.shape[:3], strict=True))
    return {
        "head_dim": x.shape[3],
        "r1_head_dim": r1.shape[3],
        "fits": all(b in (1, a) for a, b in pairs),
        "heads_of_batch": prod(a for a, b in pairs if b == 1),
        "varying": sum(b > 1 for _, b in pairs),
    }


def rotate(given: Arguments) -> object:
    """npu_rotary_mul: r1 x + r2 x', where x' is x turned by a quarter in each of its planes."""
    x, r1, r2 = (tensor(given, n).double() for n in ("input", "r1", "r2"))
    if given["rotary_mode"] == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    found: Tensor = r1 * x + r2 * turned
    return found.to(tensor(given, "input").dtype)


COMPOSED = {"npu_rms_norm": (norm_sizes, norm), "npu_rotary_mul": (rotary_sizes, rotate), **EXPERTS}
"""Operator -> (sizes that follow from its arguments, what it computes)."""
