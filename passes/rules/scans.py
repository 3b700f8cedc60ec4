"""Scans along the sequence: ranks scan what they hold and share one total for each run of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...kernels import prefix
from ..placement import Placement, Shard, V
from ..relation import Dims, operands, shape
from .along import along, named
from .base import Builder, Recipe, Rule, argument, dims_of, parts
from .sequence import Cut

aten = torch.ops.aten


@dataclass(frozen=True)
class Scan(Cut):
    """cumsum, cumprod, logcumsumexp: `run(x, dim, [dtype,] shards, rank, group)` is the operator on a part of the sequence."""

    run: Callable[..., Any]
    typed: bool = True

    def relation(self, node: fx.Node) -> Dims:
        return along(named())(node)

    def changed(self, node: fx.Node) -> set[int]:
        return set(dims_of(argument(node, "dim"), len(shape(node))))

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        dtype = node.meta["val"].dtype
        if not self.typed and dtype.is_complex:
            return None

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            if b.ranks == 1:
                return b.run(node, values)
            return b.call(self.run, values[0], s.dim, *((dtype,) if self.typed else ()), s.layout.shards, b.rank, b.group)

        return Recipe(s, ((operands(node)[0], s),), emit)


@dataclass(frozen=True)
class AssociativeScan(Rule):
    """asp::associative_scan(xs, extra, key): along dimension 0. How it treats other dimensions, only its operator knows."""

    def relation(self, node: fx.Node) -> Dims:
        rows = [tuple[None, ...]((None,) * len(shape(x))) for x in operands(node)]
        stays = [tuple(range(len(row))) for row in rows]
        return Dims(tuple(rows), tuple(stays))

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        xs, extra = ins[: len(node.args[0])], ins[len(node.args[0]) :]  # type: ignore[arg-type]
        return None if any(map(parts, extra)) else self.version(node, next(s for p in xs for s in parts(p)))

    def version(self, node: fx.Node, want: Shard) -> Recipe | None:
        if want.dim != 0 or want.merged:
            return None
        count, key = len(node.args[0]), node.args[2]  # type: ignore[arg-type]

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            mine, extra = list(values[:count]), list(values[count:])
            if b.ranks == 1:
                return b.call(prefix.associative_scan, mine, extra, key)
            return b.call(prefix.split_associative_scan, mine, extra, key, want.layout.shards, b.rank, b.group)

        return Recipe(want, tuple((x, want if i < count else V) for i, x in enumerate(operands(node))), emit)

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        count = len(node.args[0])  # type: ignore[arg-type]
        return b.call(prefix.associative_scan, list(values[:count]), list(values[count:]), node.args[2])


RULES: dict[object, Rule] = {
    aten.cumsum: Scan(prefix.cumsum),
    aten.cumprod: Scan(prefix.cumprod),
    aten.logcumsumexp: Scan(prefix.logcumsumexp, typed=False),
    torch.ops.asp.associative_scan: AssociativeScan(),
}
