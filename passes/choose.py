"""Which strategy each site gets: the one that was asked for where it applies, else the one that sends least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..cost_model.plan import Rejected, Site
from ..cost_model.states import LINEAR_COSTS
from ..cost_model.volumes import COSTS, Attention
from ..kernels.layout import head_tail
from ..kernels.sight import Causal, Everything
from .capture import source_line
from .detect import SDPA, Region, Use, module_path
from .facts import Facts
from .mask import BatchSight
from .place import Types
from .recurrence import RECURRENT, Recurrent
from .relation import shape
from .rules.linear import STATE
from .sites import SiteContext, batch
from .strategies import LOWERINGS

STRATEGIES = tuple(dict.fromkeys([*LOWERINGS, *RECURRENT]))
Prices = Mapping[str, tuple[int, int]]  # by strategy: bytes sent by a rank, forward and backward
Reasons = Mapping[str, str | None]  # by strategy: why it cannot apply, or None


def attention(region: Region, ctx: SiteContext, types: Types, asked: str | None) -> Site:
    """Choose for a softmax attention, put its recipe into the types, and say why."""
    sizes = _sizes(region, ctx)
    reasons = {name: _unusable(region, name, ctx) for name in LOWERINGS}
    priced = {
        name: replace(sizes, latent=row.latent(region, ctx), moved=row.moved(region, ctx), inner=row.inner(region, ctx.ranks))
        if reasons[name] is None
        else replace(sizes, inner=row.inner(region, ctx.ranks))
        for name, row in LOWERINGS.items()
    }
    prices = {name: COSTS[name](priced[name]) for name in LOWERINGS}
    best, notes = _best(prices, reasons, asked)
    if priced[best].latent:
        notes.append(f"keys and values travel as their latent, {priced[best].latent} B a position")
    types.recipes[region.closing] = LOWERINGS[best].lower(region, ctx)
    return Site(
        module_path(region.closing),
        "softmax attention" if region.softmax else "pairwise",
        best,
        source_line(region.closing),
        sizes.batch,
        sizes.q_heads,
        sizes.kv_heads,
        sizes.q_seq,
        sizes.kv_seq,
        sizes.head_dim,
        sizes.value_dim,
        f"mask {_mask_name(region, ctx)}",
        *prices[best],
        "; ".join(notes),
        _rejected(best, prices, reasons, asked),
    )


def recurrence(site: Recurrent, ctx: SiteContext, types: Types, asked: str | None) -> Site:
    """Choose for a linear attention, put its recipe into the types, and say why."""
    sizes = site.sizes
    reasons = {name: row.inapplicable(site) for name, row in RECURRENT.items()}
    prices = {name: LINEAR_COSTS[name](sizes) for name in RECURRENT}
    best, notes = _best(prices, reasons, asked)
    types.recipes[site.node] = RECURRENT[best].lower(site, ctx)
    return Site(
        module_path(site.node),
        "last state" if site.node.target is STATE else "linear attention",
        best,
        source_line(site.node),
        sizes.batch,
        sizes.heads,
        sizes.key_heads,
        sizes.seq,
        sizes.seq,
        sizes.key_dim,
        sizes.value_dim,
        f"state {site.what}",
        *prices[best],
        "; ".join(notes),
        _rejected(best, prices, reasons, asked),
    )


def _best(prices: Prices, reasons: Reasons, asked: str | None) -> tuple[str, list[str]]:
    """The strategy taken, and a note where it is not the one asked for. What is no strategy for this kind was not asked of it."""
    why = reasons.get(asked) if asked else None
    if asked is not None and asked in prices and why is None:
        return asked, []
    usable = [name for name in prices if reasons[name] is None]
    notes = [f"{asked} cannot apply: {why}"] if why else []
    return min(usable, key=lambda name: sum(prices[name])), notes


def _rejected(best: str, prices: Prices, reasons: Reasons, asked: str | None) -> tuple[Rejected, ...]:
    equal = "not asked for" if asked in prices else "sends no less"
    more = "not asked for" if asked in prices else "sends more"
    return tuple(
        Rejected(
            name,
            reasons[name] or (equal if price == prices[best] else more),
            None if reasons[name] else sum(price),
        )
        for name, price in prices.items()
        if name != best
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


def _unusable(region: Region, name: str, ctx: SiteContext) -> str | None:
    """Why a strategy cannot be taken for a region, or None. The layout is one choice for the whole model."""
    if LOWERINGS[name].layout not in (None, ctx.facts.arrange):
        return f"the model's sequence is in {layout_name(ctx.facts)} layout"
    return LOWERINGS[name].inapplicable(region, ctx)


def layout_name(known: Facts) -> str:
    return "head-tail" if known.arrange is head_tail else "contiguous"


def _mask_name(region: Region, ctx: SiteContext) -> str:
    if region.closing.target is not SDPA:
        return "by rows"
    sight = ctx.sight(region)
    return {Causal: "causal", Everything: "none", BatchSight: "by batch"}.get(type(sight), "by rows")
