"""A site under a strategy in which heads or whole keys move: what each leaf must become, the program, and the way back.

A strategy takes a region and gives a `Recipe`, so an attention is placed and emitted exactly like every other operator.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..kernels import attend, comm, random
from ..kernels.layout import Interval, Intervals, Layout, in_a_row, in_turns, kv_heads, split
from ..kernels.schedule import least_strip, looked_at, placed, strip_rows
from ..kernels.sight import Causal, Everything, Grid, Sight
from .detect import SDPA, Region, Use
from .facts import Facts, is_float
from .form import along_columns
from .mask import BatchSight, Sights
from .placement import Placement, Shard, V
from .program import Heads, ProgramBuilder
from .relation import operands, shape
from .rules.base import Builder, Recipe, argument

aten = torch.ops.aten


@dataclass(frozen=True)
class SiteContext:
    """What every lowering needs beside the region."""

    facts: Facts
    sights: Sights
    blocks: dict[object, tuple[attend.Block, ...]] = field(default_factory=dict)  # by what rows see: layers share them
    narrow: dict[fx.Node, Region] = field(default_factory=dict)  # by closing node: strategies share them

    @property
    def ranks(self) -> int:
        return self.facts.ranks

    def causal(self, region: Region) -> bool:
        return bool(region.closing.target is SDPA and argument(region.closing, "is_causal", False))

    def sight(self, region: Region, scores: Use | None = None) -> Sight | BatchSight:
        """What the rows of a region see; `scores` is the value under its softmax, where that is spelled out."""
        return self.sights.of(region, scores, self.facts.layout(region.columns))

    def band(self, region: Region) -> tuple[int | None, int | None]:
        """How far before and after itself a row sees, as far as that is known of every batch; None: without limit."""
        sight = self.sight(region) if region.closing.target is SDPA else Everything()
        if isinstance(sight, Everything):
            return None, None
        if isinstance(sight, Causal):
            return region.columns, 0
        grid = atmost(sight)
        assert isinstance(grid, Grid)
        return grid.band

    def travels(self, use: Use) -> bool:
        """Activations move between ranks; positions, parameters and what depends on them only are whole everywhere."""
        return use[0] in self.facts.from_data and is_float(use[0])


Move = Callable[[Builder, fx.Node], fx.Node]
Turns = Sequence[Sequence[Interval]]  # [turn][rank]: the heads computed there


@dataclass(frozen=True)
class Leaf:
    """How one leaf arrives: the placement it is demanded in, and what is done to it on the way in."""

    demand: Placement
    move: Move


def stay(b: Builder, x: fx.Node) -> fx.Node:
    return x


# Strategies ---------------------------------------------------------------------------------------


def gather_kv(region: Region, ctx: SiteContext) -> Recipe:
    """Every rank computes its own rows, for which all keys and values are gathered (LLaMA-3's context parallelism)."""
    leaves = {}
    for use in region.leaves:
        node, axes = use
        if axes.row is not None and shape(node)[axes.row] == region.row.length:
            leaves[use] = Leaf(Shard(axes.row, region.row), stay)
        elif axes.col is not None and ctx.travels(use):
            leaves[use] = _gathered(use, axes.col, ctx)
        else:
            leaves[use] = Leaf(V, stay)

    def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
        here = moved(b, leaves, values)
        return _computed(b, region, ctx, here, Heads(0, region.heads, region.heads), region.row.shards[b.rank])

    return Recipe(Shard(row_of(region), region.row), demands(leaves), emit)


def all_to_all(region: Region, ctx: SiteContext, turns: int = 1) -> Recipe:
    """Every rank computes some heads over the whole sequence (Ulysses), uneven heads included.

    In several turns each computes some of its heads, while those of the next turn come and results of the one before go back.
    """
    assert region.axes.head is not None
    head, row = region.axes.head, row_of(region)
    heads = in_turns(split(region.heads, ctx.ranks), turns)
    leaves = {use: _by_heads(use, region, heads, ctx) for use in region.leaves}

    def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
        arriving = [leaf.move(b, x) for leaf, x in zip(leaves.values(), values, strict=True)]
        # Exchanges keep this order, and `overlap` starts each as early as it can: all before the first attention, and a turn's
        # results go back before the next turn's attention. Backward is the same the other way round.
        # Values go first: they need no more than their projection, and those of keys and queries hide them.
        here = [{use: next(x) for use, x in reversed([*zip(leaves, arriving, strict=True)])} for _ in heads]
        results = []
        for at_hand, each in zip(here, heads, strict=True):
            results.append(_computed(b, region, ctx, at_hand, Heads(*each[b.rank], region.heads), ((0, region.row.length),)))
        if b.ranks == 1:
            return results[0]
        back = [
            b.call(comm.to_sequence, out, head, row, each, region.row.shards, b.rank, b.group)
            for out, each in zip(results, heads, strict=True)
        ]
        return b.call(comm.from_turns, back, head, heads) if turns > 1 else back[0]

    return Recipe(Shard(row, region.row), tuple((use[0], leaf.demand) for use, leaf in leaves.items()), emit)


def no_heads(region: Region, ctx: SiteContext) -> str | None:
    """Why a region's heads cannot be dealt out to ranks, or None if they can."""
    if region.axes.head is None:
        return "it has no head dimension to split"
    rows = [use for use in region.leaves if use[1].row is not None and ctx.travels(use)]
    if not any(axes.head is not None for _, axes in rows):
        return "its queries carry no heads"
    for node, axes in region.leaves:
        if axes.row is not None and axes.col is not None and axes.head is not None and node in ctx.facts.from_data:
            return "a value with rows, columns and heads comes from outside it"
    return None


def pairs_of_all(region: Region, ctx: SiteContext) -> float | None:
    """Pairs that a whole head goes through, counted where the mask is more than a band."""
    sight = _counted(region, ctx)
    return None if sight is None else _through(region, sight, (((0, region.row.length),),))


def pairs_of_rows(region: Region, ctx: SiteContext) -> float | None:
    """Pairs of the rank whose rows see most, counted where the mask is more than a band."""
    sight = _counted(region, ctx)
    return None if sight is None else _through(region, sight, region.row.shards)


def _through(region: Region, sight: Sight, shards: Sequence[Intervals]) -> float:
    visible = max(sum(sight.pairs(rows, (0, region.columns)) for rows in shard) for shard in shards)
    return visible * looked_at(sight, region.row.length, region.columns, strip_of(region))


def strip_of(region: Region) -> int:
    """Rows that strips of a region have at least."""
    return least_strip(region.closing.meta["val"].device.type)


def strips_of(region: Region, sight: Sight) -> int:
    """Rows of a region's strips under that sight."""
    return strip_rows(sight, region.row.length, region.columns, strip_of(region))


def covered(region: Region, ctx: SiteContext, sights: tuple[type, ...]) -> bool:
    """Whether torch's attention on whole rows is all of a region, under one of these masks."""
    return region.closing.target is SDPA and isinstance(ctx.sight(region), sights) and fused(region)


def fused(region: Region) -> bool:
    """Whether torch's attention keeps no scores: on CPU its fused kernel takes values only as wide as keys."""
    q, _, v = operands(region.closing)[:3]
    return q.meta["val"].device.type != "cpu" or shape(q)[-1] == shape(v)[-1]


def _counted(region: Region, ctx: SiteContext) -> Sight | None:
    if region.closing.target is not SDPA or isinstance(ctx.sight(region), (Everything, Causal)):
        return None
    return atmost(ctx.sight(region))


def atmost(sight: Sight | BatchSight) -> Sight:
    """What rows see in any batch, at most."""
    return sight.atmost if isinstance(sight, BatchSight) else sight


# Leaves -------------------------------------------------------------------------------------------


def _gathered(use: Use, dim: int, ctx: SiteContext) -> Leaf:
    """A split activation, gathered; each rank's use contributes a part of its gradient."""
    node = use[0]
    layout = ctx.facts.layout(shape(node)[dim])
    if layout is None or node not in ctx.facts.differentiable:
        return Leaf(V, stay)

    def move(b: Builder, x: fx.Node) -> fx.Node:
        if b.ranks == 1:
            return x
        whole = b.call(comm.gather_varying, x, dim, layout.shards, 1, 1, b.rank, b.group)
        # Backward gathers again: saved, the whole of every layer's keys and values would be the largest thing in memory.
        whole.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        whole.meta.setdefault("ac_graph_id", 0)
        return whole

    return Leaf(Shard(dim, layout), move)


@dataclass(frozen=True)
class _Arriving:
    """As `Leaf`, in turns: what `move` emits for a turn when it is asked for it; turns that need the same share it."""

    demand: Placement
    move: Callable[[Builder, fx.Node], Iterator[fx.Node]]


def _by_heads(use: Use, region: Region, turns: Turns, ctx: SiteContext) -> _Arriving:
    node, axes = use
    seq = axes.row if axes.row is not None else axes.col
    both = axes.row is not None and axes.col is not None
    head = axes.head
    if head is not None and shape(node)[head] == 1 and region.heads > 1 and use not in region.groups:
        head = None  # stretched over all heads
    needed = tuple(tuple(kv_heads(h, region.groups.get(use, 1)) for h in each) for each in turns)
    if not ctx.travels(use) or both or seq is None or (layout := _layout(use, seq, region, ctx)) is None:
        if head is None:
            return _Arriving(V, lambda b, x: itertools.repeat(x))
        return _Arriving(V, lambda b, x: (_mine(b, x, head, each) for each in needed))
    if head is None:
        leaf = _gathered(use, seq, ctx)
        return _Arriving(leaf.demand, lambda b, x: itertools.repeat(leaf.move(b, x)))

    def exchange(b: Builder, x: fx.Node, heads: Sequence[Interval]) -> fx.Node:
        return b.call(comm.to_heads, x, head, seq, heads, layout.shards, b.rank, b.group) if b.ranks > 1 else x

    def move(b: Builder, x: fx.Node) -> Iterator[fx.Node]:
        if len(set(needed)) == 1:
            yield from itertools.repeat(exchange(b, x, needed[0]))
        parts = b.call(comm.by_turns, x, head, needed)
        for i, each in enumerate(needed):
            yield exchange(b, b.call(operator.getitem, parts, i), in_a_row(each))

    return _Arriving(Shard(seq, layout), move)


def _mine(b: Builder, x: fx.Node, head: int, heads: Sequence[Interval]) -> fx.Node:
    first, last = heads[b.rank]
    return b.call(aten.narrow.default, x, head, first, last - first)


def _layout(use: Use, seq: int, region: Region, ctx: SiteContext) -> Layout | None:
    node, axes = use
    if axes.row is not None:
        return region.row
    return ctx.facts.layout(shape(node)[seq])


def row_of(region: Region) -> int:
    assert region.axes.row is not None
    return region.axes.row


def demands(leaves: dict[Use, Leaf]) -> tuple[tuple[fx.Node, Placement], ...]:
    return tuple((use[0], leaf.demand) for use, leaf in leaves.items())


def moved(b: Builder, leaves: dict[Use, Leaf], values: Sequence[fx.Node]) -> dict[Use, fx.Node]:
    return {use: leaf.move(b, x) for (use, leaf), x in zip(leaves.items(), values, strict=True)}


# The computation ----------------------------------------------------------------------------------


def _computed(
    b: Builder, region: Region, ctx: SiteContext, leaves: dict[Use, fx.Node], heads: Heads, rows: tuple[Interval, ...]
) -> fx.Node:
    """The region on the rows and heads at hand: one attention kernel where that says it all, else by blocks of rows."""
    whole = rows == ((0, region.row.length),)
    causal = ctx.causal(region)
    direct = _direct(b, region, ctx, leaves, heads, whole)
    if direct is not None:
        return direct
    trimmed = region.closing.target is SDPA and not along_columns(region)
    program = ProgramBuilder(region, heads, trimmed, b.rank, b.ranks, b.group)
    graph = program.build(causal)
    values = []
    for what, axes in program.leaves:
        if isinstance(what, tuple):
            values.append(leaves[what])
        elif what == "seed":
            values.append(b.seed())
        else:
            positions = rows if axes.row is not None else ((0, region.columns),)
            values.append(b.call(random.positions, positions, region.closing.meta["val"].device))
    run = fx.GraphModule(torch.nn.Module(), graph)
    name = attend.register(
        attend.RowProgram(
            run,
            str(run.code),
            tuple(axes.row for _, axes in program.leaves),
            tuple(axes.col if trimmed else None for _, axes in program.leaves),
            row_of(region),
            _blocks(region, ctx, rows, trimmed),
            tuple(
                i for i, (what, _) in enumerate(program.leaves) if isinstance(what, tuple) and what[0] in ctx.facts.differentiable
            ),
            autocast(region.closing.meta["val"].device.type),
            batch(region) * (1 if trimmed else max(1, heads.count)),  # attention kernels hold only the mask, which heads share
        )
    )
    return b.call(torch.ops.asp.attend.default, values, name)


def _blocks(region: Region, ctx: SiteContext, rows: tuple[Interval, ...], trimmed: bool) -> tuple[attend.Block, ...]:
    """Blocks of the rows at hand, each with the columns it sees.

    A softmax of no columns has no general answer: regions other than attention kernels see every column.
    """
    sight = atmost(ctx.sight(region)) if trimmed else Everything()
    high = strips_of(region, sight)
    key = (sight.key, rows, region.columns, high)
    if key not in ctx.blocks:
        ctx.blocks[key] = tuple(
            attend.Block(*r.local((a, z)), *sight.seen((a, z), (0, region.columns)))
            for r in placed(rows)
            for a, z in _strips(r.interval, high)
        ) or (attend.Block(0, 0, 0, region.columns),)
    return ctx.blocks[key]


def _strips(interval: Interval, high: int) -> list[Interval]:
    return [(a, min(interval[1], a + high)) for a in range(*interval, high)]


def _direct(
    b: Builder, region: Region, ctx: SiteContext, leaves: dict[Use, fx.Node], heads: Heads, whole: bool
) -> fx.Node | None:
    """scaled_dot_product_attention itself, when no mask or all of a causal one applies to the rows at hand."""
    node = region.closing
    if node.target is not SDPA or argument(node, "dropout_p", 0.0) or not fused(region):
        return None
    if heads.count == 0:
        return None  # torch's gradient of an empty attention does not depend on the cotangent: its collectives would move
    sight = ctx.sight(region)
    causal = isinstance(sight, Causal)
    if not isinstance(sight, Everything) and not (causal and whole and region.row.length == region.columns):
        return None
    me = (node, region.axes)
    q, k, v = (region.reads[(me, i)] for i in range(3))
    sources = [region.repeated.get(u, u) for u in (k, v)]
    if q not in leaves or any(s not in leaves for s in sources):
        return None  # something is computed between the leaves and the attention
    groups = {region.groups.get(s, 1) for s in sources}
    values = [leaves[s] for s in sources]
    if len(groups) > 1 or not all(map(heads.evenly, groups)):
        values = [_expanded(b, region, s, x, heads) for s, x in zip(sources, values, strict=True)]
        groups = {1}
    return b.call(SDPA, leaves[q], *values, None, 0.0, causal, scale=argument(node, "scale"), enable_gqa=groups != {1})


def _expanded(b: Builder, region: Region, use: Use, x: fx.Node, heads: Heads) -> fx.Node:
    groups = region.groups.get(use, 1)
    if groups == 1:
        return x
    return b.call(attend.expand_heads, x, use[1].head, heads.first, heads.count, heads.first // groups, groups)


def batch(region: Region) -> int:
    """Values of the result that are neither rows, heads nor the last dimension."""
    count = 1
    for d, size in enumerate(shape(region.closing)[:-1]):
        count *= size if d not in (region.axes.row, region.axes.head) else 1
    return count


def autocast(device: str) -> tuple[str, torch.dtype] | None:
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


__all__ = ["Leaf", "SiteContext", "all_to_all", "gather_kv", "no_heads"]
