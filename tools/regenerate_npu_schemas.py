"""Writes the operator schemas that ship with the package, from a torch_npu that is unpacked or installed, and prints what differs.

    python -m tools.regenerate_npu_schemas FOLDER            compare the shipped schemas with those of a wheel's folder
    python -m tools.regenerate_npu_schemas FOLDER --write    take them

FOLDER holds `torch_npu/`: site-packages, or `unzip` of a wheel. The schemas are the strings that its library registers.
"""

import argparse
import json
import re
from pathlib import Path

import torch

SCHEMAS = Path(__file__).parents[1] / "cp_engine" / "kernels" / "ascend" / "schemas.json"
OPERATORS = (
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_ring_attention_update",
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "_npu_moe_token_unpermute_with_routing_map",
    "npu_moe_token_unpermute_with_routing_map_grad",
    "npu_swiglu",
    "npu_grouped_matmul",
)


def schemas_in(folder: Path) -> dict[str, str]:
    """Schemas by operator, as the library of a torch_npu registers them."""
    library = (folder / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()
    found = {}
    for name in OPERATORS:
        texts = set(re.findall(rb"(?:^|\x00)(?:npu::)?(" + name.encode() + rb"\([^\x00]*?\) -> [^\x00]+)\x00", library))
        assert len(texts) <= 1, f"{name}: {texts}"
        if texts:
            found[name] = texts.pop().decode()
    return found


def version_in(folder: Path) -> str:
    """Of the torch_npu in a folder."""
    match = re.search(r"__version__ = '([\w.]+?)(?:\+.*)?'", (folder / "torch_npu" / "version.py").read_text())
    assert match is not None
    return match.group(1)


def arguments_of(schema: str) -> dict[str, tuple[str, bool, object]]:
    """name -> (type, whether it is keyword-only, default) of each argument."""
    parsed = torch._C.parse_schema(schema)
    return {a.name: (str(a.type), a.kwarg_only, a.default_value) for a in parsed.arguments}


def differences(shipped: dict[str, str], other: dict[str, str]) -> list[str]:
    """A line for each argument or result that differs."""
    lines = []
    for name, schema in shipped.items():
        if name not in other:
            lines.append(f"{name}: is not there")
            continue
        ours, theirs = arguments_of(schema), arguments_of(other[name])
        lines += [f"{name}: no argument {a}" for a in ours if a not in theirs]
        lines += [f"{name}: a further argument {a}" for a in theirs if a not in ours]
        lines += [f"{name}: {a} is {theirs[a]}, not {ours[a]}" for a in ours if a in theirs and ours[a] != theirs[a]]
        if [a for a in ours if a in theirs] != [a for a in theirs if a in ours]:
            lines.append(f"{name}: arguments are in another order")
        if schema.partition(" -> ")[2] != other[name].partition(" -> ")[2]:
            lines.append(f"{name}: gives {other[name].partition(' -> ')[2]}")
    return lines


def main() -> None:
    """Compares, and writes where it is told to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found = schemas_in(given.folder)
    if given.write:
        table = {"torch_npu": version_in(given.folder), "schemas": found}
        SCHEMAS.write_text(json.dumps(table, indent=2) + "\n")
        return
    shipped = json.loads(SCHEMAS.read_text())
    print(f"shipped: torch_npu {shipped['torch_npu']}; {given.folder}: torch_npu {version_in(given.folder)}")
    print("\n".join(differences(shipped["schemas"], found)) or "the same arguments and results")


if __name__ == "__main__":
    main()
