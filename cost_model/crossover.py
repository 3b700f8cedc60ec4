"""Where another strategy wins: over the sequence's length, the ranks, and the bandwidth of the links.

Of each site alone, with each strategy at its best parameters. Between two neighbouring winners the crossing is the root of the
difference of their prices: solved in sympy where all that is counted is a polynomial in what varies, else bisected on the
numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from sympy import Expr

from .cases import active
from .hardware import Hardware, HardwareError, Level, Link
from .prices import Values, bound, cost, row
from .problem import Sizes
from .states import LinearAttention, chains, nodes
from .volumes import Attention, head_groups, head_turns

LAYOUTS = {"ring": "head-tail", "ring-a2a": "head-tail", "balanced-ring": "contiguous", "halo": "contiguous"}
POINT = sympy.Symbol("q", positive=True)  # what varies along an axis
NEAR = 2e-3  # by how much, as a share, two prices may differ where formulas say that they are equal

Way = tuple[str, Sizes]
Ways = tuple[Way, ...]


@dataclass(frozen=True)
class Point:
    """A strategy at its best parameters."""

    strategy: str
    sizes: Sizes
    seconds: float

    @property
    def params(self) -> dict[str, int]:
        of = self.sizes
        if self.strategy == "all-to-all":
            return {"turns": of.turns} if isinstance(of, Attention) and of.turns > 1 else {}
        own = {"all-scan": "blocks", "two-level": "node", "ring-a2a": "inner"}.get(self.strategy)
        return {own: getattr(of, own)} if own else {}


@dataclass(frozen=True)
class Crossing:
    """From `at` on `above` wins, before it `below`; `how` that was found: "solved", "bisection", or "powers of two"."""

    at: float
    below: Point
    above: Point
    how: str


@dataclass(frozen=True)
class Axis:
    """What varies: `name`, in which `unit`, from where it is now. place: a site's sizes and the machine at a value of it."""

    name: str
    unit: str
    now: float
    values: tuple[float, ...]
    place: Callable[[Sizes, float], tuple[Sizes, Hardware]]
    whole: bool = False


# Prices along an axis -----------------------------------------------------------------------------


def variants(strategy: str, sizes: Sizes) -> list[Sizes]:
    """The sizes with each value of the strategy's own parameters; none where it cannot apply for the number of heads or ranks."""
    if isinstance(sizes, LinearAttention):
        if strategy == "all-scan":
            return [replace(sizes, blocks=k) for k in chains(sizes)]
        if strategy == "two-level":
            return [replace(sizes, node=n) for n in nodes(sizes.ranks)]
        return [] if strategy == "all-to-all" and sizes.heads < sizes.ranks else [sizes]
    if strategy in LAYOUTS and sizes.q_seq < sizes.ranks:
        return []
    if strategy == "ring-a2a":
        return [replace(sizes.banded, inner=u) for u in head_groups(sizes.ranks, sizes.q_heads)]
    if strategy == "all-to-all":
        return [replace(sizes.banded, turns=t) for t in (1, *head_turns(sizes.q_heads, sizes.kv_heads, sizes.ranks))]
    return [sizes.banded]


def best(strategy: str, sizes: Sizes, hardware: Hardware, dtype: str) -> Point | None:
    """The strategy at its best parameters, or None where it cannot apply."""
    found = [Point(strategy, v, cost(strategy, v, hardware, dtype).seconds) for v in variants(strategy, sizes)]
    return min(found, key=lambda p: p.seconds, default=None)


def at_length(sizes: Sizes, length: int) -> Sizes:
    """The same at another sequence length; a window stays as wide as it is."""
    if isinstance(sizes, LinearAttention):
        return replace(sizes, seq=length)
    keys = max(1, round(sizes.kv_seq * length / sizes.q_seq))
    before = keys if sizes.before is not None and sizes.before >= sizes.kv_seq - 1 else sizes.before
    return replace(sizes.banded, q_seq=length, kv_seq=keys, before=before)


