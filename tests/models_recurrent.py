"""Recurrences: every kind of decay and removal, states given and asked for, documents, hybrids with softmax attention."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from models_common import HIDDEN, Attention, Backbone, Build, Inputs, LanguageModel, build, mixer_model, token_labels, token_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autosp.kernels.linear  # noqa: F401 - registers the operators

HEADS, KEY, VALUE = 5, 6, 7  # no number of ranks but 5 deals these heads out evenly


class Recurrent(nn.Module):
    """A linear attention with gates and removal of its own, around the operator."""

    def __init__(
        self,
        decay: str | None = None,
        remove: bool = False,
        key_heads: int = HEADS,
        exclusive: bool = False,
        normalised: bool = False,
        initial: bool = False,
    ):
        super().__init__()
        self.key_heads, self.exclusive, self.normalised = key_heads, exclusive, normalised
        self.q, self.k = (nn.Linear(HIDDEN, key_heads * KEY) for _ in range(2))
        self.v, self.out = nn.Linear(HIDDEN, HEADS * VALUE), nn.Linear(HEADS * VALUE, HIDDEN)
        width = {None: 0, "head": 1, "token": 1, "row": KEY}[decay]
        self.decay = None if decay is None else nn.Linear(HIDDEN, HEADS * width)
        self.per_head, self.width = decay == "head", width
        self.beta = nn.Linear(HIDDEN, HEADS) if remove else None
        self.initial = nn.Parameter(torch.randn(HEADS, KEY, VALUE)) if initial else None

    def operands(self, x: Tensor, starts: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k = (p(x).unflatten(-1, (self.key_heads, KEY)) for p in (self.q, self.k))
        v, decay, remove = self.v(x).unflatten(-1, (HEADS, VALUE)), None, None
        if self.normalised:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        if self.decay is not None:
            gates = self.decay.bias.expand(*x.shape[:2], -1) if self.per_head else self.decay(x)
            decay = F.logsigmoid(gates.unflatten(-1, (HEADS, self.width)))
            decay = decay.squeeze(-1) if self.width == 1 else decay
        if self.beta is not None:
            beta = self.beta(x).sigmoid()[..., None]
            k = F.normalize(k, dim=-1).repeat_interleave(HEADS // self.key_heads, 2)
            remove = k if decay is None else k * decay.exp().reshape(*decay.shape[:3], -1)
            k, v = k * beta, v
        first = None if self.initial is None else self.initial.expand(x.shape[0], -1, -1, -1)
        return q, k, v, decay, remove, starts, first

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        y = torch.ops.asp.linear_attention(*self.operands(x, starts), KEY**-0.5, self.exclusive)
        if self.normalised:
            y = y[..., :-1] / y[..., -1:]
        return self.out(y.flatten(2))


class LastState(LanguageModel):
    """The loss also looks at the state behind the last token."""

    def __init__(self) -> None:
        super().__init__(Backbone(partial(Recurrent, "token", remove=True), layers=1))
        self.state = Recurrent("row", initial=True)

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.backbone(ids)
        last = torch.ops.asp.linear_state(*self.state.operands(x, None), 1.0, False)
        return token_loss(self.head(x), labels) + last.square().mean()


class Continued(nn.Module):
    """A recurrence that starts from a state computed of the batch, as a second segment does."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.state = Recurrent("token", remove=True), nn.Linear(HIDDEN, HEADS * KEY * VALUE)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        first = self.state(x.mean(1)).unflatten(-1, (HEADS, KEY, VALUE))
        y = torch.ops.asp.linear_attention(*self.mixer.operands(x, None)[:6], first, KEY**-0.5, False)
        return self.mixer.out(y.flatten(2))


class Hybrid(nn.Module):
    """A softmax attention after a recurrence, as hybrids have in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Recurrent("token", remove=True), Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.second(x + self.first(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Recurrent("row", remove=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def packed(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    """Documents that end within a rank, between ranks, and after a few tokens."""
    position = torch.arange(seq_len)
    cuts = torch.tensor([seq_len // 3, seq_len // 2, seq_len // 2 + 2])
    documents = (position[:, None] >= cuts).sum(-1).expand(batch, -1).clone()
    return {"ids": torch.randint(61, (batch, seq_len)), "labels": token_labels(seq_len, batch), "documents": documents}


def starts_of(x: Tensor, documents: Tensor | None) -> Tensor:
    assert documents is not None
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)


def by_documents(mixer: partial[Recurrent]) -> Build:
    return build(lambda seq_len: LanguageModel(Backbone(mixer, starts_of, layers=1)), packed)


MODELS: dict[str, Build] = {
    "recurrent_plain": mixer_model(Recurrent),
    "recurrent_normalised": mixer_model(partial(Recurrent, normalised=True)),
    "recurrent_retention": mixer_model(partial(Recurrent, "head")),
    "recurrent_scalar": mixer_model(partial(Recurrent, "token", key_heads=1), layers=2),
    "recurrent_vector": mixer_model(partial(Recurrent, "row", exclusive=True)),
    "recurrent_delta": mixer_model(partial(Recurrent, remove=True)),
    "recurrent_gated_delta": mixer_model(partial(Recurrent, "token", remove=True, initial=True)),
    "recurrent_vector_delta": mixer_model(partial(Recurrent, "row", remove=True)),
    "recurrent_documents": by_documents(partial(Recurrent, "row", initial=True)),
    "recurrent_delta_documents": by_documents(partial(Recurrent, "token", remove=True)),
    "recurrent_last_state": build(lambda seq_len: LastState()),
    "recurrent_continued": mixer_model(Continued),
    "recurrent_hybrid": mixer_model(Hybrid),
    "recurrent_checkpointed": mixer_model(Checkpointed),
}
