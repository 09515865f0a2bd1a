"""The command line: what composes, what is refused and how, and that no rank outlives a run."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import LAUNCH, PATIENCE, Result, clean_environment, gone

SMALL = ("titan.training.seq_len=64", "titan.training.local_batch_size=1")
ENDLESS = ("titan.training.steps=20000", "titan.comm.train_timeout_seconds=3600", *SMALL)
"""Nothing but what a test does to it ends it: no rank gives up waiting for another one."""
GATHER = "{kind: all_gather, axes: [cp], tensors: [k, v], dim: sequence, only: all}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["cp=none"],
        ["cp=ulysses"],
        ["cp=ulysses", "cp.degree=4"],
        ["cp=ulysses", "cp.mesh.ulysses=8"],
        ["cp=ulysses", "cp.steps.attend.kernel=math", "attention@cp.steps.attend=dense", "layout@cp.layout=zigzag"],
        ["cp.order=[to_heads, attend, to_sequence]"],
        ["cp.order=[to_heads,attend,to_sequence]"],
        ["~cp.mesh", "+cp.mesh={ulysses: 2}"],
        ["cp=none", "~cp.mesh", "+cp.mesh={cp: 2}", "cp.axes=[cp]", f"+cp.steps.x={GATHER}", "cp.order=[x,attend]"],
        [
            *("cp=none", "~cp.mesh", "+cp.mesh={cp: 2}", "cp.axes=[cp]", "+collective@cp.steps.x=all_gather"),
            *("cp.steps.x.axes=[cp]", "cp.steps.x.tensors=[k,v]", "cp.order=[x,attend]"),
        ],
        ["cp=none", "~attention@cp.steps.attend", "+cp.steps.attend={kind: dense}"],
        [
            *("cp=reorder_zigzag", "~collective@cp.steps.to_zigzag", "~cp.steps.to_zigzag", "cp.order=[gather,attend]"),
            *("~collective@cp.steps.to_contiguous", "~cp.steps.to_contiguous"),
        ],
        ["experiment=llama3_bfloat16"],
        ["experiment=llama3_bfloat16", "cp=allgather_kv"],
        ["cp=allgather_kv", "model=llama3", "titan.model.flavor=70B", "cp.degree=16", "shape.sequence=131072"],
        ["titan.training.gc_freq=7"],
        ["explain.format=text", "shape.dtype=bfloat16"],
        ["cp=usp", "cp.mesh.ring=2", "cp.mesh.ulysses=2"],
        ["cp=usp", "cp.axes=[ulysses,ring]", "layout@cp.layout=balanced", "cp.layout.chunks=4"],
        ["cp=ring", "layout@cp.layout=striped", "cp.steps.attend.sinks=true", "cp.recompute=skip_attention"],
        ["cp=ulysses", "cp.head_groups=4"],
        ["cp=ulysses", "cp.steps.attend.rotate=[ring]", "+cp.mesh.ring=2", "cp.axes=[ring,ulysses]"],
        ["cp=double_ring", "cp.degree=4", "cp.steps.attend.rotate=[inner,outer]"],
        ["cp=mla_ulysses", "titan.model.flavor=671B", "mask=document", "cp.degree=8"],
        ["cp=allgather_kv", "mask=document", "mask.starts=[0,100,180]", "layout@cp.layout=balanced"],
        ["cp=none", "mask=both", "mask.of=[{kind: window, left: 64, right: 0}, {kind: block, size: 32}]"],
    ],
    ids=" ".join,
)
def test_command_is_planned(command: Callable[..., Result], arguments: list[str]) -> None:
    result = command("mode=explain", *arguments)
    assert (result.code, result.err) == (0, "")
    assert "attend" in result.out
    assert not list(Path().iterdir()), "an explanation leaves no folder"


@pytest.mark.quick
def test_verify_passes_and_leaves_no_folder(command: Callable[..., Result]) -> None:
    result = command(
        "mode=verify", "cp=ulysses", "cp.degree=3", "shape.sequence=31", "shape.heads=6", "shape.kv_heads=3"
    )
    assert (result.code, result.err) == (0, "")
    assert "token 0" in result.out
    assert "WRONG" not in result.out
    assert not list(Path().iterdir())


def test_verify_out_of_bounds_exits_1(command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_engine.job.verify.attention.BOUND", 1e-30)
    result = command("mode=verify", "shape.sequence=31")
    assert result.code == 1
    assert "WRONG" in result.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["cp=window_halo", "mask=window", "mask.left=5", "cp.degree=3"],
        ["cp=usp", "cp.head_groups=2", "cp.steps.attend.sinks=true"],
        ["cp=mla_ulysses", "mask=document", "mask.starts=[0,1,17]"],
        ["cp=needed_kv", "layout@cp.layout=balanced", "mask=block", "mask.size=7", "cp.degree=3"],
    ],
    ids=" ".join,
)
def test_verify_takes_masks_head_groups_and_sinks(command: Callable[..., Result], arguments: list[str]) -> None:
    result = command("mode=verify", "shape.sequence=31", "shape.batch=1", *arguments)
    assert (result.code, result.err) == (0, "")
    assert result.out.rstrip().endswith("verified") and "WRONG" not in result.out


@pytest.mark.parametrize("what", ["job", "hydra"])
def test_composed_configuration_is_shown(command: Callable[..., Result], what: str) -> None:
    result = command("--cfg", what, "cp=ulysses")
    assert result.code == 0
    assert {"job": "to_heads:", "hydra": "sweep:"}[what] in result.out


@pytest.mark.quick
def test_explain_as_json_is_only_json(command: Callable[..., Result]) -> None:
    assert json.loads(command("mode=explain", "explain.format=json").out)


def test_user_folder_adds_a_strategy_that_extends_a_shipped_one(command: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "user" / "cp").mkdir(parents=True)
    (tmp_path / "user" / "cp" / "mine.yaml").write_text(
        "defaults: [ulysses, override /layout@layout: zigzag, _self_]\nname: mine\nmesh: {ulysses: 4}\n"
    )
    result = command("--config-dir", "user", "mode=explain", "cp=mine")
    assert result.code == 0, result.err
    assert "mine" in result.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cp.degre=4"], ["cp.degre  unknown key", "cp.degree=4"]),
        (["+cp.degre=4"], ["cp.degre", "degree"]),
        (["titan.training.stepz=3"], ["titan.training.stepz  unknown key", "titan.training.steps=3"]),
        (["+titan.training.stepz=3"], ["titan.training.stepz  unknown key", "titan.training.steps="]),
        (["cp=ulyses"], ["cp  'ulyses' is not one of the choices", "cp=ulysses"]),
        (["experment=llama3_bfloat16"], ["experiment=llama3_bfloat16"]),
        (["experiment=lama3_bfloat16"], ["experiment=llama3_bfloat16"]),
        (["+experiment=llama3_bfloat16"], ["experiment=llama3_bfloat16"]),
        (["layout=zigzag"], ["layout@cp.layout=zigzag"]),
        (["cp/layout=zigzag"], ["layout@cp.layout=zigzag"]),
        (["cp.mesh={cp: 2}"], ["'~cp.mesh' '+cp.mesh={cp: 2}'"]),
        (["cp=ulysses,none"], ["-m cp=ulysses,none"]),
        (["cp=null"], ["cp=none"]),
        (["cp=[]"], ["cp=none"]),
        (["~cp"], ["cp=none"]),
        (["titan.job.description=a=b"], ["titan.job.description", "mismatched input"]),
        (["--cfg", "job", "-m"], ["Only one of"]),
        (["mode=trian"], ["train, explain, verify", "mode=train"]),
        (["titan.training.steps=ten"], ["titan.training.steps  is str 'ten', not int"]),
        (["titan.parallelism.context_parallel_degree=4"], ["titan.parallelism.context_parallel_degree", "cp.degree=4"]),
        (["+cp.steps.attend.x=${nope}"], ["cp.steps.attend.x", "nope"]),
        (["data=jsonl"], ["data.path  has no value"]),
        (["--config-dir", "nowhere", "cp=mine"], ["nowhere"]),
        (["cp.degre=4", "titan.training.stepz=3", "cp=ulyses"], ["3 problems", "cp.degree=4", "cp=ulysses"]),
        (["+titan.training.stepz=3", "+cp.degre=4"], ["2 problems", "titan.training.stepz", "cp.degre"]),
        (["cp=usp", "cp.degree=8"], ["cp.degree  asks for 8 ranks", "ring=2 x ulysses=2", "cp.mesh.ring=4"]),
        (["cp=ring", "cp.steps.attend.rotate=ring"], ["must be a list of names", "'cp.steps.attend.rotate=[ring]'"]),
        (["cp=mla_ulysses", "model=llama3"], ["shape.latent_dim", "begins with kv_latent"]),
        (
            ["cp.head_groups=3"],
            ["cp.head_groups  3 does not divide the heads", "allowed  1, 2, 4, 8, 16", "cp.head_groups=2"],
        ),
        (["cp.recompute=skip_atention"], ["cp.recompute=skip_attention"]),
        (["mode=explain", "cp.degree=100000"], ["asks for 100000 ranks, and a plan is for at most 2048"]),
        (["mode=verify", "verify.level=training", "verify.target=ranks"], ["verify.target  is ranks", "=process"]),
        (
            [
                "mode=verify",
                "verify.level=training",
                "model=llama3",
                "titan.model.flavor=debugmodel_varlen_attn",
                "mask=document",
                "titan.training.mixed_precision_param=float32",
            ],
            ["titan.model.flavor  attends with varlen, which torchtitan alone cannot train with on a CPU"],
        ),
        (["data.field=txt"], ["data.field  is txt, and the built-in text has no fields"]),
        (
            ["titan.optimizer.name=Adm", "titan.optimizer.lr=nan", "titan.training.gc_freq=0"],
            [
                "3 problems",
                "titan.optimizer.name=Adam",
                "titan.optimizer.lr  is nan",
                "gc_freq  is 0, less than 1 step",
            ],
        ),
        (["mode=explain", "mask=window"], ["mask.left"]),
        (["mode=explain", "mask=docment"], ["mask=document"]),
        (["mode=explain", "layout@cp.layout=balancd"], ["layout@cp.layout=balanced"]),
        (
            ["mode=explain", "mask=document", "layout@cp.layout=balanced"],
            ["the mask comes with each call", "layout@cp.layout=zigzag"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistake_is_refused_with_what_to_type(
    command: Callable[..., Result], arguments: list[str], said: list[str]
) -> None:
    result = command(*arguments)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert result.err.count("Error:") == 1
    missing = [text for text in said if text not in result.err]
    assert not missing, result.err


def test_a_command_leaves_the_root_logger_as_it_was(command: Callable[..., Result]) -> None:
    root = logging.getLogger()
    before = root.handlers, list(root.handlers), root.level
    for arguments in (["mode=explain"], ["cp=dsa", "model=llama3"]):
        command(*arguments)
        assert (root.handlers, list(root.handlers), root.level) == before


@pytest.mark.quick
def test_invalid_yaml_is_refused_with_its_file(command: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "user" / "cp").mkdir(parents=True)
    (tmp_path / "user" / "cp" / "mine.yaml").write_text("mesh: {cp: ")
    result = command("--config-dir", "user", "cp=mine")
    assert result.code == 1
    assert "mine.yaml" in result.err


def test_sweep_explains_one_after_the_other_and_a_bad_job_does_not_stop_it(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    result = command("mode=explain", "cp=none,ulysses,allgather_kv", "cp.mesh.nope=3", "-m")
    assert result.code == 1  # the key is in no preset: refused before any job
    result = command("-m", "mode=explain", "cp.steps.attend.kernel=math,wrong,auto")
    assert result.code == 1
    assert "kernel=wrong" in result.err.partition("failed jobs:")[2]
    assert result.err.partition("failed jobs:")[2].count("mode=explain") == 1
    assert command("-m", "cp.degree=2,4", "titan.training.seq_len=65").code == 1  # refused to train
    assert list(tmp_path.iterdir()) == []


def test_value_that_names_a_rank_of_another_job_is_refused(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = command("cp=ulysses")
    assert result.code == 1
    assert "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in result.err


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], "torch"),
        (["--cfg", "job"], "torch"),
        (["mode=explain"], "torchtitan"),
        (["mode=explain"], "torch._dynamo"),
    ],
    ids=lambda value: str(value),
)
def test_quick_commands_do_not_import(tmp_path: Path, arguments: list[str], absent: str) -> None:
    code = f"""
