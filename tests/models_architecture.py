"""Whole models with a layout, a state or an input of their own.

Shapes: x is [batch, seq, hidden] unless a class says otherwise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from models_common import (
    HIDDEN,
    IGNORE,
    MLP,
    VOCAB,
    Attention,
    Backbone,
    Block,
    Build,
    Inputs,
    LanguageModel,
    build,
    ids_only,
    mixer_model,
    sdpa_mask,
    token_ids,
    token_labels,
    token_loss,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class CausalSelfAttention(nn.Module):
    """nanoGPT's: one projection for q, k and v; eager under a causal buffer, or SDPA."""

    def __init__(self, seq_len: int, flash: bool, heads: int = 4):
        super().__init__()
        self.heads, self.flash = heads, flash
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        if not flash:
            causal = torch.tril(torch.ones(seq_len, seq_len))
            self.register_buffer("bias", causal.view(1, 1, seq_len, seq_len))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoGPT(nn.Module):
    """Learned positions, a head tied to the embedding, float logits shifted by slicing."""

    def __init__(self, seq_len: int, flash: bool, layers: int = 2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(seq_len, HIDDEN)
        self.attn = nn.ModuleList(CausalSelfAttention(seq_len, flash) for _ in range(layers))
        self.mlp = nn.ModuleList(MLP() for _ in range(layers))
        self.ln = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2 * layers + 1))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        pos = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.wte(ids) + self.wpe(pos)
        for layer, (attn, mlp) in enumerate(zip(self.attn, self.mlp, strict=True)):
            x = x + attn(self.ln[2 * layer](x))
            x = x + mlp(self.ln[2 * layer + 1](x))
        logits = self.lm_head(self.ln[-1](x))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


class LearnedPosition(nn.Module):
    """BERT-like: bidirectional, added positions, a padding mask; eager adds finfo.min instead."""

    def __init__(self, seq_len: int, eager: bool):
        super().__init__()
        self.eager = eager
        self.word, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(seq_len, HIDDEN)
        self.register_buffer("position_ids", torch.arange(seq_len)[None], persistent=False)
        self.norm = nn.LayerNorm(HIDDEN)
        mix = self.mix if eager else sdpa_mask
        self.blocks = nn.ModuleList(Block(Attention(mix)) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    @staticmethod
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask, dim=-1) @ v

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.word(ids) + self.position(self.position_ids[:, : ids.shape[1]]))
        mask = mask[:, None, None, :]
        if self.eager:
            mask = (1.0 - mask.to(x.dtype)) * torch.finfo(x.dtype).min
        for block in self.blocks:
            x = block(x, mask)
        return {"loss": token_loss(self.head(x), labels)}


class FlatLayerNorm(nn.Module):
    """After attention, the norm and the linears see [batch * seq, hidden]."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention(x)
        flat = self.norm(x.view(-1, x.shape[-1]))
        return self.down(self.up(flat).relu()).view(x.shape)


class DenseMoE(nn.Module):
    """Every expert on every token, weighed by a top-k softmax router; gives (x, aux loss).

    The auxiliary loss is Switch's load balance plus ST-MoE's router z-loss.
    """

    def __init__(self, flat: bool, experts: int = 4, top: int = 2):
        super().__init__()
        self.flat, self.experts, self.top = flat, experts, top
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, 24) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(experts, 24, HIDDEN) / 24**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = x.flatten(0, 1) if self.flat else x
        logits = self.router(x)
        probability = logits.softmax(dim=-1)
        chosen, index = probability.topk(self.top, dim=-1)
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        weights = torch.zeros_like(probability).scatter(-1, index, chosen)
        inner = torch.einsum("...d,edf->...ef", x, self.up).relu()
        mixed = torch.einsum("...ef,efd,...e->...d", inner, self.down, weights)

        tokens = tuple(range(x.dim() - 1))
        fraction = F.one_hot(index, self.experts).sum(dim=-2).to(x.dtype).mean(dim=tokens)
        balance = self.experts * (fraction * probability.mean(dim=tokens)).sum()
        z = torch.logsumexp(logits, dim=-1).square().mean()
        return mixed.view(shape), 0.1 * balance + 0.01 * z


class MoE(nn.Module):
    def __init__(self, flat: bool):
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCAB, HIDDEN), Attention()
        self.experts, self.norm = DenseMoE(flat), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        x = x + self.attention(self.norm(x))
        mixed, auxiliary = self.experts(x)
        loss = token_loss(self.head(x + mixed), labels)
        return {"loss": loss + auxiliary, "auxiliary": auxiliary}


class TokenBatchNorm(nn.Module):
    """Attention, then batch statistics over all tokens; running statistics are updated."""

    def __init__(self, flat: bool):
        super().__init__()
        self.flat, self.attention, self.norm = flat, Attention(), nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention(x).relu()
        if self.flat:
            return self.norm(x.view(-1, HIDDEN)).view(x.shape)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class SeqFirst(nn.Module):
    """x is [seq, batch, hidden] inside, as in Megatron and fairseq."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.heads, self.embed = heads, nn.Embedding(VOCAB, HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.norm, self.mlp, self.head = nn.LayerNorm(HIDDEN), MLP(), nn.Linear(HIDDEN, VOCAB)

    def attend(self, x: Tensor) -> Tensor:
        seq_len, batch, _ = x.shape
        q, k, v = self.qkv(x).view(seq_len, batch * self.heads, -1).chunk(3, dim=-1)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        later = torch.ones(seq_len, seq_len, dtype=torch.bool, device=x.device).triu(1)
        scores = torch.bmm(q, k.mT) / math.sqrt(q.shape[-1])
        mixed = torch.bmm(scores.masked_fill(later, float("-inf")).softmax(dim=-1), v)
        return self.out(mixed.transpose(0, 1).reshape(seq_len, batch, HIDDEN))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids.t())
        x = x + self.attend(self.norm(x))
        logits = self.head(x + self.mlp(x))
        return F.cross_entropy(logits.view(-1, VOCAB), labels.t().reshape(-1))


