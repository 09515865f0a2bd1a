"""`toml=` and `mode=translate` as commands: what is printed, written and refused, and that a TOML trains what it says."""

import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from cp_engine.job import train
from cp_engine.job.checks import module_needs, packages
from cp_engine.job.checks.tables import is_installed
from cp_engine.job.toml.file import tomllib
from tests.conftest import Result

Command = Callable[..., Result]
OWN = Path(__file__).parents[1] / "toml"
OF_NPU = [
    "cp=dsa",
    "titan.job.custom_config_module=torchtitan_npu.config.custom_config",
    "titan.model.flavor=debugmodel",
]
AS_OWN = "~titan.parallelism.enable_custom_context_parallel ~titan.job.custom_config_module"
"""What trains without torchtitan-npu's models."""
SHORT = ("titan.training.seq_len=64", "titan.training.local_batch_size=2")


@pytest.fixture(autouse=True)
def torchtitan_npu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether commands in this process find torchtitan-npu: not, unless a test says so."""

    def say(is_there: bool) -> None:
        for module in (module_needs, packages):
            monkeypatch.setattr(
                module,
                "is_installed",
                lambda name: is_there if name.startswith("torchtitan_npu") else is_installed(name),
            )

    say(False)
    return say


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        ("npu_ulysses", (), "ulysses   2 ranks (ulysses=2)"),
        ("npu_dsa", (), "dsa   2 ranks (cp=2)"),
        ("npu_older", (), "ulysses   4 ranks (ulysses=4)"),
        ("native", (), "ring   2 ranks (ring=2)   tokens zigzag"),
        ("native", ("cp=ulysses",), "ulysses   2 ranks (ulysses=2)   tokens zigzag"),
        ("native", ("cp=none", "cp.degree=null"), "none   1 rank"),
        (
            "native",
            ("titan.parallelism.tensor_parallel_degree=2", "launch.nproc=8"),
            "cp 2 x tp 2 x dp_shard, which takes",
        ),
        ("first", (), "torchtitan 0.1 or older, 14 keys: 14 mapped, 0 passed through"),
    ],
)
def test_toml_is_planned(command: Command, file: str, options: tuple[str, ...], said: str) -> None:
    result = command("mode=explain", f"toml={OWN / file}.toml", *options)
    assert result.code == 0 and said in result.out, result.err
    assert "proved" in result.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["toml=nowhere.toml"], ["toml  there is no file nowhere.toml"]),
        (["toml=."], ["is a folder, not a regular file"]),
        (["toml=empty.toml"], ["is empty"]),
        (["toml=latin.toml"], ["is not text in UTF-8"]),
        (["toml=config.py"], ["is a Python file"]),
        (["++toml=good.toml"], ["was not translated", "toml=FILE"]),
        (["mode=translate"], ["toml  is null", "translate.to=toml"]),
        (["mode=translate", "toml=good.toml", "out=made.yml"], ["does not end in .yaml", "out=made.yaml"]),
        (
            ["mode=translate", "toml=good.toml", "out=taken.yaml"],
            ["taken.yaml is there already", "translate.force=true"],
        ),
        (["mode=translate", "toml=good.toml", "out=good.toml/x.yaml"], ["out  good.toml/x.yaml cannot be written"]),
        (["mode=translate", "toml=good.toml", "cp=ring"], ["cp  would not be written", "experiment=... cp=ring"]),
        (
            ["mode=translate", "toml=bad.toml", "out=taken.yaml", "data=builtin", "--training.steps", "5"],
            [
                "5 problems",
                "training.stepz",
                "taken.yaml is there already",
                "data  would not",
                "titan.training.steps=5",
            ],
        ),
        (
            ["--parallelism.context_parallel_degree", "4", "--job.config_file=x.toml", "--compile.no-enable"],
            ["3 problems", "cp.degree=4", "toml=x.toml", "titan.compile.enable=false"],
        ),
        (["--training.dataset", "c4", "--training.stepz=1"], ["data=c4", "titan.training.steps=1"]),
        (["toml=good.toml", "cp=none", "mode=explain"], ["cp.degree  asks for 2 ranks", "cp.degree=null"]),
        (["toml=good.toml", "titan.training.stepz=1"], ["training.stepz  unknown key", "the command line"]),
        (["toml=good.toml", "data=builtin", "launch.nproc=3"], ["launch.nproc", "is not a multiple of 2", "cp.mesh 2"]),
        (["toml=good.toml"], ["datasets.c4_test.path  there is no", "datasets.c4_test.tokenizer", "data=builtin"]),
        (["datasets.c4.pth=x", "mode=explain"], ["datasets.c4.pth  unknown key", "datasets.c4.path"]),
        (
            [f"toml={OWN / 'npu_dsa.toml'}", "data=builtin"],
            ["npu_dsa, npu_rms_norm", "translate.drop_npu_converters=true", "pip install --no-deps torchtitan-npu"],
        ),
        (
            [f"toml={OWN / 'npu_older.toml'}", "data=builtin"],
            ["needs the package torchtitan_npu", "titan.optimizer.swap_optimizer"],
        ),
        (
            [f"toml={OWN / 'npu_ulysses.toml'}", "data=builtin", "titan.model.flavor=671B_debug"],
            ["it can be planned only", "mode=explain", "~titan.job.custom_config_module titan.model.flavor=debugmodel"],
        ),
        (  # the package's model is not this engine's of the same name
            [f"toml={OWN / 'npu_dsa.toml'}", "data=builtin", "translate.drop_npu_converters=true"],
            ["1 problem", "heads 128 (here 8)", "latent_dim 512 (here 128)", AS_OWN],
        ),
        pytest.param(
            ["cp=ulysses", "titan.job.custom_config_module=torchtitan.models.flux.job_config"],
            [
                "imports transformers, which is not installed",
                "pip install transformers",
                "~titan.job.custom_config_module",
            ],
            marks=pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed"),
        ),
        (["toml=fork.toml", "data=builtin"], ["2 problems", "translate.drop=[fork]", "translate.drop=[training.mine]"]),
        (["toml=good.toml", "translate.drop=fork"], ["is 'fork', not a list", "translate.drop=[fork]"]),
        (["toml=good.toml", "translate.drop=[fork]"], ["names fork, which the file does not have"]),
    ],
)
def test_mistake_is_refused_and_nothing_is_written(
    command: Command, tmp_path: Path, arguments: list[str], says: list[str]
) -> None:
    (tmp_path / "good.toml").write_text(
        '[model]\nname = "llama3"\n[parallelism]\ncontext_parallel_degree = 2\n[training]\ndataset = "c4_test"\n'
    )
    (tmp_path / "bad.toml").write_text("[training]\nstepz = 3\nsteps = true\n")
    (tmp_path / "rotate.toml").write_text(
        '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = "ring"\n'
    )
    (tmp_path / "list.toml").write_text('[parallelism]\ncontext_parallel_load_balancer = ["headtail"]\n')
    (tmp_path / "big.toml").write_text(f"[training]\nsteps = {2**63}\n")
    (tmp_path / "huge.toml").write_text(f"[training]\nsteps = {'9' * 5000}\n")
    (tmp_path / "quoted.toml").write_text('"training.steps" = 5\n')
    (tmp_path / "float8.toml").write_text('[model]\nconverters = ["float8"]\n')
    (tmp_path / "hf.toml").write_text(
        '[model]\nhf_assets_path = "/a"\n[training]\ndataset = "c4_test"\n[checkpoint]\ninitial_load_in_hf = true\n'
    )
    (tmp_path / "fork.toml").write_text("[fork]\na = 1\nb = 2\n[training]\nmine = 3\n")
    (tmp_path / "empty.toml").write_text("# nothing\n\n")
    (tmp_path / "latin.toml").write_bytes(b'[job]\ndescription = "caf\xe9"\n')
    (tmp_path / "config.py").write_text("")
    (tmp_path / "taken.yaml").write_text("mine")
    before = sorted(tmp_path.iterdir())
    result = command(*arguments)
    assert result.code == 1 and result.out == ""
    assert not [text for text in says if text not in result.err], result.err
    assert (tmp_path / "taken.yaml").read_text() == "mine" and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "name", ["a b.toml", "a=b,c (1) [x] {y}.toml", 'it\'s "it".toml', "${HOME}.toml", "back\\slash.toml"]
)
def test_any_name_of_a_file_is_read(command: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[parallelism]\ncontext_parallel_degree = 2\n")
    shown = command(f"toml={name}", "--cfg", "job")
    assert shown.code == 0, shown.err
    out = f"made {name}/mine.yaml"
    result = command("mode=translate", f"toml={name}", f"out={out}")
    assert result.code == 0 and (tmp_path / out).is_file(), result.err
    quoted = command(f"toml='{name}'", "--cfg", "job") if "'" not in name else shown
    assert quoted.out == shown.out


@pytest.mark.quick
def test_translation_is_printed_or_written_and_the_report_names_every_key(command: Command, tmp_path: Path) -> None:
    file = OWN / "native.toml"
    printed = command("mode=translate", f"toml={file}")
    written = command("mode=translate", f"toml={file}", "out=experiment/mine.yaml")
    text = (tmp_path / "experiment" / "mine.yaml").read_text()
    assert printed.out == text.replace("experiment=mine", "experiment=NAME")
    assert written.out.startswith(printed.err.rstrip())
    assert "wrote experiment/mine.yaml\nrun it: python launch.py --config-dir . experiment=mine" in written.out
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        key, sign, _ = line.partition(" = ")
        assert not sign or (f"  line {number:<4} " in printed.err and f".{key} = " in printed.err)
    assert "# line 5\n" in text and "# torchtitan's default" in text and "override /layout@cp.layout: zigzag" in text
    assert "reads context_parallel_rotate_method in" in text
    assert not list(tmp_path.glob("outputs*"))


def test_keys_of_the_command_line_are_written_into_the_translation(command: Command, tmp_path: Path) -> None:
    changed = ("titan.training.steps=7", "titan.parallelism.context_parallel_rotate_method=allgather")
    assert command("mode=translate", f"toml={OWN / 'native.toml'}", "out=made.yaml", *changed).code == 0
    made = yaml.safe_load((tmp_path / "made.yaml").read_text())
    assert made["titan"]["training"]["steps"] == 7
    assert {"override /cp": "allgather_kv"} in made["defaults"]


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["cp=none", "model=llama3"], {"parallelism.context_parallel_degree": 1}),
        (
            ["cp=ring_zigzag", "cp.degree=4", "model=qwen3"],
            {"parallelism.context_parallel_degree": 4, "parallelism.context_parallel_rotate_method": "alltoall"},
        ),
        (["cp=ring", "layout@cp.layout=balanced"], {"parallelism.context_parallel_load_balancer": "ptrr"}),
        (["cp=allgather_kv", "layout@cp.layout=zigzag", "titan.training.max_norm=2.5"], {"training.max_norm": 2.5}),
        (["cp=ulysses"], {"parallelism.enable_custom_context_parallel": True}),
        ([*OF_NPU, "layout@cp.layout=contiguous"], {"model.converters": ["npu_dsa"], "model.name": "deepseek_v32"}),
        ([*OF_NPU, "cp.degree=1"], {"parallelism.context_parallel_degree": 1, "model.name": "deepseek_v32"}),
        (
            ["cp=none", "mask=document", "titan.model.flavor=16B", "datasets.c4.tokenizer=/a 'b' \"c\" \\d"],
            {"model.hf_assets_path": "/a 'b' \"c\" \\d"},
        ),
    ],
)
def test_configuration_becomes_a_toml_that_becomes_the_same_configuration(
    command: Command, tmp_path: Path, arguments: list[str], keys: dict[str, object]
) -> None:
    arguments = [*arguments, "data=c4"]
    # a backslash and quotes: what Hydra's grammar takes is its own affair, so such a value is quoted for it
    arguments = [
        f"datasets.c4.tokenizer='{a.partition('=')[2]}'".replace("'b'", "\\'b\\'") if "tokenizer" in a else a
        for a in arguments
    ]
    result = command("mode=translate", "translate.to=toml", "out=made.toml", *arguments)
    assert result.code == 0, result.err
    made = tomllib.loads((tmp_path / "made.toml").read_text())
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        assert made[section][name] == value
    before = yaml.safe_load(command(*arguments, "--cfg", "job").out)
    after = yaml.safe_load(command("toml=made.toml", "--cfg", "job").out)
    degree = made["parallelism"]["context_parallel_degree"]
    for node in (before, after):
        cp, titan = node["cp"], node["titan"]
        cp.update(degree=None, mesh={axis: degree for axis in cp["mesh"]})
        cp.pop("name")  # another name of the same composition
        node.update(toml=None)
        for section in ("job", "metrics", "parallelism"):  # torchtitan's defaults, written out
            titan.setdefault(section, {})
        titan["job"].pop("dump_folder", None), titan["metrics"].pop("disable_color_printing", None)
        titan["job"].pop("custom_config_module", None), titan["model"].pop("converters", None)
        titan["parallelism"].pop("enable_custom_context_parallel", None)
    assert before == after


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cp=usp"], ["usp is no composition that a TOML can ask for", "dsa, none, ulysses"]),
        (["cp=ulysses", "cp.steps.attend.kernel=math"], ["cp.steps.attend.kernel from ulysses as shipped"]),
        (["cp=ulysses", "cp.recompute=skip_attention"], ["cp.recompute from ulysses as shipped"]),
        (["cp=ring_zigzag", "cp.head_groups=2"], ["cp.head_groups from ring as shipped"]),
        (["cp=ulysses", "model=llama3"], ["known there for deepseek_v3 only", "model=deepseek_v3"]),
        (["cp=ulysses", "layout@cp.layout=striped"], ["cp.layout  is striped", "layout@cp.layout=zigzag"]),
        (["cp=ring"], ["cp.layout  is contiguous, which the file cannot ask for"]),
        (["cp=dsa"], ["deepseek_v32 debugmodel is this engine's own", " ".join(OF_NPU[1:])]),
        (["cp=dsa", "titan.model.flavor=npu_debugmodel"], ["this engine's own", " ".join(OF_NPU[1:])]),
        (
            ["cp=ulysses", "titan.job.custom_config_module=torchtitan.components.ft.config"],
            ["the job has torchtitan.components.ft.config", OF_NPU[1]],
        ),
        (OF_NPU, ["cuts the sequence contiguous", "layout@cp.layout=contiguous"]),
        (["cp=none", "data=builtin", "mask=full"], ["2 problems", "mask  is full", "data=c4_test"]),
        (["cp=none", "shape.heads=4", "titan.debug.seed=null"], ["shape.heads  is 4"]),
    ],
)
def test_what_no_toml_can_say_is_refused_by_name(command: Command, arguments: list[str], says: list[str]) -> None:
    result = command(
        "mode=translate", "translate.to=toml", *(["data=c4"] if "data=builtin" not in arguments else []), *arguments
    )
    assert result.code == 1 and result.out == ""
    assert not [text for text in says if text not in result.err], result.err


@pytest.mark.parametrize(
    ("file", "overrides", "said"),
    [
        ("npu_dsa", ["cp=allgather_kv", "layout@cp.layout=zigzag"], "read as  cp=dsa contiguous"),
        ("npu_ulysses", ["cp=allgather_kv"], "cp=ulysses"),
    ],
)
def test_toml_that_would_be_read_as_another_composition_is_refused(
    command: Command, file: str, overrides: list[str], said: str
) -> None:
    kept = ["titan.job.custom_config_module=torchtitan_npu.config.custom_config"]
    kept += ["titan.parallelism.enable_custom_context_parallel=true"] if file == "npu_ulysses" else []
    given = ["model=deepseek_v3", *kept] if file == "npu_ulysses" else [f"toml={OWN / file}.toml"]
    result = command("mode=translate", "translate.to=toml", "data=c4", *given, *overrides)
    assert result.code == 1 and said in result.err, result.err


def test_typed_keys_are_read_as_if_the_file_had_them(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\nname = "llama3"\nhf_assets_path = "/tok"\n[training]\ndataset = "c4"\n')

    def job(*arguments: str, file: str = "a.toml") -> dict[str, dict[str, dict[str, object]]]:
        result = command(f"toml={file}", *arguments, "--cfg", "job")
        assert result.code == 0, result.err
        found: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(result.out)
        return found

    command("mode=translate", "toml=a.toml", "model=qwen3", "out=mine/experiment/n.yaml")
    made = yaml.safe_load(command("--config-dir", "mine", "experiment=n", "--cfg", "job").out)
    assert made["titan"]["model"]["name"] == "qwen3"
    assert job("data=c4_test")["datasets"] == {"c4_test": {"tokenizer": "/tok"}}  # a tokenizer is the model's
    assert job("titan.training.dataset_path=/typed")["datasets"]["c4"]["path"] == "/typed"
    assert job("+titan.training.max_norm=2.0")["titan"]["training"]["max_norm"] == 2.0
    assert job("titan.training.dataset_path=null")["datasets"]["c4"]["path"] is None
    assert job("titan.job.description=${mode}")["titan"]["job"]["description"] == "${mode}"  # not resolved by --cfg
    npu = str(OWN / "npu_dsa.toml")
    dropped = job(
        "translate.drop_npu_converters=true", "titan.model.converters=[npu_rope,quantize.linear.mx]", file=npu
    )
    assert dropped["titan"]["model"]["converters"] == ["quantize.linear.mx"]


def test_two_runs_from_one_toml_share_no_folder(command: Command) -> None:
    assert (
        "dump_folder" not in yaml.safe_load(command(f"toml={OWN / 'native.toml'}", "--cfg", "job").out)["titan"]["job"]
    )


@pytest.mark.skipif(
    find_spec("torchtitan_npu") is not None, reason="torchtitan-npu is installed, whose models are then trained"
)
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("npu_ulysses", ()),
        pytest.param("npu_dsa", ("translate.drop_npu_converters=true", *AS_OWN.split()), marks=pytest.mark.long),
    ],
)
def test_training_from_a_toml_agrees_with_torchtitan_alone(
    launch: Callable[..., Result], tmp_path: Path, file: str, options: tuple[str, ...]
) -> None:
    same = ("data=builtin", "titan.training.mixed_precision_param=float32", *SHORT, *options)
    result = launch("mode=verify", "verify.level=training", f"toml={OWN / file}.toml", *same)
    assert result.code == 0 and result.out.rstrip().endswith("verified"), result.out + result.err


def test_toml_trains_on_torchtitans_own_text_and_tokenizer(launch: Callable[..., Result], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    assets, text = tmp_path / "assets", tmp_path / "web pages"
    assets.mkdir()
    text.mkdir()
    words = [f"word{i}" for i in range(50)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text("{}")
    rows = [{"text": " ".join(words[(i * j) % 50] for j in range(200))} for i in range(40)]
    (text / "data.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(
        f'[model]\nname = "llama3"\nhf_assets_path = "{assets}"\n[training]\ndataset = "c4_test"\ndataset_path = "{text}"\n'
        "seq_len = 64\nlocal_batch_size = 2\nsteps = 3\n[parallelism]\ncontext_parallel_degree = 2\n[metrics]\nlog_freq = 1\n"
        f'[job]\ndump_folder = "{tmp_path / "dump"}"\n'
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    result = launch("toml=run.toml", "hydra.run.dir=run", **offline)
    assert result.code == 0, result.out + result.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(0 < row["loss"] < 20 for row in rows)
    assert all(row["cp_bytes_sent"] > 0 for row in rows)  # the degree of the file was in effect


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v32", "llama3"])
def test_toml_that_became_an_experiment_names_its_module_again(
    command: Command, tmp_path: Path, model: str, degree: int
) -> None:
    text = (OWN / "npu_ulysses.toml").read_text().replace("deepseek_v3", model)
    (tmp_path / "a.toml").write_text(text.replace("degree = 2", f"degree = {degree}"))
    made = command("mode=translate", "toml=a.toml", "out=experiment/mine.yaml")
    assert made.code == 0, made.err
    layout = ["layout@cp.layout=contiguous"] if (model, degree) == ("deepseek_v32", 2) else []
    back = command("--config-dir", ".", "experiment=mine", "mode=translate", "translate.to=toml", "out=b.toml", *layout)
    assert back.code == 0, back.err
    first, second = (tomllib.loads((tmp_path / name).read_text()) for name in ("a.toml", "b.toml"))
    assert second["job"]["custom_config_module"] == first["job"]["custom_config_module"]
    assert second["parallelism"]["enable_custom_context_parallel"] is True
    assert second["parallelism"]["context_parallel_degree"] == degree and second["model"]["name"] == model


def test_model_that_a_package_leaves_as_it_is_is_trained_without_it_and_said(
    command: Command, torchtitan_npu: Callable[[bool], None]
) -> None:
    result = command("mode=explain", f"toml={OWN / 'npu_ulysses.toml'}")
    assert "torchtitan_npu is not installed" in result.out and "is trained without torchtitan_npu" in result.out
    config = command(f"toml={OWN / 'npu_ulysses.toml'}", "data=builtin", "--cfg", "job")
    composed = {**yaml.safe_load(config.out), "launch": {"output_dir": "x"}}
    assert composed["titan"]["job"]["custom_config_module"] == "torchtitan_npu.config.custom_config"
    titan = train.titan_of(composed)
    assert "custom_config_module" not in titan["job"] and "enable_custom_context_parallel" not in titan["parallelism"]
    assert "note " not in command("mode=explain", f"toml={OWN / 'npu_dsa.toml'}").out  # its sizes are planned
    torchtitan_npu(True)
    titan = train.titan_of(composed)
    assert titan["job"]["custom_config_module"] == "torchtitan_npu.config.custom_config"
    assert titan["parallelism"]["enable_custom_context_parallel"] is True
    refused = command(f"toml={OWN / 'npu_ulysses.toml'}", "data=builtin", "launch.device=cpu")
    assert refused.code == 1 and "imports torch_npu, and launch.device is cpu" in refused.err


def test_lines_of_one_report_are_pasted_one_after_the_other(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        "[fork]\na = 1\nb = 2\n[training]\nmine = 3\nstepz = 9\nseq_len = 64.0\n[optimizer]\nswap_optimizer = true\n"
        '[parallelism]\ncontext_parallel_load_balancer = "None"\ncontext_parallel_degree = "2"\n"odd key" = 1\n'
    )
    refused = command("toml=a.toml", "mode=explain")
    assert refused.code == 1 and "8 problems" in refused.err, refused.err
    tries = [re.sub(r"^ +try ", "", line) for line in refused.err.splitlines() if re.match(r" +try +", line)]
    lines = [word for line in tries if "custom_config_module" not in line for word in shlex.split(line)]
    shown = command("toml=a.toml", *lines, "translate.drop=[optimizer.swap_optimizer]", "--cfg", "job")
    assert shown.code == 0, shown.err
    made = yaml.safe_load(shown.out)
    assert made["titan"]["training"]["steps"] == 9 and made["titan"]["training"]["seq_len"] == 64
    assert (made["cp"]["degree"], made["cp"]["layout"]["kind"]) == (2, "contiguous")
    assert len(made["translate"]["drop"]) == 5
