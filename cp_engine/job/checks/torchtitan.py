"""What a torchtitan 0.2.2 job may ask for; nothing here imports torchtitan, so the launcher can check it first."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from cp_engine.algebra.mask_kinds import is_from_call
from cp_engine.config.composition import degree_of, read
from cp_engine.errors import Problem
from cp_engine.hosts.torchtitan.text import sources
from cp_engine.job.checks import degrees, packages, reads, resume, stages, values
from cp_engine.job.checks.keys import value_of


def titan_value(config: Mapping[str, object], key: str, default: object = None) -> object:
    """One value below `titan`.

    Args:
        config: the whole composed configuration.
        key: dotted key below `titan`.
        default: torchtitan's default, for a key that is not written.

    Returns:
        What is written, else the default.
    """
    node: object = config.get("titan", {})
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def check(config: Mapping[str, object]) -> list[Problem]:
    """What of a job this integration cannot do, or would silently ignore, on whatever machine; `torchtitan_here` has the rest.

    Args:
        config: the whole composed configuration.

    Returns:
        One problem per fault. Names, types and lengths of `titan.*` are checked in `cp_engine.job.checks.job`.
    """
    problems = [*reads.unread(config)]
    if sources.dataset_of(config) is None:
        problems += _byte_problems(config)
    if titan_value(config, "validation.enable"):
        problems += _validation_problems(config)
    if titan_value(config, "comm.mode", "default") != "default":
        what = f"is {titan_value(config, 'comm.mode')!r}; the engine's collectives need real ranks"
        problems.append(Problem(key="titan.comm.mode", what=what, tries=("titan.comm.mode=default",)))
    problems += values.check(config)
    return [
        *problems,
        *packages.check(config),
        *_latent_problems(config),
        *_indexer_problems(config),
        *_compile_problems(config),
        *stages.check(config),
        *_expert_problems(config),
        *resume.check(config),
    ]


def _byte_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """What has no effect where text is read byte by byte."""
    key, in_hf = "titan.model.hf_assets_path", ("initial_load_in_hf", "last_save_in_hf")
    if titan_value(config, "model.hf_assets_path") is not None and not any(
        titan_value(config, f"checkpoint.{name}") for name in in_hf
    ):
        what = "names a tokenizer, and text is read byte by byte; it is used only with Hugging Face checkpoints"
        yield Problem(key=key, what=what, tries=(f"~{key}",))
    key = "titan.validation.dataset"
    if titan_value(config, "validation.enable") and titan_value(config, "validation.dataset") not in (None, ""):
        what = f"is {titan_value(config, 'validation.dataset')!r}, and text of the data group is validated on"
        yield Problem(key=key, what=what, tries=(f"~{key}", "titan.validation.dataset_path=..."))


def _latent_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """A composition that expands the latent needs the whole matrix, which tensor parallelism cuts by heads."""
    cp, key = config["cp"], "titan.parallelism.tensor_parallel_degree"
    assert isinstance(cp, Mapping)
    degree, parameters = int(str(value_of(config, key))), {p for s in read(cp, None).steps for p in s.parameters}
    if degree > 1 and "kv_up" in parameters:
        what = f"is {degree}, and the composition expands k and v with a matrix that tensor parallelism would cut"
        yield Problem(key=key, what=what, tries=(f"{key}=1",))


def _indexer_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """An indexer that nothing teaches would select by chance."""
    cp = config["cp"]
    assert isinstance(cp, Mapping)
    steps = read(cp, None).steps
    selects = [s for s in steps if "topk" in s.makes]
    if selects and not any(s.losses for s in steps):
        rule = ("rule", "an indexer learns from its loss alone")
        tries = ("+attention@cp.steps.learn=indexer_loss", "'cp.order=[...,learn]'")
        yield Problem(key="cp.order", what="no step makes the loss of the indexer", details=(rule,), tries=tries)


def _compile_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """A graph is made once: what differs from call to call, or is decided by activation checkpointing, cannot be in it."""
    components = titan_value(config, "compile.components", ["model", "loss"])
    if not (titan_value(config, "compile.enable") and isinstance(components, list) and "model" in components):
        return
    loss_only, cp, mask = "++titan.compile.components=[loss]", config["cp"], config["mask"]
    assert isinstance(cp, Mapping) and isinstance(mask, Mapping)
    key = "titan.compile.components"
    if cp.get("recompute", "all") != "all":
        what = (
            f"includes model, and cp.recompute is {cp['recompute']}; in a graph the compiler decides what is recomputed"
        )
        yield Problem(key=key, what=what, tries=("cp.recompute=all", loss_only))
    tensor = int(str(value_of(config, "titan.parallelism.tensor_parallel_degree")))
    if tensor > 1:
        what = f"includes model, and titan.parallelism.tensor_parallel_degree is {tensor}"
        rule = ("rule", "torch 2.13 then loses the gradient of the embedding, with and without context parallelism")
        yield Problem(key=key, what=what, details=(rule,), tries=(loss_only,))
    if is_from_call(mask):
        what = "includes model, and each call brings a mask of its own; a graph is made once"
        yield Problem(key=key, what=what, tries=(loss_only,))


def _validation_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """What of `titan.validation.*` has no meaning for endless text, or for the call that a plan was proved for."""

    def number(key: str) -> int:
        return int(str(value_of(config, f"titan.{key}")))

    key, is_ours = "titan.validation.steps", sources.dataset_of(config) is None
    if is_ours and number("validation.steps") < 1:
        what = f"is {number('validation.steps')}, and the text has no end: it starts over"
        yield Problem(key=key, what=what, tries=(f"{key}=10",))
    key, length, planned = "titan.validation.seq_len", number("validation.seq_len"), number("training.seq_len")
    if length != planned:
        what = f"is {length}, and titan.training.seq_len is {planned}"
        rule = ("rule", "a plan runs the call that it was proved for")
        yield Problem(key=key, what=what, details=(rule,), tries=(f"{key}={planned}",))
    key, batch = "titan.validation.local_batch_size", number("validation.local_batch_size")
    of_training = number("training.local_batch_size")
    pieces = 1  # the pipeline cuts every batch into as many micro batches as one of training
    if number("parallelism.pipeline_parallel_degree") > 1:
        pieces = max(1, of_training // max(1, number("parallelism.pipeline_parallel_microbatch_size")))
    if batch < 1 or batch % pieces:
        what = f"{batch} cannot be cut into {pieces} micro batch{'es' * (pieces > 1)}"
        yield Problem(key=key, what=what, tries=(f"{key}={of_training}",))
    key, every, logged = "titan.validation.freq", number("validation.freq"), max(1, number("metrics.log_freq"))
    if every < 1 or every % logged:
        what = f"is {every}, and metrics.jsonl has a line every {logged} steps (titan.metrics.log_freq)"
        yield Problem(key=key, what=what, tries=(f"{key}={max(1, -(-every // logged)) * logged}",))
    key, text = "titan.validation.dataset_path", config["data"]
    assert isinstance(text, Mapping)
    if not is_ours:
        return
    folder = value_of(config, key)
    if folder is not None:
        for problem in sources.check({"data": {**text, "path": folder}}):
            yield replace(problem, key=key, tries=()) if problem.key == "data.path" else problem
    elif text.get("path") is not None:
        what = f"is null, and text of {text['path']} that was trained on would be validated on"
        yield Problem(key=key, what=what, tries=(f"{key}=<folder of .jsonl files>",))


def _expert_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """Experts are spread over ranks that exist already: those of cp and dp_shard, and those of tp that do not cut experts."""
    parallelism = "titan.parallelism."
    names = ("expert_parallel", "expert_tensor_parallel", "tensor_parallel", "data_parallel_replicate")
    experts, cut, tensor, copies = (int(str(value_of(config, f"{parallelism}{name}_degree"))) for name in names)
    if experts == 1:
        return
    cp, key = config["cp"], f"{parallelism}expert_parallel_degree"
    assert isinstance(cp, Mapping)
    shards = degree_of(cp) * degrees.data_parallel(config) // copies
    if cut not in (1, tensor):
        what = f"is {cut}, and torchtitan takes 1 or tensor_parallel_degree {tensor}"
        name = f"{parallelism}expert_tensor_parallel_degree"
        yield Problem(key=name, what=what, tries=(f"{name}=1",))
    elif shards == 1:
        what = f"is {experts}, and torchtitan spreads experts only where cp x dp_shard is more than 1"
        yield Problem(key=key, what=what, tries=(f"{key}=1", f"{parallelism}data_parallel_shard_degree={experts}"))
    elif experts < 1 or shards * tensor // cut % experts:
        rule = ("rule", "experts are spread over the ranks of cp x dp_shard x tp / expert_tensor_parallel_degree")
        ranks = shards * tensor // cut
        what, tries = f"{experts} does not divide {ranks} ranks", (f"{key}={ranks}", f"{key}=1")
        yield Problem(key=key, what=what, details=(rule,), tries=tries)
