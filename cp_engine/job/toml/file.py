"""A TOML file with the line of each key, and every fault of its text at once."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cp_engine.config.bounded import MOST_DEPTH, bytes_of, decoded, reason_of, require_bounded
from cp_engine.errors import SHOWN, ConfigError, Problem, Reason

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
HEADER = re.compile(rf"\s*(\[\[?)\s*({NAME}(?:\s*\.\s*{NAME})*)\s*\]\]?\s*(?:#.*)?$")
PAIR = re.compile(rf"\s*({NAME}(?:\s*\.\s*{NAME})*)\s*=")
LONG_KEY = re.compile(rf"(?<![\w-])(?:{NAME}[ \t]*\.[ \t]*){{{MOST_DEPTH}}}")
"""Reading a key takes the square of its parts, in memory too."""
AT_LINE = re.compile(r" \(at line (\d+), column \d+\)")
MARKS = {  # what a file begins with -> (its encoding, what takes it off)
    b"\xef\xbb\xbf": ("UTF-8", r"LC_ALL=C sed -i '1s/^\xEF\xBB\xBF//' {file}"),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > utf8.toml"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8 {file} > utf8.toml"),
}
MULTILINE = ('"""', "'''")


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlFile:
    """What a TOML file says.

    Args:
        path: as the user named it.
        values: sections and their keys, as parsed.
        lines: the line of each dotted key, counted from 1.
        problems: faults of the text; what is on their lines is not in `values`.
    """

    path: str
    values: Mapping[str, object]
    lines: Mapping[str, int]
    problems: tuple[Problem, ...] = ()

    def at(self, key: str) -> str:
        """Where a key is written, for a reader."""
        return f"line {self.lines[key]}" if key in self.lines else "in the file"


def read_toml(path: str) -> TomlFile:
    """Reads a file; a fault on a line of its own does not hide the rest.

    Args:
        path: of the file, from the folder that the command runs in.

    Raises:
        ConfigError: there is no such file, it cannot be read, it is empty, or nothing can be told about the rest of it.
    """
    text = _text(path)
    if match := LONG_KEY.search(text):
        number = text.count("\n", 0, match.start()) + 1
        what = f"has a key of more than {MOST_DEPTH} parts"
        raise ConfigError([Problem(key=f"line {number}", what=what)], source=path)
    lines = text.replace("\r\n", "\n").split("\n")  # and no other sign ends a line
    first: dict[str, int] = {}
    problems = []
    for key, number, is_section in list(_keys(lines)):
        if key in first and not is_section:
            what = f"is written twice, in line {first[key]} and in line {number}"
            problems.append(Problem(key=key, what=what, details=(("rule", "a TOML key has one value"),)))
            lines[number - 1] = ""
        first.setdefault(key, number)
    while True:
        try:
            values = tomllib.loads("\n".join(lines) + "\n")
            require_bounded(values)
            return TomlFile(path=path, values=values, lines=first, problems=tuple(problems))
        except tomllib.TOMLDecodeError as error:
            problem, at = _fault(error, lines)
            problems.append(problem)
            if at is None or len(problems) > SHOWN:  # what follows may belong to another section
                raise ConfigError(problems, source=path) from error
            lines[at - 1] = ""
        except (ValueError, RecursionError, Reason) as error:
            what = str(error) if isinstance(error, Reason) else f"cannot be parsed: {type(error).__name__}: {error}"
            raise ConfigError([*problems, Problem(key="toml", what=what)], source=path) from error


def _text(path: str) -> str:
    def refused(what: str, *details: tuple[str, str], tries: tuple[str, ...] = ()) -> ConfigError:
        return ConfigError([Problem(key="toml", what=what, details=details, tries=tries)], source=path)

    if Path(path).suffix == ".py":
        rule = (
            "rule",
            "torchtitan's Python configurations (0.3 and later) are programs; only TOML files are translated",
        )
        raise refused("is a Python file", rule)
    if any("\ud800" <= letter <= "\udfff" for letter in path):
        raise ConfigError([Problem(key="toml", what=f"{path!r} is not the name of a file in UTF-8")])
    try:
        raw = bytes_of(path)
        if (mark := next((mark for mark in MARKS if raw.startswith(mark)), None)) is not None:
            name, line = MARKS[mark]
            rule = ("rule", "TOML is UTF-8 without a mark, and torchtitan does not read a file that begins with one")
            raise refused(
                f"begins with the byte-order mark of {name}", rule, tries=(line.format(file=shlex.quote(path)),)
            )
        text = decoded(raw)
    except FileNotFoundError as error:
        raise refused(f"there is no file {path}", ("from", str(Path.cwd()))) from error
    except (OSError, Reason) as error:
        raise refused(reason_of(error)) from error
    if not any(line.strip() and not line.strip().startswith("#") for line in text.splitlines()):
        raise refused("is empty", ("rule", "a file of a training names at least its model"))
    return text


def _keys(lines: list[str]) -> Iterator[tuple[str, int, bool]]:
    """(dotted key, line, whether it is a section); keys inside arrays of tables are left out."""
    section: str | None = ""
    closing, depth = "", 0
    for number, line in enumerate(lines, 1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if depth > 0:  # inside an array
            depth += _opened(line)
            continue
        if header := HEADER.match(line):
            section = _dotted(header.group(2)) + "." if header.group(1) == "[" else None
            yield _dotted(header.group(2)), number, True
        elif pair := PAIR.match(line):
            if section is not None:
                yield section + _dotted(pair.group(1)), number, False
            closing = next((mark for mark in MULTILINE if line.count(mark) == 1), "")
            depth = 0 if closing else _opened(line[pair.end() :])


def _opened(line: str) -> int:
    """How many arrays and tables a line opens and does not close."""
    code = re.sub(r"""\"(?:[^"\\]|\\.)*(?:\"|$)|'[^']*(?:'|$)|#.*""", "", line)
    return sum(code.count(a) - code.count(b) for a, b in ("[]", "{}"))


def _dotted(name: str) -> str:
    """A name as the tables have it; a quoted part with a dot stays quoted, since it is one name."""
    parts = [part.strip() for part in re.findall(NAME, name)]
    return ".".join(part if "." in part else part.strip("\"'") for part in parts)


def _fault(error: tomllib.TOMLDecodeError, lines: list[str]) -> tuple[Problem, int | None]:
    """The problem, and the line if it can be left out without changing what the others mean."""
    match = AT_LINE.search(str(error))
    number = int(match.group(1)) if match else None
    key = f"line {number}" if number is not None else "toml"
    if number is None or number > len(lines):
        return Problem(key=key, what=f"is not TOML: {error}"), None
    said = AT_LINE.sub("", str(error))
    what = f"is not TOML: {said[:1].lower()}{said[1:]}"
    if twice := re.fullmatch(r"Cannot declare \((.*?),?\) twice", said):
        section = ".".join(re.findall(r"'([^']*)'", twice.group(1)))
        what = f"begins the section [{section}] a second time; one place has all its keys"
    problem = Problem(key=key, what=what, details=(("text", lines[number - 1].strip()),))
    line = lines[number - 1]
    is_alone = PAIR.match(line) and not any(mark in line for mark in MULTILINE) and line.count("[") == line.count("]")
    return problem, number if is_alone else None
