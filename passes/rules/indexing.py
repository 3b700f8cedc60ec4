"""Lookups: embeddings, gathers, scatters, advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..placement import P, Placement, R, Shard
from ..relation import Dims, operand_shape, operands, shape
from .base import Recipe, Related, Rule, argument

aten = torch.ops.aten


def embedding(node: fx.Node) -> Dims:
    """weight [N, D], indices [...] -> [..., D]; gradients scaled by frequency need every index at once."""
    rank = len(shape(node))
    if argument(node, "scale_grad_by_freq", False):
        return Dims(((None, None), (None,) * (rank - 1)))
    return Dims(((None, rank - 1), tuple(range(rank - 1))))


def index(node: fx.Node) -> Dims:
    """x[i, :, j]: index tensors broadcast into the place of the first (or to the front when apart)."""
    x, indices = operand_shape(node, 0), node.args[1]
    taken = [d for d, i in enumerate(indices) if i is not None]  # type: ignore[arg-type, var-annotated]
    shapes = [shape(i) for i in indices if i is not None]  # type: ignore[union-attr]
    drawn = torch.broadcast_shapes(*shapes)
    together = taken == list(range(taken[0], taken[0] + len(taken)))
    at = taken[0] if together else 0
    row, out = [], 0
    for d in range(len(x)):
        if (together and d == at) or (not together and d == 0):
            out += len(drawn)
        row.append(None if d in taken else out)
        out += d not in taken
    links: list[tuple[int | None, ...]] = [tuple(row)]
    for s in shapes:
        lead = len(drawn) - len(s)
        links.append(tuple(at + lead + d if size == drawn[lead + d] else None for d, size in enumerate(s)))
    return Dims(tuple(links))


def picked(node: fx.Node) -> Dims:
    """gather(x, dim, index): batch dimensions agree; along `dim` the index may be split but x must be whole."""
    dim = argument(node, "dim") % max(1, len(shape(node)))
    x, i = operand_shape(node, 0), operand_shape(node, 1)
    source = tuple(d if d != dim and x[d] == i[d] else None for d in range(len(x)))
    return Dims((source, tuple(d if d == dim or x[d] == i[d] else None for d in range(len(i)))))


def scattered(node: fx.Node) -> Dims:
    """scatter(x, dim, index, source or value): batch dimensions agree; `dim` is whole."""
    rank = len(shape(node))
    dim = argument(node, "dim") % max(1, rank)
    shapes = [shape(x) for x in operands(node)]
    agree = [d != dim and len({s[d] for s in shapes if len(s) == rank}) == 1 for d in range(rank)]
    row = tuple(d if agree[d] else None for d in range(rank))
    return Dims(tuple(row if len(s) == rank else (None,) * len(s) for s in shapes))


def slice_scattered(node: fx.Node) -> Dims:
    """slice_scatter(x, source, dim, ...) and select_scatter(x, source, dim, i): everything but `dim` agrees."""
    rank = len(shape(node))
    dim = argument(node, "dim", 0) % rank
    row = tuple(None if d == dim else d for d in range(rank))
    source = row if len(operand_shape(node, 1)) == rank else tuple(d for d in row if d is not None)
    return Dims((row, source), (tuple(range(rank)), source))


def selected(node: fx.Node) -> Dims:
    """index_select(x, dim, index)."""
    rank = len(shape(node))
    dim = argument(node, "dim") % max(1, rank)
    return Dims((tuple(None if d == dim else d for d in range(rank)), (dim,)))


@dataclass(frozen=True)
class ScatterAdd(Related):
    """Counting into zeros along a split dimension is a sum over ranks."""

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        x, i, source = operands(node) if len(operands(node)) == 3 else (None, None, None)
        dim = argument(node, "dim") % max(1, len(shape(node)))
        split = ins[1]
        if (
            x is None
            or i is None
            or source is None
            or not isinstance(split, Shard)
            or split.dim != dim
            or shape(i) != shape(source)
        ):
            return super().native(node, ins)
        if x.target not in (aten.zeros.default, aten.zeros_like.default):
            return None
        demands: tuple[tuple[fx.Node, Placement], ...] = ((x, R), (i, split), (source, split))
        return Recipe(P, demands, lambda b, values: b.run(node, values))


def _one_hot(node: fx.Node) -> Dims:
    return Dims((tuple(range(len(shape(node)) - 1)),))


RULES: dict[object, Rule] = {
    aten.embedding: Related(embedding),
    aten.index.Tensor: Related(index),
    aten.gather: Related(picked),
    aten.take_along_dim: Related(picked),
    aten.scatter: Related(scattered),
    aten.scatter_add: ScatterAdd(scattered),
    aten.slice_scatter: Related(slice_scattered),
    aten.select_scatter: Related(slice_scattered),
    aten.index_select: Related(selected),
    aten.one_hot: Related(_one_hot),
}
