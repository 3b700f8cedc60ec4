"""Prices obey what any price must, whatever the sizes, the machine and the strategy; the planner takes the least that fits."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from autosp.cost_model import prices
from autosp.cost_model.hardware import Hardware, HardwareError, Number, load
from autosp.cost_model.plan import Plan, PlanError
from autosp.cost_model.planner import Follow, MemoryShort, Planner, layer_seconds, placed, usable
from autosp.cost_model.prices import COSTS, LINEAR_COSTS, Cost, cost, textbook
from autosp.cost_model.problem import SAVES, Candidate, Decision, Exchange, Layer, Problem, SiteProblem, on_host
from autosp.cost_model.states import LinearAttention
from autosp.cost_model.symbols import QUANTITIES, D, D_v, H, H_kv, P, S, T, a, e, u
from autosp.cost_model.symbols import B as BATCH
from autosp.cost_model.volumes import Attention, head_turns

MACHINES = ("h100", "a100-80", "mi300x", "cpu")
Sizes = Attention | LinearAttention
ALL = [(s, False) for s in COSTS] + [(s, True) for s in LINEAR_COSTS]
strategies = pytest.mark.parametrize(("strategy", "linear"), ALL, ids=[f"{s}{' linear' * x}" for s, x in ALL])
quick = settings(max_examples=15)

HEADS = Attention(1, 16, 4, 1 << 15, 1 << 15, 128, 128, 2, 8, 1 << 15, 0)
DELTA = LinearAttention(1, 32, 16, 16, 1 << 15, 128, 128, 1, True, 2, 8, 8)


@st.composite
def attention(draw: st.DrawFn, window: bool = True, divides: bool = False) -> Attention:
    ranks = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 16)))
    kv, groups = draw(st.integers(1, 6)), draw(st.sampled_from((1, 2, 4)))
    seq = draw(st.integers(max(2, ranks), 400))
    masks = [(None, None), (seq, 0)] + [(draw(st.integers(0, seq)), 0)] * window
    before, after = draw(st.sampled_from(masks))
    inner = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    turns = draw(st.sampled_from([1, *head_turns(kv * groups, kv, ranks)]))
    return Attention(
        draw(st.integers(1, 3)), kv * groups, kv, seq, seq, draw(st.sampled_from((8, 64))), draw(st.sampled_from((8, 128))),
        draw(st.sampled_from((2, 4))), ranks, before, after, inner, turns,
    )  # fmt: skip


@st.composite
def recurrence(draw: st.DrawFn) -> LinearAttention:
    ranks, node = draw(st.sampled_from(((1, 1), (1, 8), (2, 1), (3, 2), (4, 2), (8, 8), (16, 8), (64, 8))))
    heads, groups = draw(st.integers(1, 8)), draw(st.sampled_from((1, 2)))
    key = draw(st.sampled_from((16, 128)))
    return LinearAttention(
        draw(st.integers(1, 3)), heads * groups, heads, heads, draw(st.integers(ranks, 5000)), key,
        draw(st.sampled_from((16, 64))), draw(st.sampled_from((0, 1, key))), draw(st.booleans()), draw(st.sampled_from((2, 4))),
        ranks, node, draw(st.sampled_from((1, 2, 8, 64))), draw(st.booleans()),
    )  # fmt: skip


def sizes(linear: bool, **options: bool) -> st.SearchStrategy[Any]:
    return recurrence() if linear else attention(**options)


def priced(strategy: str, of: Sizes, machine: Hardware | str = "h100") -> Cost:
    return cost(strategy, of, load(machine) if isinstance(machine, str) else machine, "bfloat16")


def numbers(c: Cost) -> list[float]:
    return [*c.forward, *c.backward, c.saved, c.held]


# Any price ------------------------------------------------------------------------------------------


@strategies
@given(data=st.data(), machine=st.sampled_from(MACHINES))
@quick
def test_every_number_is_an_amount(strategy: str, linear: bool, data: st.DataObject, machine: str) -> None:
    c = priced(strategy, data.draw(sizes(linear)), machine)
    assert all(math.isfinite(x) and x >= 0 for x in numbers(c)), c
    for compute, communication, exposed, sent, far in (c.forward, c.backward):
        assert compute > 0
        assert exposed <= communication * (1 + 1e-12)
        assert far <= sent * (1 + 1e-12)
    assert c.seconds == pytest.approx(c.compute + c.exposed) and c.exposed <= c.communication * (1 + 1e-12)


@strategies
@given(data=st.data(), machine=st.sampled_from(MACHINES))
@quick
def test_one_rank_communicates_nothing(strategy: str, linear: bool, data: st.DataObject, machine: str) -> None:
    alone = dataclasses.replace(data.draw(sizes(linear)), ranks=1, **({} if linear else {"inner": 1, "turns": 1}))
    c = priced(strategy, alone, machine)
    assert [*c.forward[1:], *c.backward[1:]] == [0] * 8 and prices.sent(strategy, alone) == (0, 0)


@strategies
@given(data=st.data(), factor=st.sampled_from((2, 3)), machine=st.sampled_from(MACHINES))
@quick
def test_more_to_send_takes_no_less(strategy: str, linear: bool, data: st.DataObject, factor: int, machine: str) -> None:
    """Of batch, length, head sizes, bytes. (Under a window a longer sequence has fewer shards in sight: that is left out.)"""
    small = data.draw(sizes(linear, **({} if linear else {"window": False})))
    fields = (
        ("batch", "seq", "key_dim", "value_dim", "itemsize") if linear else ("batch", "head_dim", "value_dim", "itemsize", "S")
    )
    field = data.draw(st.sampled_from(fields))
    grown: dict[str, Any] = {field: getattr(small, field) * factor} if field != "S" else {}
    if isinstance(small, Attention) and field == "S":
        longer = small.q_seq * factor
        grown = {"q_seq": longer, "kv_seq": longer, "before": None if small.before is None else longer}
    if isinstance(small, LinearAttention) and field == "key_dim" and small.decays > 1:
        grown["decays"] = small.decays * factor
    less, more = priced(strategy, small, machine), priced(strategy, dataclasses.replace(small, **grown), machine)
    for i in (1, 3):  # communication, sent
        assert more.forward[i] >= less.forward[i] * (1 - 1e-9) and more.backward[i] >= less.backward[i] * (1 - 1e-9), field


def test_a_larger_batch_through_a_chain_takes_no_less() -> None:
    """More of a hop hides behind a longer passage; all that travels still takes longer."""
    one = LinearAttention(1, 1, 1, 1, 153, 16, 16, 0, True, 2, 2)
    less, more = priced("all-scan", one, "h100"), priced("all-scan", dataclasses.replace(one, batch=2), "h100")
    assert more.forward[1] >= less.forward[1] and more.backward[1] >= less.backward[1]


@pytest.mark.parametrize("strategy", COSTS)
@given(data=st.data(), factor=st.sampled_from((2, 3)))
@quick
def test_more_key_heads_take_no_less(strategy: str, data: st.DataObject, factor: int) -> None:
    few = data.draw(attention())
    few = dataclasses.replace(few, q_heads=few.q_heads * factor, turns=1)
    many = dataclasses.replace(few, kv_heads=few.kv_heads * factor)
    less, more = priced(strategy, few), priced(strategy, many)
    assert more.communication >= less.communication * (1 - 1e-9) and sum(more.sent) >= sum(less.sent) - 1


def slower(machine: Hardware, part: str) -> Hardware:
    """Twice the latency, the seconds a message, or the seconds a byte, of every link."""

    def worse(link: Any) -> Any:
        n: Number = getattr(link, part)
        return dataclasses.replace(
            link, **{part: dataclasses.replace(n, value=n.value / 2 if part == "bandwidth" else n.value * 2)}
        )

    levels = tuple(dataclasses.replace(x, links={k: worse(v) for k, v in x.links.items()}) for x in machine.levels)
    return dataclasses.replace(machine, levels=levels)


@strategies
@given(data=st.data(), machine=st.sampled_from(MACHINES), part=st.sampled_from(("latency", "message", "bandwidth")))
@quick
def test_slower_links_take_no_less(strategy: str, linear: bool, data: st.DataObject, machine: str, part: str) -> None:
    of = data.draw(sizes(linear))
    fast, slow = priced(strategy, of, machine), priced(strategy, of, slower(load(machine), part))
    assert slow.communication >= fast.communication and slow.exposed >= fast.exposed * (1 - 1e-12)
    assert slow.compute == fast.compute and slow.sent == fast.sent


@strategies
@given(data=st.data())
@quick
def test_what_hides_more_exposes_less(strategy: str, linear: bool, data: st.DataObject) -> None:
    of, machine = data.draw(sizes(linear)), load("h100")
    none, some, full = (
        priced(strategy, of, dataclasses.replace(machine, overlap=dataclasses.replace(machine.overlap, value=v)))
        for v in (0, 0.5, 1)
    )
    if strategy != "all-scan":  # there the last rank only waits while others send
        assert none.exposed == pytest.approx(none.communication)
    assert none.communication * (1 + 1e-12) >= none.exposed >= some.exposed >= full.exposed >= 0


@given(of=attention())
@quick
def test_bytes_are_the_same_on_any_machine(of: Attention) -> None:
    for strategy in COSTS:
        assert prices.sent(strategy, of) == priced(strategy, of, "cpu").sent == priced(strategy, of, "h100").sent


def test_a_number_that_a_machine_lacks_is_named() -> None:
    machine = load("h100")
    bare = dataclasses.replace(machine, name="bare", efficiency={"matmul": machine.efficiency["matmul"]})
    with pytest.raises(HardwareError, match=r"hardware bare has no efficiency.linear_forward"):
        priced("all-scan", LinearAttention(1, 2, 2, 2, 64, 16, 16, 0, False, 2, 2), bare)


# Formulas ---------------------------------------------------------------------------------------------

EVEN = [("all-to-all", True), ("gather-kv", True), ("ring", True), ("balanced-ring", True), ("ring-a2a", True)]


@pytest.mark.parametrize(("strategy", "causal"), [(s, c) for s, _ in EVEN for c in (True, False)] + [("halo", False)])
@given(
    ranks=st.sampled_from((4, 8, 16)), per=st.integers(1, 6), heads=st.sampled_from((16, 32)),
    kv=st.sampled_from((1, 2, 4, 8, 16)), itemsize=st.sampled_from((2, 4)), batch=st.integers(1, 3),
)  # fmt: skip
@quick
def test_counts_are_the_textbook_s_where_everything_divides(
    strategy: str, causal: bool, ranks: int, per: int, heads: int, kv: int, itemsize: int, batch: int
) -> None:
    seq = ranks * 4 * per
    inner = 2 if strategy == "ring-a2a" else 1
    kv = max(kv, inner)  # where several ranks need a head, they are sent it
    of = Attention(batch, heads, kv, seq, seq, 64, 32, itemsize, ranks, *((seq, 0) if causal else (None, None)), inner)
    values = {BATCH: batch, S: seq, T: seq, H: heads, H_kv: kv, D: 64, D_v: 32, e: itemsize, a: 4, P: ranks, u: inner}
    counts = textbook(strategy, causal)
    row = COSTS[strategy]
    counted = prices.values_of(strategy, of)
    for symbol, formula in counts.items():
        assert float(formula.subs(values)) == pytest.approx(counted[symbol]), symbol
    expected = [float(p.sent.subs(counts).subs(values)) for p in (row.forward, row.backward)]
    assert prices.sent(strategy, of) == pytest.approx(expected, abs=1)


def documented() -> tuple[dict[str, sympy.Expr], dict[tuple[str, bool, str, str], sympy.Expr]]:
    """The formulas of docs/prices.md: by name, and by (strategy, linear, direction, term)."""
    names: dict[str, Any] = {name: q.symbol for name, q in QUANTITIES.items()}
    functions = {"min": sympy.Min, "max": sympy.Max, "ceiling": sympy.ceiling, "log2": lambda n: sympy.log(n, 2)}
    found: dict[tuple[str, bool, str, str], sympy.Expr] = {}
    text = (Path(__file__).parent.parent / "docs/prices.md").read_text()
    for line in "\n".join(text.split("```")[1::2]).splitlines():
        if " = " in line:
            name, _, formula = line.partition(" = ")
            names[name] = sympy.sympify(formula, {**functions, **names})
        elif line:
            place, _, formula = line.partition(": ")
            strategy, *linear, direction, term = place.split()
            found[strategy, bool(linear), direction, term] = sympy.sympify(formula, {**functions, **names})
    return names, found


DOCUMENTED = documented()[1]


@pytest.mark.parametrize("key", DOCUMENTED, ids=lambda key: f"{key[0]}{' linear' * key[1]} {key[2]} {key[3]}")
def test_the_document_s_formulas_are_the_code_s(key: tuple[str, bool, str, str]) -> None:
    """Evaluated at several sizes and machines of more than one rank."""
    strategy, linear, direction, term = key
    row = (LINEAR_COSTS if linear else COSTS)[strategy]
    symbols = [q.symbol for q in QUANTITIES.values()]
    compiled = [sympy.lambdify(symbols, x, "math", cse=True) for x in (DOCUMENTED[key], getattr(getattr(row, direction), term))]
    sized: list[Sizes] = [
        dataclasses.replace(HEADS, inner=2),
        dataclasses.replace(HEADS, ranks=16, q_seq=999, kv_seq=999, inner=4),
        dataclasses.replace(HEADS, q_heads=32, inner=2, turns=4),
        dataclasses.replace(HEADS, q_heads=32, kv_heads=16, inner=2, turns=2),
    ]
    if linear:
        sized = [DELTA, dataclasses.replace(DELTA, ranks=16, relaid=True), dataclasses.replace(DELTA, remove=False, decays=128)]
    for of, machine in itertools.product(sized, ("h100", "cpu")):
        values = prices.bound(strategy, of, load(machine), "bfloat16")
        said, meant = (f(*(values.get(q, 0.0) for q in symbols)) for f in compiled)
        assert said == pytest.approx(meant), (of, machine)


def test_the_document_has_every_strategy_and_quantity() -> None:
    told = {(s, linear) for s, linear, _, _ in DOCUMENTED}
    text = (Path(__file__).parent.parent / "docs/prices.md").read_text()
    # Balanced ring and halo have the ring's formulas, all-to-all of a linear attention five exchanges of its own.
    assert {(s, x) for s, x in ALL} - told == {("halo", False), ("balanced-ring", False), ("all-to-all", True)}
    assert COSTS["halo"] == COSTS["ring"] == COSTS["balanced-ring"]
    for name, q in QUANTITIES.items():
        assert f"| {name} | {q.unit} | {q.meaning} |" in text


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_heads_are_exchanged_for_less_than_blocks_from_more_than_g_plus_1_ranks(groups: int) -> None:
    for ranks in (2, 4, 8, 16, 32):
        of = Attention(1, 64, 64 // groups, 4096, 4096, 64, 64, 2, ranks)
        exchanged, around = prices.sent("all-to-all", of)[0], prices.sent("ring", of)[0]
        if ranks <= 64 // groups and ranks != groups + 1:
            assert (exchanged < around) == (ranks > groups + 1), ranks


def test_a_chain_has_a_best_number_of_blocks() -> None:
    """On one kind of link K* = √((P − 2) n / (α β) + (P − 1) · the same of adding to it): more blocks overlap, each costs α."""
    machine = load("a100-80")
    machine = dataclasses.replace(machine, levels=machine.levels[1:], overlap=dataclasses.replace(machine.overlap, value=1))
    state = LinearAttention(1, 32, 32, 32, 1 << 20, 128, 128, 0, False, 2, 64)
    hop, added = machine.level(64).link("p2p"), 3 * state.state / machine.bandwidth.value
    # Adding to all blocks but the first hides behind their hops.
    best = math.sqrt((62 * state.state / hop.bandwidth.value + 64 * added) / hop.message.value)
    taken = min(range(1, 200), key=lambda k: priced("all-scan", dataclasses.replace(state, blocks=k), machine).communication)
    assert taken == pytest.approx(best, abs=1)


def test_many_ranks_want_fewer_hops() -> None:
    """Far away, and for small states, log₂ P exchanges beat a chain; near and large, the chain sends less."""
    small = LinearAttention(1, 4, 4, 4, 1 << 20, 64, 64, 0, False, 2, 256, 8)
    large = LinearAttention(8, 64, 64, 64, 1 << 14, 256, 256, 0, False, 2, 8, 8, blocks=64)
    assert priced("log-step", small).communication < priced("all-scan", small).communication
    assert priced("all-scan", large).communication < priced("gather-states", large).communication


def test_every_quantity_of_a_row_is_defined_and_has_a_unit() -> None:
    named = {q.symbol for q in QUANTITIES.values()}
    for row in (*COSTS.values(), *LINEAR_COSTS.values()):
        assert all(isinstance(term, sympy.Expr) and term.atoms(sympy.Symbol) <= named for term in row.terms)
    assert all(q.unit and len(q.meaning) > 4 for q in QUANTITIES.values())


# The planner ------------------------------------------------------------------------------------------


def softmax(of: Attention = HEADS, without: Sequence[str] = ()) -> tuple[Candidate, ...]:
    layouts = {"ring": "head-tail", "ring-a2a": "head-tail", "balanced-ring": "contiguous", "halo": "contiguous"}
    found = []
    for s in COSTS:
        params = (("inner", 2),) if s == "ring-a2a" else ()
        own = dataclasses.replace(of, inner=2) if params else of
        if s in without or s == "halo":
            found.append(Candidate(s, None, layouts.get(s), (), "its mask is no window known beforehand"))
        else:
            found.append(Candidate(s, own, layouts.get(s), params))
    return tuple(found)


def delta(of: LinearAttention = DELTA) -> tuple[Candidate, ...]:
    return tuple(Candidate(s, of, None, (("blocks", 8),) if s == "all-scan" else ()) for s in LINEAR_COSTS)


LAYER = Layer("", flop=5e12, traffic=2e9, saved=6e8, entering=3e7, around=4e6, unread=1e10, projections=2e10)


def model(kinds: str, layer: Layer = LAYER, **options: Any) -> Problem:
    """ "ssd": two softmax attentions and a delta rule, each in its layer."""
    sites, layers = [], []
    for i, kind in enumerate(kinds):
        name = f"layers.{i}"
        sites.append(SiteProblem(f"{name}.attn", "attention", name, softmax() if kind == "s" else delta()))
        layers.append(dataclasses.replace(layer, name=name))
    return Problem(8, "bfloat16", tuple(sites), tuple(layers), tokens=1 << 15, **options)


def seconds(decision: Decision) -> float:
    assert decision.totals is not None
    return decision.totals.step_s


def peak(decision: Decision) -> float:
    assert decision.totals is not None
    return decision.totals.peak_bytes


def brute_force(problem: Problem, planner: Planner) -> float:
    """The least seconds of all plans that fit, one after another; infinite where none does."""
    best = math.inf
    layouts = (problem.layout,) if problem.layout else ("contiguous", "head-tail")
    for layout in layouts:
        ways = []
        for site, layer in zip(problem.sites, problem.layers, strict=True):
            own = []
            for i, save in itertools.product(usable(problem, site, layout), planner.saves):
                chosen = placed(site.candidates[i], layout)
                assert chosen.sizes is not None
                c, forward = (
                    cost(chosen.strategy, chosen.sizes, planner.hardware, problem.dtype),
                    layer_seconds(layer, planner.hardware, problem.dtype),
                )
                what, _, host = save.partition(" on ")
                local, rate = c.forward[0] * c.linear, planner.hardware.rate("matmul", problem.dtype)
                again, found, repeated = {
                    "everything": (0.0, c.saved, 0.0),
                    "attention operands and output": (forward - 3e10 / rate, c.operands + 4e6, local + c.resent),
                    "attention output": (forward - (3e10 if c.exchanged else 1e10) / rate, c.output + 4e6, local),
                    "layer input": (forward - 1e10 / rate, c.always, c.forward[0] + (0.0 if c.linear else c.forward[2])),
                }[what]
                kept, more = found + (layer.saved if save == "everything" else layer.entering), 0.0
                if save != "everything":
                    there = max(c.kept(what), c.operands) if c.exchanged else c.kept(what)
                    more = layer.saved + (c.operands + c.saved - there if c.linear else c.saved)
                if host:
                    assert planner.hardware.host is not None
                    copied, kept = kept - c.always, c.always
                    more += copied
                    ahead = forward + c.forward[0] + c.forward[2]
                    back = 2 * forward + c.backward[0] + c.backward[2] + again + repeated
                    again += sum(max(0.0, copied / planner.hardware.host.value - behind) for behind in (ahead, back))
                more -= kept if save != "everything" else 0.0
                own.append((c.seconds + 3 * forward + again + repeated, kept, c.held + more))
            ways.append(own)
        for plan in itertools.product(*ways):
            if sum(w[1] for w in plan) + max(w[2] for w in plan) <= planner.budget:
                best = min(best, sum(w[0] for w in plan))
    return best


@given(
    kinds=st.text("sd", min_size=1, max_size=3),
    flops=st.lists(st.sampled_from((1e11, 1e12, 2e13)), min_size=3, max_size=3),
    saved=st.lists(st.sampled_from((1e7, 6e8, 3e9)), min_size=3, max_size=3),
    tight=st.floats(0.3, 1.05),
    saves=st.sampled_from((SAVES[:4], (SAVES[0], *SAVES[4:]))),
    link=st.sampled_from((1e9, 50e9)),
)
@settings(max_examples=30)
def test_the_integer_program_finds_what_trying_all_finds(
    kinds: str, flops: list[float], saved: list[float], tight: float, saves: tuple[str, ...], link: float
) -> None:
    problem = model(kinds)
    layers = tuple(dataclasses.replace(x, flop=f, saved=b) for x, f, b in zip(problem.layers, flops, saved, strict=False))
    problem = dataclasses.replace(problem, layers=layers)
    planner = Planner(dataclasses.replace(load("h100"), host=Number(link, "B/s", "drawn")), saves=saves)
    planner = dataclasses.replace(planner, memory=peak(planner(problem)) * tight)
    decision, expected = planner(problem), brute_force(problem, planner)
    if math.isinf(expected):
        assert decision.notes and peak(decision) > planner.budget
    else:
        assert not decision.notes and peak(decision) <= planner.budget * (1 + 1e-9)
        assert (
            seconds(decision) == pytest.approx(expected, rel=2e-4) and decision.totals is not None and decision.totals.gap < 2e-4
        )


@given(kinds=st.text("sd", min_size=1, max_size=4), machine=st.sampled_from(MACHINES))
@settings(max_examples=20)
def test_without_a_limit_every_layer_takes_its_fastest_way(kinds: str, machine: str) -> None:
    problem, planner = model(kinds), Planner(load(machine), memory=1e15)
    decision = planner(problem)
    assert decision.totals is not None and decision.totals.gap == 0 and not decision.notes
    for site, choice in zip(problem.sites, decision.choices, strict=True):
        assert choice.candidate.layout in (None, decision.layout) and choice.saved == "everything"
        for i in usable(problem, site, decision.layout):
            other = placed(site.candidates[i], decision.layout)
            assert other.sizes is not None
            assert choice.seconds.total <= priced(other.strategy, other.sizes, machine).seconds * (1 + 1e-12)
    for layout in ("contiguous", "head-tail"):
        assert seconds(decision) <= seconds(planner(dataclasses.replace(problem, layout=layout))) * (1 + 1e-12)


def test_less_memory_keeps_less_and_takes_longer() -> None:
    problem = model("ssssssss")
    free = Planner(load("h100"), saves=SAVES)(problem)
    found = [free]
    for share in (0.8, 0.6, 0.4):
        found.append(Planner(load("h100"), memory=peak(free) * share, saves=SAVES)(problem))
        assert peak(found[-1]) <= peak(free) * share
    assert all(seconds(x) <= seconds(y) for x, y in itertools.pairwise(found))
    assert {c.saved for c in free.choices} == {"everything"}
    assert {c.saved for c in found[-1].choices} > {"everything"}, "some layers keep less than others"


def test_layers_wait_on_the_host_where_that_is_needed_and_there_is_a_link() -> None:
    """h100's link is fast enough to hide all copies of these layers, 1 GB/s is not."""
    problem = model("ssssssss")
    free = Planner(load("h100"), memory=1e15, saves=SAVES)
    tight = dataclasses.replace(free, memory=peak(free(problem)) * 0.3)
    slow = dataclasses.replace(tight, hardware=dataclasses.replace(load("h100"), host=Number(1e9, "B/s", "slow")))
    none = dataclasses.replace(tight, hardware=dataclasses.replace(load("h100"), host=None))
    everything, hosted, slower, without = (p(problem) for p in (free, tight, slow, none))
    assert everything.totals is not None and hosted.totals is not None
    assert {c.saved for c in everything.choices} == {"everything"} and not everything.totals.host_bytes
    found = [c.saved for c in hosted.choices]
    assert set(found) == {"everything", "attention output on host"} and hosted.totals.host_bytes > 0
    assert found == sorted(found), "the first layers, whose copies have the most time"
    assert not any(map(on_host, [*slower.saves.values(), *without.saves.values()]))
    assert seconds(hosted) < seconds(slower) == seconds(without)
    asked = dataclasses.replace(none, saves=("layer input on host",))(problem)
    assert set(asked.saves.values()) == {"layer input on host"} and seconds(asked) > seconds(without), "asked for by the word"


