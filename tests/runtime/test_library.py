"""The library's entry on one rank: compile, shard, unshard, gradients, and every wrong argument refused by name."""

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

import cp_engine
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.errors import CallError, ConfigError, CPError
from cp_engine.runtime.context import ContextParallel
from cp_engine.runtime.sparse_attention import SparseAttention
from tests.runtime.two_layers import (
    HEAD_DIM,
    HEADS,
    PLAIN,
    SEQUENCE,
    Model,
    assert_same,
    engine,
    expected,
    of_mask,
    qkv,
    results,
    tokens,
)


@pytest.mark.quick
def test_compile_of_one_rank_needs_no_process_group() -> None:
    cp = cp_engine.compile("none", mesh=None, sequence=SEQUENCE, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float64)
    model = Model()
    with cp.context(model):
        found = results(model)
    assert_same(found, results(expected(model, PLAIN)))
    assert not torch.distributed.is_initialized()
    assert (cp.bytes_sent, cp.collectives, cp.plan.degree) == (0, 0, 1)


def test_compile_reports_a_preset_that_does_not_exist() -> None:
    with pytest.raises(CPError, match="there is no preset 'ulyses'") as caught:
        cp_engine.compile("ulyses", mesh=None, sequence=8, heads=2, head_dim=4)
    assert caught.value.problems[0].tries


def test_shard_and_unshard_of_one_rank_are_the_identity() -> None:
    cp, x = engine(1), torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    assert torch.equal(cp.shard(x), x) and torch.equal(cp.unshard(x), x)
    one, two = cp.shard(x, x + 1)
    assert torch.equal(one, x) and torch.equal(two, x + 1)
    assert torch.equal(cp.shard(x.mT, dim=0), x.mT)


def test_shard_of_another_length_is_refused_for_each_tensor() -> None:
    with pytest.raises(CallError) as caught:
        engine(1).shard(torch.ones(2, SEQUENCE), torch.ones(2, 5), torch.ones(2, 6))
    assert [p.key for p in caught.value.problems] == ["shard.tensors[1]", "shard.tensors[2]"]
    assert "5 positions" in str(caught.value) and f"is for {SEQUENCE}" in str(caught.value)


@pytest.mark.quick
def test_gradients_are_summed_once_for_each_step() -> None:
    model, cp = Model(), engine(1)
    for _ in range(2):
        with cp.context(model):
            model(tokens()).sum().backward()
        cp.sum_gradients(model)
        with pytest.raises(CallError, match="summed in this step already"):
            cp.sum_gradients(model)
        model.zero_grad(set_to_none=True)


