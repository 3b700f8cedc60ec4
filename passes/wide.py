"""Regions that are wide between narrow ends and go token by token: computed a tile of the rank's tokens at a time.

A product that widens what it reads (a language model's head, the first of a feed-forward block) starts a region. It takes in
every value as wide, whatever reads those, and what lies between; it ends where values are narrow again. Only operators on tokens
of the rank itself are taken in, so nothing inside a tile communicates, and ranks may have different numbers of tiles.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ..kernels import tiles
from ..kernels.layout import Layout
from .capture import Captured, insert, source_line
from .detect import Region
from .facts import Facts, is_random
from .place import Types
from .placement import Partial, Shard
from .recurrence import Recurrent
from .relation import is_view, operands, shape
from .rules.base import argument
from .tile import NotLocal, TileBuilder, Wide
from .workload import product_flop

aten = torch.ops.aten


def rows_of(asked: str | int, region: Wide) -> int:
    """Positions of a tile of a region; 0: it is not tiled.

    "auto": a loss in tiles of TILE_ELEMENTS at most, where one would not hold it; other regions in tiles no wider than their
    largest weight, where that makes several.
    """
    if isinstance(asked, int):
        return asked
    most = max(region.layout.sizes)
    largest = tiles.TILE_ELEMENTS if region.loss else max((math.prod(shape(x)) for x in region.weights), default=0)
    return max(1, largest // region.widest) if largest < region.widest * most else 0


def regions(
    captured: Captured, known: Facts, types: Types, sites: Iterable[Region | Recurrent], asked: str | int
) -> tuple[list[tuple[Wide, int]], dict[fx.Node, str]]:
    """Regions of a typed graph beside its sites that can be tiled, with the positions of a tile, and for losses that should
    be and cannot, by the product that starts them, why.
    """
    found: list[tuple[Wide, int]] = []
    refused: dict[fx.Node, str] = {}
    if asked == "none":
        return found, refused
    opaque = {n for site in sites if isinstance(site, Region) for n, _ in site.interior}
    opaque |= {site.closing if isinstance(site, Region) else site.node for site in sites}
    nodes = list(captured.module.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    for node in nodes:
        if node in opaque or not (width := _entered(node, types)):
            continue
        growth = _Growth(nodes, position, types, known, opaque, width)
        growth.grow(node)
        try:
            region = growth.region()
        except NotLocal as reason:
            whole = growth.loss and math.prod(shape(node)) >= growth.widest * growth.layout.length
            if whole and (isinstance(asked, int) or growth.widest * max(growth.layout.sizes) > tiles.TILE_ELEMENTS):
                refused[node] = str(reason)
            continue
        if rows := rows_of(asked, region):
            found.append((region, rows))
            opaque |= growth.inside
    return found, refused


def hoist_slices(graph: fx.Graph) -> None:
    """`head(x)[:, :-1]`, a loss's shift, becomes `head(x[:, :-1])`: then logits and labels have the same positions."""
    for node in list(graph.nodes):
        above = node.args[0] if node.target is aten.slice.Tensor else None
        chain: list[fx.Node] = []
        while isinstance(above, fx.Node) and len(above.users) == 1 and _passes_slices(above):
            chain.append(above)
            above = above.args[0] if above.target is not aten.linear.default else None
        last = len(shape(node)) - 1 if chain else 0
        if not chain or chain[-1].target is not aten.linear.default or argument(node, "dim", 0) % (last + 1) == last:
            continue
        head = chain[-1]
        with graph.inserting_before(head):
            head.update_arg(0, insert(node, aten.slice.Tensor, head.args[0], *node.args[1:], **node.kwargs))
        for each in chain:
            each.meta["val"] = each.meta["val"].new_empty(shape(node))
        node.replace_all_uses_with(chain[0])
        graph.erase_node(node)


def _passes_slices(node: fx.Node) -> bool:
    """A widening product, or an operator that leaves each element of its one operand in its place."""
    if node.target is aten.linear.default:
        return shape(node)[-1] > shape(operands(node)[0])[-1]
    one = len(operands(node)) == 1 and shape(node) == shape(operands(node)[0])
    return one and getattr(node.target, "overloadpacket", None) in _IN_PLACE


_IN_PLACE = {aten._to_copy, aten.clone, aten.contiguous, aten.alias, aten.slice, aten.mul, aten.div, aten.tanh}


def _per_position(node: fx.Node, s: Shard) -> int:
    return math.prod(shape(node)) // max(1, s.layout.length)


def _entered(node: fx.Node, types: Types) -> int:
    """Elements over a position of what enters a product that widens it; 0 for every other node."""
    if node not in types.recipes or not product_flop(node) or not isinstance(out := types.of(node), Shard):
        return 0
    width = max((_per_position(x, p) for x, p in types.recipes[node].demands if isinstance(p, Shard)), default=0)
    return width if _per_position(node, out) > width else 0


