"""Attention, or anything else over (row, column) pairs, computed a block of rows at a time.

`asp::attend` runs a `RowProgram`: the model's own operators between the values that carry rows, the values
that carry columns, and the result. No value with both axes is ever larger than one block of rows, in
the forward pass or in the backward pass, which runs each block's program again and differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import random
from .programs import Autocast, Programs, under

BLOCK_ELEMENTS = 1 << 22  # most values over (row, column) pairs that one block may hold at a time


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of the result, which need no columns outside [first, last)."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class RowProgram:
    """`run(rows, columns, *leaves)` gives the result for as many rows and columns as the leaves were cut to.

    `row_dims[i]` and `col_dims[i]` are where leaf i carries rows and columns (None: it does not), `out_dim`
    is the row dimension of the result, `differentiable` the leaves that take a gradient, `copies` how many values stand
    over each (row, column) pair.
    """

    run: Callable[..., Tensor]
    key: str
    row_dims: tuple[int | None, ...]
    col_dims: tuple[int | None, ...]
    out_dim: int
    blocks: tuple[Block, ...]
    differentiable: tuple[int, ...]
    autocast: Autocast | None = None
    copies: int = 1

    def pieces(self) -> Iterator[Block]:
        """The blocks, in pieces of at most BLOCK_ELEMENTS values over pairs, last to first.

        Under a causal mask the last is the largest, and memory freed by a larger piece serves the next; the other way
        round a heap fragments until it holds all pairs.
        """
        for b in reversed(self.blocks):
            for start, stop in reversed(row_blocks(b.stop - b.start, (b.last - b.first) * self.copies)):
                yield Block(b.start + start, b.start + stop, b.first, b.last)

    def cut(self, leaves: list[Tensor], block: Block) -> list[Tensor]:
        out = []
        for leaf, row, col in zip(leaves, self.row_dims, self.col_dims, strict=True):
            if row is not None:
                leaf = leaf.narrow(row, block.start, block.stop - block.start)
            if col is not None:
                leaf = leaf.narrow(col, block.first, block.last - block.first)
            out.append(leaf)
        return out

    def block(self, leaves: list[Tensor], block: Block) -> Tensor:
        with under(self.autocast):
            return self.run(block.stop - block.start, block.last - block.first, *leaves)


_PROGRAMS = Programs[RowProgram]()


def register(program: RowProgram) -> str:
    """The name under which `asp::attend` finds `program`; equal programs share one."""
    p = program
    return _PROGRAMS.add(p, p.key, p.row_dims, p.col_dims, p.out_dim, p.blocks, p.differentiable, p.autocast, p.copies)


def row_blocks(rows: int, pairs_per_row: int) -> list[tuple[int, int]]:
    """Rows cut so that no block has more than BLOCK_ELEMENTS pairs (but at least one row; no rows are one empty block)."""
    step = max(1, min(rows, BLOCK_ELEMENTS // max(1, pairs_per_row)))
    return [(start, min(rows, start + step)) for start in range(0, rows, step)] or [(0, 0)]


@torch.library.custom_op("asp::attend", mutates_args=())
def attend(leaves: list[Tensor], name: str) -> Tensor:
    program = _PROGRAMS[name]
    parts = [program.block(program.cut(leaves, b), b) for b in program.pieces()]
    return torch.cat(parts[::-1], program.out_dim) if len(parts) != 1 else parts[0].clone(memory_format=torch.contiguous_format)


@attend.register_fake
def _(leaves: list[Tensor], name: str) -> Tensor:
    program = _PROGRAMS[name]
    piece = next(program.pieces())
    one = program.block(program.cut(leaves, piece), piece)
    shape = list(one.shape)
    shape[program.out_dim] = sum(b.stop - b.start for b in program.blocks)
    return one.new_empty(shape)


@torch.library.custom_op("asp::attend_backward", mutates_args=())
def attend_backward(grad: Tensor, leaves: list[Tensor], name: str) -> list[Tensor]:
    program = _PROGRAMS[name]
    grads = [torch.zeros_like(leaves[i]) for i in program.differentiable]
    for block in program.pieces():
        cut = program.cut(leaves, block)
        upstream = grad.narrow(program.out_dim, block.start, block.stop - block.start)
        for whole, i, g in zip(grads, program.differentiable, _block_gradients(program, cut, block, upstream), strict=True):
            row, col = program.row_dims[i], program.col_dims[i]
            part = whole if row is None else whole.narrow(row, block.start, block.stop - block.start)
            part = part if col is None else part.narrow(col, block.first, block.last - block.first)
            part += g
    return grads


def _block_gradients(program: RowProgram, cut: list[Tensor], block: Block, upstream: Tensor) -> tuple[Tensor, ...]:
    """Run the block's program again and pull `upstream` back to its differentiable leaves.

    A custom op runs below autograd; `torch.func.vjp` brings its own.
    """

    def of(*wanted: Tensor) -> Tensor:
        leaves = list(cut)
        for i, leaf in zip(program.differentiable, wanted, strict=True):
            leaves[i] = leaf
        return program.block(leaves, block)

    out, pull = torch.func.vjp(of, *(cut[i] for i in program.differentiable))
    return pull(upstream.to(out.dtype))


@attend_backward.register_fake
def _(grad: Tensor, leaves: list[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(leaves[i]) for i in _PROGRAMS[name].differentiable]


def _setup(ctx: object, inputs: tuple[list[Tensor], str], output: Tensor) -> None:
    leaves, ctx.name = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*leaves)  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor) -> tuple[list[Tensor | None], None]:
    leaves = list(ctx.saved_tensors)  # type: ignore[attr-defined]
    name = ctx.name  # type: ignore[attr-defined]
    out: list[Tensor | None] = [None] * len(leaves)
    for i, g in zip(_PROGRAMS[name].differentiable, attend_backward(grad, leaves, name), strict=True):
        out[i] = g
    return out, None


attend.register_autograd(_backward, setup_context=_setup)


# Pieces that programs call ------------------------------------------------------------------------


def expand_heads(x: Tensor, head_dim: int, first_head: int, heads: int, first_kv: int, groups: int) -> Tensor:
    """Key/value heads repeated for the query heads [first_head, first_head + heads) that read them.

    x: local key/value heads along `head_dim`, of which the first is head `first_kv` of the model.
    """
    wanted = torch.arange(first_head, first_head + heads, device=x.device) // groups - first_kv
    return x.index_select(head_dim, wanted)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """torch's attention of some rows; `row` and `column` positions, where given, make it causal.

    q: [.., heads, rows, D], k: [.., kv heads, columns, D], v: [.., kv heads, columns, D_v], mask: broadcastable to
    [.., rows, columns]. A row that sees no column gives 0 with gradient 0.
    """
    mask = with_causal(mask, row, column)
    if k.shape[-2] == 0:  # every column of the block is masked
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)


def with_causal(mask: Tensor | None, row: Tensor | None, column: Tensor | None) -> Tensor | None:
    """A mask (boolean or additive, or None) and, where positions are given, `column <= row` as well."""
    if row is None or column is None:
        return mask
    causal = column[None, :] <= row[:, None]
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)


def sdpa_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    row: Tensor | None,
    column: Tensor | None,
    scale: float | None,
    grouped: bool,
    p: float,
    seed: Tensor,
    salt: int,
    shape: tuple[int, ...],
    where: list[Tensor | int],
) -> Tensor:
    """As `sdpa`, with dropout of the attention weights by their global index in `shape`."""
    if grouped:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = with_causal(mask, row, column)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0).to(v.dtype)
    return random.dropout(weights, p, seed, salt, shape, where) @ v
