"""Strategies in which blocks travel: ring, balanced ring, ring × all-to-all and halo, one recipe with four settings.

ring            head-tail layout; keys and values go to whoever needs them
balanced-ring   contiguous layout; where the mask makes work uneven, queries go to idle ranks and results come back
ring-a2a        groups of neighbouring ranks exchange heads, equal places of the groups form rings
halo            contiguous layout under a window: only the neighbours that it reaches exchange anything
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..cost_model.volumes import head_groups
from ..kernels import attend, blocks, comm, flash, random
from ..kernels.layout import Layout, contiguous, head_tail, kv_heads, split
from ..kernels.schedule import Schedule, Tiling, balanced, level_by_layout, looked_at, members, owner_computes, strip_rows
from ..kernels.sight import Grid, Sight
from ..kernels.travel import Route
from .detect import Region, Use
from .form import Form, NotASoftmax, form
from .latent import narrowed
from .mask import BatchSight
from .placement import Shard, V
from .program import Heads, ProgramBuilder
from .relation import operands, shape
from .rules.base import Builder, Recipe, argument
from .sites import Leaf, SiteContext, atmost, autocast, batch, demands, moved, row_of, strip_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Blockwise:
    """A strategy of this family. grouped: neighbouring ranks exchange heads before the ring, `near` of them."""

    layout: Callable[[int, int], Layout]
    make: Callable[..., Schedule]
    grouped: bool = False
    near: int = 1

    @property
    def params(self) -> tuple[tuple[str, int], ...]:
        return (("inner", self.near),) if self.grouped else ()

    def variants(self, region: Region, ctx: SiteContext) -> tuple[Blockwise, ...]:
        """Where heads are exchanged first, one for each size of groups: the divisors of the ranks up to the heads."""
        if not self.grouped or ctx.ranks == 1:
            return (self,)
        return tuple(replace(self, near=u) for u in head_groups(ctx.ranks, region.heads))

    def counted(self, region: Region, ctx: SiteContext) -> dict[str, Any]:
        """What travels over all ranks, in how many steps, and the busiest rank's work (at most, where batches decide)."""
        sight, ranks, least = atmost(ctx.sight(region, form(region).scores)), ctx.ranks, strip_of(region)
        rows, columns = self.layout(region.row.length, ranks), self.layout(region.columns, ranks)
        return {**_counted(self.make, sight, members(rows, self.near), members(columns, self.near), least), "inner": self.near}

    def narrowed(self, region: Region, ctx: SiteContext) -> Region:
        """The region whose columns travel as their latent, where they have one and heads are not exchanged."""
        if self.near > 1:
            return region
        if region.closing not in ctx.narrow:
            ctx.narrow[region.closing] = narrowed(region, ctx.facts)
        return ctx.narrow[region.closing]

    def latent(self, region: Region, ctx: SiteContext) -> int:
        """Bytes of one position's latent, or 0 where keys and values travel themselves."""
        low = self.narrowed(region, ctx)
        travelling = {n for n, a in low.leaves if a.col is not None and a.row is None and ctx.travels((n, a))}
        return 0 if low is region else sum(n.meta["val"].nbytes for n in travelling) // region.columns

    def lower(self, region: Region, ctx: SiteContext) -> Recipe:
        return _Lowering(self, self.narrowed(region, ctx), ctx, form(region)).recipe()

    def inapplicable(self, region: Region, ctx: SiteContext) -> str | None:
        """Why it cannot lower a region, or None."""
        try:
            found = form(region)
        except NotASoftmax as e:
            return str(e)
        columns = [u for u in region.leaves if u[1].col is not None and u[1].row is None and ctx.travels(u)]
        if not columns or any(ctx.facts.layout(shape(n)[a.col]) is None for n, a in columns if a.col is not None):
            return "its keys are whole on every rank"
        if region.row.length < ctx.ranks:
            return "it has fewer rows than there are ranks"
        if any(ctx.travels(u) and u[1].row is not None and u[1].col is not None for u in region.leaves):
            return "a value with rows and columns comes from outside it"
        if self.grouped and region.axes.head is None:
            return "it has no head dimension to split"
        if self.grouped and ctx.ranks > 1 and not self.variants(region, ctx):
            return "it has too few heads"
        if self.make is owner_computes and ctx.ranks > 1:
            sight = ctx.sight(region, found.scores)
            if not isinstance(sight, Grid):
                return "its mask is no window known beforehand"
        return None


