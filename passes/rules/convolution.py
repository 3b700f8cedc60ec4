"""Convolutions along the sequence: each rank needs some positions around its own, a halo, and nothing else moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...kernels import comm
from ...kernels.layout import Layout, contiguous, head_tail
from ..placement import Shard, V
from ..relation import Dims, Link, operand_shape, operands, shape
from .base import Builder, Recipe, Rule, argument
from .losses import replaced
from .sequence import Cut

aten = torch.ops.aten


@dataclass(frozen=True)
class _Reach:
    """One spatial dimension: output o reads inputs [o·stride - before, o·stride - before + span]."""

    stride: int
    before: int
    after: int
    span: int

    @property
    def own(self) -> bool:
        """Each output position reads its own input position only."""
        return (self.stride, self.before, self.after, self.span) == (1, 0, 0, 0)


def _reaches(node: fx.Node) -> list[_Reach] | None:
    """Of each spatial dimension; None for a transposed convolution. x: [batch, channels, *spatial] or without batch."""
    if argument(node, "transposed", False):
        return None
    kernel = operand_shape(node, 1)[2:]
    stride, dilation = (_each(argument(node, name), len(kernel)) for name in ("stride", "dilation"))
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = argument(node, "padding")
    if isinstance(padding, str):  # "same" puts the odd one behind
        pads = [(s // 2, s - s // 2) if padding == "same" else (0, 0) for s in spans]
    else:
        pads = [(p, p) for p in _each(padding, len(kernel))]
    return [_Reach(s, *pad, span) for s, pad, span in zip(stride, pads, spans, strict=True)]


def _each(value: int | Sequence[int], count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


@dataclass(frozen=True)
class Convolution(Cut):
    """Stride 1 along a split dimension; kernels longer than a shard and any layout included."""

    def relation(self, node: fx.Node) -> Dims:
        x, *rest = (shape(other) for other in operands(node))
        first = len(x) - len(rest[0]) + 1  # the channels
        reaches = _reaches(node)
        links: list[Link] = [0 if d < first else None for d in range(first + 1)]
        links += [first + 1 + i if reaches and reaches[i].own else None for i in range(len(rest[0]) - 2)]
        return Dims((tuple(links), *((None,) * len(other) for other in rest)))

    def changed(self, node: fx.Node) -> set[int]:
        reaches = _reaches(node) or []
        first = len(operand_shape(node, 0)) - len(reaches)
        return {first + i for i, reach in enumerate(reaches) if not reach.own}

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        reaches = _reaches(node) or []
        here = s.dim - (len(operand_shape(node, 0)) - len(reaches))
        reach = reaches[here]
        others = [r for i, r in enumerate(reaches) if i != here]
        if reach.stride != 1 or any(r.before != r.after for r in others):
            return None
        layout = aligned(s.layout, shape(node)[s.dim])
        if not all(s.layout.shards) or not all(layout.shards):  # a rank without a part of the exchange: see scans
            return None
        windows = tuple(tuple((a - reach.before, b - reach.before + reach.span) for a, b in held) for held in layout.shards)
        padding = [0 if i == here else r.before for i, r in enumerate(reaches)]

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            if b.ranks == 1:
                return b.run(node, values)
            near, *weights = values
            near = b.call(comm.halo, near, s.dim, s.layout.shards, windows, b.rank, b.group)
            results, at = [], 0
            for start, stop in windows[b.rank]:
                window = near if len(windows[b.rank]) == 1 else b.call(aten.narrow.default, near, s.dim, at, stop - start)
                args, kwargs = replaced(node, [window, *weights], padding=padding)
                results.append(b.call(_PLAIN.get(node.target, node.target), *args, **kwargs))  # type: ignore[arg-type]
                at += stop - start
            return results[0] if len(results) == 1 else b.call(aten.cat.default, results, s.dim)

        weights = tuple((w, V) for w in operands(node)[1:])
        return Recipe(Shard(s.dim, layout), ((operands(node)[0], s), *weights), emit)


_PLAIN: dict[Any, Any] = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def aligned(layout: Layout, length: int) -> Layout:
    """Who computes the `length` positions that a convolution makes of a sequence, so that little moves before and after.

    A longer result is that of a causal convolution, whose tail is cut off next: the last rank holds the tail. A shorter one
    had its input padded by hand, before or around it: the shift is chosen that gives a usual layout, else an even one, as long
    as each rank gets a position.
    """
    if length >= layout.length:
        return layout.padded(0, length - layout.length)
    shifts = [layout.sliced(k, k + length)[0] for k in range(layout.length - length + 1)]
    usual = (contiguous(length, layout.ranks), head_tail(length, layout.ranks))
    best = min(shifts, key=lambda shifted: (shifted not in usual, max(shifted.sizes)))
    return best if all(best.shards) else usual[0]


RULES: dict[object, Rule] = {op: Convolution() for op in [aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution]}
