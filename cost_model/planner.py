"""One choice for the whole model: the layout, each site's strategy and parameters, and what backward finds of each layer.

For each layout the least time under the memory budget is found exactly: layers that are alike are one integer variable for
each way to run them, and scipy's HiGHS solves the integer program. Where memory does not bind, each layer's best way is the
solution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .errors import PlanningError
from .hardware import Hardware
from .plan import Plan, PlanError, Seconds, Totals
from .prices import Cost, cost
from .problem import (
    LAYOUTS,
    SAVES,
    Candidate,
    Choice,
    Decision,
    Exchange,
    Layer,
    Problem,
    Refused,
    SiteProblem,
    Sizes,
    on_host,
)
from .states import LinearAttention
from .work import messages

ADAM = 2 * 4  # bytes a parameter of Adam's two moments, in float32
BACKWARD = 2.0  # work of backward ÷ work of forward, for matrix products and what lies between them
WORKSPACE = 0.03  # of the memory: what the allocator and libraries keep for themselves (assumed)


@dataclass(frozen=True)
class Planner:
    """Decides for one machine. memory: bytes a device that a plan may take (None: what the machine has). saves: what backward
    may find of a layer, of `problem.SAVES`. strict: raise MemoryShort where nothing fits, else take what needs least. price:
    what a strategy costs for sizes, machine and type: in closed form, or as `training_step.simulated` has it."""

    hardware: Hardware
    memory: float | None = None
    saves: tuple[str, ...] = ("everything",)
    strict: bool = False
    price: Callable[[str, Sizes, Hardware, str], Cost] = cost

    @property
    def budget(self) -> float:
        return (self.hardware.memory.value if self.memory is None else self.memory) * (1 - WORKSPACE)

    @property
    def offered(self) -> tuple[str, ...]:
        """`saves`; those on the host only where the machine has a link to it, or nothing else was asked for."""
        device = tuple(s for s in self.saves if not on_host(s))
        return self.saves if self.hardware.host is not None or not device else device

    def __call__(self, problem: Problem) -> Decision:
        """The plan of least time. Raises HardwareError for a number the machine's table lacks, MemoryShort as said above."""
        solved = [s for layout in _layouts(problem) if (s := _solve(problem, layout, self)) is not None]
        best = min(
            solved, key=lambda s: (-_obeyed(problem, s), s.peak > self.budget, s.seconds if s.peak <= self.budget else s.peak)
        )
        notes = []
        if best.peak > self.budget:
            short = _short(problem, best, self)
            if self.strict:
                raise MemoryShort(short)
            notes.append(short)
        return Decision(
            best.layout,
            _choices(problem, best, solved, self),
            _totals(problem, best, self),
            self.hardware.name,
            tuple(notes),
            self.hardware.node,
            {name: way.saved for name, _, way in best.ways if way.saved != "everything"},
            tuple(name for name, _, way in best.ways if way.tiled),
        )


class MemoryShort(PlanningError):
    """No plan fits into memory; the message says what would."""


@dataclass(frozen=True)
class Follow:
    """Decides what a plan that was made before says. Raises PlanError where that is for another model."""

    plan: Plan
    planner: Planner

    def __call__(self, problem: Problem) -> Decision:
        plan, given = self.plan, problem.sites
        if plan.ranks != problem.ranks:
            fix = f"fix: `autosp plan --ranks {problem.ranks}`"
            raise PlanError(f"the plan is for {plan.ranks} ranks, the mesh has {problem.ranks} on sp; {fix}")
        names, planned = [s.name for s in given], [s.name for s in plan.sites]
        if names != planned:
            here, there = next((a, b) for a, b in itertools.zip_longest(names, planned) if a != b)
            raise PlanError(
                f"the plan is for another model: where that has {there or 'no more sites'}, this one has {here or 'none'}; "
                "fix: plan again"
            )
        sites = tuple(
            replace(s, candidates=_as_planned(s, p.strategy, dict(p.params))) for s, p in zip(given, plan.sites, strict=True)
        )
        able = {layer.name for layer in problem.layers if layer.by_tiles or layer.repeated}
        if missing := [name for name in plan.tiles if name not in able]:
            fix = "fix: tile='auto', or plan again"
            raise PlanError(f"the plan has the feed-forward block of {missing[0]} by tiles, which it cannot be here; {fix}")
        asked = replace(problem.by_tiles(plan.tiles), sites=sites, layout=plan.layout, strategy=None)
        made = self.planner(asked)
        choices = (replace(c, saved=s.saved) for c, s in zip(made.choices, plan.sites, strict=True))
        return replace(made, choices=tuple(choices), saves=plan.saves, tiles=plan.tiles)


