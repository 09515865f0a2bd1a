"""The command line before Hydra runs: its options, those with dashes, and arguments that Hydra would misread."""

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from cp_engine.errors import ConfigError, Problem, suggest
from cp_engine.job.checks.keys import MODES

VALUED = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p")
"""Options that take a value."""
SOURCE = "the command line"
MOST_LETTERS = 2**13
"""Of one override: Hydra takes seconds to read a longer one."""
MOST_JOBS = 1000
NO_STRATEGY = re.compile(r"~cp(=.*)?|cp=(null|\[\s*\]|''|\"\")?", re.IGNORECASE)
SEVERAL = re.compile(r"cp=\[[^\]]*,[^\]]*\]")
NO_FOLDER = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra.job_logging.root.handlers=[]")
"""What is only printed needs no folder and no log file."""


def parsed(arguments: Sequence[str]) -> tuple[Namespace, list[Problem]]:
    """The options and overrides of a command line, and what of it is neither.

    Args:
        arguments: as typed.

    Raises:
        ConfigError: an option without its value, or with another than it takes.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError([Problem(key="options", what=message, tries=("--help",))], SOURCE)

    parser.error = refuse  # type: ignore[method-assign]  # it would print its usage and exit
    if arguments and arguments[-1] in VALUED:
        refuse(f"argument {arguments[-1]}: expected one argument")
    found, unknown = parser.parse_known_args(together(arguments))
    known = [name for action in parser._actions for name in action.option_strings]
    return found, [_no_option(word, known) for word in unknown if word.startswith("-")]


def main_problems(options: Namespace) -> Iterator[Problem]:
    """What takes the place of the configuration that ships, whose groups all others need."""
    path = options.config_path
    if path is not None and ("://" in path or os.path.isdir(path)):
        rule = ("rule", "the primary configuration is cp-engine's; yours are files of its groups")
        what = f"names {path}, which would take the place of all that ships"
        yield Problem(key="--config-path", what=what, details=(rule,), tries=(f"--config-dir {path}",))


def require_few_jobs(overrides: Sequence[str]) -> None:
    """Refuses values that take for ever to read, and sweeps of more jobs than anybody waits for.

    Args:
        overrides: as typed.

    Raises:
        ConfigError: naming them.
    """
    long = [o.partition("=")[0] for o in overrides if len(o) > MOST_LETTERS]
    if long:
        what = f"has more than {MOST_LETTERS:,} letters; a file of a configuration folder takes more: --config-dir my"
        raise ConfigError([Problem(key=key, what=what) for key in long], SOURCE)
    jobs = 1
    for override in overrides:
        if any(mark in override for mark in (",", "range(")) and (count := _choices(override)) > 0:
            jobs *= count
            if jobs > MOST_JOBS:
                what = f"makes more than {MOST_JOBS:,} jobs of this sweep"
                raise ConfigError([Problem(key=override.partition("=")[0], what=what)], SOURCE)


def _choices(override: str) -> int:
    """How many values an override sweeps over; 0 where it does not, or cannot be read."""
    try:
        parsed = OverridesParser.create().parse_override(override)
        return sum(1 for _ in islice(parsed.sweep_iterator(), MOST_JOBS + 1)) if parsed.is_sweep_override() else 0
    except (HydraException, ValueError, TypeError, RecursionError):
        return 0


def together(arguments: Sequence[str]) -> list[str]:
    """Hydra's options first, then all overrides: its parser takes overrides in one place only."""
    options: list[str] = []
    overrides: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument.startswith("-"):
            options.append(argument)
            if argument in VALUED and left:
                options.append(left.pop(0))
        else:
            overrides.append(argument)
    return [*options, *overrides]


def _no_option(word: str, known: Sequence[str]) -> Problem:
    """An option that there is not: misspelt, or a key with dashes before it."""
    name, equals, _ = word.partition("=")
    near = suggest(name, known)
    tries = (word.lstrip("-"),) if equals else (near,) if near is not None else ()
    rule = ("rule", "keys are written key=value, without dashes; options are those that --help lists")
    return Problem(key=word, what="is not an option", details=(rule,), tries=tries)


def prepared(arguments: Sequence[str]) -> list[str]:
    """The arguments for Hydra: refuses what it would misread, and adds what it would ask for.

    Args:
        arguments: as typed.

    Returns:
        torchtitan keys that the configuration does not list get the prefix that lets Hydra take them.

    Raises:
        ConfigError: if the strategy is removed instead of replaced.
    """
    from cp_engine.job.toml.argument import is_open

    words = [argument for argument in arguments if argument in MODES]
    if words:
        problem = Problem(key=words[0], what="is a mode, and modes are written as a key", tries=(f"mode={words[0]}",))
        raise ConfigError([problem], source="the command line")
    several = [argument for argument in arguments if SEVERAL.fullmatch(argument)]
    if several:
        names = several[0].partition("=")[2].strip("[]").replace(" ", "")
        what = f"'{several[0]}' names several compositions, and a run has one"
        raise ConfigError([Problem(key="cp", what=what, tries=(f"-m cp={names}",))], source="the command line")
    nothing = [argument for argument in arguments if NO_STRATEGY.fullmatch(argument)]
    if nothing:
        what = f"'{nothing[0]}' leaves no composition"
        raise ConfigError([Problem(key="cp", what=what, tries=("cp=none",))], source="the command line")
    result = []
    for argument in together(arguments):
        result.append(f"++{argument}" if is_open(argument) else argument)
        if _only_prints(argument, arguments) and not any(a.startswith("hydra.run.dir=") for a in arguments):
            result += NO_FOLDER
    return result


def _only_prints(argument: str, arguments: Sequence[str]) -> bool:
    starts_ranks = {"verify.level=training", "verify.target=ranks"} & set(arguments)
    return argument in ("mode=explain", "mode=translate") or (argument == "mode=verify" and not starts_ranks)
