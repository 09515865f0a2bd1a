"""The kinds of masks by their names in the configuration, and the bands that each consists of."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce

from cp_engine.algebra.band import Band, fewest
from cp_engine.algebra.mask import Mask, intersection
from cp_engine.errors import ConfigError, Problem, suggest

MOST_BLOCKS = 2**16


Fields = Mapping[str, object]


def _full(size: int, fields: Fields) -> list[Band]:
    return [Band(q0=0, q1=size, k0=0, k1=size, low=-size, high=size)]


def _causal(size: int, fields: Fields) -> list[Band]:
    return [Band(q0=0, q1=size, k0=0, k1=size, low=0, high=size)]


def _window(size: int, fields: Fields) -> list[Band]:
    left, right = (min(_tokens(fields, name), size) for name in ("left", "right"))
    return [Band(q0=0, q1=size, k0=0, k1=size, low=-right, high=left)]


def _prefix(size: int, fields: Fields) -> list[Band]:
    length = min(_tokens(fields, "length"), size)
    return [
        Band(q0=0, q1=size, k0=0, k1=length, low=-size, high=size),
        Band(q0=length, q1=size, k0=length, k1=size, low=0, high=size),
    ]


def _document(size: int, fields: Fields) -> list[Band]:
    starts = fields.get("starts")
    if starts is None:  # from each call: planned as one document
        starts = [0]
    if not isinstance(starts, list | tuple) or not all(isinstance(s, int) and not isinstance(s, bool) for s in starts):
        raise _Wrong("starts", f"must be a list of positions, not {starts!r}")
    ends = [*starts[1:], size]
    if not starts or starts[0] != 0 or any(a >= b for a, b in zip(starts, ends, strict=True)):
        raise _Wrong("starts", f"must begin with 0 and rise below the sequence length {size}, not {list(starts)}")
    left, right = (size if fields.get(name) is None else min(_tokens(fields, name), size) for name in ("left", "right"))
    if _is_causal(fields):
        if fields.get("right"):
            raise _Wrong("right", f"is {right}, and a causal document shows no later key", ("mask.causal=false",))
        right = 0
    return [Band(q0=a, q1=b, k0=a, k1=b, low=-right, high=left) for a, b in zip(starts, ends, strict=True)]


def _block(size: int, fields: Fields) -> list[Band]:
    length = _tokens(fields, "size")
    if not length:
        raise _Wrong("size", "must be at least 1 token")
    if size > length * MOST_BLOCKS:
        raise _Wrong("size", f"is {length}, and cuts {size} positions into more than {MOST_BLOCKS:,} blocks")
    ends = [min(start + length, size) for start in range(0, size, length)]
    low = 0 if _is_causal(fields) else -size
    return [Band(q0=a, q1=b, k0=a, k1=b, low=low, high=size) for a, b in zip([0, *ends], ends, strict=False)]


def _both(size: int, fields: Fields) -> list[Band]:
    parts, masks, problems = _parts(fields), [], list[Problem]()
    if not parts:
        raise _Wrong("of", f"must be a list of masks, each with its kind, not {fields['of']!r}")
    for i, part in enumerate(parts):
        try:
            masks.append(mask_of(part, size))
        except ConfigError as error:
            problems += [replace(p, key=f"mask.of[{i}]{p.key[len('mask') :]}", tries=()) for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return list(reduce(intersection, masks).bands)


def _parts(fields: Fields) -> list[Fields]:
    """The masks that `both` lists; none where it is no such list."""
    of = fields.get("of")
    parts = [part for part in of if isinstance(part, Mapping)] if isinstance(of, list | tuple) else []
    return parts if isinstance(of, list | tuple) and len(parts) == len(of) else []


class _Wrong(Exception):
    """A field's value, with the bare reason."""

    def __init__(self, field: str, what: str, tries: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.field, self.tries = field, tries


def _tokens(fields: Fields, name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Wrong(name, f"must be a whole number of tokens, 0 or more, not {value!r}")
    return value


def _is_causal(fields: Fields) -> bool:
    value = fields.get("causal", True)
    if not isinstance(value, bool):
        raise _Wrong("causal", f"must be true or false, not {value!r}")
    return value


KINDS: Mapping[str, tuple[Callable[[int, Fields], list[Band]], tuple[str, ...], tuple[str, ...]]] = {
    "full": (_full, (), ()),
    "causal": (_causal, (), ()),
    "window": (_window, ("left", "right"), ()),
    "prefix": (_prefix, ("length",), ()),
    "document": (_document, (), ("starts", "causal", "left", "right")),
    "block": (_block, ("size",), ("causal",)),
    "both": (_both, ("of",), ()),
}
"""kind -> (its bands, required fields, optional fields)."""


EXAMPLES: Mapping[str, str] = {
    **dict.fromkeys(("left", "length", "size"), "64"),
    "right": "0",
    "of": "[{kind: causal}, {kind: block, size: 64}]",
}
"""A value of each field that a kind requires."""


Config = Mask | str | Mapping[str, object]


def is_from_call(config: Config) -> bool:
    """Whether a mask leaves its document boundaries to each call: `document` without `starts`, also as a part of `both`."""
    fields = {"kind": config} if isinstance(config, Mask | str) else config
    is_open = fields.get("kind") == "document" and fields.get("starts") is None
    return is_open or any(is_from_call(part) for part in _parts(fields))


def mask_of(config: Config, size: int) -> Mask:
    """The mask that a configuration names.

    A mask from each call (`is_from_call`) is planned as one document that fills the sequence. Every division into documents
    shows a part of those pairs, so what the plan proves (each visible key is there, once) holds for it; work, and the keys that
    `only: visible` fetches, are upper bounds.

    Args:
        config: `"causal"`, or a mapping with `kind` and the fields of that kind.
        size: global sequence length in tokens.

    Returns:
        The mask over `size` positions.

    Raises:
        ConfigError: an unknown kind or field, or a value the kind does not allow.
    """
    if not isinstance(size, int) or size < 0:
        raise ConfigError([Problem(key="mask", what=f"is over {size!r} positions, and a number of them is needed")])
    if isinstance(config, Mask):
        if config.size != size:
            what = f"is over {config.size} positions, and the sequence has {size}"
            raise ConfigError([Problem(key="mask", what=what)])
        return config
    fields = dict(config) if isinstance(config, Mapping) else {"kind": config}
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        near = suggest(str(kind), KINDS)
        allowed = ("allowed", ", ".join(KINDS))
        what, tries = f"{kind!r} is not a mask", (f"mask={near or 'causal'}",)
        raise ConfigError([Problem(key="mask.kind", what=what, details=(allowed,), tries=tries)])
    bands, required, optional = KINDS[kind]
    allowed = ("allowed", ", ".join((*required, *optional)) or "no fields")
    unknown = [name for name in fields if name not in (*required, *optional)]
    missing = [name for name in required if fields.get(name) in (None, "???")]
    problems = []
    for n in unknown:
        near = suggest(str(n), (*required, *optional))  # YAML has keys that are no text
        tries = (f"'~mask.{n}' ++mask.{near}={fields[n]}",) if near else (f"'~mask.{n}'",)
        problems.append(Problem(key=f"mask.{n}", what=f"unknown field of {kind}", details=(allowed,), tries=tries))
    for n in missing:
        tries = (f"'{'' if n in fields else '+'}mask.{n}={EXAMPLES[n]}'",)
        problems.append(Problem(key=f"mask.{n}", what=f"{kind} needs it", tries=tries))
    if not problems:
        try:
            found = fewest(bands(size, fields), size)  # before the title: it refuses parts that have none
            return Mask(kind=_title(kind, fields), bands=found, size=size)
        except _Wrong as error:
            problems.append(Problem(key=f"mask.{error.field}", what=str(error), tries=error.tries))
    raise ConfigError(problems)


def _title(kind: str, fields: Fields) -> str:
    if kind == "both":
        return " and ".join(_title(str(part["kind"]), part) for part in _parts(fields))
    told = ["from each call"] if is_from_call({**fields, "kind": kind}) else []
    for name, value in fields.items():
        if name == "starts" and value is not None:
            assert isinstance(value, list | tuple)
            told.append(f"{len(value)} document{'s' * (len(value) != 1)}")
        elif name == "causal":
            told += [] if value else ["not causal"]
        elif name != "kind" and value is not None:
            told.append(f"{name} {value}")
    return f"{kind} ({', '.join(told)})" if told else kind
