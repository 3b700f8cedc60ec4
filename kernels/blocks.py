"""Attention whose blocks travel: `asp::block_attention` runs a `Schedule` over the ranks of a group.

A `BlockProgram` says what a block is: the model's own operators from what queries, keys and values carry to the scores.

The backward pass runs the same schedule. It communicates what it needs and nothing of the forward pass again: with the saved
output and log-sum-exp each block's gradient follows from its scores alone (FlashAttention-2, arXiv 2307.08691, §3.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import flash, random
from .layout import Intervals
from .programs import Autocast, Programs, under
from .schedule import Schedule, Tile
from .sight import Grid, Sight
from .travel import Piece, Route, Work, run

Carrier = Literal["row", "col", "whole"]  # travels with queries, travels with keys, lies whole on every rank


@dataclass(frozen=True)
class Flash:
    """scaled_dot_product_attention, whose scores need not be written out: `operands(rows, columns, *leaves)` gives (q, k, v) of a
    tile, and `masked` ((q, k, v), mask), for tiles in which the mask must be looked at: others may be too large to have one.
    direct: the leaves that q, k and v are, where they are leaves.
    """

    operands: Callable[..., Any]
    masked: Callable[..., Any]
    scale: float | None
    direct: tuple[int, ...] | None

    def of(self, tile: Tile, cut: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """((q, k, v), mask) of a tile."""
        high, wide = _span(tile)
        return self.masked(high, wide, *cut) if tile.kind == "mask" else (self.operands(high, wide, *cut), None)


@dataclass(frozen=True, eq=False)
class BlockProgram:
    """`run(rows, columns, *leaves)` gives ((scores, values), keep) of a tile.

    scores: [.., rows, columns], values: [.., columns, D_v], keep: what dropout multiplies weights with, or None.
    `row_dims[i]` and `col_dims[i]` are where leaf i carries rows and columns, `out_shape` [.., my rows, D_v] and `lse_shape`
    [.., my rows] the results. sight: what rows see. With `per_batch` it is a Grid of what they see at most, and the cells
    of each batch come with it.
    """

    run: Callable[..., Any]
    key: str
    carriers: tuple[Carrier, ...]
    row_dims: tuple[int | None, ...]
    col_dims: tuple[int | None, ...]
    differentiable: tuple[int, ...]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: torch.dtype
    route: Route
    sight: Sight
    per_batch: bool = False
    flash: Flash | None = None
    autocast: Autocast | None = None

    @functools.cached_property
    def fixed(self) -> Schedule:
        """The schedule of `sight`."""
        return self.route.schedule(self.sight)

    def schedule(self, cells: Tensor | None) -> Schedule:
        return self.fixed if cells is None else _of_batch(self, cells.numpy().tobytes())

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """Of the log-sum-exp. Where scores are spelled out it is a pair [.., my rows, 2], the maximum and the logarithm of the
        sum that remains: of a row that a finite mask hides as a whole, their sum would be the maximum alone.
        """
        return self.lse_shape if self.flash else (*self.lse_shape, 2)

    @property
    def row_of_statistics(self) -> int:
        return len(self.lse_shape) - 1

    def of(self, carrier: Carrier) -> list[int]:
        return [i for i, c in enumerate(self.carriers) if c == carrier]

    def cut(self, tile: Tile, leaves: Sequence[Tensor], rows: Piece, cols: Piece) -> list[Tensor]:
        """All leaves for one tile."""
        high, wide = _span(tile)
        travelling = {i: rows.cut(n, *tile.rows) for n, i in enumerate(self.of("row"))}
        travelling |= {i: cols.cut(n, *tile.cols) for n, i in enumerate(self.of("col"))}
        out = []
        for i, (carrier, row, col) in enumerate(zip(self.carriers, self.row_dims, self.col_dims, strict=True)):
            x = travelling.get(i, leaves[i])
            if row is not None and carrier != "row":
                x = x.narrow(row, tile.at[0], high)
            if col is not None and carrier != "col":
                x = x.narrow(col, tile.at[1], wide)
            out.append(x)
        return out


def _span(tile: Tile) -> tuple[int, int]:
    return tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]


@functools.lru_cache(maxsize=256)
def _of_batch(program: BlockProgram, cells: bytes) -> Schedule:
    grid = program.sight
    assert isinstance(grid, Grid)
    return program.route.schedule(grid.of(np.frombuffer(cells, np.int8)))


_PROGRAMS = Programs[BlockProgram]()


def register(program: BlockProgram) -> str:
    """The name under which `asp::block_attention` finds `program`; equal programs share one."""
    p = program
    shapes = p.carriers, p.row_dims, p.col_dims, p.differentiable, p.out_shape, p.lse_shape, p.dtype
    return _PROGRAMS.add(p, p.key, *shapes, p.flash is None, p.route.key, p.sight.key, p.per_batch, p.autocast)


def registered(name: str) -> BlockProgram:
    return _PROGRAMS[name]


# Forward ------------------------------------------------------------------------------------------


class _Forward(Work):
    def __init__(self, program: BlockProgram, leaves: Sequence[Tensor]) -> None:
        self.program, self.leaves = program, leaves
        self.rows, self.cols = _held(program, leaves, "row"), _held(program, leaves, "col")
        kind, device = flash.accumulator(program.dtype), leaves[0].device
        out = torch.zeros(program.out_shape, dtype=kind, device=device)
        lse = torch.full(program.statistics_shape, -torch.inf, dtype=kind, device=device)
        self.row_out = Piece([out, lse], (out.dim() - 2, program.row_of_statistics), ((0, program.out_shape[-2]),))
        self.col_out = Piece([], (), ())

    def compute(self, tile: Tile, rows: Piece, cols: Piece, row_out: Piece, col_out: Piece) -> None:
        cut = self.program.cut(tile, self.leaves, rows, cols)
        out, lse = row_out.cut(0, *tile.rows), row_out.cut(1, *tile.rows)
        with under(self.program.autocast):
            self._merge(out, lse, *_attend(self.program, tile, cut))

    def _merge(self, out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
        (flash.merge_ if self.program.flash else flash.merge_pairs_)(out, lse, block_out, block_lse)

    def fresh(self, of: Piece, runs: Intervals) -> Piece:
        piece = of.like(runs)
        for x, start in zip(piece.tensors, (0.0, -torch.inf), strict=False):
            x.fill_(start)
        return piece

    def merge(self, mine: Piece, back: Piece) -> None:
        for part in back.runs:
            self._merge(*(p.cut(i, *part) for p in (mine, back) for i in (0, 1)))


def _attend(program: BlockProgram, tile: Tile, cut: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    kernel, (high, wide) = program.flash, _span(tile)
    if kernel is not None:
        (q, k, v), mask = kernel.of(tile, cut)
        return flash.forward(q, k, v, tile.kind == "causal", mask, kernel.scale)
    (scores, values), keep = program.run(high, wide, *cut)
    scores = scores.to(flash.accumulator(scores.dtype))
    top = scores.amax(-1) if wide else scores.new_full(scores.shape[:-1], -torch.inf)
    rest = torch.exp(scores - top.masked_fill(top == -torch.inf, 0).unsqueeze(-1)).sum(-1)
    lse = torch.stack([top, rest.masked_fill(rest == 0, 1).log()], -1)
    weights = _weights(scores, lse)
    return (weights if keep is None else weights * keep) @ values.to(weights.dtype), lse


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    top, rest = lse.unbind(-1)
    return torch.exp(scores - top.masked_fill(top == -torch.inf, 0).unsqueeze(-1) - rest.unsqueeze(-1))


def _held(program: BlockProgram, leaves: Sequence[Tensor], carrier: Literal["row", "col"]) -> Piece:
    """This rank's own leaves of a kind; contiguous, so that whole shards are sent without a copy."""
    dims = program.row_dims if carrier == "row" else program.col_dims
    which = program.of(carrier)
    layout = program.route.rows if carrier == "row" else program.route.cols
    held = [leaves[i].contiguous() if len(program.route.ring) > 1 else leaves[i] for i in which]
    return Piece(held, tuple(dims[i] for i in which if dims[i] is not None), ((0, layout.size(program.route.place)),))  # type: ignore[misc]


