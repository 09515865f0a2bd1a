"""Refusal: one override, or one file that it names, that Hydra does not compose; what is wrong with it and what was meant."""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf

from cp_engine.algebra.mask_kinds import KINDS
from cp_engine.config.compose import groups, options
from cp_engine.config.shipped import RENAMED
from cp_engine.errors import Problem, suggest
from cp_engine.job.checks import hydra_keys
from cp_engine.job.checks.keys import known_keys, near_keys, unknown_key
from cp_engine.job.toml.argument import is_open, quoted

KEY = re.compile(r"Could not (?:override|append to config\. An item is already at|delete(?: from config\.)?) '([^']+)'")
MEANT = re.compile(r"Did you mean to override (?:one of )?([^?]+)\?")
NO_GROUP = re.compile(r"config group '([^']+)' does not exist")
IN_FILE = re.compile(r"In '([^']+)': (.*)", re.DOTALL)
NOT_IN = re.compile(r"Key '[^']+' (?:not in|is not in struct)")
FULL_KEY = re.compile(r"full_key: (\S+)")
ADVICE = re.compile(r"\s*(See https?:\S+ for details|set env var \S+ to see chained exception\.)")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What Hydra said, and of what.

    Args:
        error: as raised.
        override: as typed; empty where no single one is to blame.
        composed: the configuration without it, with `hydra`; None where there is none.
        folders: where groups are looked for.
    """

    error: Exception
    override: str
    composed: DictConfig | None
    folders: tuple[Path, ...]

    @property
    def sign(self) -> str:
        """`+`, `++`, `~` or nothing; not what was put before a key of torchtitan for Hydra."""
        sign = self.override[: len(self.override) - len(self.override.lstrip("+~"))]
        return "" if sign == "++" and is_open(self.override.lstrip("+")) else sign

    @property
    def key(self) -> str:
        return self.override.partition("=")[0].lstrip("+~")

    @property
    def value(self) -> str:
        return self.override.partition("=")[2]

    @property
    def text(self) -> str:
        """Hydra's words in one line, with its cause, and without where to read on."""
        cause = [str(self.error.__cause__).splitlines()[0]] if str(self.error.__cause__ or "") else []
        return ADVICE.sub("", " ".join([*str(self.error).split(), *cause]))

    @property
    def is_of_a_file(self) -> bool:
        """Whether a file that the override names is to blame, and not the override."""
        if isinstance(self.error, MissingConfigException) and self.error.missing_cfg_file is not None:
            return self.error.missing_cfg_file != f"{self.key.partition('@')[0]}/{self.value}"
        return IN_FILE.match(str(self.error)) is not None

    @property
    def choices(self) -> list[str]:
        """The choices of the configuration, such as `cp` and `layout@cp.layout`."""
        return sorted(self.composed.hydra.runtime.choices) if self.composed is not None else []

    def assigned(self, keys: Sequence[str], sign: str = "") -> tuple[str, ...]:
        """Other keys with the override's value, as a shell takes them; a deletion has none."""
        if self.sign == "~":
            return tuple(f"'~{key}'" for key in keys)
        return tuple(_for_shell(f"{sign}{key}={self.value}") for key in keys)


def problem_of(refusal: Refusal) -> Problem:
    """What is wrong, and lines of which each may work; whoever asks tries them."""
    error, key, text = refusal.error, refusal.key, str(refusal.error)
    if isinstance(error, OverrideParseException):
        return _unreadable(refusal)
    if refusal.is_of_a_file:
        return _in_a_file(refusal)
    if isinstance(error, MissingConfigException) and error.options is not None:
        near = suggest(refusal.value, error.options)
        what, allowed = f"'{refusal.value}' is not one of the choices", (("allowed", ", ".join(error.options)),)
        return Problem(key=key, what=what, details=allowed, tries=(f"{refusal.sign}{key}={near}",) if near else ())
    if "Primary config" in text or "Cannot find primary config" in text:
        return _other_program(refusal)
    if "Ambiguous value" in text or "requires --multirun" in text:
        return _several(refusal)
    if match := NO_GROUP.search(text):
        return _no_group(refusal, match.group(1))
    if refusal.sign.startswith("+") and text.startswith("Multiple values for"):
        return Problem(key=key, what="has a value already; + would add a second", tries=refusal.assigned([key]))
    if refusal.key and (match := MEANT.search(text)):
        return _misnamed(refusal, match.group(1).split(", "))
    if refusal.composed is None or not KEY.search(text):
        return Problem(key=key or "configuration", what=refusal.text)
    return _unknown(refusal, refusal.composed)


