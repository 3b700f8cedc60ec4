"""The passes in order: capture, place, detect, plan, decide, lower, verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..cost_model.plan import Fallback, Plan, Rejected, Site
from ..cost_model.volumes import COSTS, Attention
from ..kernels.errors import AutospError
from ..kernels.layout import Layout, contiguous, head_tail
from ..kernels.sight import Causal, Everything
from . import detect, facts, place
from .capture import Captured, capture, source_line
from .count import collectives
from .lower import Lowering, Spread, lower
from .mask import BatchSight, Constants, Sights
from .placement import R, Shard
from .relation import operands, shape
from .sites import SiteContext
from .strategies import LOWERINGS
from .verify import verify

aten = torch.ops.aten


class SequenceError(AutospError):
    """The sequence cannot be split over the ranks."""


class StrategyError(AutospError):
    """A strategy that was asked for does not exist or cannot be used."""


@dataclass(frozen=True)
class Settings:
    """What the user may choose about the compilation of one graph."""

    strategy: str | None = None
    outputs: str = "local"
    seq_dim: int | Mapping[str, int] = 1
    compiler: str = "inductor"
    grad_sync: str = "autosp"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("strategy", self.strategy, (None, *LOWERINGS)),
            ("outputs", self.outputs, ("local", "gather")),
            ("compiler", self.compiler, ("inductor", "aot_eager")),
            ("grad_sync", self.grad_sync, ("autosp", "external")),
        ):
            if value not in allowed:
                raise StrategyError(f"{name}={value!r} is not known; choose from {', '.join(map(repr, allowed))}")


@dataclass
class Compiled:
    """A rank's local graph, its plan, and what it takes after the graph's own inputs: "seed", and cells of each batch."""

    module: fx.GraphModule
    captured: Captured
    plan: Plan
    extras: tuple[str | BatchSight, ...]
    sites: list[detect.Region] = field(default_factory=list)


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], spread: Spread, settings: Settings) -> Compiled:
    """Dynamo's graph into this rank's local graph and the plan."""
    captured = capture(gm, example_inputs)
    return compile_captured(captured, spread, settings)


def compile_captured(captured: Captured, spread: Spread, settings: Settings) -> Compiled:
    """A captured graph into this rank's local graph and the plan."""
    arrange = (LOWERINGS[settings.strategy].layout if settings.strategy else None) or contiguous
    known = facts.read(captured, spread.ranks, arrange)
    _refuse_short(captured, known, settings)
    types = _typed(captured, known, settings)
    ctx = SiteContext(known, Sights(captured, Constants(captured)))
    regions, refused = detect.regions(captured, known, types)
    sites = [_choose(region, ctx, types, settings) for region in regions]
    decisions = place.decide(captured, known, types, settings.outputs == "gather")
    module, low = lower(captured, known, decisions, spread)
    fake_mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in captured.module.graph.nodes if n.op == "placeholder"])
    verify(module, captured, low, fake_mode)
    plan = _plan(captured, types, decisions, low, sites, refused, settings)
    return Compiled(module, captured, plan, tuple(low.extras), regions)


# Where sequences start ----------------------------------------------------------------------------


def _refuse_short(captured: Captured, known: facts.Facts, settings: Settings) -> None:
    lengths = [shape(n)[-2] for n in captured.module.graph.nodes if n.target is detect.SDPA for n in operands(n)[:2]]
    for node in facts.score_matmuls(captured.module.graph):
        lengths += shape(node)[-2:]
    for node, item in known.inputs.items():
        dim = _hint(item, settings)
        if item.kind == "data" and not node.meta["val"].is_floating_point() and dim is not None and len(shape(node)) > dim:
            lengths.append(shape(node)[dim])
    if lengths and max(lengths) < known.ranks:
        raise SequenceError(
            f"the longest sequence of the model has {max(lengths)} positions, fewer than the {known.ranks} ranks of the sp axis; "
            f"fix: use a longer sequence or a mesh with at most {max(lengths)} ranks on sp"
        )


