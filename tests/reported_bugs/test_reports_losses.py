"""The reports of docs/reports.md about losses and gradients, on 4 gloo ranks: whatever a rank's share of the targets is, and
whatever else is parallel, gradients are those of one process.

The rule, once: a rank's loss is its own targets' sum divided by the number of targets of the whole batch; gradients are summed.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, log_softmax, logsigmoid
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from cp_engine.runtime.context import ContextParallel
from tests.gloo import World
from tests.on_ranks import Toy
from tests.reported_bugs.test_reports_ranks import IGNORED, LENGTH, degrees, engine_of, mesh

VOCABULARY = 50


def text(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions, whole."""
    tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:].clone(), torch.arange(LENGTH).expand(batch, -1)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """The sum of each target's loss times its weight; a target that is ignored has none."""
    losses = cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def per_token(targets: Tensor) -> Tensor:
    """1 / number of targets of the whole batch, for each token."""
    return torch.full(targets.shape, 1 / max(1, int((targets != IGNORED).sum())), dtype=torch.float64)


def per_sequence(targets: Tensor) -> Tensor:
    """The mean over sequences of each one's mean over its targets."""
    return (1 / (targets != IGNORED).sum(1, keepdim=True).clamp(min=1) / len(targets)).double().expand(targets.shape)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]


def expected(targets: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one process."""
    model, (tokens, _, positions) = Toy().double(), text(len(targets))
    loss = loss_of(model, tokens, targets, positions, weights)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_gradients(model: nn.Module, wanted: Sequence[Tensor]) -> None:
    found = gradients(model)
    assert len(found) == len(wanted) == len(list(model.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


# ------------------------------------------------------------------ targets that ranks have unequally many of
def targets_that_are(where: str, engine: ContextParallel, targets: Tensor) -> Tensor:
    """Targets of which most are ignored."""
    kept = torch.zeros(LENGTH, dtype=torch.bool)
    if where == "on one rank":
        kept[list(engine.plan.entry.sequence[0])] = True
    elif where == "in the last quarter":
        kept[-LENGTH // 4 :] = True
    elif where == "few and unequal":
        kept[[0, 1, 2, LENGTH - 1, 7]] = True
    return targets.masked_fill(~kept, IGNORED)


def unequal(where: str, degree: int) -> None:
    engine, model = engine_of("ulysses", degree), Toy().double()
    tokens, targets, positions = text()
    targets = targets_that_are(where, engine, targets)
    wanted_loss, wanted = expected(targets, per_token(targets))
    with engine.context(model):
        loss = loss_of(model, *engine.shard(tokens, targets, positions, per_token(targets)))
        loss.backward()
    engine.sum_gradients(model)
    assert_gradients(model, wanted)
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh(degree).get_group())
    torch.testing.assert_close(total, wanted_loss, rtol=1e-12, atol=0)
    if engine.rank and where == "on one rank":
        assert loss == 0
    engine.close()


@degrees
@pytest.mark.parametrize("where", ["on one rank", "in the last quarter", "few and unequal", "nowhere"])
def test_targets_that_are_on_few_ranks_or_none_give_one_process_loss_and_gradients(
    four: World, where: str, degree: int
) -> None:
    four.run(unequal, where, degree)


def accumulated(degree: int) -> None:
    engine, model = engine_of("ring_zigzag", degree), Toy().double()
    tokens, targets, positions = text()
    targets[0, 30:], targets[1, 5:] = IGNORED, IGNORED  # two micro-batches with 30 and 5 targets
    weights = per_token(targets)
    with engine.context(model):
        for i in (0, 1):
            micro = (x[i : i + 1] for x in (tokens, targets, positions, weights))
            loss_of(model, *engine.shard(*micro)).backward()
    engine.sum_gradients(model)
    assert_gradients(model, expected(targets, weights)[1])
    engine.close()


@degrees
def test_micro_batches_of_30_and_5_targets_equal_one_batch(four: World, degree: int) -> None:
    four.run(accumulated, degree)


def preference(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss of whole sequences: how much more likely the first one is than the second (DPO's form)."""
    likelihood = log_softmax(logits, -1).gather(2, targets[..., None]).sum((1, 2))
    return -logsigmoid((likelihood[0] - likelihood[1]) / 10)


def replicated(degree: int) -> None:
    engine, model, plain = engine_of("ulysses", degree), Toy().double(), Toy().double()
    tokens, targets, positions = text()
    preference(plain(tokens, positions), targets).backward()
    with engine.context(model):
        whole = engine.unshard(model(*engine.shard(tokens, positions)))
        (preference(whole, targets) / degree).backward()
    engine.sum_gradients(model)
    assert_gradients(model, gradients(plain))
    engine.close()


@degrees
def test_loss_that_every_rank_computes_alike_is_divided_by_the_ranks(four: World, degree: int) -> None:
    four.run(replicated, degree)


# ------------------------------------------------------------------ beside other parallelism
def wrapped(wrapper: str, preset: str) -> None:
    """4 ranks of context parallelism and nothing else: without a reducer over them, ranks would drift apart."""
    engine, model = engine_of(preset, 4), Toy().double()
    tokens, targets, positions = text()
    targets[:, 20:] = IGNORED
    weights = per_token(targets)
    _, wanted = expected(targets, weights)
    trained: nn.Module = model
    if wrapper == "ddp":
        trained = DistributedDataParallel(model, process_group=mesh(4).get_group())
    elif wrapper != "none":
        replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh(4) if wrapper == "fsdp" else replicated).set_force_sum_reduction_for_comms(True)
    with engine.context(model):
        loss = loss_of(trained, *engine.shard(tokens, targets, positions, weights))
        (loss if wrapper == "none" else loss * 4).backward()  # the others take the mean over ranks
    if wrapper == "none":
        engine.sum_gradients(model)
    assert_gradients(model, wanted)
    norm = get_total_norm([p.grad for p in model.parameters()])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.testing.assert_close(norm, get_total_norm(wanted), rtol=1e-11, atol=0)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    mine = torch.cat(
        [(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in model.parameters()]
    )
    everyone = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(x, mine) for x in everyone)
    engine.close()


