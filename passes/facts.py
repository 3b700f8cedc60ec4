"""What can be read off a captured graph before anything is placed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ..kernels.layout import Layout, contiguous
from .capture import Captured, Input
from .relation import operands, shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Facts:
    """Per node: is it differentiable, does it depend on the batch, in which modes was it recorded."""

    inputs: dict[fx.Node, Input]
    differentiable: frozenset[fx.Node]
    from_data: frozenset[fx.Node]
    no_grad: frozenset[fx.Node]
    autocast: dict[fx.Node, tuple[object, ...]]
    ranks: int
    arrange: Callable[[int, int], Layout] = contiguous
    layouts: dict[int, Layout] = field(default_factory=dict)

    def layout(self, length: int) -> Layout | None:
        """The layout of a sequence of this length; None where it is too short to give each rank a position."""
        if length < self.ranks:
            return None
        return self.layouts.setdefault(length, self.arrange(length, self.ranks))


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def is_random(node: fx.Node) -> bool:
    """Draws from the generator (dropout and attention handle their own randomness)."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
        and target.overloadpacket not in (aten.dropout, aten.scaled_dot_product_attention)
    )


def read(captured: Captured, ranks: int, arrange: Callable[[int, int], Layout] = contiguous) -> Facts:
    """Facts of a captured graph whose sequences `arrange(length, ranks)` lays out; mode switches are read in program order."""
    nodes = list(captured.module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    inputs = dict(zip(placeholders, captured.inputs, strict=True))
    differentiable: set[fx.Node] = set()
    from_data: set[fx.Node] = set()
    no_grad: set[fx.Node] = set()
    autocast: dict[fx.Node, tuple[object, ...]] = {}
    grad, casts = True, []
    for node in nodes:
        if node.op == "placeholder":
            if inputs[node].kind == "data":
                from_data.add(node)
            if inputs[node].requires_grad:
                differentiable.add(node)
            continue
        if node.op != "call_function":
            continue
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif name == "_enter_autocast":
            casts.append(node.args)
        elif name == "_exit_autocast":
            casts.pop()
        else:
            if casts:
                autocast[node] = tuple(casts[-1])
            if not grad:
                no_grad.add(node)
            xs = operands(node)
            if any(x in from_data for x in xs):
                from_data.add(node)
            if grad and is_float(node) and node.target not in _CUTS and any(x in differentiable for x in xs):
                differentiable.add(node)
    return Facts(inputs, frozenset(differentiable), frozenset(from_data), frozenset(no_grad), autocast, ranks, arrange)


_CUTS = {aten.detach.default}


def is_mode(node: fx.Node) -> bool:
    """Grad and autocast switches, which the facts have read."""
    return getattr(node.target, "__name__", "") in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


# Where sequences start ----------------------------------------------------------------------------


def score_matmuls(graph: fx.Graph) -> list[fx.Node]:
    """Products whose columns a softmax normalises and a later product sums: eager attention, however spelled.

    Only says where a sequence axis is to be expected; whether the region is an attention is proved later.
    """
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _SOFTMAX:
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
            rank = len(shape(node))
            if rank >= 2 and dim % rank == rank - 1 and _feeds_product(node):
                source = _product_above(node)
                if source is not None:
                    found.append(source)
    return found


_SOFTMAX = {aten.softmax.int, aten._softmax.default, aten._safe_softmax.default}
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default}


def _feeds_product(node: fx.Node, depth: int = 8) -> bool:
    """Some user, through operators on the same elements, multiplies by it from the left."""
    for user in node.users:
        if user.target in _PRODUCTS:
            if operands(user)[-2] is node:
                return True
            continue
        same_rows = user.op == "call_function" and len(shape(user)) >= 2 and shape(user)[-2] == shape(node)[-2]
        if depth and same_rows and _feeds_product(user, depth - 1):
            return True
    return False


def _product_above(node: fx.Node) -> fx.Node | None:
    """The product that gives the scores: up through the first operand of the same rows, at most 24 operators."""
    for _ in range(24):
        xs = operands(node)
        if node.target in _PRODUCTS:
            return node
        if node.target is operator.getitem or not xs:
            return None
        largest = max(xs, key=lambda x: (_numel(shape(x)), -xs.index(x)))
        node = _towards_product(xs) or largest
    return None


def _towards_product(xs: Sequence[fx.Node]) -> fx.Node | None:
    """Among operands, the one that is a product itself."""
    return next((x for x in xs if x.target in _PRODUCTS), None)


def _numel(size: Sequence[int]) -> int:
    count = 1
    for s in size:
        count *= s
    return count
