"""The reports of docs/reports.md that need ranks of their own: 4 gloo ranks, as one group or as two groups of 2."""

from collections.abc import Callable
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import cp_engine
from cp_engine import Attention, CPError
from cp_engine.algebra.shape import Shape
from cp_engine.config.compose import presets
from cp_engine.job.verify import attention as verify
from cp_engine.job.verify import reference
from cp_engine.runtime.context import ContextParallel
from tests.gloo import World
from tests.helpers import begins_with_latent, shipped, varied
from tests.on_ranks import Toy, assert_in_step, mesh_of

OF_QKV = [p for p in presets() if p != "none" and not begins_with_latent(p)]
IGNORED = -100
LENGTH = 32
degrees = pytest.mark.parametrize("degree", [2, 4])


@cache
def mesh(degree: int) -> DeviceMesh:
    """This rank's group, made once."""
    return mesh_of(degree)


def engine_of(preset: str, degree: int, *, layout: str = "", mask: object = "causal", **sizes: int) -> ContextParallel:
    """An engine in this rank's group, in float64; 4 heads on 2 kv heads and 32 tokens unless sizes say otherwise."""
    sizes = {"sequence": LENGTH, "heads": 4, "kv_heads": 2, "head_dim": 8, **sizes}
    composition = varied(preset, degree, order=layout)
    return cp_engine.compile(composition, mesh=mesh(degree), dtype=torch.float64, mask=mask, **sizes)


# ------------------------------------------------------------------ what is moved
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "batch, heads, sequence": lambda x: x.contiguous(),
    "batch, sequence, heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence, batch, heads": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "every second row": lambda x: torch.stack([x, x + 1.0], 3).flatten(2, 3)[:, :, ::2],
}


def there_and_back(preset: str, degree: int) -> None:
    """Each query sees its own key alone, so that out is v, and the gradient of v is the upstream one.

    Both hold a number of its own in every element: rounded, they say where it comes from, and that it came once. A kernel makes
    the scores in forward and in backward, by two matrix products that may round in other orders, and exp turns what they differ by
    into a relative error: of twice a sum's roundings, each of them of the sum of its terms' sizes.
    """
    own = {"kind": "window", "left": 0, "right": 0}
    for sequence in (16, 19):
        engine = engine_of(preset, degree, mask=own, sequence=sequence, kv_heads=4)
        for batch in (1, 3):
            shape = Shape(
                batch=batch, sequence=sequence, heads=4, kv_heads=4, head_dim=8, v_head_dim=8, dtype="float64"
            )
            q, k, v, _ = verify.inputs(shape)
            terms = float((q * k).abs().sum(3).max()) * 8**-0.5
            bound = (
                2 * (8 + 4) * torch.finfo(torch.float64).eps * max(1.0, terms)
            )  # 4: the scale, exp, log and a division
            v = 1 + torch.arange(v.numel(), dtype=torch.float64).view_as(v)
            whole = (q, k, v, v.flip(0, 1, 2, 3))
            for in_memory in MEMORY.values():
                q, k, v, dout = (in_memory(x) for x in engine.shard(*whole, dim=2))
                v.requires_grad_()
                out = engine.call(q, k, v, mask=own)
                (dv,) = torch.autograd.grad(out, v, dout)
                for found, wanted in ((out, v), (dv, dout)):
                    assert torch.equal(found.round(), wanted)
                    assert float(((found - wanted) / wanted).abs().max()) <= bound
        engine.close()


@degrees
@pytest.mark.parametrize("preset", OF_QKV)
def test_identity_attention_returns_every_element_once_from_any_memory_order(
    four: World, preset: str, degree: int
) -> None:
    four.run(there_and_back, preset, degree)


def blocks_of_16_and_17() -> list[int]:
    engine = engine_of("ring", 2, sequence=33, kv_heads=4)
    q, k, v, dout = verify.inputs(engine.plan.shape)
    local = [x.requires_grad_() for x in engine.shard(q, k, v, dim=2)]
    out = engine.call(*local)
    grads = torch.autograd.grad(out, local, engine.shard(dout, dim=2))
    expected = reference.gradients(q, k, v, dout, reference.visible({"kind": "causal"}, 33), 8**-0.5)
    for found, whole in zip((out, *grads), expected.values(), strict=True):
        torch.testing.assert_close(found, engine.shard(whole, dim=2), rtol=0, atol=1e-12)
    engine.close()
    return [held.count for held in engine.plan.entry.sequence]


