"""`toml=FILE` on the command line: translated before Hydra composes, so that every other argument wins over the file."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from cp_engine.config.compose import conf_dir
from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks.keys import known_keys, module_tables, titan_table, unknown_key
from cp_engine.job.checks.rules import shipped_rules
from cp_engine.job.toml import experiment
from cp_engine.job.toml.file import read_toml
from cp_engine.job.toml.translate import DEGREE, OF_TEXT, translate
from cp_engine.job.toml.translation import Asked, Translation

GROUP, OPTION = "translated", "toml"
DROP = "translate.drop"
"""Where Hydra finds a translation."""
CHOSEN = f"+{GROUP}={OPTION}"
TWICE = (  # (key of torchtitan, what decides the same)
    (DEGREE, "cp.degree"),
    ("model.name", "model"),
    ("training.dataset", "data"),
    ("training.dataset_path", "data"),
    ("parallelism.context_parallel_rotate_method", "cp"),
    ("parallelism.enable_custom_context_parallel", "cp"),
    ("parallelism.custom_context_parallel_path", "cp"),
)
FLAG = re.compile(r"--(?P<key>[a-z_]+\.[\w.-]+)(?:=(?P<value>.*))?", re.DOTALL)
SWEEPS = {"-m", "--multirun", "hydra.mode=MULTIRUN"}
"""What makes several values several jobs."""
PLACE = re.compile(r"datasets\.[\w.-]+=")
OTHER_PLACES = {  # torchtitan's flag -> what says the same here
    "job.config_file": "toml",
    "parallelism.context_parallel_degree": "cp.degree",
    "model.name": "model",
    "training.dataset": "data",
    "training.dataset_path": "datasets.c4_test.path",
    "model.hf_assets_path": "datasets.c4_test.tokenizer",
}


def translation_of(arguments: Sequence[str], config_dir: str | None) -> Translation | None:
    """The translation of the TOML that a command line names.

    Args:
        arguments: as typed.
        config_dir: the user's configuration folder, if any.

    Returns:
        None without `toml=`.

    Raises:
        ConfigError: every problem of the file, flags of torchtitan's own program, and what a translation would not write.
    """
    path, said = path_of(arguments), {override.key_or_group: override for override in _overrides(arguments)}
    problems, translation = flag_problems(arguments), None
    if _word(said, "mode", "") == "translate":
        to = _word(said, "translate.to", "experiment")
        out, is_forced = path_of(arguments, "out"), _flag(said, "translate.force")
        problems += experiment.out_problems(out, to=to, is_forced=is_forced)
        if path is not None and to == "experiment":
            problems += _of_the_run(arguments)
    if path is not None:
        problems += [*_swept(arguments), *_typed_twice(said)]
        asked = Asked(
            values={**_degree(arguments), **_values(said)},
            model=_word(said, "model", "") or None,
            data=_word(said, "data", "") or None,
            experiment=_word(said, "experiment", "") or None,
            folders=(conf_dir(), *([Path(config_dir)] if config_dir else [])),
            drop=tuple(_dropped(arguments)),
            trust_modules=_flag(said, "translate.trust_modules"),
            drop_npu_converters=_flag(said, "translate.drop_npu_converters"),
        )
        try:
            translation = translate(read_toml(path), asked)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems], source=error.source) from error
    if problems:
        raise ConfigError(problems, source="the command line")
    return translation


def _values(said: Mapping[str, Override]) -> dict[str, object]:
    """Keys below `titan`; sections and interpolations are left to Hydra."""
    typed = {k.removeprefix("titan."): o for k, o in said.items() if k.startswith("titan.")}
    return {k: o.value() for k, o in typed.items() if "${" not in str(o.input_line) and not isinstance(o.value(), dict)}


def _degree(arguments: Sequence[str]) -> dict[str, object]:
    """`cp.degree=N` beside a file is torchtitan's own key: it decides composition and layout as if the file said so.

    In a sweep the first stands for all, which decide the same; one rank among several does not, and is left to each job.
    """
    typed = [_parsed(argument) for argument in arguments if argument.lstrip("+").startswith("cp.degree=")]
    last = typed[-1] if typed else None
    if last is None:
        return {}
    values = list(last.sweep_iterator()) if last.is_sweep_override() else [last.value()]
    degrees = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    decide_alike = len({degree > 1 for degree in degrees}) == 1
    return {DEGREE: degrees[0]} if decide_alike and len(degrees) == len(values) else {}


def _typed_twice(said: Mapping[str, Override]) -> Iterator[Problem]:
    """A key of torchtitan beside the choice that replaces it."""
    for key, instead in TWICE:
        if f"titan.{key}" in said and instead in said:
            what = f"and {instead} on one command line; both decide the same"
            yield Problem(key=f"titan.{key}", what=what, tries=(str(said[instead].input_line),))


def _swept(arguments: Sequence[str]) -> Iterator[Problem]:
    """What a sweep cannot vary, since a file is translated once."""
    if not SWEEPS & set(arguments):
        return
    deciding = {f"titan.{key}" for key in (*shipped_rules().deciding, *OF_TEXT, "training.dataset", "model.flavor")}
    for argument in arguments:
        parsed = None if argument.startswith("-") or "=" not in argument else _parsed(argument)
        if parsed is not None and parsed.is_sweep_override() and parsed.key_or_group in {*deciding, "model"}:
            rule = (
                "rule",
                "it decides what the file asks for, and a file is translated once; sweep over cp, or run one by one",
            )
            yield Problem(key=parsed.key_or_group, what="cannot be swept beside toml", details=(rule,))
        if parsed is not None and parsed.is_sweep_override() and parsed.key_or_group == "cp.degree":
            if len({degree == 1 for degree in parsed.sweep_iterator()}) > 1:
                rule = ("rule", "one rank and several are different compositions, and a file is translated once")
                yield Problem(key="cp.degree", what="cannot be swept from 1 beside toml", details=(rule,))


def _word(said: Mapping[str, Override], key: str, otherwise: str) -> str:
    return str(said[key].value()) if key in said else otherwise


def _flag(said: Mapping[str, Override], key: str) -> bool:
    return key in said and said[key].value() is True


def _dropped(arguments: Sequence[str]) -> list[str]:
    """The keys of every `translate.drop=[...]`, so that lines of one report can be pasted one after the other."""
    names: list[str] = []
    for value in (override.value() for override in _overrides(arguments) if override.key_or_group == DROP):
        if not isinstance(value, list):
            what, tries = f"is {value!r}, not a list of keys", (f"{DROP}=[{value}]",)
            raise ConfigError([Problem(key=DROP, what=what, tries=tries)], source="the command line")
        names += map(str, value)
    return list(dict.fromkeys(names))


def path_of(arguments: Sequence[str], key: str = "toml") -> str | None:
    """The value of the last `key=path`; any characters, quoted or not; None without one, and for null."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")]
    if not given:
        return None
    parsed = _parsed(f"{key}={given[-1]}")
    value = given[-1] if parsed is None or parsed.is_sweep_override() else parsed.value()
    return value if isinstance(value, str) or value is None else given[-1]