def _as_planned(site: SiteProblem, strategy: str, params: dict[str, int]) -> tuple[Candidate, ...]:
    own = [c for c in site.candidates if (c.strategy, dict(c.params)) == (strategy, params)]
    if not own or own[0].reason:
        why = own[0].reason if own else "it does not apply here"
        raise PlanError(f"the plan has {strategy} for {site.name}: {why}; fix: plan again for this model and its sizes")
    return tuple(c if c is own[0] else replace(c, reason=c.reason or "the plan given has another") for c in site.candidates)


# Ways ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """One way to run a layer: for each of its sites a candidate's number, what is saved, and the price of both."""

    picks: tuple[int, ...]
    saved: str
    seconds: float
    kept: float  # bytes from forward to backward
    held: float  # bytes beside them while it runs
    hosted: float = 0.0  # bytes in the host's memory meanwhile
    tiled: bool = False


@dataclass(frozen=True)
class _Unit:
    """Layers that are alike."""

    members: tuple[tuple[str, tuple[int, ...]], ...]  # for each occurrence its name, and its sites' numbers in the problem
    ways: tuple[_Way, ...]


@dataclass(frozen=True)
class _Solution:
    layout: str
    seconds: float
    peak: float
    ways: tuple[tuple[str, tuple[int, ...], _Way], ...]  # (name, sites, way) for each layer
    gap: float


def _layouts(problem: Problem) -> tuple[str, ...]:
    return (problem.layout,) if problem.layout else LAYOUTS


def _obeyed(problem: Problem, solution: _Solution) -> int:
    """Sites that have the strategy asked for: a layout in which it cannot apply is no way out."""
    picks = [(i, pick) for _, sites, way in solution.ways for i, pick in zip(sites, way.picks, strict=True)]
    return sum(problem.sites[i].candidates[pick].strategy == problem.strategy for i, pick in picks)


def placed(candidate: Candidate, layout: str) -> Candidate:
    """The candidate in a layout. Where that is not contiguous, a linear attention's tokens are brought into order and back, and
    an attention that lets every rank compute its own rows computes others."""
    if layout == "contiguous" or candidate.sizes is None:
        return candidate
    if isinstance(candidate.sizes, LinearAttention):
        return replace(candidate, sizes=replace(candidate.sizes, relaid=True))
    return replace(candidate, sizes=replace(candidate.sizes, folded=True))


def usable(problem: Problem, site: SiteProblem, layout: str) -> list[int]:
    """Numbers of the candidates that a layout leaves; where a strategy was asked for and applies, only its own. A ring whose
    places are one group of all ranks is an all-to-all with more copies: it must be asked for."""
    fitting = [i for i, c in enumerate(site.candidates) if not c.reason and c.layout in (None, layout)]
    asked = [i for i in fitting if site.candidates[i].strategy == problem.strategy]
    rings = [i for i in fitting if problem.ranks == 1 or dict(site.candidates[i].params).get("inner") != problem.ranks]
    return asked or rings or fitting


def layer_seconds(layer: Layer, hardware: Hardware, dtype: str) -> float:
    """Forward of what else is in a layer."""
    return layer.flop / hardware.rate("matmul", dtype) + layer.traffic / hardware.bandwidth.value


def repeated_seconds(layer: Layer, hardware: Hardware, dtype: str) -> float:
    """Of that, what backward computes once more whatever it finds."""
    return layer.repeated / hardware.rate("matmul", dtype)


def again_seconds(save: str, layer: Layer, costs: Sequence[Cost], hardware: Hardware, dtype: str) -> float:
    """Of that, what backward computes again beside sites: not the products that only attention's operands need, where it finds
    these of all sites."""
    if save == "everything":
        return 0.0
    spared = layer.unread + (layer.projections if all(c.has_operands(save) for c in costs) else 0.0)
    return layer_seconds(layer, hardware, dtype) - spared / hardware.rate("matmul", dtype)


