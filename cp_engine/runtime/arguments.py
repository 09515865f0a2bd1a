"""Arguments of the library: what is of a wrong type is named where it is given, with what to write instead."""

from types import NoneType

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_engine.errors import Problem
from cp_engine.plan.ir import Plan
from cp_engine.runtime.devices import DEVICES, REHEARSAL

MESH = "dist.init_device_mesh('cpu', (ranks,), mesh_dim_names=('cp',))"


def wrong(key: str, value: object, allowed: type | tuple[type, ...], needed: str, *tries: str) -> list[Problem]:
    """A problem where an argument has another type than it must have.

    Args:
        key: the argument, as `function.argument` or by its name.
        value: what was given.
        allowed: its types; a bool is no int.
        needed: the same in words.
        tries: what can be written instead.

    Returns:
        One problem or none.
    """
    types = allowed if isinstance(allowed, tuple) else (allowed,)
    if isinstance(value, types) and not (isinstance(value, bool) and bool not in types):
        return []
    return [Problem(key=key, what=f"is {shown(value)}, and {needed} is needed", tries=tries)]


def shown(value: object) -> str:
    """A value in an error message; of one that would fill the screen, its type."""
    text = repr(value)
    return text if len(text) < 40 and "\n" not in text else f"of type {type(value).__name__}"


def of_length(key: str, x: object, dim: object, length: int, wanted: str) -> list[Problem]:
    """What is wrong with a tensor that must be so long along a dim.

    Args:
        key: where it was given.
        x: the tensor.
        dim: of it.
        length: in positions.
        wanted: whose length that is, for the message.

    Returns:
        One problem, or none.
    """
    problems = wrong(key, x, Tensor, "a tensor", "torch.as_tensor(...)") + wrong("dim", dim, int, "a number", "dim=1")
    if problems or not isinstance(x, Tensor) or not isinstance(dim, int):
        return problems
    if not -x.ndim <= dim < x.ndim:
        return [Problem(key=key, what=f"has {x.ndim} dims, of which none is {dim}, and {wanted} {length}")]
    if x.shape[dim] != length:
        return [Problem(key=key, what=f"has {x.shape[dim]} positions along dim {dim}, and {wanted} {length}")]
    return []


def of_engine(plan: object, mesh: object, device: object, kernels: object, heads: object) -> list[Problem]:
    """What is wrong with the arguments of an engine, before any of them is used."""
    problems = wrong("plan", plan, Plan, "a plan", "cp_engine.compile(..., mesh=mesh)")
    problems += wrong("mesh", mesh, (DeviceMesh, NoneType), "a DeviceMesh or None", MESH)
    problems += wrong("heads", heads, (DeviceMesh, NoneType), "a DeviceMesh or None")
    if isinstance(heads, DeviceMesh) and heads.ndim != 1:
        problems.append(Problem(key="heads", what=f"has {heads.ndim} dims, and a mesh of one is needed"))
    if mesh is None and isinstance(plan, Plan) and plan.degree > 1:
        problems.append(Problem(key="mesh", what=f"is missing, and the plan is for {plan.degree} ranks", tries=(MESH,)))
    if heads is None and isinstance(plan, Plan) and plan.shape.head_ranks > 1:
        what = f"is missing, and the heads of a query lie on {plan.shape.head_ranks} ranks"
        problems.append(Problem(key="heads", what=what))
    for key, value, allowed in (("device", device, DEVICES), ("kernels", kernels, (*DEVICES, REHEARSAL))):
        if value is not None and value not in allowed:
            details = (("allowed", ", ".join(allowed)),)
            problems.append(Problem(key=key, what=f"{value!r} is no type of device", details=details))
    return problems