def _hint(item: Any, settings: Settings) -> int | None:
    """The sequence dimension the user declared for an input, if any."""
    if isinstance(settings.seq_dim, int):
        return settings.seq_dim
    return next((dim for name, dim in settings.seq_dim.items() if f"'{name}'" in item.source or item.source == name), None)


def _typed(captured: Captured, known: facts.Facts, settings: Settings) -> place.Types:
    """Typing with seeds: attention's operands, embeddings of the batch, then hinted float inputs if nothing was found."""
    seeds = _seeds(captured, known, settings)
    types = place.natural(captured, known, seeds)
    declared = not isinstance(settings.seq_dim, int)
    if declared or not any(isinstance(types.of(n), Shard) for n in types.recipes):
        for node, item in known.inputs.items():
            dim = _hint(item, settings)
            value = node.meta["val"]
            if item.kind == "data" and value.is_floating_point() and dim is not None and value.dim() > dim:
                layout = known.layout(value.shape[dim])
                if layout is not None:
                    for user in node.users:
                        _seed(seeds, user, node, Shard(dim, layout))
        types = place.natural(captured, known, seeds)
    return types


def _seeds(captured: Captured, known: facts.Facts, settings: Settings) -> place.Seeds:
    seeds: place.Seeds = {}

    def start(node: fx.Node, i: int, dim: int) -> None:
        x = operands(node)[i]
        layout = known.layout(shape(x)[dim])
        if layout is not None:
            row = seeds.setdefault(node, [R] * len(operands(node)))
            row[i] = Shard(dim % len(shape(x)), layout)

    for node in captured.module.graph.nodes:
        if node.target is detect.SDPA:
            start(node, 0, -2)
        elif node.target is aten.embedding.default and operands(node)[1] in known.from_data:
            index = operands(node)[1]
            dims = {_hint(item, settings) for item in known.inputs.values() if item.kind == "data"} - {None}
            for dim in dims:
                if dim is not None and len(shape(index)) > dim:
                    start(node, 1, dim)
    for node in facts.score_matmuls(captured.module.graph):
        xs = operands(node)
        if node.target is aten.einsum.default:
            _start_einsum(node, start)
            continue
        first = len(xs) - 2
        start(node, first, -2)
        if xs[first + 1] in known.from_data:
            start(node, first + 1, -1)
    return seeds


def _start_einsum(node: fx.Node, start: Any) -> None:
    """Rows and columns of scores spelled as einsum are the last two labels of its result."""
    terms, out = str(node.args[0]).replace(" ", "").split("->")
    for i, (term, label) in enumerate(zip(terms.split(","), out[-2:], strict=False)):
        if label in term:
            start(node, i, term.index(label))


def _seed(seeds: place.Seeds, user: fx.Node, node: fx.Node, s: Shard) -> None:
    xs = operands(user)
    row = seeds.setdefault(user, [R] * len(xs))
    for i, x in enumerate(xs):
        if x is node:
            row[i] = s


# Choosing -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chosen:
    region: detect.Region
    site: Site


