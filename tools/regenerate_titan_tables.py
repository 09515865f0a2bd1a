"""Writes the tables of torchtitan's keys, of its config modules' further keys and of model shapes that ship with the package.

Run after changing the torchtitan version: python -m tools.regenerate_titan_tables
With torchtitan-npu, from its unpacked wheel: python -m tools.regenerate_titan_tables FOLDER
"""

import ast
import importlib
import json
import sys
import types
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job.checks.tables import keys_of
from tools import titan_reads

TABLES = Path(__file__).parents[1] / "cp_engine" / "job" / "checks"
MODELS = {
    "deepseek_v3": "torchtitan.models.deepseek_v3",
    "deepseek_v32": "cp_engine.hosts.torchtitan.models.deepseek_v32.spec",
    "llama3": "torchtitan.models.llama3",
    "llama4": "torchtitan.models.llama4",
    "qwen3": "torchtitan.models.qwen3",
}
MODULES = (  # torchtitan's own; each extends its JobConfig
    "torchtitan.components.ft.config",
    "torchtitan.experiments.autoparallel.job_config",
    "torchtitan.experiments.compiler_toolkit.job_config",
    "torchtitan.experiments.simple_fsdp.job_config",
    "torchtitan.experiments.transformers_modeling_backend.job_config",
    "torchtitan.experiments.vlm.job_config",
    "torchtitan.models.flux.job_config",
)
HEAVY = (  # importing these needs further packages
    "torchtitan.experiments.transformers_modeling_backend",
    "torchtitan.experiments.vlm",
    "torchtitan.models.flux",
)
NPU = "torchtitan_npu"
NPU_PACKAGES = (NPU, f"{NPU}.config", f"{NPU}.models", f"{NPU}.models.deepseek_v3", f"{NPU}.models.deepseek_v32")
NPU_MODELS = {"deepseek_v3": "DeepSeekV3ModelArgs", "deepseek_v32": "DeepSeekV32ModelArgs"}


def titan_keys() -> dict[str, dict[str, object]]:
    """Every key of the installed torchtitan's JobConfig with its type and default."""
    with cpu_shims():  # torchtitan settles on a device when it is first imported
        from torchtitan.config import JobConfig

    return keys_of(JobConfig())


def titan_reads_of(shipped: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """A row for every key: the shipped one, with a file of the installed torchtitan that reads it; rows of modules as shipped."""
    with cpu_shims():
        from torchtitan.config import JobConfig

    keys = keys_of(JobConfig())
    found = titan_reads.readers(tuple(keys), titan_reads.section_classes(JobConfig()))
    rows = {}
    for key, files in found.items():
        row = {name: value for name, value in shipped.get(key, {}).items() if name not in ("read", "seen")}
        if "unread" in row:
            rows[key] = {**row, **({"seen": files} if files else {})}
        else:
            rows[key] = {**({"read": "train.py" if "train.py" in files else files[0]} if files else {}), **row}
    return rows | {name: row for name, row in shipped.items() if name in read("torchtitan_modules.json")}


def module_keys(names: tuple[str, ...]) -> dict[str, dict[str, dict[str, object]]]:
    """What each config module adds to torchtitan's keys, or changes in them."""
    with cpu_shims():
        import torchtitan.train
        from torchtitan.config import ConfigManager, JobConfig

    base = keys_of(JobConfig())
    table = {}
    without_its_start(Path(torchtitan.__file__).parents[1], HEAVY)
    for name in names:
        merged = ConfigManager._merge_configs(JobConfig, importlib.import_module(name).JobConfig)
        table[name] = {key: row for key, row in keys_of(merged()).items() if base.get(key) != row}
    return table


def titan_shapes() -> dict[str, dict[str, dict[str, object]]]:
    """The attention shape of every flavor of the models in MODELS."""
    table: dict[str, dict[str, dict[str, object]]] = {}
    for name, module in MODELS.items():
        with cpu_shims():
            spec = importlib.import_module(module).get_train_spec()
        stages = {} if spec.pipelining_fn else {"pipeline": False}
        table[name] = {
            flavor: {**attention_shape(args), **experts(args), **stages} for flavor, args in spec.model_args.items()
        }
    return table


def experts(args: object) -> dict[str, object]:
    """The dtype that experts are computed in whatever the job says, also without a GPU."""
    from torchtitan.config import JobConfig

    made = deepcopy(args)
    made.update_from_config(JobConfig())
    has_experts = getattr(made, "moe_enabled", hasattr(made, "moe_args"))
    return {"experts": "bfloat16"} if has_experts and made.moe_args.use_grouped_mm else {}


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
            "topk": args.max_seq_len if getattr(args, "warm_up", False) else args.index_topk,
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
        "layers": args.n_layers,
    }


