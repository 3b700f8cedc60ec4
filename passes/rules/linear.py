"""Linear attention: tokens along dimension 1. A split of them makes a site, which gets its strategy later (see
`passes.recurrence`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...kernels.layout import Layout, contiguous
from ...kernels.linear import TOKENS
from ..placement import P, Placement, Shard, V
from ..relation import Dims, operands, shape
from .base import Recipe, Related, Rule, never, parts

STATE = torch.ops.asp.linear_state.default
OPERATORS = (torch.ops.asp.linear_attention.default, STATE)


def operands_given(node: fx.Node) -> tuple[bool, ...]:
    """Which of q, k, v, decay, remove, starts, initial a node has."""
    return tuple(isinstance(x, fx.Node) for x in node.args[:7])


def _batched(node: fx.Node) -> Dims:
    """Sequences of a batch are independent of each other."""
    return Dims(tuple((0, *[None] * (len(shape(x)) - 1)) for x in operands(node)))


def demands(node: fx.Node, layout: Layout) -> tuple[tuple[fx.Node, Placement], ...]:
    """Every rank's own tokens, and the state that the sequence starts from."""
    given = iter(operands(node))
    return tuple((next(given), V if i == 6 else Shard(TOKENS, layout)) for i, there in enumerate(operands_given(node)) if there)


@dataclass(frozen=True)
class Recurrence(Related):
    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        tokens = ins[:-1] if operands_given(node)[6] else ins
        split = [s for p in tokens for s in parts(p) if s.dim == TOKENS]
        if not split:
            return super().native(node, ins)
        length, ranks = shape(operands(node)[0])[TOKENS], split[0].layout.ranks
        if any(s.merged for s in split) or length < ranks:
            return None
        layout = contiguous(length, ranks)  # in any other order a state would have to come and go many times
        return Recipe(P if node.target is STATE else Shard(TOKENS, layout), demands(node, layout), never)


RULES: dict[object, Rule] = {operator.overloadpacket: Recurrence(_batched) for operator in OPERATORS}