BY_TILES = dataclasses.replace(LAYER, saved=2e8, repeated=3e12, traffic=3e9)
MAYBE = dataclasses.replace(LAYER, held=8e8, by_tiles=dataclasses.replace(BY_TILES, held=1e8))


def test_feed_forward_blocks_are_tiled_where_memory_binds() -> None:
    """By as many layers as need be; a plan made before has its own."""
    problem, planner = model("ssssssss", MAYBE), Planner(load("h100"))
    free, told = planner(problem), dataclasses.replace(LAYER, held=8e8)
    assert free.tiles == () and seconds(free) == seconds(planner(model("ssssssss", told)))
    found = [planner_of(planner, free, share)(problem) for share in (0.8, 0.6)]
    some, all_but_few = (len(x.tiles) for x in found)
    assert 0 < some < all_but_few <= 8 and seconds(free) < seconds(found[0]) < seconds(found[1])
    assert not any(x.notes for x in found) and {c.saved for x in found for c in x.choices} == {"everything"}
    plan = planned(problem, found[0])
    assert plan.fingerprint != planned(problem, free).fingerprint
    followed = Follow(plan, planner)(problem)
    assert followed.tiles == found[0].tiles and seconds(followed) == pytest.approx(seconds(found[0]))
    assert Follow(planned(problem, free), planner_of(planner, free, 0.6))(problem).tiles == ()
    with pytest.raises(
        PlanError, match=r"the feed-forward block of layers.\d by tiles, which it cannot be here; fix: tile='auto'"
    ):
        Follow(plan, planner)(model("ssssssss", told))


