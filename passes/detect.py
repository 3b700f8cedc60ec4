"""Attention sites: Pairwise regions that close over their columns, however they were spelled.

A site is a product (or `scaled_dot_product_attention`) that sums the column axis of a value with rows and
columns. Walking up from it with three axes in hand (rows, columns, heads) gives the region: every operator whose
value carries both rows and columns, and its leaves, which carry at most one of the two.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from ..cost_model.plan import numbered
from ..kernels.layout import Layout
from .capture import Captured
from .facts import Facts, is_random
from .place import Types, rule
from .placement import Pairwise, Shard
from .relation import Relation, Summed, operands, shape
from .rules import rule_of
from .rules.base import argument

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
LARGEST_REGION = 400


@dataclass(frozen=True)
class Axes:
    """Which dimensions of a value are rows, columns and heads (None: it has none)."""

    row: int | None
    col: int | None
    head: int | None


Use = tuple[fx.Node, Axes]  # a value in one role; the same positions may serve as rows and as columns


@dataclass
class Region:
    """The operators of a site, in order, and what they read. `groups[use]` query heads read one head of that leaf."""

    closing: fx.Node
    axes: Axes
    row: Layout
    columns: int
    heads: int
    interior: dict[Use, None] = field(default_factory=dict)
    leaves: dict[Use, None] = field(default_factory=dict)
    groups: dict[Use, int] = field(default_factory=dict)
    repeated: dict[Use, Use] = field(default_factory=dict)
    reads: dict[tuple[Use, int], Use] = field(default_factory=dict)  # (operator, operand) -> the operand in its role

    @property
    def softmax(self) -> bool:
        return self.closing.target is SDPA or any(
            getattr(n.target, "overloadpacket", None) in (aten.softmax, aten._softmax, aten._safe_softmax)
            for n, _ in self.interior
        )


class _NotARegion(Exception):
    """The walk met something that does not work row by row; the generic placement stands."""


def wide(captured: Captured, types: Types) -> set[fx.Node]:
    """Values that still carry columns, or were reduced over them without closing the region."""
    found: set[fx.Node] = set()
    for node in captured.module.graph.nodes:
        if node not in types.recipes:
            continue
        out = types.of(node)
        above = any(x in found for x in operands(node))
        if isinstance(out, Pairwise) or (above and isinstance(out, Shard) and not _closes(node, types, found)):
            found.add(node)
    return found


def _closes(node: fx.Node, types: Types, found: set[fx.Node]) -> bool:
    """A product of a wide left operand that sums its columns with split values."""
    xs = operands(node)
    if node.target is SDPA:
        return True
    if len(xs) != 2 or xs[0] not in found or not isinstance(types.of(node), Shard):
        return False
    return _contracted(node, types) is not None


def _contracted(node: fx.Node, types: Types) -> tuple[int, int] | None:
    """The dimensions of the two operands of a product that are summed together, if it has such a pair."""
    known = rule_of(node)
    if known is None or node.target not in (aten.matmul.default, aten.bmm.default, aten.einsum.default):
        return None
    relation = known.relation(node)
    sums = []
    for i, x in enumerate(operands(node)):
        probe = Layout(1, ((),))
        sums.append({t.label: d for d in range(len(shape(x))) if isinstance(t := relation.forward(i, Shard(d, probe)), Summed)})
    common = sums[0].keys() & sums[1].keys()
    return (sums[0][min(common)], sums[1][min(common)]) if len(common) == 1 else None


def regions(captured: Captured, facts: Facts, types: Types) -> tuple[list[Region], dict[fx.Node, str]]:
    """Every site of the graph, and for products that look like one but are not, the reason."""
    carrying = wide(captured, types)
    found, refused = [], {}
    for node in captured.module.graph.nodes:
        if node.op != "call_function" or node not in types.recipes or not isinstance(types.of(node), Shard):
            continue
        if node.target is not SDPA and not _closes(node, types, carrying):
            continue
        try:
            region = _walk(node, facts, types, carrying)
        except _NotARegion as e:
            refused[node] = str(e)
            continue
        if region is not None:
            found.append(region)
    return found, refused


def _walk(node: fx.Node, facts: Facts, types: Types, carrying: set[fx.Node]) -> Region | None:
    out = types.of(node)
    assert isinstance(out, Shard)
    rank = len(shape(node))
    walker = _Walker(facts, types, carrying)
    if node.target is SDPA:
        if out.dim != rank - 2 or out.merged:
            return None  # split along batch or heads: local
        axes = Axes(rank - 2, None, rank - 3 if rank > 2 else None)
        region = Region(node, axes, out.layout, shape(operands(node)[1])[-2], shape(node)[rank - 3] if rank > 2 else 1)
        walker.attention(node, region)
        return region
    lhs, rhs = operands(node)
    contracted = _contracted(node, types)
    assert contracted is not None
    relation = rule(node).relation(node)
    row = walker.linked(relation, node, 0, out.dim)
    if row is None or out.merged:
        raise _NotARegion("its rows are merged with another dimension")
    heads = [
        d
        for d in range(len(shape(lhs)))
        if d not in (row, contracted[0]) and isinstance(relation.forward(0, Shard(d, out.layout)), Shard)
    ]
    head = max(heads, default=None)  # the batch dimension nearest to rows and columns
    head_out = None
    if head is not None:
        t = relation.forward(0, Shard(head, out.layout))
        head_out = t.dim if isinstance(t, Shard) else None
    region = Region(
        node,
        Axes(out.dim, None, head_out),
        out.layout,
        shape(lhs)[contracted[0]],
        shape(node)[head_out] if head_out is not None else 1,
    )
    right = walker.linked(relation, node, 1, head_out) if head_out is not None else None
    region.reads[((node, region.axes), 0)] = walker.visit(lhs, Axes(row, contracted[0], head), region)
    region.reads[((node, region.axes), 1)] = walker.visit(rhs, Axes(None, contracted[1], right), region)
    region.interior[(node, region.axes)] = None
    return region


@dataclass
class _Walker:
    facts: Facts
    types: Types
    carrying: set[fx.Node]

    def attention(self, node: fx.Node, region: Region) -> None:
        """The operands of scaled_dot_product_attention."""
        xs = operands(node)
        q, k, v = xs[:3]

        def head(x: fx.Node) -> int | None:
            return len(shape(x)) - 3 if len(shape(x)) > 2 and region.axes.head is not None else None

        me = (node, region.axes)
        region.reads[(me, 0)] = self.visit(q, Axes(len(shape(q)) - 2, None, head(q)), region)
        for i, x in enumerate((k, v), 1):
            use = region.reads[(me, i)] = self.visit(x, Axes(None, len(shape(x)) - 2, head(x)), region)
            if head(x) is not None and shape(x)[head(x)] != region.heads:  # type: ignore[index]
                region.groups[use] = region.heads // shape(x)[head(x)]  # type: ignore[index]
        if len(xs) == 4:
            mask = shape(xs[3])
            lead = len(mask) - 3
            axes = Axes(
                len(mask) - 2 if len(mask) > 1 and mask[-2] != 1 else None,
                len(mask) - 1 if mask[-1] != 1 else None,
                lead if lead >= 0 and mask[lead] != 1 and region.axes.head is not None else None,
            )
            region.reads[(me, 3)] = self.visit(xs[3], axes, region)
        region.interior[me] = None

    def linked(self, relation: Relation, node: fx.Node, i: int, out_dim: int) -> int | None:
        """The operand dimension that a split of `out_dim` needs split, unmerged; None if the operand has none."""
        back = relation.backward(Shard(out_dim, Layout(shape(node)[out_dim], ((),))))
        if back is None or back[i] is None:
            return None
        s = back[i]
        assert s is not None
        if s.merged:
            raise _NotARegion("a reshape merges its rows or heads with another dimension")
        return s.dim

    def visit(self, node: fx.Node, axes: Axes, region: Region) -> Use:
        use = (node, axes)
        if use in region.interior or use in region.leaves:
            return use
        if len(region.interior) > LARGEST_REGION:
            raise _NotARegion("it does not end: values reduced over columns flow on")
        if axes.row is None and axes.col is not None and self._peel(use, region):
            return use
        if self._inside(node, axes):
            self._enter(node, axes, region)
            region.interior[use] = None
        else:
            region.leaves[use] = None
        return use

    def _inside(self, node: fx.Node, axes: Axes) -> bool:
        if node.op != "call_function" or is_random(node):
            return False
        if axes.row is not None and node in self.carrying:
            return True
        both = axes.row is not None and axes.col is not None
        return both and (rule_of(node) is not None) and (node in self.types.lazy or node in self.carrying)

    def _enter(self, node: fx.Node, axes: Axes, region: Region) -> None:
        relation = rule(node).relation(node)
        assert axes.row is not None
        xs = operands(node)
        row = relation.backward(Shard(axes.row, Layout(shape(node)[axes.row], ((),))))
        if row is None:
            raise _NotARegion(f"{node.target} does not work row by row")
        for i, x in enumerate(xs):
            s = row[i]
            if s is not None and s.merged:
                raise _NotARegion("a reshape merges its rows with another dimension")
            row_in = s.dim if s is not None else None
            col_in = relation.origin(i, axes.col) if axes.col is not None else None
            if col_in is not None and shape(x)[col_in] == 1:
                col_in = None
            if col_in is None and x in self.carrying and row_in is not None:
                col_in = self._column(x, row_in)
            head_in = self.linked(relation, node, i, axes.head) if axes.head is not None else None
            if axes.head is not None and head_in is None and x in self.carrying and shape(node)[axes.head] > 1:
                raise _NotARegion("heads are mixed inside it")
            region.reads[((node, axes), i)] = self.visit(x, Axes(row_in, col_in, head_in), region)

    def _column(self, x: fx.Node, row: int) -> int | None:
        out = self.types.of(x)
        return out.col.dim if isinstance(out, Pairwise) and out.row.dim == row else None

    # Repeated key/value heads ------------------------------------------------------------------------

    def _peel(self, use: Use, region: Region) -> bool:
        """Take operators with one operand into the program when they stand over repeated key/value heads."""
        chain: list[Use] = []
        node, axes = use
        for _ in range(12):
            repeat = repeated_heads(node, axes)
            if repeat is not None:
                source, groups = repeat
                below = (source, axes)
                region.leaves[below] = None
                region.groups[below] = groups
                region.repeated[(node, axes)] = below
                read = (node, axes)
                for inner in reversed(chain):
                    region.interior[inner] = None
                    region.reads[(inner, 0)] = read
                    read = inner
                return True
            if node.op != "call_function" or len(operands(node)) != 1 or rule_of(node) is None or node.target is operator.getitem:
                return False
            chain.append((node, axes))
            relation = rule(node).relation(node)
            col = relation.origin(0, axes.col) if axes.col is not None else None
            try:
                head = self.linked(relation, node, 0, axes.head) if axes.head is not None else None
            except _NotARegion:
                return False
            if col is None or head is None:
                return False
            node, axes = operands(node)[0], Axes(None, col, head)
        return False


def repeated_heads(node: fx.Node, axes: Axes) -> tuple[fx.Node, int] | None:
    """(heads before repetition, repeats) if `node` repeats each head along its head dimension: repeat_kv, repeat_interleave."""
    if axes.head is None or node.op != "call_function":
        return None
    if node.target is aten.repeat_interleave.self_int and argument(node, "dim") == axes.head:
        return operands(node)[0], int(argument(node, "repeats"))
    if getattr(node.target, "overloadpacket", None) not in (aten.view, aten.reshape, aten._unsafe_view, aten.flatten):
        return None
    inner = operands(node)[0]
    while getattr(inner.target, "overloadpacket", None) in (aten.clone, aten.contiguous):
        inner = operands(inner)[0]
    if inner.target is not aten.expand.default:
        return None
    before, after, h = shape(operands(inner)[0]), shape(inner), axes.head
    merged = (*after[:h], after[h] * after[h + 1], *after[h + 2 :]) if len(after) == len(shape(node)) + 1 else ()
    if (
        merged != shape(node)
        or len(before) != len(after)
        or before[h + 1] != 1
        or before[:h] + before[h + 2 :] != after[:h] + after[h + 2 :]
    ):
        return None
    if before[h] != after[h]:
        return None
    single = operands(inner)[0]
    if single.target is aten.unsqueeze.default and argument(single, "dim") % len(before) == h + 1:
        return operands(single)[0], after[h + 1]
    return None


def module_path(node: fx.Node) -> str:
    """The dotted path of the module a node was recorded in, without wrapper names."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    for noise in ("L['self'].", "L['self']", "_modules['", "']"):
        path = path.replace(noise, "")
    return path or "attention"


def layer_of(node: fx.Node) -> str:
    """The part of the model a node belongs to: the path of its module up to the first number."""
    return numbered(module_path(node))


__all__ = ["Axes", "Region", "Use", "layer_of", "module_path", "regions"]
