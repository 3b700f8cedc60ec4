"""Where another strategy wins, formulas in the case at hand, where numbers come from; amounts and names as people write them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autosp.cost_model.amounts import AmountError, length, nbytes, positions, rounded, shown
from autosp.cost_model.cases import active, directions, number
from autosp.cost_model.crossover import LAYOUTS, NEAR, Axis, at_length, axes, best, crossings, variants
from autosp.cost_model.hardware import Hardware, load
from autosp.cost_model.plan_text import together
from autosp.cost_model.prices import COSTS, LINEAR_COSTS, bound, cost
from autosp.cost_model.problem import Sizes
from autosp.cost_model.sources import source
from autosp.cost_model.states import LinearAttention
from autosp.cost_model.volumes import Attention
from autosp.passes.choose import layout_name
from autosp.passes.strategies import LOWERINGS

ATTENTION = Attention(1, 32, 8, 1 << 17, 1 << 17, 128, 128, 2, 16, before=1 << 17, after=0)
RECURRENCE = LinearAttention(1, 32, 16, 16, 1 << 17, 128, 128, 1, True, 2, 16)
BOTH = [(COSTS, ATTENTION), (LINEAR_COSTS, RECURRENCE)]
DTYPE = "bfloat16"


def every() -> Iterator[tuple[str, Sizes]]:
    for table, sizes in BOTH:
        yield from ((strategy, sizes) for strategy in table if variants(strategy, sizes))


# Crossings ----------------------------------------------------------------------------------------


def axis(name: str, sizes: Sizes, hardware: Hardware) -> Axis:
    return next(a for a in axes(sizes, hardware) if a.name.startswith(name))


@pytest.mark.parametrize("machine", ["h200", "cpu", "a100"])
@pytest.mark.parametrize("sizes", [ATTENTION, RECURRENCE], ids=["attention", "recurrence"])
@pytest.mark.parametrize("name", ["S", "between", "inside"])
def test_at_a_crossing_both_take_as_long(machine: str, sizes: Sizes, name: str) -> None:
    hardware = load(machine)
    found = [a for a in axes(sizes, hardware) if a.name.startswith(name)]
    for each in found:
        for crossing in crossings({s: of for s, of in every() if of is sizes}, each, DTYPE):
            a, b = (best(p.strategy, *each.place(sizes, crossing.at), DTYPE) for p in (crossing.below, crossing.above))
            assert a is not None and b is not None and crossing.how in ("solved", "bisection")
            assert abs(a.seconds / b.seconds - 1) < 3 * NEAR, crossing
            before, after = (
                [best(p.strategy, *each.place(sizes, crossing.at * f), DTYPE) for p in (crossing.below, crossing.above)]
                for f in (0.9, 1.1)
            )
            assert before[0].seconds <= before[1].seconds * (1 + NEAR) and after[1].seconds <= after[0].seconds * (1 + NEAR)  # type: ignore[union-attr]


def test_bandwidth_is_solved() -> None:
    """Seconds are a ratio of polynomials in the bandwidth."""
    hardware = load("h200")
    (found,) = crossings(dict.fromkeys(["all-to-all", "gather-kv"], ATTENTION), axis("between", ATTENTION, hardware), DTYPE)
    assert found.how == "solved" and {found.below.strategy, found.above.strategy} == {"all-to-all", "gather-kv"}


def test_length_is_solved_where_formulas_hold_and_bisected_under_a_window() -> None:
    hardware = load("h200")
    along = axis("S", ATTENTION, hardware)
    found = crossings(dict.fromkeys(["gather-kv", "ring"], ATTENTION), along, DTYPE)
    assert found and {c.how for c in found} == {"solved"}
    linear = crossings(dict.fromkeys(["all-to-all", "log-step"], RECURRENCE), axis("S", RECURRENCE, hardware), DTYPE)
    assert [c.how for c in linear] == ["solved"] and linear[0].below.strategy == "all-to-all"
    windowed = dataclasses.replace(ATTENTION, before=4095)
    found = crossings(dict.fromkeys(["all-to-all", "halo"], windowed), axis("S", windowed, hardware), DTYPE)
    assert found and {c.how for c in found} == {"bisection"} and found[-1].above.strategy == "halo"


def test_ranks_are_counted() -> None:
    found = crossings(dict.fromkeys(["all-to-all", "ring-a2a"], ATTENTION), axis("P", ATTENTION, load("h200")), DTYPE)
    assert found[-1].how == "powers of two" and found[-1].above.strategy == "ring-a2a"
    assert found[-1].at <= 64, "32 heads are too few for 64 ranks"


def test_an_attention_at_other_lengths() -> None:
    longer = at_length(ATTENTION, 1 << 18)
    assert isinstance(longer, Attention) and longer.causal and longer.q_seq == 1 << 18
    window = at_length(dataclasses.replace(ATTENTION, before=99, work=5.0), 1 << 18)
    assert isinstance(window, Attention) and window.before == 99 and window.work is None


def test_variants_are_those_that_can_be_taken() -> None:
    assert [v.inner for v in variants("ring-a2a", ATTENTION)] == [2, 4, 8]  # type: ignore[union-attr]
    assert [v.node for v in variants("two-level", RECURRENCE)] == [2, 4, 8]  # type: ignore[union-attr]
    assert variants("all-to-all", dataclasses.replace(RECURRENCE, heads=8)) == []
    assert {name: layout_name(row.layout) for name, row in LOWERINGS.items() if row.layout} == LAYOUTS


# The case at hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "sizes"), list(every()), ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_terms_add_up_to_the_price(strategy: str, sizes: Sizes, ranks: int) -> None:
    hardware = load("h200")
    for of in variants(strategy, dataclasses.replace(sizes, ranks=ranks)):
        price = cost(strategy, of, hardware, DTYPE)
        forward, backward = directions(
            strategy,
            isinstance(of, LinearAttention),
            bound(strategy, of, hardware, DTYPE),
        )
        assert forward.seconds == pytest.approx(price.forward[0] + price.forward[2])
        assert backward.seconds == pytest.approx(price.backward[0] + price.backward[2])
        assert all(t.value > 0 and not t.formula.has(sympy.Min, sympy.Max) for d in (forward, backward) for t in d.computing)


def test_the_active_side_of_a_minimum() -> None:
    x, y = sympy.symbols("x y", positive=True)
    here = {x: 3.0, y: 2.0}
    found = active(sympy.Min(x + 1, 3 * y) + sympy.Max(0, x - 5) + sympy.ceiling(x / 2), here)
    assert found == x + 1 + 2 and number(found, here) == 6
    assert active(sympy.Piecewise((x, x < y), (y**2, True)), here) == y**2


# Sources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["h200", "mi300x", "cpu"])
@pytest.mark.parametrize(("strategy", "sizes"), list(every()), ids=lambda x: x if isinstance(x, str) else "")
def test_every_number_of_a_machine_has_its_place_in_the_table(machine: str, strategy: str, sizes: Sizes) -> None:
    """Change all numbers of the machine: what changes is the machine's, and is the product of the numbers named."""
    hardware = load(machine)
    other = dataclasses.replace(
        hardware,
        name="other",
        peak={k: _half(n) for k, n in hardware.peak.items()},
        launch={k: _half(n) for k, n in hardware.launch.items()},
        overlap=_half(hardware.overlap),
        alone=_half(hardware.alone),
        bandwidth=_half(hardware.bandwidth),
        levels=tuple(
            dataclasses.replace(
                level,
                links={
                    k: dataclasses.replace(link, **{f: _half(getattr(link, f)) for f in ("latency", "message", "bandwidth")})
                    for k, link in level.links.items()
                },
            )
            for level in hardware.levels
        ),
    )
    table = dict(hardware.numbers())
    few = dataclasses.replace(sizes, ranks=4, **({} if isinstance(sizes, LinearAttention) else {"by_rows": True}))
    for of in [*variants(strategy, sizes), *variants(strategy, few)]:
        here, there = (bound(strategy, of, h, DTYPE) for h in (hardware, other))
        for symbol, value in here.items():
            found = source(symbol, strategy, of, hardware, DTYPE)
            assert found.text
            assert bool(found.numbers) == (there[symbol] != value) or value == 0, symbol
            if found.numbers:
                assert math.isclose(found.value, value, rel_tol=1e-12), symbol
                assert all(table[place] is n for place, n in found.numbers), symbol