def planner_of(planner: Planner, free: Decision, share: float) -> Planner:
    return dataclasses.replace(planner, memory=peak(free) * share)


@pytest.mark.parametrize("tight", [False, True])
def test_96_layers_are_planned_in_a_second(tight: bool) -> None:
    problem = model("ddds" * 24)
    planner = Planner(load("h100"), memory=1e15, saves=SAVES)
    planner(problem)  # prices are compiled once
    if tight:
        planner = dataclasses.replace(planner, memory=peak(planner(problem)) / 2)
    start = time.process_time()
    decision = planner(problem)
    assert time.process_time() - start < 1 and len(decision.choices) == 96
    assert peak(decision) <= planner.budget


@pytest.mark.parametrize("share", [2.0, 0.7, 0.45])
def test_layers_that_are_alike_are_decided_as_if_they_were_not(share: float) -> None:
    alike = model("sdsdsd")
    told_apart = tuple(dataclasses.replace(x, traffic=x.traffic * (1 + 1e-9 * i)) for i, x in enumerate(alike.layers))
    free = Planner(load("h100"), memory=1e15, saves=SAVES)
    planner = dataclasses.replace(free, memory=peak(free(alike)) * share)
    folded, apart = planner(alike), planner(dataclasses.replace(alike, layers=told_apart))
    assert seconds(folded) == pytest.approx(seconds(apart), rel=2e-4) and folded.layout == apart.layout


