"""Presets composed by Hydra from inside a program."""

import shutil
from pathlib import Path

import pytest
from hydra import compose as hydra_compose

from cp_engine.config import compose, hydra_files
from cp_engine.config.shipped import conf_dir


def test_a_preset_is_read_once_until_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf"
    shutil.copytree(conf_dir(), folder)
    read: list[list[str]] = []

    def reading(name: str, overrides: list[str]) -> object:
        read.append(overrides)
        return hydra_compose(name, overrides)

    monkeypatch.setattr(compose, "conf_dir", lambda: folder)
    monkeypatch.setattr(hydra_files, "conf_dir", lambda: folder)
    monkeypatch.setattr(compose, "hydra_compose", reading)
    first = compose.compose("ulysses")
    first["mesh"] = "changed by its owner"
    assert compose.compose("ulysses")["mesh"] == {"ulysses": 2} and len(read) == 1
    assert compose.compose("ulysses", ["cp.degree=4"])["degree"] == 4 and len(read) == 2
    file = folder / "cp" / "ulysses.yaml"
    file.write_text(file.read_text().replace("ulysses: 2", "ulysses: 16"))
    assert compose.compose("ulysses")["mesh"] == {"ulysses": 16} and len(read) == 3
