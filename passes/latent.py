"""Columns that travel as what they are computed from, where that is much smaller: the latent of multi-head latent attention.

Keys and values of MLA are a projection of one small vector for each token. A ring may send that vector, and every rank projects
what it receives. The projection is then done once for each rank that needs it, so it must be worth the bytes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

import torch

from ..kernels.layout import Layout
from .detect import Axes, Region, Use
from .facts import Facts, is_float, is_random
from .placement import Shard
from .relation import operands, shape
from .rules import rule_of
from .rules.base import Sized

aten = torch.ops.aten
LEAST_GAIN = 4  # the latent must be this many times smaller
# Floating-point operations that may be repeated for a byte that is saved: 450 GB/s (NVLink 4, one direction) against the
# 400 TFLOP/s that large bfloat16 products reach on an H100.
FLOPS_PER_BYTE = 900
FARTHEST = 64  # operators between a latent and its keys and values
_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.bmm.default, aten.addmm.default)


@dataclass
class _Cut:
    """Uses that travel, those that lie whole on every rank, and the operators between them and the region."""

    facts: Facts
    length: int
    frontier: dict[Use, None]
    whole: dict[Use, None] = field(default_factory=dict)
    inside: dict[Use, None] = field(default_factory=dict)
    reads: dict[tuple[Use, int], Use] = field(default_factory=dict)
    flops: int = 0

    def copy(self) -> _Cut:
        return replace(
            self, frontier=dict(self.frontier), whole=dict(self.whole), inside=dict(self.inside), reads=dict(self.reads)
        )

    @property
    def bytes(self) -> int:
        return sum(node.meta["val"].nbytes for node in {node for node, _ in self.frontier})

    def expand(self, use: Use) -> bool:
        """Replace a use by the operands it is computed from, if that is done position by position."""
        node, axes = use
        known = rule_of(node) if node.op == "call_function" and node.target is not operator.getitem else None
        if known is None or is_random(node) or axes.col is None or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        back = known.relation(node).backward(Shard(axes.col, Layout(self.length, ((),))))
        heads = (
            None if axes.head is None else known.relation(node).backward(Shard(axes.head, Layout(shape(node)[axes.head], ((),))))
        )
        if back is None:
            return False
        found = []
        for i, (x, s) in enumerate(zip(operands(node), back, strict=True)):
            if s is not None and (s.merged or shape(x)[s.dim] != self.length or not is_float(x)):
                return False  # (tokens are no latent)
            if s is None and x in self.facts.from_data and is_float(x):
                return False  # it needs a whole sequence
            h = heads[i] if heads is not None else None
            found.append((x, Axes(None, s.dim if s else None, h.dim if h is not None and not h.merged else None)))
        del self.frontier[use]
        self.inside = {use: None, **self.inside}
        for i, below in enumerate(found):
            self.reads[(use, i)] = below
            if isinstance(rule_of(below[0]), Sized) and not operands(below[0]):
                self.inside = {below: None, **self.inside}  # a constant is made anew, as long as a block
            elif below not in self.inside:
                travels = below[1].col is not None and below[0] in self.facts.from_data and is_float(below[0])
                (self.frontier if travels else self.whole)[below] = None
        if node.target in _PRODUCTS:
            self.flops += 2 * node.meta["val"].numel() * shape(operands(node)[0])[-1]
        return True


def narrowed(region: Region, facts: Facts) -> Region:
    """The region with its columns taken from higher up, or the region itself where that gains little."""
    columns = [
        u for u in region.leaves if u[1].col is not None and u[1].row is None and u[0] in facts.from_data and is_float(u[0])
    ]
    order = {node: i for i, node in enumerate(region.closing.graph.nodes)}
    cut = _Cut(facts, region.columns, dict.fromkeys(columns))
    best = start = cut.copy()
    for _ in range(FARTHEST):
        # The last operator first: its other users have been seen by then, so what is left is always a cut of the graph.
        if not any(cut.expand(use) for use in sorted(cut.frontier, key=lambda u: -order[u[0]])):
            break
        if cut.bytes < best.bytes:
            best = cut.copy()
    saved = start.bytes - best.bytes
    if best.bytes * LEAST_GAIN > start.bytes or best.flops > FLOPS_PER_BYTE * saved:
        return region
    leaves = {use: None for use in region.leaves if use not in best.inside} | best.frontier | best.whole
    inside = dict(sorted(best.inside.items(), key=lambda item: order[item[0][0]]))
    return replace(region, leaves=leaves, interior=inside | region.interior, reads=region.reads | best.reads)
