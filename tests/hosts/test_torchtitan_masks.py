"""Masks read from torchtitan's own objects, against its mask functions at every position."""

import copy
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from cp_engine.algebra.mask import Mask
from cp_engine.errors import CallError
from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims
from cp_engine.hosts.torchtitan.masks import masks_of

EOS = 0
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def titan() -> ModuleType:
    """torchtitan's attention module."""
    with cpu_shims():
        return importlib.import_module("torchtitan.models.attention")


def text(batch: int, size: int, seed: int = 0, one_in: int = 9) -> Tensor:
    """Tokens with end tokens among them: two in a row, so that a document has length 1, and one at the end of row 0."""
    tokens = torch.randint(0, one_in, (batch, size), generator=torch.Generator().manual_seed(seed))
    tokens[0, -1] = EOS
    tokens[-1, size // 2 : size // 2 + 2] = EOS
    return tokens


def blocks(mod: MaskMod, size: int, batch: int | None = None, block: int = 128) -> BlockMask:
    return create_block_mask(mod, batch, None, size, size, device="cpu", BLOCK_SIZE=block)


def dense(mask: Mask) -> Tensor:
    """The pairs that the bands of a mask show, bool [size, size]."""
    q, k = torch.arange(mask.size)[:, None], torch.arange(mask.size)
    seen = torch.zeros(mask.size, mask.size, dtype=torch.bool)
    for b in mask.bands:
        seen |= (b.q0 <= q) & (q < b.q1) & (b.k0 <= k) & (k < b.k1) & (b.low <= q - k) & (q - k <= b.high)
    return seen


def without_sizes(title: str) -> str:
    return re.sub(r" \([^)]*\)", "", title)


def assert_shows(masks: tuple[Mask, ...], mod: MaskMod) -> None:
    """Every pair of every row is as a mask function says."""
    size = masks[0].size
    wanted = create_mask(mod, len(masks), 1, size, size, device="cpu")[:, 0]
    for row, mask in enumerate(masks):
        assert torch.equal(dense(mask), wanted[row]), row


# ------------------------------------------------------------------ what is read
@pytest.mark.parametrize("size", [5, 64, 300])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize(
    "names",
    [
        ("causal",),
        ("document",),
        ("window",),
        ("block",),
        ("causal", "document"),
        ("document", "window"),
        ("causal", "block"),
        ("causal", "document", "block"),
        ("document", "window", "block", "causal"),
    ],
    ids=" and ".join,
)
def test_masks_show_what_the_mask_functions_show(
    titan: ModuleType, names: tuple[str, ...], block: int, size: int
) -> None:
    made = {
        "causal": titan.get_causal_mask_mod(),
        "document": titan.get_document_mask_mod(text(3, size), EOS),
        "window": titan.get_sliding_window_mask_mod(7),
        "block": titan.get_fixed_block_mask_mod(11),
    }
    mod = made[names[0]] if len(names) == 1 else and_masks(*(made[name] for name in names))
    masks = masks_of(blocks(mod, size, 3 if "document" in names else None, block), 3, size)
    assert_shows(masks, mod)
    assert without_sizes(masks[0].kind) == " and ".join(names)
    assert "document" in names or masks[0] is masks[1] is masks[2]


@pytest.mark.parametrize("mask_type", ["causal", "block_causal"])
@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss"])
def test_masks_of_each_model(titan: ModuleType, name: str, mask_type: str) -> None:
    from cp_engine.hosts.torchtitan.text.loader import ByteTokenizer

    with cpu_shims():
        spec = importlib.import_module(f"torchtitan.models.{name}").get_train_spec()
        from torchtitan.config import JobConfig
    args = copy.deepcopy(spec.model_args["debugmodel"])
    args.update_from_config(JobConfig())
    args.attn_type, args.attn_mask_type = "flex", mask_type
    args.fixed_attn_block_size = 50  # llama4's; shorter than the sequence
    args.sliding_window_size = 20  # gpt_oss'
    with torch.device("meta"):
        model = spec.model_cls(args)
    tokenizer = ByteTokenizer()
    tokens = text(2, 300)
    tokens[tokens == EOS] = tokenizer.eos_id
    with cpu_shims(), torch.compiler.set_stance("force_eager"):  # or a build for CUDA makes masks there
        carried = model.get_attention_masks(tokens, tokenizer)
    found = carried if isinstance(carried, dict) else {"": carried}
    kinds = {key: without_sizes(masks_of(block_mask, 2, 300)[0].kind) for key, block_mask in found.items()}
    for block_mask in found.values():
        assert_shows(masks_of(block_mask, 2, 300), block_mask.mask_mod)
    base = "causal" if mask_type == "causal" else "causal and document"
    base_of_gpt_oss = "causal" if mask_type == "causal" else "document"
    expected = {
        "llama4": {"rope": f"{base} and block", "nope": base},
        "gpt_oss": {"basic_mask": base_of_gpt_oss, "sliding_window_mask": f"{base_of_gpt_oss} and window"},
    }
    assert kinds == expected.get(name, {"": base})


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("one_in", [1, 3, 1000])
def test_varlen_metadata_is_causal_documents(titan: ModuleType, size: int, one_in: int) -> None:
    tokens = text(3, size, one_in=one_in) if size > 2 else torch.full((3, size), EOS)
    masks = masks_of(titan.create_varlen_metadata_for_document(tokens, EOS), 3, size)
    assert_shows(masks, and_masks(titan.get_causal_mask_mod(), titan.get_document_mask_mod(tokens, EOS)))


@pytest.mark.quick
def test_rows_with_the_same_documents_share_a_mask(titan: ModuleType) -> None:
    tokens = text(1, 40).repeat(3, 1)
    tokens[1, 10] = EOS
    tokens[0, 10] = tokens[2, 10] = 1
    mod = and_masks(titan.get_causal_mask_mod(), titan.get_document_mask_mod(tokens, EOS))
    for carried in (blocks(mod, 40, 3), titan.create_varlen_metadata_for_document(tokens, EOS)):
        first, second, third = masks_of(carried, 3, 40)
        assert first is third
        assert not first.same_as(second)


def test_microbatches_of_a_pipeline_have_their_own_rows(titan: ModuleType) -> None:
    tokens = text(4, 300)
    mod = and_masks(titan.get_causal_mask_mod(), titan.get_document_mask_mod(tokens, EOS))
    _, chunks = split_args_kwargs_into_chunks((), {"attention_masks": blocks(mod, 300, 4)}, 2)
    for i, chunk in enumerate(chunks):
        rows = tokens[2 * i : 2 * i + 2]
        expected = and_masks(titan.get_causal_mask_mod(), titan.get_document_mask_mod(rows, EOS))
        assert_shows(masks_of(chunk["attention_masks"], 2, 300), expected)


def test_importing_imports_no_torchtitan() -> None:
    code = "import sys, cp_engine.hosts.torchtitan.masks; assert 'torchtitan' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------ what is refused
def refusal(carried: object, batch: int = 1, size: int = 64) -> str:
    with pytest.raises(CallError) as caught:
        masks_of(carried, batch, size)
    assert all(p.key.startswith(("call.block_mask", "call.attention_masks")) for p in caught.value.problems)
    return str(caught.value)


def every_other(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask function that torchtitan does not have."""
    return (q >= k) & ((q - k) % 2 == 0)


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A score_mod."""
    return 30 * torch.tanh(score / 30)


def test_functions_that_are_not_torchtitans_are_named(titan: ModuleType) -> None:
    causal = titan.get_causal_mask_mod()
    here = f"{__name__}.every_other"
    assert f"the mask function {here}, which is not read" in refusal(blocks(every_other, 64))
    assert "or_masks.<locals>.or_mask" in refusal(blocks(or_masks(causal, causal), 64))
    assert "flex_attention.noop_mask" in refusal(blocks(noop_mask, 64))
    assert "a functools.partial" in refusal(blocks_of(functools.partial(causal), causal))
    both = refusal(blocks(and_masks(causal, every_other, and_masks(or_masks(causal), causal)), 64))
    assert "2 problems" in both and here in both and "or_mask" in both
    assert f"{__name__}.soft_cap" in refusal(soft_cap)
    assert f"{__name__}.every_other" in refusal(every_other)
    assert "a dict" in refusal({"rope": blocks(causal, 64)})
    assert "a NoneType" in refusal(None)


def blocks_of(mod: object, built_from: MaskMod) -> BlockMask:
    """A BlockMask whose function is replaced after it was built."""
    made = blocks(built_from, 64)
    made.mask_mod = mod
    return made


def renamed(mod: MaskMod, of: MaskMod) -> MaskMod:
    """A function under the name of another: what torchtitan's would be after a change upstream."""
    mod.__module__, mod.__qualname__ = of.__module__, of.__qualname__
    return mod


@pytest.mark.parametrize("size", [40, 300])
def test_functions_that_changed_upstream_are_noticed(titan: ModuleType, size: int) -> None:
    window_size = fixed_block_size = 7
    sequence_indices = torch.arange(size)[None] // 10

    def strict(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q > k

    def wider(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k <= window_size)

    def two_sided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() < window_size

    def and_before(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // fixed_block_size - k // fixed_block_size).abs() <= 1

    def or_next(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sequence_indices[b, q] == sequence_indices[b, (k - 1).clamp(min=0)]

    window = titan.get_sliding_window_mask_mod(7)
    for changed, original in (
        (strict, titan.get_causal_mask_mod()),
        (wider, window),
        (two_sided, window),
        (and_before, titan.get_fixed_block_mask_mod(7)),
        (or_next, titan.get_document_mask_mod(text(1, size), EOS)),
    ):
        assert "tried pairs differ" in refusal(blocks(renamed(changed, original), size), size=size), changed


def test_functions_over_other_values_are_refused(titan: ModuleType) -> None:
    window_size, sink = 7, 4

    def with_sink(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k < window_size) | (k < sink))

    window = titan.get_sliding_window_mask_mod(7)
    said = refusal(blocks(renamed(with_sink, window), 64))
    assert "over sink, window_size, and it is known over window_size" in said
    assert "window_size -3" in refusal(blocks_of(changed_value(window, -3), window))
    assert "window_size 2.5" in refusal(blocks_of(changed_value(window, 2.5), window))


def changed_value(mod: MaskMod, value: object) -> MaskMod:
    """A function with one value that it closes over replaced."""
    (cell,) = mod.__closure__
    cell.cell_contents = value
    return mod


def test_documents_that_are_no_documents_of_the_call_are_refused(titan: ModuleType) -> None:
    document = titan.get_document_mask_mod(text(3, 64), EOS)
    built = blocks(document, 64, 3)
    numbers = document.__closure__[0].cell_contents
    assert "is for 3 rows, 1 heads and lengths [64, 64], and the call has 2 rows" in refusal(built, 2)
    assert "[2, 64], and the call has 3 rows" in refusal(blocks_like(built, changed_value(document, numbers[:2])), 3)
    scattered = numbers.clone()
    scattered[1, 40] = 0
    assert "do not rise" in refusal(blocks_like(built, changed_value(document, scattered)), 3)


def blocks_like(built: BlockMask, mod: MaskMod) -> BlockMask:
    """The same blocks with another function."""
    again = copy.copy(built)
    again.mask_mod = mod
    return again


def test_blocks_for_another_call_are_refused(titan: ModuleType) -> None:
    causal = titan.get_causal_mask_mod()
    assert "lengths [64, 64], and the call has 1 rows and 65 tokens" in refusal(blocks(causal, 64), size=65)
    assert "is for 2 rows" in refusal(blocks(causal, 64, 2), batch=3)
    per_head = create_block_mask(causal, 1, 4, 64, 64, device="cpu")
    assert "4 heads" in refusal(per_head)
    assert "lengths [32, 64]" in refusal(create_block_mask(causal, 1, None, 32, 64, device="cpu"))


def test_block_lists_that_hide_or_show_other_blocks_are_refused(titan: ModuleType) -> None:
    made = blocks(titan.get_causal_mask_mod(), 300, block=64)
    parts = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
    fewer = BlockMask.from_kv_blocks(
        *parts[:2], parts[2].clamp(max=2), parts[3], BLOCK_SIZE=64, mask_mod=made.mask_mod, seq_lengths=(300, 300)
    )
    assert "lists other blocks for row 0 than causal has: 1, the first at block 3 2" in refusal(fewer, size=300)
    as_full = BlockMask.from_kv_blocks(
        *(0 * parts[0], parts[1]),
        *(parts[0] + parts[2], torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5)),
        BLOCK_SIZE=64,
        mask_mod=made.mask_mod,
        seq_lengths=(300, 300),
    )
    assert "lists other blocks as full for row 0 than causal has: 5" in refusal(as_full, size=300)


def test_varlen_metadata_that_is_not_of_the_call_is_refused(titan: ModuleType) -> None:
    def metadata(borders: list[int], of_keys: list[int] | None = None, longest: int = 8) -> object:
        cu_seq = [torch.tensor(x, dtype=torch.int32) for x in (borders, of_keys or borders)]
        return titan.VarlenMetadata(*cu_seq, longest, longest)

    assert masks_of(metadata([0, 3, 8, 8, 16]), 2, 8)[1].kind == "document (1 document)"
    both = refusal(metadata([0, 3, 9, 16], [0, 3, 8, 16], longest=6), 2, 8)
    assert "4 problems" in both
    assert "cu_seq_k  has other borders for keys than for queries" in both
    assert "cu_seq_q  has no border at 8: a document crosses from row 0 to 1" in both
    assert "max_q  is 6, and the longest document has 7 tokens" in both and "max_k  is 6" in both
    for borders in ([0, 8], [0, 24], [1, 8, 16], [0, 8, 4, 16], []):
        assert "must rise from 0 to 16 = 2 rows x 8 tokens" in refusal(metadata(borders), 2, 8)
