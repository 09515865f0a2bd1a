"""What of a job needs other packages, or another device: config modules, flavors and model converters."""

from collections.abc import Iterator, Mapping
from typing import Any

from cp_engine.errors import Problem, suggest
from cp_engine.job.checks import degrees, module_needs
from cp_engine.job.checks.keys import ABSENT, CONFIG_MODULE, lookup, module_tables, package_of, shape_row, value_of
from cp_engine.job.checks.module_needs import CONVERTERS, KNOWN
from cp_engine.job.checks.rules import shipped_rules
from cp_engine.job.checks.tables import is_installed
from cp_engine.job.checks.trust import IMPORT
from cp_engine.kernels.ascend.operators import shipped
from cp_engine.runtime.devices import REHEARSAL

ROWS = "titan.training.local_batch_size"
EXPERTS, TENSOR = "expert_parallel_degree", "tensor_parallel_degree"


def check(config: Mapping[str, object]) -> Iterator[Problem]:
    """What of modules, flavors and converters does not go together, on whatever machine.

    Args:
        config: the whole composed configuration.
    """
    yield from module_needs.problems(config)
    yield from _converter_problems(config)
    yield from _host_problems(config)


def of_device(config: Mapping[str, object], device: str) -> Iterator[Problem]:
    """What of the job's packages asks for another device.

    Args:
        config: the whole composed configuration.
        device: of `launch.device`, resolved.
    """
    yield from _out_of_reach(config, device)
    host, rules = package_of(config), shipped_rules()
    if host not in rules.ascend_packages or not is_installed(host):
        return
    if device not in ("npu", REHEARSAL):
        what = f"loads {host}, which imports torch_npu, and launch.device is {device}"
        tries = (f"launch.device={REHEARSAL}", "launch.device=npu")
        yield Problem(key=CONFIG_MODULE, what=what, tries=tries)
    for name, value in rules.with_device.items() if device == REHEARSAL else ():
        if lookup(config, f"titan.{name}") == value:
            what = f"is {str(value).lower() if value is True else value}, and needs a device, which {REHEARSAL} is not"
            yield Problem(key=f"titan.{name}", what=what, tries=(f"~titan.{name}",))


def _out_of_reach(config: Mapping[str, object], device: str) -> Iterator[Problem]:
    found, converters = npu_converters(config), value_of(config, CONVERTERS)
    assert isinstance(converters, list)
    calls = {name: [op for op in row["calls"] if op not in shipped()[1]] for name, row in found.items()}
    out_of_reach = [name for name, missing in calls.items() if missing or device != REHEARSAL]
    if out_of_reach and device != "npu":
        left = [name for name in converters if name not in out_of_reach]
        drop = f"{CONVERTERS}=[{','.join(left)}]"
        if device == REHEARSAL:
            what = f"has {', '.join(out_of_reach)}, which call operators that {REHEARSAL} does not have"
            details = (("missing", ", ".join(sorted({op for missing in calls.values() for op in missing}))),)
            yield Problem(key=CONVERTERS, what=what, details=details, tries=(f"'{drop}'",))
        else:
            drop = "translate.drop_npu_converters=true" if config.get("toml") else drop
            what = f"has {', '.join(out_of_reach)}, which call Ascend operators, and launch.device is {device}"
            yield Problem(key=CONVERTERS, what=what, tries=(drop, f"launch.device={REHEARSAL}"))


def _converter_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    found, converters, rules = npu_converters(config), value_of(config, CONVERTERS), shipped_rules()
    assert isinstance(converters, list)
    if found and package_of(config) not in rules.ascend_packages:
        package = next(iter(rules.ascend_packages))
        module = next(module for module in module_tables() if module.startswith(f"{package}."))
        what = f"has {', '.join(found)} of {package}, which the job does not load"
        yield Problem(key=CONVERTERS, what=what, tries=(f"{CONFIG_MODULE}={module}",))
    for name, row in found.items():
        yield from _limits(config, name, row, [str(c) for c in converters])
    is_host = package_of(config) in rules.ascend_packages  # whose converters are known, as torchtitan's own
    may_register = bool(value_of(config, IMPORT)) or (bool(value_of(config, CONFIG_MODULE)) and not is_host)
    known = (*KNOWN, *(rules.npu_converters if is_host else ()))
    for name in [] if may_register else [c for c in converters if c not in (*known, *found)]:
        near = next((other for other in KNOWN if other.endswith(f".{name}")), None) or suggest(str(name), known)
        tries = (f"{CONVERTERS}=[{near}]",) if near else ()
        what, allowed = f"has {name}, which is no converter of the job's packages", ("allowed", ", ".join(known))
        yield Problem(key=CONVERTERS, what=what, details=(allowed,), tries=tries)


