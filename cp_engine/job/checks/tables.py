"""The further keys of torchtitan's `job.custom_config_module`: from the shipped table, or from a module that the user trusts."""

import dataclasses
import importlib
import types
import typing
from importlib.util import find_spec

from cp_engine.errors import ConfigError, Problem

ANY = "any"
"""A type that the tables do not describe; every value has it."""

Table = dict[str, dict[str, object]]


def imported_table(module: str) -> Table:
    """Type and default of the keys that a config module adds; imports it.

    Args:
        module: dotted name, as in `job.custom_config_module`.

    Raises:
        ConfigError: it cannot be imported, or has no dataclass JobConfig.
    """
    try:
        return keys_of(importlib.import_module(module).JobConfig())
    except Exception as error:  # of any kind: it is somebody's program
        key, what = "titan.job.custom_config_module", f"{module} gives no JobConfig: {type(error).__name__}: {error}"
        raise ConfigError([Problem(key=key, what=what)]) from error


def is_installed(module: str) -> bool:
    """Whether the package of a module is there; nothing is imported."""
    return find_spec(module.partition(".")[0]) is not None


def keys_of(node: object, prefix: str = "") -> Table:
    """Every key of a dataclass of dataclasses, with its type and default."""
    assert dataclasses.is_dataclass(node) and not isinstance(node, type)
    table: Table = {}
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            table |= keys_of(value, f"{prefix}{field.name}.")
        else:
            table[prefix + field.name] = {"type": type_name(hints[field.name]), "default": value}
    return table


def type_name(hint: object) -> str:
    """A type as the key tables write it: `int`, `str | null`, `'a' | 'b'`, `list[str]`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(repr(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(argument) for argument in arguments)
    if origin is dict:
        return "dict"
    if origin is list:
        return f"list[{type_name(arguments[0])}]"
    if hint is type(None):
        return "null"
    return hint.__name__ if hint in (bool, int, float, str, dict, list) and isinstance(hint, type) else ANY
