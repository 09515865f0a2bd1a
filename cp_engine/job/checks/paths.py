"""Paths of a configuration: a relative one is relative to where the command was typed, wherever the job then runs."""

import os
from collections.abc import Mapping
from pathlib import Path

from cp_engine.hosts.torchtitan.text.sources import TEXTS, TOKENIZER, dataset_of, place_of
from cp_engine.job.checks.keys import ABSENT, PLACES, lookup

KEYS = ("data.path", "launch.resume", "toml", "out")
OF_TITAN = (
    *("model.hf_assets_path", "model.tokenizer_path", "checkpoint.initial_load_path", "validation.dataset_path"),
    *("training.dataset_path", "parallelism.pipeline_parallel_schedule_csv"),
)
ASSETS = "titan.model.hf_assets_path"


def from_where_typed(config: Mapping[str, object], typed_in: Path) -> dict[str, object]:
    """The configuration for a job that runs in another folder, as with `hydra.job.chdir=true`.

    Args:
        config: the composed configuration, as plain containers.
        typed_in: the folder in which the command was typed.

    Returns:
        The same with absolute paths, also of the places that torchtitan looks at when none is given; as typed where the job runs in
        that folder.
    """
    if typed_in == Path.cwd():
        return dict(config)
    places = [f"datasets.{name}.{key}" for name in _section(config, "datasets") for key in PLACES]
    found = {key: lookup(config, key) for key in (*KEYS, *(f"titan.{key}" for key in OF_TITAN), *places)}
    name = dataset_of(config)
    if name is not None:
        if place_of(config, name, "path") is None and (text := TEXTS.get(name)) is not None:
            found[f"datasets.{name}.path"] = str(typed_in / text)
        if place_of(config, name, "tokenizer") is None and lookup(config, ASSETS) in (None, ABSENT):
            found[f"datasets.{name}.tokenizer"] = str(typed_in / TOKENIZER)
    result: dict[str, object] = dict(config)
    for key, value in found.items():
        if isinstance(value, str) and value and not value.startswith("~"):
            is_place = value.startswith((".", "/")) or os.path.exists(typed_in / value)
            is_name = key.startswith("datasets.") and key.endswith(".path") and not is_place
            if not is_name:  # such as allenai/c4, which lies on a network
                result = _with(result, key.split("."), str(typed_in / value))
    return result


def _section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    node = config.get(name)
    return node if isinstance(node, Mapping) else {}


def _with(node: Mapping[str, object], parts: list[str], value: str) -> dict[str, object]:
    """A copy with another value at a path of keys."""
    first, *rest = parts
    return {**node, first: _with(_section(node, first), rest, value) if rest else value}
