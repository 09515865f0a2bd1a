"""A torchtitan or torchtitan-npu TOML as choices of groups and values of keys; nothing of it is dropped without being named."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import yaml

from cp_engine.compose import compose
from cp_engine.data.sources import TEXTS
from cp_engine.errors import ConfigError, Problem, suggest
from cp_engine.integrations.config_modules import imported_table, untrusted
from cp_engine.integrations.toml_file import TomlFile
from cp_engine.integrations.toml_keys import all_modules, key_problem, leaves
from cp_engine.integrations.toml_rules import Composed, Rules
from cp_engine.integrations.toml_translation import (
    COMMAND_LINE,
    DEFAULT,
    Asked,
    Row,
    Translation,
    option,
    option_with,
    options,
)
from cp_engine.keys import lookup, module_tables, shape_table, titan_table
from cp_engine.world import degree_in

MODULE = "job.custom_config_module"
DEGREE = "parallelism.context_parallel_degree"
CONVERTERS = "model.converters"
OF_TEXT = {"training.dataset_path": "path", "model.hf_assets_path": "tokenizer"}
"""Keys of a data set -> where it is written, so that another choice of `data` leaves them without effect."""
IN_HF = ("checkpoint.initial_load_in_hf", "checkpoint.last_save_in_hf")
"""Where one of these is true, model.hf_assets_path also names a checkpoint."""


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of the file under its present name."""

    written: str
    value: object
    where: str


def translate(file: TomlFile, asked: Asked) -> Translation:
    """Translates a file.

    Args:
        file: as read.
        asked: what the command line says.

    Raises:
        ConfigError: every problem of the file.
    """
    made = _Translator(file, asked)
    made.run()
    if made.problems:
        raise ConfigError(made.problems, source=file.path)
    return made.result


