"""The order in which partitioned graphs run: exchanges in theirs, other work while they travel."""

from __future__ import annotations

import operator

import pytest
import torch
from lowered import Traced, trace
from torch import fx

from autosp import zoo
from autosp.inductor import communicates
from autosp.passes.overlap import overlap

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def names(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes]


def graph_of(*rows: tuple[str, object, tuple[str, ...]]) -> fx.Graph:
    """Rows (name, target, inputs); the last row's inputs are the output."""
    graph, made = fx.Graph(), {}
    for name, target, inputs in rows[:-1]:
        args = tuple(made[x] for x in inputs)
        made[name] = graph.placeholder(name) if target is None else graph.create_node("call_function", target, args, name=name)
    graph.output(tuple(made[x] for x in rows[-1][2]))
    return graph


START, WAIT, WORK = c10d.all_reduce.default, c10d.wait_tensor.default, operator.add


def test_work_that_the_next_exchange_does_not_need_runs_while_it_travels() -> None:
    graph = graph_of(
        ("x", None, ()), ("q", WORK, ("x", "x")), ("k", WORK, ("x", "q")), ("v", WORK, ("x", "x")),
        ("send_v", START, ("v",)), ("got_v", WAIT, ("send_v",)), ("send_k", START, ("k",)), ("got_k", WAIT, ("send_k",)),
        ("late", WORK, ("q", "x")), ("out", WORK, ("got_k", "got_v")), ("", None, ("out", "late")),
    )  # fmt: skip
    overlap(graph, communicates)
    assert names(graph) == ["x", "v", "send_v", "q", "k", "send_k", "late", "got_v", "got_k", "out", "output"]


def test_a_wait_comes_with_what_needs_it_and_writes_come_last() -> None:
    graph = graph_of(
        ("x", None, ()), ("a", START, ("x",)), ("got", WAIT, ("a",)), ("written", aten.copy_.default, ("x", "got")),
        ("b", WORK, ("x", "x")), ("c", START, ("b",)), ("again", WAIT, ("c",)), ("", None, ("b", "again")),
    )  # fmt: skip
    overlap(graph, communicates)
    assert names(graph) == ["x", "a", "b", "c", "got", "again", "written", "output"]


def test_what_is_ready_runs_before_an_exchange_that_ends_when_it_is_called() -> None:
    graph = graph_of(
        ("x", None, ()), ("w", WORK, ("x", "x")), ("a", START, ("w",)), ("got", WAIT, ("a",)), ("gradient", WORK, ("w", "x")),
        ("waits", WORK, ("got", "x")), ("blocks", torch.ops.asp.block_attention.default, ("x",)),
        ("late", WORK, ("x", "x")), ("", None, ("gradient", "waits", "blocks", "late")),
    )  # fmt: skip
    overlap(graph, communicates)
    assert names(graph) == ["x", "w", "a", "gradient", "blocks", "late", "got", "waits", "output"]


def test_what_has_come_is_used_while_the_rest_travels() -> None:
    graph = graph_of(
        ("x", None, ()), ("a", START, ("x",)), ("b", START, ("x",)), ("got_a", WAIT, ("a",)), ("got_b", WAIT, ("b",)),
        ("p", WORK, ("got_a", "x")), ("q", WORK, ("got_b", "x")), ("both", WORK, ("p", "q")), ("c", START, ("both",)),
        ("got_c", WAIT, ("c",)), ("", None, ("got_c",)),
    )  # fmt: skip
    overlap(graph, communicates)
    assert names(graph) == ["x", "a", "b", "got_a", "p", "got_b", "q", "both", "c", "got_c", "output"]


def between(found: Traced, which: int) -> list[int]:
    """Of each exchange, how many products and attentions stand between its start and its wait."""
    nodes = found.nodes(which)
    heavy = [str(n.target).startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled")) for n in nodes]
    place = {n: i for i, n in enumerate(nodes)}
    waits = [n for n in nodes if n.target is WAIT]
    return [sum(heavy[place[n.all_input_nodes[0]] : place[n]]) for n in waits]


@pytest.mark.parametrize("strategy", ["all-to-all", "gather-kv"])
def test_a_model_s_exchanges_hide_and_keep_their_order(strategy: str) -> None:
    found = trace(*zoo.build("llama", 96), 4, strategy=strategy)
    for which, module in enumerate(found.graphs):
        before = [n.name for n in found.nodes(which) if communicates(n.target)]
        bare, nodes = between(found, which), set(found.nodes(which))
        overlap(module.graph, communicates)
        assert [n.name for n in found.nodes(which) if communicates(n.target)] == before
        assert set(found.nodes(which)) == nodes
        assert sum(between(found, which)) > sum(bare) == 0, "work stands between starts and waits, where none did"
