"""Models for the command line's tests: `autosp check tests/factories.py:NAME`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """One causal attention with a mean squared output as the loss. `inputs`: x [batch, seq, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return (self.out(y) ** 2).mean()


class Doubling(Attention):
    """Another function when it is compiled: twice the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.compiler.is_compiling() else 1)


class Breaking(Attention):
    """Branches on data: cannot be captured as one graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        if loss > 0:
            loss = loss * 2
        return loss


class Shouting(Attention):
    """Prints on import and on call: the report must stay clean."""

    def __init__(self) -> None:
        super().__init__()
        print("building")


def attention() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Attention(), {"x": torch.randn(2, 10, 12)}


def positional() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Attention(), (torch.randn(2, 11, 12),)


def doubling() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Doubling(), {"x": torch.randn(2, 10, 12)}


def breaking() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Breaking(), {"x": torch.randn(2, 10, 12)}


def short() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Attention(), {"x": torch.randn(2, 3, 12)}


def shouting() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Shouting(), {"x": torch.randn(2, 10, 12)}


def not_a_pair() -> nn.Module:
    return Attention()


def no_loss() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Linear(3, 3), {"input": torch.randn(2, 3)}


def dies() -> None:
    import os

    os._exit(7)


def sleeps() -> None:
    import time

    time.sleep(600)
