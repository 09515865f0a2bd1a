"""`mode=verify`: runs the comparison with dense attention, in one process or on real ranks, and prints its table."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table
from torch import Tensor

from cp_engine.algebra.shape import Shape
from cp_engine.config.composition import plan_from_config
from cp_engine.errors import ConfigError, KernelError, Problem
from cp_engine.job.launch.progress import Screen
from cp_engine.job.verify import attention as verify
from cp_engine.kernels.sparse.npu import NPUSparse
from cp_engine.plan.ir import Plan
from cp_engine.primitives.sparse_rules import SparseStep
from cp_engine.runtime.devices import REHEARSAL, operators_of

RESULT = "verify.json"
TAKEN = Shape(
    batch=1, sequence=1088, heads=32, kv_heads=1, head_dim=576, v_head_dim=512, latent_dim=512, rope_dim=64,
    index_heads=8, index_dim=128, topk=1024, dtype="bfloat16",
)  # fmt: skip
"""A call inside the limits of Ascend's operators, with more keys than are selected."""


def run(config: Mapping[str, object], plan: Plan, output_dir: Path) -> bool:
    """Verifies a plan and prints the result.

    Args:
        config: the composed configuration; `verify.target` is `process` (all ranks in this one) or `ranks` (gloo ranks).
        plan: the configuration's plan.
        output_dir: where ranks leave logs and results.

    Returns:
        Whether every row is within its bound.

    Raises:
        ConfigError: the sequence is too long for the dense reference.
        RankFailure: a rank failed.
    """
    verify.check_length(plan)
    plan = replace(plan, shape=replace(plan.shape, head_ranks=1))  # of the heads of one tensor-parallel rank
    settings, mask = config["verify"], config["mask"]
    assert isinstance(settings, Mapping) and isinstance(mask, Mapping)
    on_ranks = settings["target"] == "ranks"
    launch = config["launch"]
    assert isinstance(launch, Mapping)
    device = REHEARSAL if launch["device"] == REHEARSAL else "cpu"
    dtype = "float32" if device == REHEARSAL else "float64"
    if device == REHEARSAL and any("topk" in s.step.makes for s in plan.steps):
        return _rehearsed(config, plan)
    asked = config["shape"]
    assert isinstance(asked, Mapping)
    if asked["dtype"] not in (None, dtype):
        what = f"is {asked['dtype']}, and this comparison computes in {dtype}, where a difference means something"
        raise ConfigError([Problem(key="shape.dtype", what=what, tries=("shape.dtype=null",))])
    if on_ranks:
        rows = _on_ranks(config, plan, output_dir, device, dtype)
    else:
        with operators_of(device):
            rows = {"": verify.in_one_process(plan, mask, device, dtype)}
    where = f"{plan.degree} gloo ranks" if on_ranks else f"{plan.degree} ranks in one process"
    shape, computed = plan.shape, f", {dtype} by {device}," if device == REHEARSAL else ""
    heads, dims = f"{shape.heads}|{shape.kv_heads}", f"{shape.head_dim}|{shape.v_head_dim}"
    sizes = f"batch {shape.batch}, sequence {shape.sequence}, heads {heads}, head_dim {dims}"
    console = Screen(width=110, highlight=False)
    console.print(
        f"{plan.name}: {where}{computed} against dense attention in float64\n{sizes}, mask {plan.mask.kind}, tokens {plan.tokens}\n"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for name in (*(["rank"] if on_ranks else []), "compared", "largest error", "bound", ""):
        table.add_column(name, justify="right" if name in ("largest error", "bound") else "left")
    for rank, found in rows.items():
        for row in found:
            table.add_row(*([rank] if on_ranks else []), *_cells(row))
    console.print(table)
    is_good = all(row.is_good for found in rows.values() for row in found)
    console.print("\nverified" if is_good else "\nWRONG: the composition does not compute dense attention")
    return is_good


def _rehearsed(config: Mapping[str, object], plan: Plan) -> bool:
    """Sparse attention by Ascend's operators in a half type, at sizes that they take: all ranks against torch operations."""
    cp, mask, asked, settings = (config[name] for name in ("cp", "mask", "shape", "verify"))
    assert isinstance(cp, Mapping) and isinstance(mask, Mapping)
    assert isinstance(asked, Mapping) and isinstance(settings, Mapping)
    if settings["target"] == "ranks":
        what = "is ranks, and Ascend's sparse operators are compared with torch operations in this process"
        raise ConfigError([Problem(key="verify.target", what=what, tries=("verify.target=process",))])
    taken = replace(TAKEN, **{name: value for name, value in asked.items() if value is not None})
    plan = plan_from_config(cp, shape=taken, mask=mask)
    steps = [s.step for s in plan.steps if isinstance(s.step, SparseStep)]
    refused = [(s, why) for s in steps for k, why in [s.kernel_for(plan, REHEARSAL)] if not isinstance(k, NPUSparse)]
    if refused:
        raise KernelError(
            [
                Problem(key=f"cp.steps.{step.name}", what=f"is not what the operators take: {why}")
                for step, why in refused
            ]
        )
    with operators_of(REHEARSAL):
        rows = verify.against_torch(plan, REHEARSAL)
    print(f"{plan.name}: {plan.degree} ranks in one process, by Ascend's operators in {taken.dtype},")
    print("against one rank by torch operations in float64, row by row")
    sizes = f"batch {taken.batch}, sequence {taken.sequence}, heads {taken.heads}, {taken.index_heads} index heads"
    print(f"{sizes}, {taken.selected} keys selected, mask {plan.mask.kind}, tokens {plan.tokens}\n")
    for row in rows:
        print(f"{row.name:<12} {row.error:.1e}   <= {row.bound:.1e}   {'ok' if row.is_good else 'WRONG'}")
    is_good = all(row.is_good for row in rows)
    print("\nverified" if is_good else "\nWRONG: the operators do not compute sparse attention")
    return is_good


def _cells(row: verify.Row) -> tuple[str, str, str, str]:
    verdict = "ok" if row.is_good else "WRONG"
    if row.name == "influence":
        return "token 0 moves the last token's out", f"{row.error:.1e}", f"> {row.bound:.0e}", verdict
    return row.name, f"{row.error:.1e}", f"<= {row.bound:.0e}", verdict


def _on_ranks(
    config: Mapping[str, object], plan: Plan, output_dir: Path, device: str, dtype: str
) -> dict[str, list[verify.Row]]:
    from cp_engine.job.launch.start import run_ranks

    launch = config["launch"]
    assert isinstance(launch, Mapping)
    settings, shape = {**launch, "output_dir": str(output_dir), "device": device}, asdict(plan.shape) | {"dtype": dtype}
    run_ranks(verify_rank, {**config, "launch": settings, "shape": shape}, output_dir, ranks=plan.degree)
    rows = {}
    for rank in range(plan.degree):
        found = json.loads((output_dir / "ranks" / f"{rank}.{RESULT}").read_text())
        rows[str(rank)] = [verify.Row(**row) for row in found]
    return rows


def verify_rank(config: Mapping[str, object]) -> None:
    """One gloo rank: compares its own tokens, and leaves its rows in the output folder."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from cp_engine.runtime.call import Call
    from cp_engine.runtime.context import ContextParallel

    cp, mask, sizes, launch = config["cp"], config["mask"], config["shape"], config["launch"]
    assert (
        isinstance(cp, Mapping)
        and isinstance(mask, Mapping)
        and isinstance(sizes, Mapping)
        and isinstance(launch, Mapping)
    )
    undo, shape, device = ExitStack(), Shape(**sizes), str(launch["device"])
    with undo:
        undo.enter_context(operators_of(device))
        dist.init_process_group("gloo")
        undo.callback(dist.destroy_process_group)
        plan, kind = plan_from_config(cp, shape=shape, mask=mask), getattr(torch, shape.dtype)
        mesh = init_device_mesh("cpu", (plan.degree,), mesh_dim_names=("cp",))
        engine = ContextParallel(plan, mesh, "cpu", device)
        undo.callback(engine.close)
        held = plan.entry.sequence[engine.rank]

        def attend(tensors: Mapping[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
            tensors, dout = {n: x.to(kind) for n, x in tensors.items()}, dout.to(kind)
            local = {n: engine.shard(tensors[n], dim=2).requires_grad_() for n in plan.inputs}
            whole = {n: tensors[n].clone().requires_grad_() for n in plan.parameters}
            call = Call(tensors=local, parameters=whole, mask=plan.mask, enable_gqa=True)
            result = engine.attend(call)
            losses = list(result.losses.values())
            upstream = [engine.shard(dout, dim=2), *(torch.full_like(x, verify.DLOSS) for x in losses)]
            grads = torch.autograd.grad([result.out, *losses], [*local.values(), *whole.values()], upstream)
            found = dict(zip((f"d{n}" for n in (*local, *whole)), grads, strict=True))
            for n in whole:  # each rank's gradient is its share of the sum
                dist.all_reduce(found[f"d{n}"])
            for n, loss in result.losses.items():
                found[n] = loss.detach().clone()
                dist.all_reduce(found[n])
            if "q_index" in plan.inputs:
                found["topk"] = engine.made("topk", call)
            found["out"] = result.out.detach()
            return {n: x if n == "topk" else x.double() for n, x in found.items()}

        rows = verify.compare(attend, [engine.rank], plan, mask, shape.dtype)
        if shape.sequence - 1 not in set(held):  # the last token is another rank's
            rows = [row for row in rows if row.name != "influence"]
        folder = Path(str(launch["output_dir"])) / "ranks"
        (folder / f"{engine.rank}.{RESULT}").write_text(json.dumps([asdict(row) for row in rows]))