def _ways(problem: Problem, layer: Layer, sites: Sequence[SiteProblem], layout: str, planner: Planner) -> tuple[_Way, ...]:
    if layer.by_tiles is not None:
        plain = _ways(problem, replace(layer, by_tiles=None), sites, layout, planner)
        tiled = _ways(problem, replace(layer.by_tiles, name=layer.name), sites, layout, planner)
        return tuple(_undominated([*plain, *(replace(way, tiled=True) for way in tiled)]))
    hardware, forward = planner.hardware, layer_seconds(layer, planner.hardware, problem.dtype)
    repeated = repeated_seconds(layer, hardware, problem.dtype)
    found = []
    options = [usable(problem, site, layout) for site in sites]
    for picks in itertools.product(*options):
        costs = [
            planner.price(c.strategy, c.sizes, hardware, problem.dtype)
            for site, i in zip(sites, picks, strict=True)
            if (c := placed(site.candidates[i], layout)).sizes is not None
        ]
        once = sum(c.seconds for c in costs) + (1 + BACKWARD) * forward + repeated
        for save in allowed(layer, planner.offered):
            whole = save == "everything"
            again = again_seconds(save, layer, costs, hardware, problem.dtype) + sum(c.again(save) for c in costs)
            kept = kept_bytes(save, layer) + sum(c.kept(save) for c in costs)
            late = problem.ranks > 1 and (not costs or any(c.late[not whole] for c in costs))
            late &= not (save.startswith("layer input") and layer.around)  # nothing travels beside a convolution's exchange
            late |= on_host(save)  # copies travel beside what others compute, as exchanges do
            held = problem.returned + _held(problem, layer, costs, late, save)
            # One layer at a time is computed again, maybe before the one after it is done; what the next one finds on the host
            # arrives meanwhile.
            more = 0.0 if whole else layer.saved + sum(c.passing for c in costs) + late * layer.unfinished - kept
            hosted = hosted_bytes(save, layer, costs)
            copies = sum(copy_seconds(save, layer, costs, hardware, problem.dtype))
            found.append(_Way(picks, save, once + again + copies, kept, held + more + hosted, hosted))
    return tuple(_undominated(found))


def _held(problem: Problem, layer: Layer, costs: Sequence[Cost], late: bool, save: str) -> float:
    """Bytes of gradients and of what an attention works with, at the widest moment of a layer's backward. If weights' gradients
    are not late, head and loss are done with all that they kept."""
    works = [c.held + c.made(save) for c in costs]
    if late:
        return max(layer.held, *(layer.waiting + work for work in works), 0.0)
    after = sum(x.saved for x in problem.layers if not x.name) if layer.name else 0.0
    return max(layer.held_early, *(layer.waiting_early + work for work in works), 0.0) - after


def allowed(layer: Layer, saves: tuple[str, ...]) -> tuple[str, ...]:
    """What backward may find of a layer. What is in no numbered part of the model is not computed again; what the model itself
    has computed again is, with its attention's output kept where that is allowed."""
    if layer.checkpointed:
        return tuple(s for s in saves if s != "everything") or ("layer input",)
    return saves if layer.name else ("everything",)


def kept_bytes(save: str, layer: Layer) -> float:
    """Bytes on a device from a layer's forward to its backward, without what its sites keep."""
    return layer.saved if save == "everything" else 0.0 if on_host(save) else _found(save, layer)


def _found(save: str, layer: Layer) -> float:
    return layer.entering + (0.0 if save.startswith("layer input") else layer.around)


def hosted_bytes(save: str, layer: Layer, costs: Sequence[Cost]) -> float:
    """Bytes in the host's memory from a layer's forward to its backward."""
    return _found(save, layer) + sum(c.hosted(save) for c in costs) if on_host(save) else 0.0


def copy_seconds(save: str, layer: Layer, costs: Sequence[Cost], hardware: Hardware, dtype: str) -> tuple[float, float]:
    """What copies to the host and back take beside the layer, forward and backward: what of them its own work does not hide, as
    the layer that they hide behind is taken to be like it. Without a link, two passes through memory, which nothing hides."""
    moved = hosted_bytes(save, layer, costs)
    if hardware.host is None:
        return 2 * moved / hardware.bandwidth.value, 2 * moved / hardware.bandwidth.value
    once, forward = moved / hardware.host.value, layer_seconds(layer, hardware, dtype)
    ahead = forward + sum(c.forward[0] + c.forward[2] for c in costs)
    back = BACKWARD * forward + again_seconds(save, layer, costs, hardware, dtype)
    back += sum(c.backward[0] + c.backward[2] + c.again(save) for c in costs)
    return max(0.0, once - ahead), max(0.0, once - back)


