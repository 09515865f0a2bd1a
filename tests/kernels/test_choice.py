"""Which kernel is chosen on which hardware, and what is said of those that are not."""

import pytest
import torch

from cp_engine.errors import CPError, KernelError
from cp_engine.exchange.target import Target
from cp_engine.kernels.cpu_flash import CPUFlash
from cp_engine.kernels.registry import KERNELS, Hardware, KernelRequest, choose, hardware
from cp_engine.runtime.program import Program
from tests.helpers import SMALL, plan_of, small


def test_auto_takes_the_fast_kernel_on_cpu_and_says_what_it_is() -> None:
    kernel, reason = choose(KERNELS, KernelRequest(device="cpu", dtype="float32", head_dim=64, v_head_dim=64))
    assert (kernel.name, reason) == ("cpu_flash", CPUFlash.summary)


def test_auto_says_why_it_does_not_take_the_fast_kernels() -> None:
    kernel, reason = choose(KERNELS, KernelRequest(device="cuda", dtype="float64", head_dim=64, v_head_dim=64))
    assert kernel.name == "math"
    for name in ("cuda_flash", "cudnn", "cuda_efficient", "flex"):
        assert f"{name}: computes " in reason and reason.count("not float64") == 4
    assert "cpu_flash" not in reason  # it was not a candidate


H200 = Hardware(capability=(9, 0), cudnn_version=91501)
A10 = Hardware(capability=(8, 6), cudnn_version=91501)
V100 = Hardware(capability=(7, 0), cudnn_version=91501)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("device", "dtype", "dims", "there", "chosen"),
    [
        ("cpu", "float64", (64, 64), None, "cpu_flash"),
        ("cpu", "bfloat16", (192, 128), None, "cpu_flash"),
        ("cuda", "bfloat16", (64, 64), None, "cuda_flash"),
        ("cuda", "float16", (192, 128), H200, "cuda_flash"),
        ("cuda", "bfloat16", (576, 512), H200, "cuda_efficient"),
        ("cuda", "bfloat16", (200, 200), A10, "cuda_efficient"),
        ("cuda", "float32", (64, 64), H200, "cuda_efficient"),
        ("cuda", "float16", (64, 64), V100, "cuda_efficient"),
        ("cuda", "bfloat16", (64, 64), V100, "math"),
        ("cuda", "float64", (64, 64), H200, "math"),
        ("cuda", "bfloat16", (64, 64), Hardware(capability=(9, 4), is_nvidia=False), "math"),
        ("npu", "bfloat16", (64, 64), None, "npu_fusion"),
        ("xpu", "bfloat16", (64, 64), None, "math"),
    ],
)
def test_auto_takes_the_first_kernel_that_can(
    device: str, dtype: str, dims: tuple[int, int], there: Hardware | None, chosen: str
) -> None:
    call = KernelRequest(device=device, dtype=dtype, head_dim=dims[0], v_head_dim=dims[1], hardware=there)
    assert choose(KERNELS, call)[0].name == chosen


def on_h200(**changes: object) -> KernelRequest:
    """A call that every CUDA kernel takes, with some of it changed."""
    call = {"device": "cuda", "dtype": "bfloat16", "head_dim": 64, "v_head_dim": 64, "hardware": H200, **changes}
    return KernelRequest(**call)


