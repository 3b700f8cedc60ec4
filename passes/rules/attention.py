"""scaled_dot_product_attention: rows are queries, columns are keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...kernels import attend, random
from ..placement import Placement, Shard
from ..relation import Dims, operand_shape, operands, shape
from .base import Builder, Recipe, Related, Rule, argument
from .pointwise import site_salt

aten = torch.ops.aten


def sdpa(node: fx.Node) -> Dims:
    """q [.., S, D], k [.., T, D], v [.., T, D_v], mask broadcastable to [.., S, T] -> [.., S, D_v].

    Batch dimensions may be split; heads only where key and query heads are equally many.
    """
    out = shape(node)
    rank = len(out)

    def batch(s: Sequence[int]) -> list[int | None]:
        lead = rank - len(s)
        return [d + lead if s[d] == out[d + lead] else None for d in range(len(s) - 2)]

    rows = [
        (*batch(operand_shape(node, 0)), rank - 2, None),
        (*batch(operand_shape(node, 1)), None, None),
        (*batch(operand_shape(node, 2)), None, rank - 1),
    ]
    if len(operands(node)) == 4:
        mask = operand_shape(node, 3)
        rows.append((*batch(mask), rank - 2 if len(mask) > 1 and mask[-2] == out[-2] else None, None)[-len(mask) :])
    return Dims(tuple(tuple(r) for r in rows))


@dataclass(frozen=True)
class Attention(Related):
    """Batch splits stay local; a split of the queries makes an attention site (see `passes.detect`)."""

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        q = ins[0]
        if isinstance(q, Shard) and q.dim < len(shape(node)) - 1:
            return self.version(node, q.at(q.dim + len(shape(node)) - len(operand_shape(node, 0))))
        return None

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        """Outside a region: a local attention, which must know its rows to be causal and its elements to drop some."""
        dropout, causal = float(argument(node, "dropout_p", 0.0) or 0.0), bool(argument(node, "is_causal", False))
        rank, device = len(shape(node)), node.meta["val"].device
        rows_split = rank - 2 in b.split(node, out)
        if not dropout and not (causal and rows_split):
            return b.run(node, values)
        where = b.where(node, out)
        columns = operand_shape(node, 1)[-2]
        positions: list[fx.Node | None] = [None, None]
        if causal:
            whole = b.call(random.positions, ((0, shape(node)[-2]),), device)
            positions = [where[rank - 2] if rows_split else whole, b.call(random.positions, ((0, columns),), device)]
        q, k, v, *mask = values
        masked = (mask[0] if mask else None, *positions)
        options = (argument(node, "scale"), bool(argument(node, "enable_gqa", False)))
        if not dropout:
            return b.call(attend.sdpa, q, k, v, *masked, *options)
        weights = (*shape(node)[:-1], columns)
        return b.call(
            attend.sdpa_dropout, q, k, v, *masked, *options, dropout, b.seed(), site_salt(node), weights, [*where[:-1], 0]
        )


RULES: dict[object, Rule] = {aten.scaled_dot_product_attention: Attention(sdpa)}
