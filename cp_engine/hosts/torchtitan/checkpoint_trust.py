"""What a checkpoint holds, read without running any of it: its `.metadata`, and its entries that are Python objects.

torch's reader unpickles both with whatever classes they name. Here they may name what torch, torchtitan and torchdata write, and whatever
else they name is refused. No class is handed to a pickle that could be changed through it. Nothing here imports torchtitan.
Source: torch.distributed.checkpoint.filesystem and metadata, torch 2.10 to 2.13; torchtitan/components/dataloader.py, 0.2.2.
"""

import io
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

DATA = re.compile(r"dataloader\.dp_rank_(\d+)")
"""The place in the data of one data-parallel rank: bytes, which torchtitan's loader unpickles."""
PICKLED = re.compile(rb"\x80[\x02-\x05].*\.", re.DOTALL)
REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""How torch says what `weights_only` did not let through."""
TORCH = "torch.distributed.checkpoint"
PARTS = (
    *((f"{TORCH}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{TORCH}.metadata", f"{kind}StorageMetadata") for kind in ("Chunk", "Tensor", "Bytes")),
    (f"{TORCH}.metadata", "_MEM_FORMAT_ENCODING"),
    *((f"{TORCH}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
)
"""What dcp writes into `.metadata`."""


class Damaged(Exception):
    """What is wrong with the files of a checkpoint; follows its name, as in `step-4` + `lacks __0_0.distcp`."""


class Unsafe(Exception):
    """What a checkpoint holds that it has no need of, and that could run code."""


class _NoPickle(Exception):
    """Bytes that do not hold what they should."""


class _Part:
    """What stands in a pickle for an instance of a class of torch: its arguments and its state."""

    arguments: tuple[object, ...] = ()
    state: object = None

    def __new__(cls, *arguments: object) -> "_Part":
        part = object.__new__(cls)
        part.arguments = arguments
        return part

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads a pickle that may name what a table has, and dtypes of torch."""

    def __init__(self, raw: bytes, known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name.

        Raises:
            Unsafe: the table does not have it.
        """
        found = self._known.get((module, name))
        if found is None and module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if found is None:
            raise Unsafe(f"names {module}.{name}, of which it has no need")
        return found


def metadata_of(raw: bytes) -> "Metadata":
    """What a `.metadata` file says, as torch's own classes, built here field by field.

    Args:
        raw: its bytes.

    Raises:
        Damaged: it is not the metadata of a checkpoint.
        Unsafe: it names something else than what torch writes there.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    # new classes for each file, so that nothing that a pickle does to a class lasts
    known = {pair: type(pair[1], (_Part,), {}) for pair in PARTS}
    try:
        top = _loaded(raw, {**known, ("torch", "Size"): tuple, ("collections", "OrderedDict"): dict})
        fields = _fields(top, "Metadata")
        stored = {
            _text(name): BytesStorageMetadata() if _kind(part) == "BytesStorageMetadata" else _tensor(part)
            for name, part in fields["state_dict_metadata"].items()
        }
        places = {_index(index): _place(info) for index, info in fields["storage_data"].items()}
    except Unsafe as error:
        raise Unsafe(f"its .metadata {error}") from None
    except (_NoPickle, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise Damaged(f"has a .metadata that is none ({error})") from error
    if absent := stored.keys() - {index.fqn for index in places}:
        raise Damaged(f"has a .metadata that does not say where {min(absent)} lies")
    return Metadata(state_dict_metadata=stored, storage_data=places)


def entry_of(name: str, raw: bytes) -> object:
    """An entry that is a Python object.

    Args:
        name: of the entry, as in `dataloader.dp_rank_0`.
        raw: what `torch.save` wrote.

    Returns:
        The object; a place in the data as a pickle of its own making, which is safe to unpickle.

    Raises:
        Damaged: it cannot be read.
        Unsafe: it names something else than data.
    """
    try:
        value = _tensors(raw)
        _refuse_pickled(value)
        if DATA.fullmatch(name):  # whatever its first bytes are, it will be unpickled
            if not isinstance(value, bytes | bytearray):
                raise _NoPickle(f"it is a {type(value).__name__}")
            value = _loaded(bytes(value), _of_states())
            _refuse_pickled(value)
    except Unsafe as error:
        raise Unsafe(f"{name} {error}") from None
    except _NoPickle as error:
        raise Damaged(f"holds {name} in a form that torch.save does not write ({error})") from None
    return pickle.dumps(value) if DATA.fullmatch(name) else value


def _loaded(raw: bytes, known: Mapping[tuple[str, str], Any]) -> Any:
    try:
        return _Reader(raw, known).load()
    except Unsafe:
        raise
    except Exception as error:  # junk raises whatever its bytes happen to mean
        raise _NoPickle(type(error).__name__) from error


def _tensors(raw: bytes) -> Any:
    """What `torch.save` wrote, of tensors and plain data."""
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        if (found := REFUSED.search(str(error))) is not None:
            raise Unsafe(f"names {found[1]}, of which it has no need") from None
        raise _NoPickle(type(error).__name__) from None


def _refuse_pickled(value: object) -> None:
    """Bytes that are a pickle again may be unpickled by whoever gets them."""
    for raw in _bytes(value):
        if PICKLED.fullmatch(raw):
            try:
                _refuse_pickled(_loaded(raw, _of_states()))
            except _NoPickle:
                continue  # bytes that only look like one


def _bytes(value: object) -> Iterator[bytes]:
    left, seen = [value], set[int]()
    while left:
        item = left.pop()
        if isinstance(item, bytes | bytearray):
            yield bytes(item)
        elif isinstance(item, Mapping | list | tuple | set | frozenset | deque) and id(item) not in seen:
            seen.add(id(item))  # a pickle can put a list into itself
            left += [*item.keys(), *item.values()] if isinstance(item, Mapping) else item


def _of_states() -> dict[tuple[str, str], Any]:
    """What the state of a data loader may name: containers, arrays and tensors. Functions are made anew, as no pickle may change one."""
    import numpy

    core = numpy._core if hasattr(numpy, "_core") else numpy.core
    arrays = {name: getattr(core.multiarray, name) for name in ("_reconstruct", "scalar")}
    return {
        **{("builtins", kind.__name__): kind for kind in (set, frozenset)},
        **{("collections", kind.__name__): kind for kind in (OrderedDict, deque)},
        ("_codecs", "encode"): lambda text, _: text.encode("latin-1"),  # bytes, as older pickles have them
        ("torch", "Size"): torch.Size,
        ("torch._utils", "_rebuild_tensor_v2"): lambda *of: torch._utils._rebuild_tensor_v2(*of),
        # torch's own would unpickle what it is given
        ("torch.storage", "_load_from_bytes"): lambda raw: _tensors(raw),
        **{("numpy", kind.__name__): kind for kind in (numpy.ndarray, numpy.dtype)},
        **{(f"numpy.{core}.multiarray", name): made for core in ("core", "_core") for name, made in arrays.items()},
    }


def _kind(part: object) -> str:
    if not isinstance(part, _Part):
        raise TypeError(f"it is a {type(part).__name__}")
    return type(part).__name__


def _fields(part: object, kind: str) -> Mapping[str, Any]:
    if _kind(part) != kind:
        raise TypeError(f"{_kind(part)} in the place of {kind}")
    state = part.state if isinstance(part, _Part) else None
    if not isinstance(state, dict):
        raise TypeError(f"{kind} without fields")
    return state


def _tensor(part: object) -> "TensorStorageMetadata":
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    fields = _fields(part, "TensorStorageMetadata")
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(c["offsets"]), sizes=_size(c["sizes"])) for c in chunks],
    )


def _index(part: object) -> "MetadataIndex":
    from torch.distributed.checkpoint.metadata import MetadataIndex

    fields = _fields(part, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]), None if offset is None else _size(offset), None if index is None else _number(index)
    )


def _place(part: object) -> object:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    fields = _fields(part, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError(f"written with an extension: {fields['transform_descriptors']}")
    path = PurePosixPath(_text(fields["relative_path"]))
    if path.is_absolute() or ".." in path.parts or not path.name:
        raise Unsafe(f"names the file {path}, outside its folder")
    return _StorageInfo(str(path), _number(fields["offset"]), _number(fields["length"]))


def _size(value: object) -> torch.Size:
    if not isinstance(value, tuple):
        raise TypeError(f"{type(value).__name__} in the place of a size")
    return torch.Size([_number(n) for n in value])


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value
