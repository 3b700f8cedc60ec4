"""Scans along the sequence: ranks scan what they hold and share one total for each run of it.

Where a rank holds nothing of the sequence (a prefix of it, say) the value is gathered: whatever goes into the rank's part of an
exchange is a constant to a compiler, which would move that exchange from the backward to the forward on this rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...kernels import prefix
from ..placement import Placement, Shard, V
from ..relation import Dims, operands, shape
from .along import along, named
from .base import Builder, Recipe, Rule, argument, dims_of, parts
from .sequence import Cut

aten = torch.ops.aten


def _exchanged(b: Builder, target: Callable[..., Any], *args: Any) -> fx.Node:
    """Totals are saved where a checkpoint recomputes: else ranks that need them would exchange again, and the first would not."""
    node = b.call(target, *args)
    if "recompute" in node.meta:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return node


@dataclass(frozen=True)
class Scan(Cut):
    """cumsum, cumprod, logcumsumexp along the sequence. `kind` is a name in `prefix.KINDS`."""

    kind: str

    def relation(self, node: fx.Node) -> Dims:
        return along(named())(node)

    def changed(self, node: fx.Node) -> set[int]:
        return set(dims_of(argument(node, "dim"), len(shape(node))))

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        dtype, shards = node.meta["val"].dtype, s.layout.shards
        if not all(shards) or (self.kind == "logcumsumexp" and dtype.is_complex):
            return None

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            if b.ranks == 1:
                return b.run(node, values)
            totals = _exchanged(b, prefix.totals, values[0], s.dim, self.kind, dtype, shards, b.rank, b.group)
            return b.call(prefix.scanned, values[0], totals, s.dim, self.kind, dtype, shards, b.rank)

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
        shards = want.layout.shards
        if want.dim != 0 or want.merged or not all(shards):
            return None
        count, key = len(node.args[0]), node.args[2]  # type: ignore[arg-type]

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            xs, extra = list(values[:count]), list(values[count:])
            if b.ranks == 1:
                return b.call(prefix.associative_scan, xs, extra, key)
            runs = b.call(prefix.scan_runs, xs, extra, key, shards, b.rank)
            totals = _exchanged(b, prefix.associative_totals, runs, shards, b.rank, b.group)
            return b.call(prefix.behind, runs, totals, extra, key, shards, b.rank)

        return Recipe(want, tuple((x, want if i < count else V) for i, x in enumerate(operands(node))), emit)

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        count = len(node.args[0])  # type: ignore[arg-type]
        return b.call(prefix.associative_scan, list(values[:count]), list(values[count:]), node.args[2])


RULES: dict[object, Rule] = {
    aten.cumsum: Scan("cumsum"),
    aten.cumprod: Scan("cumprod"),
    aten.logcumsumexp: Scan("logcumsumexp"),
    torch.ops.asp.associative_scan: AssociativeScan(),
}
