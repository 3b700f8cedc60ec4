"""Parts shared by the test models: seeded building, inputs, a small transformer.

Shapes: x is [batch, seq, hidden]; q, k, v are [batch, heads, seq, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, HEAD_DIM, CLASSES, IGNORE = 61, 32, 8, 5, -100

Inputs = dict[str, Tensor]
MakeInputs = Callable[[int, int, torch.dtype], Inputs]
Build = Callable[[int, int, torch.dtype], tuple[nn.Module, Inputs]]
Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def token_ids(seq_len: int, batch: int) -> Tensor:
    return torch.randint(VOCAB, (batch, seq_len))


def token_labels(seq_len: int, batch: int) -> Tensor:
    """Random labels; the first row's last quarter and the last row's first three are ignored."""
    labels = token_ids(seq_len, batch)
    labels[0, seq_len - seq_len // 4 :] = IGNORE
    labels[-1, :3] = IGNORE
    return labels


def labelled_tokens(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    return {"ids": token_ids(seq_len, batch), "labels": token_labels(seq_len, batch)}


def labelled_rows(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    return {"ids": token_ids(seq_len, batch), "labels": torch.randint(CLASSES, (batch,))}


def ids_only(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    return {"ids": token_ids(seq_len, batch)}


def build(make: Callable[[int], nn.Module], inputs: MakeInputs = labelled_tokens) -> Build:
    """A factory of (model, inputs) that gives the same pair at every call."""

    def seeded(seq_len: int, batch: int, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        model = make(seq_len)
        with torch.no_grad():
            for parameter in model.parameters():  # no bias stays at 0 and no norm weight at 1
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.to(dtype), inputs(seq_len, batch, dtype)

    return seeded


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy. logits: [batch, seq, vocab], labels: [batch, seq], already shifted."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def rotary(x: Tensor) -> Tensor:
    """Rotate x: [batch, heads, seq, head_dim] by position (Su et al., RoFormer)."""
    seq_len, width = x.shape[-2:]
    position = torch.arange(seq_len, device=x.device).to(x.dtype)
    frequency = 100.0 ** (-torch.arange(0, width, 2, device=x.device).to(x.dtype) / width)
    angle = torch.outer(position, frequency).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()


def relative(x: Tensor) -> Tensor:
    """[seq, seq] of key position minus query position, for x: [..., seq, width]."""
    position = torch.arange(x.shape[-2], device=x.device)
    return position[None, :] - position[:, None]


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention under whatever mask the model passes down; None attends everywhere."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    """Project to heads, rotate, mix the sequence with `mix`, project back."""

    def __init__(self, mix: Mix = sdpa_causal, heads: int = 4, kv_heads: int | None = None):
        super().__init__()
        self.heads, self.kv_heads, self.mix = heads, kv_heads or heads, mix
        self.q = nn.Linear(HIDDEN, self.heads * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, self.kv_heads * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, self.kv_heads * HEAD_DIM, bias=False)
        self.out = nn.Linear(self.heads * HEAD_DIM, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = rotary(split_heads(self.q(x), self.heads))
        k = rotary(split_heads(self.k(x), self.kv_heads))
        v = split_heads(self.v(x), self.kv_heads)
        return self.out(merge_heads(self.mix(q, k, v, mask)))


class MLP(nn.Sequential):
    def __init__(self, hidden: int = HIDDEN):
        super().__init__(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))


class Block(nn.Module):
    """A pre-norm residual block around any token mixer `x, mask -> x`."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention, self.mlp = attention, MLP()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Backbone(nn.Module):
    """Embedding, blocks, norm. `mask(x, documents)` is computed once and shared by the layers."""

    def __init__(
        self,
        attention: Callable[[], nn.Module] = Attention,
        mask: Callable[[Tensor, Tensor | None], Tensor] | None = None,
        layers: int = 2,
    ):
        super().__init__()
        self.embed, self.mask = nn.Embedding(VOCAB, HIDDEN), mask
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        mask = self.mask(x, documents) if self.mask is not None else None
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


def first_layer(model: nn.Module) -> nn.Module:
    """`model` with one layer in each stack of blocks: most mistakes show in one as well as in two, in half the time."""
    for inner in model.modules():
        if isinstance(inner, Backbone):
            inner.blocks = inner.blocks[:1]
    return model


class LanguageModel(nn.Module):
    """Token labels, already shifted, against a linear head on a backbone."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.backbone(ids, documents))
        return {"loss": token_loss(logits, labels), "logits": logits}


def mixer_model(mixer: Callable[[], nn.Module], layers: int = 1) -> Build:
    """A language model whose blocks mix tokens with `mixer()`."""
    return build(lambda seq_len: LanguageModel(Backbone(mixer, layers=layers)))