def _limits(config: Mapping[str, object], name: str, row: dict[str, Any], converters: list[str]) -> Iterator[Problem]:
    """What a converter, or an operator that it calls, would refuse in every rank."""
    model, rows = str(value_of(config, "titan.model.name")), _rows(config)
    heads, without = rows * int(str(shape_row(config).get("heads", 0))), [c for c in converters if c != name]
    if heads > row.get("heads_of_batch", heads) or (rows > 1 and model in row.get("one_row", ())):
        most = max(1, row["heads_of_batch"] * rows // heads) if model not in row["one_row"] else 1
        what = f"gives calls of {rows} rows and {heads} heads in all, and {name} takes {most} of {model}"
        yield Problem(key=ROWS, what=what, tries=(f"{ROWS}={most}",))
    for kind, key in (("models", "titan.model.name"), ("checkpoints", "titan.activation_checkpoint.mode")):
        if kind in row and (value := value_of(config, key)) not in row[kind]:
            tries = tuple(f"{key}={other}" for other in row[kind]) if kind == "checkpoints" else ()
            what = f"is {value}, and the converter {name} takes {' or '.join(row[kind])}"
            yield Problem(key=key, what=what, tries=(*tries, f"'{CONVERTERS}=[{','.join(without)}]'"))
    needs = row.get("needs", name)
    if needs not in converters:
        with_it = f"'{CONVERTERS}=[{','.join([*converters, needs])}]'"
        what = f"has {name}, which hands experts what only those of {needs} take"
        yield Problem(key=CONVERTERS, what=what, tries=(with_it, f"'{CONVERTERS}=[{','.join(without)}]'"))
    spread, tensor = (int(str(value_of(config, f"titan.parallelism.{n}"))) for n in (EXPERTS, TENSOR))
    if row.get("spread") and tensor > 1 and spread == 1:
        what = f"is {tensor}, and {name} takes that only with experts spread over ranks"
        key = f"titan.parallelism.{TENSOR}"
        yield Problem(key=key, what=what, tries=(f"{key}=1", f"titan.parallelism.{EXPERTS}={tensor}"))
    is_compared = config["mode"] == "verify"
    if "alone" in row and is_compared:
        what = f"has {name}, which cannot run without the engine, and verify compares with that: {row['alone']}"
        yield Problem(key=CONVERTERS, what=what, tries=("mode=train",))
    if "computes" in row and is_compared and lookup(config, "verify.level") == "training":
        known = shipped_rules().npu_converters
        left = [c for c in without if known.get(c, {}).get("needs") != name]
        what = (
            f"has {name}, which computes in {row['computes']} whatever the job says; both runs are compared in float32"
        )
        yield Problem(key=CONVERTERS, what=what, tries=(f"'{CONVERTERS}=[{','.join(left)}]'",))


def _host_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """What a package for Ascend needs to be loaded, and what of it the engine does not cut."""
    host, rules, imported = package_of(config), shipped_rules(), str(value_of(config, IMPORT)).partition(".")[0]
    if imported in rules.ascend_packages:
        module = next(module for module in module_tables() if module.startswith(f"{imported}."))
        what = f"imports {imported}, which a job loads by its config module"
        yield Problem(key=IMPORT, what=what, tries=(f"~{IMPORT} {CONFIG_MODULE}={module}",))
    if host not in rules.ascend_packages or not is_installed(host):
        return
    if lookup(config, "launch.inline") is True:
        what = f"keeps the job in this process, and what {host} and its converters change in torchtitan would stay"
        yield Problem(key="launch.inline", what=what, tries=("launch.inline=false",))
    yield from _value_problems(config)
    key, needed = f"titan.parallelism.{TENSOR}", rules.tensor_parallel_with
    tensor, converter = int(str(value_of(config, key))), needed.get(str(value_of(config, "titan.model.name")))
    if tensor > 1 and converter is not None and converter not in npu_converters(config):
        what = f"is {tensor}, and without the converter {converter} {host} computes tensor-parallel experts wrongly"
        yield Problem(key=key, what=what, tries=(f"{key}=1",))
    key = "titan.parallelism.expert_tensor_parallel_degree"
    if converter is not None and (cut := int(str(value_of(config, key)))) > 1:
        what = f"is {cut}, and {host} does not cut an expert"
        yield Problem(key=key, what=what, tries=(f"{key}=1",))
    key = "titan.training.num_mtp_modules"
    if isinstance(further := lookup(config, key), int) and further > 0:
        what = f"is {further}, and each module predicts from tokens after a rank's own; the engine cuts tokens once"
        yield Problem(key=key, what=what, tries=(f"{key}=0",))
    row, copies = shape_row(config), int(str(value_of(config, "titan.parallelism.data_parallel_replicate_degree")))
    shards = degrees.data_parallel(config) // copies
    is_alone = config["mode"] == "verify"  # which compares with a run without cp
    if (
        row.get("package") == host
        and "topk" in row
        and shards * (1 if is_alone else degrees.degree_in(config["cp"])) == 1
    ):
        key = "titan.parallelism.data_parallel_shard_degree"
        what = f"leaves one rank{' beside cp' * is_alone}, and {host} trains this model only with FSDP"
        yield Problem(key=key, what=what, tries=(f"{key}=2",))


def _value_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """Values of the package's keys that it would replace, or that would have no effect."""
    key, ratio = "titan.training.torch_npu_memory_ratio", lookup(config, "titan.training.torch_npu_memory_ratio")
    if isinstance(ratio, int | float) and not 0 < ratio <= 1:
        yield Problem(
            key=key, what=f"is {ratio}, which is no share of the memory: above 0, at most 1", tries=(f"{key}=1.0",)
        )
    key, kind = "titan.training.dataset_type", lookup(config, "titan.training.dataset_type")
    if kind not in (ABSENT, "pretrain") and lookup(config, "data.dataset") is None:
        yield Problem(key=key, what=f"is {kind}, and text of the data group has one kind of rows", tries=(f"~{key}",))


def _rows(config: Mapping[str, object]) -> int:
    """Of one call of a layer."""
    stages = int(str(value_of(config, "titan.parallelism.pipeline_parallel_degree")))
    key = "titan.parallelism.pipeline_parallel_microbatch_size" if stages > 1 else ROWS
    return int(str(value_of(config, key)))


def npu_converters(config: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """The job's model converters that call Ascend operators, with their rows."""
    converters = value_of(config, CONVERTERS)
    known = shipped_rules().npu_converters
    return {name: known[name] for name in converters if name in known} if isinstance(converters, list) else {}