@functools.lru_cache(maxsize=128)
def _counted(make: Callable[..., Schedule], sight: Sight, rows: Layout, columns: Layout, least: int) -> dict[str, Any]:
    """The same for all layers under one mask, and whatever the layout of the model at hand."""
    schedule = make(sight, rows, columns, Tiling(True, attend.BLOCK_ELEMENTS, least=least))
    counts: dict[str, Any] = {"moved": schedule.travelling, "steps": len(schedule.steps) - 1, "work": schedule.busiest}
    if isinstance(sight, Grid):
        counts["work"] *= looked_at(sight, rows.length, columns.length, least)
        counts["calls"] = -(-rows.size(0) // strip_rows(sight, rows.length, columns.length, least))
    return counts


RING = Blockwise(head_tail, level_by_layout)
BALANCED_RING = Blockwise(contiguous, balanced)
RING_A2A = Blockwise(head_tail, level_by_layout, grouped=True)
HALO = Blockwise(contiguous, owner_computes)
BLOCKWISE = {"halo": HALO, "ring": RING, "balanced-ring": BALANCED_RING, "ring-a2a": RING_A2A}


@dataclass
class _Lowering:
    strategy: Blockwise
    region: Region
    ctx: SiteContext
    form: Form

    def __post_init__(self) -> None:
        region, ranks = self.region, self.ctx.ranks
        self.inner = self.strategy.near
        self.shares = split(region.heads, self.inner)
        self.columns = self.ctx.facts.layout(region.columns) or contiguous(region.columns, ranks)
        self.carriers: dict[Use, blocks.Carrier] = {}

    def near(self, rank: int) -> tuple[int, ...]:
        """The ranks with which `rank` exchanges heads."""
        first = rank - rank % self.inner
        return tuple(range(first, first + self.inner))

    def heads(self, rank: int) -> Heads:
        return Heads(*self.shares[rank % self.inner], self.region.heads)

    def recipe(self) -> Recipe:
        region = self.region
        leaves = {use: self._leaf(use) for use in region.leaves}
        asked = demands(leaves)
        if self.form.sink is not None:
            asked += ((self.form.sink, V),)

        def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
            at_hand = moved(b, leaves, values[: len(leaves)])
            return self._emit(b, at_hand, values[-1] if self.form.sink is not None else None)

        return Recipe(Shard(row_of(region), region.row), asked, emit)

    def _leaf(self, use: Use) -> Leaf:
        """Activations with rows or columns travel; everything else is whole on every rank."""
        node, axes = use
        seq = axes.row if axes.row is not None else axes.col
        if (
            not self.ctx.travels(use)
            or seq is None
            or shape(node)[seq] != (self.region.row.length if axes.row is not None else self.region.columns)
        ):
            self.carriers[use] = "whole"
            return Leaf(V, lambda b, x: self._my_heads(b, use, x))
        self.carriers[use] = "row" if axes.row is not None else "col"
        layout = self.region.row if axes.row is not None else self.columns
        return Leaf(Shard(seq, layout), lambda b, x: self._exchanged(b, use, x, seq, layout))

    def _my_heads(self, b: Builder, use: Use, x: fx.Node) -> fx.Node:
        head = self._head(use)
        if self.inner == 1 or head is None:
            return x
        a, z = kv_heads(self.shares[b.rank % self.inner], self.region.groups.get(use, 1))
        return b.call(aten.narrow.default, x, head, a, z - a)

    def _head(self, use: Use) -> int | None:
        node, axes = use
        stretched = axes.head is not None and shape(node)[axes.head] == 1 and self.region.heads > 1
        return None if stretched and use not in self.region.groups else axes.head

    def _exchanged(self, b: Builder, use: Use, x: fx.Node, seq: int, layout: Layout) -> fx.Node:
        """All heads of my positions -> my heads of the positions of my group."""
        if self.inner == 1 or b.ranks == 1:
            return x
        head = self._head(use)
        if head is None:  # every rank of the group needs it: one head that all of them compute
            x = b.call(aten.unsqueeze.default, x, 0)
            wide = b.call(comm.to_heads, x, 0, seq + 1, [(0, 1)] * b.ranks, layout.shards, b.rank, b.group, self.near(b.rank))
            return b.call(aten.squeeze.dim, wide, 0)
        mine = [kv_heads(self.shares[r % self.inner], self.region.groups.get(use, 1)) for r in range(b.ranks)]
        return b.call(comm.to_heads, x, head, seq, mine, layout.shards, b.rank, b.group, self.near(b.rank))

    def _emit(self, b: Builder, leaves: dict[Use, fx.Node], sink: fx.Node | None) -> fx.Node:
        region, heads = self.region, self.heads(b.rank)
        causal = self.ctx.causal(region)
        builder = ProgramBuilder(region, heads, True, b.rank, b.ranks, b.group)
        graph, kernel_graph = builder.tile(self.form, causal)
        sight = self.ctx.sight(region, self.form.scores)
        grid = atmost(sight)
        values, carriers = [], list[blocks.Carrier]()
        for what, axes in builder.leaves:
            if isinstance(what, tuple):
                values.append(leaves[what])
                carriers.append(self.carriers[what])
                continue
            carriers.append("whole")
            whole = ((0, region.row.length if axes.row is not None else region.columns),)
            values.append(b.seed() if what == "seed" else b.call(random.positions, whole, region.closing.meta["val"].device))
        kernel = self._flash(kernel_graph)
        rows, columns = members(region.row, self.inner), members(self.columns, self.inner)
        route = Route(
            self.strategy.make,
            rows,
            columns,
            Tiling(
                kernel is not None,
                attend.BLOCK_ELEMENTS // (batch(region) * (1 if kernel else max(1, heads.count))),
                # A value that lies whole on every rank is cut where a tile stands.
                joined=kernel is not None and kernel.direct is not None and all(carriers[i] != "whole" for i in kernel.direct),
                least=strip_of(region),
            ),
            b.rank // self.inner,
            tuple(range(b.rank % self.inner, b.ranks, self.inner)),
            b.group,
        )
        out_shape, lse_shape = self._shapes(heads, rows.size(route.place))
        result = region.closing.meta["val"]
        program = blocks.BlockProgram(
            fx.GraphModule(torch.nn.Module(), graph),
            str(graph.python_code("").src),
            tuple(carriers),
            tuple(
                self._along(axes.row, what, carrier, "row")
                for (what, axes), carrier in zip(builder.leaves, carriers, strict=True)
            ),
            tuple(
                self._along(axes.col, what, carrier, "col")
                for (what, axes), carrier in zip(builder.leaves, carriers, strict=True)
            ),
            tuple(
                i
                for i, (what, _) in enumerate(builder.leaves)
                if isinstance(what, tuple) and what[0] in self.ctx.facts.differentiable
            ),
            out_shape,
            lse_shape,
            flash.accumulator(result.dtype) if sink is not None else result.dtype,
            route,
            grid,
            isinstance(sight, BatchSight),
            kernel,
            autocast(result.device.type),
        )
        cells = b.of_batch(sight) if isinstance(sight, BatchSight) else None
        both = b.call(torch.ops.asp.block_attention.default, values, cells, blocks.register(program))
        out = b.call(operator.getitem, both, 0)
        if sink is not None:
            sink = self._sink(b, sink, lse_shape, heads)
            out = b.call(blocks.with_sink, out, b.call(operator.getitem, both, 1), sink, result.dtype)
        if self.form.out_dims is not None:
            out = b.call(aten.permute.default, out, list(self.form.out_dims))
        if self.inner == 1 or b.ranks == 1:
            return out
        shares = [self.shares[r % self.inner] for r in range(b.ranks)]
        return b.call(
            comm.to_sequence, out, region.axes.head, row_of(region), shares, region.row.shards, b.rank, b.group, self.near(b.rank)
        )

    def _along(self, dim: int | None, what: object, carrier: blocks.Carrier, axis: str) -> int | None:
        """The dimension of a leaf to be cut; a dimension of size 1 is stretched and stays."""
        if dim is None or not isinstance(what, tuple) or carrier == axis:
            return dim
        return (
            dim if shape(what[0])[dim] != 1 or (self.region.row.length if axis == "row" else self.region.columns) == 1 else None
        )

    def _flash(self, graph: fx.Graph | None) -> blocks.Flash | None:
        """Attention kernels apply to scaled_dot_product_attention without dropout. They give no gradient of a mask, and their
        log-sum-exp is one number."""
        node = self.region.closing
        if graph is None or self.form.dropout is not None:
            return None
        if len(operands(node)) == 4 and operands(node)[3] in self.ctx.facts.differentiable:
            return None
        if self.ctx.sights.hides_rows(self.region):
            return None
        if not flash.applies(*(x.meta["val"] for x in operands(node)[:3])):
            return None
        (qkv, _), places = graph.output_node().args[0], [n for n in graph.nodes if n.op == "placeholder"][2:]  # type: ignore[misc]
        direct = tuple(places.index(x) for x in qkv) if all(x in places for x in qkv) else None
        alone, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        alone.graph_copy(graph, copied)
        alone.output(tuple(copied[x] for x in qkv))
        alone.eliminate_dead_code()
        taken, masked = (fx.GraphModule(torch.nn.Module(), g) for g in (alone, graph))
        return blocks.Flash(taken, masked, argument(node, "scale"), direct)

    def _shapes(self, heads: Heads, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the result and its log-sum-exp: [*batch, my rows, D_v] and [*batch, my rows]."""
        region = self.region
        size = list(shape(region.closing))
        size[row_of(region)] = rows
        if region.axes.head is not None:
            size[region.axes.head] = heads.count
        if self.form.out_dims is not None:
            order = self.form.out_dims
            size = [size[order.index(d)] for d in range(len(size))]
        if self.form.scores is None:
            return tuple(size), tuple(size[:-1])
        node, axes = self.form.scores
        scores = list(shape(node))
        scores[-2] = rows
        if axes.head is not None and scores[axes.head] == region.heads:
            scores[axes.head] = heads.count
        return tuple(size), tuple(scores[:-1])

    def _sink(self, b: Builder, sink: fx.Node, lse: tuple[int, ...], heads: Heads) -> fx.Node:
        """The sink [.., heads, 1, 1] of the heads at hand."""
        assert self.form.sink is not None and self.form.scores is not None
        size, axes = shape(self.form.sink), self.form.scores[1]
        at = None if axes.head is None else axes.head - (len(lse) + 1 - len(size))
        if self.inner == 1 or at is None or at < 0 or size[at] == 1:
            return sink
        return b.call(aten.narrow.default, sink, at, heads.first, heads.count)


__all__ = ["BLOCKWISE", "Blockwise"]
