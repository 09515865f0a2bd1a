"""What translating a TOML takes from the command line, and what it gives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cp_engine.config.bounded import yaml_of

COMMAND_LINE = "the command line"
DEFAULT = "torchtitan's default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says beside the file.

    Args:
        values: keys of torchtitan, without `titan.`; they win over the file.
        model: the option of the group `model`; None for the file's own.
        data: the option of the group `data`.
        experiment: its name.
        folders: configuration folders, the shipped one first.
        drop: keys and sections of the file to leave out, as it writes them.
        trust_modules: import config modules that the shipped table does not know.
        drop_npu_converters: leave out converters that call Ascend operators.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    model: str | None = None
    data: str | None = None
    experiment: str | None = None
    folders: tuple[Path, ...]
    drop: tuple[str, ...] = ()
    trust_modules: bool = False
    drop_npu_converters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one key.

    Args:
        key: as the file writes it.
        value: of it.
        where: `line 3`, or DEFAULT for a key that the file leaves out.
        became: `mapped`, `passed through`, `dropped` or `defaulted`.
        target: what was written instead; empty where nothing has to be.
        why: the reason, where it is not the name of the group.
    """

    key: str
    value: object
    where: str
    became: str
    target: str
    why: str = ""


@dataclass(slots=True, kw_only=True)
class Translation:
    """A TOML as an experiment.

    Args:
        path: of the file, as the user named it.
        generation: the program and version that the file is written for.
        choices: group -> (option, where it comes from).
        settings: dotted key -> (value, where it comes from).
        rows: one per key.
        notes: what a reader should know although nothing is wrong.
        overridden: keys below `titan` of the command line that were used up.
        flags: of `translate`, as they were read.
    """

    path: str
    generation: str = ""
    choices: dict[str, tuple[str, str]] = field(default_factory=dict)
    settings: dict[str, tuple[object, str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    overridden: tuple[str, ...] = ()
    flags: Mapping[str, object] = field(default_factory=dict)

    def count(self, became: str) -> int:
        """How many keys became what."""
        return sum(row.became == became for row in self.rows)


def options(folders: Sequence[Path], group: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(name, its keys) of every file of a configuration group."""
    for folder in folders:
        for path in sorted((folder / group).glob("*.yaml")):
            row = yaml_of(path)
            yield path.stem, row if isinstance(row, Mapping) else {}


def option(folders: Sequence[Path], group: str, name: str) -> Mapping[str, object]:
    """The keys of one file; none if there is no such file."""
    return next((row for stem, row in options(folders, group) if stem == name), {})


def option_with(folders: Sequence[Path], group: str, key: str, value: object) -> str | None:
    """The first file of a group that sets a key to a value."""
    return next((stem for stem, row in options(folders, group) if row.get(key) == value), None)