class _Translator:
    def __init__(self, file: TomlFile, asked: Asked) -> None:
        self.file, self.asked = file, asked
        self.rules = Rules(asked.folders[0])
        self.problems = list(file.problems)
        self.result = Translation(path=file.path)
        self.keys: dict[str, _Key] = {}
        self.table: dict[str, dict[str, object]] = {}

    def run(self) -> None:
        written = list(leaves(self.file.values, {**titan_table(), **all_modules()}))
        for key, value in written:
            self._rename(key, value)
        for key, value in self.asked.values.items():
            if key in self.keys:
                self._row(self.keys[key], "mapped", "", "the command line sets it")
            self.keys[key] = _Key(key, value, COMMAND_LINE)
        self.table = {**titan_table(), **self._module_table()}
        for key in list(self.keys):
            entry = self.keys[key]
            if entry.value == {} and any(name.startswith(f"{key}.") for name in self.table):
                del self.keys[key]  # a section without keys
            elif problem := key_problem(
                key, entry.written, entry.value, self.table, self.rules, is_typed=entry.where == COMMAND_LINE
            ):
                self.problems.append(replace(problem, details=(("at", entry.where), *problem.details)))
        older = any(key in self.rules.retired for key, _ in written)
        self.result.generation = self.rules.generation(lambda key: older if key == "older" else self.value(key))
        composed = self._composed()
        self._choose_model()
        text = self._choose_text()
        if self.problems:
            return
        self._compose(composed)
        self._choose_mask()
        self.result.notes += self.rules.notes(lambda key: older if key == "older" else self.value(key))
        for key, entry in self.keys.items():
            self._write(key, entry, text)
        self._defaults(text)
        self.result.flags = {name: getattr(self.asked, name) for name in ("trust_modules", "drop_npu_converters")}
        for name, is_on in self.result.flags.items():
            if is_on:
                self.result.settings[f"translate.{name}"] = (True, COMMAND_LINE)
        settings = self.result.settings
        typed = self.asked.values.items()
        self.result.overridden = tuple(k for k, v in typed if settings.get(f"titan.{k}", (settings,))[0] != v)

    def value(self, key: str) -> object:
        """Of the command line, else of the file, else torchtitan's default; the model's name of the chosen option."""
        if key == "model.name" and self.asked.model is not None:
            return option(self.asked.folders, "model", self.asked.model).get("name")
        if key in self.keys:
            return self.keys[key].value
        return self.table.get(key, {}).get("default")

    def _rename(self, key: str, value: object) -> None:
        now, where = self.rules.retired.get(key, key), self.file.at(key)
        if isinstance(now, Mapping) and "gone" in now:
            self._row(_Key(key, value, where), "mapped", "", str(now["gone"]))
        elif isinstance(now, Mapping):
            rule = ("rule", str(now["refuse"]))
            self.problems.append(Problem(key=key, what="is retired", details=(("at", where), rule)))
        elif str(now) in self.keys:
            first, second = self.keys[str(now)], _Key(key, value, where)
            old, new = (second, first) if key in self.rules.retired else (first, second)
            what = f"is the retired name of {new.written} ({new.where}), and only one can be meant"
            problem = Problem(key=old.written, what=what, details=(("at", old.where),), tries=(f"only {now}",))
            self.problems.append(problem)
        else:
            self.keys[str(now)] = _Key(key, value, where)

    def _module_table(self) -> Mapping[str, dict[str, object]]:
        """The further keys of the config module that the file names."""
        entry = self.keys.get(MODULE)
        if entry is None or not isinstance(entry.value, str) or not entry.value:
            return {}
        module = str(self.rules.modules.get(entry.value, entry.value))
        self.keys[MODULE] = _Key(entry.written, module, entry.where)
        if module in module_tables():
            return {**module_tables()[module], **self.rules.older_keys(module)}
        if not self.asked.trust_modules:
            self.problems.append(
                replace(untrusted(module), key=entry.written, details=(("at", entry.where), *untrusted(module).details))
            )
            return {}
        try:
            return imported_table(module)
        except ConfigError as error:
            self.problems += error.problems
            return {}

    def _composed(self) -> Composed:
        key, choices = self.rules.balancers
        if not isinstance(self.value(key), str | None):
            return Composed()  # its type is refused already
        if self.value(key) not in choices:
            near = suggest(str(self.value(key)), [name for name in choices if isinstance(name, str)])
            allowed = ", ".join("null" if name is None else str(name) for name in choices)
            tries = (f'{key} = "{near}"',) if near else ()
            what = f"{self.value(key)!r} is no load balancer of torchtitan"
            details = (("at", self._whence(key)), ("allowed", allowed))
            self.problems.append(Problem(key=key, what=what, details=details, tries=tries))
            return Composed()
        if not isinstance(degree := self.value(DEGREE), int) or isinstance(degree, bool) or degree < 1:
            if isinstance(degree, int):
                at = ("at", self._whence(DEGREE))
                self.problems.append(Problem(key=DEGREE, what=f"is {degree}, less than 1", details=(at,)))
            return Composed()
        composed = self.rules.composed(self.value)
        if composed.refusal is not None:
            key, what, instead = composed.refusal
            where = (("at", self.keys[key].where),) if key in self.keys else ()
            what = f"{self.value(key)!r} {what}"
            self.problems.append(Problem(key=key, what=what, details=where, tries=(instead,) if instead else ()))
        return composed

    def _choose_model(self) -> None:
        name = self.value("model.name")
        found = option_with(self.asked.folders, "model", "name", name)
        if found is None:
            self._no_option("model", "model.name", name, "name")
        else:
            whence = self._whence("model.name") if self.asked.model is None else COMMAND_LINE
            self.result.choices["model"] = (self.asked.model or found, whence)

    def _choose_text(self) -> str:
        """The data set, which is an option of the group `data`."""
        name = self.value("training.dataset")
        found = option_with(self.asked.folders, "data", "dataset", name)
        if found is None:
            self._no_option("data", "training.dataset", name, "dataset")
        else:
            self.result.choices["data"] = (found, self._whence("training.dataset"))
        return str(name)

    def _no_option(self, group: str, key: str, name: object, field_name: str) -> None:
        if any(problem.key == key for problem in self.problems):
            return
        known = sorted(str(row[field_name]) for _, row in options(self.asked.folders, group) if row.get(field_name))
        near = suggest(str(name), known)
        rule = ("rule", f"each is a file of the group {group}; yours is found with --config-dir")
        details = (("at", self._whence(key)), ("allowed", ", ".join(known)), rule)
        tries = (*((f'{key} = "{near}"',) if near else ()), f"my_folder/{group}/{name}.yaml with {field_name}: {name}")
        self.problems.append(
            Problem(key=key, what=f"{name!r} has no file in conf/{group}", details=details, tries=tries)
        )

    def _compose(self, composed: Composed) -> None:
        degree = int(str(self.value(DEGREE)))
        whence = self._whence(DEGREE)
        self.result.choices["cp"] = (composed.preset, f"{DEGREE} = {degree}, {whence}")
        preset = compose(composed.preset)
        if degree > 1 or degree_in(preset) > 1:
            self.result.settings["cp.degree"] = (degree, whence)
        if degree > 1 and composed.layout != lookup(preset, "layout.kind"):
            key, _ = self.rules.balancers
            why = f"{key}: {self.value(key)}, {self._whence(key)}"
            self.result.choices["layout@cp.layout"] = (composed.layout, why)
        self.result.notes.append(f"cp={composed.preset}: {composed.why}")
        if composed.better:
            self.result.notes.append(f"cp={composed.better} would do better for {self.value('model.name')}")

    def _choose_mask(self) -> None:
        name, flavor = str(self.value("model.name")), str(self.value("model.flavor"))
        attention = shape_table().get(name, {}).get(flavor, {}).get("attention", "sdpa")
        if attention != "sdpa":
            why = f"{name} {flavor} attends with {attention}: the documents come with each batch"
            self.result.choices["mask"] = ("document", why)

    def _write(self, key: str, entry: _Key, text: str) -> None:
        """One key: as a value of the same name, or as what it decides."""
        settings = self.result.settings
        if key.startswith("parallelism.") and key in self.rules.deciding:
            self._row(entry, "mapped", f"cp={self.result.choices['cp'][0]}")
        elif key == "model.name":
            self._row(entry, "mapped", f"model={option_with(self.asked.folders, 'model', 'name', entry.value)}")
        elif key == "training.dataset":
            self._row(entry, "mapped", f"data={self.result.choices['data'][0]}")
        elif key in OF_TEXT and not (key == "model.hf_assets_path" and any(self.value(name) for name in IN_HF)):
            chosen = option(self.asked.folders, "data", self.asked.data or "").get("dataset")
            place = str(chosen) if key == "model.hf_assets_path" and chosen is not None else text  # of the model
            target = f"datasets.{place}.{OF_TEXT[key]}"
            settings[target] = (entry.value, entry.where)
            self._row(entry, "mapped", target)
        elif key == CONVERTERS and self.asked.drop_npu_converters and (dropped := self._npu_converters()):
            assert isinstance(entry.value, list)
            left = [name for name in entry.value if name not in dropped]
            settings[f"titan.{key}"] = (left, f"{entry.where}, without {', '.join(dropped)}")
            self._row(entry, "mapped", f"titan.{key}", f"without {', '.join(dropped)} (translate.drop_npu_converters)")
            self.result.notes.append(f"dropped converters, which call Ascend operators: {', '.join(dropped)}")
        elif key == MODULE and not self._needs_module():
            self._row(entry, "mapped", "", "no key that only this module has is left, and no converter")
        else:
            renamed = f", as {entry.written}" if entry.written != key else ""
            settings[f"titan.{key}"] = (entry.value, entry.where + renamed)
            self._row(entry, "mapped" if renamed else "passed through", f"titan.{key}")

    def _npu_converters(self) -> list[str]:
        value = self.value(CONVERTERS)
        return [name for name in value if name in self.rules.npu_converters] if isinstance(value, list) else []

    def _needs_module(self) -> bool:
        """Whether the run still needs the config module: for keys that torchtitan has not, a data set, a flavor or converters."""
        module = str(self.value(MODULE))
        if module not in module_tables() or self.value("training.dataset") not in TEXTS:
            return True
        extra = set(self.table) - set(titan_table()) - set(self.rules.older_keys(module))
        kept = {key for key in self.keys if key in extra and key != "parallelism.enable_custom_context_parallel"}
        row = shape_table().get(str(self.value("model.name")), {}).get(str(self.value("model.flavor")), {})
        if bool(kept) or row.get("package") == module.partition(".")[0]:
            return True
        return bool(self._npu_converters()) and not self.asked.drop_npu_converters

    def _defaults(self, text: str) -> None:
        """torchtitan's value of what the file leaves out and this project's own configuration sets to something else."""
        shipped = yaml.safe_load((self.asked.folders[0] / "config.yaml").read_text(encoding="utf-8"))["titan"]
        chosen = self.result.choices["model"][0]
        named = option(self.asked.folders, "experiment", self.asked.experiment or "").get("titan", {})
        assert isinstance(named, Mapping)
        of_experiment = dict(leaves(named, titan_table()))  # it says more than a default
        model = {k: v for k, v in option(self.asked.folders, "model", chosen).items() if k != "name"}
        own = dict(leaves({**shipped, "model": model}, titan_table()))
        own |= {"metrics.disable_color_printing": None}  # set by a run, as is the folder, which no two runs share
        for key, value in own.items():
            default = self.table[key]["default"]
            is_chosen = (key == "model.flavor" and self.asked.model) or key in of_experiment
            if key not in self.keys and value != default and not is_chosen:
                self.result.settings[f"titan.{key}"] = (default, DEFAULT)
                self._row(_Key(key, default, DEFAULT), "defaulted", f"titan.{key}")

    def _row(self, entry: _Key, became: str, target: str, why: str = "") -> None:
        if entry.where != COMMAND_LINE:
            self.result.rows.append(
                Row(key=entry.written, value=entry.value, where=entry.where, became=became, target=target, why=why)
            )

    def _whence(self, key: str) -> str:
        return self.keys[key].where if key in self.keys else DEFAULT
