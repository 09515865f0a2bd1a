"""Hydra's own configuration, `hydra.*`: what it would take behind a `+`, and then never look at."""

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from cp_engine.errors import Problem, shown
from cp_engine.job.checks.keys import unknown_key

OF_HYDRA = ("hydra.", "hydra/")


def declared(hydra: DictConfig) -> list[str]:
    """Every key that Hydra, its launcher and its sweeper declare; of a free mapping, such as `hydra.job.env_set`, its own.

    Args:
        hydra: the composed `hydra` node.
    """
    sections = {key: names for key, _, names in _sections(hydra, "hydra")}
    return [f"{key}.{name}" for key, names in sections.items() for name in names if f"{key}.{name}" not in sections]


def is_free(hydra: DictConfig, key: str) -> bool:
    """Whether a key lies in a mapping that may have any keys."""
    parents = [".".join(key.split(".")[:n]) for n in range(1, key.count(".") + 1)]
    sections = [section for section, _, _ in _sections(hydra, "hydra")]
    nearest = max(
        (p for p in parents if OmegaConf.select(hydra, p.removeprefix("hydra").lstrip(".")) is not None), key=len
    )
    return nearest not in sections


def problems(hydra: DictConfig) -> Iterator[Problem]:
    """Keys that nothing reads, each with the nearest that something does, and folders to search that are not there."""
    known = declared(hydra)
    for key, node, names in _sections(hydra, "hydra"):
        values = OmegaConf.to_container(node)
        assert isinstance(values, dict)
        for name, value in values.items():
            if name not in names:
                yield from (unknown_key(leaf, known, shown(x)) for leaf, x in _leaves(f"{key}.{name!s}", value))
    for source in hydra.runtime.config_sources:
        if (
            source.provider.startswith("hydra.searchpath")
            and source.schema == "file"
            and not os.path.isdir(source.path)
        ):
            yield Problem(key="hydra.searchpath", what=f"there is no folder {source.path}, from {Path.cwd()}")


def _sections(node: DictConfig, key: str) -> Iterator[tuple[str, DictConfig, list[str]]]:
    """Mappings with declared keys: where each is, itself, and their names."""
    kind = OmegaConf.get_type(node)
    if not is_dataclass(kind):
        return
    there = set(node.keys())  # with those that have no value, which `in` leaves out
    names = [f.name for f in fields(kind) if f.name in there]
    if key == "hydra":  # and groups that it has without declaring them
        choices = [choice.partition("/")[2] for choice in node.runtime.choices if choice.startswith("hydra/")]
        names += [name for name in choices if name in there and name not in names]
    yield key, node, names
    for name in names:
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing() or child._is_interpolation()):
            yield from _sections(child, f"{key}.{name}")


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _leaves(f"{key}.{name}", child)
    else:
        yield key, value
