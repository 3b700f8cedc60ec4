"""What a rank does beside its attention sites, read off the typed graph: work, memory traffic, what backward needs, by layer.

It is an estimate, for totals and for the choice of what to save: FLOP of products are exact, traffic takes each other
operator to read its operands and write its result once. Backward needs what products and sites read, and what operators that are
not linear read, unless that follows element by element from something it needs anyway.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from ..cost_model.plan import numbered
from ..cost_model.problem import Exchange, Layer
from .capture import Captured
from .detect import Region, module_path
from .facts import Facts, is_float
from .place import Types
from .placement import Partial, Placement, Shard
from .recurrence import Recurrent
from .relation import operands, shape
from .rules import pointwise, rule_of
from .rules.base import never
from .rules.convolution import Convolution

aten = torch.ops.aten
FUSED = 4  # operators that a compiled kernel holds, so that only their first inputs and last results meet memory (assumed)


def layer_of(node: fx.Node) -> str:
    """The part of the model a node belongs to: the path of its module up to the first number."""
    return numbered(module_path(node))


def units(captured: Captured, facts: Facts) -> dict[fx.Node, object]:
    """What is gathered together where ranks hold parameters in parts: those of a layer, and those used between two layers.

    Parameters in the order of their first use; one that several layers use belongs to the first.
    """
    position = {node: i for i, node in enumerate(captured.module.graph.nodes)}
    first = {n: min(n.users, key=lambda u: position[u]) for n, i in facts.inputs.items() if i.kind == "parameter" and n.users}
    found: dict[fx.Node, object] = {}
    last = ""
    for node in sorted(first, key=lambda n: position[first[n]]):
        layer = layer_of(first[node])
        last = layer or last
        found[node] = (layer, last)
    return found


@dataclass
class _Tally:
    """Of one layer, as `Layer` has it; and what its nodes and its sites need of backward."""

    flop: float = 0.0
    repeated: float = 0.0
    traffic: float = 0.0
    saved: float = 0.0
    entering: float = 0.0
    around: float = 0.0
    checkpointed: bool = False
    needed: list[fx.Node] = field(default_factory=list)
    by_sites: list[fx.Node] = field(default_factory=list)


def layers(
    captured: Captured,
    facts: Facts,
    types: Types,
    sites: Sequence[Region | Recurrent],
    compiler: str,
    tiled: Collection[fx.Node] = (),
) -> tuple[tuple[Layer, ...], dict[fx.Node, float]]:
    """One for each part of the model, in order, with what one rank of `facts.ranks` does in it; and bytes of what is saved by the
    first node that needs it.

    `tiled`: nodes that are computed by tiles, and once more in backward; what only they read is never whole.
    """
    hidden = {n for n in tiled if all(u in tiled for u in n.users)}
    within = inside(sites)
    found: dict[str, _Tally] = {}
    by: dict[fx.Node, float] = {}
    products: dict[fx.Node, float] = {}
    kept: set[fx.Node] = set()
    entered: set[fx.Node] = set()  # values that a layer reads of what is before it
    moved: set[tuple[fx.Node, Placement]] = set()
    fused = FUSED if compiler == "inductor" else 1
    for node in captured.module.graph.nodes:
        if node.op != "call_function" or node not in types.recipes or node in types.lazy or not is_float(node):
            continue
        name = layer_of(node)
        of = found.setdefault(name, _Tally())
        of.checkpointed |= "recompute" in node.meta
        product = product_flop(node)
        if node not in within:
            products[node] = product if not _split(types, node) else product / facts.ranks
            of.flop += products[node]
            of.repeated += products[node] if node in tiled else 0.0
            if not product and not is_view(node) and types.recipes[node].emit is not never:
                read = sum(local_bytes(types, facts, x) for x in operands(node) if x in facts.from_data)
                of.traffic += (read + local_bytes(types, facts, node)) / fused
        for x, want in types.recipes[node].demands if name else ():
            source = behind_views(x)
            if source not in entered and layer_of(source) != name and x in facts.from_data and x in facts.differentiable:
                of.entering += _bytes(facts, source, types.of(source) if isinstance(types.of(source), Shard) else want)
                entered.add(source)
        for exchange in _exchanged(node, types, facts):
            of.around += local_bytes(types, facts, exchange[0]) if exchange not in moved else 0.0
            moved.add(exchange)
        for source in _needed(node, facts, kept, bool(product) or node in within or node.target in LOSSES):
            if source not in kept and source not in within and source not in hidden:
                size = local_bytes(types, facts, source) if node not in within else 0.0
                of.saved += size
                by[node] = by.get(node, 0.0) + size
            kept.add(source)
            if source not in hidden:
                (of.by_sites if node in within else of.needed).append(source)
    read_by_sites = site_operands(sites, facts)
    made = []
    for name, of in found.items():
        all_of_it = _again(name, of.needed + of.by_sites, within)
        but_operands = _again(name, of.needed, within | read_by_sites.keys())
        most, least = (sum(products.get(n, 0.0) for n in each) for each in (all_of_it, but_operands))
        layer = Layer(name, of.flop, of.traffic, of.saved, of.entering, of.around, of.checkpointed)
        made.append(replace(layer, repeated=of.repeated, unread=of.flop - most, projections=most - least))
    return tuple(made), by


def _exchanged(node: fx.Node, types: Types, facts: Facts) -> Iterator[tuple[fx.Node, Placement]]:
    """What other ranks give a node beside sites, and this rank with it: positions around its own, a sequence in another order."""
    recipe = types.recipes[node]
    for x, want in recipe.demands if facts.ranks > 1 else ():
        have = types.of(x)
        if not (isinstance(want, Shard) and isinstance(have, Shard) and x in facts.differentiable and x in facts.from_data):
            continue
        if have.layout.shards != want.layout.shards or isinstance(rule_of(node), Convolution):
            yield x, want


def _again(name: str, needed: Iterable[fx.Node], found: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes of a layer that backward computes again for what it needs, from what it finds and from what other layers read."""
    again: set[fx.Node] = set()
    ahead = list(needed)
    while ahead:
        node = ahead.pop()
        if node in again or node in found or node.op != "call_function" or layer_of(node) != name:
            continue
        if all(user.op == "output" or layer_of(user) == name for user in node.users):
            again.add(node)
            ahead += operands(node)
    return again


