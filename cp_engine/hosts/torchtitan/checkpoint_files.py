"""The files of a checkpoint: whether they are whole, and that nothing in them runs code; nothing here imports torchtitan."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cp_engine.hosts.torchtitan import checkpoint_trust as trust
from cp_engine.hosts.torchtitan.checkpoint_trust import Damaged

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA, SEAL = ".metadata", "SHA256SUMS"
"""What torch writes last, and what we write after it: a line for each file, as `sha256sum -c` reads it."""
STEP = re.compile(r"(?:step|replaced)-(\d+)")
SAVING, REPLACED = "saving-", "replaced-"
"""How the folder of a step is called until it is whole, and while a new one takes its place."""
PIECE = 2**22
THREADS = 8


def metadata_of(folder: Path) -> "Metadata":
    """What a checkpoint says that it holds.

    Args:
        folder: of one step.

    Raises:
        Damaged: it is not there, or is none.
        Unsafe: it names something else than the classes of a checkpoint.
    """
    path = folder / METADATA
    if not path.is_file():  # nor is a pipe, on which a reader would wait
        is_other = (folder / "model.safetensors.index.json").is_file()
        why = "it holds weights alone, as safetensors" if is_other else "its save was not finished"
        raise Damaged(f"has no {METADATA}: {why}")
    return trust.metadata_of(path.read_bytes())


def require_whole(folder: Path, *, digests: bool) -> bool:
    """Refuses a checkpoint whose files are not what they were when it was saved.

    Args:
        folder: of one step.
        digests: read every byte; else only sizes are compared.

    Returns:
        Whether it is sealed: of one that torchtitan saved by itself only sizes can be compared.

    Raises:
        Damaged: a file is missing, short or changed.
        Unsafe: as of `metadata_of`.
    """
    needed: dict[str, int] = {}
    for info in metadata_of(folder).storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sorted(needed.items()):
        found = _size(folder / name)
        if found < size:
            raise Damaged(f"lacks {name}" if found < 0 else f"has {found:,} of {size:,} bytes of {name}")
    if not (folder / SEAL).is_file():
        return False
    sums = _sums(folder)
    if unsealed := {METADATA, *needed} - set(sums):
        raise Damaged(f"has a {SEAL} without {min(unsealed)}")
    names = list(sums) if digests else [METADATA]
    with ThreadPoolExecutor(THREADS) as pool:  # hashlib gives Python's lock away
        for name, found_sum in zip(names, pool.map(lambda n: _sum_of(folder / n), names), strict=True):
            if found_sum != sums[name]:
                raise Damaged(f"has other bytes in {name} than were saved" if found_sum else f"lacks {name}")
    return True


def require_safe(folder: Path, is_read: Callable[[str], bool] = lambda name: True) -> None:
    """Refuses a checkpoint whose entries would run code when a rank reads them.

    Args:
        folder: of one step, whose files are whole.
        is_read: of the name of an entry, whether a rank reads it.

    Raises:
        Damaged: an entry cannot be read.
        Unsafe: with what it names.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = metadata_of(folder)
    kinds = metadata.state_dict_metadata
    for index, info in metadata.storage_data.items():
        if not isinstance(kinds.get(index.fqn), BytesStorageMetadata) or not is_read(index.fqn):
            continue  # a tensor, which torch reads with weights_only, or nothing to anyone
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            trust.entry_of(index.fqn, file.read(info.length))


def seal(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Writes the digests of a checkpoint's files beside them, for good.

    Args:
        folder: with everything else in place.
        known: digests that were made already, by name; the files that a listing has are as old as the listing.
    """
    known, found = known or {}, (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    lines = [f"{known.get(n) or _sum_of(folder / n)}  {n}\n" for n in sorted({*found, *known}) if n != SEAL]
    with (folder / SEAL).open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def put(aside: Path, folder: Path) -> None:
    """Gives a whole checkpoint its name; one of the same step, whole or not, is gone afterwards.

    Args:
        aside: where it was written.
        folder: its name, `step-N`.
    """
    replaced = folder.with_name(f"{REPLACED}{step_of(folder)}")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    aside.rename(folder)  # an end before this line leaves the one before under its other name, and no `step-N`
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not; one that was to be replaced counts where no other took its place.

    Args:
        folder: that holds them.
    """
    found = [p for p in folder.glob("*-*") if step_of(p) >= 0 and p.is_dir()]
    there = {p.name for p in found}
    kept = (p for p in found if not p.name.startswith(REPLACED) or f"step-{step_of(p)}" not in there)
    return sorted(kept, key=step_of)


def step_of(folder: Path) -> int:
    """Of a checkpoint's folder; -1 of another one."""
    match = STEP.fullmatch(folder.name)
    return int(match[1]) if match else -1


def sum_of(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _sum_of(file: Path) -> str:
    return sum_of(file) if file.is_file() else ""


def _sums(folder: Path) -> dict[str, str]:
    rows = (line.partition("  ") for line in (folder / SEAL).read_text("utf-8", errors="replace").splitlines())
    sums = {name: digest for digest, _, name in rows}
    if not sums or any(len(digest) != 64 for digest in sums.values()):
        raise Damaged(f"has a {SEAL} that is none")
    return sums


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1
