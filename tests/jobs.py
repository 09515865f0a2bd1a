"""Small jobs under torchtitan: composed, trained on new ranks, and what they reported."""

import json
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cp_engine.job import train
from cp_engine.job.checks import degrees, torchtitan
from cp_engine.job.launch import start as elastic

CONF = Path(__file__).parents[1] / "conf"
SMALL = (
    "titan.training.seq_len=128",
    "titan.training.local_batch_size=2",
    "titan.training.steps=2",
    "launch.device=cpu",
)
VALIDATION = (
    "++titan.validation.enable=true",
    "++titan.validation.seq_len=128",
    "++titan.validation.local_batch_size=2",
    "++titan.validation.steps=3",
    "++titan.validation.freq=2",
)
Config = dict[str, object]


def configured(output: Path, *overrides: str) -> Config:
    """The composed configuration of a small job on CPU."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides=[*SMALL, *overrides]), resolve=True)
    assert isinstance(config, dict)
    output.mkdir(parents=True, exist_ok=True)
    config["launch"]["output_dir"] = str(output)
    return {str(key): value for key, value in config.items()}


def trained(config: Config) -> list[float]:
    """The loss of each step of a run on new ranks."""
    output = Path(str(train.section(config, "launch")["output_dir"]))
    elastic.run_ranks(train.run, config, output, ranks=degrees.world_size(config))
    return losses(output)


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in metrics(output)]


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / train.METRICS).read_text().splitlines()]


def keys(config: Config) -> list[str]:
    return [problem.key for problem in torchtitan.check(config)]


def checkpoint(folder: Path, *entries: str) -> Path:
    from torch.distributed.checkpoint import save

    folder.mkdir(parents=True)
    save({entry: torch.ones(2) for entry in entries}, checkpoint_id=folder, no_dist=True)
    return folder
