"""`mode=translate`: a TOML becomes an experiment, or a configuration a TOML; the file is written whole or not at all."""

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cp_engine.config.compose import conf_dir
from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks.keys import key_problems
from cp_engine.job.checks.training import Refusals
from cp_engine.job.toml import experiment
from cp_engine.job.toml.translation import Translation


def run(config: Mapping[str, object], translation: Translation | None, refusals: Callable[[], Refusals]) -> None:
    """Writes the file that `out` names, or prints what it would hold; says what training would refuse of it.

    Args:
        config: the composed configuration.
        translation: of the TOML that the command line names.
        refusals: of a run of the configuration, whose keys are right.

    Raises:
        ConfigError: keys that are wrong, a file that is there, or a configuration that no TOML can say.
    """
    settings = config["translate"]
    assert isinstance(settings, Mapping)
    problems = list(key_problems(config))
    to, out = settings.get("to"), config.get("out")
    if to == "experiment" and translation is None:
        tries = ("toml=FILE", "translate.to=toml")
        problems.append(Problem(key="toml", what="is null; a file is needed to translate from", tries=tries))
    written = str(out) if out is not None else None
    problems += experiment.out_problems(written, to=str(to), is_forced=settings.get("force") is True)
    if problems:
        raise ConfigError(problems)
    if to == "toml":
        from cp_engine.job.toml.write import toml_text

        content, said = toml_text(config), ""
    else:
        assert translation is not None
        name = Path(out).stem if isinstance(out, str) else "NAME"
        content, said = experiment.text(translation, name), experiment.report(translation) + "\n"
    if told := refusals().lines():
        said += "\n".join(["", *told, ""])
    if not isinstance(out, str):
        print(content, end="")
        print(said, file=sys.stderr, end="")
        return
    experiment.write(content, out)
    print(f"{said}\nwrote {out}" if said else f"wrote {out}")
    if to == "experiment":
        print(f"run it: {_command(Path(out))}")


def _command(out: Path) -> str:
    """What runs the experiment."""
    choice = f"experiment={out.stem}"
    if out.parent.resolve() == (conf_dir() / "experiment").resolve():
        return f"python launch.py {shlex.quote(choice)}"
    if out.parent.name == "experiment":
        return f"python launch.py --config-dir {shlex.quote(str(out.parent.parent))} {shlex.quote(choice)}"
    return f"python launch.py --config-dir FOLDER {shlex.quote(choice)}, with the file in FOLDER/experiment"
