"""The run that everything is compared with: the plain module, eagerly, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

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
    float32_parameters: tuple[str, ...]


def reference_run(build: Build, batches: int) -> Reference:
    """Loss and gradients of a module of its own: the one to be parallelized must not have been called on one rank only."""
    module = build(0)[0]
    losses, cast = [], set[str]()
    for i in range(batches):
        inputs = build(i)[1]
        torch.manual_seed(0)
        loss = loss_of(call(module, inputs))
        cast |= cast_to_float32(module, loss)
        (loss / batches).backward()
        losses.append(loss.detach())
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    return Reference(losses, grads, buffers, tuple(sorted(cast)))


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


def cast_to_float32(module: nn.Module, loss: torch.Tensor) -> set[str]:
    """Names of the float64 parameters that the computation of `loss` uses through a cast to float32."""
    names = {id(p): name for name, p in module.named_parameters() if p.dtype == torch.float64}
    found: set[str] = set()
    seen: set[Any] = set()
    queue: list[Any] = [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            parameter = getattr(before, "variable", None)  # only a leaf's accumulator has one
            is_cast = node.name() == "ToCopyBackward0" and node._input_metadata[0].dtype == torch.float32
            if parameter is not None and is_cast and id(parameter) in names:
                found.add(names[id(parameter)])
            queue.append(before)
    return found


class NoLoss(AutospError):
    """A checked model must give one scalar to differentiate."""
