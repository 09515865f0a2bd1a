"""Options of the command line, those with dashes: Hydra's own, read before it runs."""

from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from cp_engine.errors import ConfigError, Problem, suggest

VALUED = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p")
"""Options that take a value."""
SOURCE = "the command line"


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
    found, unknown = parser.parse_known_args(together(arguments))
    known = [name for action in parser._actions for name in action.option_strings]
    return found, [_no_option(word, known) for word in unknown if word.startswith("-")]


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