def site_operands(sites: Iterable[Region | Recurrent], facts: Facts) -> dict[fx.Node, bool]:
    """What sites read that a batch and a gradient go through, before anything is exchanged; and whether it is part of something
    larger, which would have to be kept whole."""
    whole: dict[fx.Node, dict[fx.Node, None]] = {}
    for site in sites:
        for x in [x for x, _ in site.leaves] if isinstance(site, Region) else operands(site.node):
            if is_float(x) and x in facts.from_data and x in facts.differentiable:
                whole.setdefault(_storage(x), {})[x] = None
    found = {}
    for base, parts in whole.items():
        part = sum(_elements(x) for x in parts) < _elements(base)
        found.update({(x if part else behind_views(x)): part for x in parts})
    return found


def _storage(node: fx.Node) -> fx.Node:
    """The value whose memory a view shares; one of several results of a split too."""
    while (base := behind_views(node)).target is operator.getitem and operands(base)[0].target in _SPLITS:
        node = operands(operands(base)[0])[0]
    return base


def _elements(node: fx.Node) -> int:
    return math.prod(shape(node))


_SPLITS = {
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
    aten.tensor_split.sections, aten.tensor_split.indices,
}  # fmt: skip


def inside(sites: Iterable[Region | Recurrent]) -> set[fx.Node]:
    """The nodes that sites are made of."""
    found = {n for site in sites if isinstance(site, Region) for n, _ in site.interior}
    return found | {site.closing if isinstance(site, Region) else site.node for site in sites}


def _needed(node: fx.Node, facts: Facts, kept: set[fx.Node], materialized: bool) -> list[fx.Node]:
    """Values that the gradient of a node reads, of those that a batch and a gradient go through. materialized: as they are."""
    xs = [x for x in operands(node) if x in facts.differentiable]
    data = [x for x in xs if x in facts.from_data]
    if materialized:
        return [behind_views(x) for x in data]
    packet = getattr(node.target, "overloadpacket", None)
    if is_view(node) or packet in _LINEAR or (packet in _BILINEAR and len(xs) < 2):
        return []
    return [source for x in data if not _follows(source := _behind(x, facts), facts, kept)]


def _behind(node: fx.Node, facts: Facts) -> fx.Node:
    """What a value follows from element by element, where that is one value."""
    while node.op == "call_function" and (is_view(node) or _elementwise(node)):
        xs = [x for x in operands(node) if x in facts.from_data and is_float(x)]
        if len(xs) != 1:
            break
        node = xs[0]
    return node


def _follows(node: fx.Node, facts: Facts, kept: set[fx.Node], depth: int = 4) -> bool:
    """Whether a value follows element by element from values that are kept."""
    if node in kept:
        return True
    xs = [x for x in operands(node) if x in facts.from_data and is_float(x)] if _elementwise(node) and depth else []
    return bool(xs) and all(_follows(_behind(x, facts), facts, kept, depth - 1) for x in xs)


