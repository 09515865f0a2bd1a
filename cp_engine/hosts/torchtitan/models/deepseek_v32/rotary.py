"""The two fixed rotations of DeepSeek-V3.2: by position (rope), and by a Hadamard matrix."""

import torch
from torch import Tensor


def rotate_pairs(x: Tensor, freqs_cis: Tensor, positions: Tensor | None, *, interleaved: bool) -> Tensor:
    """Rope: turns each pair of values by the angle of its token's position.

    In float32 and below this is torchtitan's `apply_rotary_emb`; that one rounds float64 to float32.

    Args:
        x: [B, S, H, R].
        freqs_cis: complex [longest sequence, R / 2], one unit number for each position and pair.
        positions: [1, S] or [B, S]; None is 0 .. S - 1.
        interleaved: whether a pair is two neighbours (attention), or a value of each half (indexer).

    Returns:
        [B, S, H, R], in x's dtype.

    Source: apply_rotary_emb of deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py.
    """
    turns = freqs_cis[: x.shape[1]].unsqueeze(0) if positions is None else freqs_cis[positions]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = wide.unflatten(-1, (-1, 2)) if interleaved else wide.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns.unsqueeze(2))
    rotated: Tensor = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2).to(x.dtype)
    return rotated


def hadamard_signs(size: int) -> Tensor:
    """Sylvester's Hadamard matrix: symmetric, rows orthogonal.

    Args:
        size: a power of two.

    Returns:
        float32 [size, size] of 1 and -1, which every dtype holds exactly; divided by sqrt(size) it is orthonormal.
    """
    signs = torch.ones(1, 1)
    while len(signs) < size:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return signs


def rotate_hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dim.

    It leaves every dot product of two rotated vectors as it was, and spreads single large values over the dim, which is why
    the public code does it before it rounds to 8 bits.

    Args:
        x: [..., D].
        signs: `hadamard_signs(D)`, on x's device.

    Returns:
        [..., D], in x's dtype.
    """
    rotated: Tensor = (x @ signs.to(x.dtype)) * x.shape[-1] ** -0.5
    return rotated
