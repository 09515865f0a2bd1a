"""A module as a user writes one, whose training goes wrong on one rank: `titan.experimental.custom_import=tests.faults`.

The environment says how: `FAULT_RANK`, `FAULT_STEP` (counted from 1), `FAULT_AT` (import, start, forward, backward, optimizer, state) and
`FAULT`, a line of Python in which `os`, `signal`, `sys`, `threading`, `time`, `torch` and `model` are known.
"""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchtitan.protocols import train_spec

NAME = "llama3"


class Fault:
    """What happens on one rank at one place of one step.

    Args:
        model: of this rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step = model, 1
        self.is_here = os.environ["RANK"] == os.environ["FAULT_RANK"]

    def at(self, place: str) -> None:
        """Called at every place."""
        if self.is_here and os.environ["FAULT_AT"] == place and int(os.environ.get("FAULT_STEP", "1")) == self.step:
            known = {
                "os": os,
                "signal": signal,
                "sys": sys,
                "time": time,
                "threading": threading,
                "torch": torch,
                "model": self.model,
            }
            exec(os.environ["FAULT"], known)

    def forward(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        self.at("forward")

    def backward(self, gradient: Tensor) -> None:
        self.at("backward")

    def hooked(self, module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.backward)

    def stepped(self, *_: object) -> None:
        self.at("optimizer")
        self.step += 1


def with_fault(build: Callable[..., object]) -> Callable[..., object]:
    """torchtitan's optimizers, on which and on whose model the fault waits."""

    def build_optimizers(model_parts: list[nn.Module], *arguments: object, **keywords: object) -> object:
        made = build(model_parts, *arguments, **keywords)
        fault, model = Fault(model_parts[0]), model_parts[0]
        fault.at("start")
        model.register_forward_pre_hook(fault.forward)
        model.register_forward_hook(fault.hooked)
        optimizer = made.optimizers[0]  # type: ignore[attr-defined]
        optimizer.register_step_post_hook(fault.stepped)
        state_dict = made.state_dict  # type: ignore[attr-defined]

        def state() -> object:  # of a save, and of a load before it reads
            fault.at("state")
            return state_dict()

        made.state_dict = state  # type: ignore[attr-defined]
        return made

    return build_optimizers


if NAME not in train_spec._extra_train_specs:
    spec = train_spec.get_train_spec(NAME)
    train_spec.register_train_spec(
        NAME, dataclasses.replace(spec, build_optimizers_fn=with_fault(spec.build_optimizers_fn))
    )
    Fault(nn.Module()).at("import")
