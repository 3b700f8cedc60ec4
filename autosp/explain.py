"""`autosp explain`: a site's price as a formula, where each number comes from, and where another strategy would win."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sympy
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosp.cost_model.amounts import rounded, shown
from autosp.cost_model.cases import Direction, Term, directions
from autosp.cost_model.crossover import LAYOUTS, Axis, Crossing, Point, axes, best, crossings
from autosp.cost_model.hardware import Hardware
from autosp.cost_model.plan import Plan, PlanError, Site
from autosp.cost_model.plan_text import Run, heads, priced_alike, way
from autosp.cost_model.prices import bound
from autosp.cost_model.problem import Sizes, sizes_of
from autosp.cost_model.retold import price, sizes
from autosp.cost_model.sources import source
from autosp.cost_model.states import LinearAttention
from autosp.cost_model.symbols import QUANTITIES
from autosp.plan_tables import alternative

ALIKE = 0.02  # a price carried to other lengths or ranks may differ from the plan's by that share


def explain(plan: Plan, hardware: Hardware, layer: int | None, to: Console) -> None:
    """Every run, or those with a site in a layer. Raises PlanError where there is none, or the machine is another one."""
    chosen = [run for run in priced_alike(plan.sites) if layer is None or any(_numbered(s.layer) == layer for s in run.sites)]
    if not chosen:
        have = sorted({n for s in plan.sites if (n := _numbered(s.layer)) is not None})
        fix = f"fix: one of {have[0]} to {have[-1]}" if have else "fix: no --layer; its layers have no numbers"
        raise PlanError(f"the plan has no attention in layer {layer}; {fix}")
    dtype = plan.beside.dtype if plan.beside else "bfloat16"
    for run in chosen:
        price(run.site, hardware, dtype)
    for run in chosen:
        _Explained(plan, run, hardware, dtype).show(to)


def _numbered(layer: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)$", layer)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class _Explained:
    plan: Plan
    run: Run
    hardware: Hardware
    dtype: str

    @property
    def sizes(self) -> Sizes:
        return sizes(self.run.site)

    def show(self, to: Console) -> None:
        site, of = self.run.site, self.sizes
        values = bound(site.strategy, of, self.hardware, self.dtype)
        both = directions(site.strategy, isinstance(of, LinearAttention), values)
        to.print(Text(f"{self.run.name}: {site.kind} by {way(site.strategy, site.params)}", style="bold"), soft_wrap=True)
        note = heads(site, site.strategy, site.params, self.plan.ranks)
        if note:
            to.print(Text(f"  {note}"), soft_wrap=True)
        for each in both:
            to.print(_formulas(each), soft_wrap=True)
        total = " + ".join(shown(each.seconds, "s") for each in both)
        to.print(Text(f"  a step: {total} = {shown(site.seconds.total, 's')}\n"), soft_wrap=True)
        to.print(self.quantities(both))
        to.print(Text(f"  best alternative: {alternative(site, self.plan.ranks)}"), soft_wrap=True)
        for line in crossovers(self.plan, self.run, self.hardware, self.dtype):
            to.print(Text(f"  {line}"), soft_wrap=True)
        to.print()

    def quantities(self, both: Sequence[Direction]) -> Table:
        """The symbols that are in the formulas, in the order of `symbols`."""
        site, of = self.run.site, self.sizes
        values = bound(site.strategy, of, self.hardware, self.dtype)
        used = {q for each in both for q in each.symbols}
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for head in ("  ", "value", "meaning", "from"):
            table.add_column(head, justify="right" if head == "value" else "left", no_wrap=head == "value")
        for quantity in QUANTITIES.values():
            if quantity.symbol in used:
                came = source(quantity.symbol, site.strategy, of, self.hardware, self.dtype)
                value = _valued(values.get(quantity.symbol, 0.0), quantity.unit)
                table.add_row(Text(f"  {sympy.pretty(quantity.symbol)}"), value, Text(quantity.meaning), Text(came.text))
        return table


# Where another strategy wins ----------------------------------------------------------------------


def crossovers(plan: Plan, run: Run, hardware: Hardware, dtype: str) -> Iterator[str]:
    """One line for each crossing: in the plan's layout, then in any, where that is not the same."""
    ways, left_out = strategies(run.site, hardware, dtype)
    here = {name: of for name, of in ways.items() if LAYOUTS.get(name, plan.layout) == plan.layout}
    for axis in axes(ways[run.site.strategy], hardware):
        told = list(said(crossings(here, axis, dtype), axis))
        if len(here) < len(ways):
            free = said(crossings(ways, axis, dtype), axis)
            told += [f"{line}, if the model may have any layout" for line in free if line not in told]
        span = _at(axis, axis.values[0]), _at(axis, axis.values[-1])
        yield from told or [f"{run.site.strategy} wins everywhere from {span[0]} to {span[1]}"]
    yield from left_out


