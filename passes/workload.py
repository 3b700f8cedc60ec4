"""What a rank does beside its attention sites, read off the typed graph: work, memory traffic, what it keeps for
backward, by layer.

It is an estimate, for totals and for the choice of what to save: FLOP of products are exact, traffic takes each other
operator to read its operands and write its result once. `needs` says what backward reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ..cost_model.problem import Exchange, Layer
from .capture import Captured
from .detect import Region, layer_of
from .facts import Facts, is_float
from .needs import LOSSES, again, inside, needed, site_operands
from .place import Types
from .placement import Partial, Placement, Shard
from .recurrence import Recurrent
from .relation import behind_views, is_view, operands, shape
from .rules import rule_of
from .rules.base import never
from .rules.convolution import Convolution

aten = torch.ops.aten
FUSED = 4  # operators that a compiled kernel holds, so that only their first inputs and last results meet memory (assumed)


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
                of.entering += min(local_bytes(types, facts, source), _bytes(facts, source, want))
                entered.add(source)
        for exchange in _exchanged(node, types, facts):
            of.around += local_bytes(types, facts, exchange[0]) if exchange not in moved else 0.0
            moved.add(exchange)
        for source in needed(node, facts, kept, bool(product) or node in within or node.target in LOSSES):
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
        all_of_it = again(name, of.needed + of.by_sites, within)
        but_operands = again(name, of.needed, within | read_by_sites.keys())
        most, least = (sum(products.get(n, 0.0) for n in each) for each in (all_of_it, but_operands))
        made.append(
            Layer(
                name, of.flop, of.traffic, of.saved, of.entering, of.around, of.checkpointed,
                repeated=of.repeated, unread=of.flop - most, projections=most - least,
            )
        )  # fmt: skip
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
