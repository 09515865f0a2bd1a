"""Engines on real gloo ranks: plans that differ, tokens put back, gradients summed once, and backward after the exit."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cp_engine
from cp_engine.errors import CPError
from tests.helpers import varied
from tests.on_ranks import EXCHANGE, GATHER, QKV, Toy, assert_in_step, mesh_of, planned_traffic


def other_plan(preset: str) -> str:
    with pytest.raises(CPError) as caught:
        cp_engine.compile(
            preset, mesh=mesh_of(dist.get_world_size()), sequence=32 + dist.get_rank() // 3, heads=4, head_dim=16
        )
    assert_in_step()
    return str(caught.value)


def test_ranks_with_different_plans_all_get_the_same_error_naming_the_key(four):
    (text,) = set(four.run(other_plan, GATHER))
    assert "shape.sequence  differs between ranks" in text and "rank 3  33" in text


def whole_and_back(order: str) -> None:
    engine = cp_engine.compile(
        GATHER,
        mesh=mesh_of(dist.get_world_size()),
        sequence=31,
        heads=4,
        head_dim=16,
        overrides=[f"layout@cp.layout={order}"],
    )
    x = torch.arange(31.0).expand(3, 31).clone().requires_grad_()
    labels = torch.arange(31).expand(3, 31)
    mine, mine_too = engine.shard(x, labels)
    assert torch.equal(mine.long(), mine_too)
    together = engine.unshard(mine)
    assert torch.equal(together, x)
    assert torch.equal(engine.unshard(mine_too.T, dim=0), labels.T)
    weight = torch.randn(3, 31, generator=torch.Generator().manual_seed(0))
    (together * weight).sum().backward()  # the same loss on every rank
    expected = torch.zeros_like(x)
    held = list(engine.plan.entry.sequence[engine.rank])
    expected[:, held] = weight[:, held] * dist.get_world_size()
    torch.testing.assert_close(x.grad, expected)
    engine.close()


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_unshard_puts_tokens_back_and_its_gradient_is_the_sum_over_ranks(ranks, order):
    ranks.run(whole_and_back, order)


def half_gradients_of_unshard() -> None:
    """256 + 1 + 1 + 1 is 256 when it is rounded to bfloat16 after each addition, and 260 when it is rounded once."""
    engine = cp_engine.compile(GATHER, mesh=mesh_of(4), sequence=31, heads=4, head_dim=16)
    mine = engine.shard(torch.zeros(1, 31, dtype=torch.bfloat16)).requires_grad_()
    upstream = torch.full((1, 31), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
    engine.unshard(mine).backward(upstream)
    assert mine.grad.dtype == torch.bfloat16 and torch.equal(mine.grad, torch.full_like(mine, 260.0))
    engine.close()


def test_gradients_of_half_types_are_summed_in_float32(four):
    four.run(half_gradients_of_unshard)


def toy_gradients(cp: Mapping[str, object]) -> None:
    tokens = torch.randint(50, (3, 31), generator=torch.Generator().manual_seed(1))
    positions, labels = torch.arange(31).expand(3, 31), tokens.roll(-1, 1)
    model, plain = Toy().double(), Toy().double()
    torch.nn.functional.cross_entropy(plain(tokens, positions).flatten(0, 1), labels.flatten()).backward()
    engine = cp_engine.compile(
        cp, mesh=mesh_of(dist.get_world_size()), sequence=31, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64
    )
    with engine.context(model):
        mine, mine_labels, mine_positions = engine.shard(tokens, labels, positions)
        logits = model(mine, mine_positions)
        loss = (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine_labels.flatten(), reduction="sum")
            / labels.numel()
        )
        loss.backward()
    engine.sum_gradients(model)
    for (name, p), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-11, atol=1e-13, msg=name)
    with pytest.raises(cp_engine.CPError, match="summed"):
        engine.sum_gradients(model)
    model.zero_grad()
    engine.close()


@pytest.mark.parametrize("preset", QKV)
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "balanced"])
def test_parameter_gradients_are_those_of_one_process_and_are_summed_once(ranks, preset, order):
    ranks.run(toy_gradients, varied(preset, len(ranks.processes), order=order))


def gradient_on_one_rank() -> None:
    """A parameter that only the first rank's tokens reach, as an expert's weight can be."""
    rank = dist.get_rank()
    engine = cp_engine.compile(
        GATHER, mesh=mesh_of(dist.get_world_size()), sequence=31, heads=4, kv_heads=2, head_dim=8
    )
    model = Toy()
    model.extra = torch.nn.Parameter(torch.ones(3))
    tokens, positions = torch.zeros(1, 31, dtype=torch.long), torch.arange(31).expand(1, 31)
    with engine.context(model):
        loss = model(*engine.shard(tokens, positions)).sum()
        (loss + 2 * model.extra.sum() if rank == 0 else loss).backward()
    assert (model.extra.grad is None) == (rank != 0)
    engine.sum_gradients(model)
    assert torch.equal(model.extra.grad, torch.full((3,), 2.0))
    engine.close()


def test_a_gradient_that_one_rank_has_reaches_all(two):
    two.run(gradient_on_one_rank)


def already_reduced(wrapper: str) -> None:
    size = dist.get_world_size()
    mesh = mesh_of(size)
    engine = cp_engine.compile(GATHER, mesh=mesh, sequence=31, heads=4, kv_heads=2, head_dim=8)
    model: torch.nn.Module = Toy()
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(cp_engine.CPError, match="already"):
        engine.sum_gradients(model)
    engine.close()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_sum_gradients_is_refused_where_a_wrapper_reduces_over_the_cp_ranks(four, wrapper):
    four.run(already_reduced, wrapper)


def two_models() -> None:
    """Model A over pairs, model B over all four, nested."""
    a = cp_engine.compile(GATHER, mesh=mesh_of(2), sequence=30, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    b = cp_engine.compile(EXCHANGE, mesh=mesh_of(4), sequence=31, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    first, second = Toy().double(), Toy().double()
    tokens = torch.randint(50, (1, 31), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(31).expand(1, 31)
    wanted = Toy().double()(tokens, positions), Toy().double()(tokens[:, :30], positions[:, :30])
    with a.context(first), b.context(second):
        got_a = a.unshard(first(*a.shard(tokens[:, :30], positions[:, :30])))
        got_b = b.unshard(second(*b.shard(tokens, positions)))
    torch.testing.assert_close(got_a, wanted[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(got_b, wanted[0], rtol=0, atol=1e-12)
    a.close()
    b.close()


def test_two_models_with_two_presets_and_groups_live_side_by_side(four):
    four.run(two_models)


def recompute_after_exit(cp: Mapping[str, object], reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    tokens = torch.randint(50, (2, 31), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(31).expand(2, 31)
    sizes = {"batch": 2, "sequence": 31, "heads": 4, "kv_heads": 2, "head_dim": 8}
    engine = cp_engine.compile(cp, mesh=mesh_of(dist.get_world_size()), **sizes, dtype=torch.float64)
    gradients, traffic = [], [(0, 0)]
    for inside in (True, False):
        model = Toy().double()
        x, p = engine.shard(tokens, positions)

        def block(e: Tensor, model: Toy = model) -> Tensor:
            q, k, v = (f(e).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (model.q, model.k, model.v))
            return model.head(model.attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

        with engine.context(model):
            loss = checkpoint(block, model.embed(x) + model.position(p), use_reentrant=reentrant).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        traffic.append((engine.bytes_sent, engine.collectives))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    (forward, hops), (backward, hops_back) = planned_traffic(engine.plan, engine.rank)
    engine.close()
    whole = 2 if engine.plan.recompute == "all" else 1  # forward passes of the composition in a step
    steps = [(b - a, m - n) for (a, n), (b, m) in pairwise(traffic)]
    assert steps == [(whole * forward + backward, whole * hops + hops_back)] * 2


@pytest.mark.parametrize("preset", QKV)
@pytest.mark.parametrize(("reentrant", "recompute"), [(True, "all"), (False, "all"), (False, "skip_attention")])
def test_backward_after_the_exit_recomputes_with_the_plan_of_its_forward(four, preset, reentrant, recompute):
    four.run(recompute_after_exit, varied(preset, 4, recompute=recompute), reentrant)
