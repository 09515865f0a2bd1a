"""torchtitan's own attention modules under an engine on two gloo ranks: packed documents, block masks and latent attention."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cp_engine
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.job.verify import reference

BATCH, SEQUENCE, HEADS, KV_HEADS, HEAD_DIM = 2, 32, 4, 2, 8
EOS = 0
FROM_CALL = {"kind": "document"}
PRESETS = ("ulysses", "allgather_kv", "ring_zigzag", "needed_kv", "reorder_zigzag")


def engine_of(preset: str, mask: object, **sizes: int) -> cp_engine.ContextParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **sizes}
    return cp_engine.compile(preset, mesh=mesh, sequence=SEQUENCE, mask=mask, dtype=torch.float64, **sizes)


def tokens_with(starts: Sequence[Sequence[int]]) -> Tensor:
    """Rows of tokens whose documents begin at some positions; each ends with EOS."""
    tokens = torch.randint(1, 50, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    for row, begins in enumerate(starts):
        for start in begins[1:]:
            tokens[row, start - 1] = EOS
    return tokens


def wanted_of(tensors: Sequence[Tensor], dout: Tensor, seen: Sequence[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of dense attention, row by row, since rows see differently."""
    rows = [
        reference.gradients(*(x[i : i + 1] for x in tensors), dout[i : i + 1], seen[i], HEAD_DIM**-0.5)
        for i in range(BATCH)
    ]
    return [torch.cat([r[n] for r in rows]) for n in ("out", "dq", "dk", "dv")]


def random_call() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(BATCH, h, SEQUENCE, HEAD_DIM, generator=generator, dtype=torch.float64) for h in heads]


DOCUMENTS = [  # of two rows; the border between the ranks of a contiguous cut is 16
    [[0, 10], [0, 16]],
    [[0, 1, 15, 17, 31], [0]],
    [[0, 12], [0, 12]],
]


def check_varlen(preset: str) -> None:
    """One engine, three batches whose documents differ: each call's own boundaries count."""
    with cpu_shims():
        from torchtitan.models.attention import VarlenAttentionWrapper, create_varlen_metadata_for_document
    engine, module = engine_of(preset, FROM_CALL), VarlenAttentionWrapper()
    *tensors, dout = random_call()
    for starts in DOCUMENTS:
        metadata = create_varlen_metadata_for_document(tokens_with(starts), EOS)
        local = [engine.shard(x, dim=2).requires_grad_() for x in tensors]
        with engine.context(module):
            packed = module(*local, metadata)
        out = packed.view(BATCH, -1, HEADS, HEAD_DIM).transpose(1, 2)
        found = [out, *torch.autograd.grad(out, local, engine.shard(dout, dim=2))]
        seen = [reference.visible({"kind": "document", "starts": s}, SEQUENCE) for s in starts]
        for a, whole in zip(found, wanted_of(tensors, dout, seen), strict=True):
            torch.testing.assert_close(a.detach(), engine.shard(whole, dim=2), rtol=1e-11, atol=1e-12)
    engine.close()


@pytest.mark.parametrize("preset", PRESETS)
def test_packed_documents_of_each_call_equal_dense_attention(two, preset):
    two.run(check_varlen, preset)


def check_blocks(preset: str) -> None:
    with cpu_shims():
        from torchtitan.models import attention as titan
    from torch.nn.attention.flex_attention import and_masks

    starts = DOCUMENTS[0]
    causal, documents = titan.get_causal_mask_mod(), titan.get_document_mask_mod(tokens_with(starts), EOS)
    window, blocks = titan.get_sliding_window_mask_mod(5), titan.get_fixed_block_mask_mod(12)
    index = torch.arange(SEQUENCE)
    *tensors, dout = random_call()
    for mask_mod in (
        causal,
        and_masks(causal, documents),
        and_masks(causal, window),
        and_masks(causal, blocks, documents),
    ):
        seen = [mask_mod(torch.tensor(b), torch.tensor(0), index[:, None], index[None]) for b in range(BATCH)]
        engine, module = engine_of(preset, FROM_CALL), titan.FlexAttentionWrapper()
        block_mask = titan.create_attention_mask(mask_mod, BATCH, None, SEQUENCE, SEQUENCE, device="cpu")
        local = [engine.shard(x, dim=2).requires_grad_() for x in tensors]
        with engine.context(module):
            out = module(*local, block_mask=block_mask, enable_gqa=True)
        found = [out, *torch.autograd.grad(out, local, engine.shard(dout, dim=2))]
        for a, whole in zip(found, wanted_of(tensors, dout, seen), strict=True):
            torch.testing.assert_close(a.detach(), engine.shard(whole, dim=2), rtol=1e-11, atol=1e-12)
        engine.close()


