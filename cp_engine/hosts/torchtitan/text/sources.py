"""Where documents come from; nothing here imports torch, so the launcher can check it before a process starts."""

import ast
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from cp_engine.config.bounded import decoded, reason_of, require_regular
from cp_engine.errors import ConfigError, Problem, Reason, suggest

KEYS = ("path", "field", "dataset", "cut", "whole")
TEXTS = {"c4": None, "c4_test": "tests/assets/c4_test", "c4_validation": None}
"""torchtitan 0.2.2's data sets of text, and where one lies if nothing else is said; None: read over the network."""
TOKENIZER = "./tests/assets/tokenizer"
"""torchtitan's default for model.hf_assets_path."""
SUFFIX = ".jsonl"
MOST_BYTES = 2**26
"""Of a record."""
TOKENS = ("input", "labels", "positions")
"""What every batch holds, or may hold, for its tokens."""


def check(config: Mapping[str, object]) -> list[Problem]:
    """Everything that is wrong with the `data` group.

    Args:
        config: the whole composed configuration.

    Returns:
        One problem per fault; empty when training can read its text.
    """
    data = config.get("data")
    if not isinstance(data, Mapping):
        return [Problem(key="data", what=f"must be a mapping, not {type(data).__name__}", tries=("data=builtin",))]
    problems = []
    for key in data:
        if key not in KEYS:
            near = suggest(str(key), KEYS)
            allowed = (("allowed", ", ".join(sorted(KEYS))),)
            problems.append(
                Problem(key=f"data.{key}", what="unknown key", details=allowed, tries=(near,) if near else ())
            )
    problems += _companion_problems(data)
    path, field = data.get("path"), data.get("field", "text")
    if data.get("dataset") is not None:
        return [*problems, *_check_dataset(config, str(data["dataset"]))]
    if not isinstance(field, str) or not field:
        problems.append(
            Problem(key="data.field", what=f"must be the name of a field, not {field!r}", tries=("data.field=text",))
        )
    elif path is None:
        if field != "text":
            what = f"is {field}, and the built-in text has no fields"
            tries = ("data.path=<folder of .jsonl files>", "data.field=text")
            problems.append(Problem(key="data.field", what=what, tries=tries))
        if not _library_files():
            what = f"the built-in text needs the standard library's sources, and {_library()} has none"
            problems.append(Problem(key="data.path", what=what, tries=("data.path=<folder of .jsonl files>",)))
    elif not isinstance(path, str):
        problems.append(Problem(key="data.path", what=f"must be a folder or null, not {path!r}"))
    else:
        problems += _check_folder(Path(path), field)
    return problems


def _companion_problems(data: Mapping[str, object]) -> Iterator[Problem]:
    """Companions are declared once, and only those that a loader can bring."""
    named = {key: data[key] for key in ("cut", "whole") if data.get(key)}
    lists = {key: [str(n) for n in names] for key, names in named.items() if isinstance(names, list)}
    for key in named.keys() - lists.keys():
        yield Problem(
            key=f"data.{key}", what=f"must be a list of names, not {data[key]!r}", tries=(f"'data.{key}=[]'",)
        )
    for name in set(lists.get("cut", [])) & set(lists.get("whole", [])):
        yield Problem(key="data.whole", what=f"names {name}, and so does data.cut", tries=("'data.whole=[]'",))
    for key, names in lists.items():
        tokens = [name for name in names if name in TOKENS]
        if tokens:
            what = f"names {', '.join(tokens)}, which {'is' if len(tokens) == 1 else 'are'} always cut with the tokens"
            yield Problem(key=f"data.{key}", what=what, tries=(f"'data.{key}=[]'",))
        if data.get("dataset") is None:
            what = f"names {', '.join(names)}, and text that is read as bytes has no companions"
            rule = ("rule", "companions come from a data set of torchtitan's, or of a module: data.dataset=...")
            yield Problem(key=f"data.{key}", what=what, details=(rule,), tries=(f"'data.{key}=[]'",))


def dataset_of(config: Mapping[str, object]) -> str | None:
    """The name of torchtitan's data set, where the text is one."""
    data = config.get("data")
    name = data.get("dataset") if isinstance(data, Mapping) else None
    return None if name is None else str(name)


def place_of(config: Mapping[str, object], name: str, key: str) -> str | None:
    """Where a data set or its tokenizer lies, as `datasets` says."""
    places = config.get("datasets")
    place = places.get(name) if isinstance(places, Mapping) else None
    value = place.get(key) if isinstance(place, Mapping) else None
    return None if value is None else str(value)


def tokenizer_problems(config: Mapping[str, object]) -> Iterator[Problem]:
    """torchtitan has one place for tokenizer and checkpoint; two that differ cannot both be meant."""
    name, assets = dataset_of(config), _titan(config, "model.hf_assets_path")
    tokenizer = None if name is None else place_of(config, name, "tokenizer")
    if assets is not None and tokenizer is not None and assets != tokenizer:
        key, what = f"datasets.{name}.tokenizer", f"is {tokenizer}, and titan.model.hf_assets_path is {assets}"
        rule = ("rule", "torchtitan reads tokenizer and Hugging Face checkpoint from one folder")
        yield Problem(key=key, what=what, details=(rule,), tries=(f"titan.model.hf_assets_path={tokenizer}",))


