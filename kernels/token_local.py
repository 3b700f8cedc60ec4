"""Functions that work token by token but in an order of their own: mixture-of-experts dispatch.

While a model is traced such a function stays one opaque node, `asp::token_local`; lowering calls the
function itself on each rank's own tokens, so its sorts, histograms and grouped matmuls never see the
whole sequence. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable

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
    return call(tokens, weights, key).clone()


@token_local.register_fake
def _(tokens: list[Tensor], weights: list[Tensor], key: str) -> Tensor:
    return torch.empty_like(call(tokens, weights, key), memory_format=torch.contiguous_format)
