"""Linear attention under each strategy: states that travel between ranks, or heads that change hands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..cost_model import states
from ..kernels import attend, comm, linear
from ..kernels.layout import Interval, Layout, kv_heads, split
from ..kernels.linear import HEADS, TOKENS
from .place import Types
from .placement import P, Placement, Shard, V
from .relation import shape
from .rules.base import Builder, Recipe, never
from .rules.linear import OPERATORS, STATE, demands, operands_given
from .sites import SiteContext

aten = torch.ops.aten
BLOCKS = 8  # pieces of a state in a chain: hops overlap, and a message is still worth its latency
ALONE: tuple[str, tuple[int, ...], str] = ("chain", (0, 1, 1, 1), "")


@dataclass(frozen=True)
class Recurrent:
    """One linear attention of the graph whose tokens are split over ranks."""

    node: fx.Node
    layout: Layout

    @property
    def sizes(self) -> states.LinearAttention:
        q, k, v, decay, remove = (shape(x) if isinstance(x, fx.Node) else None for x in self.node.args[:5])
        assert q and k and v
        width = self.node.args[2].meta["val"].element_size()  # type: ignore[union-attr]
        ranks = self.layout.ranks
        return states.LinearAttention.of(q, k, v, decay, remove, width, ranks, neighbours(ranks))

    @property
    def what(self) -> str:
        """In words: what becomes of the state at each token."""
        sizes = self.sizes
        kept = {0: "all kept", 1: "a decay per head"}.get(sizes.decays, "a decay per row")
        return kept + (", corrected" if sizes.remove else "") + (", by documents" if operands_given(self.node)[5] else "")


def recurrences(graph: fx.Graph, types: Types) -> list[Recurrent]:
    """Every linear attention whose tokens are split."""
    found = []
    for node in graph.nodes:
        if node.target in OPERATORS and types.recipes[node].emit is never:
            layout = next(p.layout for _, p in types.recipes[node].demands if isinstance(p, Shard))
            found.append(Recurrent(node, layout))
    return found


def neighbours(ranks: int) -> int:
    """How many ranks are taken to be close to each other: the largest divisor up to √P."""
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)


@dataclass(frozen=True)
class RecurrentStrategy:
    """One row of `RECURRENT`, to be read beside `cost_model.states.LINEAR_COSTS`. inapplicable: why it cannot apply, or None."""

    lower: Callable[[Recurrent, SiteContext], Recipe]
    inapplicable: Callable[[Recurrent], str | None] = lambda site: None


# Lowerings ----------------------------------------------------------------------------------------


def _scanned(algorithm: str, site: Recurrent, ctx: SiteContext) -> Recipe:
    """Every rank computes its own tokens, from the state that the ranks before leave."""
    node, layout = site.node, site.layout
    given = operands_given(node)
    starts = node.args[5]
    links = ctx.sights.links(starts, layout) if isinstance(starts, fx.Node) and ctx.ranks > 1 else None

    def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
        taken = iter(values)
        operand = [next(taken) if there else None for there in given]
        linked = b.of_batch(links) if links is not None else None
        places = (algorithm, (b.rank, b.ranks, BLOCKS, neighbours(b.ranks)), b.group)
        return _computed(b, node, [*operand, linked], places)

    out: Placement = P if node.target is STATE else Shard(TOKENS, layout)
    return Recipe(out, demands(node, layout), emit)


def _computed(b: Builder, node: fx.Node, values: Sequence[fx.Node | None], places: tuple[str, tuple[int, ...], str]) -> fx.Node:
    """Under activation checkpointing only the state found is held, and nothing travels again."""
    again = "recompute" in node.meta
    out = b.call(linear.on_rank, *values, *node.args[7:9], *places, not again, node.target is STATE)
    if again:
        out.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return out


def _by_heads(site: Recurrent, ctx: SiteContext) -> Recipe:
    """Every rank computes some heads over all tokens, uneven heads included."""
    node, layout, sizes = site.node, site.layout, site.sizes
    heads = split(sizes.heads, ctx.ranks)
    given = operands_given(node)
    asked = [(x, V if shape(x) == shape(node)[:2] else p) for x, p in demands(node, layout)]  # starts: whole everywhere

    def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
        taken = iter(values)
        operand = [next(taken) if there else None for there in given]
        first, last = heads[b.rank]
        for i, x in enumerate(operand):
            if x is None or i == 5 or b.ranks == 1:
                continue
            if i == 6:
                operand[i] = b.call(aten.narrow.default, x, 1, first, last - first)
                continue
            groups = sizes.heads // shape(node.args[i])[HEADS]  # type: ignore[arg-type]
            mine = tuple(kv_heads(h, groups) for h in heads)
            operand[i] = b.call(comm.to_heads, x, HEADS, TOKENS, mine, layout.shards, b.rank, b.group)
            if not _aligned(heads[b.rank], groups):
                operand[i] = b.call(attend.expand_heads, operand[i], HEADS, first, last - first, mine[b.rank][0], groups)
        out = _computed(b, node, [*operand, None], ALONE)
        if b.ranks == 1:
            return out
        return b.call(comm.to_sequence, out, HEADS, TOKENS, heads, layout.shards, b.rank, b.group)

    return Recipe(Shard(TOKENS, layout), tuple(asked), emit)


def _aligned(heads: Interval, groups: int) -> bool:
    return heads[0] % groups == 0 and heads[1] % groups == 0


def _no_heads(site: Recurrent) -> str | None:
    if site.node.target is STATE:
        return "only the last state is asked for"
    if site.sizes.heads < site.layout.ranks:
        return f"it has {site.sizes.heads} heads for {site.layout.ranks} ranks"
    return None


def _one_node(site: Recurrent) -> str | None:
    return "there is one level of ranks" if neighbours(site.layout.ranks) == 1 else None


RECURRENT: dict[str, RecurrentStrategy] = {
    "all-scan": RecurrentStrategy(functools.partial(_scanned, "chain")),
    "log-step": RecurrentStrategy(functools.partial(_scanned, "log-step")),
    "two-level": RecurrentStrategy(functools.partial(_scanned, "two-level"), _one_node),
    "gather-states": RecurrentStrategy(functools.partial(_scanned, "gather")),
    "all-to-all": RecurrentStrategy(_by_heads, _no_heads),
}
