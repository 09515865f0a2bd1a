"""The stand-ins for CPU exist inside the context and nowhere else."""

import subprocess
import sys

import pytest
import torch
import torch._utils
from torch.nn.attention.flex_attention import create_block_mask

from cp_engine.hosts.torchtitan.cpu_shims import cpu_shims


def attributes() -> dict[str, object]:
    """Everything that the stand-ins could touch."""
    found: dict[str, object] = {f"cpu.{name}": value for name, value in vars(torch.cpu).items()}
    found["get_total_norm"] = torch.nn.utils.get_total_norm
    found["accelerator"] = torch.accelerator.current_accelerator
    return {**found, "histc": torch.histc, "device_type": torch._utils._get_available_device_type}


def test_every_attribute_is_as_before_after_the_context() -> None:
    before = attributes()
    with cpu_shims():
        assert attributes() != before
    assert attributes() == before


def test_every_attribute_is_as_before_after_an_error() -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), cpu_shims():
        raise ZeroDivisionError
    assert attributes() == before


def test_nested_contexts_add_nothing() -> None:
    with cpu_shims():
        inside = attributes()
        with cpu_shims():
            assert attributes() == inside
        assert attributes() == inside


def test_importing_changes_nothing() -> None:
    code = (
        "import torch; before = dict(vars(torch.cpu)), torch.histc\n"
        "import cp_engine.hosts.torchtitan.cpu_shims\n"
        "assert (dict(vars(torch.cpu)), torch.histc) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_attribute_that_exists_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_name() -> str:
        return "mine"

    monkeypatch.setattr(torch.cpu, "get_device_name", own_name, raising=False)
    with cpu_shims():
        assert torch.cpu.get_device_name is own_name
    assert torch.cpu.get_device_name is own_name


def test_memory_is_that_of_the_machine_and_the_process() -> None:
    with cpu_shims():
        total = torch.cpu.get_device_properties(torch.device("cpu")).total_memory
        peak = torch.cpu.memory_stats()["active_bytes.all.peak"]
    assert 0 < peak < total


@pytest.mark.parametrize("bins", [1, 5, 16])
def test_histc_counts_integers_as_it_counts_floats(bins: int) -> None:
    values = torch.randint(-2, bins + 3, (3, 40), generator=torch.Generator().manual_seed(0))
    expected = torch.histc(values.double(), bins=bins, min=0, max=bins)
    with cpu_shims():
        counts = torch.histc(values, bins=bins, min=0, max=bins)
        assert torch.equal(torch.histc(values.double(), bins=bins, min=0, max=bins), expected)
    assert torch.equal(counts.double(), expected)
    assert counts.dtype == values.dtype


def test_histc_of_integers_is_compiled_into_one_graph() -> None:
    values = torch.tensor([[0, 3, 7, 7], [8, -1, 9, 3]])
    with cpu_shims():
        counted = torch.compile(lambda x: torch.histc(x, bins=8, min=0, max=8), backend="aot_eager", fullgraph=True)
        assert counted(values).tolist() == [1, 0, 0, 2, 0, 0, 0, 3]


def test_histc_with_other_bins_still_refuses_integers() -> None:
    with cpu_shims(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.histc(torch.arange(4), bins=2, min=0, max=4)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_norm_of_gradients_is_that_of_float64_however_they_are_spread(order: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator) for size in (5_000_000, 300, 1)]
    expected = float(torch.cat(gradients).double().norm(order))
    halves = [half for gradient in gradients for half in gradient.chunk(2)]
    with cpu_shims():
        for given in (gradients, halves, iter(gradients), [x.double() for x in gradients]):
            assert abs(float(torch.nn.utils.get_total_norm(given, order)) / expected - 1) < 1e-6
        assert abs(float(torch.nn.utils.get_total_norm(gradients[0])) / float(gradients[0].double().norm()) - 1) < 1e-6
        assert float(torch.nn.utils.get_total_norm([])) == 0


def test_norm_that_is_not_finite_is_refused_where_that_is_asked_for() -> None:
    with cpu_shims():
        assert torch.nn.utils.get_total_norm([torch.full((2,), torch.inf)]).isinf()
        with pytest.raises(RuntimeError, match="have a norm of inf, and cannot be clipped"):
            torch.nn.utils.get_total_norm([torch.full((2,), torch.inf)], error_if_nonfinite=True)


def test_a_norm_that_torch_adds_up_well_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x.double().norm() for x in tensors]).norm()

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", own)
    with cpu_shims():
        assert torch.nn.utils.get_total_norm is own


def test_job_on_a_cpu_finds_no_accelerator_where_torch_is_built_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_build_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_a_build_for_cuda)
    with cpu_shims():
        mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128)
    assert mask.kv_num_blocks.device.type == "cpu"
    assert torch.accelerator.current_accelerator is of_a_build_for_cuda
