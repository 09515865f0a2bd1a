"""`verify.level=training`: torchtitan alone on one context-parallel rank against the composition on all of them."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cp_engine import elastic, job
from cp_engine.errors import ConfigError, Problem
from cp_engine.integrations.torchtitan import titan_value
from cp_engine.schema import degree_of
from cp_engine.train import rank_process, section, titan_of, train_composition

STEPS = 5
LOSS_BOUND = 1e-5  # absolute; float32 reordering alone gives 1e-6 on the debug models
GRADIENT_BOUND = 1e-5  # of each parameter, by norm; float32 reordering alone gives 2e-7
ROWS = 8  # parameters in the table, the worst first

Config = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs from the same weights and the same text.

    Args:
        stock_losses: torchtitan alone, one per step.
        losses: the composition's.
        gradient_errors: parameter -> |difference| / |stock| of the first step's gradient, in float64; worst first.
    """

    stock_losses: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_errors: tuple[tuple[str, float], ...]

    @property
    def is_within_bounds(self) -> bool:
        """Whether every loss and every gradient agrees."""
        losses = zip(self.stock_losses, self.losses, strict=True)
        return all(abs(a - b) <= LOSS_BOUND for a, b in losses) and all(
            e <= GRADIENT_BOUND for _, e in self.gradient_errors
        )


def check(config: Mapping[str, object]) -> list[Problem]:
    """What of a configuration this comparison cannot do.

    Args:
        config: the composed configuration.

    Returns:
        One problem per fault.
    """
    problems = []
    stages = titan_value(config, "parallelism.pipeline_parallel_degree", 1)
    if stages != 1:
        what = f"is {stages}; gradients are compared where one rank group holds every parameter"
        key = "titan.parallelism.pipeline_parallel_degree"
        problems.append(Problem(key=key, what=what, tries=(f"{key}=1",)))
    for name, default in (("mixed_precision_param", "bfloat16"), ("dtype", "float32")):
        dtype, key = titan_value(config, f"training.{name}", default), f"titan.training.{name}"
        if dtype != "float32":
            what = f"is {dtype}; both runs are compared in float32, where a difference means something"
            problems.append(Problem(key=key, what=what, tries=(f"{key}=float32",)))
    if section(config, "launch").get("resume") is not None:
        what = "the comparison starts from weights of its own"
        problems.append(Problem(key="launch.resume", what=what, tries=("launch.resume=null",)))
    return problems


def run(config: Config) -> bool:
    """Train both, print the comparison.

    Both run 5 steps in float32 from one checkpoint, written by the first before its first step. Everything else of
    the job is as configured.

    Args:
        config: the composed configuration, with `launch.output_dir`.

    Returns:
        Whether losses and gradients agree within the bounds.

    Raises:
        ConfigError: a job that cannot be compared.
    """
    problems = check(config)
    if problems:
        raise ConfigError(problems, "verify.level=training")
    output = Path(str(section(config, "launch")["output_dir"]))
    if (output / "stock").exists():  # its checkpoint would be continued
        what = f"{output} holds an earlier comparison"
        raise ConfigError([Problem(key="hydra.run.dir", what=what, tries=("~hydra.run.dir",))], "verify.level=training")
    ranks = job.world_size(config)
    stock = _job(config, output / "stock", ranks, {"enable": True, "interval": STEPS + 1})
    composed = _job(
        config,
        output / "composition",
        ranks,
        {"enable": True, "load_only": True, "initial_load_path": str(output / "stock" / "checkpoint" / "step-0")},
    )
    alone = ranks // degree_of(section(config, "cp"))
    print(f"1/2 torchtitan alone, {STEPS} steps: context parallel 1, {alone} rank{'s' * (alone != 1)}", flush=True)
    elastic.run_ranks(run_stock, stock, output / "stock", ranks=alone)
    print(f"2/2 the composition, {STEPS} steps: {ranks} ranks\n", flush=True)
    elastic.run_ranks(run_composition, composed, output / "composition", ranks=ranks)
    comparison = compare(output / "stock", output / "composition")
    _print(comparison, config, ranks)
    return comparison.is_within_bounds


