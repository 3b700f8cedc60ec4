"""What a mask is, known without building it: causal, and which columns a block of rows can see.

Rows and columns enter a mask as vectors of positions. Where those are constants (not packed-document ids or
padding of the batch) the comparison graph is evaluated on blocks by interval arithmetic: for each block of rows and
columns a lower and an upper bound of the mask's value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, fx

from .capture import Captured
from .detect import SDPA, Region, Use
from .relation import operands, shape

aten = torch.ops.aten
COLUMN_BLOCK = 128  # columns are trimmed to multiples of this, or of a 2048th of them if that is more
LARGEST_CONSTANT = 1 << 24  # elements; row and column vectors of any real sequence are smaller


class Constants:
    """Values that depend on no input, evaluated on the host when asked for."""

    def __init__(self, captured: Captured) -> None:
        self._module = captured.module
        self._known: dict[fx.Node, Tensor | None] = {}

    def of(self, node: fx.Node) -> Tensor | None:
        """The value, or None if it depends on an input, is random, or is too large to be a vector."""
        if node not in self._known:
            self._known[node] = self._evaluate(node)
        return self._known[node]

    def _evaluate(self, node: fx.Node) -> Tensor | None:
        value = node.meta.get("val")
        if (not isinstance(value, Tensor) and node.op != "get_attr") or node.op == "placeholder":
            return None
        if node.op == "get_attr":
            held = getattr(self._module, str(node.target))
            return held.cpu() if isinstance(held, Tensor) and held.numel() <= LARGEST_CONSTANT else None
        if value.numel() > LARGEST_CONSTANT or node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        xs = operands(node)
        if any(self.of(x) is None for x in xs):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.of(n))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        # The graph may be read while the compiler's fake mode is on; these are real numbers.
        with torch.utils._python_dispatch._disable_current_modes():
            result = node.target(*args, **kwargs)
        return result if isinstance(result, Tensor) else None


def mask_use(region: Region) -> Use | None:
    """The boolean mask of a scaled_dot_product_attention region."""
    return region.reads.get(((region.closing, region.axes), 3)) if region.closing.target is SDPA else None


def is_causal(region: Region, constants: Constants) -> bool:
    """The mask says `column <= row` and nothing else."""
    use = mask_use(region)
    if use is None or use[0].meta["val"].dtype != torch.bool:
        return False
    rows, columns = region.row.length, region.columns
    if rows != columns:
        return False
    whole = _Blocks(region, constants, [(0, rows)], np.arange(rows), [(0, columns)])

    def certain(use: Use) -> bool:
        bounds = whole.of(use)
        return bounds is not None and bool(np.min(bounds[0]) >= 1)

    def lower(use: Use) -> bool:
        node = use[0]
        if use in region.leaves:
            return False
        below = [region.reads[(use, i)] for i in range(len(operands(node)))]
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _CONJUNCTIONS:
            a, b = below
            return (certain(a) and lower(b)) or (certain(b) and lower(a))
        return lower(below[0]) if packet in _BROADCASTS else _is_lower(node, rows, constants)

    return lower(use)


def _is_lower(node: fx.Node, length: int, constants: Constants) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    xs = operands(node)
    if packet not in (aten.le, aten.ge, aten.less_equal, aten.greater_equal) or len(xs) != 2:
        return False
    small, large = xs if packet in (aten.le, aten.less_equal) else reversed(xs)
    if len(shape(small)) < 1 or shape(small)[-1] != length or len(shape(large)) < 2 or shape(large)[-2:] != (length, 1):
        return False
    column, row = constants.of(small), constants.of(large)
    if column is None or row is None or column.numel() != length or row.numel() != length:
        return False
    steps = torch.arange(length)
    return bool((column.flatten() == steps).all() and (row.flatten() == steps).all())


# Which columns a block sees -----------------------------------------------------------------------

Bounds = tuple[np.ndarray, np.ndarray]  # least and greatest value: [row blocks or 1, column blocks or 1]


def visible(
    region: Region, constants: Constants, row_blocks: list[tuple[int, int]], held: np.ndarray, causal: bool
) -> list[tuple[int, int]]:
    """For each block of rows, the columns [first, last) outside which its mask is certainly False.

    `held` are the global positions of the rows at hand, `row_blocks` cuts of them. Only for regions that give 0 to a row
    without columns (`scaled_dot_product_attention`); others must see every column.
    """
    everything = [(0, region.columns)] * len(row_blocks)
    use = mask_use(region)
    if region.closing.target is not SDPA or (use is None and not causal):
        return everything
    step = max(COLUMN_BLOCK, region.columns // 2048)
    cuts = [(a, min(region.columns, a + step)) for a in range(0, region.columns, step)]
    may = np.ones((len(row_blocks), len(cuts)), dtype=bool)
    if causal:
        last = np.array([held[a:b].max(initial=-1) for a, b in row_blocks])
        may &= np.array([a for a, _ in cuts])[None, :] <= last[:, None]
    if use is not None and use[0].meta["val"].dtype == torch.bool:
        bounds = _Blocks(region, constants, row_blocks, held, cuts).of(use)
        if bounds is not None:
            may &= np.broadcast_to(bounds[1] > 0, may.shape)
    out = []
    for row in may:
        seen = np.flatnonzero(row)
        out.append((cuts[seen[0]][0], cuts[seen[-1]][1]) if len(seen) else (0, 0))
    return out


class _Blocks:
    """Interval arithmetic over the mask's operators, on all blocks at once."""

    def __init__(
        self,
        region: Region,
        constants: Constants,
        row_blocks: list[tuple[int, int]],
        held: np.ndarray,
        cuts: list[tuple[int, int]],
    ) -> None:
        self._region, self._constants = region, constants
        self._rows, self._held, self._cuts = row_blocks, held, cuts
        self._known: dict[Use, Bounds | None] = {}

    def of(self, use: Use) -> Bounds | None:
        if use not in self._known:
            self._known[use] = self._bounds(use)
        return self._known[use]

    def _bounds(self, use: Use) -> Bounds | None:
        node, axes = use
        if use in self._region.leaves or axes.row is None or axes.col is None:
            return self._leaf(use)
        act = _BOUNDS.get(getattr(node.target, "overloadpacket", None))
        if act is None:
            return None
        taken = [self.of(self._region.reads[(use, i)]) for i in range(len(operands(node)))]
        at = iter(taken)
        args = [next(at) if isinstance(a, fx.Node) else a for a in node.args]
        if act in _CONNECTIVES:
            return act(*args)
        if any(b is None for b in taken):
            return None
        points = [(np.float64(a), np.float64(a)) if isinstance(a, (int, float)) else a for a in args]
        return act(*points)

    def _leaf(self, use: Use) -> Bounds | None:
        node, axes = use
        if axes.row is not None and axes.col is not None:
            return None
        value = self._constants.of(node)
        if value is None or value.is_complex():
            return None
        dim = axes.row if axes.row is not None else axes.col
        if dim is None:
            flat = value.double().numpy()
            return (flat.min(), flat.max()) if flat.size else None
        lines = value.double().numpy()
        lines = np.moveaxis(lines, dim, -1).reshape(-1, lines.shape[dim])
        low, high = lines.min(0), lines.max(0)
        if axes.row is not None:
            low, high = low[self._held], high[self._held]
            blocks = self._rows
        else:
            blocks = self._cuts
        least = np.array([low[a:b].min(initial=np.inf) for a, b in blocks])
        most = np.array([high[a:b].max(initial=-np.inf) for a, b in blocks])
        return (least[:, None], most[:, None]) if axes.row is not None else (least[None, :], most[None, :])


