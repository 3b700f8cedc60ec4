"""How an operator's output dimensions follow from its operands' dimensions.

A relation answers two questions about one node: where does a split of operand i go (`forward`), and how
must the operands be split for the output to be split so (`backward`)? From these two the compiler derives
both what an operator produces and how a slice is hoisted above it. `origin` is the weaker question
"which dimension of operand i lies along this output dimension", for axes that must stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx

from .placement import Shard

aten = torch.ops.aten


@dataclass(frozen=True)
class Summed:
    """The dimension is summed; operands that share a label are contracted with each other."""

    label: int


Link = int | Summed | None  # output dimension, summed, or must be whole


class Relation(Protocol):
    def forward(self, i: int, s: Shard) -> Shard | Summed | None: ...

    def backward(self, s: Shard) -> list[Shard | None] | None: ...

    def origin(self, i: int, out_dim: int) -> int | None: ...


@dataclass(frozen=True)
class Dims:
    """Dimension d of operand i becomes output dimension `links[i][d]`.

    `along[i][d]` is the output dimension that a whole dimension d nevertheless lies along. `free` output
    dimensions need no operand: their size is a literal argument.
    """

    links: tuple[tuple[Link, ...], ...]
    along: tuple[tuple[int | None, ...], ...] = ()
    free: frozenset[int] = frozenset()

    def forward(self, i: int, s: Shard) -> Shard | Summed | None:
        link = self.links[i][s.dim]
        return s.at(link) if isinstance(link, int) else link

    def backward(self, s: Shard) -> list[Shard | None] | None:
        back = [next((s.at(d) for d, link in enumerate(row) if link == s.dim), None) for row in self.links]
        return back if any(back) or s.dim in self.free else None

    def origin(self, i: int, out_dim: int) -> int | None:
        for d, link in enumerate(self.links[i]):
            if link == out_dim:
                return d
        if self.along:
            for d, link in enumerate(self.along[i]):
                if link == out_dim:
                    return d
        return None


@dataclass(frozen=True)
class Reshape:
    """One operand whose elements keep their order."""

    source: tuple[int, ...]
    target: tuple[int, ...]

    def forward(self, i: int, s: Shard) -> Shard | None:
        return reshaped(self.source, self.target, s) if i == 0 else None

    def backward(self, s: Shard) -> list[Shard | None] | None:
        back = reshaped(self.target, self.source, s)
        return None if back is None else [back]

    def origin(self, i: int, out_dim: int) -> int | None:
        before, after = math.prod(self.target[:out_dim]), math.prod(self.target[out_dim + 1 :])
        for d, size in enumerate(self.source):
            if size == self.target[out_dim] and math.prod(self.source[:d]) == before and math.prod(self.source[d + 1 :]) == after:
                return d
        return None


def reshaped(source: Sequence[int], target: Sequence[int], s: Shard) -> Shard | None:
    """The split of a reshape's result, or None where the sequence itself would be cut in two factors."""
    before = math.prod(source[: s.dim]) * s.outer  # elements are indexed [before, sequence, after]
    after = s.inner * math.prod(source[s.dim + 1 :])
    for d, size in enumerate(target):
        left, right = math.prod(target[:d]), math.prod(target[d + 1 :])
        if left and right and before % left == 0 and after % right == 0:
            outer, inner = before // left, after // right
            if size == outer * s.layout.length * inner:
                return Shard(d, s.layout, outer, inner)
    return None


def shape(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a node's value (of its first output, where it has several)."""
    value = node.meta["val"]
    return tuple((value[0] if isinstance(value, (tuple, list)) else value).shape)


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensors a node takes, in order, repeated where one is taken twice."""
    found: list[fx.Node] = []

    def visit(value: object) -> None:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    visit(node.args)
    visit(node.kwargs)
    return found


def is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in _FREE)


_FREE = {aten.reshape.default, aten._unsafe_view.default, aten.contiguous.default, aten.detach.default, aten.alias.default}


def behind_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node) and operands(node):
        node = operands(node)[0]
    return node


def operand_shape(node: fx.Node, i: int) -> tuple[int, ...]:
    return shape(operands(node)[i])


def broadcast(shapes: Sequence[Sequence[int]], out: Sequence[int]) -> Dims:
    """Operands aligned at the right; a size-1 dimension is stretched and links to nothing."""
    links = []
    for operand in shapes:
        lead = len(out) - len(operand)
        links.append(tuple(d + lead if size == out[d + lead] else None for d, size in enumerate(operand)))
    return Dims(tuple(links))
