"""Writes the tables of torchtitan's keys and model shapes that ship with the package.

Run after changing the torchtitan version: python tests/regenerate_titan_tables.py
"""

import dataclasses
import importlib
import json
import types
import typing
from pathlib import Path

from cp_engine.integrations.torchtitan_cpu import cpu_shims

INTEGRATIONS = Path(__file__).parents[1] / "cp_engine" / "integrations"
MODELS = {
    "deepseek_v3": "torchtitan.models.deepseek_v3",
    "deepseek_v32": "cp_engine.models.deepseek_v32.spec",
    "llama3": "torchtitan.models.llama3",
    "llama4": "torchtitan.models.llama4",
    "qwen3": "torchtitan.models.qwen3",
}


def type_name(hint: object) -> str:
    """A type as the key table writes it: `int`, `str | null`, `'a' | 'b'`, `list[str]`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(repr(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(argument) for argument in arguments)
    if origin is list:
        return f"list[{type_name(arguments[0])}]"
    if hint is type(None):
        return "null"
    if isinstance(hint, type):
        return hint.__name__
    raise TypeError(f"no name for {hint!r}")


def titan_keys() -> dict[str, dict[str, object]]:
    """Every key of the installed torchtitan's JobConfig with its type and default."""
    with cpu_shims():  # torchtitan settles on a device when it is first imported
        from torchtitan.config import JobConfig

    table: dict[str, dict[str, object]] = {}

    def walk(node: object, prefix: str) -> None:
        hints = typing.get_type_hints(type(node))
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if dataclasses.is_dataclass(value):
                walk(value, f"{prefix}{field.name}.")
            else:
                table[prefix + field.name] = {"type": type_name(hints[field.name]), "default": value}

    walk(JobConfig(), "")
    return table


def titan_shapes() -> dict[str, dict[str, dict[str, object]]]:
    """The attention shape of every flavor of the models in MODELS."""
    table: dict[str, dict[str, dict[str, object]]] = {}
    for name, module in MODELS.items():
        with cpu_shims():
            spec = importlib.import_module(module).get_train_spec()
        table[name] = {flavor: attention_shape(args) for flavor, args in spec.model_args.items()}
    return table


def attention_shape(args: object) -> dict[str, object]:
    """Heads and head dims of the calls that a model with these arguments makes."""
    heads, latent = args.n_heads, {}
    if hasattr(args, "index_topk"):  # in absorbed form: the latent is key and value
        kv_heads, v_head_dim, head_dim = 1, args.kv_lora_rank, args.kv_lora_rank + args.qk_rope_head_dim
        latent = {
            "latent_dim": args.kv_lora_rank,
            "rope_dim": args.qk_rope_head_dim,
            "index_heads": args.index_n_heads,
            "index_dim": args.index_head_dim,
            "topk": args.max_seq_len if args.warm_up else args.index_topk,
        }
    elif hasattr(args, "kv_lora_rank"):  # MLA: rope and no-rope parts side by side, v narrower
        head_dim, v_head_dim, kv_heads = args.qk_nope_head_dim + args.qk_rope_head_dim, args.v_head_dim, heads
        latent = {"latent_dim": args.kv_lora_rank, "rope_dim": args.qk_rope_head_dim}
    else:
        head_dim = getattr(args, "head_dim", args.dim // heads)
        v_head_dim, kv_heads = head_dim, args.n_kv_heads or heads
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        **latent,
        "attention": args.attn_type,
    }


def dump(table: object) -> str:
    """The text of a table file."""
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    (INTEGRATIONS / "torchtitan_keys.json").write_text(dump(titan_keys()))
    (INTEGRATIONS / "torchtitan_shapes.json").write_text(dump(titan_shapes()))
