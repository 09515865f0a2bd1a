"""Models whose output layer has the weight of their embedding, which torchtitan 0.2.2 would shard twice.

Importing this imports torchtitan, on CPU inside `cpu_shims`.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from torch import nn
from torchtitan.protocols.train_spec import ParallelizeFunction


def is_tied(model: nn.Module) -> bool:
    """Whether the output layer of a model, or of a part of one, has the weight of its embedding."""
    weights = [getattr(getattr(model, name, None), "weight", None) for name in ("tok_embeddings", "output")]
    return weights[0] is not None and weights[0] is weights[1]


@contextmanager
def sharded_once(model: nn.Module, parallelize: ParallelizeFunction) -> Iterator[None]:
    """Put the weight that two layers share into one FSDP group while a model is parallelized.

    torchtitan gives the embedding a group of its own. torch 2.13 refuses a weight in two groups, older ones leave a part of it
    without updates where ranks do not divide it (pytorch/pytorch#176076). The group of the output layer takes the embedding in.

    Args:
        model: a model or model part, before it is parallelized.
        parallelize: torchtitan's function for it.
    """
    place = _where_sharded(parallelize) if is_tied(model) else None
    if place is None:
        yield
        return
    fully_shard, embedding, output = place.fully_shard, model.tok_embeddings, model.output
    assert isinstance(embedding, nn.Module)

    def once(modules: nn.Module | Sequence[nn.Module], **settings: object) -> object:
        if modules is embedding:
            return modules
        if isinstance(modules, list) and any(module is output for module in modules):
            modules = [embedding, *modules]
        return fully_shard(modules, **settings)

    place.fully_shard = once  # type: ignore[attr-defined]
    try:
        yield
    finally:
        place.fully_shard = fully_shard  # type: ignore[attr-defined]


def _where_sharded(parallelize: ParallelizeFunction) -> ModuleType | None:
    """The module of the `apply_fsdp` that a parallelize function calls; some models take another's."""
    apply_fsdp = getattr(sys.modules[parallelize.__module__], "apply_fsdp", None)
    return None if apply_fsdp is None else sys.modules[apply_fsdp.__module__]
