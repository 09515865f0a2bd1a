"""What training would refuse, said of jobs that are only planned or translated, and refused before anything starts."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules

from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job.checks import here as torchtitan_here
from cp_engine.job.checks import job, stages
from tests.conftest import Result
from tests.job.test_job import composed, refused

Command = Callable[..., Result]
TENSOR = "titan.parallelism.tensor_parallel_degree"
STAGES = "titan.parallelism.pipeline_parallel_degree"

REFUSED = [  # (the job, the key, what is said)
    (["cp=mla_ulysses", f"{TENSOR}=2"], TENSOR, "with a matrix that tensor parallelism would cut"),
    ([f"{TENSOR}=4", "titan.training.seq_len=260"], "titan.training.seq_len", "260 is not divisible by 16"),
    (
        ["cp.degree=8", "titan.parallelism.data_parallel_shard_degree=8", "launch.nproc=8"],
        "launch.nproc",
        "8 is not 64",
    ),
    (["titan.model.converters=[float8]"], "titan.model.converters", "has float8, which is no converter"),
    (["titan.model.flavor=16B"], "mask", "is causal, and '16B' attends with flex"),
    (["titan.memory_estimation.enable=true"], "titan.memory_estimation.enable", "would have no effect"),
    (["titan.checkpoint.interval=3"], "titan.checkpoint.interval", "would have no effect"),
]


@pytest.mark.parametrize(("arguments", "key", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_explain_says_below_the_plan_what_training_refuses(
    command: Command, arguments: list[str], key: str, said: str
) -> None:
    shown = command("mode=explain", *arguments)
    plan, _, told = shown.out.partition("\n\ntraining   would refuse this job: 1 problem\n")
    assert shown.code == 0 and "\nproved     " in plan and told.startswith(f"  1. {key}  ") and said in told
    started = command(*arguments)
    assert started.code == 1 and told.rstrip() in started.err


def test_explain_of_a_job_that_trains_says_nothing_more(command: Command) -> None:
    shown = command("mode=explain")
    assert shown.out.rstrip().splitlines()[-1].startswith("proved ")
    data = json.loads(command("mode=explain", "explain.format=json").out)
    assert data["training"] == {"refused": [], "here": [], "hypothetical": []}


def test_explain_as_json_has_what_training_refuses(command: Command) -> None:
    told = json.loads(
        command("mode=explain", "explain.format=json", "data.path=nowhere", f"{STAGES}=7", "model=llama3").out
    )
    (refusal,), (missing,) = told["training"]["refused"], told["training"]["here"]
    assert refusal["key"] == STAGES and refusal["tries"] == [f"{STAGES}=4"]
    assert missing["key"] == "data.path" and missing["what"] == "there is no folder nowhere"


@pytest.mark.parametrize(
    ("arguments", "hypothetical"),
    [
        (["shape.sequence=1023"], ["shape.sequence"]),
        (["mask=full"], ["mask"]),
        (
            ["titan.model.name=mine", "shape.heads=4", "shape.kv_heads=4", "shape.head_dim=8", "shape.v_head_dim=8"],
            None,
        ),
    ],
)
def test_call_that_is_only_planned_is_not_the_jobs(
    command: Command, arguments: list[str], hypothetical: list[str] | None
) -> None:
    told = json.loads(command("mode=explain", "explain.format=json", *arguments).out)["training"]
    assert told["refused"] == [] == told["here"]
    assert told["hypothetical"] == (hypothetical or [a.partition("=")[0] for a in arguments[1:]])
    assert command(*arguments).code == 1  # a run makes the call of its model


def test_plan_for_more_ranks_than_a_machine_has_is_not_refused(command: Command) -> None:
    shown = command(
        "mode=explain", "cp.degree=64", "launch.device=cuda", f"{TENSOR}=16", "titan.training.seq_len=131072"
    )
    assert shown.code == 0 and "would refuse" not in shown.out and "\nhere " not in shown.out


def test_what_a_machine_lacks_is_told_apart_from_what_is_wrong_with_the_job(command: Command) -> None:
    snapshot = "titan.profiling.enable_memory_snapshot=true"
    key = "titan.profiling.enable_memory_snapshot"
    here = command("mode=explain", snapshot, "launch.device=auto")
    assert f"\nhere       training would not start on this machine: 1 problem\n  1. {key}" in here.out
    chosen = command("mode=explain", snapshot, "launch.device=cpu")
    assert f"\ntraining   would refuse this job: 1 problem\n  1. {key}" in chosen.out


def test_translate_writes_its_file_and_says_what_training_refuses(command: Command, tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nconverters = ["float8"]\n[parallelism]\ncontext_parallel_degree = 2\n'
    (tmp_path / "job.toml").write_text(f"{text}[training]\nseq_len = 254\n[memory_estimation]\nenable = true\n")
    done = command("mode=translate", "toml=job.toml", "out=experiment/mine.yaml")
    assert done.code == 0 and (tmp_path / "experiment" / "mine.yaml").is_file()
    told = done.out.partition("training   would refuse this job: 3 problems\n")[2]
    for key in ("titan.training.seq_len", "titan.model.converters", "titan.memory_estimation.enable"):
        assert f". {key}  " in told
    printed = command("mode=translate", "toml=job.toml")
    assert "would refuse" in printed.err and "would refuse" not in printed.out
    back = command(
        "mode=translate", "translate.to=toml", "data=c4_test", "titan.memory_estimation.enable=true", "out=job2.toml"
    )
    assert back.code == 0 and "titan.memory_estimation.enable  is true, and would have no effect" in back.out


# ------------------------------------------------------------------ what would end in the ranks
DIES = [  # overrides, each of which ended in a traceback of a rank on a CPU; the key that is named
    ("titan.profiling.enable_memory_snapshot=true", "titan.profiling.enable_memory_snapshot"),
    ("titan.profiling.enable_profiling=true titan.profiling.profile_freq=2", "titan.profiling.profile_freq"),
    ("titan.training.enable_cpu_offload=true", "titan.training.enable_cpu_offload"),
    ("titan.training.gc_debug=true", "titan.training.gc_debug"),
    ("titan.training.global_batch_size=0", "titan.training.global_batch_size"),
    ("titan.training.max_norm=0", "titan.training.max_norm"),
    ("titan.model.converters=[quantize.linear.float8]", "titan.model.converters"),
    ("titan.model.converters=[quantize.linear.mx]", "titan.model.converters"),
    ("titan.model.converters=[quantize.grouped_mm.float8]", "titan.model.converters"),
    ("titan.model.converters=[quantize.grouped_mm.mx]", "titan.model.converters"),
    ("titan.activation_checkpoint.mode=memory_budget", "titan.activation_checkpoint.mode"),
    (
        "titan.activation_checkpoint.mode=selective titan.activation_checkpoint.selective_ac_option=foo",
        "titan.activation_checkpoint.selective_ac_option",
    ),
    (
        "titan.activation_checkpoint.mode=full titan.activation_checkpoint.determinism_check=foo",
        "titan.activation_checkpoint.determinism_check",
    ),
    ("titan.compile.enable=true titan.compile.components=[los]", "titan.compile.components"),
    ("titan.compile.enable=true titan.compile.backend=indctor", "titan.compile.backend"),
    (
        f"titan.parallelism.enable_async_tensor_parallel=true {TENSOR}=2",
        "titan.parallelism.enable_async_tensor_parallel",
    ),
    (f"titan.optimizer.early_step_in_backward=true {STAGES}=2", "titan.optimizer.early_step_in_backward"),
    ("titan.lr_scheduler.total_steps=1", "titan.lr_scheduler.total_steps"),
    ("titan.lr_scheduler.decay_ratio=2.0", "titan.lr_scheduler.decay_ratio"),
    ("titan.lr_scheduler.warmup_steps=-1", "titan.lr_scheduler.warmup_steps"),
    ("titan.metrics.log_freq=0", "titan.metrics.log_freq"),
    ("titan.comm.init_timeout_seconds=0", "titan.comm.init_timeout_seconds"),
    ("titan.comm.train_timeout_seconds=0", "titan.comm.train_timeout_seconds"),
    ("titan.checkpoint.enable=true titan.checkpoint.keep_latest_k=1", "titan.checkpoint.keep_latest_k"),
    ("titan.checkpoint.enable=true titan.checkpoint.interval=0", "titan.checkpoint.interval"),
    ("titan.checkpoint.enable=true titan.checkpoint.async_mode=async_with_pinned_mem", "titan.checkpoint.async_mode"),
    (
        "titan.checkpoint.enable=true titan.checkpoint.initial_load_in_hf_quantized=true",
        "titan.checkpoint.initial_load_in_hf_quantized",
    ),
    ("titan.experimental.custom_import=nowhere.at_all", "titan.experimental.custom_import"),
    (
        "titan.parallelism.expert_parallel_degree=2 titan.parallelism.expert_parallel_comm_backend=deepep",
        "titan.parallelism.expert_parallel_comm_backend",
    ),
    (f"{STAGES}=2 titan.parallelism.pipeline_parallel_schedule=foo", "titan.parallelism.pipeline_parallel_schedule"),
    (
        f"{STAGES}=2 titan.parallelism.pipeline_parallel_schedule=PipelineScheduleMulti",
        "titan.parallelism.pipeline_parallel_schedule",
    ),
    (
        f"{STAGES}=2 titan.parallelism.pipeline_parallel_schedule=DualPipeV titan.training.local_batch_size=4",
        "titan.parallelism.pipeline_parallel_schedule",
    ),
    (
        f"{STAGES}=2 titan.parallelism.pipeline_parallel_schedule_csv=/nowhere.csv",
        "titan.parallelism.pipeline_parallel_schedule_csv",
    ),
    (
        f"{STAGES}=2 titan.parallelism.pipeline_parallel_layers_per_stage=2",
        "titan.parallelism.pipeline_parallel_layers_per_stage",
    ),
    (f"{STAGES}=2 titan.parallelism.pipeline_parallel_first_stage_less_layers=7", STAGES),
    (
        f"{STAGES}=2 titan.parallelism.module_fqns_per_model_part=[[tok_embeddings],[norm]]",
        "titan.parallelism.module_fqns_per_model_part",
    ),
    (f"{STAGES}=7", STAGES),
]


@pytest.mark.parametrize(("line", "key"), DIES, ids=lambda value: str(value)[:60])
def test_what_ends_in_the_ranks_is_refused_before_with_what_to_type(line: str, key: str) -> None:
    words = [f"++{word}" for word in line.split()]
    found = refused(composed(*words))
    assert set(found) == {key}
    typed = [t for t in found[key].tries if not t.startswith(("pip ", "~"))]
    assert typed or found[key].tries
    for again in typed:
        more = [f"++{word.lstrip('+')}" for word in shlex.split(again)]
        assert key not in {p.key for p in job.problems(composed(*words, *more))} or "emulate" in again


def test_emulated_float8_on_a_cpu_needs_its_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "++titan.model.converters=[quantize.linear.float8]", "++titan.quantize.linear.float8.emulate=true"
    monkeypatch.setattr(torchtitan_here, "find_spec", lambda name: None if name == "torchao" else object())
    (problem,) = job.problems(composed(*words))
    assert problem.tries == ("pip install torchao", "'titan.model.converters=[]'")
    monkeypatch.setattr(torchtitan_here, "find_spec", lambda name: object())
    assert not job.problems(composed(*words))
    assert set(refused(composed(*words, "++titan.compile.enable=true"))) == {"titan.compile.components"}


def test_layers_of_stages_are_those_that_torchtitan_gives() -> None:
    with cpu_shims():
        from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
    compared = 0
    for sizes in ((s, n, f, e) for s in range(1, 8) for n in range(1, 12) for f in range(3) for e in range(3)):
        held = stages.layers_of_stages(*sizes)
        try:
            parts = generate_llm_fqn_per_model_part(*sizes)
        except ValueError:
            assert not all(held), sizes
        else:
            compared += 1
            assert [sum(name.startswith("layers.") for name in part) for part in parts] == held, sizes
    assert compared > 300


def test_schedules_are_those_of_the_installed_torch() -> None:
    for name in (*stages.SINGLE, *stages.LOOPED):
        is_single = issubclass(schedules.get_schedule_class(name), schedules.PipelineScheduleSingle)
        assert is_single == (name in stages.SINGLE)
    with pytest.raises(ValueError, match="The valid options are") as caught:
        schedules.get_schedule_class("none of them")
    known = str(caught.value).partition("options are ")[2]
    abstract = {"PipelineScheduleSingle", "PipelineScheduleMulti"}
    assert set(eval(known)) - abstract == {*stages.SINGLE, *stages.LOOPED}


def test_profiling_on_a_cpu_writes_a_trace(command: Command, tmp_path: Path) -> None:
    small = (
        "cp=none",
        "model=llama3",
        "titan.training.seq_len=32",
        "titan.training.local_batch_size=1",
        "launch.device=cpu",
    )
    options = (
        "titan.profiling.enable_profiling=true",
        "titan.profiling.profile_freq=2",
        "titan.profiling.profiler_warmup=1",
    )
    done = command(*small, *options, "titan.training.steps=2", "launch.inline=true", "hydra.run.dir=run")
    assert done.code == 0, done.err
    (trace,) = (tmp_path / "run" / "profile_traces").rglob("*.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("mm" in str(name) for name in names)


# ------------------------------------------------------------------ without torchtitan
HIDDEN = """
import sys
from importlib.machinery import PathFinder