def _undominated(ways: Sequence[_Way]) -> list[_Way]:
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda w: (w.seconds, w.kept, w.held)):
        if not any(k.kept <= way.kept and k.held <= way.held for k in kept):
            kept.append(way)
    return kept


def _units(problem: Problem, layout: str, planner: Planner) -> list[_Unit]:
    by_layer: dict[str, list[int]] = {layer.name: [] for layer in problem.layers}
    for i, site in enumerate(problem.sites):
        by_layer.setdefault(site.layer, []).append(i)
    named = {layer.name: layer for layer in problem.layers}
    alike: dict[tuple[Layer, object], list[tuple[str, tuple[int, ...]]]] = {}
    for name, numbers in by_layer.items():
        layer = _nameless(named.get(name, Layer(name)))
        key = (layer, tuple(problem.sites[i].candidates for i in numbers))
        alike.setdefault(key, []).append((name, tuple(numbers)))
    units = []
    for (layer, _), members in alike.items():
        sites = [problem.sites[i] for i in members[0][1]]
        units.append(_Unit(tuple(members), _ways(problem, layer, sites, layout, planner)))
    return units


def _nameless(layer: Layer) -> Layer:
    tiled = layer.by_tiles and replace(layer.by_tiles, name="any")
    return replace(layer, name="any" if layer.name else "", by_tiles=tiled)


# The solution -------------------------------------------------------------------------------------


def _solve(problem: Problem, layout: str, planner: Planner) -> _Solution | None:
    """The best plan in a layout, or the smallest where none fits; None where a site has no way in it."""
    units = _units(problem, layout, planner)
    if any(not unit.ways for unit in units):
        return None
    constant = _constant_bytes(problem)
    fastest = [[unit.ways[0]] * len(unit.members) for unit in units]
    picked, gap = fastest, 0.0
    if units and _peak(constant, fastest) > planner.budget:
        solved = _integer(units, planner.budget - constant)
        picked, gap = solved if solved else ([[_smallest(u)] * len(u.members) for u in units], 0.0)
    seconds = sum(way.seconds for ways in picked for way in ways) + _elsewhere(problem, planner.hardware)
    pairs = [
        (*member, way) for unit, ways in zip(units, picked, strict=True) for member, way in zip(unit.members, ways, strict=True)
    ]
    return _Solution(layout, seconds, _peak(constant, picked), tuple(pairs), gap)


def _peak(constant: float, picked: Sequence[Sequence[_Way]]) -> float:
    ways = [way for each in picked for way in each]
    return constant + sum(w.kept for w in ways) + max((w.held for w in ways), default=0.0)


def _smallest(unit: _Unit) -> _Way:
    return min(unit.ways, key=lambda w: w.kept * len(unit.members) + w.held)


def _integer(units: Sequence[_Unit], room: float) -> tuple[list[list[_Way]], float] | None:
    """How many of each unit's layers take each of its ways: least seconds with Σ kept + max held <= room; and the gap HiGHS
    proves.

    Variables: a count for each way, whether it occurs at all, and the largest `held`.
    """
    # Only where memory binds: every rank of every job loads this module.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    ways = [(i, way) for i, unit in enumerate(units) for way in unit.ways]
    k, scale = len(ways), max(room, 1.0)
    total = np.array([len(units[i].members) for i, _ in ways], dtype=float)
    eye, zero = np.eye(k), np.zeros((k, 1))
    rows = [np.concatenate([eye, -np.diag(total), zero], 1)]  # a way that occurs is marked
    rows.append(np.concatenate([np.zeros((k, k)), np.diag([w.held / scale for _, w in ways]), -np.ones((k, 1))], 1))
    rows.append(np.array([[*(w.kept / scale for _, w in ways), *np.zeros(k), 1.0]]))
    upper = np.concatenate([np.zeros(2 * k), [1.0]])
    each = np.array([[float(i == u) for i, _ in ways] + [0.0] * (k + 1) for u in range(len(units))])
    limits = [
        LinearConstraint(csr_array(np.concatenate(rows)), -np.inf, upper),
        LinearConstraint(csr_array(each), [len(u.members) for u in units], [len(u.members) for u in units]),
    ]
    seconds = np.array([w.seconds for _, w in ways])
    objective = np.concatenate([seconds / max(seconds.max(), 1e-30), np.zeros(k + 1)])
    bounds = Bounds(np.zeros(2 * k + 1), np.concatenate([total, np.ones(k), [np.inf]]))
    found = milp(objective, constraints=limits, bounds=bounds, integrality=[1] * (2 * k) + [0], options={"time_limit": 20})
    if found.x is None:
        return None
    picked: list[list[_Way]] = [[] for _ in units]
    for (i, way), count in zip(ways, np.round(found.x[:k]).astype(int), strict=True):
        picked[i] += [way] * int(count)
    for chosen in picked:
        chosen.sort(key=lambda w: not on_host(w.saved))  # first layers come last in backward: their copies have the most time
    return picked, float(found.mip_gap or 0.0)