@contextmanager
def registered(translation: Translation | None) -> Iterator[None]:
    """Lets Hydra find a translation, for the time of one command."""
    if translation is None:
        yield
        return
    store = ConfigStore.instance()
    store.store(group=GROUP, name=OPTION, package="_global_", node=OmegaConf.create(experiment.text(translation)))
    try:
        yield
    finally:
        del store.repo[GROUP]


def for_hydra(arguments: Sequence[str], translation: Translation | None) -> list[str]:
    """The arguments with paths quoted, the translation chosen, and without what it used up."""
    used = {DROP, *(f"titan.{key}" for key in translation.overridden)} if translation is not None else set()
    paths = {key: path for key in ("toml", "out") if (path := path_of(arguments, key)) is not None}
    written = translation.settings if translation is not None else {}
    result = [a.lstrip("+") if a.partition("=")[0].lstrip("+") in written else a for a in arguments]
    result = [a for a in result if a.partition("=")[0].lstrip("+") not in (*used, *paths)]
    result += [f"{key}={quoted(path)}" for key, path in paths.items()]
    return [*result, CHOSEN] if translation is not None else result


def is_open(argument: str) -> bool:
    """Whether an override sets a key that the configuration need not list, of torchtitan or of a data set."""
    key = argument.partition("=")[0].removeprefix("titan.")
    is_titan = argument.startswith("titan.") and (
        key in titan_table() or any(key in t for t in module_tables().values())
    )
    return is_titan or PLACE.match(argument) is not None


