"""Devices by the names of `launch.device`, and what must be there for them."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from cp_engine.errors import ConfigError, Problem

DEVICES = ("cpu", "cuda", "npu")
"""Types of the devices that tensors can be on."""
REHEARSAL = "npu_reference"
"""Ascend's operators, computed on a CPU by reference kernels that refuse what the operators would refuse."""


def of_tensors(device: str) -> str:
    """The device type of tensors."""
    return "cpu" if device == REHEARSAL else device


@contextmanager
def operators_of(device: str) -> Iterator[None]:
    """What a device's kernels call, registered while the context lasts; a plan for Ascend can be made without one."""
    if device not in ("npu", REHEARSAL):
        yield
        return
    from cp_engine.kernels.ascend.stand_in import stand_in
    from cp_engine.kernels.ascend.torch_npu_module import torch_npu_module  # here: no other device needs them

    with ExitStack() as undo:
        undo.enter_context(stand_in())
        if device == REHEARSAL:  # programs that import torch_npu are rehearsed too
            undo.enter_context(torch_npu_module())
        yield


def resolve(wanted: str, local_ranks: int) -> str:
    """The device of every rank.

    Args:
        wanted: launch.device.
        local_ranks: ranks on this machine.

    Returns:
        `npu`, `cuda`, `cpu` or `npu_reference`; `auto` takes the first of the first three that has a device for every rank.

    Raises:
        ConfigError: a device that is asked for and is not there, with what is missing.
    """
    if wanted == REHEARSAL and is_vendor_loaded():
        rule = ("rule", "its operators have no kernels for a CPU, and torch loads it by itself unless told not to")
        instead = ("TORCH_DEVICE_BACKEND_AUTOLOAD=0 python launch.py ...", "launch.device=npu")
        what = f"is {REHEARSAL}, and torch_npu is loaded in this process"
        raise ConfigError([Problem(key="launch.device", what=what, details=(rule,), tries=instead)])
    if wanted in ("cpu", REHEARSAL):
        return wanted
    npus, missing = _npus()
    if wanted == "npu":
        if npus < local_ranks:
            what = missing or f"there are {npus} NPUs here, fewer than {local_ranks} ranks"
            instead = ("launch.device=npu_reference", "launch.device=cpu")
            raise ConfigError([Problem(key="launch.device", what=f"is npu: {what}", tries=instead)])
        return wanted
    if wanted == "auto" and npus >= local_ranks:
        return "npu"
    import torch  # here: planning and --help need no torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices >= local_ranks:
        return "cuda"
    if wanted == "auto":
        return "cpu"
    what = f"cuda has {devices} devices here, fewer than {local_ranks} ranks"
    tries = ("launch.device=cpu", f"cp.degree={devices}") if devices else ("launch.device=cpu",)
    raise ConfigError([Problem(key="launch.device", what=what, tries=tries)])


def is_vendor_loaded() -> bool:
    """Whether the real torch_npu is loaded; its stand-in has no devices."""
    return hasattr(sys.modules.get("torch_npu"), "npu")


def _npus() -> tuple[int, str]:
    """How many NPUs there are, and what is missing where there is none."""
    is_rehearsed = "torch_npu" in sys.modules and not is_vendor_loaded()
    if is_rehearsed or find_spec("torch_npu") is None:
        return 0, "the package torch_npu is not installed"
    try:
        import torch_npu
    except (ImportError, OSError) as error:  # its libraries need those of CANN
        return 0, f"torch_npu cannot be imported, which needs CANN's libraries: {error}"
    count = int(torch_npu.npu.device_count())
    return count, "" if count else "torch_npu finds no NPU"
