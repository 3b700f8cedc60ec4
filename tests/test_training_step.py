"""A plan's step as simulated: as long as the plan says, the same whether layers are folded, and drawn as Perfetto takes it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autosp.cli import app
from autosp.cost_model.chrome_trace import trace
from autosp.cost_model.hardware import Hardware, Number, load
from autosp.cost_model.linear_programs import LINEAR_PROGRAMS
from autosp.cost_model.messages import Ops
from autosp.cost_model.plan import Plan, PlanError, Seconds, Site
from autosp.cost_model.planner import Planner
from autosp.cost_model.prices import COSTS, LINEAR_COSTS, cost
from autosp.cost_model.problem import SAVES, Candidate, Decision, Exchange, Layer, Problem, SiteProblem, as_row, sizes_of
from autosp.cost_model.programs import PROGRAMS
from autosp.cost_model.simulator import COMPUTE
from autosp.cost_model.states import LinearAttention
from autosp.cost_model.training_step import Step, StepSite, decided, simulated, step, step_of
from autosp.cost_model.volumes import Attention

LAYOUT = {"ring": "head-tail", "ring-a2a": "head-tail", "balanced-ring": "contiguous"}


def candidates(of: Attention) -> tuple[Candidate, ...]:
    found = [Candidate(s, of, LAYOUT.get(s)) for s in COSTS if s not in ("halo", "ring-a2a")]
    for inner in (u for u in range(2, of.ranks) if of.ranks % u == 0):
        found.append(Candidate("ring-a2a", dataclasses.replace(of, inner=inner), "head-tail", (("inner", inner),)))
    return tuple(found)


def recurrences(of: LinearAttention) -> tuple[Candidate, ...]:
    chains = [Candidate("all-scan", dataclasses.replace(of, blocks=k), None, (("blocks", k),)) for k in (1, 8, 64)]
    return (*chains, *(Candidate(s, of) for s in ("log-step", "gather-states", "all-to-all")))


def problem(ranks: int, seq: int, heads: tuple[int, int], layers: int = 4, hybrid: bool = False, batch: int = 1) -> Problem:
    attention = candidates(Attention(batch, *heads, seq, seq, 128, 128, 2, ranks, seq, 0))
    state = recurrences(LinearAttention(batch, 32, 16, 16, seq, 128, 128, 1, True, 2, ranks))
    sites = [
        SiteProblem(f"layers.{i}.mixer", "linear attention", f"layers.{i}", state)
        if hybrid and i % 4
        else SiteProblem(f"layers.{i}.self_attn", "softmax attention", f"layers.{i}", attention)
        for i in range(layers)
    ]
    work = batch * seq / ranks
    rest = tuple(Layer(f"layers.{i}", 4e8 * work, 1e5 * work, 1e4 * work, 1e3 * work) for i in range(layers))
    exchanges = (Exchange("all_reduce", 10, 2e9),) if ranks > 1 else ()
    outside = Layer("", 1e8 * work, 1e4 * work, 1e3 * work, 1e3 * work)
    return Problem(ranks, "bfloat16", tuple(sites), (outside, *rest), exchanges, tokens=batch * seq)


def planned(of: Problem, decision: Decision) -> Plan:
    """A plan of it, as the compiler makes one."""
    sites = []
    for s, choice in zip(of.sites, decision.choices, strict=True):
        c = choice.candidate
        sites.append(
            Site(
                s.name, s.kind, c.strategy, "", 1, 1, 1, 1, 1, 1, 1, "mask causal", *choice.bytes_sent, params=dict(c.params),
                seconds=choice.seconds, saved=choice.saved, layer=s.layer, sizes=as_row(c.sizes),
            )
        )  # fmt: skip
    return Plan(
        of.ranks, (1,), decision.layout, tuple(sites), (), (), (), "inductor", "autosp", hardware=decision.hardware,
        totals=decision.totals, beside=of.beside, node=decision.node, saves=decision.saves,
    )  # fmt: skip


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("ranks", "seq"), [(1, 4096), (2, 8192), (8, 1 << 15), (16, 1 << 18)])
@pytest.mark.parametrize("saves", [SAVES[:1], SAVES[1:2], SAVES[2:3], SAVES[3:4], SAVES[5:6]])
def test_a_step_takes_as_long_as_the_plan_says(hybrid: bool, ranks: int, seq: int, saves: tuple[str, ...]) -> None:
    machine = dataclasses.replace(load("h200"), host=Number(2e9, "B/s", "slow, so that not all is hidden"))
    of = problem(ranks, seq, (32, 8), hybrid=hybrid)
    decision = Planner(machine, saves=saves)(of)
    found = decided(of, decision, machine)
    assert decision.totals is not None
    assert found.makespan == pytest.approx(decision.totals.step_s, rel=0.05)
    assert max(found.busy) <= found.makespan
    assert not any(e.to >= 0 for e in found.events()) or ranks > 1


@pytest.mark.parametrize("strategy", ["gather-kv", "ring", "balanced-ring", "all-to-all"])
def test_a_step_is_what_one_list_of_all_its_ops_is(strategy: str) -> None:
    """Sites simulated one after another, each begun by a rank when that is done with the one before."""
    from autosp.cost_model.programs import Site as Direction
    from autosp.cost_model.simulator import simulate

    machine, of = load("cpu"), Attention(1, 8, 4, 4000, 4000, 64, 64, 4, 4, 4000, 0)
    ops = Ops(machine, of.ranks)
    for back in (False, False, True, True):
        kernel = "attention_backward" if back else "attention_forward"
        rate, call = machine.rate(kernel, "float32"), machine.seconds_per_call(kernel)
        PROGRAMS[strategy](Direction(ops, of, back, rate, call, machine.bandwidth.value))
    whole = simulate(ops.ops, of.ranks, machine.overlap.value)
    sites = [StepSite(name, name, strategy, of) for name in ("first", "second")]
    found = step(
        sites, dataclasses.replace(problem(4, 4000, (8, 4)).beside, dtype="float32", layers=(), exchanges=()), 4, machine
    )
    assert found.makespan == pytest.approx(whole.makespan, rel=1e-6)
    events = sorted((e.rank, e.to, e.start) for e in found.events())
    assert [e[2] for e in events] == pytest.approx(
        [e[2] for e in sorted((e.rank, e.to, e.start) for e in whole.events)], abs=1e-6
    )


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize(("seq", "heads"), [(1 << 13, (32, 32)), (1 << 15, (32, 4)), (1 << 18, (16, 2)), (1 << 17, (40, 40))])
def test_a_planner_that_simulates_chooses_the_same(ranks: int, seq: int, heads: tuple[int, int]) -> None:
    """Or something whose simulated step is within 2 % of the best."""
    of, machine = problem(ranks, seq, heads), load("h200")
    closed, oracle = Planner(machine, memory=1e15), Planner(machine, memory=1e15, price=simulated)
    chosen, best = closed(of), oracle(of)
    assert best.totals is not None
    if [c.candidate for c in chosen.choices] != [c.candidate for c in best.choices]:
        assert decided(of, chosen, machine).makespan <= 1.02 * decided(of, best, machine).makespan
    for c in chosen.choices:
        assert c.seconds.compute > 0


@pytest.mark.parametrize("name", ["h200", "cpu"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_simulation_orders_strategies_as_closed_forms_do(name: str, ranks: int) -> None:
    """All pairs whose closed forms are not within a tenth of each other."""
    machine, dtype = load(name), "bfloat16" if name == "h200" else "float32"
    priced = [
        (cost(c.strategy, c.sizes, machine, dtype).seconds, simulated(c.strategy, c.sizes, machine, dtype).seconds)
        for site in problem(ranks, 1 << 13, (24, 24), hybrid=True).sites[:2]
        for c in site.candidates
        if c.sizes is not None
    ]
    for closed, found in priced:
        for other, its in priced:
            assert closed * 1.1 > other or found < its


# Plans and their traces ----------------------------------------------------------------------------


def made(ranks: int = 8, hybrid: bool = True) -> tuple[Plan, Step, Hardware]:
    machine, of = load("h200"), problem(ranks, 1 << 15, (32, 8), hybrid=hybrid)
    plan = planned(of, Planner(machine)(of))
    return plan, step_of(plan, machine), machine


def test_a_plan_says_what_it_was_priced_with() -> None:
    plan, found, machine = made()
    again = Plan.from_json(plan.to_json())
    assert again == plan and step_of(again, machine).makespan == found.makespan
    for site in again.sites:
        of = sizes_of(site.sizes)
        assert of is not None
        assert cost(site.strategy, of, machine, "bfloat16").seconds == pytest.approx(site.seconds.total)
    counted = Attention(1, 8, 8, 64, 64, 16, 16, 4, 2, moved=(3, 4), work=5.5, steps=1)
    assert sizes_of(json.loads(json.dumps(as_row(counted)))) == counted and sizes_of(as_row(None)) is None


def test_a_plan_that_lacks_sizes_is_refused() -> None:
    plan, _, machine = made()
    bare = dataclasses.replace(plan.sites[0], sizes={}, seconds=Seconds())
    with pytest.raises(PlanError, match=r"does not say with which sizes layers.0.self_attn was priced; fix: `autosp plan` again"):
        step_of(dataclasses.replace(plan, sites=(bare,)), machine)
    with pytest.raises(PlanError, match="does not say what it was priced with"):
        step_of(dataclasses.replace(plan, beside=None), machine)


def test_the_trace_is_what_perfetto_takes() -> None:
    _, found, _ = made()
    raw = json.loads(trace(found, 4))
    rows: list[dict[str, Any]] = raw["traceEvents"]
    assert raw["otherData"] == {"ranks": 8, "ranks drawn": 4, "seconds": found.makespan}
    named = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert {r["args"]["name"] for r in rows if r["name"] == "process_name"} == {f"rank {i}" for i in range(4)}
    drawn = [r for r in rows if r["ph"] == "X"]
    assert {r["ph"] for r in rows} == {"M", "X"} and {r["pid"] for r in drawn} == set(range(4))
    assert any(r["name"].startswith("layers.1.mixer backward: ") for r in drawn)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for r in drawn:
        assert r["dur"] >= 0 and r["ts"] >= 0 and (r["pid"], r["tid"]) in named
        threads[r["pid"], r["tid"]].append((r["ts"], r["ts"] + r["dur"]))
    for spans in threads.values():  # slices of a thread must not overlap
        spans.sort()
        assert all(a[1] <= b[0] + 2e-3 for a, b in itertools.pairwise(spans))
    assert max(r["ts"] + r["dur"] for r in drawn) == pytest.approx(found.makespan * 1e6, rel=1e-6)
    sent = [r for r in drawn if "to rank" in r.get("args", {})]
    received = [r for r in drawn if "from rank" in r.get("args", {})]
    assert len(sent) == sum(1 for e in found.events() if e.to >= 0 and e.rank < 4) and received
    assert {named[r["pid"], r["tid"]].split(",")[0] for r in sent} == {"send"}
    assert COMPUTE in named.values()


def test_the_command_draws_a_plan(tmp_path: Path) -> None:
    plan, found, _ = made()
    (tmp_path / "plan.json").write_text(plan.to_json())
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "plan.json"), "-o", str(tmp_path / "t.json"), "--ranks", "2"])
    assert result.exit_code == 0, result.output
    assert "2 of 8 ranks are drawn" in result.output and "as simulated" in result.output
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["seconds"] == found.makespan


@pytest.mark.parametrize("text", ["no JSON", "{}"])
def test_the_command_refuses_what_is_no_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "plan.json"), "-o", str(tmp_path / "t.json")])
    assert result.exit_code == 2 and "not a plan that autosp wrote" in result.output
    assert not (tmp_path / "t.json").exists()


def test_every_strategy_has_a_program() -> None:
    assert set(PROGRAMS) == set(COSTS) and set(LINEAR_PROGRAMS) == set(LINEAR_COSTS)