def _unreadable(refusal: Refusal) -> Problem:
    """Not `key=value`, or a value that Hydra's grammar has another meaning for."""
    key, value = refusal.key, refusal.value
    if "=" in refusal.override and key:
        line = _for_shell(f"{refusal.sign}{key}={quoted(value)}")
        rule = ("rule", "a value with = ( ) [ ] { } ' \" : or a comma is quoted, once for the shell and once inside")
        what = f"{value} cannot be read as a value: {refusal.text}"
        current = None if refusal.composed is None else OmegaConf.select(refusal.composed, key)
        is_text = not isinstance(current, DictConfig | ListConfig)
        return Problem(key=key, what=what, details=(rule,), tries=(line,) if is_text else ())
    word = refusal.override.strip(":=")
    of = [group for group in groups(refusal.folders) if word in options(group, refusal.folders)]
    tries = tuple(f"{group}={word}" for group in of)
    return Problem(key=refusal.override, what="is not an override: these are written key=value", tries=tries)


def _in_a_file(refusal: Refusal) -> Problem:
    """A file of the user's, with what is wrong in it and what on the command line would get past it."""
    error, match = refusal.error, IN_FILE.match(str(refusal.error))
    file, reason = match.groups() if match else (f"{refusal.key}/{refusal.value}", str(error))
    if file == "config":  # where the defaults of all come together
        file = f"{refusal.key}/{refusal.value}"
    name = f"{file}.yaml"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        allowed = options(group, refusal.folders)
        near = suggest(option, allowed)
        details = (("allowed", ", ".join(allowed)), *((("nearest", near),) if near else ()))
        what = f"its defaults name {group}: {option}, and there is no {group}/{option}.yaml"
        mine = file.partition("/")[0] == group
        return Problem(key=name, what=what, details=details, tries=(f"{group}={near}",) if near and not mine else ())
    full_key = FULL_KEY.search(reason)
    if full_key and NOT_IN.search(reason) and refusal.composed is not None:
        problem = unknown_key(full_key.group(1), _known(refusal.composed))
        meant = (("nearest", problem.tries[0].partition("=")[0]),) if problem.tries else ()
        return Problem(key=problem.key, what=f"unknown key, in {name}", details=(*problem.details, *meant))
    return Problem(key=name, what=ADVICE.sub("", " ".join(reason.split())))


def _other_program(refusal: Refusal) -> Problem:
    rule = ("rule", "the primary configuration is cp-engine's; yours are files of its groups")
    match = re.search(r"Primary config module '[\w.]+\.(\w+)'", refusal.text)  # -cp is Hydra's --config-path
    is_preset = match is not None and match.group(1) in options("cp", refusal.folders)
    tries = (f"cp={match.group(1)}",) if match is not None and is_preset else ("--config-dir my",)
    return Problem(key="--config-path, --config-name", what=refusal.text, details=(rule,), tries=tries)


def _several(refusal: Refusal) -> Problem:
    """A list without brackets, a text with a comma, or a sweep without -m."""
    key, value = refusal.key, refusal.value
    current = None if refusal.composed is None else OmegaConf.select(refusal.composed, key)
    wanted = known_keys().get(key, "")
    if isinstance(current, ListConfig) or wanted.startswith("list["):
        return Problem(key=key, what=f"{value} is a list, and lists have brackets", tries=(f"'{key}=[{value}]'",))
    sweep = tuple(f"-m {line}" for line in refusal.assigned([key], refusal.sign))
    text = (_for_shell(f"{key}={quoted(value)}"),) if wanted.startswith("str") else ()
    return Problem(key=key, what=f"{value} is several values, one run takes one", tries=(*text, *sweep))


def _no_group(refusal: Refusal, group: str) -> Problem:
    there = groups(refusal.folders)
    near, where = suggest(group, there), refusal.key[len(group) :]
    tries = refusal.assigned([f"{near}{where}"], refusal.sign) if near else ()
    return Problem(
        key=refusal.key, what=f"there is no group {group!r}", details=(("allowed", ", ".join(there)),), tries=tries
    )