def test_layouts_exclude_each_other() -> None:
    """With rings alone to choose from, either all sites are head-tail or none is."""
    rings = tuple(c for c in softmax() if c.strategy in ("ring", "balanced-ring"))
    problem = model("ss")
    sites = tuple(dataclasses.replace(s, candidates=rings) for s in problem.sites)
    for layout, strategy in (("contiguous", "balanced-ring"), ("head-tail", "ring")):
        decision = Planner(load("h100"))(dataclasses.replace(problem, sites=sites, layout=layout))
        assert decision.layout == layout and {c.candidate.strategy for c in decision.choices} == {strategy}


def test_a_delta_rule_is_brought_into_order_and_back_in_head_tail_layout() -> None:
    (candidate, *_) = delta()
    there, here = placed(candidate, "head-tail"), placed(candidate, "contiguous")
    assert isinstance(there.sizes, LinearAttention) and there.sizes.relaid and here == candidate
    for strategy in LINEAR_COSTS:
        moved, still = priced(strategy, there.sizes), priced(strategy, DELTA)
        assert moved.exposed > still.exposed and sum(moved.sent) > sum(still.sent)
    planner = Planner(load("h100"))
    both = {x: planner(model("d", layout=x)) for x in ("contiguous", "head-tail")}
    assert seconds(both["head-tail"]) > seconds(both["contiguous"]) and planner(model("d")).layout == "contiguous"