def _half(n):  # type: ignore[no-untyped-def]
    return dataclasses.replace(n, value=n.value / 2)


# Amounts and names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), [("1M", 1 << 20), ("128K", 1 << 17), ("128k", 1 << 17), ("1000", 1000), ("1.5M", 3 << 19), ("2G", 1 << 31)]
)
def test_positions(text: str, value: int) -> None:
    assert positions(text) == value


@pytest.mark.parametrize("text", ["1Q", "", "M", "-1", "0", "1.0001K", "1 M B", "1e", "0x10"])
def test_what_is_no_number_of_positions(text: str) -> None:
    with pytest.raises(AmountError, match="fix: a number of positions such as"):
        positions(text)


@pytest.mark.parametrize(
    ("text", "value"), [("80GB", 80e9), ("80GiB", 80 * 2**30), ("80 gb", 80e9), ("1000", 1000), ("1.5TB", 1.5e12), ("8e10", 8e10)]
)
def test_bytes(text: str, value: float) -> None:
    assert nbytes(text) == value


@pytest.mark.parametrize("text", ["80G", "GB", "80XB", "-80GB", "0"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(AmountError, match="fix: bytes, or a number with kB"):
        nbytes(text)


@given(st.integers(1, 1 << 40))
def test_a_length_reads_back(count: int) -> None:
    assert positions(length(count).replace(",", "")) == count


def test_a_length_is_rounded() -> None:
    assert [rounded(n) for n in (1 << 20, 3 << 19, 2.2e6, 24_321.5, 1000, 700.5)] == [
        "1M",
        "1536K",
        "2.1M",
        "23.8K",
        "1,000",
        "700",
    ]


@given(st.floats(1e-8, 1e17))
def test_an_amount_is_shown_with_three_digits(value: float) -> None:
    digits, unit = shown(value, "B").split(" ")
    factor = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[unit[:-1]]
    assert math.isclose(float(digits.replace(",", "")) * factor, value, rel_tol=5.1e-3)
    assert shown(0, "s") == "0 s" and shown(0.99999, "s") == "1.00 s" and shown(999.7, "s") == "1.00 ks"


def test_names_in_one() -> None:
    def layers(*numbers: int) -> list[str]:
        return [f"model.layers.{i}.mixer" for i in numbers]

    assert together(layers(3)) == "model.layers.3.mixer"
    assert together(layers(0, 1, 2)) == "model.layers.0-2.mixer (3)"
    assert together(layers(3, 7, 11)) == "model.layers.3, 7, 11.mixer (3)"
    assert together(layers(0, 1, 3, 5, 7, 8)) == "model.layers.0-1, 3 .. 7-8.mixer (6)"
    assert together(["a.0.q", "b.0.q"]) == "a.0.q .. b.0.q (2)"
    assert together(["h.0.x1", "h.0.x2"]) == "h.0.x1 .. h.0.x2 (2)"
    assert together(["h.0.a.1", "h.1.a.2"]) == "h.0.a.1 .. h.1.a.2 (2)"
