"""Recurrences that transformers spells out inside a module, a loop over tokens or blocks. Translators as in `translators`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .translators import recur, used

NOTHING = -1e38  # the logarithm of an empty sum, finite so that differences stay numbers
STEEPEST = 1000.0  # of RecurrentGemma's square root


def lightning(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **_: Any,
) -> Any:
    """MiniMax's lightning attention: S_t = exp(−slope) S_{t−1} + k_t v_tᵀ. Gives the module's output and the last state."""
    if past_key_values is not None:
        return NotImplemented
    batch, length, _ = hidden_states.shape
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    qkv = qkv.reshape(batch, length, self.num_attention_heads, 3 * self.head_dim)
    q, k, v = torch.split(qkv, self.head_dim, 3)
    decay = -self.slope_rate[:, 0, 0].expand(batch, length, -1)
    out, state = recur(q, k, v, decay, final=True)
    assert state is not None
    gated = functional.sigmoid(self.output_gate(hidden_states)) * self.norm(out.flatten(2))
    return self.out_proj(gated), state.to(v.dtype)


def rg_lru(self: Any, activations: Tensor, position_ids: Tensor, **rest: Any) -> Any:
    """RecurrentGemma, for each channel: h_t = a_t h_{t−1} + √(1 − a_t²) i_t x_t, where a document starts h_t = i_t x_t.

    Its square root has a gradient of its own, never steeper than `STEEPEST`.
    """
    if used(rest) or self.recurrent_states is not None:
        return NotImplemented
    x, heads = activations, self.num_attention_heads
    blocks = x.reshape(*x.shape[:2], heads, -1)
    opened, kept = (
        functional.sigmoid((torch.einsum("bthi,hij->bthj", blocks, weight) + bias).flatten(2))
        for weight, bias in (
            (self.input_gate_weight, self.input_gate_bias),
            (self.recurrent_gate_weight, self.recurrent_gate_bias),
        )
    )
    decay = -8.0 * kept * functional.softplus(self.recurrent_param)
    starts = (position_ids == 0).expand(x.shape[:2])
    squared = 1 - (2 * decay).exp()
    slope = torch.rsqrt((4 * squared).clamp(min=STEEPEST**-2)).detach()
    root = squared.sqrt().detach() + (squared - squared.detach()) * slope  # the second term is 0, and has the gradient
    wanted = (x * opened * torch.where(starts[..., None], 1, root).to(x.dtype)).to(torch.float32)
    one = wanted.new_ones(*x.shape[:2], 1, 1)
    out, state = recur(one, one, wanted[..., None], decay, starts=starts, final=True)
    assert state is not None
    self.recurrent_states = state.flatten(1)
    return out.squeeze(-1).to(x.dtype)


def rwkv4(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: Any = None, return_state: bool = False, **rest: Any
) -> Any:
    """RWKV-4: (Σ_{j<t} e^{k_j − (t−1−j) w} v_j + e^{k_t + u} v_t) / the same without v, w = exp(time_decay), for each channel.

    Both sums are columns of one state, kept relative to e^{top}, top_t = max_{j≤t} k_j − (t−j) w. The quotient does not
    depend on `top`, which has no gradient then; a state that is given back does.
    """
    if used(rest) or state is not None:
        return NotImplemented
    k = key.to(torch.float32)
    v, w = value.to(k.dtype), time_decay.to(k.dtype).exp()
    steps = torch.arange(k.shape[1], device=k.device)[:, None]
    elapsed = steps * w
    top = torch.cummax(k + elapsed, 1).values - elapsed
    top = top if return_state else top.detach()
    first = steps == 0
    before = torch.where(first, NOTHING, functional.pad(top, (0, 0, 1, -1)))
    decay = torch.where(first, 0, before - w - top)
    write = (k - top).exp()
    columns = torch.stack([v, torch.ones_like(v)], -1)
    read = k.new_ones(*k.shape[:2], 1, 1)
    sums, last = recur(read, write[..., None], columns, decay, exclusive=True, final=return_state)
    now = k + time_first
    peak = torch.maximum(before, now).detach()
    past, present = (before - peak).exp()[..., None], (now - peak).exp()[..., None]
    numerator, denominator = (past * sums + present * columns).unbind(-1)
    out = (numerator / denominator).to(key.dtype)
    return out, None if last is None else [last[..., 0, 0], last[..., 0, 1], top[:, -1]]


def mlstm(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
    **rest: Any,
) -> Any:
    """xLSTM's mLSTM. query, key [batch, heads, seq, K], value [batch, heads, seq, V], gates before their activation [.., seq].

    C_t = f_t C_{t−1} + e^{i_t} k_t v_tᵀ and n_t, the same for v = 1, are kept relative to e^{m_t}, where
    m_t = max(log f_t + m_{t−1}, i_t) from m_{−1} = 0; h_t = C_tᵀ q_t / (max(|n_tᵀ q_t|, e^{−m_t}) + ε).
    """
    if used(rest) or c_initial is not None or n_initial is not None or m_initial is not None:
        return NotImplemented
    train = "train" in (self.config.mode if mode is None else mode)
    keep = not train or (self.config.return_last_states if return_last_states is None else return_last_states)
    q, k, v, gate, forget = (x.to(torch.float32).transpose(1, 2) for x in (query, key, value, igate, fgate))
    kept = functional.logsigmoid(forget)
    total = kept.cumsum(1)
    top = total + torch.cummax(gate - total, 1).values.clamp(min=0)
    decay = kept + functional.pad(top, (0, 0, 1, -1)) - top
    write = k * (gate - top).exp()[..., None]
    columns = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    sums, state = recur(q, write, columns, decay, scale=q.shape[-1] ** -0.5, final=keep)
    size = torch.maximum(sums[..., -1:].abs(), (-top).exp()[..., None])
    out = (sums[..., :-1] / (size + self.config.eps)).transpose(1, 2).to(query.dtype)
    return out if state is None else (out, (state[..., :-1], state[..., -1], top[:, -1:].transpose(1, 2)))
