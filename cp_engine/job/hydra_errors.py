"""Turns Hydra's composition errors into ours: every bad override at once, each with what works when it is typed."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import DictConfig, OmegaConf

from cp_engine.config.compose import plain
from cp_engine.config.composition import read
from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks import hydra_keys
from cp_engine.job.checks.keys import key_problems
from cp_engine.job.checks.trust import settled, typed_in
from cp_engine.job.refusal import KEY, Refusal, problem_of
from cp_engine.job.toml.argument import is_open
from cp_engine.job.user_folder import UNCOMPOSED


def config_error(
    error: Exception, overrides: Sequence[str], *, conf: Path, extra: str | None, sweep: bool
) -> ConfigError:
    """Every override that Hydra refuses, found by composing again without it, and what is wrong with the others.

    Args:
        error: what Hydra raised for all overrides together.
        overrides: as typed.
        conf: the shipped configuration folder.
        extra: the user's --config-dir, if any.
        sweep: whether several values are several jobs; the first stands for them.

    Returns:
        Problems whose `try` lines have been composed in place of what they correct.
    """
    if isinstance(error, SearchPathException):
        return ConfigError([Problem(key="--config-dir", what=str(error))], source="the command line")
    folders = (conf, *([Path(extra)] if extra is not None else []))
    with initialize_config_dir(config_dir=str(conf), version_base="1.3"):
        left = [_one_choice(override) if sweep else override for override in overrides]
        if extra is not None:
            left.append(f"hydra.searchpath=[file://{Path(extra).absolute()}]")
        refused: list[tuple[str, Exception]] = []
        composed = _composed(left, refused)
        found, composed, is_cp_whole = _corrected(left, refused, composed, folders)
        if not found:
            found = [problem_of(Refusal(error=error, override="", composed=composed, folders=folders))]
    GlobalHydra.instance().clear()
    known = {problem.key for problem in found}
    rest = [] if composed is None else [p for p in _of_the_rest(composed) if p.key not in known]
    more = [p for p in rest if is_cp_whole or not p.key.startswith("cp.")]
    return ConfigError([*found, *more], source="the command line")


def _composed(left: list[str], refused: list[tuple[str, Exception]]) -> DictConfig | None:
    """Composes without the overrides that Hydra refuses, which are moved to `refused`."""
    while True:
        composed, error = _attempt(left)
        if error is None:
            return composed
        culprit = next((override for override in left if _is_about(error, override)), None)
        if culprit is None:  # its message does not say: the one without which Hydra says something else
            culprit = next(
                (each for each in left if str(_attempt([o for o in left if o != each])[1]) != str(error)), None
            )
        if culprit is None:
            return None
        left.remove(culprit)
        refused.append((culprit, error))


def _corrected(
    left: list[str], refused: Sequence[tuple[str, Exception]], composed: DictConfig | None, folders: Sequence[Path]
) -> tuple[list[Problem], DictConfig | None, bool]:
    """The problems of refused overrides, groups first, each composed with what stands in for those before it.

    An override that was refused for the sake of another one is no problem: `cp=rng cp.mesh.ring=4` has one.

    Returns:
        The problems, the configuration with one correction of each, and whether all that concern `cp` have one.
    """
    problems, is_cp_whole = [], True
    for override, _ in sorted(refused, key=lambda one: not isinstance(one[1], MissingConfigException)):
        again, error = _attempt([*left, override])
        if error is None:
            left.append(override)
            composed = again
            continue
        refusal = Refusal(error=error, override=override, composed=composed, folders=tuple(folders))
        problem = problem_of(refusal)
        beside = [override] if refusal.is_of_a_file else []
        works = {line: attempt for line in problem.tries if (attempt := _tried([*left, *beside], line)) is not None}
        clean = {line: attempt for line, attempt in works.items() if not _is_faulty(line, attempt)}
        works = clean or works
        if chosen := next((attempt for attempt in works.values() if attempt[1] is not None), None):
            left[:], composed = chosen
        elif refusal.key.startswith("cp") or "@cp." in refusal.key:
            is_cp_whole = False
        problems.append(replace(problem, tries=tuple(works)))
    return problems, composed, is_cp_whole


Attempt = tuple[list[str], DictConfig | None]
"""Overrides and what they compose to; None where that is not known."""


def _tried(left: list[str], line: str) -> Attempt | None:
    """What a line to try makes of the other overrides; None where Hydra refuses it."""
    if line.startswith("-"):  # an option, for another run than this
        return left, None
    overrides = [*left, *(f"++{word}" if is_open(word) else word for word in shlex.split(line))]
    composed, error = _attempt(overrides)
    return None if error is not None else (overrides, composed)


def _is_faulty(line: str, attempt: Attempt) -> bool:
    """Whether a key of a line has a name or a value that is refused after composing."""
    keys = {word.partition("=")[0].lstrip("+~") for word in shlex.split(line)}
    return attempt[1] is not None and any(problem.key in keys for problem in _of_the_rest(attempt[1]))


def _of_the_rest(composed: DictConfig) -> Iterator[Problem]:
    """Names and types of everything that Hydra did compose."""
    yield from hydra_keys.problems(composed.hydra)
    try:
        config = plain(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
        config = settled(config, typed_in(composed.hydra))
        yield from key_problems(config)
        cp = config.get("cp")
        read(cp if isinstance(cp, Mapping) else {}, None)
    except ConfigError as error:
        yield from error.problems


def _attempt(overrides: list[str]) -> tuple[DictConfig | None, Exception | None]:
    try:
        return compose("config", overrides, return_hydra_config=True), None
    except UNCOMPOSED as error:
        return None, error


def _is_about(error: Exception, override: str) -> bool:
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    if isinstance(error, OverrideParseException):
        return error.override == override
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return error.missing_cfg_file == f"{key.partition('@')[0]}/{value}"
    text = str(error)
    match = KEY.search(text)
    return match.group(1).partition("=")[0] == key if match else override in text


def _one_choice(override: str) -> str:
    """One job's value of a sweep: the first that is refused, else the first; anything else as it is."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override  # composing reports it
    if not parsed.is_sweep_override() or override.startswith("~"):
        return override
    jobs = [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
    return next((job for job in jobs if _attempt([job])[1] is not None), jobs[0])
