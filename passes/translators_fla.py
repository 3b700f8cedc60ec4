"""Functions of flash-linear-attention in our operators. Translators as in `translators`, with the arguments' names there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .translators import attend, causal_conv1d, document_starts, gated_delta_rule, recur, used


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, **options: Any) -> Any:
    """S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ; g, also called gk, [batch, seq, heads, K]."""
    if g is not None and gk is not None:
        return NotImplemented
    return attend(q, k, v, gk if g is None else g, **options)


def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, **options: Any) -> Any:
    """One decay per head: g [batch, seq, heads], or g_gamma [heads] at every token."""
    if g is not None and g_gamma is not None:
        return NotImplemented
    if g_gamma is not None:
        g = g_gamma.expand(*v.shape[:2], -1)
    return attend(q, k, v, g, **options)


def retention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Head h forgets 2^(−5−h) of its state at each token."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return simple_gla(q, k, v, g_gamma=(1 - 2.0 ** (-5.0 - heads)).log(), **options)


def lightning_attn(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **options: Any) -> Any:
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return simple_gla(q, k, v, g_gamma=-(8 / q.shape[2] * (1 - layer_idx / num_layers)) * heads, **options)


def linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalize: bool = True,
    scale: float | None = None,
    initial_state: Any = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Any:
    """No decay. With `normalize`, divided by scale · q_tᵀ Σ_{j≤t} k_j, which is the output for v = 1; that sum is a state too."""
    options |= {"scale": scale, "cu_seqlens": cu_seqlens}
    if not normalize:
        return attend(q, k, v, initial_state=initial_state, **options)
    before, keys = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if cu_seqlens is not None and keys is not None:
        return NotImplemented
    if before is None and keys is not None:
        before = keys.new_zeros(*keys.shape[:1], *keys.shape[2:], v.shape[-1])
    if before is not None:
        ones = torch.zeros_like(before[..., :1]) if keys is None else keys[:, 0, :, :, None].to(before.dtype)
        before = torch.cat([before, ones], -1)
    made = attend(q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1), initial_state=before, **options)
    if made is NotImplemented:
        return made
    out, state = made
    total = _sum_by_document(k, cu_seqlens)
    total = total if keys is None else total + keys
    return out[..., :-1] / (out[..., -1:] + 1e-10), (None if state is None else state[..., :-1], total)


def _sum_by_document(k: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[documents, 1, heads, K]; without documents, every row of the batch is one."""
    if cu_seqlens is None:
        return k.sum(1, keepdim=True)
    number = torch.searchsorted(cu_seqlens[1:], torch.arange(k.shape[1], device=k.device), right=True)
    return k.new_zeros(cu_seqlens.shape[0] - 1, *k.shape[2:]).index_add(0, number, k[0])[:, None]


def comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, g: Tensor, **options: Any) -> Any:
    return gated_delta_rule(q, k, v, g, p=p, **options)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, **options: Any) -> Any:
    return gated_delta_rule(q, k, v, None, beta, **options)


def hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **rest: Any,
) -> Any:
    """h_t = exp(g_t) h_{t−1} + x_t, for each channel of [batch, seq, channels]."""
    if used(rest) or (cu_seqlens is not None and (initial_state is not None or output_final_state)):
        return NotImplemented
    one = x.new_ones(*x.shape[:2], 1, 1)
    initial = None if initial_state is None else initial_state[..., None, None]
    starts = document_starts(cu_seqlens, x.shape[1])
    out, state = recur(one, one, x[..., None], g, starts=starts, initial=initial, final=output_final_state)
    return out.squeeze(-1), None if state is None else state.flatten(1)


