"""A translation as the text of an experiment, and as a report for a reader."""

import math
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cp_engine.errors import ConfigError, Problem
from cp_engine.job.toml.translation import DEFAULT, Translation

COLUMN = 60
"""Where comments begin."""
SUFFIXES = {"experiment": ".yaml", "toml": ".toml"}
ORDER = ("cp", "datasets", "titan", "translate")
INTERPOLATION = re.compile(r"(\\*)\$\{")


def text(translation: Translation, name: str = "NAME") -> str:
    """The YAML file of an experiment; the same translation gives the same bytes.

    Args:
        translation: of a TOML.
        name: of the experiment, for its launch line.
    """
    lines = [
        "# @package _global_",
        f"# Translated from {' '.join(Path(translation.path).name.split())}, a file of {translation.generation}.",
    ]
    for note in translation.notes:
        lines += textwrap.wrap(note, 130, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
    lines += [f"# Launch: python launch.py experiment={name}", "defaults:"]
    for group, (option, where) in translation.choices.items():
        lines.append(_with_comment(f"  - override /{group}: {_scalar(option)}", where))
    lines.append("  - _self_")
    tree: dict[str, object] = {
        name: {} for name in ORDER if any(k.startswith(f"{name}.") for k in translation.settings)
    }
    for key, (value, where) in translation.settings.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            child = node.setdefault(section, {})
            assert isinstance(child, dict)
            node = child
        node[last] = (escaped(value), where)
    return "\n".join([*lines, *_tree(tree, "")]) + "\n"


def _tree(node: Mapping[str, object], indent: str) -> list[str]:
    lines = []
    for name, child in node.items():
        if isinstance(child, tuple):
            value, where = child
            lines.append(_with_comment(f"{indent}{_scalar(name)}: {_scalar(value)}", where))
        else:
            assert isinstance(child, Mapping)
            lines += [f"{indent}{_scalar(name)}:", *_tree(child, f"{indent}  ")]
    return lines


def _with_comment(line: str, comment: str) -> str:
    return f"{line:<{COLUMN - 2}}  # {comment}"


def _scalar(value: object) -> str:
    """One value on one line, which OmegaConf reads back as it is."""
    written: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    written = written.removesuffix("\n").removesuffix("\n...")
    return written if "\n" not in written and _is_read_as(written, value) else _quoted(value)


def _is_read_as(written: str, value: object) -> bool:
    try:
        read = OmegaConf.to_container(OmegaConf.create(f"value: {written}"), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException):
        return False
    return repr(read) == repr({"value": value})


def _quoted(value: object) -> str:
    """A value with every text in quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)}: {_quoted(item)}" for key, item in value.items()) + "}"
    style = '"' if isinstance(value, str) else None
    written: str = yaml.safe_dump(value, default_style=style, width=math.inf)
    return written.removesuffix("\n").removesuffix("\n...")


def escaped(value: object) -> object:
    """A value that OmegaConf reads as it is written: `${` would begin an interpolation."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda match: match.group(1) * 2 + "\\${", value)
    if isinstance(value, list):
        return [escaped(item) for item in value]
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    return value


def summary(translation: Translation) -> str:
    """Two lines about a file and its keys, and its notes."""
    count = translation.count
    kinds = [f"{count('mapped')} mapped", f"{count('passed through')} passed through"]
    kinds += [f"{count('dropped')} dropped"] if count("dropped") else []
    total = len(translation.rows) - count("defaulted")
    chosen = " ".join(f"{group}={option}" for group, (option, _) in translation.choices.items())
    lines = [
        f"toml       {translation.path}: {translation.generation}, {total} keys: {', '.join(kinds)}; {count('defaulted')} defaulted",
        f"           asks for {chosen}",
    ]
    for note in translation.notes:
        lines += textwrap.wrap(note, 120, initial_indent="           ", subsequent_indent="           ")
    return "\n".join(lines)


def report(translation: Translation) -> str:
    """Every key of the file and what became of it."""
    titles = {
        "mapped": "mapped: decided by a group, written under another name, or not needed",
        "passed through": "passed through: the same key below titan",
        "dropped": "dropped: left out, as translate.drop says",
        "defaulted": "defaulted: not in the file; torchtitan's default, where conf/config.yaml has another value",
    }
    width = min(64, max((len(_assigned(row.key, row.value)) for row in translation.rows), default=0))
    lines = [summary(translation)]
    for became, title in titles.items():
        rows = [row for row in translation.rows if row.became == became]
        if became == "dropped" and not rows:
            continue
        lines += ["", f"{title} ({len(rows)})"]
        for row in rows:
            where = "" if row.where == DEFAULT else row.where
            target = f" -> {row.target}" if became == "mapped" and row.target else ""
            why = f"   {row.why}" if row.why else ""
            lines.append(f"  {where:<9} {_assigned(row.key, row.value):<{width}}{target}{why}".rstrip())
    return "\n".join(lines)


def _assigned(key: str, value: object) -> str:
    shown = _scalar(value)
    return f"{key} = {shown if len(shown) <= 60 else shown[:57] + '...'}"


def out_problems(out: str | None, *, to: str, is_forced: bool) -> Iterator[Problem]:
    """What is wrong with the file that a translation is written to.

    Args:
        out: its path; None for the terminal.
        to: `experiment` or `toml`.
        is_forced: replace a file that is there.
    """
    suffix = SUFFIXES.get(to)
    if out is None or suffix is None:
        return
    path = Path(out)
    if not path.name or os.path.isdir(path):
        yield Problem(key="out", what=f"{out!r} is not the name of a file")
    elif path.suffix != suffix:
        yield Problem(key="out", what=f"{out!r} does not end in {suffix}", tries=(f"out={path.with_suffix(suffix)}",))
    elif (to == "experiment" and not re.fullmatch(r"[A-Za-z_][\w-]*", path.stem)) or path.stem == "null":
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem).strip("_") or "mine"
        rule = ("rule", "experiment=NAME is typed: letters, digits, _ and -")
        tries = (f"out={path.with_name(f'my_{plain}' if not plain[0].isalpha() else plain)}{suffix}",)
        yield Problem(
            key="out", what=f"{path.stem!r} cannot be the name of an experiment", details=(rule,), tries=tries
        )
    elif os.path.exists(path) and not is_forced:
        yield Problem(key="out", what=f"{out} is there already", tries=("translate.force=true", "out=..."))


def write(content: str, out: str) -> None:
    """Writes a file whole or not at all.

    Args:
        content: of the file.
        out: its path.

    Raises:
        ConfigError: it cannot be written.
    """
    part: IO[str] | None = None
    try:
        path = Path(out).resolve()  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as part:
            part.write(content)
        os.chmod(part.name, 0o666 & ~_umask())
        os.replace(part.name, path)
    except (OSError, ValueError, RuntimeError) as error:  # such as a NUL byte, or links in a circle
        if part is not None:
            Path(part.name).unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([Problem(key="out", what=f"{out} cannot be written: {reason}")]) from error


def _umask() -> int:
    """What a new file may not be."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
