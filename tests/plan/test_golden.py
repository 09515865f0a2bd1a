"""The plan of each preset as a person reads it, the same as data, and planning for 1,024 ranks.

`golden/NAME.txt` holds the text for a fixed call on 4 ranks (`none`: 1). `python -m tests.plan.test_golden`
writes the texts anew: read their difference.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cp_engine.algebra.shape import Shape
from cp_engine.job import explain
from cp_engine.job.verify import reference
from cp_engine.plan.ir import Plan
from tests.conftest import PATIENCE, clean_environment
from tests.helpers import CAUSAL, EVERY, SPARSE, begins_with_latent, fitting, plan_of, small

FOLDER = Path(__file__).parents[1] / "golden"
GROUPED = Shape(batch=2, sequence=1024, heads=8, kv_heads=2, head_dim=64, v_head_dim=64, dtype="bfloat16")
UNEVEN = Shape(batch=1, sequence=257, heads=6, kv_heads=3, head_dim=192, v_head_dim=128, dtype="float32")
DEEPSEEK = Shape(
    batch=1,
    sequence=4096,
    heads=128,
    kv_heads=128,
    head_dim=192,
    v_head_dim=128,
    dtype="bfloat16",
    latent_dim=512,
    rope_dim=64,
)
SELECTING = replace(DEEPSEEK, kv_heads=1, head_dim=576, v_head_dim=512, index_heads=64, index_dim=128, topk=2048)
MASKS = {"window_halo": {"kind": "window", "left": 64, "right": 0}}
"""What a preset is meant for, where that is not a causal mask."""
every_preset = pytest.mark.parametrize("preset", EVERY)


def plans(preset: str) -> list[Plan]:
    degree = 1 if preset == "none" else 4
    first = SELECTING if preset in SPARSE else DEEPSEEK if begins_with_latent(preset) else GROUPED
    shapes = (first, fitting(preset, UNEVEN))
    return [plan_of(preset, degree=degree, shape=shape, mask=MASKS.get(preset, CAUSAL)) for shape in shapes]


def grouped(preset: str) -> list[Plan]:
    """The same in head groups, where the preset can be pipelined."""
    if begins_with_latent(preset):
        return []
    shape = replace(GROUPED, heads=16, kv_heads=4)
    return [plan_of(preset, "cp.head_groups=2", degree=plans(preset)[0].degree, shape=shape)]


def golden(preset: str) -> str:
    return "\n\n".join(explain.text(plan) for plan in plans(preset)) + "\n"


@pytest.mark.quick
@every_preset
def test_text_reads_as_reviewed(preset: str) -> None:
    assert golden(preset) == (FOLDER / f"{preset}.txt").read_text()


def test_every_golden_text_has_a_preset() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.txt")) == EVERY


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
    for plan in [*plans(preset), *grouped(preset)]:
        d, text = explain.data(plan), explain.text(plan)
        lines = {line.split()[0]: line for line in text.splitlines() if line and "index scores" not in line}
        assert f"{d['ranks']} rank" in text and f"tokens {d['layout']}" in text and f"mask {d['mask']}" in text
        assert f"{sum(d['score_pairs']['per_rank']):,} score pairs" in lines["work"]
        assert f"max/mean over ranks {d['score_pairs']['max_over_mean']:.2f}" in lines["work"]
        if found := d["index_scores"]:
            balance = f"{sum(found['per_rank']):,} index scores; max/mean over ranks {found['max_over_mean']:.2f}"
            assert f"\nwork       {balance}" in text
        ways = ("forward", "backward")
        for way in (*ways, "kept"):
            assert size(d["peak_bytes"][way]) in lines["memory"]
        for step in d["steps"]:
            cells = re.split(r"\s{2,}", lines[step["step"]])
            sent = [step["bytes_sent"][w] * d["head_groups"] for w in ways]
            assert cells[-2:] == [size(n) if step["collectives"][w] else "-" for n, w in zip(sent, ways, strict=True)]
        moving = [x for x in text.splitlines() if x.startswith(("exchange", "rotation"))]
        counted = [re.findall(r"^\w+ +\w+: (\d+) .*?(\d+) backward", x) for x in moving]
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
    for plan in [*plans(preset), *grouped(preset)]:
        d = explain.data(plan)
        for i, way in enumerate(("forward", "backward")):
            assert d["bytes_sent"][way] == max(d["bytes_sent"]["per_rank"][i])
            assert d["head_groups"] * sum(s["bytes_sent"][way] for s in d["steps"]) >= d["bytes_sent"][way]
            assert d["head_groups"] * sum(s["collectives"][way] for s in d["steps"]) == d["collectives"][way]
        peak = d["peak_bytes"]
        assert 0 < peak["kept"] <= min(peak["forward"], peak["backward"])
        shape, mask = plan.shape, MASKS.get(preset, CAUSAL) if d["head_groups"] == 1 else CAUSAL
        seen = reference.visible(mask, shape.sequence).sum(1)
        visible = int(seen.clamp(max=shape.topk or shape.sequence).sum()) * shape.heads * shape.batch
        pairs = d["score_pairs"]["per_rank"]
        assert sum(pairs) == visible
        assert d["score_pairs"]["max_over_mean"] == pytest.approx(max(pairs) * plan.degree / visible, rel=1e-12)
        if shape.index_heads:
            assert sum(d["index_scores"]["per_rank"]) == int(seen.sum()) * shape.index_heads * shape.batch
        else:
            assert d["index_scores"] is None


def test_a_selection_balances_the_attention_of_ranks_and_not_the_work_of_their_indexers() -> None:
    sparse = small(
        kv_heads=1, head_dim=24, v_head_dim=16, latent_dim=16, rope_dim=8, index_heads=2, index_dim=8, topk=4
    )
    shape = replace(sparse, sequence=64)
    plans = [plan_of("dsa", f"layout@cp.layout={kind}", degree=4, shape=shape) for kind in ("contiguous", "zigzag")]
    found = [explain.data(plan)["index_scores"] for plan in plans]
    rows = [sum(range(16 * rank + 1, 16 * rank + 17)) * 2 * shape.batch for rank in range(4)]
    assert found[0] == {"per_rank": rows, "max_over_mean": pytest.approx(rows[3] * 4 / sum(rows))}
    assert len(set(found[1]["per_rank"])) == 1 and sum(found[1]["per_rank"]) == sum(rows)
    assert all(explain.data(plan)["score_pairs"]["max_over_mean"] < 1.05 for plan in plans)


def test_idle_ranks_are_named() -> None:
    plan = plan_of("ulysses", degree=6, shape=small(heads=4, kv_heads=2))
    assert explain.data(plan)["idle_ranks"] == [4, 5]
    assert "idle       rank 4, 5: no head or no token is left for them; they only exchange" in explain.text(plan)


# ------------------------------------------------------------------ 1,024 ranks
PLANNING = """
import json, sys, time
from cp_engine.job import explain
from cp_engine.config.compose import compose
from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import plan_from_config

