"""What follows a job's metrics.jsonl shows each new row once, also where a folder is used again."""

import io
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cp_engine.job import train
from cp_engine.job.launch.progress import Watch


@dataclass(frozen=True)
class Report:
    """A report of a step, without torchtitan."""

    step: int
    loss: float
    tokens_per_second: float = 10.0
    cp_bytes_sent: int = 0
    seconds: float = 1.0


def watched(folder: Path, steps: int) -> Watch:
    return Watch(folder, steps=steps, ranks=1, out=io.StringIO(), verbose=False, is_live=False)


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: Report) -> None:
    monkeypatch.setenv("RANK", "0")
    config: Mapping[str, object] = {"launch": {"output_dir": str(folder)}}
    with ExitStack() as finish:
        writer = train._writer(config, finish)
        for each in rows:
            writer(each)


@pytest.mark.parametrize("again", [(1, 2), (2, 3), (3, 4), (1,)], ids=str)
def test_rows_of_a_folder_that_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: tuple[int, ...]
) -> None:
    write(tmp_path, monkeypatch, Report(1, 8.0), Report(2, 7.0))
    with watched(tmp_path, again[-1]) as shown:
        write(tmp_path, monkeypatch, *(Report(step, 5.0 - step) for step in again))
    assert [(r["step"], r["loss"]) for r in shown.rows] == [(step, 5.0 - step) for step in again]
    kept = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [*range(1, again[0]), *again] and os.listdir(tmp_path) == ["metrics.jsonl"]
    assert ("1 step," in shown.summary()) == (len(again) == 1) == (" -> " not in shown.summary())


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch, Report(1, 8.0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    write(tmp_path, monkeypatch, Report(2, 7.0))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
