"""A region of wide values as a program for some of a rank's tokens, and its place among the types."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from ..kernels import tiles
from ..kernels.layout import Layout
from .capture import source_line
from .facts import Facts
from .lower import under_modes
from .place import Types, normal
from .placement import Placement, Shard
from .relation import shape
from .rules.base import Builder, Recipe, rerun
from .sites import autocast

aten = torch.ops.aten


class NotLocal(Exception):
    """A value of the region must exist whole, or needs other tokens than its own; the message says which and why."""


@dataclass(frozen=True)
class Wide:
    """A region in program order: what it reads, in which placement, and what it gives.

    `along[i]` is where result i carries tokens (None: it is a sum over them). `program(rows, *leaves)` gives the results on some
    tokens. `leaves` are values of the model, or what is made on the rank (the seed, positions). Over each position stand `widest`
    elements, the batch included, and `bytes` of all wide values together.
    """

    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    along: tuple[tiles.Along | None, ...]
    layout: Layout
    program: fx.GraphModule
    leaves: tuple[Leaf, ...]
    widest: int
    bytes: int
    loss: bool

    @property
    def weights(self) -> list[fx.Node]:
        """Values of the model that it reads whole for every tile."""
        return [leaf.what[0] for leaf in self.leaves if isinstance(leaf.what, tuple) and leaf.along is None]


@dataclass(frozen=True)
class Leaf:
    """`what`: a value in a placement, or how it is made. `along`: where it carries tokens."""

    what: tuple[fx.Node, Placement] | Callable[[Builder], fx.Node]
    along: tiles.Along | None


@dataclass
class TileBuilder:
    """Emits a region into a graph `run(rows, *leaves)`: the third thing rules can emit into.

    What a rule asks for that takes other ranks is refused, by raising NotLocal.
    """

    facts: Facts
    layout: Layout
    graph: fx.Graph = field(default_factory=fx.Graph)
    leaves: list[Leaf] = field(default_factory=list)
    node: fx.Node | None = None
    _made: dict[object, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = self.graph.placeholder("rows")
        self._last = self.rows

    def build(self, order: Sequence[fx.Node], types: Types, results: Sequence[fx.Node]) -> list[tuple[fx.Node, Placement]]:
        """Emit the nodes of a region; the values of the model that it reads. Raises NotLocal."""
        values: dict[fx.Node, fx.Node] = {}
        for node in order:
            recipe, self.node = types.recipes[node], node
            self.along(node, recipe.out)
            taken = [self._value(x, normal(x, p, self.facts), types, values) for x, p in recipe.demands]
            values[node] = out = under_modes(self, self.facts, node, functools.partial(recipe.emit, self, taken))
            if node in self.facts.no_grad and isinstance(node.meta["val"], Tensor):
                values[node] = self.call(aten.detach.default, out)
        self.graph.output(tuple(values[n] for n in results))
        self.graph.lint()
        return [leaf.what for leaf in self.leaves if isinstance(leaf.what, tuple)]

    def _value(self, x: fx.Node, placement: Placement, types: Types, values: dict[fx.Node, fx.Node]) -> fx.Node:
        if x in values:
            if types.of(x) != placement:
                raise NotLocal(f"{self._here()} needs {x} as {placement}")
            return values[x]
        if not isinstance(placement, Shard) and isinstance(types.of(x), Shard):
            raise NotLocal(f"{self._here()} needs all of {x}")
        return self._leaf((x, placement), (x, placement), self.along(x, placement))

    def along(self, x: fx.Node, placement: Placement) -> tiles.Along | None:
        """Where a value carries the region's tokens. Raises NotLocal where it carries others."""
        if not isinstance(placement, Shard):
            return None
        if placement.layout != self.layout:
            raise NotLocal(f"{self._here()} has the sequence in another order, or a part of it")
        return tiles.Along(placement.dim, placement.outer, placement.inner)

    def _leaf(self, key: object, what: Any, along: tiles.Along | None) -> fx.Node:
        if key not in self._made:
            with self.graph.inserting_after(self._last):
                self._last = self._made[key] = self.graph.placeholder(f"leaf_{len(self.leaves)}")
            self.leaves.append(Leaf(what, along))
        return self._made[key]

    def _here(self) -> str:
        assert self.node is not None
        return f"{self.node.target} at {source_line(self.node)}"

    # What rules use -----------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def run(self, node: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
        return rerun(self, node, values)

    def sizes(self, node: fx.Node, out: Placement) -> list[Any]:
        sizes: list[Any] = list(shape(node))
        if isinstance(out, Shard):
            many = out.outer * out.inner
            sizes[out.dim] = self.rows if many == 1 else self.call(operator.mul, self.rows, many)
        return sizes

    def where(self, node: fx.Node, out: Placement) -> list[Any]:
        at: list[Any] = [0] * len(shape(node))
        if isinstance(out, Shard):
            along = tiles.Along(0, out.outer, out.inner)
            at[out.dim] = self._leaf(("positions", out), lambda b: b.where(node, out)[out.dim], along)
        return at

    def split(self, node: fx.Node, out: Placement) -> set[int]:
        return {out.dim} if isinstance(out, Shard) else set()

    def seed(self) -> fx.Node:
        return self._leaf("seed", lambda b: b.seed(), None)

    def of_batch(self, what: Any) -> fx.Node:
        raise NotLocal(f"{self._here()} asks what the batch says")

    @property
    def rank(self) -> NoReturn:
        raise NotLocal(f"{self._here()} works along the sequence")

    ranks = group = rank


