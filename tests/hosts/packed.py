"""Training on text whose documents are packed and whose targets are few, by torchtitan alone and as a composition."""

from collections.abc import Iterable, Iterator

import torch

from cp_engine.job import train
from cp_engine.job.verify import training_mode
from tests.jobs import Config


class Packed:
    """Text as two documents a row, whose positions start anew; only the last quarter of a row is predicted."""

    def __init__(self, text: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        self.text = text

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for rest, labels in self.text:
            sequence = labels.shape[1]
            positions = (torch.arange(sequence) % (sequence // 2)).expand_as(labels)
            targets = labels.clone()
            targets[:, : -sequence // 4] = -100
            yield {**rest, "positions": positions}, targets


def packed_alone(config: Config) -> None:
    """One rank of torchtitan alone on packed text, validated by its own validator."""
    with train.rank_process(config):
        from cp_engine.job.verify.recorder import StockRecorder

        class PackedRecorder(StockRecorder):
            def train(self) -> None:
                self.dataloader = Packed(self.dataloader)
                self.validator.validation_dataloader = Packed(self.validator.validation_dataloader)
                super().train()

        training_mode.train_alone(config, PackedRecorder)


def packed_composition(config: Config) -> None:
    """One rank of the composition on the same text."""
    with train.rank_process(config):
        from cp_engine.job.verify.recorder import CompositionRecorder

        class PackedRecorder(CompositionRecorder):
            def train(self) -> None:
                self.dataloader = Packed(self.dataloader)
                self.validator.text = Packed(self.validator.text)
                super().train()

        train.train_composition(config, PackedRecorder)
