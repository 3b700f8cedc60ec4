"""Softmax attention in the spellings people use, each in the same small language model.

Shapes: x is [batch, seq, hidden]; q, k, v are [batch, heads, seq, head_dim].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from models_common import (
    HEAD_DIM,
    HIDDEN,
    Attention,
    Backbone,
    Build,
    Inputs,
    LanguageModel,
    Mix,
    build,
    labelled_tokens,
    merge_heads,
    relative,
    rotary,
    sdpa_mask,
    split_heads,
)
from torch import Tensor, nn

SCALE = HEAD_DIM**-0.5


# Masks, (x, documents) -> mask, computed once and shared by the layers.


def additive_causal(x: Tensor, documents: Tensor | None) -> Tensor:
    """[1, 1, seq, seq] of 0 and the most negative finite number."""
    offset, lowest = relative(x), torch.finfo(x.dtype).min
    visible = torch.zeros_like(offset, dtype=x.dtype)
    return visible.masked_fill(offset > 0, lowest)[None, None]


def packed_documents(x: Tensor, documents: Tensor | None) -> Tensor:
    """[batch, 1, seq, seq], true for an earlier key of the same document."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same & (relative(x) <= 0))[:, None]


class HeadBias(nn.Module):
    """A learned number per head on every visible key: softmax ignores it, its gradient is 0."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        return self.bias + additive_causal(x, documents)


class SelfBias(HeadBias):
    """A learned number per head on a token's own key."""

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        return self.bias * (relative(x) == 0) + additive_causal(x, documents)


class DenseBias(nn.Module):
    """A learned [heads, seq, seq] table."""

    def __init__(self, seq_len: int, heads: int = 4):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, seq_len, seq_len))

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        return self.table.masked_fill(relative(x) > 0, float("-inf"))


class BucketBias(nn.Module):
    """T5's relative bias: exact near buckets, logarithmic far ones, by sign of the distance."""

    def __init__(self, buckets: int = 16, heads: int = 4, farthest: int = 64):
        super().__init__()
        self.half, self.farthest = buckets // 2, farthest
        self.embed = nn.Embedding(buckets, heads)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        offset, exact = relative(x), self.half // 2
        distance = offset.abs()
        far = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.farthest / exact)
        far = (exact + (far * (self.half - exact)).long()).clamp(max=self.half - 1)
        bucket = self.half * (offset > 0) + torch.where(distance < exact, distance, far)
        return self.embed(bucket).permute(2, 0, 1)[None]


# Mixers, (q, k, v, mask) -> [batch, heads, seq, head_dim].


def running_mask(x: Tensor, documents: Tensor | None) -> Tensor:
    """Causal, spelled as a running count over rows: no block of rows can be computed without the rows above it."""
    ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.long, device=x.device)
    return ones.cumsum(0) > torch.arange(x.shape[1], device=x.device)


