"""Runs that go wrong on one rank, in every way that is known: the end says what happened and on which rank, and nothing is left."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import LAUNCH, PATIENCE, clean_environment, gone

SMALL = ("model=llama3", "titan.experimental.custom_import=tests.faults", "titan.training.seq_len=64")
OTHER_TEXT = "from cp_engine.hosts.torchtitan.text import rows; e = rows.encode; rows.encode = lambda text: e(text.replace('e', 'o'))"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault and how the run ends.

    Args:
        at: the place, of those of tests/faults.py.
        fault: a line of Python.
        says: what the error says, of a run of N ranks in which the last one is at fault.
        more: arguments.
        step: of the fault.
    """

    at: str
    fault: str
    says: tuple[str, ...]
    more: tuple[str, ...] = ()
    step: int = 2


WATCHED = ("launch.watch_seconds=20",)
NAN = "model.{where}.register_forward_hook(lambda m, i, o: o * float('nan'))"
CASES = {
    "nan in a module": Case(
        at="forward",
        fault=NAN.format(where="tok_embeddings"),
        says=("loss  is nan at step 2; rank {last} had it first", "where  tok_embeddings (Embedding); its inputs"),
    ),
    "nan in a module after attention": Case(
        at="forward",
        fault=NAN.format(where="layers['1'].feed_forward.w2"),
        says=(
            "loss  is nan at step 2; rank {last} had it first",
            "where  layers.1.feed_forward.w2 (Linear); its inputs",
        ),
    ),
    "infinite weight": Case(
        at="forward",
        fault="model.layers['0'].feed_forward.w1.weight.data.fill_(float('inf'))",
        says=("at step 2; rank {last} had it first", "where  layers.0.feed_forward.w1.weight: weights that the step"),
    ),
    "other text": Case(
        at="import",
        fault=OTHER_TEXT,
        says=("data  of step ", "is not the same on the ranks", "which each attends to a part"),
        step=1,
    ),
    "other weights": Case(
        at="start",
        fault="model.layers['0'].feed_forward.w1.weight.data.add_(1e-4)",
        says=(
            "weights  differ between the ranks",
            "rank {last} has other ones",
            "first  layers.0.feed_forward.w1.weight, of 1",
        ),
        more=("titan.parallelism.data_parallel_replicate_degree={ranks}", "cp=none"),
        step=1,
    ),
    **{
        f"{name} {at}": Case(at=at, fault=fault, says=(says,), step=step)
        for name, fault, says in (
            ("SIGKILL", "os.kill(os.getpid(), 9)", "killed by SIGKILL (often: out of memory)"),
            ("SIGTERM", "os.kill(os.getpid(), 15)", "killed by SIGTERM"),
            ("SIGABRT", "os.abort()", "killed by SIGABRT"),
            ("exit 7", "os._exit(7)", "ended with exit code 7"),
            ("exit 0", "os._exit(0)", "ended with exit code 0 before its job was done"),
            ("raise", "raise KeyError('no such sample')", "KeyError: 'no such sample'"),
        )
        for at, step in (("import", 1), ("start", 1), ("forward", 2), ("backward", 2), ("optimizer", 2))
    },
    "SIGKILL in an exchange": Case(
        at="forward", fault="threading.Timer(0.0, os.kill, (os.getpid(), 9)).start()", says=("killed by SIGKILL",)
    ),
    "SIGSTOP start": Case(
        at="start",
        fault="os.kill(os.getpid(), signal.SIGSTOP)",
        says=("rank {last}  tells nothing any more", "last    before its first step"),
        more=WATCHED,
        step=1,
    ),
    "SIGSTOP in an exchange": Case(
        at="forward",
        fault="threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()",
        says=("rank {last}  tells nothing any more", "others  rank 0 is in step "),
        more=WATCHED,
    ),
    **{
        f"hangs {at}": Case(
            at=at,
            fault="time.sleep(3600)",
            says=("rank {last}  is in step 2, ", "and the others wait for it", "faults.py:", f" {at}"),
            more=WATCHED,
        )
        for at in ("forward", "backward")
    },
}
QUICK = (
    "SIGABRT forward",
    "exit 0 optimizer",
    "nan in a module after attention",
    "other weights",
)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_a_fault_ends_the_run_and_is_named(tmp_path: Path, name: str, ranks: int) -> None:
    case, last = CASES[name], ranks - 1
    fault = {"FAULT_RANK": str(last), "FAULT_STEP": str(case.step), "FAULT_AT": case.at, "FAULT": case.fault}
    strategy = () if "cp=none" in case.more else ("cp=ulysses", f"cp.degree={ranks}")
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH), *strategy, *SMALL, *(argument.format(ranks=ranks) for argument in case.more)],
        cwd=tmp_path,
        env=clean_environment(**fault),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, out
    assert err.startswith(f"RankFailure: rank {last} of {ranks} ended the run\n"), err
    for text in case.says:
        assert text.format(last=last) in err, err
    assert gone(process.pid) and not list(tmp_path.glob("**/*.end.json"))


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    return (
        unshare is not None
        and subprocess.run([unshare, "-rm", "true"], check=False, capture_output=True).returncode == 0
    )


SMALL_DISK = """
mount -t tmpfs -o size={size} tmpfs {folder} && exec {python} {launch} model=llama3 cp=ulysses titan.training.seq_len=64 \
titan.checkpoint.enable=true titan.checkpoint.interval=2 hydra.run.dir={folder}/run
"""


@pytest.mark.skipif(not can_mount(), reason="this user may not mount a small disk")
@pytest.mark.parametrize(
    ("size", "said"), [("12M", "RankFailure: rank 0 of 2 ended"), ("40k", "hydra.run.dir  cannot be")]
)
def test_a_full_disk_is_named_without_tracebacks_of_the_log(tmp_path: Path, size: str, said: str) -> None:
    (tmp_path / "disk").mkdir()
    script = SMALL_DISK.format(size=size, folder=tmp_path / "disk", python=sys.executable, launch=LAUNCH)
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert ("  disk 0.0 MiB left of 12, in " in done.stderr) == (size == "12M"), done.stderr
    assert "No space left" in done.stderr or "checkpoint  could not be written" in done.stderr, done.stderr
    assert "Logging error" not in done.stderr and "Error executing job" not in done.stderr
