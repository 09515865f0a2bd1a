"""The library: a preset's name, a mesh and a shape become an engine."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import NoneType

import torch
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh

from cp_engine.algebra.shape import Shape
from cp_engine.config.compose import compose, plain
from cp_engine.config.composition import plan_from_config
from cp_engine.errors import ConfigError, Problem
from cp_engine.runtime import connect
from cp_engine.runtime.arguments import MESH, wrong
from cp_engine.runtime.context import ContextParallel
from cp_engine.runtime.devices import DEVICES


def compile(
    composition: str | Mapping[str, object],
    *,
    mesh: DeviceMesh | None,
    sequence: int,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    v_head_dim: int | None = None,
    latent_dim: int = 0,
    rope_dim: int = 0,
    index_heads: int = 0,
    index_dim: int = 0,
    topk: int = 0,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    mask: str | Mapping[str, object] = "causal",
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
    device: str | None = None,
) -> ContextParallel:
    """Composes a strategy, proves it for one attention call and connects it to a device mesh.

    Args:
        composition: name of a preset, or a composition as data (a `cp` node), plain or as Hydra composes it.
        mesh: 1-D over the context-parallel ranks, or N-D with the composition's axis names; None for one rank.
        sequence: global length in tokens.
        heads: query heads.
        head_dim: of q and k.
        kv_heads: key and value heads; None is `heads`.
        v_head_dim: of v and out; None is `head_dim`.
        latent_dim: of the latent of multi-head latent attention, for compositions that expand it.
        rope_dim: of its shared rotary key, part of `head_dim`.
        index_heads: of an indexer, for compositions that select keys; in absorbed form, with `kv_heads` 1.
        index_dim: of each of them.
        topk: keys that it selects for a query.
        batch: sequences per call, for the bytes in the plan; a call may bring any number.
        dtype: of q, k and v.
        mask: what a query may see.
        overrides: as on the command line, such as `layout@cp.layout=zigzag`.
        config_dir: a folder with own presets, such as `config_dir/cp/mine.yaml`.
        device: device type of the tensors; None is the mesh's.

    Returns:
        The engine; `engine.plan` is its plan.

    Raises:
        CPError: all problems, before anything is exchanged between ranks.
    """
    with connect.together(mesh, "compile"):
        if isinstance(composition, DictConfig):  # as Hydra composes it
            composition = plain(composition)
        if isinstance(mask, DictConfig):
            mask = plain(mask)
        problems = wrong("composition", composition, (str, Mapping), "the name of a preset, or a mapping")
        problems += wrong("mesh", mesh, (DeviceMesh, NoneType), "a DeviceMesh or None", MESH)
        problems += wrong("config_dir", config_dir, (str, PathLike, NoneType), "a folder", "config_dir='my'")
        if isinstance(overrides, str):
            what = "is one string, and a list is needed: each override by itself"
            problems.append(Problem(key="overrides", what=what, tries=(f"overrides=[{overrides!r}]",)))
        elif not isinstance(overrides, list | tuple) or not all(isinstance(o, str) for o in overrides):
            problems += wrong("overrides", overrides, (), "a list of texts", "overrides=['cp.head_groups=2']")
        if device not in (None, *DEVICES):
            details = (("allowed", ", ".join(DEVICES)),)
            problems.append(Problem(key="device", what=f"{device!r} is no type of device", details=details))
        if problems:
            raise ConfigError(problems, "compile")
        if not isinstance(composition, str) and (overrides or config_dir is not None):
            what = "apply to a preset that is composed, and the composition is given as data"
            raise ConfigError([Problem(key="overrides, config_dir", what=what)], f"cp={composition.get('name')}")
        cp = compose(composition, overrides, config_dir) if isinstance(composition, str) else composition
        shape = Shape(
            batch=batch,
            sequence=sequence,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
            dtype=str(dtype).removeprefix("torch."),
            latent_dim=latent_dim,
            rope_dim=rope_dim,
            index_heads=index_heads,
            index_dim=index_dim,
            topk=topk,
        )
        degree = 1 if mesh is None else mesh.size()
        plan = plan_from_config(cp, shape=shape, mask=mask, world_degree=degree)
    return ContextParallel(plan, mesh, device)
