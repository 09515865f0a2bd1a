"""torchtitan-npu as a host: the package itself, on the stand-in, with this engine's context parallelism.

The package is not a dependency. These tests run wherever it can be imported:
    pip install --no-deps torchtitan-npu==0.2.2.post2 && pip install scipy && pytest tests/ascend/test_npu_host.py
or where CP_ENGINE_TORCHTITAN_NPU names a folder that it was installed into with `--target`, as in `.ci/run`, so that all other tests
run without it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cp_engine.job.checks.versions import HOSTED
from tests.ascend.npu_host import (
    FOLDER,
    by_its_own_class_patch,
    converted,
    dense,
    eager,
    experts,
    fused,
    under_tensor_parallelism,
)
from tests.conftest import PATIENCE, Result, clean_environment
from tests.gloo import World, world

IS_THERE = bool(FOLDER) or find_spec("torchtitan_npu") is not None
IS_TOO_NEW = list(map(int, torch.__version__.split(".")[:2])) > list(HOSTED["torchtitan_npu"][1])
pytestmark = [
    pytest.mark.skipif(not IS_THERE, reason="torchtitan-npu is not installed, nor named by CP_ENGINE_TORCHTITAN_NPU"),
    pytest.mark.skipif(IS_TOO_NEW, reason="torchtitan-npu cannot be imported with this torch; such a job is refused"),
]
OWN = Path(__file__).parents[1] / "toml"


# ------------------------------------------------------------------ its modules
@pytest.mark.parametrize(
    ("batch", "sequence", "layout"), [(1, 64, "contiguous"), (3, 65, "zigzag"), (3, 67, "striped")]
)
def test_sparse_module_on_two_ranks_is_its_own_torch_code_on_one(
    two: World, batch: int, sequence: int, layout: str
) -> None:
    for errors, loss in two.run(eager, batch, sequence, layout):  # type: ignore[misc]
        assert len(errors) == 14 and max(errors.values()) < 1e-5, errors
        assert loss["found"] == pytest.approx(loss["expected"], rel=1e-5) and loss["found"] > 1e-3


@pytest.mark.parametrize("batch", [1, 3])
def test_its_model_beside_tensor_parallelism_is_its_own_torch_code_on_one(four: World, batch: int) -> None:
    for errors in four.run(under_tensor_parallelism, batch):
        assert len(errors) == 20 and max(errors.values()) < 1e-5, errors  # type: ignore[arg-type, attr-defined]


@pytest.mark.long  # 64 heads for the indexer, as its operators take no fewer
def test_sparse_module_with_its_converter_on_two_ranks_is_the_converter_on_one(two: World) -> None:
    errors, differing = two.run(converted)[0]  # type: ignore[misc]
    assert len(errors) == 14 and max(errors.values()) <= 5e-3, errors
    assert differing == 0


def test_its_own_class_patch_gives_the_indexer_as_many_times_its_gradient_as_there_are_ranks() -> None:
    with world(2) as last:  # the class stays patched
        for ratios in last.run(by_its_own_class_patch):
            assert all(1.98 < ratio < 2.02 for ratio in ratios.values()), ratios  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dense_module_on_two_ranks_is_that_of_one(two: World, layout: str) -> None:
    for errors in two.run(dense, layout):
        assert len(errors) >= 7 and max(errors.values()) < 1e-5, errors  # type: ignore[attr-defined, arg-type]


def test_fused_module_of_its_converter_is_a_site(two: World) -> None:
    for errors in two.run(fused):
        assert len(errors) == 6 and max(errors.values()) < 1e-5, errors  # type: ignore[attr-defined, arg-type]


def test_its_experts_with_its_converters_are_torchtitans() -> None:
    with world(1) as last:  # the classes stay patched
        for errors in last.run(experts):
            assert len(errors) == 8 and max(errors.values()) < 5e-3, errors  # type: ignore[attr-defined, arg-type]


# ------------------------------------------------------------------ its jobs
def hosted_job(file: str) -> tuple[str, ...]:
    """A job of a file; its default seed would draw other weights each time."""
    return (f"toml={OWN / file}.toml", "data=builtin", "launch.device=npu_reference", "titan.debug.seed=0")


def hosted_path() -> str:
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), FOLDER, os.environ.get("PYTHONPATH"))))


@pytest.fixture
def hosted(launch: Callable[..., Result]) -> Callable[..., Result]:
    """The command, where torchtitan-npu is installed and Ascend is rehearsed."""
    return lambda file, *options: launch(*hosted_job(file), *options, PYTHONPATH=hosted_path())


REFUSED_OF_LINES = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from cp_engine.job import cli

for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.run(line)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Result]:
    """What is said of every job of REFUSED, one after the other in one process: importing takes longer than refusing."""
    lines = [[*hosted_job("npu_dsa"), *options] for options, _ in REFUSED]
    command = [sys.executable, "-c", REFUSED_OF_LINES, json.dumps(lines)]
    environment = clean_environment(PYTHONPATH=hosted_path())
    folder = tmp_path_factory.mktemp("refused")
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    ends = [Result(*json.loads(line)) for line in done.stdout.splitlines()]
    return {options: end for (options, _), end in zip(REFUSED, ends, strict=True)}


FLOAT32 = ("mode=verify", "verify.level=training", "titan.training.mixed_precision_param=float32")
CONVERTERS = "titan.model.converters=[npu_rms_norm,npu_rope]"
BATCH = "titan.training.local_batch_size=1"
TWO_STEPS = ("titan.training.steps=2", "titan.metrics.log_freq=1")
SPARSE = ("titan.model.flavor=tinymodel", "titan.training.seq_len=64", "titan.activation_checkpoint.mode=full", BATCH)


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("npu_ulysses", ("titan.training.seq_len=64", "titan.training.local_batch_size=2")),
        pytest.param(
            "npu_dsa",
            ("cp=dsa", *SPARSE, "titan.parallelism.data_parallel_shard_degree=2"),
            marks=pytest.mark.long,  # six ranks with a vocabulary of 129,280; its module is compared above
        ),
    ],
)
def test_its_models_train_as_they_do_alone(hosted: Callable[..., Result], file: str, options: tuple[str, ...]) -> None:
    result = hosted(file, *FLOAT32, CONVERTERS, *options)
    assert result.code == 0 and result.out.rstrip().endswith("verified"), result.out + result.err
    assert ("indexer 1" in result.out) == (file == "npu_dsa")


@pytest.mark.long  # its modules are compared above
def test_its_sparse_model_trains_with_its_converters(hosted: Callable[..., Result], tmp_path: Path) -> None:
    options = (*SPARSE[:1], BATCH, "titan.training.seq_len=1024", "titan.activation_checkpoint.mode=none")
    result = hosted("npu_dsa", *options, *TWO_STEPS)  # with all five converters of its file
    assert result.code == 0, result.out + result.err
    assert "npu_sparse_lightning_indexer_grad_kl_loss BSND sparse_mode=3" in result.out
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert all(0 < row["indexer_loss"] < 1 for row in rows)
    log = next(tmp_path.rglob("rank0.log")).read_text()
    for name in ("npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm", "npu_rope"):
        assert f"[NPU-CONVERTER] Applied '{name}'" in log


@pytest.mark.long  # four ranks with a vocabulary of 129,280; its model is compared above
def test_its_sparse_model_trains_beside_tensor_parallelism(hosted: Callable[..., Result], tmp_path: Path) -> None:
    degrees = [f"titan.parallelism.{name}_parallel_degree=2" for name in ("tensor", "expert")]
    options = (*SPARSE[:1], BATCH, "titan.training.seq_len=1024", "titan.activation_checkpoint.mode=full")
    result = hosted("npu_dsa", *options, *degrees, "cp.degree=2", *TWO_STEPS)
    assert result.code == 0, result.out + result.err
    assert "learn: the queries of all heads are gathered over 2 tensor-parallel ranks" in result.out
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    assert all(0 < row["indexer_loss"] < 1 for row in rows)


@pytest.mark.long  # its experts are compared above
def test_its_experts_are_spread_over_ranks_with_its_converters(hosted: Callable[..., Result], tmp_path: Path) -> None:
    converters = "titan.model.converters=[npu_rms_norm,npu_permute,npu_gmm,npu_rope]"
    spread = ("titan.parallelism.expert_parallel_degree=2", "titan.training.seq_len=64", BATCH)
    result = hosted("npu_ulysses", converters, *spread, *TWO_STEPS)
    assert result.code == 0, result.out + result.err
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]


REFUSED = [
    (("launch.device=cpu",), ("npu_permute, npu_gmm, npu_rope, which call Ascend", "imports torch_npu", "npu_reference")),
    (("titan.model.converters=[npu_gmm,npu_mhc_pre]", *SPARSE), ("npu_mhc_pre, which call operators that", "=[npu_gmm]'")),
    (("titan.model.converters=[npu_permute]", *SPARSE), ("only those of npu_gmm take", "=[npu_permute,npu_gmm]'")),
    (("titan.model.converters=[npu_gmm]", *SPARSE, *FLOAT32), ("computes in bfloat16 whatever the job says",)),
    (
        ("titan.model.converters=[npu_permute,npu_gmm]", *SPARSE, "titan.parallelism.tensor_parallel_degree=2",
         "titan.parallelism.expert_tensor_parallel_degree=2"),
        ("only with experts spread over ranks", "torchtitan_npu does not cut an expert"),
    ),
    (("titan.model.converters=[npu_dsa]",), ("is selective, and the converter npu_dsa takes none or full",)),
    ((CONVERTERS, "cp=dsa", "titan.model.flavor=npu_debugmodel"), ("this engine's deepseek_v32", "titan.model.flavor=debugmodel")),
    ((CONVERTERS, *SPARSE, "titan.training.num_mtp_modules=1"), ("num_mtp_modules", "the engine cuts tokens once")),
    ((CONVERTERS, "cp=dsa", "titan.parallelism.tensor_parallel_degree=2"), ("computes tensor-parallel experts wrongly",)),
    ((CONVERTERS, "cp=dsa", "titan.profiling.enable_profiling=true"), ("needs a device, which npu_reference is not",)),
    (("titan.model.converters=[npu_ropee]", *SPARSE), ("has npu_ropee, which is no converter", "[npu_rope]")),
    ((CONVERTERS, "cp=dsa", "titan.training.local_batch_size=8"), ("takes 7 of deepseek_v32", "local_batch_size=7")),
    ((CONVERTERS, *SPARSE, "cp=dsa", "titan.optimizer.name=Muon"), ("needs a device", "~titan.optimizer.name")),
    (
        (CONVERTERS, *SPARSE, "titan.training.dataset_type=sft", "titan.training.torch_npu_memory_ratio=7"),
        ("one kind of rows", "is 7, which is no share of the memory"),
    ),
    ((CONVERTERS, *SPARSE, *FLOAT32), ("leaves one rank beside cp", "data_parallel_shard_degree=2")),
    ((CONVERTERS, *SPARSE, "cp=dsa", "cp.degree=1"), ("leaves one rank, and torchtitan_npu trains",)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_it_would_refuse_in_every_rank_is_refused_before(
    refusals: dict[tuple[str, ...], Result], options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    result = refusals[options]
    assert result.code != 0 and "starting" not in result.out
    for text in said:
        assert text in result.err, result.err
