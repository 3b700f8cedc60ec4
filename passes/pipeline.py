"""The passes in order: capture, place, detect, plan, decide, lower, verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..cost_model.plan import Fallback, Plan, Site
from ..cost_model.problem import Decide, Decision, Layer, Problem
from ..kernels.errors import AutospError
from ..kernels.layout import Layout, contiguous, head_tail
from ..kernels.linear import TOKENS
from . import choose, detect, facts, held, needs, place, remat, tile, wide, workload
from .capture import Captured, capture, source_line
from .count import collectives
from .lower import Lowering, lower
from .mask import Constants, Extra, Sights
from .placement import R, Shard
from .recurrence import Recurrent, recurrences
from .relation import operands, shape
from .rules.linear import OPERATORS
from .sites import SiteContext
from .spread import Spread
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
    zero: int | None = None
    tile: str | int = "auto"

    def __post_init__(self) -> None:
        if self.tile not in ("auto", "none") and not (type(self.tile) is int and self.tile > 0):
            raise StrategyError(f"tile={self.tile!r} is not known; choose 'auto', 'none' or a number of positions")
        for name, value, allowed in (
            ("strategy", self.strategy, (None, *choose.STRATEGIES)),
            ("outputs", self.outputs, ("local", "gather", "loss")),
            ("compiler", self.compiler, ("inductor", "aot_eager")),
            ("grad_sync", self.grad_sync, ("autosp", "external")),
            ("zero", self.zero, (None, 3)),
        ):
            if value not in allowed:
                raise StrategyError(f"{name}={value!r} is not known; choose from {', '.join(map(repr, allowed))}")
        if self.zero and self.grad_sync == "external":
            raise StrategyError(
                "zero=3 sums gradients into parts itself, so nobody can average whole ones afterwards; fix: leave out "
                'grad_sync="external", and DDP or FSDP around the model: with a mesh (dp, sp) autosp averages over dp'
            )


@dataclass
class Compiled:
    """A rank's local graph, its plan, and what it takes after the graph's own inputs: "seed", and what each batch says."""

    module: fx.GraphModule
    captured: Captured
    plan: Plan
    extras: tuple[str | Extra, ...]
    sites: list[detect.Region] = field(default_factory=list)


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], spread: Spread, settings: Settings, decide: Decide
) -> Compiled:
    """Dynamo's graph into this rank's local graph and the plan, for which `decide` chooses."""
    return compile_captured(capture(gm, example_inputs), spread, settings, decide)


def compile_captured(captured: Captured, spread: Spread, settings: Settings, decide: Decide) -> Compiled:
    """A captured graph into this rank's local graph and the plan."""
    spread = replace(spread, zero=settings.zero is not None)
    if settings.outputs == "loss":
        _keep_scalars(captured)
    if settings.tile != "none":
        wide.hoist_slices(captured.module.graph)
    forced = LOWERINGS[settings.strategy].layout if settings.strategy in LOWERINGS else None
    made = _opened(captured, spread, settings, forced or contiguous, fixed=forced is not None)
    decision = decide(made.problem)
    if decision.layout != choose.layout_of(made.facts):
        made = _opened(captured, spread, settings, _ARRANGED[decision.layout], fixed=True)
        decision = decide(made.problem)
    known, types = made.facts, made.types
    sites = [choose.settle(site, choice, types) for site, choice in zip(made.sites, decision.choices, strict=True)]
    tiled = [*made.tiled, *(each for each in made.offered if _layer(each) in decision.tiles)]
    for region, rows in tiled:
        tile.settle(region, rows, known, types)
    read = needs.site_operands([*made.regions, *made.recurrent], known)
    remat.tag(captured.module.graph, decision.saves, known.from_data & known.differentiable, read)
    decisions = place.decide(captured, known, types, settings.outputs == "gather")
    module, low = lower(captured, known, decisions, spread)
    fake_mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in captured.module.graph.nodes if n.op == "placeholder"])
    verify(module, captured, low, fake_mode)
    plan = _plan(captured, types, decisions, low, sites, made, settings, decision, tiled)
    return Compiled(module, captured, plan, tuple(low.extras), made.regions)


def _keep_scalars(captured: Captured) -> None:
    """Outputs of the model with dimensions become None, and what only they needed goes."""
    result = captured.module.graph.output_node()
    values, first = list(result.args[0]), len(captured.mutated)  # type: ignore[arg-type]
    kept = [x if i < first or (isinstance(x, fx.Node) and not shape(x)) else None for i, x in enumerate(values)]
    if not any(isinstance(x, fx.Node) for x in kept[first:]):
        raise StrategyError("outputs='loss' keeps scalars only, and the model returns none; fix: outputs='local' or 'gather'")
    result.args = (tuple(kept),)
    captured.module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or facts.is_mode(n))


_ARRANGED = {"contiguous": contiguous, "head-tail": head_tail}


@dataclass(frozen=True)
class _Opened:
    """A graph typed under one layout, and what the planner is asked about it."""

    facts: facts.Facts
    types: place.Types
    regions: list[detect.Region]
    recurrent: list[Recurrent]
    refused: Mapping[fx.Node, str]
    sites: list[choose.Open]
    problem: Problem
    tiled: list[tuple[tile.Wide, int]]
    offered: list[tuple[tile.Wide, int]]  # tiled if the planner says so
    whole: Mapping[fx.Node, str]


