"""Operators that work along some dimensions and treat the others as batch: reductions, softmax, norms, sorts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..placement import Partial, Placement
from ..relation import Dims, Link, Summed, operand_shape, operands, shape
from .base import Builder, Related, Rule, argument, dims_of
from .pointwise import pointwise
from .views import same

aten = torch.ops.aten

DimsOf = Callable[[fx.Node, int], tuple[int, ...]]


def named(name: str = "dim", default: object = None) -> DimsOf:
    """The dimensions in the argument called `name`."""
    return lambda node, rank: dims_of(argument(node, name, default), rank)


def along(dims: DimsOf) -> Callable[[fx.Node], Dims]:
    """Shape-preserving along `dims`, which must be whole; every operand is aligned with the first."""

    def relate(node: fx.Node) -> Dims:
        links, stays = [], []
        for x in operands(node):
            rank = len(shape(x))
            whole = dims(node, rank)
            links.append(tuple(None if d in whole else d for d in range(rank)))
            stays.append(tuple(range(rank)))
        return Dims(tuple(links), tuple(stays))

    return relate


def reduced(dims: DimsOf, summed: bool = False) -> Callable[[fx.Node], Dims]:
    """Dimensions that disappear (or stay with size 1); sums of a split dimension are partial."""

    def relate(node: fx.Node) -> Dims:
        rank = len(operand_shape(node, 0))
        gone = dims(node, rank)
        keep = len(shape(node)) == rank
        links: list[Link] = []
        for d in range(rank):
            if d in gone:
                links.append(Summed(d) if summed else None)
            else:
                links.append(d if keep else d - sum(g < d for g in gone))
        return Dims((tuple(links),))

    return relate


@dataclass(frozen=True)
class Mean(Related):
    """A mean over a split dimension is the local sum over the global count."""

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        if not isinstance(out, Partial):
            return b.run(node, values)
        source = operand_shape(node, 0)
        dims = dims_of(argument(node, "dim"), len(source))
        count = 1
        for d in dims:
            count *= source[d]
        dtype = argument(node, "dtype")
        total = b.call(aten.sum.dim_IntList, values[0], list(dims), argument(node, "keepdim", False) or False, dtype=dtype)
        return b.call(aten.div.Tensor, total, count)


def _norm(node: fx.Node) -> Dims:
    """layer_norm and rms_norm: the trailing `normalized_shape` is whole, weights belong to it."""
    lead = len(shape(node)) - len(node.args[1])  # type: ignore[arg-type]
    rank = len(shape(node))
    links: list[tuple[int | None, ...]] = [tuple(d if d < lead else None for d in range(rank))]
    stays: list[tuple[int | None, ...]] = [tuple(range(rank))]
    for _ in operands(node)[1:]:
        links.append((None,) * (rank - lead))
        stays.append(tuple(range(lead, rank)))
    return Dims(tuple(links), tuple(stays))


def _batch_only(node: fx.Node) -> Dims:
    """Only the first operand's first dimension is batch."""
    x, *rest = operands(node)
    return Dims(((0, *(None,) * (len(shape(x)) - 1)), *((None,) * len(shape(other)) for other in rest)))


@dataclass(frozen=True)
class Triangle(Related):
    """tril and triu keep elements by comparing row and column positions, which a split knows."""

    lower: bool

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        rank = len(shape(node))
        if not b.split(node, out) & {rank - 2, rank - 1}:
            return b.run(node, values)
        where = b.where(node, out)
        return b.call(triangle, values[0], where[rank - 2], where[rank - 1], argument(node, "diagonal", 0) or 0, self.lower)


def triangle(x: torch.Tensor, row: torch.Tensor | int, col: torch.Tensor | int, diagonal: int, lower: bool) -> torch.Tensor:
    """x [.., rows, columns] with zeros outside the triangle; row and col are global positions, or the first of a run."""
    rows = torch.arange(row, row + x.shape[-2], device=x.device) if isinstance(row, int) else row
    cols = torch.arange(col, col + x.shape[-1], device=x.device) if isinstance(col, int) else col
    edge = rows[:, None] + diagonal
    return x.masked_fill(cols[None, :] > edge if lower else cols[None, :] < edge, 0)


_DIM = named()
ALONG = [aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten._safe_softmax]
ALONG += [aten.cummax, aten.cummin, aten.glu]
LAST = [aten.sort, aten.topk, aten.argsort, aten.kthvalue]
REDUCED = [aten.amax, aten.amin, aten.argmax, aten.argmin, aten.prod, aten.var, aten.std, aten.var_mean, aten.std_mean]
REDUCED += [
    aten.logsumexp,
    aten.any,
    aten.all,
    aten.norm,
    aten.linalg_vector_norm,
    aten.max,
    aten.min,
    aten.median,
    aten.count_nonzero,
]

RULES: dict[object, Rule] = {
    **{op: Related(along(_DIM)) for op in ALONG},
    **{op: Related(along(named("dim", -1))) for op in LAST},
    **{op: Related(reduced(_DIM)) for op in REDUCED},
    aten.sum: Related(reduced(_DIM, summed=True)),
    aten.mean: Mean(reduced(_DIM, summed=True)),
    aten.layer_norm: Related(_norm),
    aten.rms_norm: Related(_norm),
    aten.group_norm: Related(_batch_only),
    aten.repeat_interleave.self_int: Related(along(named("dim"))),
    aten.max.other: Related(pointwise),
    aten.min.other: Related(pointwise),
    aten.tril: Triangle(same, lower=True),
    aten.triu: Triangle(same, lower=False),
}