# Into the types -----------------------------------------------------------------------------------


def settle(region: Wide, rows: int, known: Facts, types: Types) -> None:
    """Put the region into the types: each of its results comes from one operator that runs it in tiles of `rows` positions."""
    call = _Call(region, rows, known)
    demands = tuple(leaf.what for leaf in region.leaves if isinstance(leaf.what, tuple))
    for i, node in enumerate(region.results):
        types.recipes[node] = Recipe(types.of(node), demands, call.result(i))


@dataclass
class _Call:
    """The operator, emitted into each graph once, for all results."""

    region: Wide
    rows: int
    facts: Facts
    made: tuple[Builder, fx.Node] | None = None

    def result(self, i: int) -> Callable[[Builder, Sequence[fx.Node]], fx.Node]:
        return lambda b, values: b.call(operator.getitem, self._call(b, values), i)

    def _call(self, b: Builder, values: Sequence[fx.Node]) -> fx.Node:
        if self.made is None or self.made[0] is not b:
            given = iter(values)
            leaves = [next(given) if isinstance(leaf.what, tuple) else leaf.what(b) for leaf in self.region.leaves]
            self.made = b, b.call(torch.ops.asp.tiled.default, leaves, tiles.register(self._program(b.rank)))
        return self.made[1]

    def _program(self, rank: int) -> tiles.TileProgram:
        region = self.region
        leaves = [leaf.what[0] if isinstance(leaf.what, tuple) else None for leaf in region.leaves]
        return tiles.TileProgram(
            region.program,
            str(region.program.code),
            tuple(leaf.along for leaf in region.leaves),
            region.along,
            region.layout.size(rank),
            self.rows,
            tuple(i for i, x in enumerate(leaves) if x in self.facts.differentiable),
            tuple(i for i, n in enumerate(region.results) if n.meta["val"].is_floating_point()),
            autocast(region.nodes[0].meta["val"].device.type),
        )


def notes(tiled: Sequence[tuple[Wide, int]], whole: Mapping[fx.Node, str]) -> list[str]:
    """What the plan says of regions in tiles, equal ones together, and of losses that are computed whole."""
    equal: dict[object, list[tuple[Wide, int]]] = {}
    for region, rows in tiled:
        equal.setdefault((region.loss, rows, region.bytes, region.layout), []).append((region, rows))
    found = []
    for alike in equal.values():
        (region, rows), several = alike[0], len(alike) > 1
        name = f"{len(alike)} {'loss' if region.loss else 'feed-forward block'}{several * ('es' if region.loss else 's')}"
        most = max(region.layout.sizes)
        found.append(
            f"{name} in tiles of {rows} positions, {math.ceil(most / rows)} on a rank: {region.bytes * most / 1e6:,.1f} MB"
            f"{' each' * several} never exist whole, and are computed once more in backward ({source_line(region.nodes[0])})"
        )
    return found + [f"{source_line(node)} was not computed in tiles: {why}" for node, why in whole.items()]


__all__ = ["NotLocal", "TileBuilder", "Wide", "notes", "settle"]
