"""Lookups: embeddings, gathers, scatters, advanced indexing."""

from __future__ import annotations

import torch
from torch import fx

from ..relation import Dims, operand_shape, operands, shape
from .base import Related, Rule, argument

aten = torch.ops.aten


def embedding(node: fx.Node) -> Dims:
    rank = len(shape(node))
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
        if together and d == at or not together and d == 0:
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


def selected(node: fx.Node) -> Dims:
    """index_select(x, dim, index)."""
    rank = len(shape(node))
    dim = argument(node, "dim") % max(1, rank)
    return Dims((tuple(None if d == dim else d for d in range(rank)), (dim,)))


def _one_hot(node: fx.Node) -> Dims:
    return Dims((tuple(range(len(shape(node)) - 1)),))


RULES: dict[object, Rule] = {
    aten.embedding: Related(embedding),
    aten.index.Tensor: Related(index),
    aten.gather: Related(picked),
    aten.take_along_dim: Related(picked),
    aten.scatter: Related(scattered),
    aten.scatter_add: Related(scattered),
    aten.index_select: Related(selected),
    aten.one_hot: Related(_one_hot),
}
