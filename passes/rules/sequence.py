"""Operators that cut, join, pad, turn or roll the sequence itself: arithmetic on the layout, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ...kernels.comm import take
from ...kernels.layout import Layout, concatenated
from ..placement import P, Placement, Shard
from ..relation import Dims, operand_shape, operands, shape
from .along import along, named
from .base import Builder, Recipe, Rule, argument, dims_of, parts

aten = torch.ops.aten


def _except(dim: int, rank: int, shift: int = 0) -> Dims:
    """All dimensions but `dim` pass; `shift` is -1 where `dim` disappears."""
    row = tuple(None if d == dim else d + (shift if d > dim else 0) for d in range(rank))
    stay = tuple(d if not shift else None for d in range(rank))
    return Dims((row,), (stay,))


@dataclass(frozen=True)
class Cut(Rule):
    """Base of the rules whose one operand is split along the very dimension they change."""

    def changed(self, node: fx.Node) -> set[int]:
        raise NotImplementedError

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        """The recipe for an operand split along a changed dimension."""
        raise NotImplementedError

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        split = [s for p in ins for s in parts(p)]
        if len(split) == 1 and split[0].dim in self.changed(node):
            return None if split[0].merged else self.of(node, split[0])
        return super().native(node, ins)


@dataclass(frozen=True)
class Slice(Cut):
    """x[start:stop:step] along one dimension."""

    def relation(self, node: fx.Node) -> Dims:
        x = operand_shape(node, 0)
        dim = argument(node, "dim", 0) % len(x)
        if shape(node)[dim] == x[dim]:  # the whole of it
            return Dims((tuple(range(len(x))),))
        return _except(dim, len(x))

    def changed(self, node: fx.Node) -> set[int]:
        x = operand_shape(node, 0)
        dim = argument(node, "dim", 0) % len(x)
        return set() if shape(node)[dim] == x[dim] else {dim}

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        start, stop, step = slice(argument(node, "start"), argument(node, "end"), argument(node, "step", 1)).indices(
            s.layout.length
        )
        layout, cuts = s.layout.sliced(start, stop, step)
        return Recipe(
            Shard(s.dim, layout),
            ((operands(node)[0], s),),
            lambda b, values: b.call(take_strided, values[0], s.dim, cuts[b.rank], step),
        )


def take_strided(x: Tensor, dim: int, cuts: Sequence[tuple[int, int]], step: int) -> Tensor:
    """Every `step`-th position of each local index range."""
    if step == 1:
        return take(x, dim, tuple(cuts))
    pieces = [torch.ops.aten.slice.Tensor(x, dim, a, b, step) for a, b in cuts]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)


@dataclass(frozen=True)
class Select(Cut):
    """x[:, i]: the holder of position i contributes it, everyone else zero."""

    def relation(self, node: fx.Node) -> Dims:
        rank = len(operand_shape(node, 0))
        return _except(argument(node, "dim") % rank, rank, -1)

    def changed(self, node: fx.Node) -> set[int]:
        return {argument(node, "dim") % len(operand_shape(node, 0))}

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        index = argument(node, "index") % s.layout.length
        _, cuts = s.layout.sliced(index, index + 1)
        # A sum over one position or none: ranks that hold nothing still run the same backward collectives.
        return Recipe(
            P,
            ((operands(node)[0], s),),
            lambda b, values: b.call(sum_of, values[0], s.dim, cuts[b.rank]),
        )


def sum_of(x: Tensor, dim: int, cuts: tuple[tuple[int, int], ...]) -> Tensor:
    """Sum of the given local positions, in x's dtype (booleans and small integers too)."""
    return take(x, dim, cuts).sum(dim, dtype=x.dtype)


