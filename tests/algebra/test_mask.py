"""Masks as bands, against a predicate on single positions."""

import shlex
from collections.abc import Mapping

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet, Run, run, shares, whole
from cp_engine.algebra.mask import Mask, intersection
from cp_engine.algebra.mask_kinds import KINDS, is_from_call, mask_of
from cp_engine.config.compose import conf_dir
from cp_engine.errors import ConfigError
from cp_engine.job.verify import reference
from tests.helpers import index_sets

SIZE = 40
Config = dict[str, object]
ORDERS = ("contiguous", "zigzag", "striped")


@st.composite
def masks(draw: st.DrawFn, size: int = 40, depth: int = 1) -> Config:
    """Any mask over a dim, as configuration."""
    kinds = ("full", "causal", "window", "prefix", "document", "block", "both")
    kind = draw(st.sampled_from(kinds if depth else kinds[:-1]))
    tokens = st.integers(0, size + 2)
    if kind == "window":
        return {"kind": kind, "left": draw(tokens), "right": draw(tokens)}
    if kind == "prefix":
        return {"kind": kind, "length": draw(tokens)}
    if kind == "document":
        starts = [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=6)))] if size > 1 else [0]
        is_causal = draw(st.booleans())
        bounds = {"left": draw(st.none() | tokens), "right": None if is_causal else draw(st.none() | tokens)}
        return {"kind": kind, "starts": starts, "causal": is_causal, **bounds}
    if kind == "block":
        return {"kind": kind, "size": draw(st.integers(1, size + 2)), "causal": draw(st.booleans())}
    if kind == "both":
        return {"kind": kind, "of": draw(st.lists(masks(size, depth - 1), min_size=1, max_size=3))}
    return {"kind": kind}


def sees(mask: Mapping[str, object], q: int, k: int) -> bool:
    """Whether query q may see key k, said once more, position by position."""
    causal = k <= q or not mask.get("causal", True)
    match mask:
        case {"kind": "full"}:
            return True
        case {"kind": "causal"}:
            return k <= q
        case {"kind": "window", "left": int(left), "right": int(right)}:
            return q - left <= k <= q + right
        case {"kind": "prefix", "length": int(length)}:
            return k <= q or k < length
        case {"kind": "document", "starts": list(starts)}:
            left, right = mask.get("left"), mask.get("right")
            near = (left is None or q - k <= left) and (right is None or k - q <= right)
            return sum(s <= q for s in starts) == sum(s <= k for s in starts) and causal and near
        case {"kind": "block", "size": int(length)}:
            return q // length == k // length and causal
        case {"kind": "both", "of": list(parts)}:
            return all(sees(part, q, k) for part in parts)
    raise AssertionError(mask)


def dense(config: Mapping[str, object], size: int) -> Tensor:
    """What `sees` says of every pair, bool [size, size]."""
    return torch.tensor([[sees(config, q, k) for k in range(size)] for q in range(size)])


def drawn_by(mask: Mask) -> Tensor:
    """The pairs that the bands of a mask show, bool [size, size]; every band adds 1, so that none may overlap."""
    q, k = torch.arange(mask.size)[:, None], torch.arange(mask.size)
    times = torch.zeros(mask.size, mask.size, dtype=torch.int64)
    for b in mask.bands:
        times += (b.q0 <= q) & (q < b.q1) & (b.k0 <= k) & (k < b.k1) & (b.low <= q - k) & (q - k <= b.high)
    assert times.max() <= 1
    return times == 1


def dealt(order: str, size: int, ranks: int) -> list[IndexSet]:
    """The positions of each rank, remainders included."""
    if order == "striped":
        return [IndexSet((run(r, len(range(r, size, ranks)), ranks),) if r < size else (), size) for r in range(ranks)]
    chunks = [Run(*share) for share in shares(size, ranks * (1 + (order == "zigzag")))]
    pairs = [(chunks[r], chunks[-1 - r]) if order == "zigzag" else (chunks[r],) for r in range(ranks)]
    return [IndexSet(tuple(r for r in pair if r.count), size) for pair in pairs]


@given(masks(SIZE))
def test_bands_see_each_visible_pair_in_one_band(config: Config) -> None:
    assert torch.equal(drawn_by(mask_of(config, SIZE)), dense(config, SIZE))


@given(masks(SIZE), index_sets(SIZE), index_sets(SIZE))
def test_count_any_queries_and_keys(config: Config, queries: IndexSet, keys: IndexSet) -> None:
    wanted = sum(sees(config, q, k) for q in queries for k in keys)
    assert mask_of(config, SIZE).count(queries, keys) == wanted


