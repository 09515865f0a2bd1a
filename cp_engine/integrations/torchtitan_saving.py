"""Checkpoints of torchtitan's manager that are whole or absent, and that load what was decided.

A save goes into a folder of another name, which becomes `step-N` when all ranks have written and every file has its digest.
Importing this imports torchtitan, on CPU inside `cpu_shims`.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from cp_engine.integrations.checkpoint_files import REPLACED, SAVING, put, seal, sum_of

SUM = ".sha256"
"""What each rank writes beside each of its files; one file of all of them takes their place."""


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
        for file in self.aside.glob(f"*{SUM}"):
            sums[file.name.removesuffix(SUM)] = file.read_text()
            file.unlink()
        seal(self.aside, sums)
        put(self.aside, self.folder)


def aside_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(SAVING + folder.name.rpartition("-")[2])


def clear(folder: Path, but: Path | None = None) -> None:
    """Removes what saves that were cut short left in a run's folder of checkpoints.

    Args:
        folder: that holds the checkpoints.
        but: what is being written.
    """
    for kind in (SAVING, REPLACED):
        for left in folder.glob(f"{kind}*"):
            if left != but:
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


@torch.no_grad()
def _load(
    manager: CheckpointManager, loaded_by_torchtitan: Callable[..., object], named: Path | None, step: int = -1
) -> bool:
    """As `CheckpointManager.load`, of what was named."""
    if named is None:
        return bool(loaded_by_torchtitan(step))
    states = manager._states_to_load(model_only=False)
    manager.dcp_load(states, checkpoint_id=str(named), from_hf=False, from_quantized=False)
    GarbageCollection.collect("GC collection for checkpoint loading.")
    return True
