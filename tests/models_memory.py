"""Attention between two sequences: an encoder's, a learned memory's, learned queries'.

Shapes: x is [batch, seq, hidden], memory [batch or 1, other_seq, hidden].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models_common import (
    CLASSES,
    HIDDEN,
    MLP,
    VOCAB,
    Attention,
    Block,
    Build,
    Inputs,
    build,
    labelled_rows,
    labelled_tokens,
    merge_heads,
    mixer_model,
    sdpa_mask,
    split_heads,
    token_ids,
    token_loss,
)
from torch import Tensor, nn


class CrossAttention(nn.Module):
    """Queries from x, keys and values from the memory."""

    def __init__(self, heads: int = 4, eager: bool = False):
        super().__init__()
        self.heads, self.eager = heads, eager
        self.q, self.kv = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q = split_heads(self.q(x), self.heads)
        k, v = (split_heads(t, self.heads) for t in self.kv(memory).chunk(2, dim=-1))
        if not self.eager:
            return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(x.dtype).min)
        return self.out(merge_heads(scores.softmax(dim=-1) @ v))


class EncoderDecoder(nn.Module):
    """A causal decoder looks at an encoder that reads ids of another length, some padded."""

    def __init__(self, eager: bool = False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.encoder = nn.ModuleList(Block(Attention(sdpa_mask)) for _ in range(2))
        self.decoder = nn.ModuleList(Block(Attention()) for _ in range(2))
        self.cross = nn.ModuleList(CrossAttention(eager=eager) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, source_ids: Tensor, source_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask, memory = source_mask[:, None, None, :], self.embed(source_ids)
        for block in self.encoder:
            memory = block(memory, mask)
        x = self.embed(ids)
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = block(x)
            x = x + cross(self.norm(x), memory, mask)
        logits = self.head(x)
        return {"loss": token_loss(logits, labels), "logits": logits}


class MemoryAttention(nn.Module):
    """Tokens look at seven learned slots, then at each other."""

    def __init__(self, slots: int = 7):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, slots, HIDDEN))
        self.cross, self.attention = CrossAttention(), Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.cross(x, self.memory.expand(x.shape[0], -1, -1))
        return self.attention(x)


class Perceiver(nn.Module):
    """Eleven learned latents look at the tokens, then at each other, and are classified."""

    def __init__(self, latents: int = 11, classes: int = CLASSES):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.latents = nn.Parameter(torch.randn(1, latents, HIDDEN))
        self.cross, self.mlp, self.norm = CrossAttention(), MLP(), nn.LayerNorm(HIDDEN)
        self.block = Block(Attention(sdpa_mask))
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        x = self.norm(x + self.mlp(x))
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = self.block(latents + self.cross(latents, x))
        logits = self.head(latents.mean(dim=1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class PerceiverIO(Perceiver):
    """The tokens read the latents back, and each is labelled."""

    def __init__(self):
        super().__init__(classes=VOCAB)
        self.read = CrossAttention(eager=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.mlp(x))
        latents = self.latents.expand(x.shape[0], -1, -1)
        latents = self.block(latents + self.cross(latents, x))
        return token_loss(self.head(x + self.read(x, latents)), labels)


def translation(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    """The source is about half as long; every row but the first is padded by four."""
    source_len = seq_len // 2 + 3
    lengths = source_len - 4 * torch.arange(batch).clamp(max=1)
    return {
        **labelled_tokens(seq_len, batch, dtype),
        "source_ids": token_ids(source_len, batch),
        "source_mask": torch.arange(source_len) < lengths[:, None],
    }


MODELS: dict[str, Build] = {
    "cross_attention": build(lambda s: EncoderDecoder(), translation),
    "cross_attention_eager": build(lambda s: EncoderDecoder(eager=True), translation),
    "memory_attention": mixer_model(MemoryAttention),
    "perceiver": build(lambda s: Perceiver(), labelled_rows),
    "perceiver_io": build(lambda s: PerceiverIO()),
}
