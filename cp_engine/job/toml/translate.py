"""A torchtitan or torchtitan-npu TOML as choices of groups and values of keys; nothing of it is dropped without being named."""

from collections.abc import Mapping

import yaml

from cp_engine.config.compose import compose
from cp_engine.errors import ConfigError, Problem, suggest
from cp_engine.job.checks.degrees import degree_in
from cp_engine.job.checks.keys import lookup, module_tables, shape_table, titan_table
from cp_engine.job.checks.rules import Composed, shipped_rules
from cp_engine.job.checks.tables import imported_table
from cp_engine.job.checks.trust import untrusted
from cp_engine.job.toml.file import TomlFile
from cp_engine.job.toml.keys import Key, all_modules, key_problems, leaves, present_names
from cp_engine.job.toml.translation import COMMAND_LINE, DEFAULT, Asked, Row, Translation, option, option_with, options

MODULE = "job.custom_config_module"
DEGREE = "parallelism.context_parallel_degree"
CONVERTERS = "model.converters"
OF_TEXT = {"training.dataset_path": "path", "model.hf_assets_path": "tokenizer"}
"""Keys of a data set -> where it is written, so that another choice of `data` leaves them without effect."""
IN_HF = ("checkpoint.initial_load_in_hf", "checkpoint.last_save_in_hf")
"""Where one of these is true, model.hf_assets_path also names a checkpoint."""


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
        self.rules = shipped_rules()
        self.problems = list(file.problems)
        self.result = Translation(path=file.path)
        self.keys: dict[str, Key] = {}
        self.table: dict[str, dict[str, object]] = {}
        self.untrusted: Problem | None = None

    def run(self) -> None:
        named = present_names(self.file, {**titan_table(), **all_modules()}, self.rules, self.asked.drop)
        self.keys, older = named.keys, named.is_older
        self.problems += named.problems
        self.result.rows += named.rows
        for key, value in self.asked.values.items():
            if key in self.keys:
                self._row(self.keys[key], "mapped", "", "the command line sets it")
            self.keys[key] = Key(key, value, COMMAND_LINE)
        self.table = {**titan_table(), **self._module_table()}
        self.problems += key_problems(self.keys, self.table, self.rules, self.untrusted)
        self.keys = {key: entry for key, entry in self.keys.items() if entry.value != {} or key in self.table}
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
        if dropped := [f"{row.key} ({row.where})" for row in named.rows if row.became == "dropped"]:
            self.result.notes.append(f"left out, as translate.drop says: {', '.join(dropped)}")
        self.result.flags = {name: getattr(self.asked, name) for name in ("trust_modules", "drop_npu_converters")}
        self.result.flags = {"drop": list(self.asked.drop), **self.result.flags}
        for name, value in self.result.flags.items():
            if value:
                self.result.settings[f"translate.{name}"] = (value, COMMAND_LINE)
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

    def _module_table(self) -> Mapping[str, dict[str, object]]:
        """The further keys of the config module that the file names."""
        entry = self.keys.get(MODULE)
        if entry is None or not isinstance(entry.value, str) or not entry.value:
            return {}
        module = str(self.rules.modules.get(entry.value, entry.value))
        self.keys[MODULE] = Key(entry.written, module, entry.where)
        if module in module_tables():
            return {**module_tables()[module], **self.rules.older_keys(module)}
        if not self.asked.trust_modules and not entry.is_typed:
            self.untrusted = untrusted(entry.written, module, ("at", entry.where))
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
            near = suggest(str(self.value(key)), [name for name in choices if isinstance(name, str)]) or "null"
            allowed = ", ".join("null" if name is None else str(name) for name in choices)
            what = f"{self.value(key)!r} is no load balancer of torchtitan"
            details = (("at", self._whence(key)), ("allowed", f"{allowed}; {titan_table()[key]['default']} by default"))
            if not any(problem.key == key for problem in self.problems):  # "None" is said already
                self.problems.append(Problem(key=key, what=what, details=details, tries=(f"titan.{key}={near}",)))
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
        file = f"my_folder/{group}/{name}.yaml with {field_name}: {name} is found with --config-dir my_folder"
        details = (("at", self._whence(key)), ("allowed", ", ".join(known)), ("rule", f"each is a file; {file}"))
        tries = (f"titan.{key}={near}",) if near else ()
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

    def _write(self, key: str, entry: Key, text: str) -> None:
        """One key: as a value of the same name, or as what it decides."""
        settings = self.result.settings
        if key.startswith("parallelism.") and key in self.rules.deciding:
            self._row(entry, "mapped", f"cp={self.result.choices['cp'][0]}")
            if key in module_tables().get(str(self.value(MODULE)), {}) and key not in titan_table():
                settings[f"titan.{key}"] = (
                    entry.value,
                    entry.where,
                )  # without effect in a run, and a TOML again has it
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
        else:
            renamed = f", as {entry.written}" if entry.written != key else ""
            settings[f"titan.{key}"] = (entry.value, entry.where + renamed)
            self._row(entry, "mapped" if renamed else "passed through", f"titan.{key}")

    def _npu_converters(self) -> list[str]:
        value = self.value(CONVERTERS)
        return [name for name in value if name in self.rules.npu_converters] if isinstance(value, list) else []

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
                self._row(Key(key, default, DEFAULT), "defaulted", f"titan.{key}")

    def _row(self, entry: Key, became: str, target: str, why: str = "") -> None:
        if entry.where != COMMAND_LINE:
            self.result.rows.append(
                Row(key=entry.written, value=entry.value, where=entry.where, became=became, target=target, why=why)
            )

    def _whence(self, key: str) -> str:
        if key in self.keys:
            return self.keys[key].where
        is_own = self.table.get(key) == titan_table().get(key)
        return DEFAULT if is_own else f"the default of {self.value(MODULE)}"
