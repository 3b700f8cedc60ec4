"""One block of softmax attention on a GPU, forward and backward, as Triton kernels; and the merge of two blocks.

A block is some rows (queries) against some columns (keys and values). Each block gives a normalised result and its
log-sum-exp; `merge_` joins results over different columns, and `backward` takes the log-sum-exp over all columns and
gives this block's part of the gradients. That is what a ring over columns needs.

FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2, with three differences: the backward pass is one kernel for dq and
one for dk, dv, so that no sum depends on the order in which programs run; key/value heads are never repeated in memory,
dk and dv are summed over a group's query heads inside the kernel; head sizes are padded to powers of two in registers only.

Shapes: B batch, H query heads, H_kv key/value heads (H = group · H_kv), R rows, C columns, D size of a query and key
head, D_v of a value head. Base-2 exponentials inside: a logit times log2(e).

Under TRITON_INTERPRET=1, set before triton is first imported, the same kernels run on CPU tensors, slowly.
"""

# A kernel's arguments are pointers and traced values, for which triton has no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-2.3586e38)  # times log2(e), the smallest finite float32
# numpy has no bfloat16 and the interpreter multiplies bit patterns: there, operands of a product are float32 (exact).
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
NO_MASK, BOOL_MASK, ADDED_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class Score:
    """How the logit of row i and column j is made: scale · q_i·k_j, soft-capped, and visible or not.

    softcap: 0 is none, otherwise softcap · tanh(logit / softcap). causal: row i sees column j iff j <= i + causal, so
    causal is (position of row 0) - (position of column 0); None: all columns. window: of those, only j > i + causal - window.
    """

    scale: float
    softcap: float = 0.0
    causal: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.causal is None:
            raise ValueError("a window counts back from the row's own position: give `causal` as well")


@dataclass(frozen=True)
class Tile:
    """Rows and columns that a program holds at a time, warps of a program, stages of the loads' pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


# Which tile, by kernel and head size (the larger of D and D_v, padded): the largest that neither spills registers nor needs
# more than the 227 KiB of shared memory that a program may have on an H100 or H200 (sm_90). `tests/test_flash_triton.py`
# compiles them and looks. The second of a pair is for masks given as tensors, whose tile is held as well. A warp group of
# four warps multiplies 64 rows (columns in "keys") at a time: with fewer than 128, half of eight warps repeat the others.
TILES = {
    "forward": {
        16: (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3)),
        32: (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3)),
        64: (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3)),
        128: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3)),
        256: (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    },
    "queries": {
        16: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        32: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
        128: (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
        256: (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2)),
    },
    "keys": {
        16: (Tile(64, 128, 8, 3), Tile(64, 128, 8, 2)),
        32: (Tile(64, 128, 8, 3), Tile(64, 128, 8, 2)),
        64: (Tile(64, 128, 8, 3), Tile(32, 128, 8, 2)),
        128: (Tile(32, 128, 8, 3), Tile(32, 128, 8, 2)),
        256: (Tile(32, 128, 8, 2), Tile(16, 128, 8, 2)),
    },
}
# float32 products are not for tensor cores: they read whole operands into registers, so that these are small.
FLOAT32_TILES = {
    16: Tile(32, 32, 4, 1),
    32: Tile(32, 32, 4, 1),
    64: Tile(32, 16, 4, 1),
    128: Tile(16, 16, 4, 1),
    256: Tile(16, 16, 4, 1),
}
# dk and dv in one pass over the rows, or one after the other where registers do not hold 128 columns of both: five products
# instead of four, which is better than 64 columns on eight warps (each product twice) or than spilling.
TOGETHER, APART = ("kv",), ("k", "v")
KEYS_PASSES = {16: TOGETHER, 32: TOGETHER, 64: TOGETHER, 128: TOGETHER, 256: APART}
MERGE_ELEMENTS = 4096  # values of the result that one program of the merge holds; 32 in each of 128 threads


# Pieces of all kernels ----------------------------------------------------------------------------


@triton.jit
def _load(base, start, count, stride, T: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, EDGE: tl.constexpr):
    """[T, PAD]: rows start .. start + T of a matrix [count, D] whose rows are `stride` apart, and 0 outside it."""
    row = tl.arange(0, T)[:, None]
    column = tl.arange(0, PAD)[None, :]
    # Only the offset of the tile can need 64 bits: offsets within it are below 2^31.
    at = base + tl.cast(start, tl.int64) * stride + row * stride + column
    if EDGE:
        return tl.load(at, mask=(row < count - start) & (column < D), other=0.0)
    elif D < PAD:
        return tl.load(at, mask=column < D, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _store(base, start, count, value, T: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """The rows of `value` [T, PAD] as rows start .. start + T of a contiguous matrix [count, D]."""
    row = tl.arange(0, T)[:, None]
    column = tl.arange(0, PAD)[None, :]
    at = base + tl.cast(start, tl.int64) * D + row * D + column
    tl.store(at, value, mask=(row < count - start) & (column < D))


@triton.jit
def _tiles(first, last, T: tl.constexpr):
    """How many tiles of T cover [first, last). Loops count from 0 and not from `first`: ptxas (CUDA 12.8) does not see that
    several of the other kind, one after the other, leave their products' sums alone, and then waits after every product."""
    return tl.cdiv(tl.maximum(last - first, 0), T)


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _product(a, b):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _narrow(x, like):
    """x in the dtype of `like`, rounded to nearest: the interpreter cuts a bfloat16's last bits off, so that it gets none."""
    if INTERPRETED and like.dtype == tl.bfloat16:
        spread = x * 65537.0  # 2^16 + 1: what is left of x has 8 significant bits (Dekker's splitting)
        x = spread - (spread - x)
    return x.to(like.dtype)


