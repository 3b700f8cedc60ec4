"""A price's formula in the case at hand: which side of each Min and Max it is on, and what its terms come to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from sympy import Expr

from .prices import Values, row


@dataclass(frozen=True)
class Term:
    """A part of a sum, and its value."""

    formula: Expr
    value: float


@dataclass(frozen=True)
class Direction:
    """Seconds of forward or backward: computing + exchanging − hidden. hidden: φ times the shorter of what coincides."""

    name: str
    computing: tuple[Term, ...]
    exchanging: tuple[Term, ...]
    hidden: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        return sum(t.value for t in (*self.computing, *self.exchanging)) - sum(t.value for t in self.hidden)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return {q for t in (*self.computing, *self.exchanging, *self.hidden) for q in t.formula.free_symbols}


def directions(strategy: str, linear: bool, values: Values) -> tuple[Direction, Direction]:
    """Forward and backward with what is zero left out."""
    price = row(strategy, linear)
    found = [
        Direction(
            name,
            terms(each.compute, values),
            terms(each.communication, values),
            terms(each.communication - each.exposed, values),
        )
        for name, each in (("forward", price.forward), ("backward", price.backward))
    ]
    return found[0], found[1]


def terms(expr: Expr, values: Values) -> tuple[Term, ...]:
    """The parts of a sum in the case at hand, those that are zero left out."""
    parts = sympy.Add.make_args(sympy.expand_mul(active(expr, values), deep=False))
    known = [Term(part, number(part, values)) for part in parts]
    return tuple(t for t in known if t.value)


def number(expr: Expr, values: Mapping[sympy.Symbol, float]) -> float:
    """A quantity that is not given is 0, as in `prices.cost`."""
    names, function = _function(expr)
    return float(function(*(values.get(q, 0.0) for q in names)))


@functools.lru_cache(maxsize=4096)
def _function(expr: Expr) -> tuple[tuple[sympy.Symbol, ...], Callable[..., float]]:
    names = tuple(sorted(expr.free_symbols, key=str))
    return names, sympy.lambdify(names, expr, "math")


def active(expr: Expr, values: Values) -> Expr:
    """The formula without Min, Max and Piecewise, each replaced by the argument that it is equal to here; roundings by their
    value. Where two are equal, the simpler."""
    if not expr.has(sympy.Min, sympy.Max, sympy.Piecewise, sympy.ceiling, sympy.floor):
        return expr
    if isinstance(expr, sympy.Piecewise):
        return next(active(piece, values) for piece, condition in expr.args if number(condition, values))
    if isinstance(expr, sympy.ceiling | sympy.floor):
        return sympy.Integer(round(number(expr, values)))
    args = [active(arg, values) for arg in expr.args]
    if isinstance(expr, sympy.Min | sympy.Max):
        pick = min if isinstance(expr, sympy.Min) else max
        target = pick(number(arg, values) for arg in args)
        return min((arg for arg in args if number(arg, values) == target), key=sympy.count_ops)
    return expr.func(*args)
