"""cp-engine: a context-parallel strategy as a YAML composition, proved before it runs."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cp_engine.errors import CPError
    from cp_engine.runtime.attention import Attention
    from cp_engine.runtime.compile import compile
    from cp_engine.runtime.context import ContextParallel
    from cp_engine.runtime.sparse_attention import SparseAttention

_HOMES = {
    "Attention": "runtime.attention",
    "CPError": "errors",
    "ContextParallel": "runtime.context",
    "SparseAttention": "runtime.sparse_attention",
    "compile": "runtime.compile",
}

__all__ = ["Attention", "CPError", "ContextParallel", "SparseAttention", "__version__", "compile"]


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that `--help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cp_engine' has no attribute {name!r}")
    return getattr(import_module(f"cp_engine.{_HOMES[name]}"), name)
