"""Known modules: the attention classes that the engine knows by name, what tensors each brings, and what reads its calls.

Hosts are above this room: their classes and readers are named, and imported when a model has such a class.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module

from torch import nn

from cp_engine.errors import CallError, Problem
from cp_engine.runtime.attach import Binding
from cp_engine.runtime.sparse_attention import TENSORS

QKV = ("q", "k", "v")
READ_QKV = "cp_engine.runtime.attention:read_qkv"


@dataclass(frozen=True, slots=True)
class Known:
    """A class of attention modules.

    Args:
        module, name: where the class is; it is known by name, so that no host is imported.
        reader: what reads its calls, as module:function.
        brings: the tensors of a call.
        shown: how a person imports it, where that is another name.
    """

    module: str
    name: str
    reader: str
    brings: tuple[str, ...]
    shown: str = ""

    @property
    def binding(self) -> Binding:
        """What reads its calls."""
        module, _, function = self.reader.partition(":")
        binding: Binding = getattr(import_module(module), function)
        return binding


SITES = (
    Known("cp_engine.runtime.attention", "Attention", READ_QKV, QKV, "cp_engine.Attention"),
    Known(
        "cp_engine.runtime.sparse_attention",
        "SparseAttention",
        "cp_engine.runtime.sparse_attention:read_sparse",
        TENSORS,
        "cp_engine.SparseAttention",
    ),
    Known("torchtitan.models.attention", "ScaledDotProductAttentionWrapper", READ_QKV, QKV),
    Known("torchtitan.models.attention", "FlexAttentionWrapper", "cp_engine.hosts.torchtitan.attention:read_flex", QKV),
    Known(
        "torchtitan.models.attention", "VarlenAttentionWrapper", "cp_engine.hosts.torchtitan.attention:read_varlen", QKV
    ),
    Known(
        "torchtitan.models.deepseek_v3.model.model",
        "Attention",
        "cp_engine.hosts.torchtitan.attention:read_latent",
        ("q", "kv_latent", "k_rope"),
    ),
    Known(
        "torchtitan_npu.models.deepseek_v32.model.model",
        "DSV32_SDPA",
        "cp_engine.hosts.torchtitan.npu_attention:read_absorbed",
        TENSORS,
    ),
    Known("torchtitan_npu.converters.kernels.fusion_attention", "NPUFusionAttention", READ_QKV, QKV),
)


def find(modules: Iterable[nn.Module], inputs: Sequence[str]) -> list[tuple[nn.Module, Binding]]:
    """The attention modules at or below some modules whose calls bring some tensors, each once.

    Args:
        modules: models, or attention modules themselves.
        inputs: the tensors that a plan begins with.

    Returns:
        Modules, and how their calls are read.

    Raises:
        CallError: there is none below one of them.
    """
    found: dict[int, tuple[nn.Module, Binding]] = {}
    for module in modules:
        if not isinstance(module, nn.Module):
            what = f"is given {type(module).__name__}, which is no module"
            raise CallError([Problem(key="context", what=what)])
        below = {id(m): (m, s.binding) for m in module.modules() if (s := site_of(m, inputs)) is not None}
        if not below:
            known = ", ".join(s.shown or f"{s.module}.{s.name}" for s in SITES if set(s.brings) == set(inputs))
            what = f"{type(module).__name__} has no attention module that brings {', '.join(inputs)}"
            raise CallError([Problem(key="context", what=what, details=(("accepted", known or "none is known"),))])
        found.update(below)
    return list(found.values())


def site_of(module: nn.Module, inputs: Sequence[str]) -> Known | None:
    """What the engine knows about a module, if its calls bring just these tensors."""
    names = {(c.__module__, c.__qualname__) for c in type(module).__mro__}
    return next((s for s in SITES if (s.module, s.name) in names and set(s.brings) == set(inputs)), None)
