"""Ascend's operators on a CPU: the vendor's schemas bound to reference kernels, which refuse what the operators would refuse.

A call to `torch.ops.npu.*` is then checked by the schema as on the device, by the table of rules, and by what its values must be; it is
computed in float64. Tensors without data get sizes alone, so that a plan can be traced.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from cp_engine.kernels.ascend.dense_calls import DENSE
from cp_engine.kernels.ascend.experts import WITHOUT_GRADIENT
from cp_engine.kernels.ascend.gradients import DIFFERENTIABLE, require_no_gradient
from cp_engine.kernels.ascend.merge_calls import UPDATE
from cp_engine.kernels.ascend.norm_and_rope import COMPOSED
from cp_engine.kernels.ascend.operators import bound, is_registered, shipped
from cp_engine.kernels.ascend.rules import require, rule_table
from cp_engine.kernels.ascend.sparse_calls import SPARSE

Arguments = Mapping[str, object]
CALLS = {**DENSE, **UPDATE, **SPARSE}
"""Operator -> (sizes that follow from its arguments, what it computes, the sizes of what it gives)."""


@contextmanager
def stand_in() -> Iterator[None]:
    """Registers the operators until the context is left; none where somebody registered one, so that what a torch_npu lacks stays so."""
    library = torch.library.Library("npu", "FRAGMENT")
    _, schemas = shipped()
    missing = {} if any(map(is_registered, schemas)) else schemas
    rules = rule_table()
    try:
        for name, schema in missing.items():
            library.define(schema)
            if name in COMPOSED:
                library.impl(name, partial(_composed, name, rules[name]), "CompositeImplicitAutograd")
                continue
            for key, kernel in (("CPU", _computed), ("Meta", _sized)):
                library.impl(name, partial(kernel, name, rules[name]), key)
            if name in DIFFERENTIABLE:
                library.impl(name, DIFFERENTIABLE[name], "Autograd")
        yield
    finally:
        library._destroy()


def _computed(name: str, rules: list[dict[str, object]], *args: object, **kwargs: object) -> object:
    given = _given(name, args, kwargs)
    sizes, compute, _ = CALLS[name]
    require(name, given, sizes(given), rules)
    return compute(given)


def _sized(name: str, rules: list[dict[str, object]], *args: object, **kwargs: object) -> object:
    given = _given(name, args, kwargs)
    sizes, _, outline = CALLS[name]
    require(name, given, sizes(given), rules)
    return outline(given)


def _composed(name: str, rules: list[dict[str, object]], *args: object, **kwargs: object) -> object:
    given = _given(name, args, kwargs)
    sizes, compute = COMPOSED[name]
    require(name, given, sizes(given), rules)
    if name in WITHOUT_GRADIENT:
        require_no_gradient(name, given)
    return compute(given)


def _given(name: str, args: tuple[object, ...], kwargs: Arguments) -> dict[str, object]:
    schema: torch._C.FunctionSchema = getattr(torch.ops.npu, name).default._schema
    return bound(schema, args, kwargs)