def sdpa_complex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Rotary positions as complex numbers, as in the first Llama."""
    position = torch.arange(q.shape[2], device=q.device).to(q.dtype)
    angle = torch.outer(position, 10.0 ** -torch.linspace(0, 2, HEAD_DIM // 2, dtype=q.dtype, device=q.device))
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2) for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_doubled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention over the sequence twice in a row, of which the second time is kept."""
    q, k, v = (torch.cat([x, x * factor], 2) for x, factor in ((q, 0.5), (k, 2.0), (v, 3.0)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, q.shape[2] // 2 :]


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.softmax(q @ k.mT * SCALE + mask, dim=-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float = 3.0) -> Tensor:
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * SCALE / cap) * cap + mask
    return torch.matmul(F.softmax(scores, dim=-1), v)


def manual_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(relative(q) > 0, float("-inf"))
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return (weights / weights.sum(dim=-1, keepdim=True)) @ v


def late_normaliser(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Divide after the product with v, as a flash kernel does."""
    scores = (q @ k.mT * SCALE).masked_fill(relative(q) > 0, float("-inf"))
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values.detach())
    return (weights @ v) / weights.sum(dim=-1, keepdim=True)


def sdpa_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)


def sdpa_window(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    offset = relative(q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(offset <= 0) & (offset > -17))


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_interleaved(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Repeat each key head by expand and reshape, as transformers' repeat_kv does."""
    batch, kv_heads, seq_len, width = k.shape
    shape = (batch, kv_heads, q.shape[1] // kv_heads, seq_len, width)
    k, v = (t[:, :, None].expand(shape).reshape(batch, -1, seq_len, width) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Alibi(nn.Module):
    """A learned slope per head times the distance (Press et al., ALiBi)."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.slopes = nn.Parameter(0.5 ** torch.arange(1.0, heads + 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        offset = relative(q)
        scores = q @ k.mT / math.sqrt(HEAD_DIM) + self.slopes[:, None, None] * offset
        return scores.masked_fill(offset > 0, float("-inf")).softmax(dim=-1) @ v


class Sinks(nn.Module):
    """A learned logit per head joins the softmax and is dropped after it (gpt_oss)."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT * SCALE + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        scores = torch.cat([scores, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return F.softmax(scores, dim=-1)[..., :-1] @ v


# Attentions with projections of their own, (x, mask) -> x.


class EinsumAttention(nn.Module):
    """Everything by einsum; heads stay behind the sequence."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HIDDEN, heads, HEAD_DIM) / HIDDEN**0.5)
        self.out = nn.Parameter(torch.randn(heads, HEAD_DIM, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = torch.einsum("bsd,ndhe->nbshe", x, self.qkv).unbind(0)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE + mask
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v)
        return torch.einsum("bqhd,hde->bqe", mixed, self.out)


class BmmAttention(nn.Module):
    """Batch and heads merged, scores by baddbmm over a key-position bias, as in BLOOM."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(HIDDEN, 3 * heads * HEAD_DIM)
        self.out = nn.Linear(heads * HEAD_DIM, HIDDEN)
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, heads + 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, seq_len, _ = x.shape
        qkv = self.qkv(x).view(batch, seq_len, self.heads, 3, HEAD_DIM)
        q, k, v = (t.transpose(1, 2).reshape(-1, seq_len, HEAD_DIM) for t in qkv.unbind(3))
        position = torch.arange(seq_len, device=x.device)
        bias = (self.slopes[:, None, None] * position).repeat(batch, 1, 1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=SCALE)
        scores = scores.view(batch, self.heads, seq_len, seq_len) + mask
        weights = F.softmax(scores, dim=-1).view(-1, seq_len, seq_len)
        mixed = torch.bmm(weights, v).view(batch, self.heads, seq_len, HEAD_DIM)
        return self.out(mixed.permute(0, 2, 1, 3).reshape(batch, seq_len, -1))


class LatentAttention(nn.Module):
    """DeepSeek's MLA: keys are wider than values and share one rotary part over the heads."""

    def __init__(self, heads: int = 4, plain: int = 8, rope: int = 4, value: int = 6):
        super().__init__()
        self.heads, self.plain, self.rope, self.value = heads, plain, rope, value
        self.q = nn.Linear(HIDDEN, heads * (plain + rope), bias=False)
        self.down = nn.Linear(HIDDEN, 16 + rope, bias=False)
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, heads * (plain + value), bias=False)
        self.out = nn.Linear(heads * value, HIDDEN, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, q_rope = split_heads(self.q(x), self.heads).split([self.plain, self.rope], dim=-1)
        latent, k_rope = self.down(x).split([16, self.rope], dim=-1)
        k, v = split_heads(self.up(self.norm(latent)), self.heads).split([self.plain, self.value], dim=-1)
        k_rope = rotary(k_rope[:, None]).expand(-1, self.heads, -1, -1)
        q, k = torch.cat([q, rotary(q_rope)], dim=-1), torch.cat([k, k_rope], dim=-1)
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


# The table.


def mixed_by(mix: Mix | type[nn.Module], mask=None, heads: int = 4, kv_heads=None) -> Build:
    """A language model mixed by a function, or by a module made anew for each layer."""

    def attention() -> nn.Module:
        return Attention(mix() if isinstance(mix, type) else mix, heads, kv_heads)

    return build(lambda seq_len: LanguageModel(Backbone(attention, mask)))


def biased_by(bias) -> Build:
    """SDPA under the mask of the module `bias(seq_len)`, shared by two layers."""
    attention = lambda: Attention(sdpa_mask)  # noqa: E731
    return build(lambda seq_len: LanguageModel(Backbone(attention, bias(seq_len))))


def packed_tokens(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    """Documents of uneven length, cut differently in each row."""
    starts = torch.rand(batch, seq_len) < 5 / seq_len
    inputs = labelled_tokens(seq_len, batch, dtype)
    return {**inputs, "documents": starts.long().cumsum(dim=1)}


MODELS: dict[str, Build] = {
    "eager": mixed_by(eager, additive_causal),
    "alibi": mixed_by(Alibi),
    "softcap": mixed_by(softcap, additive_causal),
    "manual_softmax": mixed_by(manual_softmax),
    "late_normaliser": mixed_by(late_normaliser),
    "sinks": mixed_by(Sinks, additive_causal),
    "t5_bias": biased_by(lambda seq_len: BucketBias()),
    "einsum_attention": build(lambda s: LanguageModel(Backbone(EinsumAttention, additive_causal))),
    "bmm_attention": build(lambda s: LanguageModel(Backbone(BmmAttention, additive_causal))),
    "mla": build(lambda s: LanguageModel(Backbone(LatentAttention))),
    "gqa_sdpa": mixed_by(sdpa_gqa, heads=6, kv_heads=2),
    "mqa": mixed_by(sdpa_interleaved, heads=4, kv_heads=1),
    "odd_gqa": mixed_by(sdpa_repeated, heads=6, kv_heads=3),
    "three_heads": mixed_by(sdpa_gqa, heads=3),
    "sdpa_scale": mixed_by(sdpa_scale),
    "sdpa_complex": mixed_by(sdpa_complex),
    "sdpa_doubled": mixed_by(sdpa_doubled),
    "sdpa_running_mask": mixed_by(sdpa_mask, running_mask),
    "sdpa_window": mixed_by(sdpa_window),
    "sdpa_bool_mask": build(
        lambda s: LanguageModel(Backbone(lambda: Attention(sdpa_mask), packed_documents)),
        packed_tokens,
    ),
    "sdpa_float_mask": biased_by(lambda seq_len: SelfBias()),
    "sdpa_head_bias": biased_by(lambda seq_len: HeadBias()),
    "sdpa_dense_bias": biased_by(DenseBias),
}