# What is not in layers ----------------------------------------------------------------------------


def _constant_bytes(problem: Problem) -> float:
    """Parameters, gradients and Adam's moments: every rank holds all of them, or its part of each, and whole the parameters of a
    layer and of the next, which is gathered ahead, and the gradients of one."""
    width = {"float64": 8, "float32": 4}.get(problem.dtype, 2)
    held = problem.frozen + problem.trained * (2 + ADAM / width)
    return held / problem.parts + 3 * problem.largest_layer


def exchange_seconds(each: Exchange, ranks: int, data_parallel: int, hardware: Hardware) -> float:
    """All of an exchange's collectives, one after another."""
    if ranks * data_parallel == 1:
        return 0.0
    among = ranks * (data_parallel if each.everyone or each.collective == "all_reduce" else 1)
    level = hardware.level(among)
    link = level.link(each.collective)
    latency = link.latency.value + messages(each.collective, among) * link.message.value
    return each.count * latency + each.sent / (link.bandwidth.value * level.used(among))


def _elsewhere(problem: Problem, hardware: Hardware) -> float:
    """Seconds of collectives beside those of sites: nothing is taken to hide them."""
    return sum(exchange_seconds(each, problem.ranks, problem.data_parallel, hardware) for each in problem.exchanges)


def _totals(problem: Problem, best: _Solution, planner: Planner) -> Totals:
    hardware, work = planner.hardware, 0.0
    for layer in problem.by_tiles([name for name, _, way in best.ways if way.tiled]).layers:
        work += (1 + BACKWARD) * layer_seconds(layer, hardware, problem.dtype) + repeated_seconds(layer, hardware, problem.dtype)
    costs = [
        _cost_of(problem, i, pick, best.layout, planner)
        for _, sites, way in best.ways
        for i, pick in zip(sites, way.picks, strict=True)
    ]
    alone = work + sum(
        min(_cost_of(problem, i, j, best.layout, planner).compute for j in usable(problem, site, best.layout))
        for i, site in enumerate(problem.sites)
    )
    step, constant = max(best.seconds, 1e-30), _constant_bytes(problem)
    exposed = sum(c.exposed for c in costs) + _elsewhere(problem, hardware)
    kept = sum(way.kept for *_, way in best.ways)
    speed = problem.tokens / problem.ranks / step
    hosted = sum(way.hosted for *_, way in best.ways)
    return Totals(step, speed, alone / step, best.peak, constant, kept, step - exposed, exposed, planner.budget, best.gap, hosted)


def _cost_of(problem: Problem, site: int, pick: int, layout: str, planner: Planner) -> Cost:
    chosen = placed(problem.sites[site].candidates[pick], layout)
    assert chosen.sizes is not None
    return planner.price(chosen.strategy, chosen.sizes, planner.hardware, problem.dtype)


# Why ----------------------------------------------------------------------------------------------


def _choices(problem: Problem, best: _Solution, solved: Sequence[_Solution], planner: Planner) -> tuple[Choice, ...]:
    chosen = {i: (pick, way) for _, sites, way in best.ways for i, pick in zip(sites, way.picks, strict=True)}
    others = [s for s in solved if s is not best]
    explained: dict[object, Choice] = {}
    for i, site in enumerate(problem.sites):
        pick, way = chosen[i]
        key = (site.candidates, pick, way.saved)
        if key not in explained:
            explained[key] = _choice(problem, site, pick, way.saved, best, others, planner)
    return tuple(explained[(site.candidates, chosen[i][0], chosen[i][1].saved)] for i, site in enumerate(problem.sites))


