"""The stages of `linear_torch` on a GPU, as Triton kernels: the same functions, arguments and results.

The mathematics stands there and in docs/linear.md. What is different here:

- Γ is held as base-2 logarithms summed within chunks, `upto` [B, H, N, C, 1 or K], which one kernel makes of `decay`.
- Decays per key channel: the pairs of a chunk are split by halving (32, 16, .. 1 tokens). At each of the six levels a token
  stands in the late or the early half of its block, and Γ between it and the block's middle is one exponential of a number
  ≤ 0: of the late token before its product, of the early one after the middle. So every level is one product of matrices.
- (I + L)⁻¹ is made in registers: its blocks of 16 on the diagonal row by row, then four products.
- The state runs through chunks inside one program, in tiles [K, some columns], or [some rows, some columns] where nothing is
  removed.

Operands of products are bfloat16 where all inputs are; for float16 they are TensorFloat-32 (as many digits, and the range of
float32, which states need), for float32 three TensorFloat-32 products, which give back float32's digits. Sums, states and
what passes between stages are float32.

Shapes: B batch, H heads of v, T tokens, K and V sizes of a head, N chunks of C = 64 tokens. `place` is batch · H + head. Inputs
[B, T, H or a divisor of it, D] have any strides but the last; what stages hand on is contiguous.
"""

# A kernel's arguments are pointers and traced values, for which triton has no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from . import linear_torch
from .flash_triton import INTERPRETED, LOG2E, Launch
from .linear_torch import CHUNK

MAX_HEAD_SIZE = 256

C = tl.constexpr(CHUNK)
NONE, SCALAR, VECTOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # decays
WRITE, READ, READ_BEFORE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # Γ_C/Γ_i, Γ_i, Γ_{i−1}

arrive = linear_torch.arrive


# Pieces of all kernels ----------------------------------------------------------------------------


