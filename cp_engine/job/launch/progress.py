"""What a person sees of a running job: progress from metrics.jsonl, the ranks' lines if asked, a closing summary."""

import json
import logging
import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

MiB = 2**20
SECONDS_BETWEEN_LOOKS = 0.1


class Screen(Console):
    """Where results are printed; where nobody reads them any more, that is an error and no exit code of a result."""

    def on_broken_pipe(self) -> None:
        """Called by rich, which would exit with 1."""
        raise BrokenPipeError


class LogFile(logging.FileHandler):
    """A log that ends where there is no space left; logging would print a traceback of its own for each further line."""

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Called by logging."""


class Tail:
    """The complete lines that were appended to a file since the last look; all of them where it is another file by now.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = self._inode = 0

    def lines(self) -> list[str]:
        """New lines, without one that is still being written."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._offset, self._inode = 0, inode
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return text.decode(errors="replace").splitlines()


class Watch:
    """Shows a job while it runs; a context manager.

    Args:
        output_dir: the job's folder, with metrics.jsonl and ranks/.
        steps: how many steps the job trains.
        ranks: number of ranks.
        out: where to write; a bar on a terminal, plain lines elsewhere.
        is_live: false for plain lines also on a terminal, which ranks or a debugger share.
        verbose: also show every rank's log lines, each with its rank.
    """

    def __init__(self, output_dir: Path, *, steps: int, ranks: int, out: TextIO, verbose: bool, is_live: bool) -> None:
        self.rows: list[Mapping[str, float | None]] = []
        self._steps, self._ranks, self._output_dir = steps, ranks, output_dir
        self._metrics = Tail(output_dir / "metrics.jsonl")
        self._before = set(self._metrics.lines())  # a folder that is used again already has rows
        self._logs = {rank: Tail(log_path(output_dir, rank)) for rank in range(ranks)} if verbose else {}
        self._console = Screen(file=out, highlight=False, soft_wrap=True)
        has_bar = is_live and self._console.is_terminal and not verbose
        self._bar, self._task = _bar(self._console, ranks, steps) if has_bar else (None, TaskID(0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "Watch":
        if self._bar is None:
            self._print(f"starting {self._ranks} rank{'s' * (self._ranks != 1)}, output in {self._output_dir}")
        else:
            self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        if self._bar is not None:
            self._bar.stop()

    def summary(self, notes: Sequence[str] = ()) -> str:
        """The closing lines: steps, loss, speed, bytes, what else there is to say, folder."""
        if not self.rows:
            line = f"no step was logged (titan.metrics.log_freq), or none was left to train   {self._output_dir}"
            return "\n".join([*notes, line])
        first, last = self.rows[0], self.rows[-1]
        speed = statistics.median(row["tokens_per_second"] or 0 for row in self.rows)
        sent = statistics.median(row["cp_bytes_sent"] or 0 for row in self.rows)
        seconds = sum(row["seconds"] or 0 for row in self.rows)
        is_each = self._steps - (first["step"] or 0) + 1 == len(self.rows)
        steps = f"{len(self.rows)} step{'s' * (len(self.rows) != 1)}, {seconds:.1f} s in steps"
        logged = f"step {self._steps}; {len(self.rows)} logged (titan.metrics.log_freq), {seconds:.1f} s in those"
        return "\n".join(
            [
                f"done     {steps if is_each else logged}",
                f"loss     {_loss(first['loss'])}" + (f" -> {_loss(last['loss'])}" if last is not first else ""),
                f"speed    {speed:,.0f} tokens/s (median)",
                *((f"cp sent  {sent / MiB:,.2f} MiB per step, all ranks",) if sent else ()),
                *notes,
                f"output   {self._output_dir}",
            ]
        )

    def say(self, line: str) -> None:
        """Shows a line that is no row of metrics."""
        self._print(line)

    def _run(self) -> None:
        with suppress(BrokenPipeError):  # training goes on; the closing lines find out again
            while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
                self._look()

    def _look(self) -> None:
        for rank, log in self._logs.items():
            for line in log.lines():
                self._print(f"[{rank}] {line}")
        for line in self._metrics.lines():
            if line not in self._before:
                self._before.add(
                    line
                )  # a run that is started again keeps the lines before its checkpoint, in a new file
                self._show(json.loads(line))

    def _show(self, row: Mapping[str, float | None]) -> None:
        while self.rows and (self.rows[-1]["step"] or 0) >= (row["step"] or 0):  # of a run that was started again
            self.rows.pop()
        self.rows.append(row)
        indexer = f"  indexer {_loss(row['indexer_loss'])}" if "indexer_loss" in row else ""
        step, speed = int(row["step"] or 0), row["tokens_per_second"] or 0.0
        numbers = f"loss {_loss(row['loss'])}{indexer}  {speed:,.0f} tokens/s"
        if self._bar is None:
            width = len(str(self._steps))
            self._print(f"step {step:>{width}}/{self._steps}  {numbers}")
        else:
            self._bar.update(self._task, completed=step, numbers=numbers, description="training")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _bar(console: Console, ranks: int, steps: int) -> tuple[Progress | None, TaskID]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
        console=console,
    )
    return bar, bar.add_task(f"starting {ranks} rank{'s' * (ranks != 1)}", total=steps, numbers="")


def log_path(output_dir: Path, rank: int) -> Path:
    """Where a rank's standard output and error go."""
    return output_dir / "ranks" / f"rank{rank}.log"


def last_lines(path: Path, count: int) -> Sequence[str]:
    """The last lines of a log; none if it does not exist."""
    return path.read_text(errors="replace").splitlines()[-count:] if path.exists() else []