def dump(table: object) -> str:
    """The text of a table file."""
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def without_its_start(folder: Path, names: tuple[str, ...]) -> None:
    """Makes the modules of packages importable from a folder, without what importing the packages themselves does."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package


def npu_shapes(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    """The attention shape of every flavor that torchtitan-npu adds; its models need the package, which the row says."""
    from torchtitan.models.moe import MoEArgs

    table = {}
    for model, name in NPU_MODELS.items():
        with cpu_shims():
            arguments = importlib.import_module(f"{NPU}.models.{model}.model.args")
        known = {name: getattr(arguments, name), "MoEArgs": MoEArgs}
        tree = ast.parse((folder / NPU / "models" / model / "__init__.py").read_text())
        table[model] = {
            flavor: {**attention_shape(eval(ast.unparse(call), known)), "package": NPU}
            for flavor, call in flavors_in(tree, name)
        }
    return table


def flavors_in(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.Call]]:
    """(flavor, call) of `args["flavor"] = Name(...)` and `args = {"flavor": Name(...)}`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            rows = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            rows = [(node.targets[0].slice, node.value)]
        else:
            continue
        for key, value in rows:
            if isinstance(key, ast.Constant) and isinstance(value, ast.Call) and ast.unparse(value.func) == name:
                yield str(key.value), value


def with_npu(shapes: dict[str, dict[str, dict[str, object]]], npu: dict[str, dict[str, dict[str, object]]]) -> None:
    """Adds torchtitan-npu's flavors; one that is there already keeps its row, with the package's row for jobs that run with it."""
    for model, flavors in npu.items():
        for flavor, row in flavors.items():
            own = shapes[model].get(flavor)
            shapes[model][flavor] = row if own is None else {**own, "in": {NPU: row}}


def read(name: str) -> dict[str, dict[str, dict[str, object]]]:
    """A table as it ships."""
    return json.loads((TABLES / name).read_text())


def main() -> None:
    """Writes the tables; without torchtitan-npu its rows stay as they are, and so does what was found out about keys by reading."""
    modules, shapes = module_keys(MODULES), titan_shapes()
    npu_module = f"{NPU}.config.custom_config"
    if sys.argv[1:]:
        without_its_start(Path(sys.argv[1]), NPU_PACKAGES)
        modules |= module_keys((npu_module,))
        with_npu(shapes, npu_shapes(Path(sys.argv[1])))
    else:
        modules[npu_module] = read("torchtitan_modules.json")[npu_module]
        with_npu(shapes, rows_of_npu(read("torchtitan_shapes.json")))
    (TABLES / "torchtitan_keys.json").write_text(dump(titan_keys()))
    (TABLES / "torchtitan_modules.json").write_text(dump(modules))
    (TABLES / "torchtitan_shapes.json").write_text(dump(shapes))
    (TABLES / "torchtitan_reads.json").write_text(dump(titan_reads_of(read("torchtitan_reads.json"))))


def rows_of_npu(shapes: dict[str, dict[str, dict[str, object]]]) -> dict[str, dict[str, dict[str, object]]]:
    """The rows of a shape table that need torchtitan-npu."""
    rows = {
        model: {
            f: row.get("in", {}).get(NPU, row)
            for f, row in flavors.items()
            if NPU in (row.get("package"), *row.get("in", {}))
        }
        for model, flavors in shapes.items()
    }
    return {model: flavors for model, flavors in rows.items() if flavors}


if __name__ == "__main__":
    main()
