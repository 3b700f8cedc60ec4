"""The run that everything is compared with: the plain module, eagerly, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autosp.kernels.errors import AutospError

Inputs = Mapping[str, Any] | tuple[Any, ...]


class Build(Protocol):
    """Gives the same module on every rank, and the batch of one data-parallel group (`batch_index`)."""

    def __call__(self, batch_index: int) -> tuple[nn.Module, Inputs]: ...


@dataclass(frozen=True)
class Reference:
    """The single-device run: one loss for each data-parallel batch, gradients of their mean, buffers afterwards."""

    losses: list[torch.Tensor]
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    casts: bool = False  # the model casts to float32 by itself, which `Float64` kept from it


def reference_run(build: Build, batches: int) -> Reference:
    """Loss and gradients of a module of its own: the one to be parallelized must not have been called on one rank only."""
    module = build(0)[0]
    losses, mode = [], Float64()
    double = any(p.dtype == torch.float64 for p in module.parameters())
    for i in range(batches):
        inputs = build(i)[1]
        torch.manual_seed(0)
        with mode if double else contextlib.nullcontext():
            loss = loss_of(call(module, inputs))
        (loss / batches).backward()
        losses.append(loss.detach())
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    return Reference(losses, grads, buffers, mode.used)


def call(module: Callable[..., Any], inputs: Inputs) -> Any:
    """`module(**inputs)` for a dict, `module(*inputs)` for a tuple."""
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar to differentiate: the output's `loss`, the output itself, or the only scalar in a tuple of outputs.

    Raises `NoLoss` if there is none.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    candidates = [named] if named is not None else list(output) if isinstance(output, tuple | list) else [output]
    scalars = [x for x in candidates if isinstance(x, torch.Tensor) and x.numel() == 1 and x.requires_grad]
    if len(scalars) != 1:
        raise NoLoss(f"the model's output ({type(output).__name__}) has {len(scalars)} scalars to differentiate, one is needed")
    return scalars[0].reshape(())


class Float64(TorchFunctionMode):
    """Inside it, what a float64 model itself casts to float32 (logits, norms) stays float64.

    A float32 sum over tokens would hide errors below 1e-7. `used` says whether there was anything to keep.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            self.used = True
            return args[0].double()
        kwargs = kwargs or {}
        if any(x is torch.float32 for x in (*args, *kwargs.values())):
            self.used = True
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


class NoLoss(AutospError):
    """A checked model must give one scalar to differentiate."""
