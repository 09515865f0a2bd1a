"""What is checked outside cp.*, against the tables that ship with the package."""

import json
from collections.abc import Callable
from copy import deepcopy

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cp_engine.config.compose import conf_dir
from cp_engine.errors import ConfigError, Problem
from cp_engine.job.checks import degrees, job
from cp_engine.job.checks.keys import ELSEWHERE, KEYS, titan_table, type_matches
from cp_engine.job.modes import plain
from tools import regenerate_titan_tables as tables

Config = dict[str, object]


def composed(*overrides: str) -> Config:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return plain(compose("config", list(overrides)))


@pytest.fixture(scope="module")
def default() -> Config:
    return composed()


@pytest.fixture
def changed(default: Config) -> Callable[..., Config]:
    """The default configuration with dotted keys set."""

    def change(**values: object) -> Config:
        config = OmegaConf.create(deepcopy(default))
        for key, value in values.items():
            OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
        return plain(config)

    return change


def refused(config: Config) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        job.check(config)
    return {problem.key: problem for problem in caught.value.problems}


def test_key_table_equals_installed_job_config() -> None:
    assert json.loads((tables.TABLES / "torchtitan_keys.json").read_text()) == tables.titan_keys()


def test_shape_table_equals_installed_models() -> None:
    shipped, installed = tables.read("torchtitan_shapes.json"), tables.titan_shapes()
    tables.with_npu(installed, tables.rows_of_npu(shipped))
    assert shipped == installed


def test_table_of_config_modules_equals_installed_ones() -> None:
    shipped = tables.read("torchtitan_modules.json")
    assert {name: shipped[name] for name in tables.MODULES} == tables.module_keys(tables.MODULES)
    assert set(shipped) - set(tables.MODULES) == {"torchtitan_npu.config.custom_config"}


@pytest.mark.quick
def test_defaults_are_accepted(default: Config) -> None:
    job.check(default)
    assert degrees.world_size(default) == 2


def test_every_default_has_its_own_type_in_the_table() -> None:
    wrong = {key: row for key, row in titan_table().items() if not type_matches(row["default"], str(row["type"]))}
    assert not wrong


def test_every_key_of_the_table_is_in_the_composed_configuration(default: Config) -> None:
    sections = {key.partition(".")[0] for key in KEYS}
    assert sections | set(ELSEWHERE) | {"titan"} == set(default)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("titan__training__stepz", 3, "titan.training.steps=3"),
        ("titan__trainin__steps", 3, "titan.training.steps=3"),
        ("titan__steps", 3, "titan.training.steps=3"),
        ("launch__npoc", 2, "launch.nproc=2"),
        ("modee", "train", "mode=train"),
        ("titan__training__steps", "ten", "is str 'ten', not int"),
        ("titan__training__steps", True, "is bool True, not int"),
        ("titan__training__steps", 1.5, "is float 1.5, not int"),
        ("titan__training__steps", None, "is null, not int"),
        ("titan__training__steps", 0, "is 0, less than 1"),
        ("titan__training", 3, "titan.training"),
        ("titan__model__converters", "float8", "not list[str]"),
        ("titan__optimizer__implementation", "fusd", "titan.optimizer.implementation=fused"),
        ("titan__activation_checkpoint__selective_ac_option", 2, "titan.activation_checkpoint.selective_ac_option='2'"),
        ("titan__parallelism__context_parallel_load_balancer", "headtail", "layout@cp.layout=zigzag"),
        ("titan__parallelism__context_parallel_degree", 4, "cp.degree=4"),
        ("mode", "trian", "mode=train"),
        ("launch__device", "gpu", "auto, cpu, cuda"),
        ("launch__nproc", 3, "launch.nproc=null"),
        ("titan__training__seq_len", 510, "titan.training.seq_len=512"),
        ("titan__training__global_batch_size", 7, "titan.training.global_batch_size=-1"),
        ("titan__parallelism__tensor_parallel_degree", 3, "tensor_parallel_degree"),
        ("titan__model__flavor", "16B", "mask=document"),  # its calls bring the documents of each batch
        ("mask", {"kind": "full"}, "mask=causal"),
        ("mask", {"kind": "document", "starts": None}, "mask=causal"),
        ("shape__latent_dim", 0, "is 0, less than 1"),
        ("shape__rope_dim", "64", "is str '64', not int"),
        ("cp__recompute", "attention", "all, skip_attention"),
        ("titan__model__name", "deepsek_v3", "titan.model.name=deepseek_v3"),
        ("launch__inline", True, "launch.inline=false"),
    ],
)
def test_wrong_value_is_refused_with_what_to_type(
    changed: Callable[..., Config], key: str, value: object, said: str
) -> None:
    config = changed(**{key: value})
    with pytest.raises(ConfigError) as caught:
        job.check(config)
    assert said in str(caught.value)


