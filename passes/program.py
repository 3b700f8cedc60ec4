"""A region as a program for a block of rows.

`ProgramBuilder` is the second thing rules can emit into (the first is the rank's local graph): the same
`emit` rows, but sizes along rows are the block's, along heads the rank's, along columns what the block sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..kernels import attend
from .detect import SDPA, Axes, Region, Use
from .place import rule
from .relation import operands, shape
from .rules.base import argument
from .rules.pointwise import site_salt

aten = torch.ops.aten


@dataclass(frozen=True)
class Heads:
    """The query heads [first, last) this program computes, of `total`."""

    first: int
    last: int
    total: int

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def whole(self) -> bool:
        return self.count == self.total


@dataclass
class ProgramBuilder:
    """Emits a region into a graph `run(rows, columns, *leaves)`. Positions and the seed come in as leaves."""

    region: Region
    heads: Heads
    trimmed: bool
    rank: int
    ranks: int
    group: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    leaves: list[tuple[Any, Axes]] = field(default_factory=list)
    values: dict[Use, fx.Node] = field(default_factory=dict)
    extra: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = self.graph.placeholder("rows")
        self.columns = self.graph.placeholder("columns")

    # What rules use -----------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def run(self, node: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
        taken = iter(values)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(taken))
        return self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def sizes(self, node: fx.Node, axes: Any) -> list[Any]:
        sizes: list[Any] = list(shape(node))
        if axes.row is not None:
            sizes[axes.row] = self.rows
        if axes.head is not None and not self.heads.whole and sizes[axes.head] == self.heads.total:
            sizes[axes.head] = self.heads.count
        if axes.col is not None and self.trimmed:
            sizes[axes.col] = self.columns
        return sizes

    def where(self, node: fx.Node, axes: Any) -> list[Any]:
        at: list[Any] = [0] * len(shape(node))
        if axes.row is not None:
            at[axes.row] = self.positions("row")
        if axes.head is not None:
            at[axes.head] = self.heads.first
        if axes.col is not None and self.trimmed:
            at[axes.col] = self.positions("column")
        return at

    def split(self, node: fx.Node, axes: Any) -> set[int]:
        dims = {axes.row} | ({axes.head} if not self.heads.whole else set()) | ({axes.col} if self.trimmed else set())
        return dims - {None}

    def seed(self) -> fx.Node:
        return self._extra("seed", Axes(None, None, None))

    # Leaves -------------------------------------------------------------------------------------------

    def positions(self, axis: str) -> fx.Node:
        """The global positions of the block's rows or columns, int64."""
        return self._extra(axis, Axes(0, None, None) if axis == "row" else Axes(None, 0, None))

    def _extra(self, name: str, axes: Axes) -> fx.Node:
        if name not in self.extra:
            self.extra[name] = self._leaf(name, axes)
        return self.extra[name]

    def _leaf(self, what: Any, axes: Axes) -> fx.Node:
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        assert last is not None
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"leaf_{len(self.leaves)}")
        self.leaves.append((what, axes))
        return node

    # The region ---------------------------------------------------------------------------------------

    def build(self, causal: bool) -> fx.Graph:
        for use in self.region.leaves:
            self.values[use] = self._leaf(use, use[1])
        result = None
        for use in self.region.interior:
            node, axes = use
            values = [self._value(x, use, i) for i, x in enumerate(operands(node))]
            if node.target is SDPA:
                result = self._attention(node, values, causal)
            else:
                result = rule(node).emit(self, node, axes, values)  # type: ignore[arg-type]
            self.values[use] = result
        self.graph.output(result)
        return self.graph

    def _value(self, x: fx.Node, user: Use, i: int) -> fx.Node:
        """The operand in the role in which the walk reached it from this user."""
        return self._whole(self.region.reads[(user, i)])

    def _whole(self, use: Use) -> fx.Node:
        """A value of the region; repeated key/value heads are repeated here, for this program's heads."""
        source = self.region.repeated.get(use)
        if source is None:
            return self.values[use]
        return self.expanded(source)

    def expanded(self, use: Use) -> fx.Node:
        """Key/value heads, one for each query head of the program."""
        groups, head = self.region.groups[use], use[1].head
        return self.call(
            attend.expand_heads, self.values[use], head, self.heads.first, self.heads.count, self.heads.first // groups, groups
        )

    def _attention(self, node: fx.Node, values: Sequence[fx.Node], causal: bool) -> fx.Node:
        region, mask = self.region, values[3] if len(values) == 4 else None
        q, k, v = values[:3]
        uses = [region.reads[((node, region.axes), i)] for i in (1, 2)]
        grouped = [u in region.groups and u not in region.repeated for u in uses]
        groups = {region.groups[u] for u, g in zip(uses, grouped, strict=True) if g}
        aligned = all(self.heads.first % g == 0 and self.heads.last % g == 0 for g in groups)
        if any(grouped) and not (aligned and all(grouped) and len(groups) == 1):
            k, v = (self.expanded(u) if g else x for x, u, g in zip((k, v), uses, grouped, strict=True))
            grouped = [False, False]
        rows, columns = (self.positions("row"), self.positions("column")) if causal else (None, None)
        dropout = argument(node, "dropout_p", 0.0) or 0.0
        if dropout:
            return self._dropped(node, (q, k, v), mask, (rows, columns), any(grouped), float(dropout))
        return self.call(attend.sdpa, q, k, v, mask, rows, columns, argument(node, "scale"), any(grouped))

    def _dropped(self, node: fx.Node, qkv: Sequence[fx.Node], mask: Any, positions: Any, grouped: bool, p: float) -> fx.Node:
        """Attention with dropout of the weights, drawn by (batch, head, row, column)."""
        weights_shape = (*shape(node)[:-1], self.region.columns)
        rank = len(weights_shape)
        where: list[Any] = [0] * rank
        where[rank - 2] = self.positions("row")
        if rank > 2:
            where[rank - 3] = self.heads.first
        return self.call(
            attend.sdpa_dropout,
            *qkv,
            mask,
            *positions,
            argument(node, "scale"),
            grouped,
            p,
            self.seed(),
            site_salt(node),
            weights_shape,
            where,
        )
