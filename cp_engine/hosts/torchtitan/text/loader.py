"""The text as torchtitan wants it: a tokenizer and a data loader whose state is in the checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig

from cp_engine.errors import ConfigError, Problem
from cp_engine.hosts.torchtitan.text.rows import BEGIN, END, VOCABULARY, Rows


class ByteTokenizer(BaseTokenizer):
    """One token per byte, a begin and an end token: no file, no download."""

    def __init__(self) -> None:
        super().__init__()
        self.bos_id, self.eos_id = BEGIN, END

    def encode(self, text: str, *, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The tokens of a text."""
        return [*[BEGIN] * add_bos, *text.encode("utf-8"), *[END] * add_eos]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; begin and end are left out."""
        return bytes(token for token in tokens if token < BEGIN).decode("utf-8", errors="replace")

    def get_vocab_size(self) -> int:
        """Number of distinct tokens."""
        return VOCABULARY


class TextLoader(ParallelAwareDataloader):
    """torchtitan's loader, which refuses a checkpoint of another number of data-parallel ranks.

    Upstream warns and starts the text anew on ranks the checkpoint does not know.
    """

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue where the checkpoint stopped.

        Raises:
            ConfigError: the checkpoint was written with another number of data-parallel ranks.
        """
        if state_dict and state_dict["world_size"] != self.dp_world_size:
            what = (
                f"the checkpoint's data position is for {state_dict['world_size']} data-parallel ranks, "
                f"this run has {self.dp_world_size}"
            )
            skip = "titan.checkpoint.exclude_from_loading=[dataloader]"
            raise ConfigError([Problem(key="titan.parallelism.data_parallel_shard_degree", what=what, tries=(skip,))])
        super().load_state_dict(dict(state_dict))


class LoaderBuilder(Protocol):
    """What torchtitan calls to build a data loader."""

    def __call__(
        self, *, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
    ) -> TextLoader:
        """Build the loader of one rank."""


def loader_builder(path: str | None, field: str) -> LoaderBuilder:
    """The `build_dataloader_fn` of a TrainSpec for one source of text.

    Args:
        path: folder of JSON-lines files, or None for the built-in text.
        field: the field that holds the text.

    Returns:
        A function with torchtitan's signature.
    """

    def build(*, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> TextLoader:
        training = job_config.training
        rows = Rows(path=path, field=field, sequence=training.seq_len, rank=dp_rank, world=dp_world_size)
        options = {**asdict(training.dataloader), "batch_size": training.local_batch_size}
        return TextLoader(rows, dp_rank=dp_rank, dp_world_size=dp_world_size, **options)

    return build
