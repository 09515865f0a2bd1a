"""Mutated command lines, YAML and TOML files; a seed gives the same one again, so that whatever one of them finds can be repeated."""

import random
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CANARY = "canary"
"""A file that code of a case would make, wherever it ran."""
EVIL = f"open({CANARY!r}, 'w').close()\nclass JobConfig: ...\nclass Callback: ...\n"
TOMLS = (
    '[model]\nname = "llama3"\nflavor = "debugmodel"\n[training]\nseq_len = 2048\nsteps = 10\ndataset = "c4_test"\n'
    '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = "alltoall"\n',
    '[job]\ndump_folder = "./outputs"\ncustom_config_module = "torchtitan_npu.config.custom_config"\n[model]\nname = "deepseek_v32"\n'
    'converters = ["npu_dsa", "npu_rms_norm"]\n[parallelism]\ncontext_parallel_degree = 4\nenable_custom_context_parallel = true\n',
    '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[optimizer]\nname = "AdamW"\nlr = 8e-4\neps = 1e-8\n'
    '[lr_scheduler]\nwarmup_steps = 200\ndecay_ratio = 0.8\n[activation_checkpoint]\nmode = "selective"\n'
    '[compile]\nenable = false\ncomponents = ["model", "loss"]\n',
)
GROUPS = ("cp", "layout", "collective", "attention", "mask", "model", "data", "experiment", "launch")
PLACES = {
    "layout": "layout@cp.layout",
    "collective": "collective@cp.steps.to_heads",
    "attention": "attention@cp.steps.attend",
}
VALUES = (
    *(
        "0",
        "-1",
        "1e400",
        "nan",
        "-inf",
        "null",
        "~",
        "true",
        "''",
        "[]",
        "{}",
        "???",
        "2.5",
        "1_0",
        "0x10",
        "1e3",
        "'\\0'",
        "\\x00",
    ),
    *(
        "9" * 30,
        "9" * 5000,
        "-" + "9" * 20,
        "2147483648",
        "9223372036854775808",
        "1000000000000",
        "1e12",
        "[[[[[[1]]]]]]",
    ),
    *(
        "${cp}",
        "${nope}",
        "${oc.env:HOME}",
        "${oc.decode:'[1,2]'}",
        "${now:%Y}",
        "${hydra:runtime.cwd}",
        "${..degree}",
        "${titan}",
    ),
    *(
        "../../../etc/passwd",
        "/dev/zero",
        "/dev/stdin",
        "a" * 300,
        "a/" * 3000,
        "é",
        "\u0430ttend",
        "\u202eevil",
        "\x1b[2J",
        "a\tb",
    ),
    *(
        "evil",
        "evil.Callback",
        "os.system",
        "__import__('evil')",
        "!!python/name:evil.Callback",
        "*a",
        "&a 1",
        "|",
        ">",
        "@",
        "`",
        "%",
    ),
    *(
        "heads",
        "sequence",
        "q",
        "[q,k,v,out]",
        "[q, q]",
        "zigzag",
        "balanced",
        "ulysses",
        "llama3",
        "671B",
        "dense",
        "undo",
        "causal",
    ),
)
LINES = (
    "titan: {experimental: {custom_import: evil}}",
    "titan: {job: {custom_config_module: evil}}",
    "translate: {trust_modules: true}",
    "hydra: {callbacks: {x: {_target_: evil.Callback}}}",
    "hydra: {job_logging: {handlers: {x: {(): evil.Callback}}}}",
    "hydra: {job: {env_set: {PYTHONSTARTUP: evil.py}}}",
    "hydra: {launcher: {_target_: evil.Callback}}",
    "x: !!python/object/apply:os.system ['touch canary']",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b, *b]",
    "a: &a {b: *a}",
    "<<: {name: other}",
    "defaults: [x]",
    "defaults: [_self_, {override /cp: ring}]",
    "_target_: evil.Callback",
    "? [1, 2]\n: 3",
    "a: ${b}${b}\nb: ${c}${c}\nc: ${a}",
    "# @package _global_",
    "mode: train",
    "---\na: 1",
    "\t- tab",
)
OF_TOML = (
    '[experimental]\ncustom_import = "evil"',
    '[job]\ncustom_config_module = "evil"',
    '[experimental]\ncustom_args_module = "evil"',
    '[model]\nconverters = ["evil"]',
    'model.name = "evil"',
    "[[training]]\nsteps = 1",
    "a = " + "[" * 300 + "]" * 300,
    "[" + ".".join("a" * 200) + "]",
    "x = 1979-05-27T07:32:00Z",
    'x = """\nopen',
    "translate.trust_modules = true",
    '"quo.ted" = 1',
    "steps = 1\nsteps = 2",
)


