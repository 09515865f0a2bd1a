"""The rules of `rules.yaml`: which preset the keys of a TOML ask for. Presets are named there and nowhere else."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Values = Callable[[str], object]
"""The value of a dotted key, defaults included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """What the rules decided.

    Args:
        preset: the name of a preset; empty where the rule refuses.
        layout: of the sequence; empty leaves the preset's own.
        why: the reason, for a reader.
        better: a preset that would do better; empty for none.
        refusal: (key, what, what to write instead) of a rule that refuses.
    """

    preset: str = ""
    layout: str = ""
    why: str = ""
    better: str = ""
    refusal: tuple[str, str, str] | None = None


class Rules:
    """The rules, as read."""

    def __init__(self) -> None:
        self._data = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))

    @property
    def retired(self) -> Mapping[str, object]:
        """Older keys: a new name, or a mapping with `gone`, or `refuse` and the value `as` that is not, and the reason."""
        return self._table("retired")

    @property
    def modules(self) -> Mapping[str, object]:
        """Other names of known config modules."""
        return self._table("modules")

    @property
    def imports(self) -> Mapping[str, str]:
        """Config modules of torchtitan's own that import another package, and which."""
        return dict(self._data["imports"])

    @property
    def ascend_packages(self) -> dict[str, str]:
        """Packages that import torch_npu, and what installs each."""
        return dict(self._data["ascend_packages"])

    @property
    def with_device(self) -> dict[str, object]:
        """Keys with the values that a rehearsal of those packages cannot do."""
        return dict(self._data["with_device"])

    @property
    def tensor_parallel_with(self) -> dict[str, str]:
        """Model -> the converter without which those packages compute its tensor parallelism wrongly."""
        return dict(self._data["tensor_parallel_with"])

    @property
    def npu_converters(self) -> dict[str, dict[str, Any]]:
        """Model converters that call Ascend operators.

        What each `calls`, for which `models` and `checkpoints` alone it is, why it cannot run `alone`, without the engine, how many heads
        of a batch it takes, and for which models `one_row` of a batch alone.
        """
        return dict(self._data["npu_converters"])

    def older_keys(self, module: str) -> Mapping[str, dict[str, object]]:
        """Keys that a config module had once."""
        table: Mapping[str, dict[str, object]] = self._data["older_keys"].get(module, {})
        return table

    def generation(self, values: Values) -> str:
        """Which program and version a file is written for."""
        return str(next(self._holding("generations", values))["name"])

    def notes(self, values: Values) -> list[str]:
        """What a reader should know."""
        return [str(row["say"]) for row in self._holding("notes", values)]

    def composed(self, values: Values) -> Composed:
        """The preset and the layout that a file asks for."""
        row = next(self._holding("compositions", values), None)
        if row is None:  # a word that another check refuses
            return Composed()
        if "refuse" in row:
            key = str(row.get("key", "model.name"))
            return Composed(refusal=(key, str(row["refuse"]), str(row.get("try", ""))))
        layout = str(row.get("layout", ""))
        key, choices = self.balancers
        if not layout and int(str(values("parallelism.context_parallel_degree"))) > 1:
            layout = str(choices[values(key)])
        return Composed(preset=str(row["cp"]), layout=layout, why=str(row["why"]), better=str(row.get("better", "")))

    @property
    def balancers(self) -> tuple[str, Mapping[object, object]]:
        """The key of the load balancer, and the layout of each."""
        return self._data["layouts"]["key"], self._data["layouts"]["choices"]

    def native(self, rotate_method: str) -> str:
        """The preset of torchtitan's own context parallelism."""
        values = {"parallelism.context_parallel_rotate_method": rotate_method, "parallelism.context_parallel_degree": 2}
        return next((str(row.get("cp", "")) for row in self._holding("compositions", values.get)), "...")

    @property
    def deciding(self) -> frozenset[str]:
        """The keys that decide what a translation chooses."""
        return frozenset(key for row in self._data["compositions"] for key in row["when"]) | {self.balancers[0]}

    @property
    def presets(self) -> tuple[str, ...]:
        """The presets that a TOML can ask for."""
        return tuple(dict.fromkeys(row["cp"] for row in self._data["compositions"] if "cp" in row))

    def asking_for(self, preset: str, degree: int) -> Iterator[Mapping[str, object]]:
        """The rows that ask for a preset of a degree in today's keys, and for which it is the best choice."""
        for row in self._data["compositions"]:
            conditions = [c for c in row["when"].values() if isinstance(c, Mapping)]
            if row["when"].get("parallelism.context_parallel_degree", degree) != degree:
                continue
            if row.get("cp") == preset and "better" not in row and all("has" in condition for condition in conditions):
                yield row

    def _table(self, name: str) -> Mapping[str, object]:
        table: Mapping[str, object] = self._data[name]
        return table

    def _holding(self, name: str, values: Values) -> Iterator[Mapping[str, object]]:
        yield from (row for row in self._data[name] if holds(row["when"], values))


@cache
def shipped_rules() -> Rules:
    """The rules that ship, which take a tenth of a second to read."""
    return Rules()


def holds(when: Mapping[str, object], values: Values) -> bool:
    """Whether every condition holds: a value, or one of the words of `rules.yaml`."""
    return all(_is_so(condition, values(key)) for key, condition in when.items())


def _is_so(condition: object, value: object) -> bool:
    if not isinstance(condition, Mapping):
        return value == condition
    ((kind, wanted),) = condition.items()
    tests: dict[str, Callable[[], bool]] = {
        "has": lambda: isinstance(value, list) and wanted in value,
        "lacks": lambda: not (isinstance(value, list) and wanted in value),
        "ends": lambda: isinstance(value, str) and value.endswith(str(wanted)),
        "is_set": lambda: (value not in (None, "")) is wanted,
        "above": lambda: isinstance(value, int) and value > int(str(wanted)),
    }
    return tests[kind]()