@given(masks(SIZE), index_sets(SIZE), index_sets(SIZE))
def test_needed_holds_every_visible_key_and_nothing_that_is_not_held(
    config: Config, queries: IndexSet, keys: IndexSet
) -> None:
    needed = list(mask_of(config, SIZE).needed(queries, keys))
    visible = {k for k in keys if any(sees(config, q, k) for q in queries)}
    assert len(set(needed)) == len(needed)
    assert visible <= set(needed) <= set(keys)


@given(masks(31), st.integers(1, 7), st.sampled_from(ORDERS), st.sampled_from(ORDERS))
def test_count_and_needed_of_what_ranks_hold(config: Config, ranks: int, of_queries: str, of_keys: str) -> None:
    mask, visible = mask_of(config, 31), dense(config, 31)
    for queries in dealt(of_queries, 31, ranks):
        rows = visible[list(queries)]
        for keys in dealt(of_keys, 31, ranks):
            assert mask.count(queries, keys) == int(rows[:, list(keys)].sum())
            wanted, needed = {k for k in keys if rows[:, k].any()}, list(mask.needed(queries, keys))
            assert len(set(needed)) == len(needed)
            assert wanted <= set(needed) <= set(keys)
            if of_queries != "striped":  # between the stripes of a narrow window lie keys that nobody sees
                assert wanted == set(needed)


@given(masks(SIZE), st.integers(0, SIZE - 1), st.integers(1, SIZE))
def test_needed_is_exact_for_neighbouring_queries(config: Config, start: int, count: int) -> None:
    queries = IndexSet((mask_of("full", SIZE).bands[0].queries().part(start, min(count, SIZE - start)),), SIZE)
    everything = IndexSet((mask_of("full", SIZE).bands[0].keys(),), SIZE)
    wanted = [k for k in range(SIZE) if any(sees(config, q, k) for q in queries)]
    assert list(mask_of(config, SIZE).needed(queries, everything)) == wanted


@given(masks(12))
def test_reference_sees_the_same_pairs(config: Config) -> None:
    assert torch.equal(reference.visible(config, 12), dense(config, 12))


@given(masks(24), masks(24))
def test_intersection_shows_what_both_show(a: Config, b: Config) -> None:
    both = intersection(mask_of(a, 24), mask_of(b, 24))
    assert torch.equal(drawn_by(both), dense(a, 24) & dense(b, 24))
    assert both.kind == f"{mask_of(a, 24).kind} and {mask_of(b, 24).kind}"


@given(masks(5), masks(5))
def test_masks_are_the_same_iff_they_show_the_same(a: Config, b: Config) -> None:
    same = torch.equal(dense(a, 5), dense(b, 5))
    assert mask_of(a, 5).same_as(mask_of(b, 5)) == mask_of(b, 5).same_as(mask_of(a, 5)) == same