def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None, **options: Any) -> Any:
    """o_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ (scale · r_t), S_t = diag(exp w_t) S_{t−1} + k_t v_tᵀ; u [heads, K]."""
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    made = attend(r, k, v, w, exclusive=True, scale=scale, **options)
    if made is NotImplemented:
        return made
    return made[0] + (scale * (r * u * k).sum(-1, keepdim=True) * v).to(v.dtype), made[1]


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Any:
    """S_t = (diag(exp g_t) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ, each token as two.

    The first decays, removes −a and writes b with the value 0; the second writes k with v and is read.
    """
    options.pop("lower_bound", None)  # a promise about gk, for speed
    if cu_seqlens is not None:
        cu_seqlens = 2 * cu_seqlens
    nothing, kind, length = torch.zeros_like, q.dtype, q.shape[1]
    q, k, v, a, b = (x.to(torch.float32) for x in (q, k, v, a, b))
    decay = None if gk is None else _in_turn(gk, nothing(gk))
    read, write, value = _in_turn(nothing(q), q), _in_turn(b, k), _in_turn(nothing(v), v)
    made = attend(read, write, value, decay, _in_turn(-a, nothing(a)), cu_seqlens=cu_seqlens, **options)
    if made is NotImplemented:
        return made
    out, state = made
    return out.reshape(out.shape[0], length, 2, *out.shape[2:])[:, :, 1].to(kind), state


def _in_turn(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], 2).flatten(1, 2)


def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Any) -> Any:
    return dplr_delta_rule(r, k, v, a, b, gk=w, **options)


def short_conv(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **rest: Any,
) -> Any:
    """x [batch, seq, channels]; the residual is added behind the activation."""
    rest = {name: y for name, y in rest.items() if name not in ("backend", "cu_seqlens_cpu", "chunk_indices")}
    if used(rest) or weight is None:
        return NotImplemented
    starts = document_starts(cu_seqlens, x.shape[1])
    documents = None if starts is None else starts.cumsum(1).expand(x.shape[0], -1)
    out = causal_conv1d(x.transpose(1, 2), weight, bias, documents, activation)
    if out is NotImplemented:
        return out
    out = out.transpose(1, 2).to(x.dtype)
    return out if residual is None else out + residual, None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fla.ops.chunk_gla": gla,
    "fla.ops.fused_recurrent_gla": gla,
    "fla.ops.chunk_simple_gla": simple_gla,
    "fla.ops.fused_chunk_simple_gla": simple_gla,
    "fla.ops.fused_recurrent_simple_gla": simple_gla,
    "fla.ops.parallel_simple_gla": simple_gla,
    "fla.ops.chunk_retention": retention,
    "fla.ops.fused_chunk_retention": retention,
    "fla.ops.fused_recurrent_retention": retention,
    "fla.ops.parallel_retention": retention,
    "fla.ops.chunk_lightning_attn": lightning_attn,
    "fla.ops.fused_recurrent_lightning_attn": lightning_attn,
    "fla.ops.chunk_linear_attn": linear_attn,
    "fla.ops.fused_chunk_linear_attn": linear_attn,
    "fla.ops.fused_recurrent_linear_attn": partial(linear_attn, normalize=False),
    "fla.ops.chunk_delta_rule": delta_rule,
    "fla.ops.fused_recurrent_delta_rule": delta_rule,
    "fla.ops.chunk_gated_delta_rule": gated_delta_rule,
    "fla.ops.fused_recurrent_gated_delta_rule": gated_delta_rule,
    "fla.ops.chunk_kda": gated_delta_rule,
    "fla.ops.fused_recurrent_kda": gated_delta_rule,
    "fla.ops.chunk_comba": comba,
    "fla.ops.fused_recurrent_comba": comba,
    "fla.ops.hgrn.chunk_hgrn": hgrn,
    "fla.ops.fused_recurrent_hgrn": hgrn,
    "fla.ops.chunk_rwkv6": rwkv6,
    "fla.ops.fused_recurrent_rwkv6": rwkv6,
    "fla.ops.chunk_rwkv7": partial(rwkv7, scale=1.0),
    "fla.ops.fused_recurrent_rwkv7": partial(rwkv7, output_final_state=True),
    "fla.ops.chunk_dplr_delta_rule": dplr_delta_rule,
    "fla.ops.fused_recurrent_dplr_delta_rule": dplr_delta_rule,
    "fla.ops.chunk_iplr_delta_rule": dplr_delta_rule,
    "fla.ops.fused_recurrent_iplr_delta_rule": dplr_delta_rule,
    "fla.modules.causal_conv1d.causal_conv1d": short_conv,
}