class TorchMHA(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.mha(x, x, x, attn_mask=later, need_weights=False)[0]


class TorchEncoder(nn.Module):
    """torch's own encoder layer, causal or under a padding mask."""

    def __init__(self, norm_first: bool):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if mask is not None:
            x = self.layer(x, src_key_padding_mask=~mask)
        else:
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
            x = self.layer(x, src_mask=causal, is_causal=True)
        return token_loss(self.head(x), labels)


class Checkpointed(Backbone):
    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


class VisionTransformer(nn.Module):
    """seq_len patches born from a convolution, a class token before them, learned positions."""

    def __init__(self, seq_len: int, patch: int = 4):
        super().__init__()
        self.patch = nn.Conv2d(3, HIDDEN, kernel_size=patch, stride=patch)
        self.cls = nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.position = nn.Parameter(torch.randn(1, seq_len + 1, HIDDEN))
        self.blocks = nn.ModuleList(Block(Attention(sdpa_mask)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)[:, 0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Dropout(Backbone):
    """Dropout on the embedding and after each block."""

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        x = F.dropout(self.embed(ids), p=0.1, training=self.training)
        for block in self.blocks:
            x = x + F.dropout(block(x), p=0.1, training=self.training)
        return self.norm(x)


class DropoutMix(nn.Module):
    """Dropout inside SDPA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        p = 0.1 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)


class DropoutWeights(nn.Module):
    """Attention spelled out, with dropout of its weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        position = torch.arange(q.shape[-2], device=q.device)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(position[None, :] > position[:, None], float("-inf"))
        return F.dropout(scores.softmax(dim=-1), p=0.1, training=self.training) @ v


def padded_tokens(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    """mask: [batch, seq], true on tokens; each row is padded by a different length."""
    lengths = (seq_len - seq_len // 8 * torch.arange(1, batch + 1)).clamp(min=1)
    mask = torch.arange(seq_len) < lengths[:, None]
    labels = token_labels(seq_len, batch).masked_fill(~mask, IGNORE)
    return {"ids": token_ids(seq_len, batch), "labels": labels, "mask": mask}


def images(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    rows = 4 if seq_len % 4 == 0 else 1
    pixels = torch.randn(batch, 3, 4 * rows, 4 * seq_len // rows).to(dtype)
    return {"pixels": pixels, "labels": torch.randint(10, (batch,))}


MODELS: dict[str, Build] = {
    "nanogpt": build(lambda s: NanoGPT(s, flash=False), ids_only),
    "nanogpt_sdpa": build(lambda s: NanoGPT(s, flash=True), ids_only),
    "learned_position": build(lambda s: LearnedPosition(s, eager=False), padded_tokens),
    "learned_position_eager": build(lambda s: LearnedPosition(s, eager=True), padded_tokens),
    "flat_layernorm": mixer_model(FlatLayerNorm, layers=2),
    "moe": build(lambda s: MoE(flat=False)),
    "moe_flat": build(lambda s: MoE(flat=True)),
    "batchnorm": mixer_model(lambda: TokenBatchNorm(flat=False)),
    "batchnorm_flat": mixer_model(lambda: TokenBatchNorm(flat=True)),
    "seq_first": build(lambda s: SeqFirst()),
    "mha": mixer_model(TorchMHA),
    "encoder_layer_pre": build(lambda s: TorchEncoder(norm_first=True)),
    "encoder_layer_post": build(lambda s: TorchEncoder(norm_first=False)),
    "encoder_layer_padded": build(lambda s: TorchEncoder(norm_first=True), padded_tokens),
    "checkpointed": build(lambda s: LanguageModel(Checkpointed())),
    "vit_like": build(VisionTransformer, images),
}

DROPOUT_MODELS: dict[str, Build] = {
    "dropout_mlp": build(lambda s: LanguageModel(Dropout())),
    "dropout_attention": build(lambda s: LanguageModel(Dropout(lambda: Attention(DropoutMix())))),
    "dropout_weights": build(lambda s: LanguageModel(Dropout(lambda: Attention(DropoutWeights()), layers=1))),
}