def _check_dataset(config: Mapping[str, object], name: str) -> Iterator[Problem]:
    """torchtitan's own data sets are local folders, or names on the network; its tokenizers are folders."""
    yield from tokenizer_problems(config)
    keys = ("experimental.custom_import", "job.custom_config_module")
    may_register = any(_titan(config, key) for key in keys)
    if name not in TEXTS and not may_register:
        rule = ("rule", "another is registered by a module: titan.experimental.custom_import=...")
        what = f"'{name}' is not a text of torchtitan 0.2.2"
        details, tries = (("allowed", ", ".join(TEXTS)), rule), ("data=c4_test", "data=builtin")
        yield Problem(key="data.dataset", what=what, details=details, tries=tries)
    path = place_of(config, name, "path") or TEXTS.get(name)
    is_local = path is not None and (path.startswith((".", "/", "~")) or path == TEXTS.get(name))
    if is_local and not os.path.exists(str(path)):
        tries = (f"datasets.{name}.path=/my/{name}", "data=builtin")
        yield Problem(key=f"datasets.{name}.path", what=f"there is no {path}, from {Path.cwd()}", tries=tries)
    assets = _titan(config, "model.hf_assets_path") or place_of(config, name, "tokenizer") or TOKENIZER
    if not os.path.isdir(str(assets)):
        what = f"there is no folder {assets}, from {Path.cwd()}"
        rule = ("rule", "it holds the files of a Hugging Face tokenizer, such as tokenizer.json")
        tries = (f"datasets.{name}.tokenizer=/my/tokenizer", "data=builtin")
        yield Problem(key=f"datasets.{name}.tokenizer", what=what, details=(rule,), tries=tries)


def _titan(config: Mapping[str, object], key: str) -> object:
    node: object = config.get("titan")
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def documents(path: str | None, field: str, skip: int = 0) -> Iterator[str]:
    """The documents of one pass over the text, in an order that depends on nothing but the files.

    Args:
        path: a folder of JSON-lines files, or None for the built-in text: one document per module of the
            standard library, made of its docstrings.
        field: the field of a record that holds the text.
        skip: how many documents to leave out at the start.

    Returns:
        An iterator over the texts.

    Raises:
        ConfigError: a record that is not an object with a text field.
    """
    if path is None:
        for file in _library_files()[skip:]:
            yield _docstrings(file)
        return
    for file in _record_files(Path(path)):
        for number, line in _lines(file):
            if not line.strip():
                continue
            if skip:
                skip -= 1
                continue
            problem = _record_problem(file, number, line, field)
            if problem:
                raise ConfigError([problem], "data")
            yield json.loads(line)[field]


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a file; one that is longer than a record may be comes cut, and is the last."""
    with file.open("rb") as lines:
        for number in count(1):
            line = lines.readline(MOST_BYTES + 1)
            if not line:
                return
            yield number, line
            if len(line) > MOST_BYTES:
                return


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library_files() -> list[Path]:
    # Modules and package roots only: a megabyte of docstrings, and one file is parsed only when its turn comes.
    return sorted(_library().glob("*.py")) + sorted(_library().glob("*/__init__.py"))


def _docstrings(file: Path) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(file.read_bytes()))
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return "\n\n".join(text for text in texts if text)


def _record_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix == SUFFIX)


def _check_folder(folder: Path, field: str) -> list[Problem]:
    if not os.path.isdir(folder):
        what = f"{folder} is a file, not a folder" if os.path.exists(folder) else f"there is no folder {folder}"
        return [Problem(key="data.path", what=what, tries=("data.path=null",))]
    try:
        files = _record_files(folder)
    except OSError as error:
        return [Problem(key="data.path", what=f"{folder} cannot be read: {error.strerror}", tries=("data.path=null",))]
    if not files:
        return [Problem(key="data.path", what=f"{folder} has no {SUFFIX} file", tries=("data.path=null",))]
    problems, records = [], 0
    for file in files:  # the first record of each file; later ones are checked as they are read
        try:
            require_regular(file)
            first = next(((n, line) for n, line in _lines(file) if line.strip()), None)
        except (OSError, Reason) as error:
            problems.append(Problem(key="data.path", what=f"{file} {reason_of(error)}"))
            records += 1
            continue
        if first is None:
            continue
        records += 1
        problem = _record_problem(file, first[0], first[1], field)
        if problem:
            problems.append(problem)
    if not records:
        problems.append(Problem(key="data.path", what=f"the {len(files)} {SUFFIX} files in {folder} hold no record"))
    return problems


def _record_problem(file: Path, number: int, line: bytes, field: str) -> Problem | None:
    at = (("at", f"{file}:{number}"),)
    try:
        if len(line) > MOST_BYTES:
            raise Reason(f"longer than {MOST_BYTES // 2**20} MiB, the most that a record has")
        record = json.loads(decoded(line))
    except (ValueError, RecursionError, Reason) as error:  # such as a number of a million digits
        said = error.msg if isinstance(error, json.JSONDecodeError) else error
        return Problem(key="data.path", what=f"not a JSON record: {said}", details=at)
    if not isinstance(record, dict):
        return Problem(key="data.path", what=f"a record must be an object, not {type(record).__name__}", details=at)
    if field not in record:
        texts = [name for name, value in record.items() if isinstance(value, str)]
        details = (*at, ("allowed", ", ".join(texts) or "no field of this record holds text"))
        return Problem(
            key="data.field",
            what=f"no field {field!r} in a record",
            details=details,
            tries=tuple(f"data.field={name}" for name in texts[:1]),
        )
    if not isinstance(record[field], str):
        return Problem(
            key="data.field", what=f"field {field!r} holds {type(record[field]).__name__}, not text", details=at
        )
    try:
        record[field].encode()
    except UnicodeEncodeError as error:
        what = f"field {field!r} is not text: {error.reason} at letter {error.start}"
        return Problem(key="data.field", what=what, details=at)
    return None
