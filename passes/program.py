"""A region as a program for a block of rows, or of rows and columns.

`ProgramBuilder` is the second thing rules can emit into (the first is the rank's local graph): the same
`emit` rows, but sizes along rows are the block's, along heads the rank's, along columns what the block sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..kernels import attend, blocks
from .detect import SDPA, Axes, Region, Use
from .form import Form
from .place import rule
from .relation import operands, shape
from .rules.base import argument, rerun
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

    def evenly(self, groups: int) -> bool:
        """Whether as many of them read each key/value head at hand: whole groups of query heads, or some of one group."""
        whole, one = self.first % groups == self.last % groups == 0, (self.last - 1) // groups == self.first // groups
        return self.count > 0 and (whole or one)


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
        return rerun(self, node, values)

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

    def of_batch(self, what: Any) -> fx.Node:
        raise AssertionError("what a batch says is for whole regions, not inside one")

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

    def tile(self, form: Form, causal: bool) -> tuple[fx.Graph, fx.Graph | None]:
        """Two graphs over the same leaves: ((scores, values), keep) of a tile; and for scaled_dot_product_attention
        ((q, k, v), mask), where query heads may share key/value heads.
        """
        node, region = self.region.closing, self.region
        me = (node, region.axes)
        ends = [form.values, form.scores] if form.scores else [region.reads[(me, i)] for i in range(len(operands(node)))]
        needed = _ancestors(region, ends)
        for use in region.leaves:
            if use in needed:
                self.values[use] = self._leaf(use, use[1])
        for use in region.interior:
            if use in needed:
                values = [self._whole(region.reads[(use, i)]) for i in range(len(operands(use[0])))]
                self.values[use] = rule(use[0]).emit(self, use[0], use[1], values)  # type: ignore[arg-type]
        values, kernel = self._averaged(form), None
        if form.scores:
            scores = self._whole(form.scores)
        else:
            mask = self._whole(region.reads[(me, 3)]) if len(operands(node)) == 4 else None
            if causal:
                mask = self.call(attend.with_causal, mask, self.positions("row"), self.positions("column"))
            q, k = (self._grouped(region.reads[(me, i)]) for i in (0, 1))
            scores = self.call(blocks.scores, q, k, mask, argument(node, "scale"))
            taken = self._shared([region.reads[(me, i)] for i in range(3)])
            kernel = fx.Graph()
            copied: dict[fx.Node, fx.Node] = {}
            kernel.graph_copy(self.graph, copied)
            kernel.output((tuple(copied[x] for x in taken), None if mask is None else copied[mask]))
            kernel.eliminate_dead_code()
        self.graph.output(((scores, values), self._kept(form, scores)))
        return self.graph, kernel

    def _shared(self, qkv: Sequence[Use]) -> list[fx.Node]:
        """Queries, and keys and values with their own heads where as many of the program's query heads read each."""
        sources = [self.region.repeated.get(use, use) for use in qkv[1:]]
        groups = {self.region.groups.get(use, 1) for use in sources}
        aligned = len(groups) == 1 and all(map(self.heads.evenly, groups))
        kv = [self.values[use] for use in sources] if aligned else [self._grouped(use) for use in qkv[1:]]
        return [self._whole(qkv[0]), *kv]

    def _averaged(self, form: Form) -> fx.Node:
        values = self._grouped(form.values)
        if form.value_dims is None:
            return values
        order = [d for d in form.value_dims if d is not None]
        values = self.call(aten.permute.default, values, order)
        for at, d in enumerate(form.value_dims):
            if d is None:
                values = self.call(aten.unsqueeze.default, values, at)
        return values

    def _grouped(self, use: Use) -> fx.Node:
        """A value with one key/value head for each query head."""
        if use in self.region.groups and use not in self.region.repeated and use in self.values:
            return self.expanded(use)
        return self._whole(use)

    def _kept(self, form: Form, scores: fx.Node) -> fx.Node | None:
        node = form.dropout
        if node is None:
            return None
        if node.target is SDPA:
            p, size = argument(node, "dropout_p"), (*shape(node)[:-1], self.region.columns)
        else:
            p, size = argument(node, "p"), shape(node)
        where: list[Any] = [0] * len(size)
        where[-2:] = self.positions("row"), self.positions("column")
        if len(size) > 2:
            where[-3] = self.heads.first
        return self.call(blocks.kept, scores, float(p), self.seed(), site_salt(node), tuple(size), where)

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
        aligned = all(map(self.heads.evenly, groups))
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


def _ancestors(region: Region, ends: Sequence[Use]) -> set[Use]:
    """Leaves and interior values that some uses are computed from."""
    seen, stack = set[Use](), list(ends)
    while stack:
        use = stack.pop()
        use = region.repeated.get(use, use)
        if use in seen:
            continue
        seen.add(use)
        if use in region.interior:
            stack += [region.reads[(use, i)] for i in range(len(operands(use[0])))]
    return seen
