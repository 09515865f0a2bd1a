"""Two layers of attention that an engine attaches to, and what they give under it.

Whether the engine ran is seen in the numbers: its plans carry a mask that passes for causal and lets a query see only its last
few keys, so that each plan's result differs from plain attention and from each other's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_engine import Attention
from cp_engine.algebra.mask import Band, Mask
from cp_engine.algebra.mask_kinds import mask_of
from cp_engine.job.verify import reference
from cp_engine.runtime.context import ContextParallel
from tests.helpers import plan_of, small

SEQUENCE, HEADS, HEAD_DIM = 12, 2, 4
SHAPE = small(sequence=SEQUENCE, heads=HEADS, head_dim=HEAD_DIM, dtype="float64")
PLAIN = SEQUENCE
BOUND = 1e-12


class Model(nn.Module):
    """Two layers with attention modules that an engine can attach to."""

    def __init__(self, seed: int = 0, mode: str = "none") -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = HEADS * HEAD_DIM
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, dtype=torch.float64) for _ in range(2))
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.mode = mode

    def layer(self, x: Tensor, i: int) -> Tensor:
        q, k, v = self.qkv[i](x).unflatten(2, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return x + self.attention[i](q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            if self.mode == "none":
                x = self.layer(x, i)
            else:
                x = checkpoint(self.layer, x, i, use_reentrant=self.mode == "reentrant")
        return x


class Disguised(Mask):
    """A mask that calls which say `causal` are accepted for, whatever it shows."""

    def same_as(self, other: Mask) -> bool:
        return mask_of("causal", self.size).same_as(other)


def engine(left: int, preset: str = "none") -> ContextParallel:
    """An engine of one rank whose queries see `left` keys before their own."""
    band = Band(q0=0, q1=SEQUENCE, k0=0, k1=SEQUENCE, low=0, high=left)
    mask = Disguised(kind="causal", bands=(band,), size=SEQUENCE)
    return ContextParallel(plan_of(preset, shape=SHAPE, mask=mask, degree=1))


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, SEQUENCE, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64).requires_grad_()


class Windowed(Attention):
    """The reference's attention in the module's place."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        seen = reference.visible({"kind": "window", "left": self.left, "right": 0}, SEQUENCE)
        return reference.attention(q, k, v, seen, HEAD_DIM**-0.5)


def expected(model: Model, left: int) -> Model:
    """The same weights with the attention that an engine with `left` computes."""
    other = Model(mode="none")
    other.load_state_dict(model.state_dict())
    other.attention = nn.ModuleList(Windowed(left) for _ in range(2))
    return other


def results(model: Model) -> list[Tensor]:
    """Output, and gradients of the input and of every weight."""
    x = tokens()
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def sees(model: Model, left: int) -> bool:
    """Whether the model's attention is that of an engine with `left` (PLAIN: no engine) and of no other."""
    with torch.no_grad():
        found = model(tokens())
        errors = {n: float((found - expected(model, n)(tokens())).abs().max()) for n in (1, 3, PLAIN)}
    return {n for n, error in errors.items() if error <= BOUND} == {left}


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) <= BOUND


def attributes(model: nn.Module) -> list[dict[str, object]]:
    return [dict(m.__dict__) for m in model.modules()]


def qkv(
    dtype: torch.dtype = torch.float64, kv_heads: int = HEADS, sequence: int = SEQUENCE, v_head_dim: int = HEAD_DIM
) -> list[Tensor]:
    sizes = ((HEADS, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, v_head_dim))
    return [torch.ones(1, heads, sequence, width, dtype=dtype) for heads, width in sizes]


def of_mask(mask: Mapping[str, object], *overrides: str) -> ContextParallel:
    return ContextParallel(plan_of("none", *overrides, shape=SHAPE, mask=mask))


def random_qkv(batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = dict.fromkeys("qkv", (batch, HEADS, SEQUENCE, HEAD_DIM))
    made = {n: torch.randn(size, generator=generator, dtype=torch.float64) for n, size in sizes.items()}
    return {n: x.requires_grad_() for n, x in made.items()}


WINDOW = {"kind": "window", "left": 3, "right": 2}
DOCUMENTS = {"kind": "document", "starts": [0, 1, 5, 11], "causal": False, "left": 2}
BOTH = {"kind": "both", "of": [{"kind": "causal"}, WINDOW]}