def length_of(sizes: Sizes) -> int:
    return sizes.seq if isinstance(sizes, LinearAttention) else sizes.q_seq


def with_bandwidth(hardware: Hardware, level: Level, value: float) -> Hardware:
    """The machine with `value` bytes a second between neighbours on a level; its other links there faster or slower alike."""
    factor = value / level.link("p2p").bandwidth.value

    def scaled(link: Link) -> Link:
        return replace(link, bandwidth=replace(link.bandwidth, value=link.bandwidth.value * factor))

    other = replace(level, links={kind: scaled(link) for kind, link in level.links.items()})
    levels = tuple(other if each is level else each for each in hardware.levels)
    return replace(hardware, name=f"{hardware.name}, {level.name} at {value:.6g} B/s", levels=levels)  # (names are hashed)


def axes(sizes: Sizes, hardware: Hardware) -> tuple[Axis, ...]:
    """Length, ranks, and bandwidth of each level that the ranks reach."""
    ranks, length = sizes.ranks, length_of(sizes)
    lengths = [2**i for i in range(math.ceil(math.log2(2 * ranks)), 28)]
    counts = [p for p in (2**i for i in range(1, 10)) if 2 * p <= length and _reached(hardware, p)]
    found = [
        Axis("S", "positions", length, tuple(lengths), lambda of, v: (at_length(of, round(v)), hardware)),
        Axis("P", "ranks", ranks, tuple(counts), lambda of, v: (replace(_banded(of), ranks=round(v)), hardware), whole=True),
    ]
    used = hardware.levels[: hardware.levels.index(hardware.level(ranks)) + 1] if ranks > 1 else ()
    for i, level in enumerate(used):
        now = level.link("p2p").bandwidth.value
        name = f"inside a {level.name}" if i + 1 < len(hardware.levels) else f"between {hardware.levels[max(0, i - 1)].name}s"
        place = functools.partial(_on_links, hardware, level)
        # Links to nearer ranks are never the slower ones.
        least = used[i + 1].link("p2p").bandwidth.value if i + 1 < len(used) else 0.0
        most = used[i - 1].link("p2p").bandwidth.value if i else math.inf
        values = {min(max(now * 2.0**k, least), most) for k in range(-10, 7)}
        found.append(Axis(name, "B/s", now, tuple(sorted(values)), place))
    return tuple(found)


def _on_links(hardware: Hardware, level: Level, of: Sizes, value: float) -> tuple[Sizes, Hardware]:
    return of, with_bandwidth(hardware, level, value)


def _banded(of: Sizes) -> Sizes:
    return of if isinstance(of, LinearAttention) else of.banded


def _reached(hardware: Hardware, ranks: int) -> bool:
    try:
        hardware.level(ranks)
    except HardwareError:
        return False
    return True


def curve(strategy: str, sizes: Sizes, axis: Axis, dtype: str) -> list[Point | None]:
    """The strategy's price at each of an axis's values."""
    return [best(strategy, *axis.place(sizes, value), dtype) for value in axis.values]


# Crossings ----------------------------------------------------------------------------------------


def crossings(ways: Mapping[str, Sizes], axis: Axis, dtype: str) -> tuple[Crossing, ...]:
    """Where the fastest of the strategies, each with its sizes, changes along an axis, from low to high."""
    curves = [curve(strategy, sizes, axis, dtype) for strategy, sizes in ways.items()]
    winners = [min((p for p in column if p), key=lambda p: p.seconds, default=None) for column in zip(*curves, strict=True)]
    found = []
    for low, high, below, above in zip(axis.values, axis.values[1:], winners, winners[1:], strict=False):
        if below and above and below.strategy != above.strategy:
            found.append(_crossing(ways, axis, dtype, (low, high), (below, above)))
    return tuple(found)