def test_rows_that_ranks_compute_themselves_are_level_in_head_tail_layout() -> None:
    gathered = next(c for c in softmax() if c.strategy == "gather-kv")
    there = placed(gathered, "head-tail")
    assert there.sizes is not None and priced("gather-kv", there.sizes).compute < priced("gather-kv", HEADS).compute * 0.6


@pytest.mark.parametrize("strategy", [*COSTS, *LINEAR_COSTS])
def test_a_strategy_that_was_asked_for_is_taken(strategy: str) -> None:
    """Wherever it applies, whatever it costs; where it cannot, the choice says so."""
    problem = model("sd", strategy=strategy)
    decision = Planner(load("h100"))(problem)
    for site, choice in zip(problem.sites, decision.choices, strict=True):
        own = [c for c in site.candidates if c.strategy == strategy]
        if any(not c.reason for c in own):
            assert choice.candidate.strategy == strategy
            assert all(r.reason for r in choice.refused)
        elif own:
            assert choice.notes == (f"{strategy} cannot apply: {own[0].reason}",)


def test_exchanges_beside_sites_take_their_time() -> None:
    alone = Planner(load("h100"))(model("s"))
    beside = Planner(load("h100"))(model("s", exchanges=(Exchange("all_reduce", 3, 1e9),)))
    link = load("h100").level(8).link("all_reduce")
    more = 3 * (link.latency.value + 14 * link.message.value) + 1e9 / link.bandwidth.value
    assert seconds(beside) - seconds(alone) == pytest.approx(more)
    assert beside.totals is not None and alone.totals is not None
    assert beside.totals.exposed_s - alone.totals.exposed_s == pytest.approx(more)


