"""Mask: what a query may see, as disjoint bands in global positions.

A band `(q0, q1, k0, k1, low, high)` makes key k visible to query q iff q is in q0..q1, k in k0..k1 and low <= q - k <= high.

    full      one band, no bound on q - k          causal    one band, 0 <= q - k
    window    one band, 0 <= q - k < size          document  one causal (or full) square per document
    prefix    keys of the prefix for all queries, the rest causal
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm

from cp_engine.errors import ConfigError, Problem, suggest
from cp_engine.index_set import IndexSet, Run, intersect, run, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Key k is visible to query q iff `q0 <= q < q1`, `k0 <= k < k1` and `low <= q - k <= high`."""

    q0: int
    q1: int
    k0: int
    k1: int
    low: int
    high: int

    def queries(self) -> Run:
        return Run(self.q0, self.q1 - self.q0)

    def keys(self) -> Run:
        return Run(self.k0, self.k1 - self.k0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Disjoint bands over one sequence.

    Args:
        kind: what a user calls it, such as `causal`.
        bands: disjoint bands; an empty list sees nothing.
        size: global sequence length in tokens.
    """

    kind: str
    bands: tuple[Band, ...]
    size: int

    def count(self, queries: IndexSet, keys: IndexSet) -> int:
        """How many (query, key) pairs are visible between two sets of positions."""
        return sum(
            _at_most(q, k, band.high) - _at_most(q, k, band.low - 1)
            for band in self.bands
            for q in _clip(queries, band.queries())
            for k in _clip(keys, band.keys())
        )

    def needed(self, queries: IndexSet, keys: IndexSet) -> IndexSet:
        """The keys that at least one of the queries may see, as whole ranges between the first and last key of each run."""
        wanted: list[Run] = []
        for band in self.bands:
            for q in _clip(queries, band.queries()):
                low, high = max(band.k0, q.start - band.high), min(band.k1, q.last - band.low + 1)
                if low < high:
                    wanted.append(Run(low, high - low))
        runs: list[Run] = []
        for w in sorted(wanted, key=lambda r: r.start):  # overlapping wishes become one range
            if runs and w.start <= runs[-1].stop:
                runs[-1] = Run(runs[-1].start, max(runs[-1].stop, w.stop) - runs[-1].start)
            else:
                runs.append(w)
        held = [(w, k) for k in keys.runs for w in runs]
        return union([IndexSet((c,), self.size) for w, k in held if (c := intersect(w, k)) is not None], self.size)


def _clip(positions: IndexSet, window: Run) -> list[Run]:
    if not window.count:
        return []
    return [c for r in positions.runs if (c := intersect(r, window)) is not None]


def _at_most(q: Run, k: Run, bound: int) -> int:
    """How many pairs of members have q - k <= bound; closed form, no loop over positions."""
    if k.step == 1:
        # query i sees the keys from q_i - bound on: clip(top - q.step * i, 0, k.count) of them
        top = k.stop - (q.start - bound)
        whole = min(q.count, max(0, (top - k.count) // q.step + 1))
        some = min(q.count, max(whole, -(-top // q.step)))
        return whole * k.count + (some - whole) * top - q.step * (some * (some - 1) - whole * (whole - 1)) // 2
    if q.step == 1:  # the same pairs, mirrored: -k - -q <= bound
        return _at_most(run(-k.last, k.count, k.step), Run(-q.last, q.count), bound)
    if q.step == k.step:
        return _at_most(Run(0, q.count), Run(0, k.count), (bound - q.start + k.start) // q.step)
    step = lcm(q.step, k.step)
    return sum(_at_most(a, b, bound) for a in classes(q, step) for b in classes(k, step))


def classes(r: Run, step: int) -> list[Run]:
    """A run as interleaved runs of a coarser step."""
    n = step // r.step
    return [run(r.start + i * r.step, (r.count - i - 1) // n + 1, step) for i in range(min(n, r.count))]


# ------------------------------------------------------------------ the kinds that a configuration can name
Fields = Mapping[str, object]


def _full(size: int, fields: Fields) -> list[Band]:
    return [Band(q0=0, q1=size, k0=0, k1=size, low=-size, high=size)]


def _causal(size: int, fields: Fields) -> list[Band]:
    return [Band(q0=0, q1=size, k0=0, k1=size, low=0, high=size)]


def _window(size: int, fields: Fields) -> list[Band]:
    left, right = _tokens(fields, "left"), _tokens(fields, "right")
    return [Band(q0=0, q1=size, k0=0, k1=size, low=-right, high=left)]


def _prefix(size: int, fields: Fields) -> list[Band]:
    length = min(_tokens(fields, "length"), size)
    return [
        Band(q0=0, q1=size, k0=0, k1=length, low=-size, high=size),
        Band(q0=length, q1=size, k0=length, k1=size, low=0, high=size),
    ]


def _document(size: int, fields: Fields) -> list[Band]:
    starts = fields["starts"]
    if not isinstance(starts, list | tuple) or not all(isinstance(s, int) and not isinstance(s, bool) for s in starts):
        raise _Wrong("starts", f"must be a list of positions, not {starts!r}")
    ends = [*starts[1:], size]
    if not starts or starts[0] != 0 or any(a >= b for a, b in zip(starts, ends, strict=True)):
        raise _Wrong("starts", f"must begin with 0 and rise below the sequence length {size}, not {list(starts)}")
    high = _tokens(fields, "left") if fields.get("left") is not None else size
    return [Band(q0=a, q1=b, k0=a, k1=b, low=0, high=high) for a, b in zip(starts, ends, strict=True)]


class _Wrong(Exception):
    """A field's value, with the bare reason."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what)
        self.field = field


def _tokens(fields: Fields, name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Wrong(name, f"must be a whole number of tokens, 0 or more, not {value!r}")
    return value


KINDS: Mapping[str, tuple[Callable[[int, Fields], list[Band]], tuple[str, ...], tuple[str, ...]]] = {
    "full": (_full, (), ()),
    "causal": (_causal, (), ()),
    "window": (_window, ("left", "right"), ()),
    "prefix": (_prefix, ("length",), ()),
    "document": (_document, ("starts",), ("left",)),
}
"""kind -> (its bands, required fields, optional fields)."""


def mask_of(config: "Mask | str | Mapping[str, object]", size: int) -> Mask:
    """The mask that a configuration names.

    Args:
        config: `"causal"`, or a mapping with `kind` and the fields of that kind.
        size: global sequence length in tokens.

    Returns:
        The mask over `size` positions.

    Raises:
        ConfigError: an unknown kind or field, or a value the kind does not allow.
    """
    if isinstance(config, Mask):
        return config
    fields = dict(config) if isinstance(config, Mapping) else {"kind": config}
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        near = suggest(str(kind), KINDS)
        raise ConfigError(
            [
                Problem(
                    key="mask.kind",
                    what=f"{kind!r} is not a mask",
                    details=(("allowed", ", ".join(KINDS)),),
                    tries=(f"mask={near or 'causal'}",),
                )
            ]
        )
    bands, required, optional = KINDS[kind]
    unknown = [name for name in fields if name not in (*required, *optional)]
    missing = [name for name in required if fields.get(name) is None]
    allowed = ", ".join((*required, *optional)) or "no fields"
    problems = [
        Problem(key=f"mask.{n}", what=f"unknown field of {kind}", details=(("allowed", allowed),)) for n in unknown
    ]
    problems += [Problem(key=f"mask.{n}", what=f"{kind} needs it", tries=(f"+mask.{n}=...",)) for n in missing]
    if not problems:
        try:
            return Mask(
                kind=kind, bands=tuple(b for b in bands(size, fields) if b.q1 > b.q0 and b.k1 > b.k0), size=size
            )
        except _Wrong as error:
            problems.append(Problem(key=f"mask.{error.field}", what=str(error)))
    raise ConfigError(problems)