def there(**changes: object) -> Hardware:
    return Hardware(**{"capability": (9, 0), "cudnn_version": 91501, **changes})


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("cpu_flash", on_h200(), "runs on cpu, not on cuda"),
        ("cuda_flash", on_h200(device="cpu"), "runs on cuda, not on cpu"),
        ("cuda_flash", on_h200(dtype="float32"), "computes bfloat16, float16, not float32"),
        ("cuda_flash", on_h200(head_dim=264), "takes head dims up to 256, not 264"),
        (
            "cuda_flash",
            on_h200(hardware=V100),
            "needs compute capability 8.0 for bfloat16, and this GPU has 7.0",
        ),
        (
            "cuda_flash",
            on_h200(head_dim=193, hardware=there(capability=(12, 0))),
            "has no backward for head dim 200 on compute capability 12.0",
        ),
        ("cuda_flash", on_h200(head_dim=193, hardware=there(capability=(12, 0)), needs_backward=False), None),
        ("cuda_flash", on_h200(head_dim=256, hardware=A10), None),
        ("cuda_flash", on_h200(head_dim=192, v_head_dim=128), None),
        ("cudnn", on_h200(dtype="float32"), "computes bfloat16, float16, not float32"),
        ("cudnn", on_h200(head_dim=192), "takes head dims up to 128, or 192 with 128 for v, not 192 with 64"),
        ("cudnn", on_h200(head_dim=192, v_head_dim=128), None),
        ("cudnn", on_h200(head_dim=192, v_head_dim=128, hardware=None), None),
        (
            "cudnn",
            on_h200(head_dim=192, v_head_dim=128, hardware=A10),
            "takes head dims 192 with 128 on compute capability 9.0 and 10.x with cuDNN 9.11, not on 8.6 with 91501",
        ),
        ("cudnn", on_h200(hardware=there(cudnn_version=0)), "needs cuDNN 9, and there is none"),
        ("cudnn", on_h200(hardware=there(cudnn_version=8907)), "needs cuDNN 9, and there is 8907"),
        (
            "cudnn",
            on_h200(hardware=there(is_deterministic=True)),
            "has no deterministic backward, and torch.use_deterministic_algorithms is on",
        ),
        ("cudnn", on_h200(hardware=there(is_deterministic=True), needs_backward=False), None),
        ("cuda_efficient", on_h200(dtype="float64"), "computes float32, bfloat16, float16, not float64"),
        (
            "cuda_efficient",
            on_h200(hardware=there(is_nvidia=False)),
            "is written for NVIDIA GPUs, and this PyTorch is built for ROCm",
        ),
        ("cuda_efficient", on_h200(head_dim=576, v_head_dim=512), None),
        ("flex", on_h200(dtype="float64"), "computes float32, bfloat16, float16 on cuda, not float64"),
        ("flex", on_h200(device="cpu"), "has no backward on cpu"),
        ("flex", on_h200(device="cpu", needs_backward=False), None),
        ("flex", on_h200(device="mps"), "runs on cuda and cpu, not on mps"),
        ("flex", on_h200(head_dim=192, v_head_dim=128), None),
        ("math", on_h200(dtype="float64", hardware=there(is_nvidia=False)), None),
    ],
)
def test_what_a_kernel_cannot_do_is_said(name: str, call: KernelRequest, reason: str | None) -> None:
    assert next(k for k in KERNELS if k.name == name).refusal(call) == reason


def test_hardware_is_that_of_this_process() -> None:
    assert hardware("cpu") is None
    found = hardware("cuda")
    assert (found is None) == (not torch.cuda.is_available())
    assert found is None or found.capability == torch.cuda.get_device_capability()


def test_named_kernel_is_used() -> None:
    plan = plan_of("none", "cp.steps.attend.kernel=math")
    attend = Program(plan, Target(ranks=(0,), device="cpu", communicator=None)).operations[0]
    assert attend._ranks[0].kernel.name == "math"


def test_named_kernel_on_another_device_is_refused_by_name() -> None:
    plan = plan_of("none", "cp.steps.attend.kernel=cpu_flash", shape=small(sequence=8))
    with pytest.raises(KernelError) as caught:
        Program(plan, Target(ranks=(0,), device="cuda", communicator=None))
    (problem,) = caught.value.problems
    assert problem.key == "cp.steps.attend.kernel"
    assert "cpu_flash" in problem.what and "cuda" in problem.what
    assert "never replaced" in str(caught.value)
    assert problem.tries == ("cp.steps.attend.kernel=auto",)


def test_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(CPError) as caught:
        plan_of("none", "cp.steps.attend.kernel=cpu_flush", shape=SMALL)
    (problem,) = caught.value.problems
    assert problem.key == "cp.steps.attend.kernel"
    assert "'cpu_flush'" in problem.what
    assert problem.details == (
        ("allowed", "auto, cpu_flash, cuda_flash, cudnn, cuda_efficient, npu_fusion, flex, math, npu_fusion_update"),
    )
    assert problem.tries == ("cp.steps.attend.kernel=cpu_flash",)
