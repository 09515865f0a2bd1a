"""A module `torch_npu` for programs that import it, where the real one is not: its operators are the stand-in's.

torchtitan-npu imports torch_npu at the top of its models and converters, so that without it none of them can be rehearsed on a CPU.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from cp_engine.kernels.ascend.operators import is_registered, shipped

NAME = "torch_npu"
OWN_SHARDINGS = (torch.ops.aten.matmul.default, torch.ops.aten.matmul_backward.default)
"""Operators that reach DTensor whole on Ascend, and for which torch_npu therefore brings a sharding. Elsewhere they come as mm and bmm."""


class StandInModule(ModuleType):
    """`torch_npu`, as far as the stand-in has it: `torch_npu.npu_...` is `torch.ops.npu.npu_...`."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not is_registered(name):
            raise AttributeError(f"the stand-in for {NAME} has no {name}; launch.device=npu takes the real package")
        return getattr(torch.ops.npu, name)


@contextmanager
def torch_npu_module() -> Iterator[None]:
    """Lets `import torch_npu` succeed until the context is left, where nobody imported the real one."""
    if NAME in sys.modules:
        yield
        return
    module = StandInModule(NAME)
    module.__spec__ = ModuleSpec(NAME, None)
    vars(module)["__version__"] = shipped()[0]
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    with ExitStack() as undo:
        sys.modules[NAME] = module
        undo.callback(sys.modules.pop, NAME)
        for operator in OWN_SHARDINGS:
            if operator not in strategies:
                strategies[operator] = never_asked
                undo.callback(strategies.pop, operator)
        yield


def never_asked(schema: OpSchema) -> OpStrategy:
    """The sharding of an operator that does not reach DTensor on a CPU."""
    raise NotImplementedError(f"a CPU composes matmul of smaller operators, and yet DTensor asks how to shard {schema}")
