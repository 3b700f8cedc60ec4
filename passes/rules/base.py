"""A rule: how one operator is placed and what it becomes on one rank.

Most rules are one `Relation`; what it gives as output placement and operand demands follows here. A rule
overrides `native`, `version` or `emit` only where the operator does more than its relation says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from ...kernels import random
from ..placement import P, Pairwise, Placement, Shard, V
from ..relation import Relation, Summed, operands, shape


class Builder(Protocol):
    """What an `emit` may use: the local graph of a rank, or the program of a block of rows."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def group(self) -> str: ...

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node: ...

    def run(self, node: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
        """The node's own operator on `values` in place of its operands."""
        ...

    def sizes(self, node: fx.Node, out: Placement) -> list[Any]:
        """The node's shape here: ints, or nodes that compute them."""
        ...

    def where(self, node: fx.Node, out: Placement) -> list[Any]:
        """Per dimension, the global indices held here: the first of a run, or a node of int64 positions."""
        ...

    def split(self, node: fx.Node, out: Placement) -> set[int]:
        """Dimensions of the node that are not whole here."""
        ...

    def seed(self) -> fx.Node:
        """The step's random seed, an int64 scalar equal on all ranks."""
        ...

    def of_batch(self, what: Any) -> fx.Node:
        """What the step's batch says on the host (`mask.Extra`): what rows see, where documents go on."""
        ...


class OnRank:
    """What builders of a rank's local graph have in common: of a split value, the rank holds its part."""

    def sizes(self: Builder, node: fx.Node, out: Placement) -> list[Any]:
        return out.local_shape(shape(node), self.rank) if isinstance(out, Shard) else list(shape(node))

    def where(self: Builder, node: fx.Node, out: Placement) -> list[Any]:
        at: list[Any] = [0] * len(shape(node))
        if isinstance(out, Shard):
            at[out.dim] = self.call(random.positions, out.held_positions[self.rank], node.meta["val"].device)
        return at

    def split(self: Builder, node: fx.Node, out: Placement) -> set[int]:
        return {out.dim} if isinstance(out, Shard) and self.ranks > 1 else set()


def rerun(b: Builder, node: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
    """The node's own operator on `values` in place of its operands."""
    taken = iter(values)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(taken))
    return b.call(node.target, *args, **kwargs)  # type: ignore[arg-type]


Emit = Callable[[Builder, Sequence[fx.Node]], fx.Node]


@dataclass(frozen=True)
class Recipe:
    """One way to get a value: `emit` on the demanded versions of other values gives it as `out`."""

    out: Placement
    demands: tuple[tuple[fx.Node, Placement], ...]
    emit: Emit


class Rule:
    """Base: subclasses give `relation`; everything else follows unless overridden."""

    def relation(self, node: fx.Node) -> Relation:
        raise NotImplementedError

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        """What the node is, given what its operands are (at least one is split); None: no rule, gather."""
        relation = self.relation(node)
        outs: dict[int, Shard] = {}
        sums: list[tuple[Summed, Shard]] = []
        for i, placement in enumerate(ins):
            for s in parts(placement):
                t = relation.forward(i, s)
                if isinstance(t, Shard):
                    outs[t.dim] = min(outs.get(t.dim, t), t, key=_unevenness)
                elif isinstance(t, Summed):
                    sums.append((t, s))
        if len(outs) == 2:
            row, col = sorted(outs)
            return Recipe(Pairwise(outs[row], outs[col]), (), never)
        if len(outs) == 1:
            return self.version(node, next(iter(outs.values())))
        if not outs and sums:
            return self.partial(node, *sums[0])
        return None

    def version(self, node: fx.Node, want: Shard) -> Recipe | None:
        """The node split as `want`, with its operands split to match and the others whole."""
        back = self.relation(node).backward(want)
        if back is None:
            return None
        demands = tuple((x, s or V) for x, s in zip(operands(node), back, strict=True))
        return Recipe(want, demands, lambda b, values: self.emit(b, node, want, values))

    def partial(self, node: fx.Node, label: Summed, s: Shard) -> Recipe | None:
        """The node as a sum over ranks: operands that have the summed dimension `label` are split along it, others vary.

        Each rank's term uses such an operand on its own positions only, so its cotangents are parts of a sum.
        """
        relation = self.relation(node)
        demands: list[tuple[fx.Node, Placement]] = []
        for i, x in enumerate(operands(node)):
            dim = next((d for d in range(len(shape(x))) if relation.forward(i, s.at(d)) == label), None)
            demands.append((x, V if dim is None else s.at(dim)))
        return Recipe(P, tuple(demands), lambda b, values: self.emit(b, node, P, values))

    def whole(self, node: fx.Node, placement: Placement) -> Recipe:
        """The node computed from whole operands, replicated or varying."""
        return Recipe(placement, tuple((x, placement) for x in operands(node)), lambda b, v: self.emit(b, node, placement, v))

    def linear(self, node: fx.Node) -> bool:
        """Is the derivative linear in the cotangent, so that parts of a sum of cotangents give parts of a sum?"""
        return True

    def why(self, node: fx.Node, ins: Sequence[Placement]) -> str:
        """What the plan says of a node that `native` has no answer to."""
        return "works along the sequence"

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        """The local operator; the default is the operator itself, unchanged."""
        return b.run(node, values)


def _unevenness(s: Shard) -> tuple[int, int]:
    """Operands in several layouts meet in the evenest: a shifted sequence comes back to the one it was shifted from."""
    return max(s.layout.sizes) * s.outer * s.inner, sum(map(len, s.layout.shards))


def never(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
    raise AssertionError("a pairwise value is only computed in a version its consumer names")


def parts(placement: Placement) -> tuple[Shard, ...]:
    """The splits of a placement: none, one, or row and column."""
    if isinstance(placement, Shard):
        return (placement,)
    return (placement.row, placement.col) if isinstance(placement, Pairwise) else ()


def is_split(placement: Placement) -> bool:
    return isinstance(placement, (Shard, Pairwise))


@dataclass(frozen=True)
class Related(Rule):
    """The operator is described by its relation and runs unchanged on local operands."""

    relate: Callable[[fx.Node], Relation]

    def relation(self, node: fx.Node) -> Relation:
        return self.relate(node)


@dataclass(frozen=True)
class Sized(Related):
    """As `Related`, and argument `position` is a literal output shape to rewrite to the local one."""

    position: int = 1

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        if not b.split(node, out):
            return b.run(node, values)
        args = list(node.args)
        args[self.position] = b.sizes(node, out)
        return b.call(node.target, *[values[0] if i == 0 and values else a for i, a in enumerate(args)], **node.kwargs)


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The node's argument of that schema name, wherever it stands."""
    if name in node.kwargs:
        return node.kwargs[name]
    for position, spec in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if spec.name == name:
            return node.args[position] if position < len(node.args) else (spec.default_value if default is None else default)
    return default


def dims_of(value: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Literal dimensions, normalised to be non-negative; None or empty means all."""
    if value is None or (not isinstance(value, int) and len(value) == 0):
        return tuple(range(rank))
    values = (value,) if isinstance(value, int) else value
    return tuple(d % rank if rank else 0 for d in values)
