"""Ascend's sparse operators as this project calls them, held against torch operations in float64; and each call broken once, to be seen."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from cp_engine.algebra.index_set import IndexSet, Run
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.config.compose import compose
from cp_engine.config.composition import plan_from_config
from cp_engine.errors import KernelError
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import attention_mode
from cp_engine.kernels.ascend.stand_in import stand_in
from cp_engine.kernels.sparse import npu, torch_ops
from cp_engine.kernels.sparse.npu import NPUSparse
from cp_engine.kernels.sparse.torch_ops import Attended, Given, Index
from cp_engine.kernels.sparse.visibility import Sight
from cp_engine.runtime import devices

TOKENS, SELECTED, TAKEN = 48, 16, 1024
SCALE = 576**-0.5
patch = pytest.MonkeyPatch
Arguments = dict[str, object]


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    with stand_in():
        yield


@dataclass(frozen=True, slots=True)
class Numbers:
    """What both sides are given, as of one rank of four in zigzag order, whose keys came rank by rank."""

    sight: Sight
    index: Index
    q: Tensor
    latent: Tensor
    rope: Tensor
    dout: Tensor


def numbers(dtype: torch.dtype) -> Numbers:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    dealt = [Run(start, 6) for rank in range(4) for start in (6 * rank, 42 - 6 * rank)]
    queries, keys = IndexSet(tuple(dealt[2:4]), TOKENS), IndexSet(tuple(dealt), TOKENS)
    rows = queries.count
    return Numbers(
        Sight(queries, keys, mask_of("causal", TOKENS)),
        Index(random(2, 1, rows, 8 * 128), random(2, 1, TOKENS, 128), random(2, 1, rows, 8)),
        random(2, 32, rows, 576),
        random(2, 1, TOKENS, 512),
        random(2, 1, TOKENS, 64),
        random(2, 32, rows, 512),
    )


def computed(kernel: object, given: Numbers) -> dict[str, Tensor]:
    """The three steps of a rank, forward and backward: by torch operations (the module) or by Ascend's (the kernel)."""
    k: NPUSparse = kernel  # type: ignore[assignment]  # the module has the same functions
    topk = k.select(given.index, given.sight, SELECTED)
    attending = Given(given.q, given.latent, given.rope, topk)
    out, lse = k.attend(attending, given.sight, SCALE)
    dq, dlatent, drope = k.attend_backward(given.dout, attending, out, lse, given.sight, SCALE)
    padded = torch.cat((topk, topk.new_full((*topk.shape[:3], TAKEN - SELECTED), -1)), 3)  # the loss takes no fewer
    attended = Attended(given.q, attending.keys(given.sight), lse, SCALE)
    loss, grads = k.learn(given.index, padded, given.sight, attended)
    found = {"topk": topk, "out": out, "lse": lse, "dq": dq, "dkv_latent": dlatent, "dk_rope": drope}
    return {**found, "loss": loss, "dq_index": grads.q, "dk_index": grads.k, "dw_index": grads.w}


@lru_cache(maxsize=2)
def wanted(dtype: torch.dtype) -> Mapping[str, Tensor]:
    n = numbers(dtype)
    wide = Numbers(
        n.sight, Index(*(x.double() for x in n.index)), *(x.double() for x in (n.q, n.latent, n.rope, n.dout))
    )
    return computed(torch_ops, wide)


def wrong(dtype: torch.dtype) -> set[str]:
    """What Ascend's operators give otherwise; `refused` where a rule of theirs stops them."""
    bound = verify.ROUNDINGS * torch.finfo(dtype).eps / 2
    try:
        found = computed(NPUSparse(), numbers(dtype))
    except KernelError:
        return {"refused"}
    names = set()
    for name, right in wanted(dtype).items():
        mine = found[name].double()
        if name == "topk":
            is_good = torch.equal(mine.sort(-1).values, right.double().sort(-1).values)
        elif name in ("lse", "loss"):
            is_good = torch.allclose(mine, right, rtol=verify.SINGLE_BOUND, atol=verify.SINGLE_BOUND)
        else:
            is_good = verify.block_error(mine, right, (2, 3) if "q" in name or "w" in name else (3,)) <= bound
        names |= set() if is_good else {name}
    return names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_give_what_torch_operations_give(dtype: torch.dtype) -> None:
    assert wrong(dtype) == set()


SELECT, ATTEND, BACKWARD, LEARN = "indexer", "attention", "attention_grad", "kl_loss"
ATTENDING = (ATTEND, BACKWARD, LEARN)
"""All that know the scores of attention: told the same, none of them can tell from another's statistics."""
Which = str | tuple[str, ...]


def told(operator: Which, change: Callable[[Arguments], Arguments]) -> Callable[[patch], None]:
    """The operator is told something else."""
    return lambda monkeypatch: _wrap(monkeypatch, operator, change, lambda result: result)