class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Others
"""
COMMANDS = """
import json, sys
from cp_engine.job import cli
for line in json.loads(sys.argv[1]):
    print("code", cli.run(line), flush=True)
"""


def without(names: tuple[str, ...], folder: Path, *lines: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs command lines in a new process whose environment lacks packages."""
    (folder / "sitecustomize.py").write_text(HIDDEN.format(names=set(names)))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), root])}
    program = [sys.executable, "-c", COMMANDS, json.dumps(lines)]
    return subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True, check=True)


def test_missing_torchtitan_is_said_with_the_extra_to_install_and_plans_are_made_without(tmp_path: Path) -> None:
    lines = [
        ["mode=explain"],
        ["cp=ulysses"],
        ["mode=verify", "verify.level=training"],
        ["mode=verify", "shape.sequence=16"],
    ]
    done = without(("torchtitan", "triton"), tmp_path, *lines)
    explained, trained, compared, verified = done.stdout.split("code ")[:-1]
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == ["0", "1", "1", "0"], done.stderr
    said = "titan  training needs torchtitan, triton, which are not installed"
    assert "proved     " in explained and "here       training would not start on this machine" in explained
    assert said in explained and 'pip install "cp-engine[torchtitan]"' in explained
    assert done.stderr.count(said) == 2 and "Traceback" not in done.stderr and "verified" in verified
    assert not trained.partition("\n")[2] and not compared.partition("\n")[2]  # nothing was started
    assert {p.name for p in tmp_path.iterdir()} <= {"sitecustomize.py", "__pycache__"}


def test_missing_package_of_torchtitan_is_named(tmp_path: Path) -> None:
    done = without(("triton",), tmp_path, ["cp=ulysses"])
    assert done.stdout == "code 1\n" and "training needs triton, which is not installed" in done.stderr


def test_packages_that_are_asked_for_are_those_that_training_imports() -> None:
    code = (
        "import sys\nfrom cp_engine.hosts.torchtitan.cpu_shims import cpu_shims\n"
        "with cpu_shims():\n    import cp_engine.hosts.torchtitan.trainer, torchtitan.models.qwen3\n"
        "    import torchtitan.models.deepseek_v3, torchtitan.models.llama3, torchtitan.models.llama4\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(torchtitan_here.PACKAGES) <= set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("seconds", ["0", "-3", "100", "1e9", "inf", "nan"])
def test_a_watch_that_could_not_act_is_refused_with_what_can(command: Callable[..., Result], seconds: str) -> None:
    result = command("cp=ulysses", f"launch.watch_seconds={seconds}")
    assert (
        result.code == 1
        and "launch.watch_seconds  is " in result.err
        and "below titan.comm.train_timeout" in result.err
    )
    assert "try   launch.watch_seconds=null" in result.err or "try  launch.watch_seconds=null" in result.err
