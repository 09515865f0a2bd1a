"""The plan of each preset as a person reads it, the same as data, and planning for 1,024 ranks.

`golden/NAME.txt` holds the text for a fixed call on 4 ranks (`none`: 1). `python -m tests.test_golden`
writes the texts anew: read their difference.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cp_engine import explain
from cp_engine.plan import Plan, Shape
from tests.conftest import clean_environment
from tests.helpers import PRESETS, plan_of, small

FOLDER = Path(__file__).parent / "golden"
GROUPED = Shape(batch=2, sequence=1024, heads=8, kv_heads=2, head_dim=64, v_head_dim=64, dtype="bfloat16")
UNEVEN = Shape(batch=1, sequence=257, heads=6, kv_heads=3, head_dim=192, v_head_dim=128, dtype="float32")
every_preset = pytest.mark.parametrize("preset", PRESETS)


def plans(preset: str) -> list[Plan]:
    degree = 1 if preset == "none" else 4
    return [plan_of(preset, degree=degree, shape=shape) for shape in (GROUPED, UNEVEN)]


def golden(preset: str) -> str:
    return "\n\n".join(explain.text(plan) for plan in plans(preset)) + "\n"


@every_preset
def test_text_reads_as_reviewed(preset: str) -> None:
    assert golden(preset) == (FOLDER / f"{preset}.txt").read_text()


def test_every_golden_text_has_a_preset() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.txt")) == PRESETS


@every_preset
def test_text_fits_a_terminal(preset: str) -> None:
    assert max(len(line) for line in golden(preset).splitlines()) <= 110


@every_preset
def test_data_is_plain(preset: str) -> None:
    for plan in plans(preset):
        found = explain.data(plan)
        assert json.loads(json.dumps(found)) == found


def size(count: int) -> str:
    """A number of bytes as the text prints it: three digits and a binary unit."""
    unit, name = next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= u), (1, "B"))
    return (
        f"{count} B"
        if unit == 1
        else f"{count / unit:.1f} {name}"
        if count < 100 * unit
        else f"{count / unit:.0f} {name}"
    )


@every_preset
def test_data_says_what_the_text_says(preset: str) -> None:
    for plan in plans(preset):
        d, text = explain.data(plan), explain.text(plan)
        lines = {line.split()[0]: line for line in text.splitlines() if line}
        assert f"{d['ranks']} rank" in text and f"tokens {d['layout']}" in text and f"mask {d['mask']}" in text
        assert f"{sum(d['score_pairs']['per_rank']):,} score pairs" in lines["work"]
        assert f"max/mean over ranks {d['score_pairs']['max_over_mean']:.2f}" in lines["work"]
        assert size(d["peak_bytes"]) in lines["memory"]
        ways = ("forward", "backward")
        for step in d["steps"]:
            cells = re.split(r"\s{2,}", lines[step["step"]])
            assert cells[-2:] == [size(step["bytes_sent"][w]) if step["collectives"][w] else "-" for w in ways]
        counted = [
            re.findall(r"(\d+) forward, (\d+) backward", x) for x in text.splitlines() if x.startswith("exchange")
        ]
        for i, way in enumerate(ways):
            assert sum(int(c[0][i]) for c in counted) == d["collectives"][way]
            if counted:
                assert f"{size(d['bytes_sent'][way])} {way}" in lines["sent"]
                assert size(d["link_bytes"][way]) in lines["sent"]
        for step in d["steps"]:
            if "kernel" in step:
                assert f"{step['step']}: {step['kernel']} ({step['kernel_reason']})" in lines["kernel"]


@every_preset
def test_data_totals_are_the_sums_of_its_parts(preset: str) -> None:
    for plan in plans(preset):
        d = explain.data(plan)
        for i, way in enumerate(("forward", "backward")):
            assert d["bytes_sent"][way] == max(d["bytes_sent"]["per_rank"][i])
            assert sum(s["bytes_sent"][way] for s in d["steps"]) >= d["bytes_sent"][way]
            assert sum(s["collectives"][way] for s in d["steps"]) == d["collectives"][way]
        assert max(s["buffer_bytes"] for s in d["steps"]) <= d["peak_bytes"]
        visible = plan.shape.sequence * (plan.shape.sequence + 1) // 2 * plan.shape.heads * plan.shape.batch
        pairs = d["score_pairs"]["per_rank"]
        assert sum(pairs) == visible
        assert d["score_pairs"]["max_over_mean"] == pytest.approx(max(pairs) * plan.degree / visible, rel=1e-12)


def test_idle_ranks_are_named() -> None:
    plan = plan_of("ulysses", degree=6, shape=small(heads=4, kv_heads=2))
    assert explain.data(plan)["idle_ranks"] == [4, 5]
    assert "idle       rank 4, 5: no head or no token is left for them; they only exchange" in explain.text(plan)


# ------------------------------------------------------------------ 1,024 ranks
PLANNING = """
import json, sys, time
from cp_engine import explain
from cp_engine.compose import compose
from cp_engine.plan import Shape
from cp_engine.schema import plan_from_config

cp = compose(sys.argv[1], [*sys.argv[2:], "cp.degree=1024"])
shape = Shape(batch=1, sequence=131072, heads=1024, kv_heads=128, head_dim=128, v_head_dim=128, dtype="bfloat16")
begin = time.process_time()
found = explain.data(plan_from_config(cp, shape=shape, mask="causal"))
seconds = time.process_time() - begin
import torch.distributed
print(json.dumps({
    "seconds": seconds,
    "ranks": found["ranks"],
    "pairs": sum(found["score_pairs"]["per_rank"]),
    "sent": found["bytes_sent"]["forward"],
    "titan": [name for name in sys.modules if name.split(".")[0] == "torchtitan"],
    "group": torch.distributed.is_initialized(),
}))
"""
PER_RANK = 131072 // 1024 * 128 * 2  # bytes of one head of a rank's tokens in bfloat16


@pytest.mark.parametrize(
    ("arguments", "bytes_sent"),
    [
        # 1 of 1,024 q and out heads stays; each kv head goes to the 8 ranks that need it, one of them itself
        (("ulysses",), (2 * 1023 + 2 * 1023) * PER_RANK),
        (("allgather_kv",), 2 * 1023 * 128 * PER_RANK),
        (("allgather_kv", "layout@cp.layout=zigzag"), 2 * 1023 * 128 * PER_RANK),
        (("allgather_kv", "layout@cp.layout=striped"), 2 * 1023 * 128 * PER_RANK),
    ],
    ids=["ulysses", "allgather_kv", "allgather_kv-zigzag", "allgather_kv-striped"],
)
def test_planning_and_proving_1024_ranks_takes_under_two_seconds(arguments: tuple[str, ...], bytes_sent: int) -> None:
    command = [sys.executable, "-c", PLANNING, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(OMP_NUM_THREADS="1"), timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 1024
    assert found["pairs"] == 131072 * 131073 // 2 * 1024
    assert found["sent"] == bytes_sent
    assert found["titan"] == [] and found["group"] is False
    assert found["seconds"] < 2.0  # CPU seconds: other processes on the machine do not count


if __name__ == "__main__":
    for each in PRESETS:
        (FOLDER / f"{each}.txt").write_text(golden(each))
