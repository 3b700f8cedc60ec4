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
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

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


# Convolutions along the sequence.


class Projected(nn.Module):
    """Base of mixers of a projection of the tokens."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(HIDDEN, HIDDEN)


class Convolved(nn.Module):
    """silu of a convolution along the sequence, of which the first `seq` positions count."""

    def __init__(self, size: int, groups: int = HIDDEN, **options: object):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, size, groups=groups, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


def causal_conv() -> nn.Module:
    """Mamba's: each channel over this token and the three before it."""
    return Convolved(4, padding=3)


class PaddedConv(Convolved):
    """Causal, padded by hand: [0, 0, 0, x_1, x_2, ..]."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.conv(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)


class ConvolvedTable(nn.Module):
    """The sequence as an image: [batch, 4, seq, 8], convolved along tokens and channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, (5, 3), padding=(2, 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.conv(x.unflatten(-1, (4, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)


class OneByOne(nn.Module):
    """A linear map spelled as a convolution, without a batch dimension for all but one row."""

    def __init__(self):
        super().__init__()
        self.conv, self.around = nn.Conv1d(HIDDEN, HIDDEN, 1), nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.conv(x.mT)
        return (y + self.around(y[0])).mT


# Scans along the sequence.


class CumulativeMean(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return torch.cumsum(self.value(x), dim=1) / count[:, None]


class CumulativeGate(Projected):
    """Tokens fade with the product of all gates so far; where a gate is shut everything after it is."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        gate = 2 * torch.sigmoid(self.value(x))
        open_ = (torch.arange(x.shape[1], device=x.device) % 47 != 40)[:, None]
        return (gate * open_).cumprod(1) * x + gate.flatten(2).cumprod(dim=-2)


class RunningSoftmax(Projected):
    """The mean of the tokens so far, weighted by the exponential of a score that is -inf for two of three tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = (torch.arange(x.shape[1], device=x.device) % 3 == 0)[:, None]
        score = torch.where(seen, self.value(x), float("-inf"))
        weight = score.logcumsumexp(dim=1)
        return (score.exp() * x).cumsum(dim=1) * torch.exp(-weight) + weight


Pair = tuple[Tensor, Tensor]


def then(first: Pair, second: Pair) -> Pair:
    """(a, b) means h -> a h + b."""
    return first[0] * second[0], second[0] * first[1] + second[1]


class AffineRecurrence(nn.Module):
    """h_t = a_t h_{t-1} + b_t, as an associative scan of the maps."""

    def __init__(self, reverse: bool = False):
        super().__init__()
        self.reverse, self.decay, self.value = reverse, nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        maps = (torch.sigmoid(self.decay(x)), self.value(x))
        return associative_scan(then, maps, dim=1, reverse=self.reverse, combine_mode="generic")[1]


class CheckpointedRecurrence(AffineRecurrence):
    """Recomputed in the backward, where the first rank has no use for what the others need again."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Products(nn.Module):
    """Products of 2x2 matrices, which do not commute, and beside them a sum whose terms another parameter scales."""

    def __init__(self):
        super().__init__()
        self.turn, self.value, self.scale = nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, HIDDEN), nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        turns = torch.eye(2, dtype=x.dtype) + 0.1 * torch.tanh(self.turn(x).unflatten(-1, (2, 2)))
        both = {"turn": turns, "sum": self.value(x)}

        def combine(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
            both = first["sum"] + second["sum"] + self.scale * first["sum"] * second["sum"] / 100
            return {"turn": first["turn"] @ second["turn"], "sum": both}

        found = associative_scan(combine, both, dim=1, combine_mode="generic")
        return found["sum"] * found["turn"].flatten(2).repeat(1, 1, HIDDEN // 4) / 10


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


class TokenMixing(nn.Module):
    """A linear map over the sequence axis (MLP-Mixer)."""

    def __init__(self, seq_len: int):
        super().__init__()
        self.mix = nn.Linear(seq_len, seq_len)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class PrefixConv(Convolved):
    """Seven tokens are convolved and the others are not."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.cat([self.conv(x[:, :7].mT)[..., :7].mT, x[:, 7:]], dim=1)


class StridedConv(nn.Module):
    """Every second token is left out and interpolated again."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv1d(HIDDEN, HIDDEN, 3, stride=2, padding=1, groups=HIDDEN)
        self.up = nn.ConvTranspose1d(HIDDEN, HIDDEN, 2, stride=2, groups=HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.up(self.down(x.transpose(1, 2)))[..., : x.shape[1]].transpose(1, 2)


class SortedTokens(Projected):
    """Each channel's values sorted along the sequence."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.value(x).sort(dim=1).values


# Shifts, turns, prefixes, strides and chunks of the sequence.


class Flip(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.value(x).flip(1)


class Roll(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.roll(self.value(x), shifts=5, dims=1) * x


class BothWays(Convolved):
    """A causal convolution and a recurrence in both directions, as in bidirectional Mamba."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        there, back = (super(BothWays, self).forward(y).cumsum(1) for y in (x, x.flip(1)))
        return (there + back.flip(1)) / x.shape[1]


class TokenShift(nn.Module):
    """Each channel blends this token with the one before it (RWKV)."""

    def __init__(self):
        super().__init__()
        self.blend, self.value = nn.Parameter(torch.rand(HIDDEN)), nn.Linear(HIDDEN, HIDDEN)

    def before(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, -1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.value(x + (self.before(x) - x) * self.blend).relu().square()


class ShiftByCat(TokenShift):
    def before(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


class ShiftByModule(TokenShift):
    def before(self, x: Tensor) -> Tensor:
        return nn.ZeroPad2d((0, 0, 1, -1))(x)


class ShiftByRoll(TokenShift):
    def before(self, x: Tensor) -> Tensor:
        later = torch.arange(x.shape[1], device=x.device) > 0
        return torch.roll(x, 1, dims=1) * later[:, None]


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
    "unknown_token_mixing": build(lambda seq_len: LanguageModel(Backbone(lambda: TokenMixing(seq_len), layers=1))),
    "unknown_strided_conv": mixer_model(StridedConv),
    "unknown_prefix_conv": mixer_model(lambda: PrefixConv(4, padding=3)),
    "unknown_sort": mixer_model(SortedTokens),
    "conv_causal": mixer_model(causal_conv, layers=2),
    "conv_same": mixer_model(lambda: Convolved(5, padding="same")),
    "conv_same_even": mixer_model(lambda: Convolved(4, groups=4, padding="same", dilation=3)),
    "conv_dilated": mixer_model(lambda: Convolved(3, groups=2, padding=8, dilation=4, bias=False)),
    "conv_long": mixer_model(lambda: Convolved(64, padding=63)),
    "conv_padded": mixer_model(lambda: PaddedConv(4)),
    "conv_table": mixer_model(ConvolvedTable),
    "conv_one_by_one": mixer_model(OneByOne),
    "cumsum": mixer_model(CumulativeMean),
    "cumprod": mixer_model(CumulativeGate),
    "logcumsumexp": mixer_model(RunningSoftmax),
    "affine_recurrence": mixer_model(AffineRecurrence, layers=2),
    "affine_recurrence_reverse": mixer_model(lambda: AffineRecurrence(reverse=True)),
    "recurrence_checkpointed": mixer_model(CheckpointedRecurrence),
    "products": mixer_model(Products),
    "flip": mixer_model(Flip),
    "roll": mixer_model(Roll),
    "both_ways": mixer_model(lambda: BothWays(4, padding=3)),
    "token_shift": mixer_model(TokenShift, layers=2),
    "token_shift_cat": mixer_model(ShiftByCat),
    "token_shift_module": mixer_model(ShiftByModule),
    "token_shift_roll": mixer_model(ShiftByRoll),
    "prefix_tokens": mixer_model(PrefixTokens),
    "strided": mixer_model(Strided),
    "chunked": mixer_model(Chunked),
}
