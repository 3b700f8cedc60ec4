"""Linear attention and state-space layers: one operator, and what a rank computes of it.

    S_t = Γ_t ⊙ S_{t−1} + k_t (v_t − S_{t−1}ᵀ r_t)ᵀ        o_t = S_tᵀ (scale · q_t)

Γ_t = exp(decay_t) is absent (plain linear attention), a number per head and token (retention, lightning attention, simple GLA,
Mamba-2) or one per row of the state (GLA, HGRN2, RWKV, Mamba); r_t is absent or takes away what the state predicts (delta
rule, gated delta rule, KDA). A second write per token (RWKV-7, DPLR) is a second token. `exclusive` reads S_{t−1} (RWKV-6).

`asp::linear_attention` stands in captured graphs for the whole sequence; `on_rank` is what it becomes on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import all_scan, linear_torch
from .all_scan import Scan, carried
from .token_local import owned

TOKENS = 1  # the dimension of tokens in every operand but the initial state
HEADS = 2


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    remove: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
    scale: float,
    exclusive: bool,
) -> Tensor:
    """o [B, T, H, V], in the type of v.

    q, k [B, T, H or a divisor of it, K]; v [B, T, H, V]; decay, a logarithm ≤ 0, [B, T, H] or [B, T, H, K]; remove [B, T, H, K];
    starts [B, T], bool: a document begins at this token; initial [B, H, K, V].
    """
    return _eager(q, k, v, decay, remove, starts, initial, scale, exclusive)[0]


def _state(*operands: Any) -> Tensor:
    """The state behind the last token, [B, H, K, V], in float32 or float64. Operands as of `_attention`; q is not used."""
    return _eager(*operands)[1]


_SCHEMA = torch.library.infer_schema(_attention, mutates_args=())
linear_attention = torch.library.custom_op("asp::linear_attention", _attention, mutates_args=(), schema=_SCHEMA)
linear_state = torch.library.custom_op("asp::linear_state", _state, mutates_args=(), schema=_SCHEMA)


def _eager(*operands: Any) -> tuple[Tensor, Tensor]:
    return LinearAttention.apply(*operands[:7], None, *operands[7:], all_scan.ALONE, True)


@linear_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@linear_state.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=linear_torch.accumulator(v))


@torch.library.custom_op("asp::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    operands: list[Tensor], given: list[bool], grad: Tensor, scale: float, exclusive: bool, state: bool
) -> list[Tensor]:
    """Gradients of the floating-point operands, in order; the function runs once more. `given`: which of the seven there are."""
    taken = iter(x.detach().requires_grad_(x.is_floating_point()) for x in operands)
    values = [next(taken) if g else None for g in given]
    with torch.enable_grad():
        out = _eager(*values, scale, exclusive)[int(state)]
        wanted = [x for x in values if x is not None and x.requires_grad]
        grads = torch.autograd.grad(out, wanted, grad, allow_unused=True)
    return [torch.zeros_like(x) if g is None else owned(g) for x, g in zip(wanted, grads, strict=True)]


@linear_attention_backward.register_fake
def _(operands: list[Tensor], given: list[bool], grad: Tensor, scale: float, exclusive: bool, state: bool) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands if x.is_floating_point()]


def _differentiable(op: Any, state: bool) -> None:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.given = [x is not None for x in inputs[:7]]
        ctx.save_for_backward(*[x for x in inputs[:7] if x is not None])
        ctx.options = inputs[7:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        grads = iter(linear_attention_backward(saved, ctx.given, grad, *ctx.options, state))
        values = iter(saved)
        held = [next(values) if g else None for g in ctx.given]
        return *[next(grads) if x is not None and x.is_floating_point() else None for x in held], None, None

    op.register_autograd(backward, setup_context=setup)


_differentiable(linear_attention, False)
_differentiable(linear_state, True)


# Stages as operators: a compiler moves what it likes between them -----------------------------------


def _stage(function: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    name = function.__name__

    def run(*args: Any) -> Any:
        made = getattr(all_scan.stages(args[0]), name)(*args)
        return _dense(made) if isinstance(made, Tensor) else [_dense(x) for x in made]

    def empty(*args: Any) -> Any:
        made = (fake or function)(*args)
        return _empty(made) if isinstance(made, Tensor) else [_empty(x) for x in made]

    schema = torch.library.infer_schema(function, mutates_args=())
    op = torch.library.custom_op(f"asp::linear_{name}", run, mutates_args=(), schema=schema)
    op.register_fake(empty)
    return op


def _dense(x: Tensor) -> Tensor:
    """In the strides that the fake kernels promise, and in memory of its own: operators may not return views."""
    return x if x.is_contiguous() and x._base is None else owned(x)


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _chunks(x: Tensor) -> int:
    return -(-x.shape[1] // linear_torch.CHUNK)


def _accumulated(heads_of: Tensor, k: Tensor, columns: int, decay: Tensor | None) -> list[Tensor]:
    b, h, n, width = heads_of.shape[0], heads_of.shape[2], _chunks(heads_of), k.shape[-1]
    kept = width if decay is not None and decay.dim() == 4 else 1
    sizes = [(b, h, n, width, columns), (b, h, n, kept, 1), (b, h, width, columns), (b, h, kept, 1)]
    return [k.new_empty(s, dtype=linear_torch.accumulator(k)) for s in sizes]


begin = _stage(linear_torch.begin, lambda k, v, decay, starts: _accumulated(v, k, v.shape[-1], decay))
begin_removing = _stage(linear_torch.begin_removing)
inside = _stage(linear_torch.inside)
finish = _stage(linear_torch.finish)
carry = _stage(linear_torch.carry, lambda read, values, write, through, found: carried(values, found))
summary = _stage(
    linear_torch.summary,
    lambda read, values, write, through: [
        read.new_empty(*read.shape[:2], read.shape[-1], width) for width in (read.shape[-1], values.shape[-1])
    ],
)
begin_back = _stage(
    linear_torch.begin_back,
    lambda q, decay, starts, grad, scale, exclusive: _accumulated(grad, q, grad.shape[-1], decay),
)
begin_removing_back = _stage(linear_torch.begin_removing_back)
carry_back = _stage(linear_torch.carry_back, lambda read, write, through, asked, du, found: carried(du, found))
inside_back = _stage(linear_torch.inside_back)
finish_back = _stage(linear_torch.finish_back)


# On one rank ----------------------------------------------------------------------------------------


class LinearAttention(torch.autograd.Function):
    """This rank's tokens. What needs no state from elsewhere is computed while states travel, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        remove: Tensor | None,
        starts: Tensor | None,
        initial: Tensor | None,
        linked: Tensor | None,
        scale: float,
        exclusive: bool,
        scan: Scan,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        program = "affine" if remove is None else "carry" if scan.algorithm == "chain" else "matrix"
        local, inputs = _begun(program, k, v, decay, remove, starts)
        flight = all_scan.start(scan, program, inputs, initial, linked)
        weights = inside(q, k, decay, starts, v.shape[2], scale, exclusive)
        found, *made = flight.wait()
        states, u, end = made if program == "carry" else _states(program, local, found)
        out = finish(q, v, decay, starts, weights, u, states, scale, exclusive)
        held = _held(program, weights, states, end, u, local, inputs) if keep else ()
        ctx.save_for_backward(q, k, v, decay, remove, starts, initial, linked, found, *held)
        ctx.scale, ctx.exclusive, ctx.scan, ctx.program = scale, exclusive, scan, program
        return out, end

    @staticmethod
    def backward(ctx: Any, grad: Tensor, dend: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, decay, remove, starts, initial, linked, found, *held = ctx.saved_tensors
        options, back = (ctx.scale, ctx.exclusive), ctx.scan.back()
        weights, states, end, *local = held or again(q, k, v, decay, remove, starts, found, grad, ctx.program, *options)
        u = local.pop(0) if local else None
        if ctx.program == "affine":
            leaving, reach, asked, total = begin_back(q, decay, starts, grad, *options)
            program, inputs = "affine", [total, asked]
        else:
            read, write, through, *matrix = local
            asked, du = begin_removing_back(q, decay, starts, grad, weights, *options)
            program, inputs = "carry back", [read, write, through, asked, du]
            if matrix:
                first = carry_back(*inputs, torch.zeros_like(end))[2]
                program, inputs = "matrix", [matrix[0].transpose(-1, -2).contiguous(), first]
        flight = all_scan.start(back, program, inputs, dend, linked)
        dread, dwrite, *own = inside_back(q, k, v, decay, starts, grad, weights, u, states, *options)
        found, *made = flight.wait()
        if program == "affine":
            leaving, du, first = linear_torch.arrive(leaving, reach, found), own[0], made[0]
        else:
            leaving, du, first = made if program == "carry back" else carry_back(read, write, through, asked, du, found)
        dq, dk, dv, *rest = finish_back(q, k, v, decay, remove, starts, dread, dwrite, du, u, states, end, leaving, *options)
        given = iter(rest)
        ddecay = None if decay is None else next(given)
        dremove = None if remove is None else next(given)
        dinitial = None
        if initial is not None:
            # A product on every rank: a collective that did not depend on the cotangent would leave the backward graph.
            dinitial = (first * float(back.place == back.ranks - 1)).to(initial.dtype)
        return dq, dk, dv, ddecay, dremove, None, dinitial, None, None, None, None, None


def _begun(
    program: str, k: Tensor, v: Tensor, decay: Tensor | None, remove: Tensor | None, starts: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """What is known of this rank's chunks without a state, and the inputs of the program that the scan runs."""
    if remove is None:
        local = begin(k, v, decay, starts)
        return local, [local[3], local[2]]
    local = begin_removing(k, v, decay, remove, starts)
    return local, (local if program == "carry" else summary(*local))


def _states(program: str, local: Sequence[Tensor], found: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """The states that chunks find, u where it is not v, and the last state, from the one this rank found."""
    if program == "affine":
        states, reach, end, total = local
        return linear_torch.arrive(states, reach, found), None, torch.addcmul(end, total, found)
    states, u, end = carry(*local, found)
    return states, u, end


def _held(
    program: str,
    weights: Tensor,
    states: Tensor,
    end: Tensor,
    u: Tensor | None,
    local: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> list[Tensor]:
    """What backward takes of forward's chunks; of a program that removes also u, read, write and through, and the matrix where
    there is one."""
    if u is None:
        return [weights, states, end]
    return [weights, states, end, u, local[0], local[2], local[3], *(inputs[:1] if program == "matrix" else ())]


def _again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    remove: Tensor | None,
    starts: Tensor | None,
    found: Tensor,
    after: Tensor,
    program: str,
    scale: float,
    exclusive: bool,
) -> list[Tensor]:
    """`_held` once more, from the state that this rank found: nothing travels.

    after: is not read. Without it a compiler would find what forward has computed, and keep that instead.
    """
    local, inputs = _begun(program, k, v, decay, remove, starts)
    states, u, end = _states(program, local, found)
    weights = inside(q, k, decay, starts, v.shape[2], scale, exclusive)
    return _held(program, weights, states, end, u, local, inputs)


again = torch.library.custom_op("asp::linear_again", _again, mutates_args=())
again.register_fake(_again)


def on_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    remove: Tensor | None,
    starts: Tensor | None,
    initial: Tensor | None,
    linked: Tensor | None,
    scale: float,
    exclusive: bool,
    algorithm: str,
    places: Sequence[int],
    group: str,
    keep: bool,
    state: bool,
) -> Tensor:
    """o of this rank's tokens; or, with `state`, its term of the last state: a sum over ranks to which only the last one adds.

    Operands of `linear_attention`, then those of `Scan`: places are (rank, ranks, blocks, node). keep: hold what the chunks
    computed for the backward pass; else only the state found is held.
    """
    scan = Scan.at(algorithm, places, group)
    out, end = LinearAttention.apply(q, k, v, decay, remove, starts, initial, linked, scale, exclusive, scan, keep)
    return end * float(scan.rank == scan.ranks - 1) if state else out