@torch.library.custom_op("asp::block_attention", mutates_args=())
def block_attention(leaves: list[Tensor], cells: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of my rows. cells: what each batch's rows see (int8, on the host), where the program does not know it."""
    program = _PROGRAMS[name]
    work = _Forward(program, leaves)
    run(program.schedule(cells), program.route, work)
    out, lse = work.row_out.tensors
    return out.to(program.dtype), lse


@block_attention.register_fake
def _(leaves: list[Tensor], cells: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    program = _PROGRAMS[name]
    lse = leaves[0].new_empty(program.statistics_shape, dtype=flash.accumulator(program.dtype))
    return leaves[0].new_empty(program.out_shape, dtype=program.dtype), lse


# Backward -----------------------------------------------------------------------------------------


class _Backward(Work):
    """Row tensors are those of the forward pass, then the cotangent, the log-sum-exp and delta."""

    def __init__(self, program: BlockProgram, leaves: Sequence[Tensor], grad: Tensor, lse: Tensor, delta: Tensor) -> None:
        self.program, self.leaves = program, leaves
        held = _held(program, leaves, "row")
        extra = (grad, lse, delta)
        self.rows = Piece([*held.tensors, *extra], (*held.dims, grad.dim() - 2, *[program.row_of_statistics] * 2), held.runs)
        self.cols = _held(program, leaves, "col")
        self.wanted = {c: [i for i in program.of(c) if i in program.differentiable] for c in ("row", "col", "whole")}
        self.row_out, self.col_out = (
            self._grads("row", program.row_dims, held.runs),
            self._grads("col", program.col_dims, self.cols.runs),
        )
        self.whole = {i: self._zeros(i) for i in self.wanted["whole"]}

    def _zeros(self, i: int) -> Tensor:
        x = self.leaves[i]
        return torch.zeros(x.shape, dtype=flash.accumulator(x.dtype), device=x.device)

    def _grads(self, carrier: str, dims: Sequence[int | None], runs: Intervals) -> Piece:
        wanted = self.wanted[carrier]
        return Piece([self._zeros(i) for i in wanted], tuple(d for i in wanted if (d := dims[i]) is not None), runs)

    def compute(self, tile: Tile, rows: Piece, cols: Piece, row_out: Piece, col_out: Piece) -> None:
        program = self.program
        n = len(rows.tensors)
        grad, lse, delta = (rows.cut(i, *tile.rows) for i in (n - 3, n - 2, n - 1))
        cut = program.cut(tile, self.leaves, rows, cols)
        with under(program.autocast):
            grads = _pulled(program, tile, cut, grad, lse, delta)
        for i, g in grads.items():
            if i in program.differentiable:
                self._part(i, tile, row_out, col_out).add_(g)

    def _part(self, i: int, tile: Tile, row_out: Piece, col_out: Piece) -> Tensor:
        """Where the gradient of leaf i's piece of a tile is summed."""
        program, (high, wide) = self.program, _span(tile)
        carrier, row, col = program.carriers[i], program.row_dims[i], program.col_dims[i]
        if carrier == "col":
            return col_out.cut(self.wanted["col"].index(i), *tile.cols)
        part = row_out.cut(self.wanted["row"].index(i), *tile.rows) if carrier == "row" else self.whole[i]
        if carrier == "whole" and row is not None:
            part = part.narrow(row, tile.at[0], high)
        return part if col is None else part.narrow(col, tile.at[1], wide)

    def fresh(self, of: Piece, runs: Intervals) -> Piece:
        piece = of.like(runs)
        for x in piece.tensors:
            x.zero_()
        return piece

    def merge(self, mine: Piece, back: Piece) -> None:
        for part in back.runs:
            for i in range(len(mine.tensors)):
                mine.cut(i, *part).add_(back.cut(i, *part))

    def gradients(self) -> list[Tensor]:
        found = dict(zip(self.wanted["row"], self.row_out.tensors, strict=True))
        found |= dict(zip(self.wanted["col"], self.col_out.tensors, strict=True)) | self.whole
        return [found[i].to(self.leaves[i].dtype) for i in self.program.differentiable]


def _pulled(
    program: BlockProgram, tile: Tile, cut: Sequence[Tensor], grad: Tensor, lse: Tensor, delta: Tensor
) -> dict[int, Tensor]:
    """The gradient of a tile by leaf."""
    kernel, (high, wide) = program.flash, _span(tile)

    def of(*wanted: Tensor) -> Any:
        leaves = list(cut)
        for i, leaf in zip(program.differentiable, wanted, strict=True):
            leaves[i] = leaf
        out, also = kernel.of(tile, leaves) if kernel else program.run(high, wide, *leaves)
        return out, () if also is None else (also,)

    if kernel is not None and kernel.direct is not None:
        (q, k, v), mask = kernel.of(tile, cut)
        return dict(zip(kernel.direct, _kernel_backward(kernel, tile, grad, q, k, v, lse, delta, mask), strict=True))
    # A custom op runs below autograd; `torch.func.vjp` brings its own.
    out, pull, also = torch.func.vjp(of, *(cut[i] for i in program.differentiable), has_aux=True)
    also = also[0] if also else None
    if kernel is not None:
        q, k, v = out
        grads = _kernel_backward(kernel, tile, grad, q, k, v, lse, delta, also)
        return dict(zip(program.differentiable, pull(tuple(g.to(x.dtype) for g, x in zip(grads, out, strict=True))), strict=True))
    keep = also
    scores, values = out
    weights = _weights(scores.to(lse.dtype), lse)
    kept = weights if keep is None else weights * keep
    grad = grad.to(weights.dtype)
    d_values = (kept.mT @ grad).sum_to_size(values.shape).to(values.dtype)
    d_weights = grad @ values.to(grad.dtype).mT
    d_scores = weights * ((d_weights if keep is None else d_weights * keep) - delta.unsqueeze(-1))
    grads = pull((d_scores.sum_to_size(scores.shape).to(scores.dtype), d_values))
    return dict(zip(program.differentiable, grads, strict=True))


def _kernel_backward(
    kernel: Flash, tile: Tile, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return flash.backward(grad, q, k, v, lse, delta, tile.kind == "causal", mask, kernel.scale)


@torch.library.custom_op("asp::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, leaves: list[Tensor], cells: Tensor | None, name: str
) -> list[Tensor]:
    program = _PROGRAMS[name]
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:  # (of a pair both have the same, that of the sum)
        delta = delta - (grad_lse if program.flash else grad_lse[..., 1])
    work = _Backward(program, leaves, grad.contiguous(), lse.contiguous(), delta)
    run(program.schedule(cells), program.route, work)
    return work.gradients()


@block_attention_backward.register_fake
def _(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, leaves: list[Tensor], cells: Tensor | None, name: str
) -> list[Tensor]:
    return [torch.empty(leaves[i].shape, dtype=leaves[i].dtype, device=leaves[i].device) for i in _PROGRAMS[name].differentiable]


def _setup(ctx: Any, inputs: tuple[list[Tensor], Tensor | None, str], output: tuple[Tensor, Tensor]) -> None:
    leaves, cells, ctx.name = inputs
    ctx.has_cells = cells is not None
    ctx.save_for_backward(*leaves, *output, *([cells] if cells is not None else []))


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[list[Tensor | None], None, None]:
    saved = list(ctx.saved_tensors)
    cells = saved.pop() if ctx.has_cells else None
    *leaves, out, lse = saved
    grads: list[Tensor | None] = [None] * len(leaves)
    found = block_attention_backward(grad, grad_lse, out, lse, leaves, cells, ctx.name)
    for i, g in zip(_PROGRAMS[ctx.name].differentiable, found, strict=True):
        grads[i] = g
    return grads, None, None


block_attention.register_autograd(_backward, setup_context=_setup)


# Bytes --------------------------------------------------------------------------------------------


def traffic(name: str, leaves: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes a rank sends in the forward and in the backward pass, as the mean over ranks (at most, where batches decide).

    leaves: local values, or anything with their shapes and types.
    """
    program = _PROGRAMS[name]
    schedule, kind = program.fixed, flash.accumulator(program.dtype).itemsize

    def per_position(carrier: Carrier, dims: Sequence[int | None], wanted: Sequence[int], itemsize: int = 0) -> int:
        each = [(leaves[i], dims[i]) for i in wanted if program.carriers[i] == carrier]
        return sum(x.numel() // max(1, x.shape[d]) * (itemsize or x.element_size()) for x, d in each if d is not None)

    every, some = range(len(leaves)), program.differentiable
    row, col = per_position("row", program.row_dims, every), per_position("col", program.col_dims, every)
    d_row = per_position("row", program.row_dims, some, kind)
    d_col = per_position("col", program.col_dims, some, kind)
    per_row = max(1, program.out_shape[-2])
    out, delta = torch.Size(program.out_shape).numel() // per_row, torch.Size(program.lse_shape).numel() // per_row * kind
    lse = delta if program.flash else 2 * delta
    rows, cols = schedule.travelling
    forward = rows * (row + out * kind + lse) + cols * col
    backward = rows * (row + out * program.dtype.itemsize + lse + delta + d_row) + cols * (col + d_col)
    return forward // schedule.ranks, backward // schedule.ranks


# Pieces that programs call ------------------------------------------------------------------------


def scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """scale · q kᵀ under a mask, boolean (True is visible) or additive."""
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        return s
    return s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask


def kept(like: Tensor, p: float, seed: Tensor, salt: int, shape: tuple[int, ...], where: list[Tensor | int]) -> Tensor:
    """What dropout multiplies weights with, 0 or 1 / (1 − p), by their global index in `shape`."""
    return random.dropout(torch.ones_like(like), p, seed, salt, shape, where)


def with_sink(out: Tensor, lse: Tensor, sink: Tensor, dtype: torch.dtype) -> Tensor:
    """The attention with one more logit for each row, whose value is 0: its weights shrink by Σeˢ / (Σeˢ + e^sink).

    out: [.., rows, D_v], lse: [.., rows, 2] as a pair, sink: broadcastable to [.., rows, 1].
    """
    top, rest = lse.unbind(-1)
    return (out * torch.sigmoid(top.unsqueeze(-1) - sink.to(lse.dtype) + rest.unsqueeze(-1))).to(dtype)
