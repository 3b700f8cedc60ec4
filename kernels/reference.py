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


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    remove: Tensor | None = None,
    starts: Tensor | None = None,
    initial: Tensor | None = None,
    scale: float = 1.0,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Token by token: S_t = exp(decay_t) ⊙ S_{t−1} + k_t (v_t − S_{t−1}ᵀ remove_t)ᵀ and o_t = S_tᵀ (scale · q_t).

    Shapes as for `linear.linear_attention`. `exclusive` reads S_{t−1} instead of S_t; a token that `starts` a document
    finds no state. Gives (o, the last S).
    """
    heads = v.shape[2]
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    state = v.new_zeros(v.shape[0], heads, k.shape[-1], v.shape[-1]) if initial is None else initial
    outs = []
    for t in range(v.shape[1]):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], 0, state)
        read, value = state, v[:, t]
        if remove is not None:
            value = value - torch.einsum("bhkv,bhk->bhv", state, remove[:, t])
        if decay is not None:
            state = state * (decay[:, t, :, None, None] if decay.dim() == 3 else decay[:, t, :, :, None]).exp()
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], value)
        outs.append(torch.einsum("bhkv,bhk->bhv", read if exclusive else state, q[:, t] * scale))
    return torch.stack(outs, 1), state