@pytest.mark.parametrize("preset", ("allgather_kv", "ring_zigzag"))
def test_block_masks_of_torchtitan_equal_dense_attention(two, preset):
    two.run(check_blocks, preset)


def check_refusals() -> None:
    with cpu_shims():
        from torchtitan.models import attention as titan
    module, (*tensors, _) = titan.FlexAttentionWrapper(), random_call()
    causal = titan.create_attention_mask(titan.get_causal_mask_mod(), 1, None, SEQUENCE, SEQUENCE, device="cpu")
    windowed = titan.create_attention_mask(
        titan.get_sliding_window_mask_mod(5), 1, None, SEQUENCE, SEQUENCE, device="cpu"
    )
    own = titan.create_attention_mask(lambda b, h, q, k: q >= k, 1, None, SEQUENCE, SEQUENCE, device="cpu")
    engine = engine_of("allgather_kv", "causal")
    local = [engine.shard(x, dim=2) for x in tensors]
    cases = [
        ({"block_mask": own}, r"call\.block_mask  holds the mask function .*lambda"),
        (
            {"block_mask": windowed},
            r"call\.mask  is window \(left 4, right \d+\), and the plan was proved for the mask causal",
        ),
        ({"block_mask": causal, "score_mod": lambda score, b, h, q, k: score}, r"call\.score_mod"),
        ({"block_mask": causal, "return_lse": True}, r"call\.return_lse"),
        ({"block_mask": None}, r"call\.is_causal  is False"),
    ]
    for arguments, text in cases:
        with pytest.raises(cp_engine.CPError, match=text), engine.context(module):
            module(*local, enable_gqa=True, **arguments)
    with engine.context(module):
        module(*local, block_mask=causal, enable_gqa=True)
    engine.close()


def test_masks_that_the_plan_is_not_for_are_refused_by_name(two):
    two.run(check_refusals)


def check_latent(preset: str) -> None:
    """DeepSeek-V3's attention module: its result and the gradients of all its parameters."""
    with cpu_shims():
        from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
        from torchtitan.models.deepseek_v3.model.model import Attention, precompute_freqs_cis
    args = DeepSeekV3ModelArgs(
        dim=32, n_heads=6, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
    )
    torch.manual_seed(0)
    module, plain = Attention(args).double(), Attention(args).double()
    plain.load_state_dict(module.state_dict())
    frequencies = precompute_freqs_cis(args).to(torch.complex128)
    engine = cp_engine.compile(
        preset,
        mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)),
        sequence=SEQUENCE,
        heads=6,
        head_dim=12,
        v_head_dim=6,
        latent_dim=10,
        rope_dim=4,
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(3)
    x, dout = (torch.randn(BATCH, SEQUENCE, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    positions = torch.cat((torch.arange(20), torch.arange(12))).expand(BATCH, SEQUENCE)  # a document that begins again
    wanted = plain(x, frequencies, None, positions)
    wanted.backward(dout)
    mine, mine_positions, upstream = engine.shard(x, positions, dout)
    with engine.context(module):
        found = module(mine, frequencies, None, mine_positions)
        found.backward(upstream)
    engine.sum_gradients(module)
    torch.testing.assert_close(found.detach(), engine.shard(wanted.detach()), rtol=1e-11, atol=1e-12)
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-11, msg=name)
    engine.close()


def test_latent_attention_gives_every_parameter_its_gradient(two):
    two.run(check_latent, "mla_ulysses")
