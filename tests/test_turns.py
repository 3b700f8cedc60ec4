"""All-to-all in turns: exact, and exchanges of one turn travel while another's heads are computed, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from direct import Lowered, only
from lowered import Traced, trace
from models_architecture import DropoutMix
from models_attention import additive_causal, sdpa_gqa, sdpa_interleaved, sdpa_window, softcap
from models_common import Attention, Backbone, Build, LanguageModel, Mix, build, sdpa_causal
from test_bytes import OneAttention
from test_overlap import WAIT
from test_remat import LAYERS, attentions, exchanges
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, distance, gradient_error, gradients, step

import autosp
from autosp import zoo
from autosp.cost_model.hardware import load
from autosp.cost_model.planner import Planner
from autosp.inductor import communicates
from autosp.passes.overlap import overlap
from autosp.planning import room
from pool import Pool


def model(mix: Mix, heads: int, kv_heads: int | None = None, mask=None) -> Build:
    return build(lambda seq_len: LanguageModel(Backbone(lambda: Attention(mix, heads, kv_heads), mask, layers=1)))


# By ranks: models, and turns that each can take.
CASES: dict[int, dict[str, tuple[Build, int]]] = {
    2: {
        "two key heads a rank": (model(sdpa_gqa, 8, 4), 2),
        "window": (model(sdpa_window, 9), 4),  # blocks of rows, 1 or 2 heads a turn
        "spelled out": (model(softcap, 5, mask=additive_causal), 2),
    },
    3: {"seven heads": (model(sdpa_causal, 7), 2), "one key head": (model(sdpa_interleaved, 6, 1), 2)},
    4: {"ten heads": (model(sdpa_causal, 10), 2), "a key head shared by a rank's turns": (model(sdpa_gqa, 8, 2), 2)},
}


def errors(mesh: DeviceMesh) -> dict[str, tuple[float, list[dict[str, int]]]]:
    """Largest relative error of loss and gradients, and the parameters of the sites."""
    found = {}
    for name, (make, turns) in CASES[mesh.size()].items():
        plain, inputs = make(33, 2, torch.float64)
        module = copy.deepcopy(plain)
        lowered = Lowered(module, mesh, ("all-to-all",), only(turns=turns))
        loss = abs(step(lowered, inputs) - step(plain, inputs))
        found[name] = max(loss, gradient_error(plain, module)), [dict(s.params) for s in lowered.plan.sites]
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_heads_in_turns_are_exact(pool: Pool, ranks: int) -> None:
    for found in pool.run(errors, on=ranks):
        assert {name: params for name, (_, params) in found.items()} == {
            name: [{"turns": turns}] for name, (_, turns) in CASES[ranks].items()
        }
        assert {name: error for name, (error, _) in found.items() if not error < EXACT} == {}


def dropped(mesh: DeviceMesh) -> float:
    """How far gradients of a model with dropout are from those under another strategy, with the same seed."""
    module, inputs = model(DropoutMix(), 4)(33, 2, torch.float64)
    lowered, found = Lowered(module, mesh, ("gather-kv", "all-to-all"), only(turns=2)), []
    for strategy in lowered.strategies:
        lowered.strategy = strategy
        module.zero_grad()
        step(lowered, inputs)
        found.append({name: g.clone() for name, g in gradients(module).items() if g is not None})
    assert all(s.params == {"turns": 2} for s in lowered.plan.sites)
    return distance(*found)


def test_the_same_weights_are_dropped(pool: Pool) -> None:
    assert max(pool.run(dropped, on=2)) < EXACT


def planned(mesh: DeviceMesh) -> tuple[float, str]:
    """The whole way, as a plan given says."""
    plain, inputs = CASES[2]["two key heads a rank"][0](33, 2, torch.float64)
    plan = trace(copy.deepcopy(plain), inputs, 2, backward=False, decide=only(turns=2), strategy="all-to-all").compiled.plan
    torch._dynamo.reset()
    parallel = copy.deepcopy(plain)
    autosp.parallelize(parallel, mesh, compiler="aot_eager", plan=plan)
    loss = abs(step(parallel, inputs) - step(plain, inputs))
    return max(loss, gradient_error(plain, parallel)), str(parallel.autosp_plan)


def test_a_plan_given_has_turns(pool: Pool) -> None:
    for error, text in pool.run(planned, on=2):
        assert error < EXACT and "all-to-all (turns 2); 8/4 heads" in text


# What travels while what is computed, on one rank's graphs as they run.


def traced(heads: int, kv_heads: int, turns: int, rank: int = 0) -> Traced:
    ids = torch.zeros(1, 512, dtype=torch.long)
    return trace(OneAttention(heads, kv_heads), {"ids": ids}, 4, rank, decide=only(turns=turns), strategy="all-to-all")


def attentions_between(found: Traced, which: int) -> list[int]:
    """Of each exchange in order, how many attentions stand between its start and its wait."""
    overlap(found.graphs[which].graph, communicates)
    nodes = found.nodes(which)
    place = {n: i for i, n in enumerate(nodes)}
    kernel = ["_scaled_dot_product" in str(n.target) for n in nodes]
    waits = {n.all_input_nodes[0]: n for n in nodes if n.target is WAIT}
    started = [n for n in nodes if "all_to_all" in str(n.target)]
    return [sum(kernel[place[n] : place[waits[n]]]) for n in started]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "turns", "forward", "backward"),
    [
        (8, 8, 2, [0, 0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0]),
        (8, 2, 2, [0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]),  # keys and values travel once
        (16, 16, 4, [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [3, 2, 1, 0], [0, 1, 2, 3] + [3] * 3 + [2] * 3 + [1] * 3 + [0] * 3),
    ],
)
def test_one_turn_travels_while_another_is_computed(
    heads: int, kv_heads: int, turns: int, forward: list[int], backward: list[int]
) -> None:
    found = traced(heads, kv_heads, turns)
    assert (attentions_between(found, 0), attentions_between(found, 1)) == (forward, backward)
    sent = found.compiled.plan.sites[0].bytes_forward, found.compiled.plan.sites[0].bytes_backward
    assert tuple(found.sent(i, 4, 0)["all-to-all"] for i in (0, 1)) == sent


def test_backward_repeats_no_turn_whose_result_is_kept() -> None:
    found = {}
    for word in ("none", "attention", "full"):
        decide = only(Planner(load("cpu"), *room(word)), turns=2)
        found[word] = trace(*zoo.build("llama", 96), 2, decide=decide, strategy="all-to-all")
        assert all(s.params == {"turns": 2} for s in found[word].compiled.plan.sites)
    assert [attentions(x) for x in found.values()] == [0, 0, 2 * LAYERS]
    assert exchanges(found["attention"]) == exchanges(found["none"]) < exchanges(found["full"])


@pytest.mark.parametrize(("heads", "kv_heads"), [(10, 10), (9, 1)])
def test_what_a_rank_sends_in_an_exchange_is_what_the_other_expects(heads: int, kv_heads: int) -> None:
    """Uneven heads, in the order in which graphs run: the n-th exchange of each rank is the same."""
    found = [traced(heads, kv_heads, 2, rank) for rank in range(4)]
    for which in (0, 1):
        for of in found:
            overlap(of.graphs[which].graph, communicates)
        exchanges = [[n.args[1:3] for n in of.nodes(which) if "all_to_all" in str(n.target)] for of in found]
        for of_ranks in zip(*exchanges, strict=True):
            received, sent = ([list(splits[i]) for splits in of_ranks] for i in (0, 1))
            assert received == [list(row) for row in zip(*sent, strict=True)]
