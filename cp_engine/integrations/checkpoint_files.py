"""The files of a checkpoint: whether they are whole, and that nothing in them runs code; nothing here imports torchtitan.

torch's reader unpickles `.metadata`, and entries that are no tensors, with whatever classes they name. Here only what
torch.distributed.checkpoint writes is known. Source: torch.distributed.checkpoint.filesystem and metadata.
"""

import hashlib
import io
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA, SEAL = ".metadata", "SHA256SUMS"
"""What torch writes last, and what we write after it: a line for each file, as `sha256sum -c` reads it."""
STEP = re.compile(r"step-(\d+)")
SAVING, REPLACED = "saving-", "replaced-"
"""How the folder of a step is called until it is whole, and while a new one takes its place."""
KNOWN: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath"}),  # Python 3.13
    "collections": frozenset({"OrderedDict"}),
}
"""What `.metadata` may name, and dtypes of torch."""
IN_STATES: Mapping[str, frozenset[str]] = {
    "collections": frozenset({"OrderedDict"}),
    "torch._utils": frozenset({"_rebuild_tensor_v2"}),
    "torch.storage": frozenset({"_load_from_bytes"}),
}
"""What a data loader's state may name; torchtitan pickles it once more."""
PIECE = 2**22
THREADS = 8
NAMED = re.compile(r"GLOBAL (\S+)")


class Damaged(Exception):
    """What is wrong with the files of a checkpoint."""


class Unsafe(Exception):
    """What a checkpoint holds that it has no need of, and that could run code."""


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[str, frozenset[str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> object:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in self._known.get(module, ()):
            raise Unsafe(f"{module}.{name}")
        if name == "_load_from_bytes":  # it would unpickle with any class
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        return super().find_class(module, name)


def metadata_of(folder: Path) -> "Metadata":
    """What a checkpoint says that it holds.

    Args:
        folder: of one step.

    Raises:
        Damaged: it is not there, or is none.
        Unsafe: it names something else than the classes of a checkpoint.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        found = _Reader((folder / METADATA).read_bytes(), KNOWN).load()
    except FileNotFoundError:
        is_other = (folder / "model.safetensors.index.json").is_file()
        why = "it holds weights alone, as safetensors" if is_other else "its save was not finished"
        raise Damaged(f"has no {METADATA}: {why}") from None
    except Unsafe as error:
        raise Unsafe(f"its {METADATA} names {error}, of which a checkpoint has no need") from None
    except Exception as error:  # junk can be anything to pickle
        raise Damaged(f"has a {METADATA} that is none ({type(error).__name__})") from None
    if not isinstance(found, Metadata):
        raise Damaged(f"has a {METADATA} that is none (it is a {type(found).__name__})")
    return found


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
        if Path(name).name != name:
            raise Unsafe(f"its {METADATA} names the file {name}, outside its folder")
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


def require_safe(folder: Path) -> None:
    """Refuses a checkpoint whose entries would run code when a rank reads them.

    Args:
        folder: of one step, whose files are whole.

    Raises:
        Damaged: an entry cannot be read.
        Unsafe: with what it names.
    """
    import torch
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = metadata_of(folder)
    kinds = metadata.state_dict_metadata
    for index, info in metadata.storage_data.items():
        if not isinstance(kinds.get(index.fqn), BytesStorageMetadata):
            continue  # a tensor, which torch reads with weights_only
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        try:
            if getattr(info, "transform_descriptors", None):
                raise Damaged(f"holds {index.fqn} in a form that cannot be looked into")
            for nested in _bytes_in(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)):
                _Reader(nested, IN_STATES).load()
        except Unsafe as error:
            raise Unsafe(f"{index.fqn} names {error}, of which it has no need") from None
        except pickle.UnpicklingError as error:
            named = NAMED.search(str(error))
            if named is None:
                raise Damaged(f"holds {index.fqn} in a form that torch.save does not write") from None
            raise Unsafe(f"{index.fqn} names {named[1]}, of which it has no need") from None
        except (RuntimeError, EOFError, ValueError, AttributeError, KeyError, IndexError) as error:
            raise Damaged(
                f"holds {index.fqn} in a form that torch.save does not write ({type(error).__name__})"
            ) from None


def seal(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Writes the digests of a checkpoint's files beside them, for good.

    Args:
        folder: with everything else in place.
        known: digests that were made already, by name.
    """
    known = known or {}
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != SEAL)
    lines = [f"{known.get(name) or _sum_of(folder / name)}  {name}\n" for name in names]
    with (folder / SEAL).open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def put(aside: Path, folder: Path) -> None:
    """Gives a whole checkpoint its name; one of the same step, whole or not, is gone afterwards.

    Args:
        aside: where it was written.
        folder: its name, `step-N`.
    """
    if folder.exists():
        replaced = folder.with_name(REPLACED + folder.name.rpartition("-")[2])
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        aside.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        aside.rename(folder)


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not.

    Args:
        folder: that holds them.
    """
    return sorted((p for p in folder.glob("step-*") if step_of(p) >= 0 and p.is_dir()), key=step_of)


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


def _bytes_in(value: object) -> Iterator[bytes]:
    """What torchtitan or a data set pickled once more."""
    if isinstance(value, bytes) and value[:1] == b"\x80":
        yield value
    for item in (
        [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    ):
        yield from _bytes_in(item)