def _elementwise(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in pointwise.RULES


_BILINEAR = {aten.mul, aten.div}
_LINEAR = {
    aten.add, aten.sub, aten.neg, aten.sum, aten.mean, aten.cat, aten.stack, aten._to_copy, aten.to, aten.clone,
    aten.index_select, aten.embedding, aten.pad, aten.constant_pad_nd, aten.roll, aten.flip,
    aten.slice_scatter, aten.select_scatter, aten.where, aten.masked_fill,
    aten.dropout,  # its mask is drawn again
}  # fmt: skip


def exchanges(captured: Captured, facts: Facts, types: Types, world: int, zero: bool) -> tuple[Exchange, ...]:
    """Gradients of parameters summed over all ranks, or parameters in parts gathered forward and backward and their gradients
    reduce-scattered; and what is gathered for operators without a rule, there and back."""
    gradients = sum(n.meta["val"].nbytes for n, item in facts.inputs.items() if item.requires_grad)
    found = []
    if world > 1 and zero:
        held = unit_bytes(captured, facts)
        found.append(Exchange("all_gather", 2 * len(held), 2 * (world - 1) / world * sum(held), everyone=True))
        if gradients:
            found.append(Exchange("reduce_scatter", len(held), (world - 1) / world * gradients, everyone=True))
    elif world > 1 and gradients:
        found.append(Exchange("all_reduce", max(1, gradients >> 25), 2 * (world - 1) / world * gradients))
    if facts.ranks > 1 and types.gathered:
        found.append(Exchange("all_gather", len(types.gathered), 2.0 * sum(g.bytes for g in types.gathered)))
    return tuple(found)


def unit_bytes(captured: Captured, facts: Facts) -> list[float]:
    """Bytes of the parameters of each unit."""
    found: dict[object, float] = {}
    for node, unit in units(captured, facts).items():
        found[unit] = found.get(unit, 0.0) + node.meta["val"].nbytes
    return list(found.values())


def parameter_bytes(facts: Facts) -> tuple[float, float]:
    """Bytes of parameters and buffers with a gradient, and without."""
    trained = frozen = 0.0
    for node, item in facts.inputs.items():
        if item.kind != "data":
            size = node.meta["val"].nbytes
            trained, frozen = (trained + size, frozen) if item.requires_grad else (trained, frozen + size)
    return trained, frozen


def product_flop(node: fx.Node) -> float:
    """Multiplications and additions of a matrix product or convolution; 0 for everything else."""
    count = _PRODUCTS.get(node.target)
    return float(count(node)) if count is not None else 0.0


def _out(node: fx.Node) -> int:
    return math.prod(shape(node))


def _product(left: int) -> Callable[[fx.Node], float]:
    """Of a product whose left side is that operand."""
    return lambda node: 2.0 * _out(node) * shape(operands(node)[left])[-1]


def _convolved(node: fx.Node) -> float:
    weight = shape(operands(node)[1])
    return 2.0 * _out(node) * math.prod(weight[1:])


def _einsum(node: fx.Node) -> float:
    terms, _ = str(node.args[0]).replace(" ", "").split("->")
    sizes = {
        label: n
        for term, x in zip(terms.split(","), operands(node), strict=False)
        for label, n in zip(term, shape(x), strict=False)
    }
    return 2.0 * math.prod(sizes.values())


LOSSES = {aten.cross_entropy_loss.default, aten._log_softmax.default, aten.log_softmax.int}
_PRODUCTS = {
    **dict.fromkeys((aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default), _product(0)),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _product(1)),
    aten.einsum.default: _einsum,
    aten.conv1d.default: _convolved,
    aten.conv1d.padding: _convolved,
    aten.conv2d.default: _convolved,
    aten.convolution.default: _convolved,
}
if hasattr(aten, "_grouped_mm"):
    _PRODUCTS[aten._grouped_mm.default] = _product(0)


def _split(types: Types, node: fx.Node) -> bool:
    return isinstance(types.of(node), (Shard, Partial))


def local_bytes(types: Types, facts: Facts, node: fx.Node) -> float:
    return _bytes(facts, node, types.of(node) if node in types.recipes else None)


def _bytes(facts: Facts, node: fx.Node, placement: Placement | None) -> float:
    value = node.meta.get("val")
    values: Sequence[object] = value if isinstance(value, (tuple, list)) else (value,)
    whole = sum(v.nbytes for v in values if isinstance(v, Tensor))
    return whole / facts.ranks if isinstance(placement, Shard) else float(whole)


def is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in _FREE)


_FREE = {aten.reshape.default, aten._unsafe_view.default, aten.contiguous.default, aten.detach.default, aten.alias.default}


def behind_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node) and operands(node):
        node = operands(node)[0]
    return node