# Reasons ------------------------------------------------------------------------------------------------


def refused(decision: Decision, site: int = 0) -> dict[str, str]:
    return {r.candidate.strategy: r.reason for r in decision.choices[site].refused}


def test_why_not() -> None:
    problem = model("sd")
    decision = Planner(load("h100"))(problem)
    reasons = refused(decision) | refused(decision, 1)
    assert reasons["halo"] == "its mask is no window known beforehand"
    away = [r for r in decision.choices[0].refused if r.candidate.layout not in (None, decision.layout)]
    assert away and all(r.reason.startswith(f"the model's sequence is in {decision.layout} layout; the whole") for r in away)
    assert any("takes" in r for r in reasons.values())
    for choice in decision.choices:
        for r in choice.refused:
            assert (r.seconds is None) == (r.candidate.sizes is None)
    fixed = Planner(load("h100"))(dataclasses.replace(problem, layout="contiguous"))
    assert refused(fixed)["ring"] == "the model's sequence is in contiguous layout"
    asked = Planner(load("h100"))(dataclasses.replace(problem, strategy="gather-kv"))
    assert refused(asked)["all-to-all"] == "not asked for"


def test_two_ways_of_the_same_price() -> None:
    alone = dataclasses.replace(HEADS, ranks=1)
    pair = (Candidate("all-to-all", alone), Candidate("gather-kv", alone))
    site = SiteProblem("attn", "attention", "l", pair)
    decision = Planner(load("h100"))(Problem(1, "bfloat16", (site,), (dataclasses.replace(LAYER, name="l"),)))
    assert [r.reason for r in decision.choices[0].refused] == ["takes no less"]