def _opened(
    captured: Captured, spread: Spread, settings: Settings, arrange: Callable[[int, int], Layout], fixed: bool
) -> _Opened:
    """`fixed`: the layout is decided."""
    known = facts.read(captured, spread.ranks, arrange)
    _refuse_short(captured, known, settings)
    types = _typed(captured, known, settings)
    ctx = SiteContext(known, Sights(captured, Constants(captured)))
    regions, refused = detect.regions(captured, known, types)
    recurrent = recurrences(captured.module.graph, types)
    sites = [*(choose.attention(r, ctx) for r in regions), *(choose.recurrence(r, ctx) for r in recurrent)]
    found, whole = wide.regions(captured, known, types, [*regions, *recurrent], settings.tile)
    tiled = [each for each in found if each[0].loss or settings.tile != "auto"]
    offered = [each for each in found if each not in tiled and _layer(each)]
    trained, frozen = workload.parameter_bytes(known)
    parts = spread.world if spread.zero else 1
    data = [shape(n) for n, item in known.inputs.items() if item.kind == "data"]
    problem = Problem(
        spread.ranks,
        _dtype(captured, sites),
        tuple(s.problem for s in sites),
        _layers(captured, known, types, [*regions, *recurrent], settings.compiler, tiled, offered),
        workload.exchanges(captured, known, types, spread.world, spread.zero),
        choose.layout_name(arrange) if fixed or not sites else None,
        settings.strategy,
        max((size[0] * size[1] for size in data if len(size) > 1), default=0),
        trained,
        frozen,
        spread.dp,
        parts,
        max(workload.unit_bytes(captured, known), default=0.0) if parts > 1 else 0.0,
        held.returned(captured, known, types),
    )
    return _Opened(known, types, regions, recurrent, refused, sites, problem, tiled, offered, whole)


def _layers(
    captured: Captured,
    known: facts.Facts,
    types: place.Types,
    sites: Sequence[detect.Region | Recurrent],
    compiler: str,
    tiled: Sequence[tuple[tile.Wide, int]],
    offered: Sequence[tuple[tile.Wide, int]],
) -> tuple[Layer, ...]:
    """What is in each layer, and what would be with what is offered in tiles as well."""
    plain = held.layers(captured, known, types, sites, compiler, tiled)
    if not offered:
        return plain
    names = set(map(_layer, offered))
    less = held.layers(captured, known, types, sites, compiler, [*tiled, *offered])
    return tuple(replace(a, by_tiles=b) if a.name in names else a for a, b in zip(plain, less, strict=True))


def _layer(each: tuple[tile.Wide, int]) -> str:
    """The layer that a region is in; "" where it is in several or in none."""
    names = {detect.layer_of(n) for n in each[0].nodes}
    return names.pop() if len(names) == 1 else ""


def _dtype(captured: Captured, sites: Sequence[choose.Open]) -> str:
    """What most of the computing is done in: the type of the sites' results, else of the first floating input."""
    nodes = [*(s.node for s in sites), *captured.module.graph.nodes]
    return next((str(n.meta["val"].dtype).removeprefix("torch.") for n in nodes if facts.is_float(n)), "float32")


# Where sequences start ----------------------------------------------------------------------------


def _refuse_short(captured: Captured, known: facts.Facts, settings: Settings) -> None:
    lengths = [shape(n)[-2] for n in captured.module.graph.nodes if n.target is detect.SDPA for n in operands(n)[:2]]
    for node in facts.score_matmuls(captured.module.graph):
        lengths += shape(node)[-2:]
    lengths += [shape(operands(n)[0])[TOKENS] for n in captured.module.graph.nodes if n.target in OPERATORS]
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
        elif node.target in OPERATORS:
            start(node, 0, TOKENS)
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


# The plan -----------------------------------------------------------------------------------------


def _plan(
    captured: Captured,
    types: place.Types,
    decisions: place.Decisions,
    low: Lowering,
    sites: Sequence[Site],
    made: _Opened,
    settings: Settings,
    decision: Decision,
    tiled: Sequence[tuple[tile.Wide, int]],
) -> Plan:
    layouts: set[Layout] = {p.layout for v in decisions.versions.values() for p in v if isinstance(p, Shard)}
    notes = [f"{source_line(n)} was not taken as one attention: {why}" for n, why in made.refused.items()]
    if not layouts:
        notes.append("nothing could be split along a sequence: every rank computes everything")
    notes += tile.notes(tiled, made.whole)
    by_tiles = {_layer(each) for each in tiled if not each[0].loss} - {""}
    names: list[str] = []
    for node, placement in decisions.outputs[len(captured.mutated) :]:
        names.append(f"{_shape_text(node)} {placement}")
    return Plan(
        low.ranks,
        tuple(sorted({s.q_seq for s in sites} | {s.kv_seq for s in sites}, reverse=True)),
        decision.layout,
        tuple(sites),
        tuple(Fallback(_op_name(g.node), source_line(g.node), g.bytes, g.reason) for g in types.gathered),
        collectives(low),
        tuple(names),
        settings.compiler,
        settings.grad_sync,
        (*notes, *decision.notes),
        {"dp": low.spread.dp, "sp": low.ranks},
        decision.hardware,
        decision.totals,
        made.problem.by_tiles(decision.tiles).beside,
        decision.node,
        decision.saves,
        tuple(x.name for x in made.problem.layers if x.name in by_tiles),
    )


def _shape_text(node: fx.Node) -> str:
    return "x".join(map(str, shape(node))) or "scalar"


def _op_name(node: fx.Node) -> str:
    return str(node.target)
