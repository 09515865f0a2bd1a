"""Which preset a TOML file asks for, its faults, its values, and who wins over whom."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from cp_engine.config.compose import conf_dir
from cp_engine.errors import ConfigError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job import cli, train
from cp_engine.job.checks.keys import module_tables, titan_table
from cp_engine.job.checks.rules import Rules
from cp_engine.job.toml import experiment
from cp_engine.job.toml.file import read_toml, tomllib
from cp_engine.job.toml.translate import DEGREE
from cp_engine.job.toml.translation import Translation
from tests.job.toml_files import BALANCER, OWN, composed_from, of_text, translated

KEYS = "".join(f"key{i} = {i}\n" for i in range(20))
NPU = '[job]\ncustom_config_module = "torchtitan_npu.config.custom_config"\n'
PATH = "torchtitan_npu.distributed.context_parallel"


@pytest.mark.parametrize(
    ("text", "choices", "said"),
    [
        ('[model]\nname = "llama3"', {"cp": "none"}, "every rank holds the whole sequence"),
        ("[parallelism]\ncontext_parallel_degree = 1", {"cp": "none"}, ""),
        (
            "[parallelism]\ncontext_parallel_degree = 2",
            {"cp": "allgather_kv", "layout@cp.layout": "zigzag"},
            "torchtitan gathers all keys and values",
        ),
        (
            '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = "alltoall"',
            {"cp": "ring", "layout@cp.layout": "zigzag"},
            "reads context_parallel_rotate_method in validation only",
        ),
        (
            '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_load_balancer = "ptrr"',
            {"cp": "allgather_kv", "layout@cp.layout": "balanced"},
            "",
        ),
        ("[experimental]\ncontext_parallel_degree = 4", {"cp": "allgather_kv", "layout@cp.layout": "zigzag"}, ""),
        (
            f'{NPU}[model]\nname = "deepseek_v3"\n[parallelism]\ncontext_parallel_degree = 2\nenable_custom_context_parallel = true',
            {"cp": "ulysses"},
            "exchanges heads for tokens",
        ),
        (
            f'{NPU}[model]\nname = "deepseek_v3"\n[parallelism]\ncontext_parallel_degree = 1\nenable_custom_context_parallel = true',
            {"cp": "none"},
            "",
        ),
        (
            f'{NPU}[model]\nname = "deepseek_v3"\n[parallelism]\ncontext_parallel_degree = 2',
            {"cp": "allgather_kv"},  # an absent load balancer is none under this config module
            "torchtitan gathers",
        ),
        (
            f'{NPU}[model]\nname = "deepseek_v32"\nconverters = ["npu_dsa"]\n[parallelism]\ncontext_parallel_degree = 2',
            {"cp": "dsa", "layout@cp.layout": "contiguous"},
            "its code looks at the converters only",
        ),
        (
            f'{NPU}[model]\nname = "deepseek_v32"\n[parallelism]\ncontext_parallel_degree = 2\nenable_custom_context_parallel = true',
            {"cp": "dsa", "layout@cp.layout": "contiguous"},
            "gathers k and v and not the indexer's keys",
        ),
        (
            '[model]\nname = "deepseek_v32"\n[parallelism]\ncontext_parallel_degree = 2',
            {"cp": "dsa"},  # zigzag is its own layout
            "the model selects keys",
        ),
        (
            f'{NPU}[model]\nname = "llama3"\n[parallelism]\ncontext_parallel_degree = 2\nenable_custom_context_parallel = true',
            {"cp": "allgather_kv"},
            "has no effect on this model",
        ),
        (
            f"{NPU}[parallelism]\ncontext_parallel_degree = 2\nenable_custom_context_parallel = true\n"
            f'custom_context_parallel_path = "{PATH}.ulysses_cp.UlyssesContextParallelContext"',
            {"cp": "ulysses"},
            "",
        ),
        (
            f'{NPU}[model]\nname = "deepseek_v32"\n[parallelism]\ncontext_parallel_degree = 2\nenable_custom_context_parallel = true\n'
            f'custom_context_parallel_path = "{PATH}.dsa_cp.AscendDSAContextParallelContext"',
            {"cp": "dsa", "layout@cp.layout": "contiguous"},
            "",
        ),
        (
            f"{NPU}[parallelism]\ncontext_parallel_degree = 2\n"
            f'custom_context_parallel_path = "{PATH}.ulysses_cp.UlyssesContextParallelContext"',
            {"cp": "allgather_kv"},
            "no effect where enable_custom_context_parallel is false",
        ),
        ('[model]\nname = "deepseek_v3"\nflavor = "16B"', {"cp": "none", "mask": "document"}, ""),
    ],
)
def test_a_file_asks_for_a_preset(tmp_path: Path, text: str, choices: dict[str, str], said: str) -> None:
    made = of_text(tmp_path, text)
    assert {k: option for k, (option, _) in made.choices.items() if k not in ("model", "data")} == choices
    assert said in " ".join(made.notes)
    degree = re.search(r"context_parallel_degree = (\d)", text)
    assert made.settings.get("cp.degree", (1, ""))[0] == int(degree.group(1) if degree else 1)


def test_presets_of_the_rules_exist_and_every_rule_decides() -> None:
    rules = Rules()
    assert set(rules.presets) <= {path.stem for path in (conf_dir() / "cp").glob("*.yaml")}
    layouts = {path.stem for path in (conf_dir() / "layout").glob("*.yaml")}
    assert set(rules.balancers[1].values()) <= layouts
    known = {*titan_table(), *(key for table in module_tables().values() for key in table)}
    assert {new for new in rules.retired.values() if isinstance(new, str)} <= known
    assert set(rules.retired) & known == {"model.tokenizer_path", "experimental.custom_args_module"}  # deprecated there


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("[parallelism]\ncontext_paralel_degree = 4", {"parallelism.context_paralel_degree":
            f"translate.drop=[parallelism.context_paralel_degree] titan.{DEGREE}=4"}),
        ("[training]\ncontext_parallel_degree = 2", {"training.context_parallel_degree":
            f"translate.drop=[training.context_parallel_degree] titan.{DEGREE}=2"}),
        ('[training]\nsteps = "ten"', {"training.steps": ""}),
        ("[training]\nsteps = 5\nsteps = 6", {"training.steps": ""}),
        ("[training]\nsteps = ", {"line 2": ""}),
        ("[training\nsteps = 1", {"line 1": ""}),
        ('[training]\nSTEPS = 5', {"training.STEPS": "translate.drop=[training.STEPS] titan.training.steps=5"}),
        ('model = "llama3"', {"model": "translate.drop=[model]"}),
        ("[[model]]\nflavor = 1", {"model": "translate.drop=[model]"}),
        ("[training]\nsteps = 1\n[training]\nseq_len = 2", {"line 3": ""}),
        ("[paralelism]", {"paralelism": "translate.drop=[paralelism]"}),
        (
            "[paralelism]\ncontext_parallel_degree = 4\ntensor_parallel_degree = 2",
            {"paralelism": f"translate.drop=[paralelism] titan.{DEGREE}=4 titan.parallelism.tensor_parallel_degree=2"},
        ),
        (f"[fork]\n{KEYS}[quantize.fork]\n{KEYS}", {"fork": "translate.drop=[fork]", "quantize.fork": "translate.drop=[quantize.fork]"}),
        ('[job]\ncustom_config_module = "my.fork"\n[my]\na = 1\n[training]\nmy = 2',
         {"job.custom_config_module": "translate.drop=[job.custom_config_module,my.a,training.my]"}),
        (
            '[parallelism]\ncontext_parallel_load_balancer = "None"\n'
            '[checkpoint]\ninitial_load_path = "None"\n[lr_scheduler]\ntotal_steps = "none"',
            {BALANCER: f"titan.{BALANCER}=null",
             "checkpoint.initial_load_path": "titan.checkpoint.initial_load_path=null",
             "lr_scheduler.total_steps": "titan.lr_scheduler.total_steps=null"},
        ),
        ('[activation_checkpoint]\nmode = "None"', {"activation_checkpoint.mode": "titan.activation_checkpoint.mode=none"}),
        ("[optimizer]\nlr = nan", {"optimizer.lr": ""}),
        ('[training]\nsteps = "5"\nseq_len = 64.0\nmax_norm = 07:32:00',
         {"training.steps": "titan.training.steps=5", "training.seq_len": "titan.training.seq_len=64", "training.max_norm": ""}),
        ('[model]\nconverters = "float8"', {"model.converters": "'titan.model.converters=[\"float8\"]'"}),
        (
            "[optimizer]\nswap_optimizer = true\nswap_optimizer_times = 4\n[training]\nnum_mtp_modules = 1",
            {"optimizer.swap_optimizer": "titan.job.custom_config_module=torchtitan_npu.config.custom_config"},
        ),
        ('[metrics]\nenable_color_printing = false', {"metrics.enable_color_printing": "translate.drop=[metrics.enable_color_printing]"}),
        ('[model]\nnorm_type = "layernorm"', {"model.norm_type": "translate.drop=[model.norm_type]"}),
        ('[checkpoint]\ninterval_type = "seconds"', {"checkpoint.interval_type": "translate.drop=[checkpoint.interval_type]"}),
        ("[float8]\nenable_float8_linear = true", {"float8.enable_float8_linear": "translate.drop=[float8.enable_float8_linear]"}),
        ("[parallelism]\ncontext_parallel_degree = 0", {"parallelism.context_parallel_degree": ""}),
        (
            '[parallelism]\ncontext_parallel_load_balancer = "headtial"',
            {BALANCER: f"titan.{BALANCER}=headtail"},
        ),
        ('[parallelism]\ncontext_parallel_load_balancer = ""', {BALANCER: f"titan.{BALANCER}=null"}),
        (
            "[parallelism]\nenable_custom_context_parallel = true",
            {"parallelism.enable_custom_context_parallel": "titan.job.custom_config_module=torchtitan_npu.config.custom_config"},
        ),
        ('[model]\nname = "deepseek_v4"', {"model.name": ""}),
        ('[model]\nname = "lama3"', {"model.name": "titan.model.name=llama3"}),
        ('[training]\ndataset = "my_corpus"', {"training.dataset": ""}),
        ('[job]\ncustom_config_module = "os"', {"job.custom_config_module": "translate.trust_modules=true"}),
        ('[experimental]\ncustom_args_module = "os"', {"experimental.custom_args_module": "translate.trust_modules=true"}),
        (
            f"{NPU}[parallelism]\ncontext_parallel_degree = 2\nenable_custom_context_parallel = true\n"
            'custom_context_parallel_path = "my.Own"',
            {"parallelism.custom_context_parallel_path": "translate.drop=[parallelism.custom_context_parallel_path] cp=ulysses"},
        ),
        ('[job]\ndescription = "???"', {"job.description": ""}),
        ("[metrics]\nrank_0_only = false", {"metrics.rank_0_only": ""}),
        ("[training]\nbatch_size = 2\nlocal_batch_size = 4", {"training.batch_size": "translate.drop=[training.batch_size]"}),
        (
            '[model]\nnam = "x"\n[training]\nsteps = true\nsteps = 1\nseq_len =\n[optimizr]\nlr = 1',
            {"model.nam": "translate.drop=[model.nam] titan.model.name=x", "training.steps": "", "line 6": "",
             "optimizr": "translate.drop=[optimizr] titan.optimizer.lr=1"},
        ),
    ],
)  # fmt: skip
def test_faults_of_a_file_are_one_report(tmp_path: Path, text: str, problems: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        of_text(tmp_path, text)
    found = {problem.key: problem for problem in caught.value.problems}
    assert set(problems) <= set(found) and len(caught.value.problems) <= len(problems) + 1
    for key, what_to_write in problems.items():
        assert what_to_write == "" or what_to_write in found[key].tries
        assert any(label in ("at", "text", "rule", "keys") for label, _ in found[key].details)


def test_a_retired_key_says_its_new_place(tmp_path: Path) -> None:
    rows = {row.key: row for row in translated(OWN / "first.toml").rows}
    assert rows["training.batch_size"].target == "titan.training.local_batch_size"
    assert rows["float8.filter_fqns"].target == "titan.quantize.linear.float8.filter_fqns"
    assert rows["job.use_for_integration_test"].target == "" and rows["job.use_for_integration_test"].why
    assert translated(OWN / "first.toml").generation == "torchtitan 0.1 or older"
    assert translated(OWN / "npu_older.toml").generation == "torchtitan-npu, 2026-03 or older"
    assert translated(OWN / "npu_dsa.toml").generation == "torchtitan-npu 0.2.2"
    assert translated(OWN / "native.toml").generation == "torchtitan 0.2.2"
    assert "as training.batch_size" in experiment.text(translated(OWN / "first.toml"))


def test_converters_are_kept_or_dropped_by_name() -> None:
    kept, dropped = translated(OWN / "npu_dsa.toml"), translated(OWN / "npu_dsa.toml", drop_npu_converters=True)
    assert len(kept.settings["titan.model.converters"][0]) == 5
    assert kept.settings["titan.job.custom_config_module"][0] == "torchtitan_npu.config.custom_config"
    assert dropped.settings["titan.model.converters"][0] == []
    assert dropped.settings["titan.job.custom_config_module"] == kept.settings["titan.job.custom_config_module"]
    assert dropped.settings["translate.drop_npu_converters"][0] is True
    assert any("npu_dsa, npu_rms_norm" in note for note in dropped.notes)


def test_trusted_module_gives_keys_and_its_job_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_titan_keys.py").write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Corpus:\n    shards: int = 3\n    names: list[str] | None = None\n"
        "    other: dict[str, int] | tuple[int, ...] = ()\n"
        "@dataclass\nclass JobConfig:\n    corpus: Corpus = field(default_factory=Corpus)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = '[job]\ncustom_config_module = "my_titan_keys"\n[corpus]\nshards = 5\n'
    with pytest.raises(ConfigError, match=re.escape("translate.trust_modules=true")):
        of_text(tmp_path, text)
    config = composed_from(of_text(tmp_path, text, trust_modules=True))
    with cpu_shims():
        from cp_engine.hosts.torchtitan.host import job_config
    assert job_config(train.titan_of(config)).corpus.shards == 5
    plain_file = of_text(tmp_path, text.partition("[corpus]")[0], trust_modules=True)
    assert "titan.job.custom_config_module" in plain_file.settings  # its defaults may differ
    with pytest.raises(ConfigError, match=r"corpus\.shards  is str 'x', not int"):
        of_text(tmp_path, text.replace("5", '"x"'), trust_modules=True)


@settings(max_examples=150, deadline=None)
@given(
    st.text().filter(lambda text: text != "???"),
    st.lists(st.text(max_size=20).filter(lambda text: text != "???"), max_size=3),
    st.floats(allow_nan=False),
)
def test_any_value_arrives_as_it_is(text: str, names: list[str], number: float) -> None:
    made = Translation(path="x.toml")
    made.settings = {
        "titan.job.description": (text, "line 1"),
        "titan.model.converters": (names, "line 2"),
        "titan.optimizer.lr": (number, "line 3"),
    }
    node = OmegaConf.to_container(OmegaConf.create(experiment.text(made)), resolve=True)
    assert isinstance(node, dict)
    titan = node["titan"]
    assert (titan["job"]["description"], titan["model"]["converters"], titan["optimizer"]["lr"]) == (
        text,
        names,
        number,
    )


def test_only_line_feeds_end_a_line_and_arrays_hide_no_key(tmp_path: Path) -> None:
    made = of_text(
        tmp_path,
        "[training]\n# a note\u2028steps = 5\n[parallelism]\nmodule_fqns_per_model_part = [\n"
        '  ["layers.0"],\n  ["layers.1"]\n]\ntensor_parallel_degree = 2\n'
        '[job]\ndescription = """a\u2028b\nsteps = 7\n[training]\n"""\n',
    )
    assert made.settings["titan.training.steps"] == (10000, "torchtitan's default")
    assert made.settings["titan.parallelism.tensor_parallel_degree"] == (2, "line 8")
    assert made.settings["titan.job.description"][0] == "a\u2028b\nsteps = 7\n[training]\n"


def test_text_of_a_value_is_in_the_job_as_it_is() -> None:
    config = composed_from(translated(OWN / "native.toml"))
    titan = train.titan_of(config)
    assert titan["job"]["description"] == tomllib.loads((OWN / "native.toml").read_text())["job"]["description"]
    assert titan["training"]["dataset_path"] == "./assets/c4=test [1]"
    assert titan["model"]["hf_assets_path"] == "./assets/my tokenizer, v2"


@pytest.mark.parametrize("data", ["builtin", "jsonl"])
def test_another_choice_of_data_leaves_the_data_set_without_effect(data: str) -> None:
    path = ["data.path=/text"] if data == "jsonl" else []
    titan = train.titan_of(composed_from(translated(OWN / "native.toml"), f"data={data}", *path))
    assert "dataset" not in titan["training"] and "hf_assets_path" not in titan["model"]


def test_command_line_wins_over_the_file_and_the_file_over_the_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [{override /cp: ulysses}, _self_]\ntitan: {training: {steps: 7, seq_len: 64}}\n"
    )
    file = tmp_path / "a.toml"
    file.write_text("[training]\nsteps = 9\n[parallelism]\ncontext_parallel_degree = 2\n")

    def job(*arguments: str) -> dict[str, dict[str, dict[str, object]]]:
        assert cli.run(["--config-dir", str(tmp_path), f"toml={file}", *arguments, "--cfg", "job"]) == 0
        made: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(capsys.readouterr().out)
        return made

    made = job("experiment=mine")
    assert (made["cp"]["name"], made["titan"]["training"]["steps"], made["titan"]["training"]["seq_len"]) == (
        "allgather_kv",
        9,
        64,  # which the file does not say
    )
    assert job("titan.training.steps=11", "cp=ring")["titan"]["training"]["steps"] == 11
    assert job("cp=ring")["cp"]["name"] == "ring"
    assert job("model=qwen3")["titan"]["model"]["name"] == "qwen3"
    assert job("titan.parallelism.context_parallel_degree=4")["cp"]["degree"] == 4
    made = job("titan.parallelism.context_parallel_rotate_method=alltoall")
    assert (made["cp"]["name"], made["cp"]["degree"]) == ("ring", 2)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ('[checkpoint]\ninterval_type = "steps"', {}),
        ("[metrics]\nenable_color_printing = true\nrank_0_only = true", {}),
        ('[float8]\nenable_float8_linear = false\nmoe_fqns = ["experts"]', {"quantize.grouped_mm.float8.fqns": ["experts"]}),
        ('[model]\nnorm_type = "rmsnorm"', {}),
        ("[validation]\nenabled = false", {"validation.enable": False}),
        ('[quantize.dense.float8]\nfilter_fqns = ["output"]', {"quantize.linear.float8.filter_fqns": ["output"]}),
        ('[quantize.dense.mx]\nrecipe_name = "mxfp8_cublas"', {"quantize.linear.mx.recipe_name": "mxfp8_cublas"}),
        ('[quantize.moe.float8]\nfqns = ["experts"]', {"quantize.grouped_mm.float8.fqns": ["experts"]}),
        ('[quantize.moe.mx]\nfqns = ["experts"]', {"quantize.grouped_mm.mx.fqns": ["experts"]}),
        ('[mx]\nmoe_fqns_prototype = ["experts"]', {"quantize.grouped_mm.mx.fqns": ["experts"]}),
    ],
)  # fmt: skip
def test_an_older_key_is_taken_where_its_value_is_so_today(
    tmp_path: Path, text: str, settings: dict[str, object]
) -> None:
    made = of_text(tmp_path, text)
    assert made.generation == "torchtitan 0.1 or older"
    assert {key: value for key, (value, where) in made.settings.items() if where.startswith("line")} == {
        f"titan.{key}": value for key, value in settings.items()
    }
    assert all(row.became == "mapped" and (row.target or row.why) for row in made.rows if row.became != "defaulted")


def test_keys_and_sections_are_left_out_by_name_and_said(tmp_path: Path) -> None:
    text = "[training]\nsteps = 7\nmine = 1\n[fork]\na = 1\n[fork.deep]\nb = [2]\n"
    made = of_text(tmp_path, text, drop=("training.mine", "fork"))
    assert {row.key for row in made.rows if row.became == "dropped"} == {"training.mine", "fork.a", "fork.deep.b"}
    assert made.settings["titan.training.steps"][0] == 7
    assert made.settings["translate.drop"][0] == ["training.mine", "fork"]
    assert (
        "left out, as translate.drop says: training.mine (line 3), fork.a (line 5), fork.deep.b (line 7)" in made.notes
    )
    assert "3 dropped" in experiment.summary(made) and "fork.deep.b = [2]" in experiment.report(made)
    known = of_text(tmp_path, text, drop=("training.mine", "fork", "training.steps"))  # a known one as well
    assert known.settings["titan.training.steps"] == (10000, "torchtitan's default")
    with pytest.raises(ConfigError) as caught:
        of_text(tmp_path, text, drop=("training.mine", "fork", "training.stepz"))
    assert [(p.key, p.tries) for p in caught.value.problems] == [
        ("translate.drop", ("translate.drop=[training.steps]",))
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "parallelism.context_parallel_load_balancer: headtail, torchtitan's default"),
        (NPU, "parallelism.context_parallel_load_balancer: None, the default of torchtitan_npu.config.custom_config"),
    ],
)
def test_a_default_is_said_to_be_of_who_has_it(tmp_path: Path, text: str, said: str) -> None:
    made = of_text(tmp_path, f"{text}[parallelism]\ncontext_parallel_degree = 2\n")
    assert made.choices.get("layout@cp.layout", ("contiguous", said))[1] == said


@pytest.mark.parametrize(
    ("mark", "name", "repaired"),
    [(b"\xef\xbb\xbf", "UTF-8", "a b.toml"), (b"\xff\xfe", "UTF-16", "utf8.toml")],
)
def test_byte_order_mark_is_named_and_the_line_takes_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: bytes, name: str, repaired: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "[training]\r\nsteps = 5\r\n"
    (tmp_path / "a b.toml").write_bytes(mark + (text.encode() if name == "UTF-8" else text.encode("utf-16-le")))
    with pytest.raises(ConfigError) as caught:
        read_toml("a b.toml")
    (problem,) = caught.value.problems
    assert problem.what == f"begins with the byte-order mark of {name}"
    subprocess.run(["bash", "-c", problem.tries[0]], check=True)
    assert read_toml(repaired).values == {"training": {"steps": 5}}