shape = Shape(batch=1, sequence=131072, heads=1024, kv_heads=128, head_dim=128, v_head_dim=128, dtype="bfloat16")
plans = []
for preset, *overrides in json.loads(sys.argv[1]):
    cp = compose(preset, overrides)
    begin = time.process_time()
    found = explain.data(plan_from_config(cp, shape=shape, mask="causal"))
    seconds = time.process_time() - begin
    plans.append({
        "seconds": seconds,
        "ranks": found["ranks"],
        "pairs": sum(found["score_pairs"]["per_rank"]),
        "sent": found["bytes_sent"]["forward"],
    })
import torch.distributed
titan = [name for name in sys.modules if name.split(".")[0] == "torchtitan"]
print(json.dumps({"plans": plans, "titan": titan, "group": torch.distributed.is_initialized()}))
"""
PER_RANK = 131072 // 1024 * 128 * 2  # bytes of one head of a rank's tokens in bfloat16


KV = 2 * 128 * PER_RANK  # of k and v of a rank's tokens
# 1 of 1,024 q and out heads stays; each kv head goes to the 8 ranks that need it, one of them itself
HEADS = (2 * 1023 + 2 * 1023) * PER_RANK
# 32 groups of 32 ranks: in a group a rank keeps 32 of 1,024 q and out heads and 4 of 128 kv heads, and then has 32 times the tokens
NEAR, FAR = (2 * (1024 - 32) + 2 * (128 - 4)) * PER_RANK, 31 * 2 * 4 * 32 * PER_RANK


SENT: dict[tuple[str, ...], int] = {
    ("ulysses", "cp.degree=1024"): HEADS,
    ("allgather_kv", "cp.degree=1024"): 1023 * KV,
    ("allgather_kv", "cp.degree=1024", "layout@cp.layout=zigzag"): 1023 * KV,
    ("allgather_kv", "cp.degree=1024", "layout@cp.layout=striped"): 1023 * KV,
    ("allgather_kv", "cp.degree=1024", "layout@cp.layout=balanced"): 1023 * KV,
    ("needed_kv", "cp.degree=1024"): 1023 * KV,  # rank 0: its first chunk is needed by all, its last one by none
    ("ring_zigzag", "cp.degree=1024"): 1023 * KV,
    ("ring_striped", "cp.degree=1024"): 1023 * KV,
    ("double_ring", "cp.mesh.outer=32", "cp.mesh.inner=32"): 1023 * KV,
    ("usp", "cp.mesh.ring=32", "cp.mesh.ulysses=32"): NEAR + FAR,
    ("allgather_in_ulysses", "cp.mesh.gather=32", "cp.mesh.ulysses=32"): NEAR + FAR,
}


@pytest.fixture(scope="module")
def thousand() -> dict[tuple[str, ...], dict[str, float]]:
    """What planning gives in a process of its own, in which nothing else is imported."""
    command = [sys.executable, "-c", PLANNING, json.dumps(list(SENT))]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=clean_environment(OMP_NUM_THREADS="1"),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["titan"] == [] and found["group"] is False
    return dict(zip(SENT, found["plans"], strict=True))


@pytest.mark.parametrize("arguments", SENT, ids=" ".join)
def test_planning_and_proving_1024_ranks_takes_under_two_seconds(
    arguments: tuple[str, ...], thousand: dict[tuple[str, ...], dict[str, float]]
) -> None:
    found = thousand[arguments]
    assert found["ranks"] == 1024
    assert found["pairs"] == 131072 * 131073 // 2 * 1024
    assert found["sent"] == SENT[arguments]
    assert found["seconds"] < 2.0  # CPU seconds: other processes on the machine do not count


if __name__ == "__main__":
    for each in EVERY:
        (FOLDER / f"{each}.txt").write_text(golden(each))