@triton.jit
def _tanh(x):
    """tanh, of which triton has none without an external library; 1 and -1 where the exponential is infinite or 0."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def _mask_tile(mask, row, stride_row, column, stride_column, i, j, inside, MASK: tl.constexpr):
    """The mask's values at rows `row + i` and columns `column + j`; not read where not `inside`."""
    base = mask + tl.cast(row, tl.int64) * stride_row + tl.cast(column, tl.int64) * stride_column
    return tl.load(base + i * stride_row + j * stride_column, mask=inside, other=0)


@triton.jit
def _add(logit, values):
    """An added mask in base 2. A finite value stays finite: a row of float32's lowest is even, not empty, as in eager torch."""
    values = values.to(tl.float32)
    return logit + tl.where(values == float("-inf"), values, tl.maximum(values, LOWEST) * LOG2E)


@triton.jit
def _visible(row, column, rows, columns, causal, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which pairs exist and are seen, for indices of any two shapes that broadcast."""
    seen = (row < rows) & (column < columns)
    if CAUSAL:
        seen = seen & (column <= row + causal)
    if WINDOW:
        seen = seen & (column > row + causal - window)
    return seen


@triton.jit
def _column_range(row, columns, causal, window, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Columns that rows row .. row + M see, in tiles of N: outside [first, last) none, in [inner, edge) all of them."""
    first, last, full_first, full_last = 0, columns, 0, columns
    if CAUSAL:
        last = tl.minimum(columns, tl.maximum(row + M + causal, 0))
        full_last = tl.minimum(columns, tl.maximum(row + causal + 1, 0))
    if WINDOW:
        first = tl.maximum(row + causal - window + 1, 0) // N * N
        full_first = tl.maximum(row + M + causal - window, 0)
    inner = tl.minimum((full_first + N - 1) // N * N, last)
    edge = tl.maximum(full_last // N * N, inner)
    return first, inner, edge, last


@triton.jit
def _row_range(column, rows, causal, window, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Rows that see columns column .. column + N, in tiles of M: outside [first, last) none, in [inner, edge) all of them."""
    first, last, full_first, full_last = 0, rows, 0, rows
    if CAUSAL:
        first = tl.maximum(column - causal, 0) // M * M
        full_first = tl.maximum(column + N - 1 - causal, 0)
    if WINDOW:
        last = tl.minimum(rows, tl.maximum(column + N - 1 - causal + window, 0))
        full_last = tl.minimum(rows, tl.maximum(column - causal + window, 0))
    inner = tl.minimum((full_first + M - 1) // M * M, last)
    edge = tl.maximum(full_last // M * M, inner)
    return first, inner, edge, last


# Forward ------------------------------------------------------------------------------------------


@triton.jit
def _forward_columns(
    acc, top, total, q, k, v, mask, first, last, row,
    stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
    D: tl.constexpr, D_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """acc [M, PAD_V] (not normalised), top [M] (largest logit) and total [M], with columns first .. last added to them."""
    i = tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    for step in range(0, _tiles(first, last, N)):
        start = first + step * N
        keys = _load(k, start, columns, stride_k, N, D, PAD, EDGE)
        s = _product(q, tl.trans(keys))
        if EDGE or SOFTCAP:
            if SOFTCAP:
                s = _tanh(s * (scale / softcap)) * (softcap * LOG2E)
            else:
                s = s * (scale * LOG2E)
            if EDGE:
                seen = _visible(row + i, start + j, rows, columns, causal, window, CAUSAL, WINDOW)
                if MASK == BOOL_MASK:
                    seen = seen & (_mask_tile(mask, row, stride_mask_row, start, stride_mask_column, i, j, seen, MASK) != 0)
                if MASK == ADDED_MASK:
                    s = _add(s, _mask_tile(mask, row, stride_mask_row, start, stride_mask_column, i, j, seen, MASK))
                s = tl.where(seen, s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            # Of a row that has seen nothing the largest logit is -inf, and -inf - -inf is no number.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(s - base[:, None])
        else:  # scale >= 0: the largest of the scaled is the scaled largest, and scaling is one fused multiply-add
            new_top = tl.maximum(top, tl.max(s, 1) * (scale * LOG2E))
            base = new_top
            p = tl.exp2(s * (scale * LOG2E) - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        values = _load(v, start, columns, stride_v, N, D_V, PAD_V, EDGE)
        acc = _dot(_narrow(p, values), values, acc)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["rows", "columns", "heads", "group", "causal", "window"])
def forward_kernel(
    q, k, v, mask, sinks, out, lse,
    stride_q_batch, stride_q_head, stride_q, stride_k_batch, stride_k_head, stride_k, stride_v_batch, stride_v_head, stride_v,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column,
    heads, group, rows, columns, scale, softcap, causal, window,
    D: tl.constexpr, D_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program: M rows of one head. Programs with more columns, under a causal mask the last rows, start first."""
    tiles = tl.cdiv(rows, M)
    row = (tiles - 1 - tl.program_id(0) % tiles) * M
    which = tl.program_id(0) // tiles
    batch = tl.cast(which // heads, tl.int64)
    head = tl.cast(which % heads, tl.int64)
    q += batch * stride_q_batch + head * stride_q_head
    k += batch * stride_k_batch + head // group * stride_k_head
    v += batch * stride_v_batch + head // group * stride_v_head
    if MASK != NO_MASK:
        mask += batch * stride_mask_batch + head * stride_mask_head
    out += tl.cast(which, tl.int64) * rows * D_V
    lse += tl.cast(which, tl.int64) * rows

    queries = _load(q, row, rows, stride_q, M, D, PAD, True)
    acc = tl.zeros([M, PAD_V], tl.float32)
    if SINKS:
        top = tl.zeros([M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
    first, inner, edge, last = _column_range(row, columns, causal, window, M, N, CAUSAL, WINDOW)
    if MASK != NO_MASK:
        acc, top, total = _forward_columns(
            acc, top, total, queries, k, v, mask, first, last, row,
            stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, True,
        )  # fmt: skip
    else:
        if WINDOW:
            acc, top, total = _forward_columns(
                acc, top, total, queries, k, v, mask, first, inner, row,
                stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
                D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, True,
            )  # fmt: skip
        acc, top, total = _forward_columns(
            acc, top, total, queries, k, v, mask, inner, edge, row,
            stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, False,
        )  # fmt: skip
        acc, top, total = _forward_columns(
            acc, top, total, queries, k, v, mask, edge, last, row,
            stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, True,
        )  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    _store(out, row, rows, acc / total[:, None], M, D_V, PAD_V)
    i = row + tl.arange(0, M)
    tl.store(lse + i, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2), mask=i < rows)


# Backward -----------------------------------------------------------------------------------------


@triton.jit
def _level(lse, delta, start, rows, M: tl.constexpr):
    """Log-sum-exp in base 2, and delta, of M rows. A row that sees nothing has an infinite one: its weights are exp2(-inf)."""
    i = start + tl.arange(0, M)
    level = tl.load(lse + i, mask=i < rows, other=float("-inf"))
    level = tl.where(level == float("-inf"), float("inf"), tl.maximum(level, LOWEST) * LOG2E)
    return level, tl.load(delta + i, mask=i < rows, other=0.0)


@triton.jit
def _weights(
    s, level, mask, row, column, i, j, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The weights of a tile and the derivative of its logits by scale · q·k, from s = q·k; i and j index the tile."""
    slope = s  # without a cap it is 1, and not used
    if SOFTCAP:
        capped = _tanh(s * (scale / softcap))
        slope = 1.0 - capped * capped
        s = capped * (softcap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    if EDGE:
        seen = _visible(row + i, column + j, rows, columns, causal, window, CAUSAL, WINDOW)
        if MASK == BOOL_MASK:
            seen = seen & (_mask_tile(mask, row, stride_mask_row, column, stride_mask_column, i, j, seen, MASK) != 0)
        if MASK == ADDED_MASK:
            s = _add(s, _mask_tile(mask, row, stride_mask_row, column, stride_mask_column, i, j, seen, MASK))
        s = tl.where(seen, s, float("-inf"))
    return tl.exp2(s - level), slope


@triton.jit
def _queries_columns(
    acc, q, grad, level, delta, k, v, mask, first, last, row,
    stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
    D: tl.constexpr, D_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """acc [M, PAD], the gradient of the rows before scaling, with columns first .. last added to it."""
    i = tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    for step in range(0, _tiles(first, last, N)):
        start = first + step * N
        keys = _load(k, start, columns, stride_k, N, D, PAD, EDGE)
        values = _load(v, start, columns, stride_v, N, D_V, PAD_V, EDGE)
        p, slope = _weights(
            _product(q, tl.trans(keys)), level[:, None], mask, row, start, i, j, stride_mask_row, stride_mask_column,
            rows, columns, scale, softcap, causal, window, CAUSAL, WINDOW, SOFTCAP, MASK, EDGE,
        )  # fmt: skip
        ds = p * (_product(grad, tl.trans(values)) - delta[:, None])
        if SOFTCAP:
            ds = ds * slope
        acc = _dot(_narrow(ds, keys), keys, acc)
    return acc


@triton.jit(do_not_specialize=["rows", "columns", "heads", "group", "causal", "window"])
def queries_kernel(
    grad, q, k, v, lse, delta, mask, dq,
    stride_g_batch, stride_g_head, stride_g,
    stride_q_batch, stride_q_head, stride_q, stride_k_batch, stride_k_head, stride_k, stride_v_batch, stride_v_head, stride_v,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column,
    heads, group, rows, columns, scale, softcap, causal, window,
    D: tl.constexpr, D_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """dq of M rows of one head."""
    tiles = tl.cdiv(rows, M)
    row = (tiles - 1 - tl.program_id(0) % tiles) * M
    which = tl.program_id(0) // tiles
    batch = tl.cast(which // heads, tl.int64)
    head = tl.cast(which % heads, tl.int64)
    grad += batch * stride_g_batch + head * stride_g_head
    q += batch * stride_q_batch + head * stride_q_head
    k += batch * stride_k_batch + head // group * stride_k_head
    v += batch * stride_v_batch + head // group * stride_v_head
    if MASK != NO_MASK:
        mask += batch * stride_mask_batch + head * stride_mask_head
    dq += tl.cast(which, tl.int64) * rows * D
    lse += tl.cast(which, tl.int64) * rows
    delta += tl.cast(which, tl.int64) * rows

    queries = _load(q, row, rows, stride_q, M, D, PAD, True)
    upstream = _load(grad, row, rows, stride_g, M, D_V, PAD_V, True)
    level, drop = _level(lse, delta, row, rows, M)
    acc = tl.zeros([M, PAD], tl.float32)
    first, inner, edge, last = _column_range(row, columns, causal, window, M, N, CAUSAL, WINDOW)
    if MASK != NO_MASK:
        acc = _queries_columns(
            acc, queries, upstream, level, drop, k, v, mask, first, last, row,
            stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, True,
        )  # fmt: skip
    else:
        if WINDOW:
            acc = _queries_columns(
                acc, queries, upstream, level, drop, k, v, mask, first, inner, row,
                stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
                D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, True,
            )  # fmt: skip
        acc = _queries_columns(
            acc, queries, upstream, level, drop, k, v, mask, inner, edge, row,
            stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, False,
        )  # fmt: skip
        acc = _queries_columns(
            acc, queries, upstream, level, drop, k, v, mask, edge, last, row,
            stride_k, stride_v, stride_mask_row, stride_mask_column, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, True,
        )  # fmt: skip
    _store(dq, row, rows, acc * scale, M, D, PAD)


@triton.jit
def _keys_rows(
    acc_k, acc_v, k, v, q, grad, lse, delta, mask, first, last, column,
    stride_q_head, stride_q, stride_g_head, stride_g, stride_mask_head, stride_mask_row, stride_mask_column,
    group, rows, columns, scale, softcap, causal, window,
    D: tl.constexpr, D_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """acc_k [N, PAD] (before scaling) and acc_v [N, PAD_V], with rows first .. last of all heads of a group added to them.

    One loop over heads and rows: what a loop inside a loop keeps for its next round costs some forty registers.
    """
    i = tl.arange(0, M)[None, :]
    j = tl.arange(0, N)[:, None]
    tiles = _tiles(first, last, M)
    for step in range(0, group * tiles):
        head = tl.cast(step // tiles, tl.int64)
        start = first + step % tiles * M
        queries = _load(q + head * stride_q_head, start, rows, stride_q, M, D, PAD, EDGE)
        upstream = _load(grad + head * stride_g_head, start, rows, stride_g, M, D_V, PAD_V, EDGE)
        level, drop = _level(lse + head * rows, delta + head * rows, start, rows, M)
        if MASK != NO_MASK:
            of_head = mask + head * stride_mask_head
        else:
            of_head = mask
        p, slope = _weights(  # all of it transposed, [N, M]
            _product(k, tl.trans(queries)), level[None, :], of_head, start, column, i, j, stride_mask_row, stride_mask_column,
            rows, columns, scale, softcap, causal, window, CAUSAL, WINDOW, SOFTCAP, MASK, EDGE,
        )  # fmt: skip
        if DV:
            acc_v = _dot(_narrow(p, upstream), upstream, acc_v)
        if DK:
            ds = p * (_product(v, tl.trans(upstream)) - drop[None, :])
            if SOFTCAP:
                ds = ds * slope
            acc_k = _dot(_narrow(ds, queries), queries, acc_k)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["rows", "columns", "heads", "group", "causal", "window"])
def keys_kernel(
    grad, q, k, v, lse, delta, mask, dk, dv,
    stride_g_batch, stride_g_head, stride_g,
    stride_q_batch, stride_q_head, stride_q, stride_k_batch, stride_k_head, stride_k, stride_v_batch, stride_v_head, stride_v,
    stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column,
    heads, group, rows, columns, scale, softcap, causal, window,
    D: tl.constexpr, D_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dk, dv or both of N columns of one key/value head, over all query heads of its group."""
    tiles = tl.cdiv(columns, N)
    column = tl.program_id(0) % tiles * N
    which = tl.program_id(0) // tiles
    batch = tl.cast(which // (heads // group), tl.int64)
    head = tl.cast(which % (heads // group), tl.int64)
    grad += batch * stride_g_batch + head * group * stride_g_head
    q += batch * stride_q_batch + head * group * stride_q_head
    k += batch * stride_k_batch + head * stride_k_head
    v += batch * stride_v_batch + head * stride_v_head
    if MASK != NO_MASK:
        mask += batch * stride_mask_batch + head * group * stride_mask_head
    lse += tl.cast(which, tl.int64) * group * rows
    delta += tl.cast(which, tl.int64) * group * rows

    keys = _load(k, column, columns, stride_k, N, D, PAD, True)
    values = _load(v, column, columns, stride_v, N, D_V, PAD_V, True)
    acc_k = tl.zeros([N if DK else 1, PAD], tl.float32)
    acc_v = tl.zeros([N if DV else 1, PAD_V], tl.float32)
    first, inner, edge, last = _row_range(column, rows, causal, window, M, N, CAUSAL, WINDOW)
    if MASK != NO_MASK:
        acc_k, acc_v = _keys_rows(
            acc_k, acc_v, keys, values, q, grad, lse, delta, mask, first, last, column,
            stride_q_head, stride_q, stride_g_head, stride_g, stride_mask_head, stride_mask_row, stride_mask_column,
            group, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, DK, DV, True,
        )  # fmt: skip
    else:
        if CAUSAL:
            acc_k, acc_v = _keys_rows(
                acc_k, acc_v, keys, values, q, grad, lse, delta, mask, first, inner, column,
                stride_q_head, stride_q, stride_g_head, stride_g, stride_mask_head, stride_mask_row, stride_mask_column,
                group, rows, columns, scale, softcap, causal, window,
                D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, DK, DV, True,
            )  # fmt: skip
        acc_k, acc_v = _keys_rows(
            acc_k, acc_v, keys, values, q, grad, lse, delta, mask, inner, edge, column,
            stride_q_head, stride_q, stride_g_head, stride_g, stride_mask_head, stride_mask_row, stride_mask_column,
            group, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, DK, DV, False,
        )  # fmt: skip
        acc_k, acc_v = _keys_rows(
            acc_k, acc_v, keys, values, q, grad, lse, delta, mask, edge, last, column,
            stride_q_head, stride_q, stride_g_head, stride_g, stride_mask_head, stride_mask_row, stride_mask_column,
            group, rows, columns, scale, softcap, causal, window,
            D, D_V, PAD, PAD_V, M, N, CAUSAL, WINDOW, SOFTCAP, MASK, DK, DV, True,
        )  # fmt: skip
    if DK:
        _store(dk + tl.cast(which, tl.int64) * columns * D, column, columns, acc_k * scale, N, D, PAD)
    if DV:
        _store(dv + tl.cast(which, tl.int64) * columns * D_V, column, columns, acc_v, N, D_V, PAD_V)


# Merge --------------------------------------------------------------------------------------------


@triton.jit
def _rescale(x, weight):
    """weight · x, and 0 without looking at x where the weight is 0."""
    return tl.where(weight[:, None] == 0.0, 0.0, x * weight[:, None])


@triton.jit(do_not_specialize=["heads", "rows"])
def merge_kernel(
    out, lse, other, other_lse,
    stride_out_batch, stride_out_head, stride_out, stride_lse_batch, stride_lse_head, stride_lse,
    stride_other_batch, stride_other_head, stride_other, stride_other_lse_batch, stride_other_lse_head, stride_other_lse,
    heads, rows, D: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """M rows of one head; every value is read and written by one program only, so that this may be in place."""
    tiles = tl.cdiv(rows, M)
    row = tl.program_id(0) % tiles * M
    which = tl.program_id(0) // tiles
    batch = tl.cast(which // heads, tl.int64)
    head = tl.cast(which % heads, tl.int64)
    i = tl.arange(0, M)
    here = i < rows - row
    start = tl.cast(row, tl.int64)
    lse += batch * stride_lse_batch + head * stride_lse_head + start * stride_lse + i * stride_lse
    other_lse += batch * stride_other_lse_batch + head * stride_other_lse_head + start * stride_other_lse + i * stride_other_lse
    a = tl.load(lse, mask=here, other=float("-inf"))
    b = tl.load(other_lse, mask=here, other=float("-inf"))
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp2((a - base) * LOG2E)
    weight_b = tl.exp2((b - base) * LOG2E)
    total = weight_a + weight_b
    share = tl.where(total == 0.0, 1.0, total)
    tl.store(lse, tl.where(total == 0.0, float("-inf"), base + tl.log2(share) * LN2), mask=here)

    d = tl.arange(0, PAD)[None, :]
    inside = here[:, None] & (d < D)
    out += batch * stride_out_batch + head * stride_out_head + start * stride_out + i[:, None] * stride_out + d
    other += batch * stride_other_batch + head * stride_other_head + start * stride_other + i[:, None] * stride_other + d
    mine = _rescale(tl.load(out, mask=inside, other=0.0), weight_a / share)
    theirs = _rescale(tl.load(other, mask=inside, other=0.0), weight_b / share)
    tl.store(out, mine + theirs, mask=inside)


# Launches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A kernel with all that it is called with; what is compiled for it depends on nothing else."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int

    def __call__(self) -> None:
        first = next(iter(self.arguments.values()))
        if self.programs:
            with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
                options = {"num_warps": self.warps, "num_stages": self.stages}
                self.kernel[(self.programs,)](**self.arguments, **self.constants, **options)


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # 16: the shortest sum of a tensor core's product


def _size(q: Tensor, v: Tensor) -> int:
    return _padded(max(q.shape[3], v.shape[3]))


def tile(kernel: str, q: Tensor, v: Tensor, mask: Tensor | None) -> Tile:
    return FLOAT32_TILES[_size(q, v)] if q.dtype == torch.float32 else TILES[kernel][_size(q, v)][mask is not None]


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"stride_{name}_batch": x.stride(0), f"stride_{name}_head": x.stride(1), f"stride_{name}": x.stride(2)}


def _mask_arguments(mask: Tensor | None, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    if mask is None:
        whole, strides = None, (0, 0, 0, 0)
    else:
        # As bytes: pointers to single bits have been treated differently by different versions.
        whole = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        strides = whole.expand(shape).stride()
    return {"mask": whole, **{f"stride_mask_{n}": s for n, s in zip(("batch", "head", "row", "column"), strides, strict=True)}}


def _common(q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Tensor | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants that the three attention kernels share."""
    (batch, heads, rows, size), columns, value_size = q.shape, k.shape[2], v.shape[3]
    arguments = {
        **{"q": q, "k": k, "v": v},
        **_mask_arguments(mask, (batch, heads, rows, columns)),
        **{name: s for n, x in zip("qkv", (q, k, v), strict=True) for name, s in _strides(n, x).items()},
        **{"heads": heads, "group": heads // k.shape[1], "rows": rows, "columns": columns},
        **{"scale": float(score.scale), "softcap": float(score.softcap)},
        **{"causal": score.causal or 0, "window": score.window or 0},
    }
    constants = {
        **{"D": size, "D_V": value_size, "PAD": _padded(size), "PAD_V": _padded(value_size)},
        **{"CAUSAL": score.causal is not None, "WINDOW": score.window is not None, "SOFTCAP": score.softcap != 0},
        "MASK": (NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK).value,
    }
    return arguments, constants


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Tensor | None, sinks: Tensor | None, out: Tensor, lse: Tensor
) -> Launch:
    arguments, constants = _common(q, k, v, score, mask)
    t = tile("forward", q, v, mask)
    arguments |= {"sinks": sinks, "out": out, "lse": lse}
    constants |= {"SINKS": sinks is not None, "M": t.rows, "N": t.columns}
    return Launch(
        forward_kernel, triton.cdiv(q.shape[2], t.rows) * q.shape[0] * q.shape[1], arguments, constants, t.warps, t.stages
    )


def queries_launch(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, score: Score, mask: Tensor | None, dq: Tensor
) -> Launch:
    arguments, constants = _common(q, k, v, score, mask)
    t = tile("queries", q, v, mask)
    arguments |= {"grad": grad, "lse": lse, "delta": delta, "dq": dq, **_strides("g", grad)}
    constants |= {"M": t.rows, "N": t.columns}
    return Launch(
        queries_kernel, triton.cdiv(q.shape[2], t.rows) * q.shape[0] * q.shape[1], arguments, constants, t.warps, t.stages
    )


def keys_launch(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    score: Score,
    mask: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
) -> Launch:
    arguments, constants = _common(q, k, v, score, mask)
    t = tile("keys", q, v, mask)
    arguments |= {"grad": grad, "lse": lse, "delta": delta, "dk": dk, "dv": dv, **_strides("g", grad)}
    constants |= {"DK": dk is not None, "DV": dv is not None, "M": t.rows, "N": t.columns}
    return Launch(
        keys_kernel, triton.cdiv(k.shape[2], t.columns) * k.shape[0] * k.shape[1], arguments, constants, t.warps, t.stages
    )


def merge_launch(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> Launch:
    batch, heads, rows, size = out.shape
    constants = {"D": size, "PAD": _padded(size), "M": MERGE_ELEMENTS // _padded(size)}
    arguments = {
        **{"out": out, "lse": lse, "other": out_block, "other_lse": lse_block, "heads": heads, "rows": rows},
        **_strides("out", out),
        **_strides("lse", lse),
        **_strides("other", out_block),
        **_strides("other_lse", lse_block),
    }
    return Launch(merge_kernel, triton.cdiv(rows, constants["M"]) * batch * heads, arguments, constants, 4, 1)


# What is called -----------------------------------------------------------------------------------


def _dense(x: Tensor) -> Tensor:
    """x with neighbouring values along its last dimension; the kernels take any strides of the others."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in zip("qkv", (q, k, v), strict=True))
    if (
        q.ndim != 4
        or k.ndim != 4
        or v.ndim != 4
        or q.shape[0] != k.shape[0]
        or k.shape[:3] != v.shape[:3]
        or q.shape[3] != k.shape[3]
    ):
        raise ValueError(f"expected q [B, H, R, D], k [B, H_kv, C, D], v [B, H_kv, C, D_v]; got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key/value heads; got {shapes}")
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_SIZE:
        raise ValueError(f"a head has at most {MAX_HEAD_SIZE} values; got {shapes}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must have one dtype of {DTYPES}; got {q.dtype}, {k.dtype}, {v.dtype}")
    if mask is not None and mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"a mask is boolean (True is visible) or added to the logits (floating point); got {mask.dtype}")


def forward(
    q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Tensor | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a block and its log-sum-exp.

    q: [B, H, R, D], k: [B, H_kv, C, D], v: [B, H_kv, C, D_v], of one dtype (float32, bfloat16, float16). mask:
    broadcastable to [B, H, R, C], boolean (True is visible) or added to the logits. sinks: [H], a logit more in every row
    of a head, whose value is 0. Returns out [B, H, R, D_v] and lse [B, H, R], both float32: out is normalised, lse is the
    natural logarithm of the sum of exponentials, sink included. Of a row that sees nothing out is 0 and lse -inf.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    _check(q, k, v, mask)
    q, k, v = map(_dense, (q, k, v))
    if score.scale < 0:  # the kernel takes a row's largest logit before scaling
        q, score = -q, Score(-score.scale, score.softcap, score.causal, score.window)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    forward_launch(q, k, v, score, mask, None if sinks is None else sinks.contiguous(), out, lse)()
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    score: Score,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's part of dq, dk and dv, float32, in the shapes of q, k and v.

    grad: [B, H, R, D_v], the gradient of the merged result. lse: [B, H, R], the log-sum-exp over all columns, this block's
    and others'. delta: [B, H, R], the sum over D_v of grad · merged result, less the gradient of lse where it has one. A row
    whose lse is -inf has gradient 0. The gradient of a sink is -sum(exp(sink - lse) · delta). The same on every run.

    A mask that adds large finite values to every column of a row (below about -1e7) leaves float32's lse without the
    number of columns: such a row's weights are too large here, while `forward` is right.
    """
    _check(q, k, v, mask)
    q, k, v, grad = map(_dense, (q, k, v, grad.to(q.dtype)))
    lse, delta = lse.contiguous(), delta.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    queries_launch(grad, q, k, v, lse, delta, score, mask, dq)()
    for wanted in KEYS_PASSES[_size(q, v)]:
        keys_launch(grad, q, k, v, lse, delta, score, mask, dk if "k" in wanted else None, dv if "v" in wanted else None)()
    return dq, dk, dv


def merge_(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> None:
    """`out` and `lse` become those over their own columns and the block's; rows that see nothing stay 0 and -inf.

    out, out_block: [B, H, R, D_v] float32, normalised, last dimension dense. lse, lse_block: [B, H, R] float32.
    """
    if out.stride(-1) != 1:
        raise ValueError(
            f"the result is merged in place and must be dense along its last dimension; its strides are {out.stride()}"
        )
    merge_launch(out, lse, _dense(out_block), lse_block)()
