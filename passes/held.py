"""What a rank holds beside what it keeps, read off the typed graph: gradients on their way through a layer.

Backward walks a layer from its last value to its first. A value's gradient exists from the first of its readers until its own
operands have theirs; that of a product waits for its weight's gradient, since the overlap pass lets an exchange go first. What
backward needs of the layer is taken to be there until the layer is done. In a region by tiles only a tile is wide.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..cost_model.plan import Layer
from . import needs, workload
from .capture import Captured
from .detect import Region, layer_of
from .facts import Facts, is_float
from .place import Types
from .recurrence import Recurrent
from .relation import is_view, operands, shape
from .tile import Wide

aten = torch.ops.aten


def layers(
    captured: Captured,
    facts: Facts,
    types: Types,
    sites: Sequence[Region | Recurrent],
    compiler: str,
    tiled: Sequence[tuple[Wide, int]] = (),
) -> tuple[Layer, ...]:
    """`workload.layers`, with what each holds. tiled: regions that are computed by tiles, and the positions of one.

    What is in no numbered part is taken to come after all others.
    """
    regions = {n: (region, rows) for region, rows in tiled for n in region.nodes}
    found, saved = workload.layers(captured, facts, types, sites, compiler, regions)
    parts: dict[str, list[fx.Node]] = {layer.name: [] for layer in found}
    for node in captured.module.graph.nodes:
        if node.op == "call_function" and node in types.recipes and node not in types.lazy:
            parts.setdefault(layer_of(node), []).append(node)
    inside = needs.inside(sites)
    ends = {site.closing if isinstance(site, Region) else site.node for site in sites}
    sums: dict[str, float] = {}
    for region, rows in tiled:
        name = layer_of(region.nodes[0])
        count = -(-max(region.layout.sizes) // rows)
        sums[name] = sums.get(name, 0.0) + 4 / 3 * count * _sums(region)  # read, added, written; a third of a layer's is forward
    made = []
    for layer in found:
        walk = _Backward(parts[layer.name], facts, types, inside, ends, regions, saved)
        walk.run()
        traffic = layer.traffic + sums.get(layer.name, 0.0)
        known = replace(layer, traffic=traffic, held=walk.widest, waiting=walk.at_sites, unfinished=_total(walk.waiting))
        made.append(replace(known, held_early=walk.widest_early, waiting_early=max(walk.at_sites_early, default=0.0)))
    return tuple(made)


def returned(captured: Captured, facts: Facts, types: Types) -> float:
    """Bytes of what the model returns, which its caller holds: logits, above all."""
    results = captured.module.graph.output_node().args[0][len(captured.mutated) :]
    given = {n for n in results if isinstance(n, fx.Node) and n.op == "call_function" and is_float(n)}
    return sum(workload.local_bytes(types, facts, n) for n in given)


Buffer = tuple[fx.Node, fx.Node, float]  # the nodes between which a gradient is made, and its bytes


@dataclass
class _Backward:
    """One layer. Most bytes of gradients at once, and when an attention's gradient begins: where products wait (`waiting`) for an
    exchange before their weights' gradients are made, and where none does, less what is no longer kept (`gone`)."""

    nodes: Sequence[fx.Node]
    facts: Facts
    types: Types
    inside: Collection[fx.Node]
    ends: Collection[fx.Node]
    regions: Mapping[fx.Node, tuple[Wide, int]]
    saved: Mapping[fx.Node, float]
    gradients: dict[fx.Node, Buffer] = field(default_factory=dict)
    waiting: set[Buffer] = field(default_factory=set)
    widest: float = 0.0
    at_sites: float = 0.0
    widest_early: float = 0.0
    at_sites_early: list[float] = field(default_factory=list)
    gone: float = 0.0

    def run(self) -> None:
        own = set(self.nodes)
        for node in self.nodes:  # of what others read
            if self._learns(node) and any(user not in own and self._counts(user) for user in node.users):
                self.gradients[node] = self._made(node, node)
        for node in reversed(self.nodes):
            if node in self.inside:
                if node in self.ends:  # its exchange hides the products that waited
                    self.at_sites = max(self.at_sites, self._now())
                    self.at_sites_early.append(_total({*self.gradients.values()}) - self.gone)
                    self.waiting.clear()
                self._cross(node, self.inside)
            elif node in self.regions:
                region, rows = self.regions[node]
                if node is region.nodes[-1]:
                    self._see(tile_bytes(region, rows))
                self._cross(node, region.nodes)
            elif node in self.gradients:
                self._pass(node)

    def _counts(self, user: fx.Node) -> bool:
        return user.op == "output" or self._learns(user)

    def _learns(self, x: fx.Node) -> bool:
        known = x.op == "call_function" and x in self.types.recipes and x not in self.types.lazy
        return known and is_float(x) and x in self.facts.differentiable and x in self.facts.from_data

    def _made(self, node: fx.Node, x: fx.Node) -> Buffer:
        return node, x, workload.local_bytes(self.types, self.facts, x)

    def _now(self) -> float:
        return _total({*self.gradients.values(), *self.waiting})

    def _pass(self, node: fx.Node) -> None:
        """From a value to its operands: that of a view or of a sum as it is."""
        own, extra = self.gradients.pop(node), 0.0
        passed = is_view(node) or getattr(node.target, "overloadpacket", None) is aten.add
        for x in filter(self._learns, operands(node)):
            made = self._made(node, x)
            if x in self.gradients:
                extra = made[2] if passed else 2 * made[2]  # what is there, perhaps another, and their sum
            elif passed and made[2] == own[2]:
                made = own
            self.gradients[x] = made
        if node.target in needs.LOSSES:
            extra = workload.local_bytes(self.types, self.facts, operands(node)[0])  # of the logarithms' and of the logits
        product = bool(workload.product_flop(node))
        self.gone += product * self.saved.get(node, 0.0)  # its weight's gradient comes first
        self._see(extra, own)
        self.gone += (not product) * self.saved.get(node, 0.0)
        if product:
            self.waiting.add(own)

    def _see(self, extra: float, *own: Buffer) -> None:
        early = {*own, *self.gradients.values()}
        self.widest = max(self.widest, _total(early | self.waiting) + extra)
        self.widest_early = max(self.widest_early, _total(early) + extra - self.gone)

    def _cross(self, node: fx.Node, within: Collection[fx.Node]) -> None:
        """What is one operator in the end: gradients inside are its own."""
        self.gradients.pop(node, None)
        for x in filter(self._learns, operands(node)):
            if x not in within:
                self.gradients.setdefault(x, self._made(node, x))


def _total(buffers: Collection[Buffer]) -> float:
    return sum(size for *_, size in buffers)


def tile_bytes(region: Wide, rows: int) -> float:
    """Of a tile of `rows` positions: its wide values and their gradients, those of a softmax twice; and the sums of weights'
    gradients, beside the gradients themselves."""
    share = min(rows, max(region.layout.sizes))
    return 2 * share * (region.bytes + region.loss * region.widest * _accumulator(region)) + _sums(region)


def _sums(region: Wide) -> float:
    return sum(float(_accumulator(region) * math.prod(shape(x))) for x in region.weights)


def _accumulator(region: Wide) -> int:
    return max(4, *(n.meta["val"].element_size() for n in region.results))


__all__ = ["layers", "returned", "tile_bytes"]