CAUSAL: Config = {"kind": "causal"}
SAME_BANDS: list[tuple[Config, Config]] = [
    (CAUSAL, {"kind": "window", "left": 11, "right": 0}),
    (CAUSAL, {"kind": "prefix", "length": 1}),
    (CAUSAL, {"kind": "document", "starts": [0]}),
    (CAUSAL, {"kind": "block", "size": 12}),
    (CAUSAL, {"kind": "both", "of": [{"kind": "prefix", "length": 7}, CAUSAL]}),
    ({"kind": "full"}, {"kind": "prefix", "length": 12}),
    ({"kind": "full"}, {"kind": "document", "starts": [0], "causal": False, "right": 11}),
    ({"kind": "window", "left": 0, "right": 0}, {"kind": "document", "starts": list(range(12))}),
    ({"kind": "window", "left": 0, "right": 0}, {"kind": "block", "size": 1, "causal": False}),
    ({"kind": "block", "size": 4}, {"kind": "document", "starts": [0, 4, 8]}),
    (
        {"kind": "document", "starts": [0, 5, 6], "left": 2},
        {"kind": "both", "of": [{"kind": "window", "left": 2, "right": 9}, {"kind": "document", "starts": [0, 5, 6]}]},
    ),
    (
        {"kind": "document", "starts": [0, 4, 6, 8]},
        {"kind": "both", "of": [CAUSAL, {"kind": "block", "size": 4}, {"kind": "document", "starts": [0, 6, 8]}]},
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("a", "b"), SAME_BANDS)
def test_other_words_for_a_mask_give_its_bands(a: Config, b: Config) -> None:
    assert torch.equal(dense(a, 12), dense(b, 12))
    assert mask_of(a, 12).bands == mask_of(b, 12).bands
    assert mask_of(a, 12).same_as(mask_of(b, 12))


@pytest.mark.quick
def test_masks_of_other_sizes_or_with_as_many_other_pairs_differ() -> None:
    assert not mask_of("causal", 12).same_as(mask_of("causal", 13))
    left, right = ({"kind": "window", "left": a, "right": b} for a, b in ((2, 1), (1, 2)))
    assert int(dense(left, 12).sum()) == int(dense(right, 12).sum())
    assert not mask_of(left, 12).same_as(mask_of(right, 12))


def test_a_thousand_documents_in_blocks_stay_a_thousand_bands() -> None:
    """Only documents and blocks that meet are looked at, and no band is split that need not be."""
    documents = mask_of({"kind": "document", "starts": list(range(0, 100_000, 100))}, 100_000)
    blocks = mask_of({"kind": "block", "size": 1000, "causal": False}, 100_000)
    assert intersection(documents, blocks).bands == documents.bands == intersection(blocks, documents).bands
    assert len(documents.bands) == 1000
    assert documents.count(whole(100_000), whole(100_000)) == 1000 * 100 * 101 // 2


@pytest.mark.parametrize(
    ("config", "is_open", "kind", "planned"),
    [
        ("document", True, "document (from each call)", CAUSAL),
        ({"kind": "document", "starts": None}, True, "document (from each call)", CAUSAL),
        ({"kind": "document", "causal": False}, True, "document (from each call, not causal)", {"kind": "full"}),
        (
            {"kind": "document", "starts": None, "causal": False, "left": 3, "right": 2},
            True,
            "document (from each call, not causal, left 3, right 2)",
            {"kind": "window", "left": 3, "right": 2},
        ),
        (
            {"kind": "both", "of": [{"kind": "document"}, {"kind": "block", "size": 4, "causal": False}]},
            True,
            "document (from each call) and block (size 4, not causal)",
            {"kind": "block", "size": 4},
        ),
        (
            {"kind": "document", "starts": [0, 4]},
            False,
            "document (2 documents)",
            {"kind": "document", "starts": [0, 4]},
        ),
        (CAUSAL, False, "causal", CAUSAL),
        ("full", False, "full", {"kind": "full"}),
    ],
)
def test_documents_of_each_call_are_planned_as_one_document(
    config: Config | str, is_open: bool, kind: str, planned: Config
) -> None:
    assert is_from_call(config) == is_open
    mask = mask_of(config, 12)
    assert mask.kind == kind
    assert mask.same_as(mask_of(planned, 12))
    assert torch.equal(
        reference.visible(config if isinstance(config, dict) else {"kind": config}, 12), dense(planned, 12)
    )
    assert not is_from_call(mask)


@pytest.mark.parametrize("kind", KINDS)
def test_file_of_a_kind_holds_its_fields_and_its_launch_line_works(kind: str) -> None:
    path = conf_dir() / "mask" / f"{kind}.yaml"
    written = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(written, dict)
    _, required, optional = KINDS[kind]
    assert list(written) == ["kind", *required, *optional]
    launched = [line.partition("python launch.py ")[2] for line in path.read_text().splitlines() if "launch.py" in line]
    overrides = shlex.split(launched[0]) if launched else [f"mask={kind}"]
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides).mask, resolve=True)
    assert isinstance(config, dict) and config["kind"] == kind
    assert torch.equal(drawn_by(mask_of(config, 256)), reference.visible(config, 256))


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"kind": "full"}, ["11111", "11111", "11111", "11111", "11111"]),
        ({"kind": "causal"}, ["1....", "11...", "111..", "1111.", "11111"]),
        ({"kind": "window", "left": 1, "right": 0}, ["1....", "11...", ".11..", "..11.", "...11"]),
        ({"kind": "window", "left": 0, "right": 2}, ["111..", ".111.", "..111", "...11", "....1"]),
        ({"kind": "prefix", "length": 3}, ["111..", "111..", "111..", "1111.", "11111"]),
        ({"kind": "document", "starts": [0, 2]}, ["1....", "11...", "..1..", "..11.", "..111"]),
        ({"kind": "document", "starts": [0, 2], "left": 1}, ["1....", "11...", "..1..", "..11.", "...11"]),
        ({"kind": "document", "starts": [0, 2], "causal": False}, ["11...", "11...", "..111", "..111", "..111"]),
        (
            {"kind": "document", "starts": [0, 1], "causal": False, "left": 1, "right": 2},
            ["1....", ".111.", ".1111", "..111", "...11"],
        ),
        ({"kind": "document", "starts": [0, 1, 2, 4]}, ["1....", ".1...", "..1..", "..11.", "....1"]),
        ({"kind": "block", "size": 2}, ["1....", "11...", "..1..", "..11.", "....1"]),
        ({"kind": "block", "size": 3, "causal": False}, ["111..", "111..", "111..", "...11", "...11"]),
        (
            {"kind": "both", "of": [{"kind": "block", "size": 3}, {"kind": "window", "left": 1, "right": 4}]},
            ["1....", "11...", ".11..", "...1.", "...11"],
        ),
        (
            {"kind": "both", "of": [{"kind": "document", "starts": [0, 2]}, {"kind": "prefix", "length": 1}]},
            ["1....", "11...", "..1..", "..11.", "..111"],
        ),
    ],
)
def test_mask_as_drawn_by_hand(config: Config, rows: list[str]) -> None:
    drawn = [[c == "1" for c in row] for row in rows]
    mask = mask_of(config, 5)
    one = [IndexSet((mask_of("full", 5).bands[0].keys().part(i, 1),), 5) for i in range(5)]
    assert [[mask.count(q, k) == 1 for k in one] for q in one] == drawn
    assert reference.visible(config, 5).tolist() == drawn


