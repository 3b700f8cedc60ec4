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
        return states.LinearAttention.of(q, k, v, decay, remove, width, self.layout.ranks)

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


Params = dict[str, int]


@dataclass(frozen=True)
class RecurrentStrategy:
    """One row of `RECURRENT`, to be read beside `cost_model.prices.LINEAR_COSTS`. lower takes one of the variants' parameters.
    inapplicable: why it cannot apply, or None."""

    lower: Callable[..., Recipe]
    inapplicable: Callable[[Recurrent], str | None] = lambda site: None
    variants: Callable[[Recurrent], Sequence[Params]] = lambda site: ({},)


# Lowerings ----------------------------------------------------------------------------------------


def _scanned(algorithm: str, site: Recurrent, ctx: SiteContext, blocks: int = 1, node: int = 1) -> Recipe:
    """Every rank computes its own tokens, from the state that the ranks before leave."""
    at, layout = site.node, site.layout
    given = operands_given(at)
    starts = at.args[5]
    links = ctx.sights.links(starts, layout) if isinstance(starts, fx.Node) and ctx.ranks > 1 else None

    def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
        taken = iter(values)
        operand = [next(taken) if there else None for there in given]
        linked = b.of_batch(links) if links is not None else None
        return _computed(b, at, [*operand, linked], (algorithm, (b.rank, b.ranks, blocks, node), b.group))

    out: Placement = P if at.target is STATE else Shard(TOKENS, layout)
    return Recipe(out, demands(at, layout), emit)


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


def _chains(site: Recurrent) -> Sequence[Params]:
    return [{"blocks": k} for k in states.chains(site.sizes)]


def _nodes(site: Recurrent) -> Sequence[Params]:
    return [{"node": n} for n in states.nodes(site.layout.ranks)]


def _one_node(site: Recurrent) -> str | None:
    return None if _nodes(site) else "there is one level of ranks"


RECURRENT: dict[str, RecurrentStrategy] = {
    "all-scan": RecurrentStrategy(functools.partial(_scanned, "chain"), variants=_chains),
    "log-step": RecurrentStrategy(functools.partial(_scanned, "log-step")),
    "two-level": RecurrentStrategy(functools.partial(_scanned, "two-level"), _one_node, _nodes),
    "gather-states": RecurrentStrategy(functools.partial(_scanned, "gather")),
    "all-to-all": RecurrentStrategy(_by_heads, _no_heads),
}