def run_stock(config: Config) -> None:
    """One rank of torchtitan alone: its own attention, no context parallelism, our text.

    Args:
        config: what `run` made of the configuration.
    """
    with rank_process(config):
        from cp_engine.integrations.torchtitan_host import hosted, job_config
        from cp_engine.integrations.torchtitan_recorder import StockRecorder

        titan = job_config(titan_of(config))
        titan.parallelism.context_parallel_degree = 1
        with hosted(titan, data=section(config, "data"), is_composed=False):
            trainer = StockRecorder(titan)
            try:
                trainer.checkpointer.save(curr_step=0, last_step=True)  # the weights of both runs
                trainer.train()
            finally:
                trainer.close()


def run_composition(config: Config) -> None:
    """One rank of the composition.

    Args:
        config: what `run` made of the configuration.
    """
    with rank_process(config):
        from cp_engine.integrations.torchtitan_recorder import CompositionRecorder

        train_composition(config, CompositionRecorder)


def compare(stock: Path, composition: Path) -> Comparison:
    """Read two records.

    Args:
        stock: output folder of torchtitan alone.
        composition: output folder of the composition.

    Returns:
        The differences; a parameter that only one run has counts as infinitely wrong.
    """
    ours, theirs = (torch.load(folder / "record.pt", weights_only=True) for folder in (composition, stock))
    names = sorted({*ours["gradients"], *theirs["gradients"]})
    errors = [(name, _relative(ours["gradients"].get(name), theirs["gradients"].get(name))) for name in names]
    errors.sort(key=lambda row: -row[1])
    return Comparison(stock_losses=tuple(theirs["losses"]), losses=tuple(ours["losses"]), gradient_errors=tuple(errors))


def _relative(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return float("inf")
    norm, difference = theirs.norm().item(), (ours - theirs).norm().item()
    if norm == 0:  # an expert that got no token
        return 0.0 if difference == 0 else float("inf")
    return difference / norm if difference == difference else float("inf")


def _job(config: Config, output: Path, ranks: int, checkpoint: Config) -> Config:
    changed = deepcopy(config)
    launch, titan = changed["launch"], changed["titan"]
    assert isinstance(launch, dict) and isinstance(titan, dict)
    output.mkdir(parents=True)
    launch.update(output_dir=str(output), device=elastic.resolve_device(str(launch["device"]), ranks))
    titan["checkpoint"] = checkpoint
    titan.setdefault("job", {})["dump_folder"] = str(output)
    titan["training"].update(steps=STEPS, mixed_precision_param="float32", dtype="float32")
    titan.setdefault("metrics", {})["log_freq"] = 1
    return changed


def _print(comparison: Comparison, config: Config, ranks: int) -> None:
    console = Console(width=110)
    model = titan_value(config, "model.name")
    name = section(config, "cp").get("name")
    console.print(
        f"{model}: torchtitan alone against {name} on {ranks} ranks, float32, same weights\n", highlight=False
    )
    losses = _table("step", "loss, alone", "loss, composition", "difference", "bound", "")
    for step, (theirs, ours) in enumerate(zip(comparison.stock_losses, comparison.losses, strict=True), 1):
        error = abs(theirs - ours)
        cells = (str(step), f"{theirs:.9f}", f"{ours:.9f}", f"{error:.1e}", f"<= {LOSS_BOUND:.0e}")
        losses.add_row(*cells, _verdict(error <= LOSS_BOUND))
    gradients = _table("gradient of step 1", "relative difference", "bound", "")
    for parameter, error in comparison.gradient_errors[:ROWS]:
        gradients.add_row(parameter, f"{error:.1e}", f"<= {GRADIENT_BOUND:.0e}", _verdict(error <= GRADIENT_BOUND))
    console.print(losses, highlight=False)
    console.print()
    console.print(gradients, highlight=False)
    rest = len(comparison.gradient_errors) - ROWS
    if rest > 0:
        console.print(f"and {rest} more parameters, each with a smaller difference", highlight=False)
    verdict = "verified" if comparison.is_within_bounds else "WRONG: the composition does not train as torchtitan does"
    console.print(f"\n{verdict}", highlight=False)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 or not name else "right", no_wrap=True)
    return table


def _verdict(is_good: bool) -> str:
    return "ok" if is_good else "WRONG"
