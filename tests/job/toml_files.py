"""TOML files, those of this project and those of a folder of real ones, and what they translate to."""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir

from cp_engine.config.compose import conf_dir
from cp_engine.errors import ConfigError
from cp_engine.job.modes import plain
from cp_engine.job.toml.argument import registered
from cp_engine.job.toml.file import read_toml
from cp_engine.job.toml.translate import DEGREE, translate
from cp_engine.job.toml.translation import Asked, Translation

OWN = Path(__file__).parents[1] / "toml"
REAL = os.environ.get("CP_ENGINE_TOMLS")  # a folder of files of torchtitan and torchtitan-npu
FILES = [*sorted(OWN.glob("*.toml")), *(sorted(Path(REAL).rglob("*.toml")) if REAL else [])]
DEGREES = [None, 2]
BALANCER = "parallelism.context_parallel_load_balancer"
OF_CP = re.compile(r"parallelism\.(context_parallel_\w+|enable_custom_context_parallel|custom_context_parallel_path)")


def translated(path: Path, degree: int | None = None, **asked: object) -> Translation:
    values = {} if degree is None else {DEGREE: degree}
    return translate(read_toml(str(path)), Asked(**{"values": values, "folders": (conf_dir(),), **asked}))


def of_text(tmp_path: Path, text: str, **asked: object) -> Translation:
    path = tmp_path / "file.toml"
    path.write_text(text)
    return translated(path, **asked)


@cache
def refusal(path: Path, degree: int | None = None) -> ConfigError | None:
    try:
        translated(path, degree)
    except ConfigError as error:
        return error
    return None


def composed_from(made: Translation, *overrides: str) -> dict[str, object]:
    with registered(made), initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        config = plain(compose("config", ["+translated=toml", *overrides]))
    launch = config["launch"]
    assert isinstance(launch, dict)
    launch["output_dir"] = "./outputs"
    return config


def flat(node: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
