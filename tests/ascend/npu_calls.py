"""What operators of the namespace npu are called with, seen from below them: the calls go through."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cp_engine.kernels.ascend.operators import bound


class Recorded(TorchDispatchMode):
    """Notes each call of an operator of Ascend with all of its arguments, defaults included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, object]]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert isinstance(func, torch._ops.OpOverload)
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "npu":
            self.calls.append((name, bound(func._schema, args, kwargs or {})))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[dict[str, object]]:
        """The arguments of each call of an operator."""
        return [given for called, given in self.calls if called == name]
