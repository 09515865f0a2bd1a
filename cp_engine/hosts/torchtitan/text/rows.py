"""Documents to rows of tokens: what every rank reads, and where it continues after a resume."""

from collections.abc import Iterator
from typing import TypedDict

import torch
from torch.utils.data import IterableDataset, get_worker_info

from cp_engine.hosts.torchtitan.text.sources import documents

BEGIN, END = 256, 257  # after the 256 byte values
VOCABULARY = 258


def encode(text: str) -> list[int]:
    """One document as tokens: begin, the UTF-8 bytes, end."""
    return [BEGIN, *text.encode("utf-8"), END]


class RowState(TypedDict):
    """Where the next row starts: the same place whatever the number of ranks that read."""

    row: int
    document: int
    token: int


class Rows(IterableDataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Rows of one endless token stream, dealt to the data-parallel ranks in turn.

    Ranks that differ only in their context-parallel coordinate have the same `rank` and read the same rows.
    A row overlaps the next by one token, so that every token is predicted once.

    Args:
        path: folder of JSON-lines files, or None for the built-in text.
        field: the field that holds the text.
        sequence: tokens in a row.
        rank: data-parallel rank.
        world: number of data-parallel ranks.
    """

    def __init__(self, *, path: str | None, field: str, sequence: int, rank: int, world: int) -> None:
        self.path, self.field, self.sequence = path, field, sequence
        self.rank, self.world = rank, world
        self._next = RowState(row=0, document=0, token=0)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield `({"input": [S] int64}, labels [S] int64)`, labels already shifted by one."""
        worker = get_worker_info()
        readers, mine = (
            (self.world, self.rank)
            if worker is None
            else (self.world * worker.num_workers, self.rank + self.world * worker.id)
        )
        for row, tokens in self._rows():
            if row % readers == mine:
                yield {"input": tokens[:-1]}, tokens[1:]

    def _rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        buffer: list[int] = []
        ends: list[tuple[int, int]] = []  # (document, tokens of it in the buffer)
        document, token = self._next["document"], self._next["token"]
        while True:
            before = document
            for text in documents(self.path, self.field, skip=document):
                tokens = encode(text)[token:]
                ends.append((document, len(tokens)))
                buffer += tokens
                document, token = document + 1, 0
                while len(buffer) > self.sequence:
                    row = self._next["row"]
                    taken = torch.tensor(buffer[: self.sequence + 1])
                    del buffer[: self.sequence]
                    self._advance(ends)
                    yield row, taken
            if document == before == 0:
                raise ValueError("the text has no documents")
            document = 0  # the next pass

    def _advance(self, ends: list[tuple[int, int]]) -> None:
        used = self.sequence
        start = self._next["token"]
        while used and used >= ends[0][1]:
            used -= ends.pop(0)[1]
            start = 0
        if not ends:  # cannot happen: a row keeps its last token in the buffer
            raise AssertionError("a row used more tokens than were read")
        index, left = ends[0]
        ends[0] = (index, left - used)
        self._next = RowState(row=self._next["row"] + 1, document=index, token=start + used)

    def state_dict(self) -> RowState:
        """Where the next row starts."""
        return RowState(**self._next)

    def load_state_dict(self, state: RowState) -> None:
        """Continue where a saved state stopped."""
        self._next = RowState(**state)
