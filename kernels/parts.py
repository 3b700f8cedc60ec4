"""Parameters in parts (ZeRO-3): which part of a parameter a rank holds, and how the parameters of a layer come together.

A parameter is split along one dimension of length n into parts of ceil(n / ranks), of which the last may be shorter or empty, as
`torch.chunk` and DTensor's Shard have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import comm
from .layout import Interval

UNEVEN = 1.1  # times an even share that the largest part may be, before another dimension is looked at


def split_dim(shape: Sequence[int], ranks: int) -> int | None:
    """The dimension along which a parameter is split: the first that divides about evenly, else the one that does so best.

    None: it has no elements or no dimensions, and every rank holds it whole.
    """
    if not shape or 0 in shape:
        return None
    shares = [_each(n, ranks) * ranks / n for n in shape]
    return next((d for d, share in enumerate(shares) if share <= UNEVEN), shares.index(min(shares)))


def part(length: int, ranks: int, rank: int) -> Interval:
    """The positions that a rank holds of `length`, maybe none."""
    each = _each(length, ranks)
    return min(rank * each, length), min((rank + 1) * each, length)


def part_shape(shape: Sequence[int], ranks: int, rank: int) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter."""
    dim = split_dim(shape, ranks)
    if dim is None:
        return tuple(shape)
    first, last = part(shape[dim], ranks, rank)
    return (*shape[:dim], last - first, *shape[dim + 1 :])


def part_of(x: Tensor, ranks: int, rank: int) -> Tensor:
    """A rank's part of a parameter, in memory of its own."""
    dim = split_dim(x.shape, ranks)
    if dim is not None:
        first, last = part(x.shape[dim], ranks, rank)
        x = x.narrow(dim, first, last - first)
    return x.clone(memory_format=torch.contiguous_format)


def _each(length: int, ranks: int) -> int:
    return -(-length // ranks)


def padded_shape(shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The shape of the largest part, to which all are padded on the wire."""
    return part_shape(shape, ranks, 0)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    return comm._padded_rows(x.movedim(dim, 0), length).movedim(0, dim)


class _Unshard(torch.autograd.Function):
    """All-gather of a bucket; its cotangents are summed and each rank keeps its parts of the sum."""

    @staticmethod
    def forward(
        ctx: Any, shapes: tuple[tuple[int, ...], ...], ranks: int, group: str, scale: float, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shapes, ctx.ranks, ctx.group, ctx.scale = shapes, ranks, group, scale
        ctx.held = [p.shape for p in parts]
        flat = torch.cat([_flat_part(p, shape, ranks) for p, shape in zip(parts, shapes, strict=True)])
        gathered = comm._wait(comm._c10d.all_gather_into_tensor(flat, ranks, group)).view(ranks, -1)
        sizes = [torch.Size(padded_shape(shape, ranks)).numel() for shape in shapes]
        return tuple(_whole(x, shape, ranks) for x, shape in zip(gathered.split(sizes, 1), shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        packed = torch.cat([_by_rank(g, shape, ctx.ranks) for g, shape in zip(grads, ctx.shapes, strict=True)], 1)
        mine = comm._wait(comm._c10d.reduce_scatter_tensor(packed.reshape(-1), "sum", ctx.ranks, ctx.group))
        mine = mine * ctx.scale if ctx.scale != 1 else mine
        sizes = [torch.Size(padded_shape(shape, ctx.ranks)).numel() for shape in ctx.shapes]
        own = []
        for x, shape, held in zip(mine.split(sizes), ctx.shapes, ctx.held, strict=True):
            dim = split_dim(shape, ctx.ranks)
            assert dim is not None
            own.append(x.view(padded_shape(shape, ctx.ranks)).narrow(dim, 0, held[dim]).contiguous())
        return None, None, None, None, *own


def _flat_part(x: Tensor, shape: tuple[int, ...], ranks: int) -> Tensor:
    dim = split_dim(shape, ranks)
    assert dim is not None
    return _padded(x, dim, _each(shape[dim], ranks)).reshape(-1)


def _whole(x: Tensor, shape: tuple[int, ...], ranks: int) -> Tensor:
    """x: [ranks, elements of a padded part] -> the whole parameter, contiguous."""
    dim = split_dim(shape, ranks)
    assert dim is not None
    by_rank = x.unflatten(1, padded_shape(shape, ranks)).movedim(0, dim)
    return by_rank.flatten(dim, dim + 1).narrow(dim, 0, shape[dim]).contiguous()


def _by_rank(x: Tensor, shape: tuple[int, ...], ranks: int) -> Tensor:
    """The other way: a whole value -> [ranks, elements of a padded part]."""
    dim = split_dim(shape, ranks)
    assert dim is not None
    each = _each(shape[dim], ranks)
    return _padded(x, dim, ranks * each).unflatten(dim, (ranks, each)).movedim(dim, 0).reshape(ranks, -1)


def unshard(parts: Sequence[Tensor], shapes: tuple[tuple[int, ...], ...], ranks: int, group: str, scale: float) -> list[Tensor]:
    """Whole parameters of one dtype from each rank's parts: one all-gather.

    Backward: one reduce-scatter of the cotangents' sum over the ranks, times `scale`.
    """
    return list(_Unshard.apply(shapes, ranks, group, scale, *parts))


def share(x: Tensor, ranks: int) -> Tensor:
    """Identity on a value whose cotangent is whole on every rank, so that of a sum over the ranks each gives its share."""
    return comm._pair(x, comm._same, lambda g: g / ranks)