def test_a_faster_way_that_does_not_fit() -> None:
    """Whole keys and values, which an all-gather would bring sooner, take memory that blocks on their way do not."""
    machine = load("h100")
    machine = dataclasses.replace(machine, name="blocking", overlap=dataclasses.replace(machine.overlap, value=0.0))
    wide = dataclasses.replace(HEADS, kv_heads=16, q_seq=1 << 17, kv_seq=1 << 17, before=1 << 17, ranks=16)
    pair = tuple(Candidate(s, dataclasses.replace(wide, work=1e8)) for s in ("gather-kv", "balanced-ring"))
    site = SiteProblem("attn", "attention", "l", pair)
    problem = Problem(16, "bfloat16", (site,), (dataclasses.replace(LAYER, name="l"),))
    fast, slow = (priced(c.strategy, c.sizes, machine) for c in pair if c.sizes is not None)
    assert fast.seconds < slow.seconds and fast.held + fast.saved > slow.held + slow.saved
    decision = Planner(machine, memory=(LAYER.saved + slow.held + slow.saved) * 1.05)(problem)
    assert decision.choices[0].candidate.strategy == "balanced-ring" and refused(decision) == {"gather-kv": "needs more memory"}


def test_what_does_not_fit_says_what_would() -> None:
    problem = model("ssss", trained=4e9)
    tight = Planner(load("h100"), memory=30e9)
    assert not tight(problem).notes
    short = Planner(load("h100"), memory=25e9)(problem)
    (note,) = short.notes
    assert note.startswith(f"the plan needs {peak(short) / 1e9:.1f} GB a device, 24.2 GB are there; fix: a sequence of about ")
    assert note.endswith("ranks, or keep less for backward (allowed here: everything)")
    words = note.split()
    positions, ranks = int(words[words.index("positions,") - 1]), int(words[words.index("ranks,") - 1])
    assert 0 < positions < 1 << 15 and ranks > 8
    with pytest.raises(MemoryShort) as raised:
        Planner(load("h100"), memory=25e9, strict=True)(problem)
    assert str(raised.value) == note
    least = Planner(load("h100"), memory=25e9, saves=SAVES)(problem)
    assert least.notes and least.notes[0].endswith(" ranks"), "nothing less can be kept"


