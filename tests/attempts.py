"""Command lines in processes of their own, forked from one that has imported everything: what each used, and how it ended."""

import contextlib
import gc
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.conftest import clean_environment

MOST_SECONDS = 15
"""Of processor time, in one command: three times what the slowest takes on a quiet machine."""
MOST_MEBIBYTES = 1024
"""Of memory, beyond what the process had when it began."""
WAITED = 600
"""Seconds for a command that takes no processor time: nothing but a hang takes them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Args:
        code: exit code; negative for a signal.
        out: what it printed.
        err: likewise, on the other stream.
        seconds: of processor time.
        mebibytes: the most memory that it had, beyond what it began with.
    """

    code: int
    out: str
    err: str
    seconds: float
    mebibytes: float

    @property
    def fault(self) -> str:
        """Why this is neither a success nor an error of this project; empty where it is one."""
        if "Traceback" in self.err or "Traceback" in self.out:
            return "a traceback"
        if self.code not in (0, 1):
            return f"ended with {self.code}"
        if self.code == 1 and "Error: " not in self.err:
            return "exit code 1 without an error"
        if self.seconds > MOST_SECONDS:
            return f"{self.seconds:.1f} s of processor time"
        return f"{self.mebibytes:.0f} MiB" if self.mebibytes > MOST_MEBIBYTES else ""


class Attempts:
    """A process that runs command lines, each in a fork of itself."""

    def __enter__(self) -> "Attempts":
        command = [sys.executable, "-m", "tests.attempts"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(command, text=True, env=clean_environment(OMP_NUM_THREADS="1"), **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait()

    def run(self, arguments: Sequence[str], folder: Path) -> Outcome:
        """Runs one command line in a folder."""
        print(json.dumps({"arguments": list(arguments), "folder": str(folder)}), file=self._server.stdin, flush=True)
        return Outcome(**json.loads(self._server.stdout.readline()))


def _attempt(arguments: Sequence[str], folder: str) -> Outcome:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        before = _mebibytes()
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(folder)
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))  # what is asked for beyond fails, and is a fault
            os._exit(_run(arguments))
        ends = time.monotonic() + WAITED
        while True:
            pid, status, used = os.wait4(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > ends:
                os.kill(child, 9)
            time.sleep(0.005)
        out.seek(0)
        err.seek(0)
        texts = [file.read(2**20).decode(errors="backslashreplace") for file in (out, err)]
    seconds = used.ru_utime + used.ru_stime
    return Outcome(os.waitstatus_to_exitcode(status), *texts, seconds, used.ru_maxrss / 1024 - before)


def _run(arguments: Sequence[str]) -> int:
    from cp_engine.job import cli

    sys.path[0] = os.getcwd()  # as `python -m cp_engine` has it
    try:
        code = cli.run(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _mebibytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Answers one line with one line, each JSON."""
    answers, sys.argv = os.fdopen(os.dup(1), "w"), ["launch.py"]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import cp_engine.job.verify.training_mode  # noqa: F401  # and with it torch

    with contextlib.redirect_stderr(io.StringIO()):
        for once in ("mode=explain", "cp.degre=2"):  # for what is imported and read when it is first used
            _run([once])
    gc.collect()
    gc.freeze()  # so that a child does not copy the memory of its parent when it looks for garbage
    for line in sys.stdin:
        print(json.dumps(asdict(_attempt(**json.loads(line)))), file=answers, flush=True)
    os._exit(0)  # with what is frozen, libraries would complain of leaks


if __name__ == "__main__":
    main()