def _crossing(
    ways: Mapping[str, Sizes], axis: Axis, dtype: str, span: tuple[float, float], ends: tuple[Point, Point]
) -> Crossing:
    def there(value: float) -> tuple[Point | None, Point | None]:
        first, last = (best(p.strategy, *axis.place(ways[p.strategy], value), dtype) for p in ends)
        return first, last

    def gap(value: float) -> float:
        """How much longer, as a share, the winner below takes."""
        a, b = there(value)
        return -1.0 if b is None else 1.0 if a is None else a.seconds / b.seconds - 1

    if axis.whole:
        return Crossing(span[1], *ends, "powers of two")
    about = _bisected(gap, span)
    first, last = (p or end for p, end in zip(there(about), ends, strict=True))  # with the parameters that are best there
    one, other = (_along(axis, dtype, ways[p.strategy], p, about) for p in (first, last))
    at = None if one is None or other is None else _root(one - other, about)
    if at is not None and span[0] <= at <= span[1] and abs(gap(at)) <= NEAR:
        return Crossing(at, first, last, "solved")
    return Crossing(about, first, last, "bisection")


def _bisected(gap: Callable[[float], float], span: tuple[float, float]) -> float:
    low, high = span
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gap(middle) < 0 else (low, middle)
    return high


def _root(expr: Expr, about: float) -> float | None:
    """The root in POINT nearest to `about`; None where the formula is no ratio of polynomials, or has none."""
    ratio = sympy.together(expr)
    if not ratio.has(POINT):
        return None
    try:
        roots = sympy.Poly(sympy.numer(ratio), POINT).nroots(n=15, maxsteps=200)
    except sympy.PolynomialError:
        return None
    real = [float(sympy.re(r)) for r in roots if abs(sympy.im(r)) < 1e-9 * abs(r)]
    return min((r for r in real if r > 0), key=lambda r: abs(math.log(r / about)), default=None)


def _along(axis: Axis, dtype: str, sizes: Sizes, point: Point, about: float) -> Expr | None:
    """A strategy's seconds as a formula in POINT, in the case at `about`; None where some quantity is no polynomial in it."""
    unit = _unit(axis, sizes, about)
    known = [_valued(point, axis, dtype, sizes, unit * i) for i in (1, 2, 3, 4)]
    price = row(point.strategy, isinstance(sizes, LinearAttention))
    case = _valued(point, axis, dtype, sizes, about)
    total = sum(active(part, case) for each in (price.forward, price.backward) for part in (each.compute, each.exposed))
    formulas = {q: _polynomial([values.get(q, 0.0) for values in known], unit) for q in total.free_symbols}
    return None if None in formulas.values() else total.subs(formulas)


def _unit(axis: Axis, sizes: Sizes, about: float) -> float:
    """Near `about`; of lengths, one that divides by all that ranks may divide it by, so that counts are polynomials in it."""
    whole = 2 * sizes.ranks * math.ceil(about / 2 / sizes.ranks)
    return float(whole) if axis.unit == "positions" else about


def _polynomial(values: Sequence[float], unit: float) -> Expr | None:
    """Of second degree at most, through values at 1, 2, 3 and 4 units; None where the last is not on it."""
    first, second, third, fourth = values
    square = (first - 2 * second + third) / 2
    slope = second - first - 3 * square
    parts = [first - slope - square, slope, square]
    scale = max(map(abs, values))
    if abs(parts[0] + 4 * parts[1] + 16 * parts[2] - fourth) > 1e-9 * scale:
        return None
    return sum((c * (POINT / unit) ** i for i, c in enumerate(parts) if abs(c) > 1e-9 * scale), sympy.Integer(0))


def _valued(point: Point, axis: Axis, dtype: str, sizes: Sizes, value: float) -> Values:
    of, hardware = axis.place(sizes, value)
    same = (v for v in variants(point.strategy, of) if all(getattr(v, k) == n for k, n in point.params.items()))
    return bound(point.strategy, next(same), hardware, dtype)


__all__ = ["LAYOUTS", "Axis", "Crossing", "Point", "axes", "best", "crossings", "curve", "variants"]
