"""What differs between two plans: what they are for, what they decide, what that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .amounts import length, shown
from .plan import Plan, Site
from .plan_text import together, way
from .retold import kept


@dataclass(frozen=True)
class Row:
    """Sites that differ alike, with the bytes each keeps for backward; None where a plan has no site of these names."""

    names: tuple[str, ...]
    a: Site | None
    b: Site | None
    kept_a: float
    kept_b: float

    @property
    def name(self) -> str:
        return together(self.names)

    @property
    def decided_alike(self) -> bool:
        return self.a is not None and self.b is not None and _decision(self.a) == _decision(self.b)


@dataclass(frozen=True)
class Difference:
    """facts, totals: (what, in A, in B) of whole plans. rows: of sites, in A's order. alike: sites that are wholly the same."""

    facts: tuple[tuple[str, str, str], ...]
    totals: tuple[tuple[str, str, str], ...]
    rows: tuple[Row, ...]
    alike: int
    same_decisions: bool


def difference(a: Plan, b: Plan) -> Difference:
    """Decisions are the layout, each site's strategy and parameters, what is kept for its backward, and what is computed by
    tiles; plans for other lengths or machines may agree in them."""
    facts = tuple(row for row in _facts(a, b) if row[1] != row[2])
    totals = tuple(row for row in _totals(a, b) if row[1] != row[2])
    rows, alike = _rows(a, b)
    same = (a.layout, a.tiles) == (b.layout, b.tiles) and all(row.decided_alike for row in rows)
    return Difference(facts, totals, rows, alike, same)


def _facts(a: Plan, b: Plan) -> Iterator[tuple[str, str, str]]:
    for what, told in _FACTS.items():
        yield what, told(a), told(b)


_FACTS: dict[str, Callable[[Plan], str]] = {
    "layout": lambda p: p.layout,
    "ranks": lambda p: str(p.ranks),
    "mesh": lambda p: ", ".join(f"{axis}={size}" for axis, size in p.mesh.items()),
    "sequence": lambda p: " and ".join(map(length, p.sequence)),
    "hardware": lambda p: p.hardware,
    "ranks a node": lambda p: str(p.node or "all"),
    "dtype": lambda p: p.beside.dtype if p.beside else "",
    "compiler": lambda p: p.compiler,
    "gradients": lambda p: p.grad_sync,
    "outputs": lambda p: "; ".join(p.outputs),
    "by tiles": lambda p: together(p.tiles) if p.tiles else "nothing",
    "gathered": lambda p: ", ".join(sorted(f.op for f in p.fallbacks)) or "nothing",
}


_UNITS = (
    ("step_s", "step", "s"), ("compute_s", "computing", "s"), ("exposed_s", "waiting for other ranks", "s"),
    ("tokens_per_s_per_device", "tokens/s a device", ""), ("efficiency", "efficiency", ""), ("peak_bytes", "peak memory", "B"),
    ("parameter_bytes", "parameters, gradients, optimizer", "B"), ("activation_bytes", "kept for backward", "B"),
    ("budget_bytes", "memory there is", "B"), ("host_bytes", "kept in the host's memory", "B"),
)  # fmt: skip


def _totals(a: Plan, b: Plan) -> Iterator[tuple[str, str, str]]:
    def told(plan: Plan, key: str, unit: str) -> str:
        value = getattr(plan.totals, key) if plan.totals else None
        return "-" if value is None else f"{value:.1%}" if key == "efficiency" else shown(value, unit).strip()

    for key, what, unit in _UNITS:
        yield what, told(a, key, unit), told(b, key, unit)


def _rows(a: Plan, b: Plan) -> tuple[tuple[Row, ...], int]:
    here, there = ({s.name: s for s in p.sites} for p in (a, b))
    kept_a, kept_b = kept(a), kept(b)
    grouped: dict[str, list[Row]] = {}
    alike = 0
    for name in dict.fromkeys([*here, *there]):
        row = Row((name,), here.get(name), there.get(name), kept_a.get(name, 0.0), kept_b.get(name, 0.0))
        if row.decided_alike and _told(row.a) == _told(row.b) and row.kept_a == row.kept_b:
            alike += 1
        else:
            grouped.setdefault(repr((_told(row.a), _told(row.b), row.kept_a, row.kept_b)), []).append(row)
    return tuple(dataclasses.replace(g[0], names=tuple(r.names[0] for r in g)) for g in grouped.values()), alike


def _decision(site: Site) -> tuple[str, str]:
    return way(site.strategy, site.params), site.saved


def _told(site: Site | None) -> object:
    """All that a comparison shows of a site."""
    return site and (_decision(site), site.kind, site.seconds, site.bytes_forward, site.bytes_backward)