@dataclass(frozen=True)
class Pad(Cut):
    """Constant padding; along the sequence the ranks at its ends hold what is added."""

    def _amounts(self, node: fx.Node) -> dict[int, tuple[int, int]]:
        pad: Sequence[int] = node.args[1]  # type: ignore[assignment]
        rank = len(shape(node))
        amounts = {rank - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
        return {d: amount for d, amount in amounts.items() if amount != (0, 0)}

    def relation(self, node: fx.Node) -> Dims:
        changed = self.changed(node)
        rank = len(shape(node))
        return Dims((tuple(None if d in changed else d for d in range(rank)),), (tuple(range(rank)),))

    def changed(self, node: fx.Node) -> set[int]:
        return set(self._amounts(node))

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        if argument(node, "mode", "constant") != "constant":
            return None
        left, right = self._amounts(node)[s.dim]
        length = s.layout.length
        kept, cuts = s.layout.sliced(max(0, -left), length - max(0, -right))
        grown = kept.padded(max(0, left), max(0, right))
        first = [bool(h) and h[0][0] == 0 for h in grown.shards]
        last = [bool(h) and h[-1][1] == grown.length for h in grown.shards]
        others = [(d, amount) for d, amount in self._amounts(node).items() if d != s.dim]

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            mine = b.call(take, values[0], s.dim, cuts[b.rank])
            pad = [0] * (2 * len(shape(node)))
            ends = (max(0, left) * first[b.rank], max(0, right) * last[b.rank])
            for d, (low, high) in [*others, (s.dim, ends)]:
                at = 2 * (len(shape(node)) - 1 - d)
                pad[at : at + 2] = [low, high]
            return b.call(aten.constant_pad_nd.default, mine, pad, argument(node, "value", 0) or 0)

        return Recipe(Shard(s.dim, grown), ((operands(node)[0], s),), emit)


@dataclass(frozen=True)
class Flip(Cut):
    """Each rank turns around what it holds; the rank with the last positions then has the first."""

    def relation(self, node: fx.Node) -> Dims:
        return along(named("dims"))(node)

    def changed(self, node: fx.Node) -> set[int]:
        return set(dims_of(argument(node, "dims"), len(shape(node)))) if argument(node, "dims") else set()

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        return Recipe(Shard(s.dim, s.layout.reversed()), ((operands(node)[0], s),), lambda b, values: b.run(node, values))


@dataclass(frozen=True)
class Roll(Flip):
    """Each rank keeps what it holds, which now stands elsewhere in the sequence."""

    def of(self, node: fx.Node, s: Shard) -> Recipe | None:
        shifts, dims = argument(node, "shifts"), dims_of(argument(node, "dims"), len(shape(node)))
        shifts = (shifts,) if isinstance(shifts, int) else shifts
        layout, cuts = s.layout.rolled(sum(k for k, d in zip(shifts, dims, strict=True) if d == s.dim))
        others = [(k, d) for k, d in zip(shifts, dims, strict=True) if d != s.dim]

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            mine = b.call(take, values[0], s.dim, cuts[b.rank])
            return b.call(aten.roll.default, mine, [k for k, _ in others], [d for _, d in others]) if others else mine

        return Recipe(Shard(s.dim, layout), ((operands(node)[0], s),), emit)


@dataclass(frozen=True)
class Cat(Rule):
    """Concatenation; along the sequence the layouts are joined, and whole pieces are dealt out first."""

    def relation(self, node: fx.Node) -> Dims:
        rank = len(shape(node))
        dim = argument(node, "dim", 0) % rank
        links: list[tuple[int | None, ...]] = []
        stays: list[tuple[int | None, ...]] = []
        for x in operands(node):
            if len(shape(x)) != rank:  # torch lets an empty 1-d tensor stand in any cat
                links.append((None,) * len(shape(x)))
                stays.append((None,) * len(shape(x)))
                continue
            alone = shape(x)[dim] == shape(node)[dim]
            links.append(tuple(d if d != dim or alone else None for d in range(rank)))
            stays.append(tuple(d if d != dim or shape(x)[d] != 1 else None for d in range(rank)))
        return Dims(tuple(links), tuple(stays))

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        dim = argument(node, "dim", 0) % len(shape(node))
        alone = any(len(shape(x)) == len(shape(node)) and shape(x)[dim] == shape(node)[dim] for x in operands(node))
        split = [s for p in ins for s in parts(p)]
        if not alone and split and {s.dim for s in split} == {dim}:
            return self._joined(node, ins, split[0])
        return super().native(node, ins)

    def _joined(self, node: fx.Node, ins: Sequence[Placement], first: Shard) -> Recipe | None:
        xs = [(x, p) for x, p in zip(operands(node), ins, strict=True) if shape(x) != (0,)]
        if all(isinstance(p, Shard) and p.layout == first.layout and p.inner == first.inner for _, p in xs):
            outer = sum(p.outer for _, p in xs if isinstance(p, Shard))
            return self._emit(node, xs, Shard(first.dim, first.layout, outer, first.inner))
        if any(isinstance(p, Shard) and p.merged for _, p in xs):
            return None
        ranks = first.layout.ranks
        dealt: list[tuple[fx.Node, Placement]] = []
        for at, (x, p) in enumerate(xs):
            if not isinstance(p, Shard):
                after = any(isinstance(q, Shard) for _, q in xs[:at])
                p = Shard(first.dim, _held_by(shape(x)[first.dim], ranks, ranks - 1 if after else 0))
            dealt.append((x, p))
        layout = concatenated([p.layout for _, p in dealt if isinstance(p, Shard)])
        return self._emit(node, dealt, Shard(first.dim, layout))

    def _emit(self, node: fx.Node, xs: Sequence[tuple[fx.Node, Placement]], out: Shard) -> Recipe:
        return Recipe(out, tuple(xs), lambda b, values: b.call(aten.cat.default, list(values), out.dim))


def _held_by(length: int, ranks: int, holder: int) -> Layout:
    return Layout(length, tuple(((0, length),) if r == holder else () for r in range(ranks)))


RULES: dict[object, Rule] = {
    aten.slice: Slice(),
    aten.select: Select(),
    aten.pad: Pad(),
    aten.constant_pad_nd: Pad(),
    aten.flip: Flip(),
    aten.roll: Roll(),
    aten.cat: Cat(),
    aten.concat: Cat(),
    aten.concatenate: Cat(),
}
