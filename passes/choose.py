"""What can be done with each site, asked of the planner; and what it decides, put into the types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..cost_model.plan import Rejected, Site
from ..cost_model.problem import Candidate, Choice, SiteProblem, as_row
from ..cost_model.volumes import Attention
from ..kernels.layout import head_tail
from ..kernels.sight import Causal, Everything
from .capture import source_line
from .detect import SDPA, Region, Use, layer_of, module_path
from .facts import Facts
from .mask import BatchSight
from .place import Types
from .recurrence import RECURRENT, Recurrent
from .relation import shape
from .rules.base import Recipe
from .rules.linear import STATE
from .sites import SiteContext, batch
from .strategies import LOWERINGS

STRATEGIES = tuple(dict.fromkeys([*LOWERINGS, *RECURRENT]))


@dataclass(frozen=True)
class Open:
    """A site before the decision: the node that it ends in, what the plan says of it, and for each candidate how it is
    lowered.
    """

    node: fx.Node
    problem: SiteProblem
    lower: tuple[Callable[[], Recipe], ...]
    described: Site


def attention(region: Region, ctx: SiteContext) -> Open:
    """The ways to run a softmax attention."""
    sizes, node = _sizes(region, ctx), region.closing
    candidates, lower = [], []
    for name, row in LOWERINGS.items():
        reason = row.inapplicable(region, ctx)
        for way in (row,) if reason else row.variants(region, ctx):
            counted = sizes if reason else replace(sizes, latent=way.latent(region, ctx), **way.counted(region, ctx))
            layout = None if way.layout is None else layout_name(way.layout)
            candidates.append(Candidate(name, None if reason else counted, layout, way.params, reason or ""))
            lower.append(functools.partial(way.lower, region, ctx))
    kind = "softmax attention" if region.softmax else "pairwise"
    described = Site(
        module_path(node),
        kind,
        "",
        source_line(node),
        sizes.batch,
        sizes.q_heads,
        sizes.kv_heads,
        sizes.q_seq,
        sizes.kv_seq,
        sizes.head_dim,
        sizes.value_dim,
        f"mask {_mask_name(region, ctx)}",
        0,
        0,
    )
    return _open(node, kind, candidates, lower, described)


def recurrence(site: Recurrent, ctx: SiteContext) -> Open:
    """The ways to run a linear attention."""
    sizes = site.sizes
    candidates, lower = [], []
    for name, row in RECURRENT.items():
        reason = row.inapplicable(site)
        for params in ({},) if reason else row.variants(site):
            counted = None if reason else replace(sizes, **params)  # type: ignore[arg-type]
            candidates.append(Candidate(name, counted, None, tuple(params.items()), reason or ""))
            lower.append(functools.partial(row.lower, site, ctx, **params))
    kind = "last state" if site.node.target is STATE else "linear attention"
    described = Site(
        module_path(site.node),
        kind,
        "",
        source_line(site.node),
        sizes.batch,
        sizes.heads,
        sizes.key_heads,
        sizes.seq,
        sizes.seq,
        sizes.key_dim,
        sizes.value_dim,
        f"state {site.what}",
        0,
        0,
    )
    return _open(site.node, kind, candidates, lower, described)


def _open(
    node: fx.Node, kind: str, candidates: Sequence[Candidate], lower: Sequence[Callable[[], Recipe]], described: Site
) -> Open:
    return Open(node, SiteProblem(described.name, kind, layer_of(node), tuple(candidates)), tuple(lower), described)


def settle(site: Open, choice: Choice, types: Types) -> Site:
    """Put the chosen recipe into the types; the site as the plan shows it."""
    chosen = choice.candidate
    number = next(
        i
        for i, c in enumerate(site.problem.candidates)
        if (c.strategy, c.params) == (chosen.strategy, chosen.params) and not c.reason
    )
    types.recipes[site.node] = site.lower[number]()
    notes = list(choice.notes)
    latent = getattr(chosen.sizes, "latent", 0)
    if latent:
        notes.append(f"keys and values travel as their latent, {latent} B a position")
    rejected = tuple(
        Rejected(c.strategy, r.reason, r.bytes_sent, r.seconds, dict(c.params), as_row(c.sizes))
        for r in choice.refused
        for c in [r.candidate]
    )
    return replace(
        site.described,
        strategy=chosen.strategy,
        bytes_forward=choice.bytes_sent[0],
        bytes_backward=choice.bytes_sent[1],
        note="; ".join(notes),
        params=dict(chosen.params),
        seconds=choice.seconds,
        saved=choice.saved,
        rejected=rejected,
        layer=site.problem.layer,
        sizes=as_row(chosen.sizes),
    )


# Softmax attention --------------------------------------------------------------------------------


def _sizes(region: Region, ctx: SiteContext) -> Attention:
    """The region's sizes, read off the activations that enter it."""
    rows = [use for use in region.leaves if use[1].row is not None and use[1].col is None and ctx.travels(use)]
    cols = [use for use in region.leaves if use[1].col is not None and use[1].row is None and ctx.travels(use)]
    many = batch(region)

    def inner(use: Use) -> int:
        node, axes = use
        held = [shape(node)[d] for d in (axes.row, axes.col, axes.head) if d is not None]
        count = node.meta["val"].numel()
        for size in (*held, many):
            count //= max(1, size)
        return max(1, count)

    groups = max((region.groups.get(use, 1) for use in cols), default=1)
    dims = [inner(use) for use in cols]
    return Attention(
        many,
        region.heads,
        region.heads // groups,
        region.row.length,
        region.columns,
        sum(inner(use) for use in rows) or (dims[0] if dims else 1),
        dims[-1] if dims else 1,
        region.closing.meta["val"].element_size(),
        ctx.ranks,
        *ctx.band(region),
    )


def layout_name(arrange: object) -> str:
    return "head-tail" if arrange is head_tail else "contiguous"


def layout_of(known: Facts) -> str:
    return layout_name(known.arrange)


def _mask_name(region: Region, ctx: SiteContext) -> str:
    if region.closing.target is not SDPA:
        return "by rows"
    sight = ctx.sight(region)
    return {Causal: "causal", Everything: "none", BatchSight: "by batch"}.get(type(sight), "by rows")
