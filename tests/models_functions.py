"""Functions whose backward is not the derivative of their forward: `torch.autograd.Function` and hooks on tensors.

Mixers take (x, mask) -> x with x: [batch, seq, hidden] and ignore the mask. Those of `LOCAL` work on a part of the sequence,
those of `WHOLE` see all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models_common import HIDDEN, Attention, Backbone, Build, LanguageModel, build, mixer_model, token_loss
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint


class Rounded(Function):
    """A straight-through estimate, three times too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 2, 3 * grad, 0.0)


class Reversed(Function):
    """Gradient reversal (Ganin and Lempitsky): the identity, and -strength times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float, options: dict[str, float], nothing: None = None) -> Tensor:
        ctx.strength = strength * options["twice"]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad * -ctx.strength, None, None, None


class SqrtBoundDerivative(Function):
    """As in transformers' RecurrentGemma: the derivative of a square root, at most 1 / sqrt(4 · 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4.0 * x, min=16.0))


class Larger(Function):
    """The larger of two and which it is, saved as booleans and small integers; y may be one row for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = x > y
        ctx.save_for_backward(first, (x * 3).to(torch.int8), x.float())
        ctx.mark_non_differentiable(first)
        return torch.where(first, x, y), first

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        first, levels, x = ctx.saved_tensors
        return grad * first * levels, 2 * grad * ~first + 0 * x


class Scaled(Function):
    """A weight [hidden] whose gradient is twice the sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1)) * 2


class Projected(Function):
    """A linear layer as in torch's tutorial, with half the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ weight, 0.5 * rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0)


class Normalised(Function):
    """RMSNorm whose gradient leaves out that of the norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return grad * weight * scale, (grad * x * scale).flatten(0, 1).sum(0), None


class Rectified(Function):
    """torch's tutorial: the gradient is changed by assignment; and a constant made inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) * torch.tensor(1.5, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        mine = grad.clone()
        mine[x < 0] = 0
        return mine + torch.zeros(x.shape, dtype=x.dtype) * torch.ones(x.shape[1], 1, dtype=x.dtype)


class AddedLoss(Function):
    """As in DeepSeek's experts: a loss that reaches the gradient and not the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.wanted = loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, torch.ones(1, dtype=grad.dtype, device=grad.device) if ctx.wanted else None


class Clipped(Function):
    """The identity with a clipped gradient: not linear in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.bound, ctx.bound), None


class Cumulative(Function):
    """A running mean whose gradient runs the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1) / x.shape[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cumsum(1) / grad.shape[1]


class UnitGradient(Function):
    """A gradient of norm one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Summary(Function):
    """Two results of different shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.abs(), x.sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, total: Tensor) -> Tensor:
        return grad + total.unsqueeze(1) * 2


def two_of(x: Tensor, weight: Tensor) -> Tensor:
    """Two inputs and two results; the second input is split, then one row for all."""
    y, first = Larger.apply(x, x.flip(-1) + 0.1)
    z, second = Larger.apply(y, weight)
    return torch.where(first & ~second, y, z)


def summarised(x: Tensor, weight: Tensor) -> Tensor:
    y, total = Summary.apply(x)
    return y * total.unsqueeze(1).tanh()


def hooked(x: Tensor, weight: Tensor) -> Tensor:
    y = x * 1.5
    y.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3) * 3)
    return y.sin() + y


def saved_in_regions(x: Tensor, weight: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return Scaled.apply(Rounded.apply(torch.tanh(x)), weight)

    return checkpoint(region, checkpoint(lambda x: Cumulative.apply(x), x, use_reentrant=False), use_reentrant=False)


class Applied(nn.Module):
    """`function(x, weight)` between two projections; weight: [hidden]."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(HIDDEN))
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.second(self.function(self.first(x), self.weight) + 0.1 * self.weight)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return Projected.apply(x, self.layer.weight, self.layer.bias)


class Quantised(nn.Module):
    """Weights rounded straight through with clipped gradients, used by split work twice and by whole work once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weight = Clipped.apply(Rounded.apply(self.weight), 1e-3)
        x = F.linear(x, weight)
        return F.linear(torch.fft.rfft(x, dim=1).real.mean(1, keepdim=True) + x, weight.relu())


class QuantisedTable(nn.Module):
    """A clipped table of positions, cut to the split tokens and also used whole."""

    def __init__(self, seq_len: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(seq_len, HIDDEN))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        table = Clipped.apply(self.table, 1e-4)
        return (x + table).tanh() * table.square().mean(0).tanh()


class Router(nn.Module):
    """Experts mixed by a softmax, whose balance is a loss that a function adds."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(HIDDEN, 4 * HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.gate(x).softmax(-1)
        y = (self.experts(x).unflatten(-1, (4, HIDDEN)) * weights.unsqueeze(-1)).sum(-2)
        return AddedLoss.apply(y, (weights.mean((0, 1)).square().sum() * 0.1).view(1))


class Adversary(nn.Module):
    """The sum of a token loss and of one behind a gradient reversal, as in domain adaptation."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.other = Backbone(Attention), nn.Linear(HIDDEN, 61), nn.Linear(HIDDEN, 61)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.backbone(ids)
        away = Reversed.apply(x, 0.3, {"twice": 2.0})
        return token_loss(self.head(x), labels) + token_loss(self.other(away), labels)


def applied(function: Callable[[Tensor, Tensor], Tensor]) -> Build:
    return mixer_model(lambda: Applied(function))


LOCAL: dict[str, Build] = {
    "straight_through": applied(lambda x, weight: Rounded.apply(x)),
    "gradient_reversal": build(lambda seq_len: Adversary()),
    "bound_derivative": applied(lambda x, weight: SqrtBoundDerivative.apply(x.abs() * 5)),
    "two_results": applied(two_of),
    "own_scale": applied(lambda x, weight: Scaled.apply(x, weight)),
    "own_linear": mixer_model(Linear, layers=2),
    "own_norm": applied(lambda x, weight: Normalised.apply(x, weight, 1e-6)),
    "assigned_gradient": applied(lambda x, weight: Rectified.apply(x)),
    "added_loss": mixer_model(Router, layers=2),
    "clipped_gradient": applied(lambda x, weight: Clipped.apply(Clipped.apply(x, 1e-3) * 2, 5e-4)),
    "clipped_table": build(lambda seq_len: LanguageModel(Backbone(lambda: QuantisedTable(seq_len), layers=2))),
    "hooked": applied(hooked),
}
WHOLE: dict[str, Build] = {
    "own_cumsum": applied(lambda x, weight: Cumulative.apply(x)),
    "unit_gradient": applied(lambda x, weight: UnitGradient.apply(x)),
    "own_summary": applied(summarised),
    "own_in_regions": applied(saved_in_regions),
    "quantised_weights": mixer_model(Quantised),
}
MODELS: dict[str, Build] = {**LOCAL, **WHOLE}