@triton.jit
def _from(x, place, start, stride_batch, stride, stride_head, group, heads):
    """x [B, T, H / group, D] from token `start` of one batch and head."""
    batch = tl.cast(place // heads, tl.int64)
    head = tl.cast(place % heads // group, tl.int64)
    return x + batch * stride_batch + head * stride_head + tl.cast(start, tl.int64) * stride


@triton.jit
def _tile(base, stride, count, column, D: tl.constexpr, BD: tl.constexpr):
    """[C, BD]: columns from `column` of the first `count` rows, which have D values and are `stride` apart; 0 outside."""
    row = tl.arange(0, C)[:, None]
    d = column + tl.arange(0, BD)[None, :]
    return tl.load(base + row * stride + d, mask=(row < count) & (d < D), other=0.0)


@triton.jit
def _put(base, stride, count, column, value, D: tl.constexpr, BD: tl.constexpr):
    row = tl.arange(0, C)[:, None]
    d = column + tl.arange(0, BD)[None, :]
    tl.store(base + row * stride + d, _rounded(value, base.dtype.element_ty), mask=(row < count) & (d < D))


@triton.jit
def _square(base, row, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of a tile [BK, BV] of a matrix [K, V]."""
    k = row + tl.arange(0, BK)[:, None]
    v = column + tl.arange(0, BV)[None, :]
    return base + k * V + v, (k < K) & (v < V)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """x rounded to the nearest of dtype: the interpreter cuts a bfloat16's last bits off, so that it gets none."""
    if INTERPRETED and dtype == tl.bfloat16:
        x = x.to(tl.float32)
        spread = x * 65537.0  # 2^16 + 1: what is left of x has 8 significant bits (Dekker's splitting)
        x = spread - (spread - x)
    return x.to(dtype)


@triton.jit
def _mm(a, b, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        a, b = _rounded(a, tl.bfloat16), _rounded(b, tl.bfloat16)
        if INTERPRETED:  # numpy has no bfloat16 and would multiply bit patterns
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _of_chunk(x, place, chunk, chunks, D: tl.constexpr):
    """x [B, H, N, D..] from one chunk; D is the number of values of a chunk."""
    return x + (tl.cast(place, tl.int64) * chunks + chunk) * D


@triton.jit
def _gate(upto, row, seen, column, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr):
    """Logarithms [rows, BK], or [rows, 1] of scalar decays, at `row` [rows, 1] of a chunk, and 0 where not `seen`."""
    if GATE == SCALAR:
        return tl.load(upto + row, mask=seen, other=0.0)
    else:
        d = column + tl.arange(0, BK)[None, :]
        return tl.load(upto + row * K + d, mask=seen & (d < K), other=0.0)


@triton.jit
def _factor(
    upto, segment, column, K: tl.constexpr, BK: tl.constexpr, FACTOR: tl.constexpr, GATE: tl.constexpr, STARTS: tl.constexpr
):
    """[C, BK or 1]: what multiplies rows that meet the chunk's entering state (READ), or that reach the leaving one (WRITE)."""
    row = tl.arange(0, C)[:, None]
    factor = tl.full([C, 1], 1.0, tl.float32)
    if GATE != NONE:
        if FACTOR == WRITE:
            last = _gate(upto, tl.full([1, 1], C - 1, tl.int32), True, column, K, BK, GATE)
            factor = tl.exp2(last - _gate(upto, row, row < C, column, K, BK, GATE))
        elif FACTOR == READ:
            factor = tl.exp2(_gate(upto, row, row < C, column, K, BK, GATE))
        else:
            factor = tl.exp2(_gate(upto, row - 1, row > 0, column, K, BK, GATE))
    if STARTS:
        document = 0
        if FACTOR == WRITE:
            document = tl.load(segment + C - 1)
        factor = tl.where(tl.load(segment + row) == document, factor, 0.0)
    return factor


@triton.jit
def _through(upto, segment, column, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, STARTS: tl.constexpr):
    """[BK or 1, 1]: what is left of the entering state behind the chunk."""
    left = tl.full([1, 1], 1.0, tl.float32)
    if GATE == SCALAR:
        left = tl.exp2(tl.load(upto + C - 1 + tl.zeros([1, 1], tl.int32)))
    if GATE == VECTOR:
        d = column + tl.arange(0, BK)[:, None]
        left = tl.exp2(tl.load(upto + (C - 1) * K + d, mask=d < K, other=0.0))
    if STARTS:
        left = tl.where(tl.load(segment + C - 1) == 0, left, 0.0)
    return left


@triton.jit
def _ratio(upto, segment, EXCLUSIVE: tl.constexpr, GATE: tl.constexpr, STARTS: tl.constexpr):
    """[C, C]: Γ_i/Γ_j of scalar decays, or 1, where token i sees token j; 0 elsewhere."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    seen = j < i if EXCLUSIVE else j <= i
    if STARTS:
        seen = seen & (tl.load(segment + i) == tl.load(segment + j))
    steps = tl.zeros([C, C], tl.float32)
    if GATE == SCALAR:
        if EXCLUSIVE:
            late = tl.load(upto + i - 1, mask=i > 0, other=0.0)
        else:
            late = tl.load(upto + i)
        steps = late - tl.load(upto + j)
    return tl.exp2(tl.where(seen, steps, float("-inf")))


@triton.jit
def _halved(level, upto, now, read, column, K: tl.constexpr, BK: tl.constexpr):
    """Of blocks of 2·half tokens: Γ between each token and its block's middle [C, BK]; who is late [C, 1]; same block [C, C].

    now, read [C, BK]: logarithms of Γ at the tokens as they write and as they read.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    half = (C // 2) >> level
    late = i % (2 * half) >= half
    middle = _gate(upto, i // (2 * half) * (2 * half) + half - 1, i < C, column, K, BK, VECTOR)
    gamma = tl.exp2(tl.where(late, read - middle, middle - now))
    return gamma, late, i // (2 * half) == j // (2 * half)


@triton.jit
def _logs(upto, column, K: tl.constexpr, BK: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """`now` and `read` of `_halved`."""
    i = tl.arange(0, C)[:, None]
    now = _gate(upto, i, i < C, column, K, BK, VECTOR)
    if EXCLUSIVE:
        return now, _gate(upto, i - 1, i > 0, column, K, BK, VECTOR)
    else:
        return now, now


@triton.jit
def _pairs(
    x, y, upto, segment, stride_x, stride_y, count, scale,
    K: tl.constexpr, BK: tl.constexpr, EXCLUSIVE: tl.constexpr, GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, C]: scale · Σ_k x_ik (Γ_ik/Γ_jk) y_jk where token i sees token j, else 0."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    out = tl.zeros([C, C], tl.float32)
    for column in range(0, K, BK):
        a = _tile(x, stride_x, count, column, K, BK)
        b = _tile(y, stride_y, count, column, K, BK)
        if GATE == VECTOR:
            a, b = a.to(tl.float32), b.to(tl.float32)
            if not EXCLUSIVE:
                out += tl.where(i == j, tl.sum(a * b, 1)[:, None], 0.0)
            now, read = _logs(upto, column, K, BK, EXCLUSIVE)
            for level in tl.range(0, 6, num_stages=1):
                gamma, late, together = _halved(level, upto, now, read, column, K, BK)
                part = _mm(tl.where(late, a * gamma, 0.0), tl.trans(tl.where(late, 0.0, b * gamma)), PRECISION)
                out += tl.where(together, part, 0.0)
        else:
            out += _mm(a, tl.trans(b), PRECISION)
    return out * scale * _ratio(upto, segment, EXCLUSIVE, GATE, STARTS)


@triton.jit
def _pairs_back(
    g, a, b, upto, column, K: tl.constexpr, BK: tl.constexpr, EXCLUSIVE: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr
):
    """Gradients of BK columns of x and y by `_pairs` (with scale 1), from its own g [C, C], which `_ratio` has multiplied."""
    if GATE == VECTOR:
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        left = tl.zeros([C, BK], tl.float32)
        right = tl.zeros([C, BK], tl.float32)
        if not EXCLUSIVE:
            own = tl.sum(tl.where(i == j, g, 0.0), 1)[:, None]
            left += own * b
            right += own * a
        now, read = _logs(upto, column, K, BK, EXCLUSIVE)
        for level in tl.range(0, 6, num_stages=1):
            gamma, late, together = _halved(level, upto, now, read, column, K, BK)
            part = tl.where(together, g, 0.0)
            left += tl.where(late, gamma * _mm(part, tl.where(late, 0.0, b * gamma), PRECISION), 0.0)
            right += tl.where(late, 0.0, gamma * _mm(tl.trans(part), tl.where(late, a * gamma, 0.0), PRECISION))
        return left, right
    else:
        return _mm(g, b, PRECISION), _mm(tl.trans(g), a, PRECISION)


@triton.jit
def _inverse(system):
    """(I + system)⁻¹ [C, C] of a strictly lower triangular system.

    With D the inverses of the blocks of 16 on the diagonal (row by row, the four at once), and X = D · (what is outside
    of them), which vanishes to the fourth power: (I + X)⁻¹ D = (I − X)(I + X²) D.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    block = row // 16 == column // 16
    eye = tl.where(row == column, 1.0, 0.0)
    small = tl.sum(tl.reshape(tl.where(block, -system, 0.0), [C // 16, 16, C // 16, 16]), 2)
    i = tl.arange(0, 16)[None, :, None]
    for step in range(1, 16):  # rows above `step` are the inverse's, less I; the others are still those of −system
        mine = tl.sum(tl.where(i == step, small, 0.0), 1)
        mine += tl.sum(mine[:, :, None] * small, 1)
        small = tl.where(i == step, mine[:, None, :], small)
    spread = tl.reshape(tl.broadcast_to(small[:, :, None, :], [C // 16, 16, C // 16, 16]), [C, C])
    diagonal = tl.where(block, spread, 0.0) + eye
    x = _mm(diagonal, tl.where(block, 0.0, system), "tf32x3")
    return _mm(_mm(eye - x, eye + _mm(x, x, "tf32x3"), "tf32x3"), diagonal, "tf32x3")


# Gates --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_d"])
def gates_kernel(
    decay, upto, stride_d_batch, stride_d, stride_d_head, group_d, heads, chunks, length, K: tl.constexpr, BK: tl.constexpr
):
    """upto [B, H, N, C, K] of one chunk and BK columns: sums of decays [B, T, H / group, K] up to each token, times log2(e)."""
    column = tl.program_id(0) % tl.cdiv(K, BK) * BK
    chunk = tl.program_id(0) // tl.cdiv(K, BK) % chunks
    place = tl.program_id(0) // tl.cdiv(K, BK) // chunks
    decay = _from(decay, place, chunk * C, stride_d_batch, stride_d, stride_d_head, group_d, heads)
    x = _tile(decay, stride_d, length - chunk * C, column, K, BK).to(tl.float32)
    _put(_of_chunk(upto, place, chunk, chunks, C * K), K, C, column, tl.cumsum(x, 0) * LOG2E, K, BK)


# Without `remove`: the state through all chunks -----------------------------------------------------


@triton.jit
def _added(
    x, y, upto, segment, stride_x, stride_y, count, row, column, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FACTOR: tl.constexpr, GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BK, BV]: Σ_i factor_i x_i y_iᵀ of one chunk."""
    a = _tile(x, stride_x, count, row, K, BK)
    a = a.to(tl.float32) * _factor(upto, segment, row, K, BK, FACTOR, GATE, STARTS) * scale
    return _mm(tl.trans(a), _tile(y, stride_y, count, column, V, BV), PRECISION)


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_x", "group_y"])
def accumulate_kernel(
    x, y, upto, segment, states, reach, end, total,
    stride_x_batch, stride_x, stride_x_head, group_x, stride_y_batch, stride_y, stride_y_head, group_y,
    heads, chunks, length, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, GATE: tl.constexpr,
    STARTS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile [BK, BV] of the state through all chunks: S' = through ⊙ S + Σ_i factor_i x_i y_iᵀ, from zero."""
    row = tl.program_id(0) % tl.cdiv(K, BK) * BK
    column = tl.program_id(0) // tl.cdiv(K, BK) % tl.cdiv(V, BV) * BV
    place = tl.program_id(0) // tl.cdiv(K, BK) // tl.cdiv(V, BV)
    LEFT: tl.constexpr = K if GATE == VECTOR else 1
    x = _from(x, place, 0, stride_x_batch, stride_x, stride_x_head, group_x, heads)
    y = _from(y, place, 0, stride_y_batch, stride_y, stride_y_head, group_y, heads)
    k = row + tl.arange(0, BK if GATE == VECTOR else 1)[:, None]
    mine = (k < LEFT) & (column == 0)
    state = tl.zeros([BK, BV], tl.float32)
    left = tl.full([BK if GATE == VECTOR else 1, 1], 1.0, tl.float32)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSE else step
        at, inside = _square(_of_chunk(states, place, chunk, chunks, K * V), row, column, K, V, BK, BV)
        tl.store(at, state, mask=inside)
        tl.store(_of_chunk(reach, place, chunk, chunks, LEFT) + k, left, mask=mine)
        gates = upto
        documents = segment
        if GATE != NONE:
            gates = _of_chunk(upto, place, chunk, chunks, C * LEFT)
        if STARTS:
            documents = _of_chunk(segment, place // heads, chunk, chunks, C)
        start = tl.cast(chunk, tl.int64) * C
        added = _added(
            x + start * stride_x, y + start * stride_y, gates, documents, stride_x, stride_y, length - chunk * C, row, column,
            scale, K, V, BK, BV, FACTOR, GATE, STARTS, PRECISION,
        )  # fmt: skip
        through = _through(gates, documents, row, K, BK, GATE, STARTS)
        state = state * through + added
        left = left * through
    at, inside = _square(end + tl.cast(place, tl.int64) * K * V, row, column, K, V, BK, BV)
    tl.store(at, state, mask=inside)
    tl.store(total + place * LEFT + k, left, mask=mine)


# With `remove`: what a chunk does to a state, and the state through all chunks ----------------------


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_k", "group_v", "group_r"])
def solve_kernel(
    k, v, remove, upto, segment, read, values, write, through,
    stride_k_batch, stride_k, stride_k_head, group_k, stride_v_batch, stride_v, stride_v_head, group_v,
    stride_r_batch, stride_r, stride_r_head, group_r, heads, chunks, length,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk: read = (I + L)⁻¹ Γ_{i−1} r, values = (I + L)⁻¹ v, write = Γ_C/Γ_i k, and through."""
    chunk = tl.program_id(0) % chunks
    place = tl.program_id(0) // chunks
    count = length - chunk * C
    LEFT: tl.constexpr = K if GATE == VECTOR else 1
    k = _from(k, place, chunk * C, stride_k_batch, stride_k, stride_k_head, group_k, heads)
    v = _from(v, place, chunk * C, stride_v_batch, stride_v, stride_v_head, group_v, heads)
    remove = _from(remove, place, chunk * C, stride_r_batch, stride_r, stride_r_head, group_r, heads)
    if GATE != NONE:
        upto = _of_chunk(upto, place, chunk, chunks, C * LEFT)
    if STARTS:
        segment = _of_chunk(segment, place // heads, chunk, chunks, C)
    read = _of_chunk(read, place, chunk, chunks, C * K)
    values = _of_chunk(values, place, chunk, chunks, C * V)
    write = _of_chunk(write, place, chunk, chunks, C * K)
    through = _of_chunk(through, place, chunk, chunks, LEFT)

    system = _pairs(remove, k, upto, segment, stride_r, stride_k, count, 1.0, K, BK, True, GATE, STARTS, PRECISION)
    inverse = _inverse(system)
    for column in range(0, K, BK):
        taken = _tile(remove, stride_r, count, column, K, BK).to(tl.float32)
        taken *= _factor(upto, segment, column, K, BK, READ_BEFORE, GATE, STARTS)
        _put(read, K, C, column, _mm(inverse, taken, PRECISION), K, BK)
        written = _tile(k, stride_k, count, column, K, BK).to(tl.float32)
        written *= _factor(upto, segment, column, K, BK, WRITE, GATE, STARTS)
        _put(write, K, C, column, written, K, BK)
        d = column + tl.arange(0, BK if GATE == VECTOR else 1)[:, None]
        tl.store(through + d, _through(upto, segment, column, K, BK, GATE, STARTS), mask=d < LEFT)
    for column in range(0, V, BV):
        value = _tile(v, stride_v, count, column, V, BV)
        _put(values, V, C, column, _mm(inverse, value, PRECISION), V, BV)


@triton.jit
def _part(base, row, column, K: tl.constexpr, V: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, GIVEN: tl.constexpr):
    """A tile [PK, BV] of a state [K, V]; zeros if it is not given."""
    if GIVEN:
        at, inside = _square(base, row, column, K, V, PK, BV)
        return tl.load(at, mask=inside, other=0.0)
    else:
        return tl.zeros([PK, BV], tl.float32)


@triton.jit
def _put_part(base, row, column, value, K: tl.constexpr, V: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr):
    at, inside = _square(base, row, column, K, V, PK, BV)
    tl.store(at, value, mask=inside)


@triton.jit
def _stepped(state, through, rows, u, row, K: tl.constexpr, PK: tl.constexpr, LEFT: tl.constexpr, PRECISION: tl.constexpr):
    """PK rows of through ⊙ state + rowsᵀ u."""
    d = row + tl.arange(0, PK if LEFT > 1 else 1)[:, None]
    kept = tl.load(through + (d if LEFT > 1 else 0 * d), mask=d < K, other=0.0)
    return state * kept + _mm(tl.trans(_tile(rows, K, C, row, K, PK)), u, PRECISION)


@triton.jit(do_not_specialize=["chunks"])
def carry_kernel(
    read, values, write, through, found, states, u, last, chunks,
    K: tl.constexpr, V: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, LEFT: tl.constexpr, HALVES: tl.constexpr,
    VALUES: tl.constexpr, FOUND: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV columns of the state through all chunks: u = values − read S, S' = through ⊙ S + writeᵀ u.

    Not given, found and values are zeros. States and u are only stored if they are to be kept. All rows of the state stay in
    registers, in two halves if there are many: operands of a product are held whole.
    """
    column = tl.program_id(0) % tl.cdiv(V, BV) * BV
    place = tl.program_id(0) // tl.cdiv(V, BV)
    whole = tl.cast(place, tl.int64) * K * V
    if FOUND:
        found += whole
    state = _part(found, 0, column, K, V, PK, BV, FOUND)
    lower = _part(found, PK, column, K, V, PK, BV, FOUND and HALVES)
    for chunk in range(0, chunks):
        if KEEP:
            at = _of_chunk(states, place, chunk, chunks, K * V)
            _put_part(at, 0, column, state, K, V, PK, BV)
            if HALVES:
                _put_part(at, PK, column, lower, K, V, PK, BV)
        rows = _of_chunk(read, place, chunk, chunks, C * K)
        known = _mm(_tile(rows, K, C, 0, K, PK), state, PRECISION)
        if HALVES:
            known += _mm(_tile(rows, K, C, PK, K, PK), lower, PRECISION)
        if VALUES:
            new = _tile(_of_chunk(values, place, chunk, chunks, C * V), V, C, column, V, BV) - known
        else:
            new = -known
        if KEEP:
            _put(_of_chunk(u, place, chunk, chunks, C * V), V, C, column, new, V, BV)
        rows = _of_chunk(write, place, chunk, chunks, C * K)
        kept = _of_chunk(through, place, chunk, chunks, LEFT)
        state = _stepped(state, kept, rows, new, 0, K, PK, LEFT, PRECISION)
        if HALVES:
            lower = _stepped(lower, kept, rows, new, PK, K, PK, LEFT, PRECISION)
    _put_part(last + whole, 0, column, state, K, V, PK, BV)
    if HALVES:
        _put_part(last + whole, PK, column, lower, K, V, PK, BV)


@triton.jit(do_not_specialize=["chunks"])
def carry_back_kernel(
    read, write, through, asked, du, found, leaving, du_out, first, chunks,
    K: tl.constexpr, V: tl.constexpr, PK: tl.constexpr, BV: tl.constexpr, LEFT: tl.constexpr, HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BV columns of the cotangent back through all chunks: du += write dS', dS = asked + through ⊙ dS' − readᵀ du."""
    column = tl.program_id(0) % tl.cdiv(V, BV) * BV
    place = tl.program_id(0) // tl.cdiv(V, BV)
    whole = tl.cast(place, tl.int64) * K * V
    state = _part(found + whole, 0, column, K, V, PK, BV, True)
    lower = _part(found + whole, PK, column, K, V, PK, BV, HALVES)
    for step in range(0, chunks):
        chunk = chunks - 1 - step
        at = _of_chunk(leaving, place, chunk, chunks, K * V)
        _put_part(at, 0, column, state, K, V, PK, BV)
        rows = _of_chunk(write, place, chunk, chunks, C * K)
        new = _tile(_of_chunk(du, place, chunk, chunks, C * V), V, C, column, V, BV)
        new += _mm(_tile(rows, K, C, 0, K, PK), state, PRECISION)
        if HALVES:
            _put_part(at, PK, column, lower, K, V, PK, BV)
            new += _mm(_tile(rows, K, C, PK, K, PK), lower, PRECISION)
        _put(_of_chunk(du_out, place, chunk, chunks, C * V), V, C, column, new, V, BV)
        rows = _of_chunk(read, place, chunk, chunks, C * K)
        kept = _of_chunk(through, place, chunk, chunks, LEFT)
        more = _of_chunk(asked, place, chunk, chunks, K * V)
        state = _stepped(state, kept, rows, -new, 0, K, PK, LEFT, PRECISION) + _part(more, 0, column, K, V, PK, BV, True)
        if HALVES:
            lower = _stepped(lower, kept, rows, -new, PK, K, PK, LEFT, PRECISION) + _part(more, PK, column, K, V, PK, BV, True)
    _put_part(first + whole, 0, column, state, K, V, PK, BV)
    if HALVES:
        _put_part(first + whole, PK, column, lower, K, V, PK, BV)


# Within chunks, forward -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_q", "group_k"])
def inside_kernel(
    q, k, upto, segment, weights,
    stride_q_batch, stride_q, stride_q_head, group_q, stride_k_batch, stride_k, stride_k_head, group_k,
    heads, chunks, length, scale,
    K: tl.constexpr, BK: tl.constexpr, EXCLUSIVE: tl.constexpr, GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P of one chunk: P_ij = scale · q_iᵀ (Γ_i/Γ_j) k_j."""
    chunk = tl.program_id(0) % chunks
    place = tl.program_id(0) // chunks
    q = _from(q, place, chunk * C, stride_q_batch, stride_q, stride_q_head, group_q, heads)
    k = _from(k, place, chunk * C, stride_k_batch, stride_k, stride_k_head, group_k, heads)
    if GATE != NONE:
        upto = _of_chunk(upto, place, chunk, chunks, C * (K if GATE == VECTOR else 1))
    if STARTS:
        segment = _of_chunk(segment, place // heads, chunk, chunks, C)
    p = _pairs(q, k, upto, segment, stride_q, stride_k, length - chunk * C, scale, K, BK, EXCLUSIVE, GATE, STARTS, PRECISION)
    _put(_of_chunk(weights, place, chunk, chunks, C * C), C, C, 0, p, C, C)


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_x", "group_y"])
def rows_kernel(
    x, y, weights, states, upto, segment, out,
    stride_x_batch, stride_x, stride_x_head, group_x, stride_y_batch, stride_y, stride_y_head, group_y,
    stride_o_batch, stride_o, stride_o_head, group_o, heads, chunks, length, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, WEIGHTS: tl.constexpr,
    GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV columns of one chunk: out = factor ⊙ (scale · x) states + weights y, or + y where there are no weights."""
    column = tl.program_id(0) % tl.cdiv(V, BV) * BV
    chunk = tl.program_id(0) // tl.cdiv(V, BV) % chunks
    place = tl.program_id(0) // tl.cdiv(V, BV) // chunks
    count = length - chunk * C
    x = _from(x, place, chunk * C, stride_x_batch, stride_x, stride_x_head, group_x, heads)
    y = _from(y, place, chunk * C, stride_y_batch, stride_y, stride_y_head, group_y, heads)
    out = _from(out, place, chunk * C, stride_o_batch, stride_o, stride_o_head, group_o, heads)
    if GATE != NONE:
        upto = _of_chunk(upto, place, chunk, chunks, C * (K if GATE == VECTOR else 1))
    if STARTS:
        segment = _of_chunk(segment, place // heads, chunk, chunks, C)
    states = _of_chunk(states, place, chunk, chunks, K * V)
    acc = tl.zeros([C, BV], tl.float32)
    for row in range(0, K, BK):
        a = _tile(x, stride_x, count, row, K, BK).to(tl.float32)
        a *= _factor(upto, segment, row, K, BK, FACTOR, GATE, STARTS) * scale
        at, inside = _square(states, row, column, K, V, BK, BV)
        acc += _mm(a, tl.load(at, mask=inside, other=0.0), PRECISION)
    own = _tile(y, stride_y, count, column, V, BV)
    if WEIGHTS:
        acc += _mm(_tile(_of_chunk(weights, place, chunk, chunks, C * C), C, C, 0, C, C), own, PRECISION)
    else:
        acc += own
    _put(out, stride_o, count, column, acc, V, BV)


# Within chunks, backward ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_q", "group_g"])
def asked_kernel(
    q, grad, weights, upto, segment, asked, du,
    stride_q_batch, stride_q, stride_q_head, group_q, stride_g_batch, stride_g, stride_g_head, group_g,
    heads, chunks, length, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr,
    GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of what one chunk asks of the state it finds, Σ_i factor_i (scale · q_i) do_iᵀ; and of u, Pᵀ do."""
    row = tl.program_id(0) % tl.cdiv(K, BK) * BK
    column = tl.program_id(0) // tl.cdiv(K, BK) % tl.cdiv(V, BV) * BV
    which = tl.program_id(0) // tl.cdiv(K, BK) // tl.cdiv(V, BV)
    chunk = which % chunks
    place = which // chunks
    count = length - chunk * C
    q = _from(q, place, chunk * C, stride_q_batch, stride_q, stride_q_head, group_q, heads)
    grad = _from(grad, place, chunk * C, stride_g_batch, stride_g, stride_g_head, group_g, heads)
    if GATE != NONE:
        upto = _of_chunk(upto, place, chunk, chunks, C * (K if GATE == VECTOR else 1))
    if STARTS:
        segment = _of_chunk(segment, place // heads, chunk, chunks, C)
    added = _added(
        q, grad, upto, segment, stride_q, stride_g, count, row, column, scale, K, V, BK, BV, FACTOR, GATE, STARTS, PRECISION
    )
    at, inside = _square(_of_chunk(asked, place, chunk, chunks, K * V), row, column, K, V, BK, BV)
    tl.store(at, added, mask=inside)
    if row == 0:
        p = _tile(_of_chunk(weights, place, chunk, chunks, C * C), C, C, 0, C, C)
        part = _mm(tl.trans(p), _tile(grad, stride_g, count, column, V, BV), PRECISION)
        _put(_of_chunk(du, place, chunk, chunks, C * V), V, C, column, part, V, BV)


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_q", "group_k", "group_y", "group_g"])
def inside_back_kernel(
    q, k, y, grad, weights, states, upto, segment, dread, dwrite, du,
    stride_q_batch, stride_q, stride_q_head, group_q, stride_k_batch, stride_k, stride_k_head, group_k,
    stride_y_batch, stride_y, stride_y_head, group_y, stride_g_batch, stride_g, stride_g_head, group_g,
    heads, chunks, length, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FACTOR: tl.constexpr, DU: tl.constexpr,
    GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk: dP = do yᵀ; dread = factor ⊙ (do Sᵀ) + dP's left gradient, dwrite = its right one, and du = Pᵀ do."""
    chunk = tl.program_id(0) % chunks
    place = tl.program_id(0) // chunks
    count = length - chunk * C
    EXCLUSIVE: tl.constexpr = FACTOR == READ_BEFORE
    q = _from(q, place, chunk * C, stride_q_batch, stride_q, stride_q_head, group_q, heads)
    k = _from(k, place, chunk * C, stride_k_batch, stride_k, stride_k_head, group_k, heads)
    y = _from(y, place, chunk * C, stride_y_batch, stride_y, stride_y_head, group_y, heads)
    grad = _from(grad, place, chunk * C, stride_g_batch, stride_g, stride_g_head, group_g, heads)
    if GATE != NONE:
        upto = _of_chunk(upto, place, chunk, chunks, C * (K if GATE == VECTOR else 1))
    if STARTS:
        segment = _of_chunk(segment, place // heads, chunk, chunks, C)
    states = _of_chunk(states, place, chunk, chunks, K * V)
    dp = tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        do = _tile(grad, stride_g, count, column, V, BV)
        dp += _mm(do, tl.trans(_tile(y, stride_y, count, column, V, BV)), PRECISION)
        if DU:
            p = _tile(_of_chunk(weights, place, chunk, chunks, C * C), C, C, 0, C, C)
            part = _mm(tl.trans(p), do, PRECISION)
            _put(_of_chunk(du, place, chunk, chunks, C * V), V, C, column, part, V, BV)
    dp *= _ratio(upto, segment, EXCLUSIVE, GATE, STARTS)
    for row in range(0, K, BK):
        acc = tl.zeros([C, BK], tl.float32)
        for column in range(0, V, BV):
            at, inside = _square(states, row, column, K, V, BK, BV)
            state = tl.load(at, mask=inside, other=0.0)
            acc += _mm(_tile(grad, stride_g, count, column, V, BV), tl.trans(state), PRECISION)
        a = _tile(q, stride_q, count, row, K, BK).to(tl.float32) * scale
        b = _tile(k, stride_k, count, row, K, BK).to(tl.float32)
        left, right = _pairs_back(dp, a, b, upto, row, K, BK, EXCLUSIVE, GATE, PRECISION)
        left += acc * _factor(upto, segment, row, K, BK, FACTOR, GATE, STARTS)
        _put(_of_chunk(dread, place, chunk, chunks, C * K), K, C, row, left, K, BK)
        _put(_of_chunk(dwrite, place, chunk, chunks, C * K), K, C, row, right, K, BK)


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_k", "group_r", "group_y"])
def unsolve_kernel(
    k, remove, y, du, upto, segment, dv, dl,
    stride_k_batch, stride_k, stride_k_head, group_k, stride_r_batch, stride_r, stride_r_head, group_r,
    stride_y_batch, stride_y, stride_y_head, group_y, heads, chunks, length,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk: dv = (I + L)⁻ᵀ du [B, T, H, V]; dL = −dv uᵀ [B, H, N, C, C] times `_ratio`."""
    chunk = tl.program_id(0) % chunks
    place = tl.program_id(0) // chunks
    count = length - chunk * C
    k = _from(k, place, chunk * C, stride_k_batch, stride_k, stride_k_head, group_k, heads)
    remove = _from(remove, place, chunk * C, stride_r_batch, stride_r, stride_r_head, group_r, heads)
    y = _from(y, place, chunk * C, stride_y_batch, stride_y, stride_y_head, group_y, heads)
    dv = _from(dv, place, chunk * C, length * heads * V, heads * V, V, 1, heads)
    if GATE != NONE:
        upto = _of_chunk(upto, place, chunk, chunks, C * (K if GATE == VECTOR else 1))
    if STARTS:
        segment = _of_chunk(segment, place // heads, chunk, chunks, C)
    system = _pairs(remove, k, upto, segment, stride_r, stride_k, count, 1.0, K, BK, True, GATE, STARTS, PRECISION)
    back = tl.trans(_inverse(system))
    acc = tl.zeros([C, C], tl.float32)
    for column in range(0, V, BV):
        part = _mm(back, _tile(_of_chunk(du, place, chunk, chunks, C * V), V, C, column, V, BV), PRECISION)
        _put(dv, heads * V, count, column, part, V, BV)
        acc += _mm(part, tl.trans(_tile(y, stride_y, count, column, V, BV)), PRECISION)
    acc *= -_ratio(upto, segment, True, GATE, STARTS)
    _put(_of_chunk(dl, place, chunk, chunks, C * C), C, C, 0, acc, C, C)


@triton.jit(do_not_specialize=["chunks", "length", "heads", "group_q", "group_k", "group_r", "group_y"])
def finish_back_kernel(
    q, k, remove, y, dv, dl, dread, dwrite, states, end, leaving, upto, segment, dq, dk, ddecay, dremove,
    stride_q_batch, stride_q, stride_q_head, group_q, stride_k_batch, stride_k, stride_k_head, group_k,
    stride_r_batch, stride_r, stride_r_head, group_r, stride_y_batch, stride_y, stride_y_head, group_y,
    heads, chunks, length, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EXCLUSIVE: tl.constexpr, REMOVE: tl.constexpr,
    GATE: tl.constexpr, STARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk: dq = scale · dread; dk = dwrite + Γ_C/Γ_i ⊙ (y dS'ᵀ) + dL's right gradient; dremove = dL's left gradient −
    Γ_{i−1} ⊙ (dv Sᵀ); ddecay from these, as in `linear_torch.finish_back`. All [B, T, H, K], ddecay of scalar decays [B, T, H].
    """
    chunk = tl.program_id(0) % chunks
    place = tl.program_id(0) // chunks
    count = length - chunk * C
    q = _from(q, place, chunk * C, stride_q_batch, stride_q, stride_q_head, group_q, heads)
    k = _from(k, place, chunk * C, stride_k_batch, stride_k, stride_k_head, group_k, heads)
    y = _from(y, place, chunk * C, stride_y_batch, stride_y, stride_y_head, group_y, heads)
    dq = _from(dq, place, chunk * C, length * heads * K, heads * K, K, 1, heads)
    dk = _from(dk, place, chunk * C, length * heads * K, heads * K, K, 1, heads)
    if GATE != NONE:
        upto = _of_chunk(upto, place, chunk, chunks, C * (K if GATE == VECTOR else 1))
    if STARTS:
        segment = _of_chunk(segment, place // heads, chunk, chunks, C)
    dread = _of_chunk(dread, place, chunk, chunks, C * K)
    dwrite = _of_chunk(dwrite, place, chunk, chunks, C * K)
    leaving = _of_chunk(leaving, place, chunk, chunks, K * V)
    if chunk + 1 < chunks:
        behind = _of_chunk(states, place, chunk + 1, chunks, K * V)
    else:
        behind = _of_chunk(end, place, 0, 1, K * V)
    if REMOVE:
        remove = _from(remove, place, chunk * C, stride_r_batch, stride_r, stride_r_head, group_r, heads)
        dv = _from(dv, place, chunk * C, length * heads * V, heads * V, V, 1, heads)
        dremove = _from(dremove, place, chunk * C, length * heads * K, heads * K, K, 1, heads)
        dsystem = _tile(_of_chunk(dl, place, chunk, chunks, C * C), C, C, 0, C, C)
        states = _of_chunk(states, place, chunk, chunks, K * V)
    every = tl.zeros([C], tl.float32)  # what the logarithms at a token's Γ_i and Γ_{i−1} get, and those of the latter alone
    earlier = tl.zeros([C], tl.float32)
    whole = tl.zeros([C], tl.float32)
    for row in range(0, K, BK):
        acc = tl.zeros([C, BK], tl.float32)
        total = tl.zeros([BK], tl.float32)
        for column in range(0, V, BV):
            at, inside = _square(leaving, row, column, K, V, BK, BV)
            cotangent = tl.load(at, mask=inside, other=0.0)
            acc += _mm(_tile(y, stride_y, count, column, V, BV), tl.trans(cotangent), PRECISION)
            if GATE != NONE:
                at, inside = _square(behind, row, column, K, V, BK, BV)
                total += tl.sum(cotangent * tl.load(at, mask=inside, other=0.0), 1)
        b = _tile(k, stride_k, count, row, K, BK).to(tl.float32)
        back = acc * _factor(upto, segment, row, K, BK, WRITE, GATE, STARTS)
        back += _tile(dwrite, K, C, row, K, BK)
        before = tl.zeros([C, BK], tl.float32)
        if REMOVE:
            acc = tl.zeros([C, BK], tl.float32)
            for column in range(0, V, BV):
                at, inside = _square(states, row, column, K, V, BK, BV)
                state = tl.load(at, mask=inside, other=0.0)
                acc += _mm(_tile(dv, heads * V, count, column, V, BV), tl.trans(state), PRECISION)
            a = _tile(remove, stride_r, count, row, K, BK).to(tl.float32)
            left, right = _pairs_back(dsystem, a, b, upto, row, K, BK, True, GATE, PRECISION)
            left -= acc * _factor(upto, segment, row, K, BK, READ_BEFORE, GATE, STARTS)
            back += right
            _put(dremove, heads * K, count, row, left, K, BK)
            before += a * left
        _put(dk, heads * K, count, row, back, K, BK)
        asked = _tile(dread, K, C, row, K, BK) * scale
        _put(dq, heads * K, count, row, asked, K, BK)
        if GATE != NONE:
            upon = -b * back
            if EXCLUSIVE:
                before += _tile(q, stride_q, count, row, K, BK).to(tl.float32) * asked
            else:
                upon += _tile(q, stride_q, count, row, K, BK).to(tl.float32) * asked
            if GATE == VECTOR:
                # The sum of Γ_i's over this and later tokens, and of Γ_{i−1}'s over later ones.
                step = tl.cumsum(upon + before, 0, reverse=True) - before + total[None, :]
                at = _from(ddecay, place, chunk * C, length * heads * K, heads * K, K, 1, heads)
                _put(at, heads * K, count, row, step, K, BK)
            else:
                every += tl.sum(upon + before, 1)
                earlier += tl.sum(before, 1)
                whole += tl.sum(total, 0)
    if GATE == SCALAR:
        step = tl.cumsum(every, 0, reverse=True) - earlier + whole
        at = _from(ddecay, place, chunk * C, length * heads, heads, 1, 1, heads)
        i = tl.arange(0, C)
        tl.store(at + i * heads, _rounded(step, ddecay.dtype.element_ty), mask=i < count)


# Launches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Key and value channels that a program holds at a time, warps of a program, how products are made (`_mm`), stages of the
    loads' pipeline."""

    keys: int
    values: int
    warps: int
    product: str
    stages: int = 1


# Tiles that neither spill registers nor need more than the 227 KiB of shared memory that a program may have on sm_90, by the
# widest of the inputs' types, widest first, and kernel ("": the others): `tests/test_linear_triton.py` compiles them and looks.
# The state's loop in `accumulate` and `carry` has few programs and much to wait for: narrow columns make more of them, and its
# loads run ahead.
TILES = {
    torch.float32: {
        "": Tile(32, 32, 4, "tf32x3"),
        "inside_back": Tile(16, 32, 8, "tf32x3"),
        "finish_back": Tile(16, 32, 8, "ieee"),
    },
    torch.float16: {
        "": Tile(32, 32, 4, "tf32"),
        "accumulate": Tile(32, 32, 4, "tf32", 3),
        "rows": Tile(32, 32, 4, "tf32", 2),
        "inside_back": Tile(16, 32, 8, "tf32"),
        "finish_back": Tile(16, 32, 8, "tf32"),
    },
    torch.bfloat16: {
        "": Tile(64, 64, 4, "bf16"),
        "accumulate": Tile(64, 32, 4, "bf16", 3),
        "rows": Tile(64, 64, 4, "bf16", 2),
        "solve": Tile(32, 64, 4, "bf16"),
        "inside_back": Tile(32, 64, 8, "bf16"),
        "finish_back": Tile(32, 64, 8, "bf16"),
    },
}
# Of the state with `remove` all keys are held (in two halves where they are many), by padded keys. What it multiplies is float32
# for inputs of any type. Of 256 keys three TensorFloat-32 products do not fit; three bfloat16 products are right to 2^-17.
CARRY = {
    **{size: Tile(size, 16, 4, "tf32x3", 3) for size in (16, 32, 64)},
    128: Tile(64, 16, 4, "tf32x3", 3),
    256: Tile(128, 16, 8, "bf16x3", 2),
}


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # 16: the shortest sum of a tensor core's product


def tile(kernel: str, key_size: int, value_size: int, dtype: torch.dtype) -> Tile:
    """The tile of a kernel for inputs of which `dtype` is the widest type."""
    t = CARRY[_padded(key_size)] if kernel == "carry" else TILES[dtype].get(kernel, TILES[dtype][""])
    return replace(t, keys=min(_padded(key_size), t.keys), values=min(_padded(value_size), t.values))


@dataclass(frozen=True)
class Chunks:
    """What kernels are told of the whole: sizes, `upto` [B, H, N, C, 1 or K] and `segment` [B, N, C], the number of documents
    that started in the chunk so far; None without decays, or with one document."""

    batch: int
    length: int
    heads: int
    device: torch.device
    upto: Tensor | None = None
    segment: Tensor | None = None

    @classmethod
    def of(cls, decay: Tensor | None, starts: Tensor | None, like: Tensor) -> Chunks:
        """like [B, T, H, ..], with all heads."""
        batch, length, heads = like.shape[:3]
        bare = cls(batch, length, heads, like.device)
        upto = segment = None
        if decay is not None:
            each = decay if decay.dim() == 4 else decay[..., None]
            size = each.shape[3]
            upto = bare.empty(CHUNK, size)
            t = Tile(min(triton.next_power_of_2(size), 32), 0, 4, "ieee")
            programs = bare.programs * triton.cdiv(size, t.keys)
            bare.launch(gates_kernel, programs, t, {"decay": each}, {"upto": upto}, {"K": size, "BK": t.keys})
        if starts is not None:
            marks = pad(starts.to(torch.int32), (0, bare.chunks * CHUNK - bare.length))
            segment = marks.view(bare.batch, bare.chunks, CHUNK).cumsum(-1, dtype=torch.int32)
        return replace(bare, upto=upto, segment=segment)

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.length, CHUNK)

    @property
    def programs(self) -> int:
        return self.batch * self.heads * self.chunks

    @property
    def gate(self) -> int:
        return (NONE if self.upto is None else SCALAR if self.upto.shape[-1] == 1 else VECTOR).value

    def empty(self, *sizes: int) -> Tensor:
        """[B, H, N, *sizes]"""
        return torch.empty(self.batch, self.heads, self.chunks, *sizes, dtype=torch.float32, device=self.device)

    def state(self, *sizes: int) -> Tensor:
        """[B, H, *sizes]"""
        return torch.empty(self.batch, self.heads, *sizes, dtype=torch.float32, device=self.device)

    def gradient(self, like: Tensor) -> Tensor:
        """[B, T, H, ..]: of every head of v, to be summed by `_shared` where heads share `like`."""
        dtype = like.dtype if like.shape[2] == self.heads else torch.float32
        return torch.empty(self.batch, self.length, self.heads, *like.shape[3:], dtype=dtype, device=self.device)

    def launch(
        self, kernel: Any, programs: int, t: Tile, inputs: dict[str, Tensor], others: dict[str, Tensor | None],
        constants: dict[str, Any], scale: float | None = None,
    ) -> None:  # fmt: skip
        """inputs: [B, T, H or a divisor of it, D] with any strides, others: contiguous. Strides go by an input's first letter."""
        numbers: dict[str, Any] = {"heads": self.heads, "chunks": self.chunks, "length": self.length}
        if scale is not None:
            numbers["scale"] = float(scale)
        inputs = {n: x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for n, x in inputs.items()}
        for n, x in inputs.items():
            numbers |= {f"stride_{n[0]}_batch": x.stride(0), f"stride_{n[0]}": x.stride(1), f"stride_{n[0]}_head": x.stride(2)}
            numbers[f"group_{n[0]}"] = self.heads // x.shape[2]
        held = {n: x if x is None else x.contiguous() for n, x in others.items()}
        Launch(kernel, programs, {**inputs, **held, **numbers}, constants, t.warps, t.stages)()

    def constants(self, kernel: str, key_size: int, value_size: int, *inputs: Tensor) -> tuple[Tile, dict[str, Any]]:
        """Raises ValueError for inputs that the kernels do not take."""
        dtypes = {x.dtype for x in inputs}
        if max(key_size, value_size) > MAX_HEAD_SIZE or not dtypes <= TILES.keys():
            given = ", ".join(f"{list(x.shape)} {x.dtype}" for x in inputs)
            raise ValueError(f"a head has at most {MAX_HEAD_SIZE} values of float32, float16 or bfloat16; got {given}")
        t = tile(kernel, key_size, value_size, next(dtype for dtype in TILES if dtype in dtypes))
        sizes = {"K": key_size, "V": value_size, "BK": t.keys, "BV": t.values, "PRECISION": t.product}
        return t, {**sizes, "GATE": self.gate, "STARTS": self.segment is not None}


def _shared(x: Tensor, like: Tensor) -> Tensor:
    """x [B, T, H, ..] summed over the heads that share one of `like`, in its type."""
    if x.shape == like.shape:
        return x
    return x.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)


def _tokens(x: Tensor) -> Tensor:
    """[B, H, N, C, D] as [B, N · C, H, D], a view."""
    return x.contiguous().flatten(2, 3).transpose(1, 2)


def _read(exclusive: bool) -> int:
    return (READ_BEFORE if exclusive else READ).value


# Stages of the forward pass -----------------------------------------------------------------------


def begin(k: Tensor, v: Tensor, decay: Tensor | None, starts: Tensor | None) -> list[Tensor]:
    return _accumulated(k, v, Chunks.of(decay, starts, v), 1.0, WRITE.value, False)


def _accumulated(x: Tensor, y: Tensor, c: Chunks, scale: float, factor: int, reverse: bool) -> list[Tensor]:
    key_size, value_size = x.shape[3], y.shape[3]
    t, constants = c.constants("accumulate", key_size, value_size, x, y)
    left = key_size if c.gate == VECTOR.value else 1
    made = {
        "states": c.empty(key_size, value_size),
        "reach": c.empty(left, 1),
        "end": c.state(key_size, value_size),
        "total": c.state(left, 1),
    }
    programs = c.batch * c.heads * triton.cdiv(key_size, t.keys) * triton.cdiv(value_size, t.values)
    others = {"upto": c.upto, "segment": c.segment, **made}
    c.launch(accumulate_kernel, programs, t, {"x": x, "y": y}, others, {**constants, "FACTOR": factor, "REVERSE": reverse}, scale)
    return list(made.values())


def begin_removing(k: Tensor, v: Tensor, decay: Tensor | None, remove: Tensor, starts: Tensor | None) -> list[Tensor]:
    c, key_size, value_size = Chunks.of(decay, starts, v), k.shape[3], v.shape[3]
    t, constants = c.constants("solve", key_size, value_size, k, v, remove)
    made = {
        "read": c.empty(CHUNK, key_size),
        "values": c.empty(CHUNK, value_size),
        "write": c.empty(CHUNK, key_size),
        "through": c.empty(key_size if c.gate == VECTOR.value else 1, 1),
    }
    others = {"upto": c.upto, "segment": c.segment, **made}
    c.launch(solve_kernel, c.programs, t, {"k": k, "v": v, "remove": remove}, others, constants)
    return list(made.values())


def carry(read: Tensor, values: Tensor, write: Tensor, through: Tensor, found: Tensor) -> list[Tensor]:
    states = read.new_empty(*through.shape[:3], *found.shape[-2:])
    u, last = values.new_empty(values.shape), found.new_empty(found.shape)
    _carried(read, values, write, through, found, states, u, last)
    return [states, u, last]


def _carried(
    read: Tensor, values: Tensor | None, write: Tensor, through: Tensor, found: Tensor | None,
    states: Tensor | None, u: Tensor | None, last: Tensor,
) -> None:  # fmt: skip
    flags = {"VALUES": values is not None, "FOUND": found is not None, "KEEP": states is not None}
    arguments = {"read": read, "values": values, "write": write, "through": through, "found": found}
    _run_carry(carry_kernel, arguments, {"states": states, "u": u, "last": last}, last, flags)


def _run_carry(
    kernel: Any, inputs: dict[str, Tensor | None], made: dict[str, Tensor | None], state: Tensor, flags: dict[str, bool]
) -> None:
    batch, heads, key_size, value_size = state.shape
    through = inputs["through"]
    assert through is not None
    t = tile("carry", key_size, value_size, torch.float32)
    sizes = {"K": key_size, "V": value_size, "PK": t.keys, "BV": t.values}
    sizes |= {"LEFT": through.shape[3], "HALVES": t.keys < key_size, "PRECISION": t.product}
    held = {n: x if x is None else x.contiguous() for n, x in inputs.items()}
    programs = batch * heads * triton.cdiv(value_size, t.values)
    Launch(kernel, programs, {**held, **made, "chunks": through.shape[2]}, {**sizes, **flags}, t.warps, t.stages)()


def inside(
    q: Tensor, k: Tensor, decay: Tensor | None, starts: Tensor | None, heads: int, scale: float, exclusive: bool
) -> Tensor:
    c = Chunks.of(decay, starts, q[:, :, :1].expand(-1, -1, heads, -1))
    t, constants = c.constants("inside", q.shape[3], q.shape[3], q, k)
    weights = c.empty(CHUNK, CHUNK)
    others = {"upto": c.upto, "segment": c.segment, "weights": weights}
    constants = {n: x for n, x in constants.items() if n not in ("V", "BV")} | {"EXCLUSIVE": exclusive}
    c.launch(inside_kernel, c.programs, t, {"q": q, "k": k}, others, constants, scale)
    return weights


def finish(
    q: Tensor, v: Tensor, decay: Tensor | None, starts: Tensor | None, weights: Tensor, u: Tensor | None, states: Tensor,
    scale: float, exclusive: bool,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    _rows(q, v if u is None else _tokens(u), weights, states, Chunks.of(decay, starts, v), out, scale, _read(exclusive))
    return out


def _rows(
    x: Tensor, y: Tensor, weights: Tensor | None, states: Tensor, c: Chunks, out: Tensor, scale: float, factor: int
) -> None:
    t, constants = c.constants("rows", x.shape[3], out.shape[3], x, out)
    programs = c.programs * triton.cdiv(out.shape[3], t.values)
    others = {"weights": weights, "states": states, "upto": c.upto, "segment": c.segment}
    constants |= {"FACTOR": factor, "WEIGHTS": weights is not None}
    c.launch(rows_kernel, programs, t, {"x": x, "y": y, "out": out}, others, constants, scale)


# Stages of the backward pass ----------------------------------------------------------------------


def begin_back(
    q: Tensor, decay: Tensor | None, starts: Tensor | None, grad: Tensor, scale: float, exclusive: bool
) -> list[Tensor]:
    return _accumulated(q, grad, Chunks.of(decay, starts, grad), scale, _read(exclusive), True)


def begin_removing_back(
    q: Tensor, decay: Tensor | None, starts: Tensor | None, grad: Tensor, weights: Tensor, scale: float, exclusive: bool
) -> list[Tensor]:
    c, key_size, value_size = Chunks.of(decay, starts, grad), q.shape[3], grad.shape[3]
    t, constants = c.constants("asked", key_size, value_size, q, grad)
    asked, du = c.empty(key_size, value_size), c.empty(CHUNK, value_size)
    programs = c.programs * triton.cdiv(key_size, t.keys) * triton.cdiv(value_size, t.values)
    others = {"weights": weights, "upto": c.upto, "segment": c.segment, "asked": asked, "du": du}
    c.launch(asked_kernel, programs, t, {"q": q, "grad": grad}, others, {**constants, "FACTOR": _read(exclusive)}, scale)
    return [asked, du]


def carry_back(read: Tensor, write: Tensor, through: Tensor, asked: Tensor, du: Tensor, found: Tensor) -> list[Tensor]:
    made = {"leaving": asked.new_empty(asked.shape), "du_out": du.new_empty(du.shape), "first": found.new_empty(found.shape)}
    inputs = {"read": read, "write": write, "through": through, "asked": asked, "du": du, "found": found}
    _run_carry(carry_back_kernel, inputs, made, found, {})
    return list(made.values())


def inside_back(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, starts: Tensor | None, grad: Tensor,
    weights: Tensor, u: Tensor | None, states: Tensor, scale: float, exclusive: bool,
) -> list[Tensor]:  # fmt: skip
    c, key_size, value_size = Chunks.of(decay, starts, v), q.shape[3], v.shape[3]
    t, constants = c.constants("inside_back", key_size, value_size, q, k, v, grad)
    made = {"dread": c.empty(CHUNK, key_size), "dwrite": c.empty(CHUNK, key_size)}
    if u is None:
        made["du"] = c.empty(CHUNK, value_size)
    inputs = {"q": q, "k": k, "y": v if u is None else _tokens(u), "grad": grad}
    others = {"weights": weights, "states": states, "upto": c.upto, "segment": c.segment, "du": None, **made}
    constants |= {"FACTOR": _read(exclusive), "DU": u is None}
    c.launch(inside_back_kernel, c.programs, t, inputs, others, constants, scale)
    return list(made.values())


def finish_back(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, remove: Tensor | None, starts: Tensor | None,
    dread: Tensor, dwrite: Tensor, du: Tensor, u: Tensor | None, states: Tensor, end: Tensor, leaving: Tensor,
    scale: float, exclusive: bool,
) -> list[Tensor]:  # fmt: skip
    c, key_size, value_size = Chunks.of(decay, starts, v), q.shape[3], v.shape[3]
    y, dv, dl = v if u is None else _tokens(u), c.gradient(v), None
    gates = {"upto": c.upto, "segment": c.segment}
    if remove is None:
        _rows(k, _tokens(du), None, leaving, c, dv, 1.0, WRITE.value)
    else:
        t, constants = c.constants("solve", key_size, value_size, k, v, remove)
        dl = c.empty(CHUNK, CHUNK)
        others = {**gates, "du": du, "dv": dv, "dl": dl}
        c.launch(unsolve_kernel, c.programs, t, {"k": k, "remove": remove, "y": y}, others, constants)
    t, constants = c.constants("finish_back", key_size, value_size, *(x for x in (q, k, v, remove) if x is not None))
    constants |= {"EXCLUSIVE": exclusive, "REMOVE": remove is not None}
    inputs = {"q": q, "k": k, "remove": k if remove is None else remove, "y": y}
    made = {"dq": c.gradient(q), "dk": c.gradient(k)}
    made |= {f"d{n}": None if x is None else c.gradient(x) for n, x in (("decay", decay), ("remove", remove))}
    others = {
        "dv": dv,
        "dl": dl,
        "dread": dread,
        "dwrite": dwrite,
        "states": states,
        "end": end,
        "leaving": leaving,
        **gates,
        **made,
    }
    c.launch(finish_back_kernel, c.programs, t, inputs, others, constants, scale)
    given = (("q", q), ("k", k), ("decay", decay), ("remove", remove))
    dq, dk, *rest = (_shared(made[f"d{n}"], x) for n, x in given if x is not None)
    return [dq, dk, dv, *rest]


def summary(read: Tensor, values: Tensor, write: Tensor, through: Tensor) -> list[Tensor]:
    (batch, heads), width = read.shape[:2], read.shape[4]
    matrix, end = (read.new_empty(batch, heads, width, n) for n in (width, values.shape[4]))
    eye = torch.eye(width, dtype=read.dtype, device=read.device).expand(batch, heads, width, width)
    _carried(read, values, write, through, None, None, None, end)
    _carried(read, None, write, through, eye, None, None, matrix)
    return [matrix, end]