@dataclass
class _Growth:
    """One region, from the product that starts it. A value is wide if it has more than `width` elements over a position.

    From a product that widens a bottleneck (an adapter's, of rank 8) growth soon meets an attention, and ends there.
    """

    nodes: list[fx.Node]
    position: dict[fx.Node, int]
    types: Types
    facts: Facts
    opaque: set[fx.Node]
    width: int
    wide: set[fx.Node] = field(default_factory=set)
    inside: set[fx.Node] = field(default_factory=set)
    reason: str = ""
    layout: Layout = field(init=False)

    def grow(self, start: fx.Node) -> None:
        split = self.types.of(start)
        assert isinstance(split, Shard)
        self.layout = split.layout
        self._take([start])
        while not self.reason and (between := self._between()):
            self._take(between)

    @property
    def loss(self) -> bool:
        return any(getattr(n.target, "overloadpacket", None) in _LOSSES for n in self.inside)

    @property
    def widest(self) -> int:
        return max((self._elements(n) for n in self.wide), default=0)

    def _elements(self, node: fx.Node) -> int:
        return math.prod(shape(node)) // max(1, self.layout.length)

    def region(self) -> Wide:
        """Raises NotLocal."""
        if self.reason:
            raise NotLocal(self.reason)
        order = sorted(self.inside, key=self.position.__getitem__)
        results = tuple(n for n in order if any(u not in self.inside for u in n.users))
        if sum(self._elements(n) for n in results if isinstance(self.types.of(n), Shard)) >= self.widest:
            raise NotLocal("what it gives is as wide")  # queries, keys and values of one product
        builder = TileBuilder(self.facts, self.layout)
        read = builder.build(order, self.types, results)
        for x, placement in read:
            if self.position[x] > self.position[results[0]]:
                raise NotLocal(f"it reads {x}, which is computed after its first result")
            if isinstance(placement, Shard) and _per_position(x, placement) > self.width:
                raise NotLocal(f"it reads {x}, which is as wide")
        wide = [n for n in order if n in self.wide]
        return Wide(
            tuple(order),
            results,
            tuple(builder.along(n, self.types.of(n)) for n in results),
            self.layout,
            fx.GraphModule(torch.nn.Module(), builder.graph),
            tuple(builder.leaves),
            self.widest,
            sum(
                self._elements(n) * n.meta["val"].element_size()
                for n in wide
                if isinstance(n.meta["val"], Tensor) and not is_view(n)
            ),
            self.loss,
        )

    def _take(self, nodes: Iterable[fx.Node]) -> None:
        """Take in nodes, all wide values that they read, and whatever reads a wide one; the nearest first."""
        queue = deque(nodes)
        while queue:
            node = queue.popleft()
            if node in self.inside:
                continue
            if reason := self._refused(node):
                self.reason = self.reason or reason
                if node.op != "output":  # logits that are an output: is there a loss as well?
                    return
                continue
            self.inside.add(node)
            queue += [x for x in operands(node) if self._spreads(x)]
            if self._spreads(node):
                self.wide.add(node)
                queue += node.users

    def _spreads(self, node: fx.Node) -> bool:
        """Wide, or several results in one, of which none can leave the region alone."""
        out = self.types.of(node) if node in self.types.recipes else None
        if not isinstance(out, Shard):
            return False
        return isinstance(node.meta["val"], tuple | list) or _per_position(node, out) > self.width

    def _refused(self, node: fx.Node) -> str:
        """Why a node is no ATen operator on split values that a rank computes from its own tokens; "" if it is one."""
        if node.op == "output":
            return "it is an output of the model; outputs='loss' drops all but scalars"
        what = f"{node.target} at {source_line(node)}"
        target = node.target
        if node in self.opaque or not (target is operator.getitem or getattr(target, "namespace", "") == "aten"):
            return f"{what} is more than an operator on single tokens"
        if is_random(node) or not isinstance(self.types.of(node), Shard | Partial):
            return f"{what} needs the whole sequence"
        return ""

    def _between(self) -> list[fx.Node]:
        """Nodes outside that depend on the region and that it depends on."""
        span = sorted(map(self.position.__getitem__, self.inside))
        stretch = self.nodes[span[0] : span[-1] + 1]
        below = set(self.inside)
        for node in stretch:
            if node not in below and any(x in below for x in operands(node)):
                below.add(node)
        above = set(self.inside)
        for node in reversed(stretch):
            if node not in above and any(u in above for u in node.users):
                above.add(node)
        return [n for n in stretch if n in below and n in above and n not in self.inside]


_LOSSES = {aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd, aten.log_softmax, aten._log_softmax, aten.logsumexp}


__all__ = ["hoist_slices", "regions", "rows_of"]