def given_back(operator: Which, change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Callable[[patch], None]:
    """What the operator gives is taken as something else."""
    return lambda monkeypatch: _wrap(monkeypatch, operator, lambda named: {}, change)


def _wrap(
    monkeypatch: patch,
    operator: Which,
    change: Callable[[Arguments], Arguments],
    result: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
) -> None:
    registered = npu.registered

    def wrapped(name: str) -> Callable[..., tuple[Tensor, ...]]:
        if not name.endswith(operator):
            return registered(name)
        return lambda **named: result(registered(name)(**{**named, **change(named)}))

    monkeypatch.setattr(npu, "registered", wrapped)


def scaled(name: str, factor: float) -> Callable[[Arguments], Arguments]:
    return lambda named: {name: named[name] * factor}  # type: ignore[operator]


def replaced(place: int, make: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda result: tuple(make(x) if i == place else x for i, x in enumerate(result))


def of_module(name: str, make: Callable[[Callable[..., object]], Callable[..., object]]) -> Callable[[patch], None]:
    return lambda monkeypatch: monkeypatch.setattr(npu, name, make(getattr(npu, name)))


def one_key_less(runs: Callable[..., Iterator[npu._Run]]) -> Callable[..., object]:
    return lambda sight: (run._replace(keys=run.keys - 1) for run in runs(sight))


def first_run_alone(runs: Callable[..., Iterator[npu._Run]]) -> Callable[..., object]:
    return lambda sight: list(runs(sight))[:1]


def last_key_dropped(named: Arguments) -> Tensor:
    """Of one query."""
    indices = named["sparse_indices"]
    assert isinstance(indices, Tensor)
    changed = indices.clone()
    changed[1, -1, 0, int((changed[1, -1, 0] >= 0).sum()) - 1] = -1
    return changed


def rolled(named: Arguments) -> Tensor:
    rope = named["key_rope"]
    assert isinstance(rope, Tensor)
    return rope.roll(1, 1)


BROKEN: dict[str, tuple[Callable[[patch], None], set[str]]] = {
    "dk + dv is dk": (given_back(BACKWARD, replaced(2, torch.zeros_like)), {"dkv_latent"}),
    "dk + dv is dv": (given_back(BACKWARD, replaced(1, torch.zeros_like)), {"dkv_latent"}),
    "the rotary part of dq is missing": (given_back(BACKWARD, replaced(3, torch.zeros_like)), {"dq"}),
    "the rotary part of dk has the wrong sign": (given_back(BACKWARD, replaced(4, torch.neg)), {"dk_rope"}),
    "the scale is doubled": (told(ATTENDING, scaled("scale_value", 2.0)), {"out", "lse", "dq", "loss"}),
    "the scale is doubled in backward": (told(BACKWARD, scaled("scale_value", 2.0)), {"refused"}),
    "the scale is doubled in the loss": (told(LEARN, scaled("scale_value", 2.0)), {"refused"}),
    "lse is the maximum": (given_back(ATTEND, replaced(2, torch.ones_like)), {"refused"}),
    "lse is of twice the sum": (given_back(ATTEND, replaced(2, lambda x: x * 2.0)), {"lse", "dq", "dkv_latent"}),
    "weights of the indexer have the wrong sign": (told(SELECT, scaled("weights", -1.0)), {"topk", "out"}),
    "weights of the loss have the wrong sign": (told(LEARN, scaled("weights", -1.0)), {"loss", "dw_index"}),
    "the loss is scaled": (given_back(LEARN, replaced(3, lambda x: x / 32)), {"loss"}),
    "the gradient of the index keys is scaled": (given_back(LEARN, replaced(1, lambda x: x * 2)), {"dk_index"}),
    "a selected key is dropped": (told(ATTENDING, lambda n: {"sparse_indices": last_key_dropped(n)}), {"out", "lse"}),
    "rotary keys are of the token before": (told(ATTENDING, lambda n: {"key_rope": rolled(n)}), {"out", "lse"}),
    "the last key of a run is left out": (of_module("_runs", one_key_less), {"topk", "out"}),
    "the second run of a rank is left out": (of_module("_runs", first_run_alone), {"topk", "out", "dq"}),
    "selected keys are one place off": (of_module("_indices", lambda f: lambda *a: f(*a) + 1), {"refused"}),  # type: ignore[operator]
    "the mask is left out": (told(SELECT, lambda n: {"sparse_mode": 0}), {"topk"}),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_call_is_seen(fault: str, monkeypatch: patch) -> None:
    break_it, expected = BROKEN[fault]
    break_it(monkeypatch)
    assert expected <= wrong(torch.bfloat16)


@pytest.mark.long  # each operator is held against torch operations above
def test_verify_holds_the_operators_against_torch_operations(monkeypatch: patch) -> None:
    taken = attention_mode.TAKEN
    plan = plan_from_config(compose("dsa"), shape=taken, mask={"kind": "causal"})
    tensors, dout = verify.inputs_of(plan)
    given = {n: x.bfloat16().double() for n, x in tensors.items()}, dout.bfloat16().double()
    right = verify.by_torch(plan)(*given)

    def rows() -> set[str]:
        found = verify.runner(plan, devices.REHEARSAL)(*given)
        return {row.name for row in verify.differences(plan, found, right) if not row.is_good}

    assert set(right) >= {"out", "dq", "dq_index", "dkv_latent", "dk_rope", "indexer_loss", "topk"}
    assert rows() == set()
    with monkeypatch.context() as broken:
        for fault in ("dk + dv is dk", "the rotary part of dq is missing", "the loss is scaled"):
            BROKEN[fault][0](broken)
        assert rows() == {"dkv_latent", "dq", "indexer_loss"}
    BROKEN["the scale is doubled"][0](monkeypatch)
    assert rows() >= {"out", "dq", "dkv_latent", "dk_rope", "indexer_loss"}