def rows(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda e: e.call(None, *qkv()[1:]), "call.q  is missing"),
        (lambda e: e.call(qkv()[0].tolist(), *qkv()[1:]), "call.q  is missing"),
        (lambda e: e.call(*(x.to("meta") for x in qkv())), "call.q  is on meta, and the plan runs on cpu"),
        (lambda e: e.call(*qkv(), scale=float("nan")), "call.scale  must be a finite number above 0, not nan"),
        (
            lambda e: e.call(*qkv(), scale=torch.ones((), requires_grad=True)),
            "call.scale  must be a finite number above 0, not Tensor()",
        ),
        (lambda e: e.call(*qkv(), mask=3), "call.mask  must be a mask or its configuration, not 3"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim=9), "shard.tensors[0]  has 2 dims, of which none is 9"),
        (lambda e: e.unshard(rows(SEQUENCE)), "unshard.tensor  has 1 dims, of which none is 1"),
        (lambda e: e.unshard(rows(2, SEQUENCE).to(torch.complex128)), "torch.view_as_real"),
        (lambda e: e.context(None).__enter__(), "context  is given NoneType, which is no module"),
        (lambda e: e.context().__enter__(), "context  is given no module"),
        (lambda e: e.shard(rows(2, SEQUENCE), []), "shard.tensors[1]  is [], and a tensor is needed"),
        (lambda e: e.shard(None), "shard.tensors[0]  is None, and a tensor is needed"),
        (lambda e: e.shard(rows(2, SEQUENCE).numpy()), "try   torch.as_tensor(...)"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim="1"), "dim  is '1', and a number is needed"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim=None), "dim  is None, and a number is needed"),
        (lambda e: e.shard(rows(2, SEQUENCE), dim=True), "dim  is True, and a number is needed"),
        (lambda e: e.unshard([]), "unshard.tensor  is [], and a tensor is needed"),
        (lambda e: e.unshard(rows(2, SEQUENCE), dim=1.0), "dim  is 1.0, and a number is needed"),
        (lambda e: e.call(*qkv(), attn_mask=None), "try       is_causal=True"),
        (lambda e: e.call(*qkv(), causal=True), "call.causal  the attention call carries causal=True"),
        (lambda e: e.call(*qkv(), dropout_p=0.1), "call.dropout_p  is 0.1"),
        (lambda e: e.call(*(torch.tensor(1.0) for _ in range(3))), "call.q  is [], and the plan is for [1,"),
        (lambda e: e.call(qkv()[0].to_sparse(), *qkv()[1:]), "try  q.to_dense()"),
        (lambda e: e.attend(qkv()), "call  is of type list, and a cp_engine.runtime.call.Call is needed"),
        (lambda e: e.sum_gradients(None), "model  is None, and a module is needed"),
        (lambda e: e.sum_gradients(Model().parameters()), "model  is of type generator, and a module is needed"),
        (pickle.dumps, "engine  holds process groups of this process"),
        (deepcopy, "try  cp_engine.compile(...) there"),
        (lambda e: ContextParallel("ulysses"), "plan  is 'ulysses', and a plan is needed"),  # type: ignore[arg-type]
        (lambda e: ContextParallel(e.plan, "cpu"), "mesh  is 'cpu', and a DeviceMesh or None is needed"),  # type: ignore[arg-type]
        (lambda e: ContextParallel(e.plan, None, "gpu"), "device  'gpu' is no type of device"),
        (lambda e: ContextParallel(e.plan, None, None, "gpu"), "kernels  'gpu' is no type of device"),
    ],
)
def test_misuse_of_an_engine_is_refused_by_name(use: Callable[[ContextParallel], object], said: str) -> None:
    with pytest.raises(CallError) as caught:
        use(of_mask("causal"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"overrides": "cp.degree=2"}, "try  overrides=['cp.degree=2']"),
        ({"device": "gpu"}, "device  'gpu' is no type of device"),
        ({"overrides": None}, "overrides  is None, and a list of texts is needed"),
        ({"overrides": [3]}, "overrides  is [3], and a list of texts is needed"),
        ({"config_dir": 3}, "config_dir  is 3, and a folder is needed"),
        ({"mesh": "cp"}, "mesh  is 'cp', and a DeviceMesh or None is needed"),
        ({"mesh": (2,)}, "try  dist.init_device_mesh('cpu', (ranks,), mesh_dim_names=('cp',))"),
        ({"composition": None}, "composition  is None, and the name of a preset, or a mapping is needed"),
        ({"composition": []}, "composition  is [], and the name"),
    ],
)
def test_misuse_of_compile_is_refused_by_name(named: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cp_engine.compile(**{"composition": "none", "mesh": None, "sequence": 8, "heads": 2, "head_dim": 4, **named})
    assert said in str(caught.value)


WRONG: dict[str, tuple[object, ...]] = {
    "sequence": ("512", 0, -1, 1.5, None, True),
    "heads": ("4", 0, None, 2.5),
    "head_dim": ("4", 0, None),
    "kv_heads": ("2", 3, 0, 1.0),
    "v_head_dim": ("x", 0),
    "latent_dim": ("a", -1),
    "rope_dim": (None,),
    "topk": ("3",),
    "index_heads": ("x",),
    "index_dim": (1.5,),
    "batch": ("1", 0, None),
    "dtype": (float, torch.int64, None, torch.complex64),
    "mask": (
        object(),
        3,
        None,
        ["causal"],
        "casual",
        {},
        {"kind": 3},
        {"kind": "window"},
        {1: 2},
        mask_of("causal", 9),
    ),
    "overrides": (3, ["a=b=c"], ["=="], [None], ["cp.degree=x"]),
    "composition": (3, "", {}, {"kind": "x"}, {"name": "x", "mesh": 3, "axes": [3], "order": 3, "steps": 3}),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_argument_of_compile_is_an_error_of_the_engine(name: str) -> None:
    right = {"composition": "none", "mesh": None, "sequence": 8, "heads": 2, "head_dim": 4}
    for value in WRONG[name]:
        with pytest.raises(CPError):
            cp_engine.compile(**{**right, name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda: mask_of("full", "8"),
        lambda: mask_of("full", -1),
        lambda: SparseAttention("3"),
        lambda: SparseAttention(0),
    ],
)
def test_every_wrong_argument_of_masks_and_sparse_attention_is_an_error_of_the_engine(
    make: Callable[[], object],
) -> None:
    with pytest.raises(CPError):
        make()
