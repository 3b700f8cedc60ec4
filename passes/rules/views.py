"""Operators that only move elements: reshapes, permutations, expansions, constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..placement import Placement, Shard
from ..relation import Dims, Reshape, broadcast, operand_shape, operands, shape
from .base import Builder, Recipe, Related, Rule, Sized, argument

aten = torch.ops.aten


def reshape(node: fx.Node) -> Reshape:
    return Reshape(operand_shape(node, 0), shape(node))


@dataclass(frozen=True)
class ReshapeTo(Related):
    """Any reshape, emitted as one to the local shape (never a view: a local cut may not be contiguous)."""

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        if not b.split(node, out) and node.target is not aten.view.default:
            return b.run(node, values)
        return b.call(aten.reshape.default, values[0], b.sizes(node, out))


def permuted(order: Callable[[fx.Node, int], Sequence[int]]) -> Callable[[fx.Node], Dims]:
    """Relation of a permutation; `order(node, rank)[d]` is the input dimension that becomes output d."""

    def relate(node: fx.Node) -> Dims:
        rank = len(shape(node))
        source = [d % rank if rank else 0 for d in order(node, rank)]
        return Dims((tuple(source.index(d) for d in range(rank)),))

    return relate


def _transpose(node: fx.Node, rank: int) -> list[int]:
    order = list(range(rank))
    if rank:
        a, b = node.args[1] % rank, node.args[2] % rank  # type: ignore[operator]
        order[a], order[b] = order[b], order[a]
    return order


def _movedim(node: fx.Node, rank: int) -> list[int]:
    source, target = node.args[1], node.args[2]
    source = [source] if isinstance(source, int) else list(source)  # type: ignore[arg-type]
    target = [target] if isinstance(target, int) else list(target)  # type: ignore[arg-type]
    placed = {t % rank: s % rank for s, t in zip(source, target, strict=True)}  # type: ignore[operator]
    rest = iter(d for d in range(rank) if d not in placed.values())
    return [placed[d] if d in placed else next(rest) for d in range(rank)]


def expand(node: fx.Node) -> Dims:
    relation = broadcast([operand_shape(node, 0)], shape(node))
    linked = {link for link in relation.links[0] if link is not None}
    return Dims(relation.links, free=frozenset(set(range(len(shape(node)))) - linked))


def repeat(node: fx.Node) -> Dims:
    lead = len(shape(node)) - len(operand_shape(node, 0))
    times: Sequence[int] = node.args[1]  # type: ignore[assignment]
    return Dims((tuple(d + lead if times[d + lead] == 1 else None for d in range(len(operand_shape(node, 0)))),))


def stack(node: fx.Node) -> Dims:
    rank = len(shape(node))
    dim = argument(node, "dim", 0) % rank
    row = tuple(d if d < dim else d + 1 for d in range(rank - 1))
    return Dims((row,) * len(operands(node)))


def real_pairs(node: fx.Node) -> Dims:
    """view_as_complex and view_as_real: a last dimension of two comes or goes."""
    rank = min(len(shape(node)), len(operand_shape(node, 0)))
    return Dims(((*range(rank), None)[: len(operand_shape(node, 0))],))


def constant(node: fx.Node) -> Dims:
    """A value with no operands, equal everywhere along every dimension."""
    return Dims((), free=frozenset(range(len(shape(node)))))


@dataclass(frozen=True)
class GetItem(Related):
    """One of several results; it can be split if its parent can."""

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        return super().version(node, ins[0]) if isinstance(ins[0], Shard) else super().native(node, ins)

    def linear(self, node: fx.Node) -> bool:
        from . import rule_of

        known = rule_of(operands(node)[0])
        return known is None or known.linear(operands(node)[0])

    def version(self, node: fx.Node, want: Shard) -> Recipe | None:
        from . import rule_of

        parent = operands(node)[0]
        known = rule_of(parent)
        return super().version(node, want) if known is not None and known.version(parent, want) is not None else None


def same(node: fx.Node) -> Dims:
    """Result dimension d is dimension d of the one operand."""
    return Dims((tuple(range(len(shape(node)))),))


RESHAPES = [aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.unsqueeze, aten.squeeze]

RULES: dict[object, Rule] = {
    **{op: ReshapeTo(reshape) for op in RESHAPES},
    aten.view.dtype: Related(same),
    aten.transpose: Related(permuted(_transpose)),
    aten.permute: Related(permuted(lambda node, rank: node.args[1])),  # type: ignore[arg-type, return-value]
    aten.movedim: Related(permuted(_movedim)),
    aten.t: Related(permuted(lambda node, rank: range(rank)[::-1])),
    aten.numpy_T: Related(permuted(lambda node, rank: range(rank)[::-1])),
    aten.expand: Sized(expand),
    aten.repeat: Related(repeat),
    aten.stack: Related(stack),
    aten.view_as_complex: Related(real_pairs),
    aten.view_as_real: Related(real_pairs),
    aten.zeros: Sized(constant, position=0),
    aten.ones: Sized(constant, position=0),
    aten.empty: Sized(constant, position=0),
    aten.full: Sized(constant, position=0),
    "getitem": GetItem(same),
}
