"""scaled_dot_product_attention: rows are queries, columns are keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..placement import Placement, Shard
from ..relation import Dims, operand_shape, operands, shape
from .base import Recipe, Related, Rule

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


RULES: dict[object, Rule] = {aten.scaled_dot_product_attention: Attention(sdpa)}
