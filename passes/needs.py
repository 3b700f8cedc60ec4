"""What backward reads of the values of a typed graph, and what it computes again of a layer where it finds less.

It reads what products and sites read, and what operators that are not linear read, unless that follows element by element from
something it needs anyway.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable

import torch
from torch import fx

from .detect import Region, layer_of
from .facts import Facts, is_float
from .recurrence import Recurrent
from .relation import behind_views, is_view, operands, shape
from .rules import pointwise

aten = torch.ops.aten
LOSSES = {aten.cross_entropy_loss.default, aten._log_softmax.default, aten.log_softmax.int}


def needed(node: fx.Node, facts: Facts, kept: set[fx.Node], materialized: bool) -> list[fx.Node]:
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


# Computed again -----------------------------------------------------------------------------------


def again(name: str, read: Iterable[fx.Node], found: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes of a layer that backward computes again for what it reads, from what it finds and from what other layers read."""
    made: set[fx.Node] = set()
    ahead = list(read)
    while ahead:
        node = ahead.pop()
        if node in made or node in found or node.op != "call_function" or layer_of(node) != name:
            continue
        if all(user.op == "output" or layer_of(user) == name for user in node.users):
            made.add(node)
            ahead += operands(node)
    return made


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


__all__ = ["LOSSES", "again", "inside", "needed", "site_operands"]
