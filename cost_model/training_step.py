"""A whole training step as simulated: every layer's sites and what else it does, forward and then backward.

A rank goes on to the next site when it is done with this one, so a step is a site after another, each begun by every rank when
that rank is there. Sites that are alike and begun alike are simulated once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .amounts import shown
from .hardware import Hardware
from .linear_programs import linear_ops
from .messages import Ops
from .plan import Beside, Layer, Plan, PlanError, Totals
from .planner import BACKWARD, again_seconds, copy_seconds, exchange_seconds, layer_seconds, repeated_seconds
from .prices import Cost, cost
from .problem import Decision, Problem, Sizes, on_host, with_operands
from .programs import attention_ops
from .retold import sizes
from .simulator import Event, Op, Timeline, simulate
from .states import LinearAttention

DIGITS = 9  # of the seconds by which ranks begin after one another: a nanosecond is not told apart


@functools.lru_cache(maxsize=256)
def site_ops(strategy: str, sizes: Sizes, back: bool, hardware: Hardware, dtype: str) -> tuple[Op, ...]:
    """One direction of a site. Raises HardwareError where the machine's table lacks a number."""
    if isinstance(sizes, LinearAttention):
        return tuple(linear_ops(strategy, sizes, back, hardware, dtype))
    return tuple(attention_ops(strategy, sizes, back, hardware, dtype))


@functools.lru_cache(maxsize=4096)
def simulated(strategy: str, sizes: Sizes, hardware: Hardware, dtype: str) -> Cost:
    """What `prices.cost` gives, with the seconds of the simulation: it may price a planner's candidates."""
    closed = cost(strategy, sizes, hardware, dtype)
    ways = []
    for back, way in ((False, closed.forward), (True, closed.backward)):
        line = simulate(site_ops(strategy, sizes, back, hardware, dtype), sizes.ranks, hardware.overlap.value)
        compute = min(way[0], line.makespan)
        ways.append((compute, way[1], line.makespan - compute, *way[3:]))
    return replace(closed, forward=ways[0], backward=ways[1])


# What a step consists of ---------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSite:
    name: str
    layer: str
    strategy: str
    sizes: Sizes


def sites_of(plan: Plan) -> list[StepSite]:
    """Raises PlanError where the plan does not say with which sizes a site was priced."""
    return [StepSite(site.name, site.layer, site.strategy, sizes(site)) for site in plan.sites]


def step_of(plan: Plan, hardware: Hardware) -> Step:
    """Raises PlanError for a plan that does not say what it was priced with, HardwareError for a number a table lacks."""
    if plan.beside is None:
        raise PlanError("the plan does not say what it was priced with; fix: `autosp plan` again")
    return step(sites_of(plan), plan.beside, plan.ranks, hardware, plan.saves)


def decided(problem: Problem, decision: Decision, hardware: Hardware) -> Step:
    """The step of a decision."""
    sites = [
        StepSite(s.name, s.layer, choice.candidate.strategy, choice.candidate.sizes)
        for s, choice in zip(problem.sites, decision.choices, strict=True)
        if choice.candidate.sizes is not None
    ]
    return step(sites, problem.by_tiles(decision.tiles).beside, problem.ranks, hardware, decision.saves)


# The step ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A site or what lies between sites, one direction: its timeline begins at `start` seconds."""

    name: str
    start: float
    timeline: Timeline