def strategies(site: Site, hardware: Hardware, dtype: str) -> tuple[dict[str, Sizes], list[str]]:
    """With their sizes, those that apply and whose price from sizes alone is the plan's; and why others are left out. Linear
    attention's need of heads and of two levels depends on the ranks alone."""
    ways = {site.strategy: sizes(site)}
    left_out: list[str] = []
    for r in site.rejected:
        of = sizes_of(r.sizes)
        if of is None or r.seconds is None:
            continue
        found = best(r.strategy, of, hardware, dtype)
        if found and abs(found.seconds / r.seconds - 1) > ALIKE:
            prices = f"from its sizes alone it would take {shown(found.seconds, 's')}, the plan says {shown(r.seconds, 's')}"
            left_out.append(f"{r.strategy} is not compared: {prices}")
        else:
            ways[r.strategy] = of
    if site.kind == "linear attention":
        ways |= {name: sizes(site) for name in ("all-to-all", "two-level") if name not in ways}
    return ways, left_out


def said(found: Iterable[Crossing], axis: Axis) -> Iterator[str]:
    """Crossings below the plan's place say who wins below them, those above it who wins from there on."""
    for each in found:
        how = {"solved": "solved", "bisection": "found by bisection"}.get(each.how, f"among {each.how}")
        if each.at <= axis.now:
            yield f"{_named(each.below)} wins below {_at(axis, each.at)} ({how}; {_named(each.above)} from there)"
        else:
            yield f"{_named(each.above)} wins from {_at(axis, each.at)} ({how}; {_named(each.below)} below)"


def _named(point: Point) -> str:
    return way(point.strategy, point.params)


def _at(axis: Axis, value: float) -> str:
    if axis.unit == "positions":
        return f"S = {rounded(value)}"
    if axis.unit == "ranks":
        return f"P = {value:.0f}"
    return f"{shown(value, axis.unit)} {axis.name}"


# Formulas -------------------------------------------------------------------------------------------


def _formulas(each: Direction) -> Text:
    text = Text(f"  {each.name}: {shown(each.seconds, 's')}\n")
    for what, terms in (("computing", each.computing), ("exchanging", each.exchanging), ("hidden, taken off", each.hidden)):
        if terms:
            text.append(f"    {what} {shown(sum(t.value for t in terms), 's')}\n")
        for term in terms:
            text.append(_term(term))
    return text


def _term(term: Term) -> str:
    """The formula over as many lines as it needs, then its value at the height of the fraction's bar."""
    value = sympy.Symbol(shown(term.value, "s"))
    drawn = sympy.pretty(sympy.Eq(term.formula, value, evaluate=False), use_unicode=True, wrap_line=False)
    return "".join(f"      {line.rstrip()}\n" for line in drawn.splitlines())


def _valued(value: float, unit: str) -> str:
    if unit in ("s", "B", "B/s", "FLOP", "FLOP/s"):
        return shown(value, unit)
    return f"{value:,.0f}" if value == round(value) and value < 1e9 else f"{value:.4g}"