def _sizes(region: detect.Region, ctx: SiteContext) -> Attention:
    """The region's sizes, read off the activations that enter it."""
    rows = [use for use in region.leaves if use[1].row is not None and use[1].col is None and ctx.travels(use)]
    cols = [use for use in region.leaves if use[1].col is not None and use[1].row is None and ctx.travels(use)]
    out = shape(region.closing)
    batch = 1
    for d, size in enumerate(out[:-1]):
        batch *= size if d not in (region.axes.row, region.axes.head) else 1

    def inner(use: detect.Use) -> int:
        node, axes = use
        held = [shape(node)[d] for d in (axes.row, axes.col, axes.head) if d is not None]
        count = node.meta["val"].numel()
        for size in (*held, batch):
            count //= max(1, size)
        return max(1, count)

    groups = max((region.groups.get(use, 1) for use in cols), default=1)
    dims = [inner(use) for use in cols]
    return Attention(
        batch,
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


def _choose(region: detect.Region, ctx: SiteContext, types: place.Types, settings: Settings) -> _Chosen:
    """The strategy that sends least among those that apply (or the one that was asked for), put into the types."""
    sizes = _sizes(region, ctx)
    reasons = {name: _unusable(region, name, ctx) for name in LOWERINGS}
    priced = {
        name: replace(sizes, latent=row.latent(region, ctx), moved=row.moved(region, ctx), inner=row.inner(region, ctx.ranks))
        if reasons[name] is None
        else replace(sizes, inner=row.inner(region, ctx.ranks))
        for name, row in LOWERINGS.items()
    }
    prices = {name: COSTS[name](priced[name]) for name in LOWERINGS}
    usable = [name for name in LOWERINGS if reasons[name] is None]
    best = min(usable, key=lambda name: sum(prices[name]))
    note = ""
    if settings.strategy is not None:
        if reasons[settings.strategy] is None:
            best = settings.strategy
        else:
            note = f"{settings.strategy} cannot apply: {reasons[settings.strategy]}"
    if priced[best].latent:
        note = "; ".join(filter(None, [note, f"keys and values travel as their latent, {priced[best].latent} B a position"]))
    types.recipes[region.closing] = LOWERINGS[best].lower(region, ctx)
    rejected = tuple(
        Rejected(
            n,
            reasons[n]
            or ("not asked for" if settings.strategy else "sends no less" if prices[n] == prices[best] else "sends more"),
            _sum(prices[n], reasons[n]),
        )
        for n in LOWERINGS
        if n != best
    )
    site = Site(
        detect.module_path(region.closing),
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
        _mask_name(region, ctx),
        prices[best][0],
        prices[best][1],
        note,
        rejected,
    )
    return _Chosen(region, site)


def _unusable(region: detect.Region, name: str, ctx: SiteContext) -> str | None:
    """Why a strategy cannot be taken for a region, or None. The layout is one choice for the whole model."""
    if LOWERINGS[name].layout not in (None, ctx.facts.arrange):
        return f"the model's sequence is in {_layout_name(ctx.facts)} layout"
    return LOWERINGS[name].inapplicable(region, ctx)


def _layout_name(known: facts.Facts) -> str:
    return "head-tail" if known.arrange is head_tail else "contiguous"


def _sum(price: tuple[int, int], reason: str | None) -> int | None:
    return None if reason else sum(price)


def _mask_name(region: detect.Region, ctx: SiteContext) -> str:
    if region.closing.target is not detect.SDPA:
        return "by rows"
    sight = ctx.sight(region)
    return {Causal: "causal", Everything: "none", BatchSight: "by batch"}.get(type(sight), "by rows")


# The plan -----------------------------------------------------------------------------------------


def _plan(
    captured: Captured,
    types: place.Types,
    decisions: place.Decisions,
    low: Lowering,
    sites: Sequence[_Chosen],
    refused: Mapping[fx.Node, str],
    settings: Settings,
) -> Plan:
    layouts: set[Layout] = {p.layout for v in decisions.versions.values() for p in v if isinstance(p, Shard)}
    notes = [f"{source_line(n)} was not taken as one attention: {why}" for n, why in refused.items()]
    if not layouts:
        notes.append("nothing could be split along a sequence: every rank computes everything")
    names: list[str] = []
    for node, placement in decisions.outputs[len(captured.mutated) :]:
        names.append(f"{_shape_text(node)} {placement}")
    return Plan(
        low.ranks,
        tuple(sorted({s.site.q_seq for s in sites} | {s.site.kv_seq for s in sites}, reverse=True)),
        _layout_name(low.facts),
        tuple(s.site for s in sites),
        tuple(Fallback(_op_name(g.node), source_line(g.node), g.bytes, g.reason) for g in types.gathered),
        collectives(low),
        tuple(names),
        settings.compiler,
        settings.grad_sync,
        tuple(notes),
    )


def _shape_text(node: fx.Node) -> str:
    return "x".join(map(str, shape(node))) or "scalar"


def _op_name(node: fx.Node) -> str:
    return str(node.target)
