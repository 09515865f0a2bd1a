"""Files that somebody else may have written: regular, small and in UTF-8, or refused; nothing waits for a pipe or fills the memory."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import yaml

from cp_engine.errors import ConfigError, Problem, Reason

MOST_BYTES = 2**18
"""Of a configuration file; the largest that torchtitan or this project ships has 4 and 24 KiB."""
MOST_VALUES = 10_000
"""Keys and values in one file, with every alias of YAML written out."""
MOST_DEPTH = 64
"""Mappings and lists inside each other."""


def text_of(path: str | Path, most: int = MOST_BYTES) -> str:
    """The text of a file.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        OSError: there is none, or it cannot be opened.
        Reason: it is no regular file, is too large, or is not UTF-8.
    """
    return decoded(bytes_of(path, most))


def bytes_of(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The same, undecoded."""
    require_regular(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # it may have become a pipe meanwhile
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Reason("is not a regular file")
        raw = file.read(most + 1)  # whatever size the file system says it has
    if len(raw) > most:
        raise Reason(f"has more than {most // 1024:,} KiB, the most that is read of such a file")
    return raw


def decoded(raw: bytes) -> str:
    """Bytes as text; raises Reason."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Reason(f"is not text in UTF-8: {error.reason} at byte {error.start}") from error


def require_regular(path: str | Path) -> None:
    """Refuses a folder, a pipe, a socket or a device, without opening it; raises OSError or Reason."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL byte
        raise Reason(str(error)) from error
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if not stat.S_ISREG(mode):
        raise Reason(f"is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file")


def yaml_of(path: str | Path) -> object:
    """What a YAML file says, as plain data; nothing in it is executed.

    Args:
        path: of the file.

    Raises:
        ConfigError: it cannot be read, or is larger than a configuration can be.
    """
    try:
        text = text_of(path)
        require_bounded_yaml(text)
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, Reason) as error:
        raise ConfigError([Problem(key=str(path), what=reason_of(error))]) from error


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    text = " ".join(str(error).split())
    return text if isinstance(error, Reason) else f"cannot be read: {text}"


def require_bounded_yaml(text: str) -> None:
    """Refuses a text whose aliases, written out, would fill the memory, or which nobody's stack is deep enough for; raises Reason.

    Args:
        text: YAML.

    Raises:
        Reason: too many values, too deep, or a value that contains itself.
        yaml.YAMLError: it is not YAML.
    """
    inside: list[tuple[str | None, list[int]]] = [(None, [0, 0])]  # open collections: anchor, values, levels below
    sizes: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((event.anchor, [1, 0]))
            values, levels = 0, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, (values, levels) = inside.pop()
            levels += 1
            sizes |= {anchor: (values, levels)} if anchor is not None else {}
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise Reason(f"has *{event.anchor}, which is inside of what it stands for, or stands for nothing")
            values, levels = sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            values, levels = 1, 0
            sizes |= {event.anchor: (1, 0)} if event.anchor is not None else {}
        else:
            continue
        top = inside[-1][1]
        top[0], top[1] = top[0] + values, max(top[1], levels)
        _require(top[0], len(inside) + levels)


def require_bounded(tree: object) -> None:
    """The same of plain data; raises Reason."""
    values, left = 0, [(tree, 1)]
    while left:
        node, depth = left.pop()
        values += 1 + (len(node) if isinstance(node, Mapping) else 0)
        _require(values, depth)
        children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
        left += [(child, depth + 1) for child in children]


def _require(values: int, depth: int) -> None:
    if values > MOST_VALUES:
        raise Reason(f"has more than {MOST_VALUES:,} keys and values, the most that a configuration has")
    if depth > MOST_DEPTH:
        raise Reason(
            f"has more than {MOST_DEPTH} mappings or lists inside each other, the most that a configuration has"
        )