@dataclass(frozen=True)
class Step:
    """Parts one after another; a rank may be in the next one while another is in this."""

    ranks: int
    parts: tuple[Part, ...]

    @property
    def makespan(self) -> float:
        return max((p.start + p.timeline.makespan for p in self.parts), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computed."""
        return tuple(sum(p.timeline.busy[rank] for p in self.parts) for rank in range(self.ranks))

    def events(self) -> Iterator[Event]:
        """Computations and messages, part by part, under the name of their part."""
        for part in self.parts:
            for e in part.timeline.events:
                name = f"{part.name} {e.name}".strip()
                yield Event(e.rank, e.stream, name, part.start + e.start, part.start + e.stop, e.to)


def step(
    sites: Sequence[StepSite], beside: Beside, ranks: int, hardware: Hardware, saves: Mapping[str, str] | None = None
) -> Step:
    """Forward of all layers in order, backward of all in reverse, and then the collectives beside those of sites. saves: what
    backward finds of a layer, where that is not everything."""
    clock = _Clock(hardware, ranks)
    layers = {layer.name: layer for layer in beside.layers}
    names = [*layers, *dict.fromkeys(s.layer for s in sites if s.layer not in layers)]
    inside = {name: [s for s in sites if s.layer == name] for name in names}
    for back, order in ((False, names), (True, names[::-1])):
        for name in order:
            found = (saves or {}).get(name, "everything")
            _layer(clock, layers.get(name, Layer(name)), inside[name], beside.dtype, found, back)
    for each in beside.exchanges:
        clock.exchange("", f"{each.count} x {each.collective}", exchange_seconds(each, ranks, beside.data_parallel, hardware))
    return Step(ranks, tuple(clock.parts))


def in_words(found: Step, totals: Totals | None) -> str:
    """How long it takes, beside what the plan says, and how much of that ranks compute."""
    least, most = min(found.busy) / found.makespan, max(found.busy) / found.makespan
    busy = f"{least:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"
    planned = f" ({shown(totals.step_s, 's')} by the plan's formulas)" if totals else ""
    return f"a step takes {shown(found.makespan, 's')} as simulated{planned}; ranks compute for {busy} of it"


def _layer(clock: _Clock, layer: Layer, sites: Sequence[StepSite], dtype: str, found: str, back: bool) -> None:
    """Forward; or backward, which first computes again what it does not find. What lies between sites is taken to be as much
    before as after each."""
    forward = layer_seconds(layer, clock.hardware, dtype)
    tiles = repeated_seconds(layer, clock.hardware, dtype)
    costs = [cost(s.strategy, s.sizes, clock.hardware, dtype) for s in sites]
    if on_host(found):
        copies = copy_seconds(found, layer, costs, clock.hardware, dtype)[back]
        clock.compute(
            layer.name, "backward: rest of copies from the host" if back else "forward: rest of copies to the host", copies
        )
    if back and with_operands(found):
        clock.exchange(layer.name, "operands again", sum(c.resent for c in costs))
    if back and found != "everything":
        repeated = [s for s in sites if found.startswith("layer input") or isinstance(s.sizes, LinearAttention)]
        _passed(clock, layer, repeated, dtype, False, again_seconds(found, layer, costs, clock.hardware, dtype), " again")
    _passed(clock, layer, sites[::-1] if back else sites, dtype, back, forward * BACKWARD + tiles if back else forward, "")


def _passed(clock: _Clock, layer: Layer, sites: Iterable[StepSite], dtype: str, back: bool, seconds: float, again: str) -> None:
    taken = list(sites)
    share = seconds / (len(taken) + 1)
    name, way = layer.name or "model", "backward" if back else "forward"
    clock.compute(f"{name}{again}", f"{way}: all but attention", share)
    for s in taken:
        if again and isinstance(s.sizes, LinearAttention):  # from the state that was found: nothing travels
            own = cost(s.strategy, s.sizes, clock.hardware, dtype).forward[0]
            clock.compute(f"{s.name}{again}", f"{way}: without exchange", own)
        else:
            key = (s.strategy, s.sizes, back)
            clock.run(f"{s.name}{again}", key, lambda s=s: site_ops(s.strategy, s.sizes, back, clock.hardware, dtype))  # type: ignore[misc]
        clock.compute(f"{name}{again}", f"{way}: all but attention", share)


class _Clock:
    """How far each rank is, and what ran until then."""

    def __init__(self, hardware: Hardware, ranks: int) -> None:
        self.hardware, self.ranks = hardware, ranks
        self.at = [0.0] * ranks
        self.parts: list[Part] = []
        self.known: dict[object, Timeline] = {}

    def run(self, name: str, key: object, ops: Callable[[], Sequence[Op]]) -> None:
        """Ops that are the same for the same key, begun by each rank where it is."""
        first = min(self.at)
        late = tuple(round(t - first, DIGITS) for t in self.at)
        if (key, late) not in self.known:
            self.known[key, late] = simulate(ops(), self.ranks, self.hardware.overlap.value, late)
        line = self.known[key, late]
        self.parts.append(Part(name, first, line))
        self.at = [first + end for end in line.ends]

    def compute(self, name: str, what: str, seconds: float) -> None:
        def fill(ops: Ops) -> None:
            for rank in range(self.ranks):
                ops.compute(rank, what, seconds)

        self._alike(name, what, seconds, fill)

    def exchange(self, name: str, what: str, seconds: float) -> None:
        """Of all ranks, not looked into."""
        self._alike(name, what, seconds, lambda ops: ops.whole(what, seconds))

    def _alike(self, name: str, what: str, seconds: float, fill: Callable[[Ops], None]) -> None:
        """What takes every rank as long, if it takes time."""

        def ops() -> list[Op]:
            made = Ops(self.hardware, self.ranks)
            fill(made)
            return made.ops

        if seconds > 0:
            self.run(name, (what, seconds), ops)