def _choice(
    problem: Problem, site: SiteProblem, pick: int, saved: str, best: _Solution, others: Sequence[_Solution], planner: Planner
) -> Choice:
    taken = placed(site.candidates[pick], best.layout)
    assert taken.sizes is not None
    price = planner.price(taken.strategy, taken.sizes, planner.hardware, problem.dtype)
    refused = []
    for strategy in dict.fromkeys(c.strategy for c in site.candidates):
        if strategy != taken.strategy:
            refused.append(_refused(problem, site, strategy, price, best, others, planner))
    notes = []
    if problem.strategy and problem.strategy != taken.strategy:
        why = [c.reason for c in site.candidates if c.strategy == problem.strategy and c.reason]
        notes = [f"{problem.strategy} cannot apply: {why[0]}"] if why else []
    seconds = Seconds(price.compute, price.communication, price.exposed)
    return Choice(taken, seconds, price.sent, saved, tuple(refused), tuple(notes))


def _refused(
    problem: Problem,
    site: SiteProblem,
    strategy: str,
    price: Cost,
    best: _Solution,
    others: Sequence[_Solution],
    planner: Planner,
) -> Refused:
    """The strategy's best candidate, and why it was not taken."""
    own = [c for c in site.candidates if c.strategy == strategy]
    there = [placed(c, c.layout or best.layout) for c in own if not c.reason]
    priced = [(c, planner.price(strategy, c.sizes, planner.hardware, problem.dtype)) for c in there if c.sizes is not None]
    if not priced:
        return Refused(own[0], own[0].reason)
    candidate, its = min(priced, key=lambda pair: pair[1].seconds)
    if dict(candidate.params).get("inner") == problem.ranks > 1:
        return Refused(candidate, "with all ranks in one group it is all-to-all", its.seconds, sum(its.sent))
    numbers = its.seconds, sum(its.sent)
    if candidate.layout not in (None, best.layout):
        other = next((s for s in others if s.layout == candidate.layout), None)
        gain = f"; the whole model in {candidate.layout} layout takes {times(other.seconds, best.seconds)}" if other else ""
        return Refused(candidate, f"the model's sequence is in {best.layout} layout{gain}", *numbers)
    if any(c.strategy == problem.strategy for c in site.candidates):
        return Refused(candidate, "not asked for", *numbers)
    if its.seconds > price.seconds:
        return Refused(candidate, f"takes {times(its.seconds, price.seconds)}", *numbers)
    return Refused(candidate, "needs more memory" if its.seconds < price.seconds else "takes no less", *numbers)


def times(seconds: float, other: float) -> str:
    """ "1.25 times as long"; "1.000 times" where it is about the same."""
    ratio = seconds / max(other, 1e-30)
    return f"{ratio:{'.3g' if ratio >= 1.1 else '#.4g'}} times as long"


def _short(problem: Problem, best: _Solution, planner: Planner) -> str:
    """What is missing, and what would fit: a shorter sequence, more ranks, or backward finding less."""
    constant = _constant_bytes(problem)
    moving, room = best.peak - constant, planner.budget - constant
    text = f"the plan needs {best.peak / 1e9:.1f} GB a device, {planner.budget / 1e9:.1f} GB are there"
    if room <= 0:
        held = f"parameters, gradients and Adam's moments alone take {constant / 1e9:.1f} GB"
        fix = "more ranks" if problem.parts > 1 else "split them over the ranks (zero=3)"
        return f"{text}: {held}; fix: {fix}, or a smaller model"
    longest = max(
        (
            c.sizes.q_seq if not isinstance(c.sizes, LinearAttention) else c.sizes.seq
            for s in problem.sites
            for c in s.candidates
            if c.sizes
        ),
        default=0,
    )
    fits = int(longest * room / moving)
    ranks = int(np.ceil(problem.ranks * moving / room))
    less = [s for s in SAVES if s not in planner.saves]
    saving = f", or keep less for backward (allowed here: {', '.join(planner.saves)})" if less else ""
    return f"{text}; fix: a sequence of about {fits} positions, or about {ranks} ranks{saving}"