def flag_problems(arguments: Sequence[str]) -> list[Problem]:
    """torchtitan's spelling of flags, each with ours."""
    problems = []
    for i, argument in enumerate(arguments):
        match = FLAG.fullmatch(argument)
        if match is None:
            continue
        key, value = match.group("key").replace("-", "_"), match.group("value")
        following = arguments[i + 1] if i + 1 < len(arguments) else None
        if value is None and following is not None and re.fullmatch(r"-\d.*|[^-=][^=]*", following):
            value = following
        section, _, last = key.rpartition(".")
        if last.startswith("no_") and f"{section}.{last[3:]}" in titan_table():
            key, value = f"{section}.{last[3:]}", "false"
        problems.append(_flag_problem(argument, key, "true" if value is None else value))
    return problems


def _flag_problem(argument: str, key: str, value: str) -> Problem:
    rule = ("rule", "torchtitan's keys are written below titan, as key=value")
    if key not in titan_table():
        problem = unknown_key(f"titan.{key}", known_keys(), value)
        return Problem(key=argument, what=f"{problem.key}: unknown key", details=(rule,), tries=problem.tries)
    name = OTHER_PLACES.get(key, f"titan.{key}")
    balancer, layouts = shipped_rules().balancers
    if key == balancer:
        name, value = "layout@cp.layout", str(layouts.get(None if value == "None" else value, "zigzag"))
    elif key == "parallelism.context_parallel_rotate_method":
        name, value = "cp", shipped_rules().native(value)
    elif str(titan_table()[key]["type"]).startswith("list["):
        value = f"[{value}]"
    shown = value if _parsed(f"{name}={value}") is not None else quoted(value)
    return Problem(
        key=argument, what="is a flag of torchtitan's own program", details=(rule,), tries=(f"{name}={shown}",)
    )


def _of_the_run(arguments: Sequence[str]) -> Iterator[Problem]:
    """Groups and keys on the command line that belong to the run: a translation would not write them."""
    beside, decided = ("mode", "toml", "out", "model"), ("titan.", "cp.degree")
    if SWEEPS & set(arguments):
        yield Problem(
            key="-m", what="is a sweep, and a file is translated once", tries=("mode=translate toml=... out=...",)
        )
    for argument in arguments:
        parsed = None if argument.startswith("-") else _parsed(argument)
        if parsed is None:
            continue
        key = parsed.key_or_group
        is_one = not (parsed.is_delete() or parsed.is_sweep_override()) and "${" not in argument
        if not (key in beside or key.startswith(("translate.", "hydra.")) or (key.startswith(decided) and is_one)):
            rule = ("rule", "a translation says what the file says; give this to the run")
            tries = (f"python launch.py experiment=... {shlex.quote(argument)}",)
            yield Problem(key=key, what="would not be written", details=(rule,), tries=tries)


def _overrides(arguments: Sequence[str]) -> Iterator[Override]:
    """The arguments that set one value; Hydra reports what it cannot read."""
    for argument in arguments:
        parsed = None if argument.startswith("-") or "=" not in argument else _parsed(argument)
        if parsed is not None and not parsed.is_delete() and not parsed.is_sweep_override():
            yield parsed


def _parsed(argument: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(argument)
    except (HydraException, ValueError, RecursionError):
        return None


def quoted(value: str) -> str:
    """A value that Hydra's grammar takes as it is."""
    escaped = re.sub(r"(\\*)'", lambda m: m.group(1) * 2 + "\\'", str(experiment.escaped(value)))
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"