OF_README = {
    "my/cp/mine.yaml": b"defaults: [allgather_in_ulysses, override /layout@layout: zigzag, _self_]\nname: mine\n",
    "my/experiment/deepseek_v3.yaml": b"# @package _global_\ndefaults: [override /cp: usp, _self_]\ntitan: {training: {steps: 7}}\n",
    "my/deepseek_v3.toml": TOMLS[2].encode(),
}
"""Files that README's command lines name."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a stranger gives the command.

    Args:
        files: name -> content, in the folder that the command is typed in.
        arguments: of the command line.
    """

    files: dict[str, bytes]
    arguments: tuple[str, ...]


def case_of(seed: int) -> Case:
    """The case of a seed, the same on every machine."""
    chance = random.Random(seed)
    files, arguments = (_command_line, _of_yaml, _of_toml)[seed % 3](chance)
    modes = ("mode=explain", "mode=explain", "mode=translate translate.to=toml")
    mode = chance.choice((*modes, "mode=translate") if "a.toml" in files else modes)
    whole = (
        *mode.split(),
        *arguments,
        *mode.split(),
    )  # before what may swallow the next word, and after what may say another
    return Case({"evil.py": EVIL.encode(), **files}, tuple(a.replace("\0", "") for a in whole))


Made = tuple[dict[str, bytes], list[str]]


def _command_line(chance: random.Random) -> Made:
    words = list(chance.choice(command_lines()))
    for _ in range(chance.choice((1, 1, 2))):
        _change_words(words, chance)
    return dict(OF_README), [word for word in words if not _asks_for_code(word)]


def _change_words(words: list[str], chance: random.Random) -> None:
    i, kind = chance.randrange(len(words) + 1), chance.randrange(5)
    near = ("cp.degree=2", "shape.sequence=64", "titan.training.steps=1", "mask.left=3", "cp.recompute=all")
    key = chance.choice([*words, *near]).partition("=")[0]
    if kind == 0 or not words:
        words.insert(i, f"{key}={chance.choice(VALUES)}")
    elif kind == 1:
        words.insert(i, chance.choice(("+", "++", "~", "--", "-", "+cp.steps.x=")) + key)
    elif kind == 2:
        words[i % len(words)] = _scrambled(words[i % len(words)], chance)
    elif kind == 3:
        words.pop(i % len(words))
    else:
        words.insert(i, chance.choice(words))


def _asks_for_code(word: str) -> bool:
    """What is typed is asked for."""
    return "trust_modules" in word or ("evil" in word and re.search("custom|hydra|import", word) is not None)


def _of_yaml(chance: random.Random) -> Made:
    group = chance.choice(GROUPS)
    text = chance.choice(sorted((ROOT / "conf" / group).glob("*.yaml"))).read_text(encoding="utf-8")
    made = _changed(text, LINES, chance)
    options = [f"{PLACES.get(group, group)}=x", *(["cp=usp"] * (chance.random() < 0.2 and group != "cp"))]
    return {f"my/{group}/x.yaml": made}, ["--config-dir", "my", *options]


def _of_toml(chance: random.Random) -> Made:
    more = [f"titan.training.steps={chance.choice(VALUES)}"] * (chance.random() < 0.2)
    out = ["out=x.yaml"] * (chance.random() < 0.3)
    return {"a.toml": _changed(chance.choice(TOMLS), OF_TOML, chance)}, ["toml=a.toml", *more, *out]


def _changed(text: str, more: Sequence[str], chance: random.Random) -> bytes:
    """A text with some lines, values, letters or bytes changed."""
    lines = text.splitlines()
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        i = chance.randrange(len(lines)) if lines else 0
        line = lines[i] if lines else ""
        parts = re.split(r"([:=] *)", line, maxsplit=1)
        kind = chance.randrange(7)
        if kind == 0 and len(parts) == 3:
            lines[i] = parts[0] + parts[1] + chance.choice(VALUES)
        elif kind == 1:
            lines.insert(i, chance.choice(more))
        elif kind == 2 and lines:
            lines[i] = _scrambled(line, chance)
        elif kind == 3 and lines:
            lines.pop(i)
        elif kind == 4 and lines:
            lines.insert(chance.randrange(len(lines)), line)
        elif kind == 5 and lines:
            lines[i] = " " * chance.randrange(5) + line.lstrip()
        elif kind == 6:
            lines.append(chance.choice(more))
    raw = bytearray("\n".join(lines).encode() + b"\n")
    for _ in range(chance.randint(1, 3) if chance.random() < 0.15 else 0):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    return bytes(raw)


def _scrambled(word: str, chance: random.Random) -> str:
    i, letters = chance.randrange(len(word) + 1), "=,[]{}()'\"$:.~+-@/\\ \t\né0xZ#&*!%"
    return chance.choice(
        (word[:i] + chance.choice(letters) + word[i:], word[:i] + word[i + 1 :], word[:i], word[i:] + word[:i])
    )


def command_lines() -> list[list[str]]:
    """What README types, without its mode and without files that it does not ship."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [shlex.split(line, comments=True) for line in re.findall(r"^python launch\.py (.*)$", text, re.MULTILINE)]
    return [[word for word in words if not word.startswith("mode=")] for words in found]
