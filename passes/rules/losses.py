"""Losses: a mean over tokens is a partial sum over the global count of tokens that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..placement import P, Placement, R, Shard, V
from ..relation import Dims, broadcast, operands, shape
from .base import Builder, Recipe, Related, Rule, argument, parts

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def replaced(node: fx.Node, values: Sequence[object], **changes: object) -> tuple[list[object], dict[str, object]]:
    """The node's arguments with operands replaced in order and some schema arguments changed."""
    it = iter(values)
    args = [next(it) if isinstance(a, fx.Node) else a for a in node.args]
    kwargs = {k: next(it) if isinstance(v, fx.Node) else v for k, v in node.kwargs.items()}
    names = [spec.name for spec in node.target._schema.arguments]  # type: ignore[union-attr]
    for name, value in changes.items():
        at = names.index(name)
        if at < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    return args, kwargs


def _elementwise(node: fx.Node) -> Dims:
    xs = [shape(x) for x in operands(node)]
    return broadcast(xs, torch.broadcast_shapes(*xs))


@dataclass(frozen=True)
class Elementwise(Related):
    """mse, l1, huber, bce, ...: the reduction of an elementwise loss."""

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        reduction = argument(node, "reduction", MEAN)
        if reduction == NONE:
            return super().native(node, ins)
        relation, xs = self.relation(node), operands(node)
        out = next((t for i, p in enumerate(ins) for s in parts(p) if isinstance(t := relation.forward(i, s), Shard)), None)
        back = relation.backward(out) if out is not None else None
        if back is None:
            return None
        count = 1
        for size in torch.broadcast_shapes(*[shape(x) for x in xs]):
            count *= size

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            args, kwargs = replaced(node, values, reduction=SUM)
            total = b.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
            return b.call(aten.div.Tensor, total, count) if reduction == MEAN else total

        return Recipe(P, tuple((x, s or V) for x, s in zip(xs, back, strict=True)), emit)


def _classes(node: fx.Node) -> Dims:
    """input [N, C, ...] or [C], target [N, ...] or class probabilities like input; class weights [C]."""
    x, target = shape(operands(node)[0]), shape(operands(node)[1])
    channel = 0 if len(x) == 1 else 1
    row = tuple(None if d == channel else d - (d > channel) for d in range(len(x)))
    other = row if len(target) == len(x) else tuple(range(len(target)))
    return Dims((row, other, (None,))[: len(operands(node))])


@dataclass(frozen=True)
class CrossEntropy(Related):
    """cross_entropy_loss and nll_loss_nd, with ignore_index, class weights (constants) and label smoothing."""

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        relation, xs = self.relation(node), operands(node)
        out = next((t for i, p in enumerate(ins) for s in parts(p) if isinstance(t := relation.forward(i, s), Shard)), None)
        back = relation.backward(out) if out is not None else None
        if out is None or back is None:
            return None
        demands: list[tuple[fx.Node, Placement]] = [(x, s or V) for x, s in zip(xs, back, strict=True)]
        reduction = argument(node, "reduction", MEAN)
        if reduction == NONE:
            return self.version(node, out)
        probabilities = xs[1].meta["val"].is_floating_point()
        if reduction == MEAN and not probabilities:
            demands.append((xs[1], R))
        ignore = argument(node, "ignore_index", -100)

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            args, kwargs = replaced(node, values[: len(xs)], reduction=SUM)
            total = b.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
            if reduction == SUM:
                return total
            if probabilities:
                return b.call(aten.div.Tensor, total, shape(xs[1])[0] * _rest(shape(xs[1])))
            weight = values[2] if len(xs) == 3 else None
            return b.call(mean_of, total, values[len(xs)], weight, ignore)

        return Recipe(P, tuple(demands), emit)


def _rest(target: Sequence[int]) -> int:
    count = 1
    for size in target[2:]:
        count *= size
    return count


def mean_of(total: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """This rank's part of the mean loss: its sum over the weight of all tokens that are not ignored.

    total: scalar sum over the rank's tokens, target: all class indices of the batch, weight: [C] or None.
    """
    valid = target != ignore_index
    if weight is None:
        return total / valid.sum()
    return total / (weight.detach()[torch.where(valid, target, 0)] * valid).sum()


_ELEMENTWISE = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
poisson_nll_loss
""".split()

RULES: dict[object, Rule] = {
    **{getattr(aten, name): Elementwise(_elementwise) for name in _ELEMENTWISE},
    aten.cross_entropy_loss: CrossEntropy(_classes),
    aten.nll_loss_nd: CrossEntropy(_classes),
    aten.nll_loss: CrossEntropy(_classes),
}