def test_ring_of_blocks_of_16_and_17_tokens_equals_reference(four: World) -> None:
    assert four.run(blocks_of_16_and_17) == [[17, 16]] * 4


class Groups(TorchDispatchMode):
    """Notes the world ranks of the group of every c10d call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("c10d::"):
            names = [a.name for a in func._schema.arguments]
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            self.seen.append(tuple(dist.get_process_group_ranks(group)))
        return func(*args, **(kwargs or {}))


def groups_of(preset: str, degree: int) -> tuple[set[tuple[int, ...]], tuple[int, ...]]:
    with Groups() as calls:  # from the first call on: also what is compared when an engine is made
        engine = engine_of(preset, degree)
        model = Toy().double()
        tokens = torch.arange(LENGTH)[None]
        with engine.context(model):
            model(*engine.shard(tokens, tokens)).sum().backward()
        engine.sum_gradients(model)
        engine.close()
    assert len(calls.seen) > 2
    ranks = tuple(dist.get_process_group_ranks(mesh(degree).get_group()))
    return set(calls.seen), ranks


@pytest.mark.parametrize("preset", OF_QKV)
def test_every_call_is_on_a_group_of_the_plans_ranks(four: World, preset: str) -> None:
    for rank, (seen, ranks) in enumerate(four.run(groups_of, preset, 2)):
        assert rank in ranks and len(ranks) == 2
        assert seen == {ranks}


# ------------------------------------------------------------------ what is refused
def refused_call(preset: str, argument: str) -> int:
    engine, attention = engine_of(preset, 4, kv_heads=4), Attention()
    q, k, v, _ = (engine.shard(x, dim=2) for x in verify.inputs(engine.plan.shape))
    with engine.context(attention):
        with pytest.raises(CPError, match=rf"call\.{argument}"):
            attention(q, k, v, **{argument: torch.ones(1, LENGTH, dtype=torch.bool)})
        exchanged = engine.collectives
        assert attention(q, k, v).shape == q.shape  # and ranks are still in step
    engine.close()
    return exchanged


@pytest.mark.parametrize("argument", ["attn_mask", "key_padding_mask", "mask"])
@pytest.mark.parametrize("preset", ["ring", "ulysses", "allgather_kv"])
def test_mask_that_no_plan_has_is_refused_on_every_rank_before_anything_moves(
    four: World, preset: str, argument: str
) -> None:
    assert four.run(refused_call, preset, argument) == [0, 0, 0, 0]


def other_mesh(preset: str, overrides: list[str]) -> str:
    with pytest.raises(CPError) as caught:
        cp_engine.compile(preset, mesh=mesh(2), sequence=LENGTH, heads=4, head_dim=8, overrides=overrides)
    assert_in_step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("preset", "overrides"), [("usp", ["cp.mesh.ring=2", "cp.mesh.ulysses=2"]), ("ulysses", ["cp.degree=4"])]
)
def test_mesh_of_another_size_than_the_degree_is_refused_with_both(
    four: World, preset: str, overrides: list[str]
) -> None:
    for error in four.run(other_mesh, preset, overrides):
        assert isinstance(error, str) and "2" in error and "4" in error and "ranks" in error, error


def made_again() -> None:
    for sequence in (8, 16, 8):
        engine = engine_of("usp", 4, sequence=sequence)
        q, k, v = engine.shard(*verify.inputs(engine.plan.shape)[:3], dim=2)
        engine.call(q, k, v, enable_gqa=True)
        engine.close()


def test_engine_of_several_axes_can_be_made_again_after_it_was_closed(four: World) -> None:
    four.run(made_again)


def late_rank() -> None:
    mine, is_late = ((0, 1) if dist.get_rank() < 2 else (2, 3)), dist.get_rank() % 2
    for preset in ("ring", "ulysses"):
        group = dist.new_group(mine, timeout=timedelta(seconds=5), use_local_synchronization=True)
        two = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        engine = cp_engine.compile(shipped(preset, ()), mesh=two, sequence=LENGTH, heads=4, head_dim=8)
        local = engine.shard(*verify.inputs(engine.plan.shape)[:3], dim=2)
        if is_late:  # comes when the others have given up
            dist.barrier()
        with pytest.raises((RuntimeError, CPError), match=r"Timed out|closed by peer"):  # the late one is told by name
            engine.call(*(x.float() for x in local))
        if not is_late:
            dist.barrier()


def test_rank_that_comes_too_late_ends_the_call_on_every_rank(four: World) -> None:
    four.run(late_rank)  # which would end by itself, if a call did not, as one that hangs


# ------------------------------------------------------------------ what belongs to tokens
HELD = {
    ("contiguous", 2): [[0, 1, 2, 3], [4, 5, 6, 7]],
    ("zigzag", 2): [[0, 1, 6, 7], [2, 3, 4, 5]],
    ("zigzag", 4): [[0, 7], [1, 6], [2, 5], [3, 4]],
    ("striped", 2): [[0, 2, 4, 6], [1, 3, 5, 7]],
    ("striped", 4): [[0, 4], [1, 5], [2, 6], [3, 7]],
}


def companions(layout: str, degree: int) -> list[str]:
    engine = engine_of("ulysses", degree, layout=layout, sequence=8)
    held = HELD[layout, degree][engine.rank]
    for x, dim in (
        (torch.arange(8).expand(2, 8), 1),  # positions
        (torch.arange(8).expand(2, 8) % 4, 1),  # of two packed documents
        (torch.arange(48).view(3, 2, 8), 2),  # of three rotary sections
        (torch.arange(48).view(3, 2, 8), -1),
        (torch.arange(16.0).view(2, 8, 1), 1),  # a temperature per token
        (torch.arange(8).expand(2, 8) >= 5, 1),  # a mask
    ):
        mine = engine.shard(x, dim=dim)
        assert torch.equal(mine, x.index_select(dim, torch.tensor(held)))
        assert torch.equal(engine.unshard(mine, dim=dim), x)
    engine.close()
    return [str(s) for s in engine.plan.entry.sequence]


@pytest.mark.parametrize(("layout", "degree"), HELD)
def test_side_tensors_of_any_rank_are_cut_as_the_tokens_and_put_together(four: World, layout: str, degree: int) -> None:
    (shown,) = {tuple(texts) for texts in four.run(companions, layout, degree)}
    assert len(shown) == degree


def test_plan_says_which_tokens_each_rank_holds(four: World) -> None:
    assert four.run(companions, "zigzag", 2)[0] == ["0..2 6..8", "2..6"]


def both_degrees(layout: str) -> None:
    """One process, one table of positions, two groups."""
    two, all_four = (engine_of("ulysses", n, layout=layout, sequence=8) for n in (2, 4))
    table, rank = torch.arange(8)[None], dist.get_rank()
    for _ in range(2):
        assert two.shard(table)[0].tolist() == HELD[layout, 2][rank % 2]
        assert all_four.shard(table)[0].tolist() == HELD[layout, 4][rank]
    two.close()
    all_four.close()


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_positions_of_another_group_are_not_reused(four: World, layout: str) -> None:
    four.run(both_degrees, layout)


def shifted(tokens: Tensor, starts: list[int], by: int) -> Tensor:
    """The token `by` places later in the same document, else IGNORED; over the whole sequence."""
    ends = [*starts[1:], tokens.shape[1]]
    rows = [
        torch.cat((tokens[:, a + by : b], tokens.new_full((tokens.shape[0], min(by, b - a)), IGNORED)), 1)
        for a, b in zip(starts, ends, strict=True)
    ]
    return torch.cat(rows, 1)


def targets_cut(layout: str, degree: int, starts: list[int], by: int) -> int:
    engine = engine_of("ulysses", degree, layout=layout)
    tokens = torch.arange(LENGTH)[None]
    mine, targets = engine.shard(tokens, shifted(tokens, starts, by))
    is_target = targets != IGNORED
    assert torch.equal(targets[is_target], mine[is_target] + by)
    assert torch.equal(engine.unshard(targets), shifted(tokens, starts, by))
    engine.close()
    return int(is_target.sum())


@degrees
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("starts", "by", "targets"), [([0], 1, 31), ([0, 10], 1, 30), ([0, 10], 2, 28)])
def test_targets_shifted_before_the_cut_are_those_of_the_whole_sequence(
    four: World, layout: str, degree: int, starts: list[int], by: int, targets: int
) -> None:
    found = four.run(targets_cut, layout, degree, starts, by)
    assert sum(found[:degree]) == targets