@pytest.mark.parametrize("preset", ["ulysses", "ring"])
@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp", "hsdp"])
def test_gradients_their_norm_and_the_parameters_after_a_step_are_equal_on_all_ranks(
    four: World, wrapper: str, preset: str
) -> None:
    four.run(wrapped, wrapper, preset)


def beside_data_parallel(mode: str) -> None:
    """4 sequences as dp 2 x cp 2 and as dp 4."""
    weigh = {"per token": per_token, "per sequence": per_sequence}[mode]
    tokens, targets, positions = text(4)
    targets[1, 3:], targets[2, :25] = IGNORED, IGNORED
    weights = weigh(targets)
    _, wanted = expected(targets, weights)
    engine, both, alone = engine_of("ring", 2), Toy().double(), Toy().double()
    dp, r = dist.get_rank() // 2, dist.get_rank()
    with engine.context(both):
        mine = (x[2 * dp : 2 * dp + 2] for x in (tokens, targets, positions, weights))
        loss_of(both, *engine.shard(*mine)).backward()
    engine.sum_gradients(both)
    loss_of(alone, *(x[r : r + 1] for x in (tokens, targets, positions, weights))).backward()
    for model, copies in ((both, 2), (alone, 1)):  # both ranks of a cp group hold the same sum
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= copies
        assert_gradients(model, wanted)
    engine.close()


@pytest.mark.parametrize("mode", ["per token", "per sequence"])
def test_dp_2_with_cp_2_and_dp_4_give_the_same_gradients(four: World, mode: str) -> None:
    four.run(beside_data_parallel, mode)