def _misnamed(refusal: Refusal, meant: Sequence[str]) -> Problem:
    """A group without its place, with a misspelt one, or with one that is new and needs a +."""
    last = refusal.key.rpartition(".")[2]  # such as a step's name
    near = [name for name in meant if "." in refusal.key and suggest(last, [name.rpartition(".")[2]])]
    tries = refusal.assigned(near or list(meant))
    if "@cp.steps." in refusal.key and not refusal.sign and not near:
        tries = (*refusal.assigned([refusal.key], "+"), *tries)
    return Problem(key=refusal.key, what="is not the name of this choice", tries=tries)


def _unknown(refusal: Refusal, composed: DictConfig) -> Problem:
    key, value = refusal.key, refusal.value
    if new := RENAMED.get(key):
        return Problem(key=key, what=f"is named {new} now", tries=refusal.assigned([new]))
    of_hydra = key.startswith(hydra_keys.OF_HYDRA)
    choices = [name for name in refusal.choices if name.startswith("hydra/") == of_hydra]
    relocated = [name for name in choices if key and name.partition("@")[2] == key.replace("/", ".")]
    if relocated:
        return Problem(key=key, what="is not the name of this choice", tries=refusal.assigned(relocated))
    if key.startswith("hydra.") and hydra_keys.is_free(composed.hydra, key):
        rule = ("rule", "it is a mapping with keys of your own, and a new one is added with +")
        return Problem(key=key, what="is not there yet", details=(rule,), tries=refusal.assigned([key], "+"))
    known = hydra_keys.declared(composed.hydra) if of_hydra else _known(composed)
    if any(name.startswith(f"{key}.") for name in known):
        rule = ("rule", "a mapping is replaced in two overrides; one alone would merge with what is there")
        return Problem(key=key, what="is a mapping", details=(rule,), tries=(f"'~{key}' '+{key}={value}'",))
    if key in known:
        return Problem(key=key, what=refusal.text)
    if "/" in key or "." not in key:
        tops = [] if of_hydra else sorted({name.partition(".")[0] for name in known})
        near = difflib.get_close_matches(key, [*choices, *(top for top in tops if top in known)], n=4)
        elsewhere = [] if near else near_keys(key, known)
        allowed = (("allowed", ", ".join(sorted({*(name for name in choices if "@" not in name), *tops}))),)
        return Problem(key=key, what="unknown key", details=allowed, tries=refusal.assigned([*near, *elsewhere]))
    problem = unknown_key(key, known)
    tries = refusal.assigned(near_keys(key, known)) or _of_another_mask(key, value)
    return Problem(key=problem.key, what=problem.what, details=problem.details, tries=tries)


def _of_another_mask(key: str, value: str) -> tuple[str, ...]:
    """The masks that have a field."""
    section, _, name = key.partition(".")
    kinds = [kind for kind, (_, *named) in KINDS.items() if section == "mask" and name in (*named[0], *named[1])]
    return tuple(f"mask={kind} {_for_shell(f'{key}={value}')}" for kind in kinds)


def _known(composed: DictConfig) -> list[str]:
    """Every key outside `hydra`, and all that Hydra declares."""
    return list(dict.fromkeys([*known_keys(), *_dotted(composed), *hydra_keys.declared(composed.hydra)]))


def _dotted(composed: DictConfig) -> list[str]:
    """The dotted keys of a composed configuration, without Hydra's own."""
    tree = OmegaConf.to_container(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
    assert isinstance(tree, Mapping)
    keys: list[str] = []

    def walk(node: object, key: str) -> None:
        if isinstance(node, Mapping) and node:
            for name, child in node.items():
                walk(child, f"{key}.{name}" if key else str(name))
        else:
            keys.append(key)

    walk(tree, "")
    return keys


def _for_shell(override: str) -> str:
    """An override as it is typed."""
    if re.fullmatch(r"[\w@%+=:,./-]*", override):
        return override
    if "'" not in override:
        return f"'{override}'"
    return f'"{override}"' if not re.search(r'["$`\\!]', override) else shlex.quote(override)
