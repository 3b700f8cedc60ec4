"""Interval arithmetic over a region's operators: between which values each (row, column) cell of a mask or of scores lies.

Rows and columns enter a mask as vectors of positions. Cut into cells, each vector has a least and a greatest value in each cell,
and the operators above it are evaluated on those two. Nothing with both axes is ever built at full size.

What is not known lies anywhere in its type; a floating-point value is taken to stay within a quarter of its type's range, so
that adding the least finite number still tells a masked score from every other one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, fx

from .detect import Region, Use
from .relation import operands

aten = torch.ops.aten
Bounds = tuple[np.ndarray, np.ndarray]  # least and greatest value: [row cells or 1, column cells or 1]


def limit(node: fx.Node) -> float:
    """The greatest finite number of a value's type."""
    return float(torch.finfo(node.meta["val"].dtype).max)


class Cells:
    """Bounds on the cells between `row_cuts` and `col_cuts`; without cuts, on the pairs (i, i).

    values: what is known of a leaf, its tensor or None.
    """

    def __init__(
        self, region: Region, values: Callable[[fx.Node], Tensor | None], cuts: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        self._region, self._values, self._cuts = region, values, cuts
        self._known: dict[Use, Bounds] = {}

    def of(self, use: Use) -> Bounds:
        if use not in self._known:
            with np.errstate(all="ignore"):
                self._known[use] = self._bounds(use)
        return self._known[use]

    def _bounds(self, use: Use) -> Bounds:
        node, _ = use
        if use in self._region.leaves or use not in self._region.interior:
            return self._leaf(use)
        act = _BOUNDS.get(getattr(node.target, "overloadpacket", None))
        boolean = node.meta["val"].dtype == torch.bool
        if act is None or (act in _LOGIC and not boolean) or "alpha" in node.kwargs:
            return self._anything(node)
        taken = iter([self.of(self._region.reads[(use, i)]) for i in range(len(operands(node)))])
        args = [next(taken) if isinstance(a, fx.Node) else a for a in node.args]
        points = [(np.float64(a), np.float64(a)) if isinstance(a, (bool, int, float)) else a for a in args]
        if any(not isinstance(p, tuple) for p in points[: act.__code__.co_argcount]):
            return self._anything(node)
        low, high = act(*points[: act.__code__.co_argcount])
        if boolean and act is _same and operands(node)[0].meta["val"].dtype != torch.bool:
            return ((low > 0) | (high < 0)).astype(float), ((low != 0) | (high != 0)).astype(float)
        return np.asarray(low, float), np.asarray(high, float)

    def _anything(self, node: fx.Node) -> Bounds:
        kind = node.meta["val"].dtype
        if kind == torch.bool:
            return np.array([[0.0]]), np.array([[1.0]])
        most = limit(node) / 4 if kind.is_floating_point else np.inf
        return np.array([[-most]]), np.array([[most]])

    def _leaf(self, use: Use) -> Bounds:
        node, axes = use
        if node.target in _FILLS and isinstance(fill := node.args[-1], (bool, int, float)):
            return np.array([[float(fill)]]), np.array([[float(fill)]])
        value = self._values(node)
        if value is None or value.is_complex() or not value.numel():
            return self._anything(node)
        dims = [d for d in (axes.row, axes.col) if d is not None]
        lines = np.moveaxis(value.double().numpy(), dims, range(-len(dims), 0) if dims else [])
        lines = lines.reshape(-1, *lines.shape[lines.ndim - len(dims) :])
        low, high = lines.min(0), lines.max(0)
        if self._cuts is None:
            return (low.diagonal(), high.diagonal()) if len(dims) == 2 else (low, high)
        for at, cuts in enumerate(c for c, d in zip(self._cuts, (axes.row, axes.col), strict=True) if d is not None):
            low = np.minimum.reduceat(low, cuts[:-1], axis=at)
            high = np.maximum.reduceat(high, cuts[:-1], axis=at)
        if len(dims) == 1:
            low, high = (np.expand_dims(x, 1 if axes.row is not None else 0) for x in (low, high))
        return low, high


_FILLS = (aten.full.default, aten.scalar_tensor.default)


def _compared(
    certain: Callable[[Bounds, Bounds], np.ndarray], possible: Callable[[Bounds, Bounds], np.ndarray]
) -> Callable[..., Bounds]:
    def compare(a: Bounds, b: Bounds) -> Bounds:
        return certain(a, b).astype(float), possible(a, b).astype(float)

    return compare


def _and(a: Bounds, b: Bounds) -> Bounds:
    return np.minimum(a[0], b[0]), np.minimum(a[1], b[1])


def _or(a: Bounds, b: Bounds) -> Bounds:
    return np.maximum(a[0], b[0]), np.maximum(a[1], b[1])


def _not(a: Bounds) -> Bounds:
    return 1 - a[1], 1 - a[0]


def _same(a: Bounds) -> Bounds:
    return a


def _add(a: Bounds, b: Bounds) -> Bounds:
    return a[0] + b[0], a[1] + b[1]


def _sub(a: Bounds, b: Bounds) -> Bounds:
    return a[0] - b[1], a[1] - b[0]


def _neg(a: Bounds) -> Bounds:
    return -a[1], -a[0]


def _abs(a: Bounds) -> Bounds:
    low = np.where((a[0] <= 0) & (a[1] >= 0), 0.0, np.minimum(np.abs(a[0]), np.abs(a[1])))
    return low, np.maximum(np.abs(a[0]), np.abs(a[1]))


def _mul(a: Bounds, b: Bounds) -> Bounds:
    products = [np.nan_to_num(x * y, nan=0.0, posinf=np.inf, neginf=-np.inf) for x in a for y in b]
    return np.minimum.reduce(np.broadcast_arrays(*products)), np.maximum.reduce(np.broadcast_arrays(*products))


def _where(c: Bounds, a: Bounds, b: Bounds) -> Bounds:
    sure, never = c[0] >= 1, c[1] <= 0
    low = np.where(sure, a[0], np.where(never, b[0], np.minimum(a[0], b[0])))
    return low, np.where(sure, a[1], np.where(never, b[1], np.maximum(a[1], b[1])))


def _filled(x: Bounds, mask: Bounds, value: Bounds) -> Bounds:
    return _where(mask, value, x)


def _tanh(a: Bounds) -> Bounds:
    return np.tanh(a[0]), np.tanh(a[1])


CONJUNCTIONS = (aten.__and__, aten.bitwise_and, aten.logical_and)
BROADCASTS = (aten.expand, aten.alias, aten.clone, aten.contiguous, aten.unsqueeze, aten._to_copy, aten.to, aten.detach)
_LOGIC = (_and, _or, _not)
_BOUNDS: dict[object, Callable[..., Bounds]] = {
    aten.le: _compared(lambda a, b: a[1] <= b[0], lambda a, b: a[0] <= b[1]),
    aten.lt: _compared(lambda a, b: a[1] < b[0], lambda a, b: a[0] < b[1]),
    aten.ge: _compared(lambda a, b: a[0] >= b[1], lambda a, b: a[1] >= b[0]),
    aten.gt: _compared(lambda a, b: a[0] > b[1], lambda a, b: a[1] > b[0]),
    aten.eq: _compared(
        lambda a, b: (a[0] == b[1]) & (a[1] == b[0]) & (a[0] == a[1]), lambda a, b: (a[0] <= b[1]) & (b[0] <= a[1])
    ),
    aten.ne: _compared(
        lambda a, b: (a[0] > b[1]) | (b[0] > a[1]), lambda a, b: ~((a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]))
    ),
    aten.add: _add,
    aten.sub: _sub,
    aten.mul: _mul,
    aten.neg: _neg,
    aten.abs: _abs,
    aten.tanh: _tanh,
    aten.where: _where,
    aten.masked_fill: _filled,
    **dict.fromkeys(CONJUNCTIONS, _and),
    **dict.fromkeys((aten.__or__, aten.bitwise_or, aten.logical_or), _or),
    **dict.fromkeys((aten.bitwise_not, aten.logical_not), _not),
    **dict.fromkeys(BROADCASTS, _same),
}