def test_parameters_alone_may_be_too_much() -> None:
    with pytest.raises(
        MemoryShort,
        match=r"parameters, gradients and Adam's moments alone take 84.0 GB; fix: split them over the ranks \(zero=3\)",
    ):
        Planner(load("h100"), strict=True)(model("s", trained=14e9))


# A plan made before -------------------------------------------------------------------------------------


def planned(problem: Problem, decision: Decision) -> Plan:
    """What a compiler writes of a decision, as far as `Follow` reads it."""
    from autosp.cost_model.plan import Site

    sites = tuple(
        Site(s.name, s.kind, c.candidate.strategy, "", 1, 1, 1, 1, 1, 1, 1, "", *c.bytes_sent, params=dict(c.candidate.params),
             saved=c.saved)
        for s, c in zip(problem.sites, decision.choices, strict=True)
    )  # fmt: skip
    return Plan(problem.ranks, (), decision.layout, sites, (), (), (), "aot_eager", "all", tiles=decision.tiles)


def follow(change: Callable[[Plan], Plan] = lambda p: p, problem: Problem | None = None) -> Decision:
    planner, made = Planner(load("h100")), model("sd")
    return Follow(change(planned(made, planner(made))), planner)(problem or made)


def test_a_plan_is_followed_on_another_machine_too() -> None:
    first, again = Planner(load("h100"))(model("sd")), follow()
    assert [c.candidate for c in again.choices] == [c.candidate for c in first.choices] and again.layout == first.layout
    assert "the plan given has another" in refused(again).values()
    elsewhere = Follow(planned(model("sd"), first), Planner(load("cpu")))(model("sd"))
    assert [c.candidate for c in elsewhere.choices] == [c.candidate for c in first.choices]


def test_what_a_plan_keeps_is_followed_whatever_memory_there_is() -> None:
    """Another machine has room for everything, or for nothing."""
    plan = planned(model("sd"), Planner(load("h100"))(model("sd")))
    less = dataclasses.replace(plan, sites=tuple(dataclasses.replace(s, saved=SAVES[i % 4]) for i, s in enumerate(plan.sites)))
    for memory in (1e15, 1e6):
        followed = Follow(less, Planner(load("h100"), memory=memory))(model("sd"))
        assert [c.saved for c in followed.choices] == [s.saved for s in less.sites]


def test_a_plan_for_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the plan is for 4 ranks, the mesh has 8 on sp; fix: `autosp plan --ranks 8`"):
        follow(lambda p: dataclasses.replace(p, ranks=4))
    with pytest.raises(
        PlanError, match=r"another model: where that has no more sites, this one has layers.1.attn; fix: plan again"
    ):
        follow(lambda p: dataclasses.replace(p, sites=p.sites[:1]))
    with pytest.raises(PlanError, match=r"where that has layers.1.attn, this one has none"):
        follow(problem=model("s"))

    def first(plan: Plan, **changes: Any) -> Plan:
        return dataclasses.replace(plan, sites=(dataclasses.replace(plan.sites[0], **changes), *plan.sites[1:]))

    with pytest.raises(PlanError, match=r"the plan has halo for layers.0.attn: it does not apply here; fix: plan again"):
        follow(lambda p: first(p, strategy="halo", params={"node": 3}))
    with pytest.raises(PlanError, match=r"the plan has halo for layers.0.attn: its mask is no window known beforehand"):
        follow(lambda p: first(p, strategy="halo", params={}))
