"""Checkpoints of torchtitan's manager that are whole or absent, and that load what was decided.

A save goes into a folder of another name, which becomes `step-N` when all ranks have written and every file has its digest.
Importing this imports torchtitan, on CPU inside `cpu_shims`.
"""

import io
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from cp_engine.hosts.torchtitan.checkpoint_files import REPLACED, SAVING, metadata_of, put, seal, step_of, sum_of
from cp_engine.hosts.torchtitan.checkpoint_trust import Damaged, entry_of

SUM = ".sha256"
"""What each rank writes beside each of its files; one file of all of them takes their place."""

OF_NPU = {
    "_npu_checkpoint_sync_files": ("sync_files", True),
    "_npu_checkpoint_drop_page_cache_after_save": ("_npu_drop_page_cache_after_save", False),
}
"""What torchtitan-npu's manager says to its writers, by what those call it: `checkpoint.sync_files` and `drop_page_cache_after_save`.
Source: torchtitan_npu/patches/torch/checkpoint.py, 0.2.2.post2."""


class WholeWriter(FileSystemWriter):
    """Writes a checkpoint aside, and gives it its name when it is whole.

    Args:
        folder: its name, `step-N`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.aside = folder, aside_of(folder)
        super().__init__(self.aside)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator's, before any rank writes: nothing of a save that was cut short stays."""
        clear(self.folder.parent, but=self.aside)
        for file in self.aside.iterdir():
            file.unlink()
        return super().prepare_global_plan(plans)  # type: ignore[no-any-return]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """This rank's files, and a digest of each."""
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            (self.aside / f"{name}{SUM}").write_text(sum_of(self.aside / name))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator's, after all ranks wrote."""
        super().finish(metadata, results)
        sums = {}
        # by name: what other machines wrote may be missing from a listing, which shared storage keeps for a while
        for name in {result.storage_data.relative_path for of_rank in results for result in of_rank}:
            file = self.aside / f"{name}{SUM}"
            sums[name] = file.read_text()
            file.unlink()
        seal(self.aside, sums)
        put(self.aside, self.folder)


def aside_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(SAVING + folder.name.rpartition("-")[2])


def clear(folder: Path, but: Path | None = None) -> None:
    """Removes what saves that were cut short left in a run's folder of checkpoints, and puts back what one was to replace.

    Args:
        folder: that holds the checkpoints.
        but: what is being written.
    """
    for left in (*folder.glob(f"{SAVING}*"), *folder.glob(f"{REPLACED}*")):
        step = left.with_name(f"step-{step_of(left)}")
        if left.name.startswith(REPLACED) and not step.exists():
            left.rename(step)
        elif left != but:
            shutil.rmtree(left, ignore_errors=True)


def made_whole(manager: CheckpointManager, named: Path | None) -> None:
    """Lets a checkpoint manager save whole checkpoints, and load the one that was named.

    Args:
        manager: torchtitan's, of this rank.
        named: the checkpoint to continue from; None where torchtitan finds weights to begin with.
    """
    if manager.enable:
        manager.dcp_save = partial(_save, manager, manager.dcp_save)
        manager.load = partial(_load, manager, manager.load, named)


def _save(
    manager: CheckpointManager,
    saved_by_torchtitan: Callable[..., object],
    state_dict: dict[str, object],
    checkpoint_id: str,
    async_mode: AsyncMode,
    enable_garbage_collection: bool = False,
    to_hf: bool = False,
) -> Future[object] | AsyncSaveResponse | None:
    """As `CheckpointManager.dcp_save`."""
    folder = Path(checkpoint_id)
    if to_hf:  # safetensors, by writers of torchtitan's own
        if dist.get_rank() == 0:
            clear(folder.parent)
        dist.barrier()
        saved_by_torchtitan(state_dict, str(aside_of(folder)), async_mode, enable_garbage_collection, to_hf)
        dist.barrier()
        if dist.get_rank() == 0:
            seal(aside_of(folder))
            put(aside_of(folder), folder)
        dist.barrier()
        return None
    writer = WholeWriter(folder)
    for option, (name, default) in OF_NPU.items():
        setattr(writer, name, getattr(manager, option, default))
    result: Future[object] | AsyncSaveResponse | None = None
    if async_mode == AsyncMode.DISABLED:
        dcp.save(state_dict, storage_writer=writer)
    elif async_mode == AsyncMode.ASYNC:
        result = dcp.async_save(state_dict, storage_writer=writer, process_group=manager.pg)
    else:
        result = dcp.async_save(
            state_dict,
            storage_writer=writer,
            process_group=manager.pg,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=manager.stager,
        )
    if enable_garbage_collection:
        GarbageCollection.collect("GC collection invoked by checkpointer.")
    return result


def _load(
    manager: CheckpointManager, loaded_by_torchtitan: Callable[[], object], named: Path | None, step: int = -1
) -> bool:
    """As `CheckpointManager.load`, of what was named, else of the weights to begin with, whatever lies in the manager's folder."""
    if named is not None:
        manager.initial_load_path, manager.initial_load_model_only = str(named), step_of(named) == 0
        manager.initial_load_in_hf = manager.initial_load_in_hf_quantized = False
    folder = manager.folder
    manager.folder = str(
        Path(folder, "nothing-to-load")
    )  # torchtitan prefers what is there, and be it a save that was cut
    try:
        with _as_data():
            return bool(loaded_by_torchtitan())
    finally:
        manager.folder = folder


@contextmanager
def _as_data() -> Iterator[None]:
    """torch reads its checkpoints as data alone; other formats as they are."""
    load = dcp.load

    def load_data(state_dict: dict[str, object], *, checkpoint_id: str = "", storage_reader: object = None) -> None:
        if storage_reader is not None:
            load(state_dict, storage_reader=storage_reader)
        else:
            load(state_dict, storage_reader=DataReader(checkpoint_id), planner=DataPlanner())

    dcp.load = load_data
    try:
        yield
    finally:
        dcp.load = load


class DataReader(FileSystemReader):
    """Reads a checkpoint whose `.metadata` may name only what torch writes there."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """What the checkpoint holds.

        Raises:
            Damaged: it is not there, or is none.
            Unsafe: it names something else than the classes of a checkpoint.
        """
        if kwargs.get("rank") is not None:
            raise Damaged("has no metadata of its ranks, which torchtitan does not write")
        metadata = metadata_of(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class DataPlanner(DefaultLoadPlanner):
    """Loads entries that are no tensors as data alone."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """torch unpickles whatever it gets: that is written anew, of what was read safely."""
        written = io.BytesIO()
        torch.save(entry_of(read_item.dest_index.fqn, value.getvalue()), written)
        written.seek(0)
        super().load_bytes(read_item, written)