_CONJUNCTIONS = (aten.__and__, aten.bitwise_and, aten.logical_and)
_BROADCASTS = (aten.expand, aten.alias, aten.clone, aten.contiguous, aten.unsqueeze)


def _compared(
    certain: Callable[[Bounds, Bounds], np.ndarray], possible: Callable[[Bounds, Bounds], np.ndarray]
) -> Callable[..., Bounds]:
    return lambda a, b: (certain(a, b).astype(float), possible(a, b).astype(float))


def _and(a: Bounds | None, b: Bounds | None) -> Bounds | None:
    if a is None or b is None:
        known = a if a is not None else b
        return None if known is None else (np.zeros_like(known[0]), known[1])
    return np.minimum(a[0], b[0]), np.minimum(a[1], b[1])


def _or(a: Bounds | None, b: Bounds | None) -> Bounds | None:
    return None if a is None or b is None else (np.maximum(a[0], b[0]), np.maximum(a[1], b[1]))


def _same(a: Bounds | None, *_: object) -> Bounds | None:
    return a


_CONNECTIVES = (_and, _or, _same)
_BOUNDS: dict[object, Callable[..., Bounds | None]] = {
    aten.le: _compared(lambda a, b: a[1] <= b[0], lambda a, b: a[0] <= b[1]),
    aten.lt: _compared(lambda a, b: a[1] < b[0], lambda a, b: a[0] < b[1]),
    aten.ge: _compared(lambda a, b: a[0] >= b[1], lambda a, b: a[1] >= b[0]),
    aten.gt: _compared(lambda a, b: a[0] > b[1], lambda a, b: a[1] > b[0]),
    aten.eq: _compared(lambda a, b: (a[0] == b[1]) & (a[1] == b[0]), lambda a, b: (a[0] <= b[1]) & (b[0] <= a[1])),
    aten.add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    aten.sub: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    **dict.fromkeys(_CONJUNCTIONS, _and),
    **dict.fromkeys(_BROADCASTS, _same),
    aten.__or__: _or,
    aten.bitwise_or: _or,
    aten.logical_or: _or,
    aten.bitwise_not: lambda a: (1 - a[1], 1 - a[0]),
    aten.logical_not: lambda a: (1 - a[1], 1 - a[0]),
}
