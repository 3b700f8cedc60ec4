"""Tokens mixed without a softmax: linear attention, pairwise values, and unknown operators.

Mixers take (x, mask) -> x with x: [batch, seq, hidden] and ignore the mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models_common import (
    HIDDEN,
    Attention,
    Backbone,
    Build,
    LanguageModel,
    build,
    mixer_model,
    relative,
    token_loss,
)
from torch import Tensor, nn

# Linear attention, (q, k, v, mask) -> [batch, heads, seq, head_dim].


def linear_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.tril(q @ k.mT) @ v / q.shape[-2] ** 0.5


def linear_normalised(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Katharopoulos et al.: positive features, each row divided by its sum."""
    scores = torch.tril((F.elu(q) + 1) @ (F.elu(k) + 1).mT)
    return (scores / scores.sum(dim=-1, keepdim=True)) @ v


def linear_decayed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """RetNet's parallel form: scores decay with distance."""
    distance = -relative(q).to(q.dtype)
    return (q @ k.mT * torch.where(distance >= 0, 0.9**distance, 0.0)) @ v


def linear_noncausal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return q @ (k.mT @ v) / q.shape[-2]


# Pairwise values consumed by something else than a product with v.


class PairwiseGate(nn.Module):
    """How much all keys agree with a query gates its token."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        return scores.sigmoid().sum(dim=-1, keepdim=True) * x / x.shape[1]


class GramLoss(nn.Module):
    """The mean of all pairwise products is an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.model = LanguageModel(Backbone(layers=1))
        self.q, self.k = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.model.backbone(ids)
        gram = self.q(x) @ self.k(x).mT
        auxiliary = gram.mean() + gram.square().mean()
        return {"loss": token_loss(self.model.head(x), labels) + 0.1 * auxiliary}


class ReturnsWeights(nn.Module):
    """Attention weights averaged over the heads are an output: [batch, seq, seq]."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.heads, self.model = heads, LanguageModel(Backbone(layers=1))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.model.backbone(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(relative(x) > 0, float("-inf"))
        weights = scores.softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return {"loss": token_loss(self.model.head(x), labels), "weights": weights.mean(dim=1)}


# Operators with no rule along the sequence.


class FourierMix(nn.Module):
    """A learned complex filter on the spectrum of the sequence."""

    def __init__(self):
        super().__init__()
        self.gain, self.phase = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        spectrum = spectrum * self.gain + spectrum * self.phase * 1j
        return torch.fft.irfft(spectrum.square(), n=x.shape[1], dim=1) / x.shape[1]


class CumulativeMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return torch.cumsum(self.value(x), dim=1) / count[:, None]


class CausalConv(nn.Module):
    """A depthwise convolution over this token and the three before it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, kernel_size=4, padding=3, groups=HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


class TokenMixing(nn.Module):
    """A linear map over the sequence axis (MLP-Mixer)."""

    def __init__(self, seq_len: int):
        super().__init__()
        self.mix = nn.Linear(seq_len, seq_len)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class Flip(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.value(x).flip(1)


class Roll(Flip):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.roll(self.value(x), shifts=5, dims=1) * x


class SortedTokens(Flip):
    """Each channel's values sorted along the sequence."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.value(x).sort(dim=1).values


# Shifts, prefixes, strides and chunks of the sequence.


class TokenShift(nn.Module):
    """Each channel blends this token with the one before it (RWKV)."""

    def __init__(self):
        super().__init__()
        self.blend, self.value = nn.Parameter(torch.rand(HIDDEN)), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        previous = F.pad(x, (0, 0, 1, -1))
        return self.value(x + (previous - x) * self.blend).relu().square()


class PrefixTokens(nn.Module):
    """Five learned tokens stand before the others and are dropped again after attention."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 5, HIDDEN))
        self.attention = Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.cat([self.prefix.expand(x.shape[0], -1, -1), x], dim=1)
        return self.attention(x)[:, 5:]


class Strided(nn.Module):
    """Attention among the means of neighbouring pairs, each given back to both tokens."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seq_len = x.shape[1]
        even = F.pad(x, (0, 0, 0, seq_len % 2))
        pairs = self.attention((even[:, ::2] + even[:, 1::2]) / 2)
        return pairs.repeat_interleave(2, dim=1)[:, :seq_len]


class Chunked(nn.Module):
    """Attention inside chunks of eight tokens, the last one padded."""

    def __init__(self, size: int = 8):
        super().__init__()
        self.size, self.attention = size, Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, seq_len, width = x.shape
        x = F.pad(x, (0, 0, 0, -seq_len % self.size))
        chunks = x.view(batch, x.shape[1] // self.size, self.size, width)
        mixed = self.attention(chunks.flatten(0, 1)).view(x.shape)
        return mixed[:, :seq_len]


MODELS: dict[str, Build] = {
    "linear_masked": mixer_model(lambda: Attention(linear_masked), layers=2),
    "linear_normalised": mixer_model(lambda: Attention(linear_normalised), layers=2),
    "linear_decayed": mixer_model(lambda: Attention(linear_decayed), layers=2),
    "linear_noncausal": mixer_model(lambda: Attention(linear_noncausal), layers=2),
    "pairwise_gate": mixer_model(PairwiseGate),
    "gram_loss": build(lambda seq_len: GramLoss()),
    "returns_weights": build(lambda seq_len: ReturnsWeights()),
    "unknown_fft": mixer_model(FourierMix),
    "unknown_cumsum": mixer_model(CumulativeMean),
    "unknown_conv1d": mixer_model(CausalConv),
    "unknown_token_mixing": build(lambda seq_len: LanguageModel(Backbone(lambda: TokenMixing(seq_len), layers=1))),
    "unknown_flip": mixer_model(Flip),
    "unknown_roll": mixer_model(Roll),
    "unknown_sort": mixer_model(SortedTokens),
    "token_shift": mixer_model(TokenShift, layers=2),
    "prefix_tokens": mixer_model(PrefixTokens),
    "strided": mixer_model(Strided),
    "chunked": mixer_model(Chunked),
}
