"""The same small backbone under the losses and pooled heads people use.

Shapes: logits are [batch, seq, vocab], labels [batch, seq], hidden [batch, seq, hidden].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models_common import (
    CLASSES,
    HIDDEN,
    IGNORE,
    VOCAB,
    Attention,
    Backbone,
    Build,
    Inputs,
    build,
    ids_only,
    labelled_rows,
    sdpa_mask,
    token_ids,
    token_loss,
)
from torch import Tensor, nn

# Losses of token logits, (logits, labels) -> scalar.


def ce_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), ignore_index=IGNORE, reduction="sum")


def ce_label_smoothing(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def ce_none(logits: Tensor, labels: Tensor) -> Tensor:
    """Unreduced, then averaged by hand over the valid tokens."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    mask = (labels != IGNORE).flatten()
    return (loss * mask).sum() / mask.sum()


def ce_transposed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def ce_shift_slice(logits: Tensor, labels: Tensor) -> Tensor:
    return token_loss(logits[:, :-1].contiguous(), labels[:, 1:].contiguous())


def ce_shift_pad(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels move and logits stay, as in transformers."""
    return token_loss(logits, F.pad(labels, (0, 1), value=IGNORE)[..., 1:])


def log_softmax_nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(dim=-1).flatten(0, 1), labels.flatten())


def gather_nll(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != IGNORE
    log_p = torch.log_softmax(logits, dim=-1)
    picked = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(picked * mask).sum() / mask.sum()


def index_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Each token's log-probability picked by advanced indexing; ignored ones count as class 0."""
    batch, seq_len, _ = logits.shape
    rows = torch.arange(batch, device=logits.device)[:, None]
    columns = torch.arange(seq_len, device=logits.device)[None, :]
    return -logits.log_softmax(dim=-1)[rows, columns, labels.clamp(min=0)].mean()


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return token_loss(logits, labels) + 1e-4 * torch.logsumexp(logits, dim=-1).square().mean()


def row_means(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over each row's valid tokens, then over the rows."""
    loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (loss.sum(dim=1) / (labels != IGNORE).sum(dim=1)).mean()


class ClassWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.rand(VOCAB) + 0.5)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.weight, ignore_index=IGNORE)


class TokenLoss(nn.Module):
    """Returns the bare scalar of any loss of token outputs and targets."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], outputs: int = VOCAB):
        super().__init__()
        self.backbone, self.loss = Backbone(layers=1), loss
        self.head = nn.Linear(HIDDEN, outputs)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.backbone(ids)), labels)


class Regression(nn.Module):
    """Float features in, the next token's features predicted."""

    def __init__(self):
        super().__init__()
        self.inner, self.attention = nn.Linear(6, HIDDEN), Attention()
        self.head = nn.Linear(HIDDEN, 6)

    def forward(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.inner(features)
        predicted = self.head(x + self.attention(x))
        loss = F.mse_loss(predicted[:, :-1], target[:, 1:])
        return {"loss": loss, "predicted": predicted}


# Pooled heads, (hidden, lengths) -> [batch, hidden].


def pooled_mean(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    return hidden.mean(dim=1)


def pooled_masked_mean(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    mask = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return (hidden * mask[..., None]).sum(dim=1) / lengths[:, None]


def cls(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    return hidden[:, 0]


def last_token(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    return hidden[:, -1]


def last_valid_token(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return hidden[rows, lengths - 1]


def max_pool(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    return hidden.max(dim=1).values


def amax_pool(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    return hidden.amax(dim=1)


class AttentionPool(nn.Module):
    """A softmax over the tokens weighs them."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        return (self.score(hidden).softmax(dim=1) * hidden).sum(dim=1)


class Classifier(nn.Module):
    """One label a row, from a pooled bidirectional backbone."""

    def __init__(self, pool: Callable[[Tensor, Tensor | None], Tensor]):
        super().__init__()
        self.backbone, self.pool = Backbone(lambda: Attention(sdpa_mask), layers=2), pool
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.pool(self.backbone(ids), lengths))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


# The table.


def uneven_rows(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    """Rows of uneven valid length: the whole of the first, about half of the others."""
    lengths = seq_len - torch.arange(batch).clamp(max=1) * (seq_len // 2 + 1)
    return {**labelled_rows(seq_len, batch, dtype), "lengths": lengths}


def float_targets(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    targets = torch.rand(batch, seq_len, CLASSES).to(dtype)
    return {"ids": token_ids(seq_len, batch), "labels": targets}


def feature_pairs(seq_len: int, batch: int, dtype: torch.dtype) -> Inputs:
    features, target = torch.randn(2, batch, seq_len, 6).to(dtype)
    return {"features": features, "target": target}


def classifier(pool, inputs=labelled_rows) -> Build:
    return build(lambda seq_len: Classifier(pool() if isinstance(pool, type) else pool), inputs)


TOKEN_LOSSES = (
    ce_sum,
    ce_label_smoothing,
    ce_none,
    ce_transposed,
    ce_shift_slice,
    ce_shift_pad,
    log_softmax_nll,
    gather_nll,
    index_nll,
    z_loss,
    row_means,
)

MODELS: dict[str, Build] = {
    **{loss.__name__: build(lambda s, loss=loss: TokenLoss(loss)) for loss in TOKEN_LOSSES},
    "ce_class_weights": build(lambda s: TokenLoss(ClassWeights())),
    "bce_with_logits": build(lambda s: TokenLoss(F.binary_cross_entropy_with_logits, CLASSES), float_targets),
    "mse_shifted": build(lambda s: Regression(), feature_pairs),
    "pooled_mean": classifier(pooled_mean),
    "pooled_masked_mean": classifier(pooled_masked_mean, uneven_rows),
    "cls": classifier(cls),
    "last_token": classifier(last_token),
    "last_valid_token": classifier(last_valid_token, uneven_rows),
    "max_pool": classifier(max_pool),
    "amax_pool": classifier(amax_pool),
    "attention_pool": classifier(AttentionPool),
}


class Logits(nn.Module):
    """No loss inside: the caller differentiates what comes out."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.backbone(ids))}


class PooledLogits(Logits):
    """Row logits, whole on every rank, beside the sharded hidden states."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.backbone(ids)
        return {"logits": self.head(hidden.mean(dim=1)), "hidden": hidden}


OUTSIDE_LOSS: dict[str, Build] = {
    "token_logits": build(lambda s: Logits(), ids_only),
    "pooled_logits": build(lambda s: PooledLogits(), ids_only),
}