import sys
from cp_engine.job.cli import run
sys.argv[0] = "launch.py"
try:
    code = run({arguments!r})
except SystemExit as end:
    code = end.code
assert not code, code
assert {absent!r} not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("cp: " in done.stdout) if arguments == ["--help"] else done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["mode=explain"], ["mode=verify", "shape.sequence=16"]], ids=str)
def test_a_reader_that_has_seen_enough_ends_the_command(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, str(LAUNCH), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""


# --- real runs: each imports torchtitan in every rank -----------------------------------------------------------------


def test_verify_on_ranks_compares_each_ranks_tokens_and_the_sum_of_parameter_gradients(
    launch: Callable[..., Result],
) -> None:
    documents = ("mask=document", "mask.starts=[0,1,17]", "shape.sequence=31", "cp.steps.attend.sinks=true")
    result = launch("mode=verify", "verify.target=ranks", "cp=mla_ulysses", *documents)
    assert result.code == 0, result.err
    assert "2 gloo ranks against dense attention" in result.out and result.out.rstrip().endswith("verified")
    for rank in "01":
        rows = [line.split() for line in result.out.splitlines() if line.startswith(f"{rank} ")]
        assert [row[1] for row in rows] == ["out", "dq", "dkv_latent", "dk_rope", "dkv_up", "dsinks"]
        assert all(row[-1] == "ok" for row in rows)


def test_two_jobs_train_in_one_folder_each_and_the_loss_falls(launch: Callable[..., Result], tmp_path: Path) -> None:
    result = launch("-m", "cp=ulysses,none", "titan.training.steps=3", *SMALL)
    assert result.code == 0, result.err
    folders = sorted(path for path in tmp_path.glob("multirun/*/*/*") if path.is_dir())
    assert [folder.name for folder in folders] == ["0", "1"]
    for folder, ranks in zip(folders, (2, 1), strict=True):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert rows[-1]["loss"] < rows[0]["loss"]
        assert {path.name for path in (folder / "ranks").glob("rank*")} == {f"rank{rank}.log" for rank in range(ranks)}
        assert (folder / ".hydra" / "config.yaml").exists()
        assert f"output   {folder}" in result.out
    assert "step 3/3  loss" in result.out
    assert "\x1b[" not in result.out, "plain lines when not a terminal"


def test_joined_ranks_share_the_folder_and_the_configuration_of_rank_0(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [*torchrun, "--rdzv-endpoint", "localhost:0", str(LAUNCH), "titan.training.steps=2", *SMALL],
        cwd=tmp_path,
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert {path.name for path in (folder / "ranks").iterdir()} >= {"rank0.log", "rank1.log"}
    assert done.stdout.count("step 2/2") == 1, "only rank 0 speaks"


def _as_from_a_terminal() -> None:
    """A shell without job control starts background jobs, such as a whole test run, with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def running(tmp_path: Path, seen: str) -> Iterator[subprocess.Popen[str]]:
    """A training run in a session of its own, after it has printed something."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(LAUNCH), *ENDLESS],
        cwd=tmp_path,
        env=clean_environment(),
        start_new_session=True,
        preexec_fn=_as_from_a_terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(seen, line):
                break
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("whole_group", "seen"),
    [
        pytest.param(True, r"step +1/", id="terminal"),
        pytest.param(False, r"step +1/", id="parent", marks=pytest.mark.long),
        pytest.param(True, "starting", id="terminal at start", marks=pytest.mark.long),
        pytest.param(False, "starting", id="parent at start"),
    ],
)
def test_ctrl_c_leaves_no_process_and_exits_130(tmp_path: Path, whole_group: bool, seen: str) -> None:
    with running(tmp_path, seen) as process:
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130, out + err
        assert "Traceback" not in err
        assert gone(process.pid)


def test_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with running(tmp_path, r"step +2/") as process:
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "rank 1 of 2 ended the run" in err
        assert "SIGKILL" in err
        assert gone(process.pid)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        pytest.param("os.abort()", "killed by SIGABRT", marks=pytest.mark.long),  # test_faults has it
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by SIGTERM"),
        pytest.param("os._exit(7)", "ended with exit code 7", marks=pytest.mark.long),
        pytest.param("os._exit(0)", "ended with exit code 0 before its job was done", marks=pytest.mark.long),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_the_rank_that_ended_first_is_named_with_how(
    launch: Callable[..., Result], tmp_path: Path, end: str, said: str
) -> None:
    fault = {"FAULT_RANK": "1", "FAULT_STEP": "2", "FAULT_AT": "forward", "FAULT": end}
    result = launch("model=llama3", "titan.experimental.custom_import=tests.faults", *SMALL, **fault)
    assert result.code == 1
    assert f"RankFailure: rank 1 of 2 ended the run\n  {said}" in result.err, result.err
    assert result.err.count("RankFailure") == 1 and not list(tmp_path.glob("**/*.end.json"))


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks, in order: the fork server's children."""
    (server,) = (pid for pid in children_of(launcher) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return children_of(server)


def children_of(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, r"step +1/") as process:
        assert len(ranks_of(process.pid)) == 2
        process.kill()
        assert gone(process.pid)  # the server, which nobody waits for, takes some seconds to unload what it imported


@pytest.mark.long
def test_error_in_the_ranks_is_shown_once_with_the_end_of_the_log(
    launch: Callable[..., Result], tmp_path: Path
) -> None:
    # a module that only the ranks import, each
    (tmp_path / "faulty.py").write_text("raise ValueError('nothing could know this before')\n")
    path = f"{LAUNCH.parent}{os.pathsep}{tmp_path}"
    result = launch("titan.experimental.custom_import=faulty", PYTHONPATH=path)
    assert result.code == 1
    assert re.search(
        r"RankFailure: rank [01] of 2 ended the run\n  ValueError: nothing could know this before", result.err
    ), result.err
    assert result.err.count("RankFailure") == 1
    assert "  log  " in result.err
