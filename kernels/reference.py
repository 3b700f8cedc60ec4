"""Readable oracles: what the fast operators must equal, in a few lines of plain torch and no blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, where a row that sees no column gives 0.

    q: [.., heads, rows, D], k: [.., kv heads, columns, D], v: [.., kv heads, columns, D_v]; query head h reads key/value
    head h // (heads / kv heads). mask: boolean (True is visible) or additive, broadcastable to [.., heads, rows, columns].
    """
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    scores = torch.einsum("...qd,...kd->...qk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("...qk,...kd->...qd", weights / total.masked_fill(total == 0, 1), v)
