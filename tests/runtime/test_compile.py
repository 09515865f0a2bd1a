"""torch.compile(fullgraph=True) of a block with a composition inside, on two gloo ranks: the same numbers and the same exchanges."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_engine

SEQUENCE, HEADS, HEAD_DIM = 31, 4, 8
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """Projections, attention and a residual, as one layer of a model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = cp_engine.Attention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))


def engine_of(preset: str, *overrides: str) -> cp_engine.ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return cp_engine.compile(
        preset, mesh=mesh, sequence=SEQUENCE, heads=HEADS, head_dim=HEAD_DIM, overrides=list(overrides)
    )


def passed(model: nn.Module, block: Block, engine: cp_engine.ContextParallel, seed: int) -> list[Tensor]:
    """out and all gradients of one pass, and how many exchanges it made."""
    generator = torch.Generator().manual_seed(seed)
    whole, upstream = (torch.randn(3, SEQUENCE, WIDTH, generator=generator) for _ in range(2))
    x = engine.shard(whole).requires_grad_()
    before = engine.collectives
    out = model(x)
    grads = torch.autograd.grad(out, [x, *block.parameters()], engine.shard(upstream))
    return [out.detach(), *grads, torch.tensor(engine.collectives - before)]


def check_compiled(preset: str, overrides: list[str], backend: str) -> None:
    torch.compiler.reset()
    block, engine = Block(), engine_of(preset, *overrides)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for seed in (1, 2):  # the second pass runs the graph of the first
        with engine.context(block):
            wanted = passed(block, block, engine, seed)
        with engine.context(block):  # leaving it without an attention call of the graph would be an error
            found = passed(compiled, block, engine, seed)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    x = torch.randn(1, SEQUENCE, WIDTH)
    torch.testing.assert_close(compiled(x), block(x))  # outside it is plain attention again
    engine.close()


def test_compiled_block_equals_eager_and_exchanges_as_often(two):
    for preset in ("ulysses", "allgather_kv", "ring_zigzag"):
        two.run(check_compiled, preset, [], "aot_eager")


def test_inductor_runs_a_ring_in_one_graph(two):
    two.run(check_compiled, "ring_zigzag", [], "inductor")


@pytest.mark.long
@pytest.mark.parametrize(
    "preset,overrides",
    [
        *((p, []) for p in ("ulysses", "allgather_kv", "ring", "ring_striped", "needed_kv", "reorder_zigzag")),
        ("ulysses", ["cp.head_groups=2"]),
        ("ring", ["layout@cp.layout=balanced"]),
    ],
)
def test_inductor_runs_every_kind_of_composition_in_one_graph(two, preset, overrides):
    two.run(check_compiled, preset, overrides, "inductor")


def check_two_engines() -> None:
    """A graph knows its engine: another one with the same plan, or with another plan, makes a graph of its own."""
    torch.compiler.reset()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    engines = [engine_of("ulysses"), engine_of("ulysses"), engine_of("ring")]
    results = []
    for engine in (*engines, *engines):
        with engine.context(block):
            results.append(passed(compiled, block, engine, 3))
    assert [int(r[-1]) for r in results] == [int(passed_[-1]) for passed_ in results[:3]] * 2
    assert int(results[0][-1]) != int(results[2][-1])
    torch.testing.assert_close(results[0][:-1], results[2][:-1], rtol=1e-5, atol=1e-5)
    for engine in engines:
        engine.close()


def test_each_engine_has_a_graph_of_its_own(two):
    two.run(check_two_engines)


def check_refusals() -> None:
    torch.compiler.reset()
    block, engine = Block(), engine_of("ulysses", "cp.recompute=skip_attention")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with (
        pytest.raises(Exception, match=r"cp\.recompute  is skip_attention, and in a compiled model"),
        engine.context(block),
    ):
        compiled(engine.shard(torch.randn(1, SEQUENCE, WIDTH)))
    engine.close()


def test_what_a_graph_cannot_hold_is_refused_by_name(two):
    two.run(check_refusals)


class Scaled(nn.Module):
    """Attention with a scale that changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scale = cp_engine.Attention(), 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, scale=self.scale) * 2


def test_scales_and_engines_of_one_compiled_module_may_change() -> None:
    torch.compiler.reset()
    engines = [cp_engine.compile("none", mesh=None, sequence=16, heads=2, head_dim=8) for _ in range(2)]
    module = Scaled()
    compiled = torch.compile(module, backend="aot_eager")
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    for engine, scale in ((0, 0.5), (0, 0.25), (1, 0.5), (0, 0.125), (1, 0.7)):
        module.scale = scale
        with engines[engine].context(module):
            out = compiled(q, k, v)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) * 2
        torch.testing.assert_close(out, wanted)
        assert engines[engine]._attention.runs_in_graphs