def test_flavor_whose_calls_bring_documents_is_accepted_with_masks_from_calls(changed: Callable[..., Config]) -> None:
    documents = {"kind": "document", "starts": None, "causal": True, "left": None, "right": None}
    config = changed(titan__model__flavor="debugmodel_flex_attn")
    config["mask"] = documents
    job.check(config)
    config["mask"] = {**documents, "starts": [0, 5]}  # of every call the same: the model's calls are not
    assert "mask=document" in str(refused(config)["mask"].tries)
    config["mask"] = {**documents, "causal": False, "left": 5}
    found = refused(config)
    assert set(found) == {"mask.causal", "mask.left"} and "has no effect" in found["mask.left"].what
    assert found["mask.left"].tries == ("mask.left=null",) and found["mask.causal"].tries == ("mask.causal=true",)


@pytest.mark.quick
def test_all_problems_are_reported_together(changed: Callable[..., Config]) -> None:
    found = refused(changed(titan__training__stepz=3, launch__npoc=2, titan__optimizer__lr="high"))
    assert set(found) == {"titan.training.stepz", "launch.npoc", "titan.optimizer.lr"}


def test_missing_value_is_refused(changed: Callable[..., Config]) -> None:
    config = changed()
    assert isinstance(config["data"], dict)
    config["data"]["path"] = "???"
    assert "data.path" in refused(config)


def test_agreeing_context_parallel_degree_is_accepted(changed: Callable[..., Config]) -> None:
    job.check(changed(titan__parallelism__context_parallel_degree=2))


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 2),
        ({"cp__degree": 4}, 4),
        ({"cp__degree": 4, "titan__parallelism__tensor_parallel_degree": 2}, 8),
        ({"titan__parallelism__data_parallel_shard_degree": 3}, 6),
        (
            {
                "titan__parallelism__data_parallel_replicate_degree": 2,
                "titan__parallelism__pipeline_parallel_degree": 2,
            },
            8,
        ),
        ({"launch__nproc": 4}, 4),
    ],
)
def test_world_size_is_the_product_of_the_degrees(
    changed: Callable[..., Config], values: dict[str, object], ranks: int
) -> None:
    config = changed(**values)
    job.check(config)
    assert degrees.world_size(config) == ranks


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        ([], (2, 256, 16, 16, 192, 128, "float32")),
        (["model=llama3"], (2, 256, 16, 16, 16, 16, "float32")),
        (["model=llama3", "titan.model.flavor=70B"], (2, 256, 64, 8, 128, 128, "float32")),
        (["titan.model.flavor=671B", "shape.sequence=131072"], (2, 131072, 128, 128, 192, 128, "float32")),
        (["shape.dtype=bfloat16", "shape.heads=6", "shape.kv_heads=3"], (2, 256, 6, 3, 192, 128, "bfloat16")),
        (
            ["model=llama3", "titan.model.flavor=8B", "++titan.parallelism.tensor_parallel_degree=4"],
            (2, 256, 8, 2, 128, 128, "float32"),
        ),
    ],
)
def test_shape_comes_from_the_model_and_from_what_is_set(overrides: list[str], shape: tuple[object, ...]) -> None:
    found = job.shape_of(composed(*overrides))
    sizes = (found.batch, found.sequence, found.heads, found.kv_heads, found.head_dim, found.v_head_dim, found.dtype)
    assert sizes == shape


@pytest.mark.parametrize(
    ("overrides", "latent"),
    [
        ([], (512, 64)),
        (["titan.model.flavor=671B"], (512, 64)),
        (["model=llama3"], (0, 0)),
        (["shape.latent_dim=32"], (32, 64)),
    ],
)
def test_latent_comes_from_the_model_and_from_what_is_set(overrides: list[str], latent: tuple[int, int]) -> None:
    found = job.shape_of(composed(*overrides))
    assert (found.latent_dim, found.rope_dim) == latent


def test_unknown_model_names_the_sizes_to_set(changed: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"shape\.heads=\.\.\. shape\.kv_heads"):
        job.shape_of(changed(titan__model__name="mine"))


def test_unknown_model_with_all_sizes_can_be_planned(changed: Callable[..., Config]) -> None:
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    config = changed(titan__model__name="mine", mode="explain", **{f"shape__{name}": n for name, n in sizes.items()})
    job.check(config)
    assert job.shape_of(config).kv_heads == 2


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("verify.level", "training", "mode=verify"),
        ("verify.target", "ranks", "mode=verify"),
        ("verify.reference", "single", "mode=verify"),
        ("explain.format", "json", "mode=explain"),
        ("translate.force", True, "mode=translate"),
        ("out", "mine.yaml", "mode=translate"),
    ],
)
def test_key_of_another_mode_is_refused(changed: Callable[..., Config], key: str, value: object, line: str) -> None:
    problem = refused(changed(**{key: value}))[key]
    assert "mode=train does not read it" in problem.what and problem.tries[0] == line


def test_reference_that_an_attention_is_not_compared_with_is_refused(changed: Callable[..., Config]) -> None:
    problem = refused(changed(mode="verify", verify__reference="single"))["verify.reference"]
    assert problem.tries == ("verify.level=training", "verify.reference=parallel")
