"""Input from a stranger: nothing of it runs unasked, hangs, fills the memory or ends in a traceback; each is refused by name."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.attempts import Attempts
from tests.input_mutations import CANARY, EVIL

Make = str | bytes | Callable[[Path], object]
EXPLAIN = "mode=explain"
TOML = ("toml=a.toml", EXPLAIN)
MINE = ("--config-dir", "my", "cp=m", EXPLAIN)
SHARED = ("--config-dir", "my", "experiment=x")
LLAMA = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'
TEXT = ("data=jsonl", "data.path=d")
LONG = "a" * 5000


def shared(text: str) -> dict[str, Make]:
    return {"my/experiment/x.yaml": f"# @package _global_\n{text}\n"}


def mine(text: str) -> dict[str, Make]:
    return {"my/cp/m.yaml": f"defaults: [ulysses, _self_]\n{text}\n"}


def link(to: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(to)


FOLDER, PIPE = Path.mkdir, os.mkfifo
ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
DOUBLED = "titan: {job: {description: '${b0}'}}\nb40: x\n" + "".join(
    f"b{i}: ${{b{i + 1}}}${{b{i + 1}}}\n" for i in range(40)
)
NESTED = "b30: {x: 1}\n" + "".join(f"b{i}: {{x: '${{b{i + 1}}}', y: '${{b{i + 1}}}'}}\n" for i in range(30))
CALLBACK = "hydra: {callbacks: {x: {_target_: evil.Callback}}}"
UNTRUSTED = "translate.trust_modules=true"
UNKNOWN = "".join(f"k{i}: 1\n" for i in range(4900))

CASES: dict[str, tuple[Mapping[str, Make], tuple[str, ...], str]] = {  # what is there, what is typed, what is said
    # --- code that nobody asked for
    "TOML imports": (
        {"a.toml": f'{LLAMA}[experimental]\ncustom_import = "evil"\n'},
        ("toml=a.toml", "data=builtin"),
        UNTRUSTED,
    ),
    "TOML plans an import": (
        {"a.toml": f'{LLAMA}[experimental]\ncustom_import = "evil"\n'},
        TOML,
        "custom_import  names 'evil'",
    ),
    "TOML configures": ({"a.toml": f'{LLAMA}[job]\ncustom_config_module = "evil"\n'}, TOML, UNTRUSTED),
    "TOML converts": (
        {"a.toml": '[model]\nname = "llama3"\nconverters = ["evil"]\n'},
        TOML,
        "has evil, which is no converter",
    ),
    "YAML imports": (shared("titan: {experimental: {custom_import: evil}}"), SHARED, UNTRUSTED),
    "YAML trusts itself": (
        shared("titan: {experimental: {custom_import: evil}}\ntranslate: {trust_modules: true}"),
        SHARED,
        UNTRUSTED,
    ),
    "YAML configures": (
        shared("titan: {job: {custom_config_module: evil}}\ntranslate: {trust_modules: true}"),
        SHARED,
        UNTRUSTED,
    ),
    "YAML configures beside a mistake": (
        shared("titan: {job: {custom_config_module: evil}}\ntranslate: {trust_modules: true}"),
        (*SHARED, "titan.training.stepz=1"),
        "titan.training.steps=1",
    ),
    "callback": (shared(CALLBACK), (*SHARED, EXPLAIN), "hydra.callbacks  is set by a file"),
    "callback in a sweep": (
        {**shared(CALLBACK), "my/experiment/y.yaml": ""},
        ("-m", "--config-dir", "my", "experiment=y,x", EXPLAIN),
        "hydra.callbacks",
    ),
    "callback of a sweep without jobs": (shared(CALLBACK), ("-m", *SHARED, EXPLAIN, "nope=1,2"), "hydra.callbacks"),
    "callback by its package": (
        {"my/experiment/x.yaml": "# @package hydra.callbacks.x\n_target_: evil.Callback\n"},
        (*SHARED, EXPLAIN),
        "hydra.callbacks",
    ),
    "callback by its place": (
        {**shared("defaults: [/cp@hydra.callbacks.z: q]"), "my/cp/q.yaml": "_target_: evil.Callback\n"},
        (*SHARED, EXPLAIN),
        "hydra.callbacks",
    ),
    "callback of a primary file": (
        {"my/primary.yaml": f"defaults: [/config, _self_]\n{CALLBACK}\n"},
        ("--config-dir", "my", "--config-name", "primary", EXPLAIN),
        "hydra.callbacks",
    ),
    "callback of a path": (
        {"s/experiment/x.yaml": f"# @package _global_\n{CALLBACK}\n"},
        ("hydra.searchpath=[file://s]", "experiment=x", EXPLAIN),
        "hydra.callbacks",
    ),
    "another main folder": ({"my/config.yaml": CALLBACK}, ("--config-path", "my", EXPLAIN), "--config-dir my"),
    "a package to search": (
        {"my/primary.yaml": "defaults: [/config, _self_]\nhydra: {searchpath: ['pkg://evil']}\n"},
        ("--config-dir", "my", "--config-name", "primary", EXPLAIN),
        "hydra.searchpath=[...]",
    ),
    "log handler": (
        shared("hydra: {job_logging: {handlers: {x: {(): evil.Callback}}}}"),
        (*SHARED, EXPLAIN),
        "hydra.job_logging",
    ),
    "environment": (shared("hydra: {job: {env_set: {LD_PRELOAD: ./x.so}}}"), (*SHARED, EXPLAIN), "hydra.job.env_set"),
    "launcher": (shared("hydra: {launcher: {_target_: evil.Callback}}"), (*SHARED, EXPLAIN), "hydra.launcher"),
    "overrides of a sweep": (
        shared("hydra: {mode: MULTIRUN, sweeper: {params: {cp: 'none,ulysses'}}}"),
        (*SHARED, EXPLAIN),
        "hydra.sweeper",
    ),
    "target": (mine("steps: {to_heads: {_target_: evil.Callback}}"), MINE, "_target_  unknown key"),
    "tag": (
        shared("x: !!python/object/apply:os.system ['touch canary']"),
        (*SHARED, EXPLAIN),
        "constructor for the tag",
    ),
    # --- which file is meant
    "a shipped name": (
        {"my/cp/ulysses.yaml": "name: x\n"},
        ("--config-dir", "my", EXPLAIN),
        "mv my/cp/ulysses.yaml my/cp/my_ulysses.yaml",
    ),
    "the primary name": (
        {"my/config.yaml": "a: 1\n"},
        ("--config-dir", "my", EXPLAIN),
        "conf/config.yaml, and only one",
    ),
    "a name of Hydra's": (
        {"my/hydra/launcher/basic.yaml": "_target_: evil.Callback\n"},
        ("--config-dir", "my", EXPLAIN),
        "of Hydra's own",
    ),
    "a shipped name on a path": (
        {"s/cp/ulysses.yaml": "name: x\n"},
        ("hydra.searchpath=[file://s]", EXPLAIN),
        "s/cp/ulysses.yaml  has the name",
    ),
    "circle": (
        {"my/cp/m.yaml": "defaults: [n]\n", "my/cp/n.yaml": "defaults: [m]\n"},
        MINE,
        "in a circle: cp/m -> cp/n -> cp/m",
    ),
    "circle of one": ({"my/cp/m.yaml": "defaults: [m]\n"}, MINE, "cp/m -> cp/m"),
    # --- no text
    "YAML not UTF-8": ({"my/cp/m.yaml": b"name: \xff\n"}, MINE, "m.yaml  is not text in UTF-8"),
    "TOML not UTF-8": ({"a.toml": b"a = '\xff'\n"}, TOML, "is not text in UTF-8"),
    "records not UTF-8": ({"d/x.jsonl": b'{"text": "\xff"}\n'}, TEXT, "is not text in UTF-8"),
    "a record of surrogates": ({"d/x.jsonl": '{"text": "\\ud800"}\n'}, TEXT, "surrogates not allowed"),
    "a record too deep": ({"d/x.jsonl": "[" * 100_000}, TEXT, "not a JSON record"),
    "a number without end": ({"d/x.jsonl": '{"text": ' + "9" * 5000 + "}\n"}, TEXT, "not a JSON record"),
    "a folder of records": ({"d/x.jsonl": FOLDER}, TEXT, "x.jsonl is a folder"),
    "a pipe of records": ({"d/x.jsonl": PIPE}, TEXT, "x.jsonl is a pipe"),
    "a device of records": ({"d/x.jsonl": link("/dev/zero")}, TEXT, "x.jsonl is a device"),
    "a broken link": ({"d/x.jsonl": link("nowhere")}, TEXT, "x.jsonl cannot be read"),
    "TOML is a pipe": ({"a.toml": PIPE}, TOML, "is a pipe, not a regular file"),
    "TOML is a device": ({"a.toml": link("/dev/zero")}, TOML, "is a device"),
    "TOML is a folder": ({"a.toml": FOLDER}, TOML, "is a folder"),
    "TOML is a circle": ({"a.toml": link("a.toml")}, TOML, "cannot be read"),
    "YAML is a pipe": (
        {"my/model/m.yaml": PIPE, "a.toml": '[model]\nname = "mine"\n'},
        ("--config-dir", "my", *TOML),
        "m.yaml  is a pipe",
    ),
    "text from a device": ({}, ("data=jsonl", "data.path=/dev/zero"), "/dev/zero is a file, not a folder"),
    "a run of a device": ({}, ("launch.resume=/dev/zero",), "launch.resume  there is no folder"),
    "an out of a device": (
        {"a.toml": LLAMA},
        ("toml=a.toml", "mode=translate", "out=/dev/zero/x.yaml"),
        "out  /dev/zero/x.yaml cannot be written",
    ),
    # --- too much
    "TOML of 600,000 keys": ({"a.toml": "".join(f"k{i}=1\n" for i in range(600_000))}, TOML, "256 KiB"),
    "TOML of 4,900 keys": ({"a.toml": UNKNOWN.replace(":", "=")}, TOML, "and 4,880 more"),
    "TOML of as many faults": ({"a.toml": UNKNOWN.replace(": 1", "=")}, TOML, "and 1 more"),
    "TOML 20,000 deep": ({"a.toml": "[" + ".".join("a" * 20_000) + "]\n"}, TOML, "more than 64"),
    "TOML lists 20,000 deep": (
        {"a.toml": "a = " + "[" * 20_000 + "]" * 20_000 + "\n"},
        TOML,
        "cannot be parsed: RecursionError",
    ),
    "TOML key of 60,000 parts": ({"a.toml": "a." * 60_000 + "a = 1\n"}, TOML, "a key of more than 64 parts"),
    "TOML of quotes": ({"a.toml": "a = [\n" + '\\"' * 100_000 + "\n"}, TOML, "is not TOML"),
    "YAML of 600,000 keys": (shared("".join(f"k{i}: 1\n" for i in range(600_000))), (*SHARED, EXPLAIN), "256 KiB"),
    "YAML of 4,900 keys": (shared(UNKNOWN), (*SHARED, EXPLAIN), "and 4,880 more"),
    "YAML of as many steps": (mine("steps:\n  " + UNKNOWN.replace("\n", "\n  ")), MINE, "a composition has at most 64"),
    "YAML of lists": (shared("a: " + "[" * 5000 + "]" * 5000), (*SHARED, EXPLAIN), "more than 64 mappings or lists"),
    "YAML of aliases": (shared(ALIASES), (*SHARED, EXPLAIN), "more than 10,000 keys and values"),
    "an alias of itself": (shared("a: &a [*a]"), (*SHARED, EXPLAIN), "has *a, which is inside of what it stands for"),
    "references that double": (
        shared(DOUBLED),
        (*SHARED, EXPLAIN),
        "titan.job.description  becomes more than 1,048,576 letters",
    ),
    "references to sections": (shared(NESTED), (*SHARED, EXPLAIN), "becomes more than 1,048,576 letters"),
    "a circle of references": (shared("a: ${b}\nb: ${a}"), (*SHARED, EXPLAIN), "Recursive interpolation"),
    "a reference to nothing, typed": (
        {},
        (EXPLAIN, "shape.sequence=${nope}"),
        "shape.sequence  Interpolation key 'nope'",
    ),
    "a long override": (
        {},
        (EXPLAIN, f"mask.starts=[{','.join(map(str, range(5000)))}]"),
        "has more than 8,192 letters",
    ),
    "a deep override": ({}, (EXPLAIN, "mask.starts=" + "[" * 2000 + "]" * 2000), "mask.starts"),
    "a sweep without end": (
        {},
        ("-m", EXPLAIN, "cp.degree=range(1,1000000000)"),
        "cp.degree  makes more than 1,000 jobs",
    ),
    "a number of digits": (
        {},
        (EXPLAIN, f"shape.sequence={'9' * 5000}"),
        "shape.sequence  has a number of more than 4,300 digits",
    ),
    # --- sizes that nothing has
    "a sequence": ({}, (EXPLAIN, "shape.sequence=1000000000000"), "a plan is for at most 268,435,456"),
    "a sequence of 1e12": ({}, (EXPLAIN, "shape.sequence=1e12"), "is float 1000000000000.0"),
    "a trained sequence": ({}, (EXPLAIN, "titan.training.seq_len=1000000000000"), "a plan is for at most 268,435,456"),
    "heads": ({}, (EXPLAIN, "shape.heads=1000000007", "shape.kv_heads=1"), "a plan is for at most 65,536"),
    "a batch": ({}, (EXPLAIN, "shape.batch=9223372036854775807"), "a plan is for at most 1,048,576"),
    "a call": ({}, (EXPLAIN, "shape.batch=1000000", "shape.sequence=100000000"), "bytes in float64"),
    "steps": ({}, (EXPLAIN, "titan.training.steps=100000000000000000000"), "does not fit into 64 bits"),
    "ranks": ({}, (EXPLAIN, "cp.degree=100000"), "a plan is for at most 2048"),
    "ranks of a job": (
        {},
        ("titan.parallelism.data_parallel_replicate_degree=1000000",),
        "a job has at most 2048 ranks",
    ),
    "chunks": ({}, (EXPLAIN, "layout@cp.layout=balanced", "cp.layout.chunks=1000000000"), "cp.layout.chunks=8192"),
    "blocks": ({}, (EXPLAIN, "mask=block", "mask.size=1", "shape.sequence=100000000"), "more than 65,536 blocks"),
    "blocks on ranks": (
        {},
        (EXPLAIN, "cp=ring", "mask=block", "mask.size=2", "shape.sequence=65536", "cp.degree=1024"),
        "parts x ranks",
    ),
    # --- names
    "an escape": (mine('name: "\\e[2Jx"'), MINE, r"cp.name  must be a name, not '\x1b[2Jx'"),
    "an escape in a step": (mine('steps: {"\\e[2J": {kind: undo}}'), MINE, r"cp.steps.\x1b[2J  must be a name"),
    "an escape in TOML": ({"a.toml": f'{LLAMA}"\\u001b[2J" = 1\n'}, TOML, r"model.\x1b[2J  unknown key"),
    "a line break": (shared('"a\\nb": 1'), (*SHARED, EXPLAIN), r"a\nb  unknown key"),
    "a turned line": (shared('"\\u202ea": 1'), (*SHARED, EXPLAIN), r"\u202ea  unknown key"),
    "letters that look alike": (mine('"n\u0430me": x'), MINE, r"letters  'n\u0430me'"),
    "a NUL byte": ({**shared('data: {path: "a\\0b"}')}, (*SHARED, "data=jsonl"), r"a\x00b"),
    "a surrogate": ({}, (EXPLAIN, "cp=\udcff"), r"cp  \udcff"),
    "a long file": ({}, (f"toml={LONG}",), "File name too long"),
    "a long choice": ({}, (EXPLAIN, f"cp={LONG}"), "File name too long"),
    "a long run": ({}, (f"launch.resume={LONG}",), "launch.resume  there is no folder"),
    "a long text": ({}, ("data=jsonl", f"data.path={LONG}"), "data.path  there is no folder"),
    # --- values
    "nan": (mine("mesh: {ulysses: .nan}"), MINE, "must be a whole number of ranks, not nan"),
    "1e400": ({}, ("titan.optimizer.lr=1e400",), "titan.optimizer.lr  is inf"),
    "a list of defaults": ({"my/cp/m.yaml": "defaults: [[a]]\n"}, MINE, "Unsupported type in defaults"),
    "no defaults": ({"my/cp/m.yaml": "defaults: 5\n"}, MINE, "defaults must be a list"),
    "a number for a file": ({"my/cp/m.yaml": "5\n"}, MINE, "Invalid loaded object type: int"),
    "two values": (mine("name: a\nname: b"), MINE, "found duplicate key name"),
    "two documents": (mine("---\na: 1"), MINE, "expected a single document"),
    "a list for a choice": ({}, (EXPLAIN, "cp=[[[[[[1]]]]]]"), "cp  "),
    "an option without its value": ({}, (EXPLAIN, "--config-dir"), "expected one argument"),
    "a run in a link": (
        {"real": FOLDER, "outputs": link("real")},
        ("data=jsonl", "data.path=nowhere"),
        "data.path  there is no folder",
    ),
}


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    with Attempts() as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_is_refused_by_name(attempts: Attempts, tmp_path: Path, name: str) -> None:
    files, arguments, said = CASES[name]
    for file, make in {"evil.py": EVIL, **files}.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path) if callable(make) else path.write_bytes(make if isinstance(make, bytes) else make.encode())
    before = sorted(tmp_path.rglob("*"))
    outcome = attempts.run(arguments, tmp_path)
    is_planned = "would refuse" in outcome.out  # a plan is shown, with what its run would be refused for
    assert outcome.fault == "" and outcome.code == (not is_planned), (outcome.fault, outcome.err)
    assert said in (outcome.out if is_planned else outcome.err), outcome.err
    assert not (tmp_path / CANARY).exists()
    assert sorted(tmp_path.rglob("*")) == before, "what is refused leaves nothing"


@pytest.mark.parametrize(
    ("files", "arguments"),
    [
        ({}, ("titan.job.custom_config_module=evil",)),
        ({"a.toml": f'{LLAMA}[job]\ncustom_config_module = "evil"\n'}, ("toml=a.toml", "translate.trust_modules=true")),
        ({}, ("+hydra.callbacks.x._target_=evil.Callback",)),
        (shared(CALLBACK), (*SHARED, "translate.trust_modules=true")),
        ({"my/hydra/callbacks/x.yaml": "x: {_target_: evil.Callback}\n"}, ("--config-dir", "my", "hydra/callbacks=x")),
    ],
    ids=str,
)
def test_what_is_typed_or_trusted_runs(
    attempts: Attempts, tmp_path: Path, files: Mapping[str, str], arguments: tuple[str, ...]
) -> None:
    for file, text in {"evil.py": EVIL.replace("class JobConfig: ...", JOB_CONFIG), **files}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    outcome = attempts.run((*arguments, EXPLAIN), tmp_path)
    assert (outcome.fault, outcome.code) == ("", 0), outcome.err
    assert (tmp_path / CANARY).exists()


JOB_CONFIG = "from dataclasses import dataclass\n@dataclass\nclass JobConfig: ...\n"
