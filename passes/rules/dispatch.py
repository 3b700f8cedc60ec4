"""Token-local functions: each rank runs the function on its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...kernels import token_local
from ..placement import Placement
from ..relation import Dims, shape
from .base import Builder, Related, Rule


def tokens_first(node: fx.Node) -> Dims:
    """asp::token_local(tokens, weights, key): dimension 0 of every token operand is the tokens."""
    tokens, weights = node.args[0], node.args[1]
    rows = [(0, *[None] * (len(shape(t)) - 1)) for t in tokens]  # type: ignore[union-attr, arg-type]
    rows += [(None,) * len(shape(w)) for w in weights]  # type: ignore[union-attr, arg-type, misc]
    return Dims(tuple(rows))


@dataclass(frozen=True)
class TokenLocal(Related):
    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        """In bfloat16 PyTorch's grouped matmul traces, so the compiler sees inside; otherwise the operator is opaque."""
        count = len(node.args[0])  # type: ignore[arg-type]
        traced = all(v.meta["val"].dtype == torch.bfloat16 for v in node.args[1])  # type: ignore[union-attr]
        target = token_local.call if traced else torch.ops.asp.token_local.default
        return b.call(target, list(values[:count]), list(values[count:]), node.args[2])


RULES: dict[object, Rule] = {torch.ops.asp.token_local: TokenLocal(tokens_first)}
