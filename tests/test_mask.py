"""Masks as bands, against a predicate on single positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_engine import reference
from cp_engine.errors import ConfigError
from cp_engine.index_set import IndexSet
from cp_engine.mask import mask_of
from tests.helpers import index_sets, masks, sees

SIZE = 40
Config = dict[str, object]


@given(masks(SIZE))
def test_bands_see_each_visible_pair_in_one_band(config: Config) -> None:
    bands = mask_of(config, SIZE).bands
    for q in range(SIZE):
        for k in range(SIZE):
            inside = [b for b in bands if b.q0 <= q < b.q1 and b.k0 <= k < b.k1 and b.low <= q - k <= b.high]
            assert len(inside) == sees(config, q, k), (q, k)


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


@given(masks(SIZE), st.integers(0, SIZE - 1), st.integers(1, SIZE))
def test_needed_is_exact_for_neighbouring_queries(config: Config, start: int, count: int) -> None:
    queries = IndexSet((mask_of("full", SIZE).bands[0].queries().part(start, min(count, SIZE - start)),), SIZE)
    everything = IndexSet((mask_of("full", SIZE).bands[0].keys(),), SIZE)
    wanted = [k for k in range(SIZE) if any(sees(config, q, k) for q in queries)]
    assert list(mask_of(config, SIZE).needed(queries, everything)) == wanted


@given(masks(12))
def test_reference_sees_the_same_pairs(config: Config) -> None:
    wanted = torch.tensor([[sees(config, q, k) for k in range(12)] for q in range(12)])
    assert torch.equal(reference.visible(config, 12), wanted)


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
    ],
)
def test_mask_that_is_no_mask_is_refused(config: Config | str, keys: list[str], fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mask_of(config, 5)
    found = [p.key for p in caught.value.problems]
    assert found in (keys, ["mask"])
    assert fact in str(caught.value)


def test_misspelt_mask_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        mask_of("casual", 5)
    assert caught.value.problems[0].tries == ("mask=causal",)
