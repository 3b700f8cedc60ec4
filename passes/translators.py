"""Linear attention and state-space functions of model libraries, each said with `asp::linear_attention` and plain operators.

A translator takes the arguments of the function it stands for and gives what that function would, in the same types, or
NotImplemented for arguments it does not know. Shapes: q, k [batch, seq, heads, K], v [batch, seq, heads, V].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import linear  # noqa: F401  registers the operators
from ..kernels.linear_torch import accumulator

INFINITY = float("inf")


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    remove: Tensor | None = None,
    starts: Tensor | None = None,
    initial: Tensor | None = None,
    scale: float = 1.0,
    exclusive: bool = False,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, the state behind the last token if `final`): `kernels.linear.linear_attention`, with sums as wide as v asks for."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    wide = accumulator(v)
    decay, remove, initial = (None if x is None else x.to(wide) for x in (decay, remove, initial))
    operands = (q, k, v, decay, remove, starts, initial, float(scale), exclusive)
    out = torch.ops.asp.linear_attention(*operands)
    return out, torch.ops.asp.linear_state(*operands) if final else None


def used(options: dict[str, Any]) -> bool:
    """An option that a translator does not know has a value that means something."""
    return any(x is not None and x is not False for x in options.values())


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def document_starts(cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """starts [1, seq] from cumulative lengths [documents + 1]; a document may be empty."""
    if cu_seqlens is None:
        return None
    marks = torch.zeros(length + 1, dtype=torch.bool, device=cu_seqlens.device)
    return marks.index_fill(0, cu_seqlens.long(), True)[None, :length]


def changes(ids: Tensor | None) -> Tensor | None:
    """starts [batch, seq] from document numbers [batch, seq]."""
    if ids is None:
        return None
    return functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)


# Linear attention and the delta rule ------------------------------------------------------------------

WITHOUT_MEANING = frozenset(("chunk_size", "cu_seqlens_cpu", "chunk_indices", "safe_gate", "disable_recompute"))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    remove: Tensor | None = None,
    exclusive: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **rest: Any,
) -> Any:
    """`recur` with the options that these functions share. States are [batch, heads, K, V], or [.., V, K] with `state_v_first`.

    A state for each of several packed documents is not known.
    """
    rest = {name: x for name, x in rest.items() if name not in WITHOUT_MEANING}
    if used(rest) or (cu_seqlens is not None and (initial_state is not None or output_final_state)):
        return NotImplemented
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    starts = document_starts(cu_seqlens, v.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, state = recur(q, k, v, decay, remove, starts, initial_state, scale, exclusive, output_final_state)
    return out, state.transpose(-1, -2) if state_v_first and state is not None else state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    p: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **options: Any,
) -> Any:
    """S_t = Γ_t S_{t−1} + k_t (β_t (v_t − (Γ_t S_{t−1})ᵀ p_t))ᵀ, where p is k but in Comba.

    g, a logarithm: none, [batch, seq, heads], or [.., heads, K] (KDA); it and beta [batch, seq, heads] may come before their
    activation.
    """
    if beta is not None and beta.dim() != 3:
        return NotImplemented
    kind, heads = q.dtype, v.shape[2]
    q, k, v = (x.to(torch.float32) for x in (q, k, v))
    p = k if p is None else p.to(torch.float32)
    if use_qk_l2norm_in_kernel:
        q, k, p = unit(q), unit(k), unit(p)
    remove = p if p.shape[2] == heads else p.repeat_interleave(heads // p.shape[2], 2)
    if g is not None:
        g = g.to(torch.float32)
        g = _gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
        remove = remove * (g if g.dim() == 4 else g[..., None]).exp()
    if beta is not None:
        beta = beta.to(torch.float32)[..., None]
        if use_beta_sigmoid_in_kernel:
            beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
        remove, v = beta * remove, beta * v
    made = attend(q, k, v, g, remove, **options)
    return made if made is NotImplemented else (made[0].to(kind), made[1])


def _gate(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """x [batch, seq, heads(, K)]; A_log [heads], dt_bias of heads, or of heads · K."""
    shape = x.shape[2:]
    if dt_bias is not None:
        x = x + dt_bias.to(torch.float32).reshape(shape)
    rate = None if A_log is None else A_log.to(torch.float32).exp().reshape(shape[0], *[1] * (len(shape) - 1))
    if lower_bound is not None:
        return lower_bound * functional.sigmoid(x if rate is None else rate * x)
    assert rate is not None
    return -rate * functional.softplus(x)


# Mamba ------------------------------------------------------------------------------------------------


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if softplus else dt


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
    return_final_states: bool = False,
    **rest: Any,
) -> Any:
    """Mamba-2. x [batch, seq, heads, V], dt [batch, seq, heads], A [heads], B and C [batch, seq, groups, K]; states [.., V, K].

    S_t = exp(A dt_t) S_{t−1} + B_t (dt_t x_t)ᵀ, y_t = S_tᵀ C_t + D x_t.
    """
    if used(rest):
        return NotImplemented
    dt = torch.clamp(_step(dt, dt_bias, dt_softplus), min=dt_limit[0], max=dt_limit[1])
    x, B, C, dt = (y.to(torch.float32) for y in (x, B, C, dt))
    initial = None if initial_states is None else initial_states.transpose(-1, -2)
    decay = A.to(dt.dtype) * dt
    out, state = recur(
        C, B, x * dt[..., None], decay, starts=changes(seq_idx), initial=initial, final=return_final_states
    )  # fmt: skip
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        out = out * functional.silu(z)
    return out if state is None else (out, state.transpose(-1, -2))


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **rest: Any,
) -> Any:
    """Mamba. u and delta [batch, channels, seq], A [channels, K], B and C [batch, K, seq]: a channel is a head with V = 1."""
    rest = {name: x for name, x in rest.items() if name not in ("use_mambapy", "use_associative_scan")}  # the same, otherwise
    if used(rest) or B.dim() != 3 or C.dim() != 3 or A.is_complex():
        return NotImplemented
    dt = _step(delta, None if delta_bias is None else delta_bias[:, None], delta_softplus).transpose(1, 2)
    value = dt * u.to(torch.float32).transpose(1, 2)
    read, write = (x.transpose(1, 2)[:, :, None].to(torch.float32) for x in (C, B))
    out, state = recur(read, write, value[..., None], dt[..., None] * A, final=return_last_state)
    out = out.squeeze(-1).transpose(1, 2)
    if D is not None:
        out = out + u * D[:, None]
    if z is not None:
        out = out * functional.silu(z)
    return out if state is None else (out, state.squeeze(-1))


def shortcut(*_: Any, **__: Any) -> None:
    """A fused function that may decline: the model then takes the readable way."""


# Convolutions -----------------------------------------------------------------------------------------


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Any:
    """x [batch, channels, seq], weight [channels, W]. Within documents, each tap is masked where it reaches back over a start."""
    if used(rest) or activation not in (None, "silu", "swish"):
        return NotImplemented
    length, width = x.shape[-1], weight.shape[-1]
    x = x.to(weight.dtype)
    if seq_idx is None:
        out = functional.conv1d(x, weight[:, None], bias, padding=width - 1, groups=x.shape[1])[..., :length]
    else:
        out = x * weight[:, -1:]
        for back in range(1, width):
            before = functional.pad(x, (back, 0))[..., :length]
            same = seq_idx == functional.pad(seq_idx, (back, 0), value=-1)[:, :length]
            out = out + before * same[:, None] * weight[:, -1 - back, None]
        out = out if bias is None else out + bias[:, None]
    return out if activation is None else functional.silu(out)
