"""Functions that work token by token but in an order of their own: mixture-of-experts dispatch.

While a model is traced such a function stays one opaque node, `asp::token_local`, and each rank runs it on its own
tokens, so its sorts, histograms and grouped matmuls never see the whole sequence. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {}  # a custom op takes strings, not callables


def register(key: str, function: Callable[..., Tensor]) -> None:
    """`function(*tokens, *weights)` -> [tokens, ...] under the name that graphs carry."""
    _FUNCTIONS[key] = function


def call(tokens: list[Tensor], weights: list[Tensor], key: str) -> Tensor:
    """Run the function that was registered under `key`."""
    return _FUNCTIONS[key](*tokens, *weights)


@torch.library.custom_op("asp::token_local", mutates_args=())
def token_local(tokens: list[Tensor], weights: list[Tensor], key: str) -> Tensor:
    """The function as one operator; the result has the shape and type of the first token tensor."""
    return owned(call(tokens, weights, key))


def owned(x: Tensor) -> Tensor:
    """A copy in the strides that the fake kernels promise: compiled code reads memory by these."""
    return x.clone(memory_format=torch.contiguous_format)


@token_local.register_fake
def _(tokens: list[Tensor], weights: list[Tensor], key: str) -> Tensor:
    return torch.empty_like(tokens[0], memory_format=torch.contiguous_format)


@torch.library.custom_op("asp::token_local_backward", mutates_args=())
def token_local_backward(grad: Tensor, tokens: list[Tensor], weights: list[Tensor], key: str) -> list[Tensor]:
    """Gradients of the floating-point operands, in order; the function runs once more."""
    operands = [*tokens, *weights]
    wanted = [i for i, x in enumerate(operands) if x.is_floating_point()]

    def of(*values: Tensor) -> Tensor:
        taken = list(operands)
        for i, value in zip(wanted, values, strict=True):
            taken[i] = value
        return call(taken[: len(tokens)], taken[len(tokens) :], key)

    _, pull = torch.func.vjp(of, *(operands[i] for i in wanted))
    return [owned(g) for g in pull(grad)]


@token_local_backward.register_fake
def _(grad: Tensor, tokens: list[Tensor], weights: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in [*tokens, *weights] if x.is_floating_point()]


def _setup(ctx: Any, inputs: tuple[list[Tensor], list[Tensor], str], output: Tensor) -> None:
    tokens, weights, ctx.key = inputs
    ctx.tokens = len(tokens)
    ctx.save_for_backward(*tokens, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], list[Tensor | None], None]:
    operands = list(ctx.saved_tensors)
    grads = iter(token_local_backward(grad, operands[: ctx.tokens], operands[ctx.tokens :], ctx.key))
    out = [next(grads) if x.is_floating_point() else None for x in operands]
    return out[: ctx.tokens], out[ctx.tokens :], None


token_local.register_autograd(_backward, setup_context=_setup)