@pytest.mark.parametrize(
    ("config", "keys", "fact"),
    [
        ("casual", ["mask.kind"], "'casual' is not a mask"),
        ({"kind": None}, ["mask.kind"], "None is not a mask"),
        ({"kind": "causal", "left": 3}, ["mask.left"], "unknown field of causal"),
        ({"kind": "window", "left": 3}, ["mask.right"], "window needs it"),
        ({"kind": "window"}, ["mask.left", "mask.right"], "window needs it"),
        ({"kind": "window", "left": -1, "right": 0}, ["mask.left"], "not -1"),
        ({"kind": "window", "left": True, "right": 0}, ["mask.left"], "not True"),
        ({"kind": "prefix", "length": 2.5}, ["mask.length"], "not 2.5"),
        ({"kind": "document", "starts": [1, 2]}, ["mask.starts"], "begin with 0"),
        ({"kind": "document", "starts": [0, 5]}, ["mask.starts"], "sequence length 5"),
        ({"kind": "document", "starts": [0, 3, 3]}, ["mask.starts"], "rise"),
        ({"kind": "document", "starts": []}, ["mask.starts"], "begin with 0"),
        ({"kind": "document", "starts": "0"}, ["mask.starts"], "'0'"),
        ({"kind": "document", "starts": [0, "2"]}, ["mask.starts"], "'2'"),
        ({"kind": "document", "starts": [0], "right": 1}, ["mask.right"], "a causal document shows no later key"),
        ({"kind": "document", "starts": [0], "left": -1}, ["mask.left"], "not -1"),
        ({"kind": "document", "causal": 1}, ["mask.causal"], "true or false, not 1"),
        ({"kind": "block", "size": 0}, ["mask.size"], "at least 1"),
        ({"kind": "block", "size": "???", "causal": True}, ["mask.size"], "block needs it"),
        ({"kind": "both", "of": []}, ["mask.of"], "a list of masks"),
        ({"kind": "both", "of": ["causal"]}, ["mask.of"], "not ['causal']"),
        (
            {"kind": "both", "of": [{"kind": "window", "left": -1, "right": 0}, {"kind": "no"}]},
            ["mask.of[0].left", "mask.of[1].kind"],
            "'no' is not a mask",
        ),
        (mask_of("causal", 4), ["mask"], "is over 4 positions, and the sequence has 5"),
    ],
)
def test_mask_that_is_no_mask_is_refused(config: Config | Mask | str, keys: list[str], fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mask_of(config, 5)
    assert [p.key for p in caught.value.problems] == keys
    assert fact in str(caught.value)


def test_misspelt_mask_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        mask_of("casual", 5)
    assert caught.value.problems[0].tries == ("mask=causal",)


@pytest.mark.parametrize(("config", "line"), [({}, "'+mask.left=64'"), ({"left": "???"}, "'mask.left=64'")])
def test_missing_field_is_added_or_set(config: Config, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mask_of({"kind": "window", "right": 0, **config}, 5)
    assert caught.value.problems[0].tries == (line,)


def test_a_field_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mask\.1  unknown field of prefix"):
        mask_of({"kind": "prefix", 1: 8, "length": 2}, 6)
