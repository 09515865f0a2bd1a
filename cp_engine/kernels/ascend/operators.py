"""Ascend's operators by name, as torch_npu or the stand-in registers them, and what their schemas say."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cp_engine.errors import KernelError, Problem

COMPRESSED = 2048
"""Rows and columns of the mask that sparse modes 2, 3 and 4 take, whatever the lengths."""


def shipped() -> tuple[str, dict[str, str]]:
    """The version of torch_npu that the shipped schemas are of, and the schemas by operator."""
    table = json.loads((Path(__file__).parent / "schemas.json").read_text())
    return table["torch_npu"], table["schemas"]


def is_registered(name: str) -> bool:
    """Whether somebody registered an operator in this process."""
    return hasattr(torch.ops.npu, name)


def lacks(name: str) -> bool:
    """Whether a torch_npu is loaded that does not register an operator; where none is loaded, that is not known."""
    return not is_registered(name) and any(is_registered(other) for other in shipped()[1])


def registered(name: str) -> "torch._ops.OpOverload":
    """An operator.

    Raises:
        KernelError: neither torch_npu nor the stand-in is loaded, or a torch_npu that lacks the operator is.
    """
    if lacks(name):
        what = f"torch.ops.npu.{name} is not registered by the torch_npu of this process"
        version, _ = shipped()
        rule, install = ("rule", f"torch_npu {version} registers it"), f"pip install torch_npu=={version}"
        raise KernelError([Problem(key="launch.device", what=what, details=(rule,), tries=(install,))])
    if not is_registered(name):
        what = f"torch.ops.npu.{name} is not registered in this process"
        rule = ("rule", "importing torch_npu registers it; launch.device=npu_reference rehearses it on a CPU")
        raise KernelError([Problem(key="launch.device", what=what, details=(rule,), tries=("launch.device=cpu",))])
    found: torch._ops.OpOverload = getattr(torch.ops.npu, name).default
    return found


def accepts(name: str, argument: str) -> bool:
    """Whether the registered operator has an argument; versions differ."""
    return any(a.name == argument for a in registered(name)._schema.arguments)


def bound(schema: "torch._C.FunctionSchema", args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Every argument of a call by name, defaults included."""
    names = [a.name for a in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
