"""What backward finds of a layer: exact whatever it is; neither attention nor an exchange runs twice where that is promised."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from lowered import Traced, trace
from peak import peak_bytes
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM
from twins import gradient_error, step

import autosp
from autosp import zoo
from autosp.cost_model.amounts import AmountError
from autosp.cost_model.hardware import load
from autosp.cost_model.planner import Planner
from autosp.cost_model.problem import SAVES
from autosp.inductor import communicates
from autosp.kernels import attend
from autosp.passes.overlap import overlap
from autosp.planning import room
from pool import Pool

EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}  # experts have no float64


# Exact.


def errors(mesh: DeviceMesh, family: str, seq_len: int, strategy: str | None, words: tuple[str, ...]) -> list[tuple[float, int]]:
    """Of each setting: the largest relative error of a gradient ÷ what is exact, and how many layers are computed again."""
    plain, inputs = zoo.build(family, seq_len)
    parallel = [copy.deepcopy(plain) for _ in words]
    step(plain, inputs)
    found = []
    for model, memory in zip(parallel, words, strict=True):
        autosp.parallelize(model, mesh, compiler="aot_eager", memory=memory, strategy=strategy)
        step(model, inputs)
        error = gradient_error(plain, model) / EXACT[next(model.parameters()).dtype]
        found.append((error, len(model.autosp_plan.saves)))
    return found


EXACT_CASES = [
    (3, "llama", 101, "all-to-all", ("qkv", "full", "offload")),  # more, through `check`, in test_zoo and test_hybrids
    (4, "mistral", 101, "balanced-ring", ("full", "offload-attention")),
    (2, "phi3", 101, "ring", ("qkv", "offload-qkv")),  # values are cut from a fused projection
    (2, "qwen3_next", 101, None, ("qkv", "full")),
]


@pytest.mark.parametrize(("ranks", "family", "seq_len", "strategy", "words"), EXACT_CASES)
def test_gradients_are_exact_whatever_is_kept(
    pool: Pool, ranks: int, family: str, seq_len: int, strategy: str | None, words: tuple[str, ...]
) -> None:
    for rank in pool.run(errors, family, seq_len, strategy, words, on=ranks):
        for error, layers in rank:
            assert error < 1 and layers >= 2


# Counted, on one rank's graphs as PyTorch's partitioner cuts them.

LAYERS = 2


def traced(family: str, seq_len: int, strategy: str | None, memory: str | float, ranks: int = 4) -> Traced:
    module, inputs = zoo.build(family, seq_len)
    return trace(module, inputs, ranks, decide=Planner(load("cpu"), *room(memory)), strategy=strategy)


def exchanges(found: Traced) -> int:
    """In the backward graph."""
    return sum(communicates(n.target) for n in found.nodes(1))


def attentions(found: Traced) -> int:
    """Forward kernels of attention in the backward graph; one that may draw is an argument."""
    names = [str(x) for n in found.nodes(1) if n.op == "call_function" for x in (n.target, *n.args)]
    kernels = ("asp.block_attention", "asp.attend", "aten._scaled_dot_product")
    return sum(name.startswith(kernels) and "backward" not in name for name in names)


@pytest.mark.parametrize(
    ("family", "strategy"),
    [("llama", "all-to-all"), ("phi3", "ring"), ("mistral", "halo")],
)
def test_backward_repeats_what_the_plan_says(family: str, strategy: str) -> None:
    """Attention only where all is repeated, exchanges also where operands are kept as they were before; products to the last."""
    none, qkv, attention, full = (traced(family, 96, strategy, word) for word in ("none", "qkv", "attention", "full"))
    assert {s.strategy for s in full.compiled.plan.sites} == {strategy}
    assert attentions(none) == attentions(qkv) == attentions(attention) == 0 and attentions(full) == LAYERS
    by_heads = strategy in ("all-to-all", "ring-a2a")
    assert exchanges(attention) == exchanges(none) < exchanges(full)
    assert exchanges(qkv) == exchanges(none) + 3 * LAYERS * by_heads
    layers = [x for x in full.compiled.plan.beside.layers if x.name]  # type: ignore[union-attr]
    all_but_last = sum(x.flop - x.unread for x in layers)
    projections = sum(x.projections for x in layers)
    assert 0 < projections < all_but_last < sum(x.flop for x in layers)
    again = [work(found) - work(none) for found in (qkv, attention, full)]
    assert again == [all_but_last - projections, all_but_last - projections * by_heads, all_but_last]


def work(found: Traced) -> int:
    """FLOP of products in the backward graph."""
    total = 0
    for n in found.nodes(1):
        if str(n.target).startswith(("aten.mm", "aten.addmm", "aten.bmm")):
            left: torch.Tensor = n.args["addmm" in str(n.target)].meta["val"]  # type: ignore[union-attr]
            total += 2 * n.meta["val"].numel() * left.shape[-1]
    return total


@pytest.mark.parametrize(("family", "memory"), [("qwen3_next", "attention"), ("mamba2", "full")])
def test_a_linear_attention_computed_again_exchanges_nothing_again(family: str, memory: str) -> None:
    again, none = traced(family, 96, None, memory), traced(family, 96, None, "none")
    scans = [sum("scan_start" in str(n.target) for n in found.nodes(1)) for found in (again, none)]
    assert scans[0] == scans[1] > 0
    assert memory == "full" or exchanges(again) == exchanges(none)


@pytest.mark.parametrize(
    ("strategy", "memory"), [("all-to-all", "qkv"), ("all-to-all", "attention"), ("gather-kv", "full"), ("ring", "full")]
)
def test_bytes_of_backward_are_the_plan_s(strategy: str, memory: str) -> None:
    found = traced("llama", 96, strategy, memory)
    planned = sum(c.bytes_backward for c in found.compiled.plan.collectives)
    assert sum(found.sent(1, 4, 0).values()) == pytest.approx(planned, rel=0.02)


# Bytes.


def llama(layers: int, seq_len: int, vocab: int = 64) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Float32 throughout, with grouped heads."""
    sizes = {"vocab_size": vocab, "hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, use_cache=False, **sizes)
    ids = torch.zeros(2, seq_len, dtype=torch.long)
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


def held(found: Traced) -> int:
    """Bytes of what forward leaves for backward, beside parameters and inputs, and what the user takes."""
    nodes = found.nodes(0)
    kept = {n for n in nodes[-1].args[0][-found.saved :] if isinstance(n, fx.Node) and not copies([n], "wait_copy")}  # type: ignore[union-attr, index]
    given = {n.meta["val"].untyped_storage()._cdata for n in nodes if n.op == "placeholder"}
    values = [n.meta["val"] for n in kept if n.op == "call_function" and n.meta["val"].dtype != torch.uint8]  # random states
    return sum(x.nbytes for x in values if x.untyped_storage()._cdata not in given)


PEAKS = [  # with more of these, docs/design/0018
    ("all-to-all", "none", 64, {}),
    ("ring", "attention", 64, {}),
    ("balanced-ring", "qkv", 64, {}),
    ("gather-kv", "attention", 64, {}),
    ("ring", "full", 2048, {}),
    ("all-to-all", "attention", 4096, {"outputs": "loss", "tile": 64}),
]


@pytest.mark.parametrize(("strategy", "memory", "vocab", "options"), PEAKS)
def test_what_is_kept_and_what_is_there_at_the_peak_is_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, strategy: str, memory: str, vocab: int, options: dict[str, Any]
) -> None:
    found = trace(*llama(2, 2048, vocab), 4, decide=Planner(load("cpu"), *room(memory)), strategy=strategy, **options)
    totals = found.compiled.plan.totals
    assert totals is not None and held(found) == pytest.approx(totals.activation_bytes, rel=0.1)
    monkeypatch.setattr(attend, "BLOCK_ELEMENTS", 1 << 16)  # of scores: as small beside all else as in a long sequence
    counted = peak_bytes(found, 4)
    assert counted == pytest.approx(totals.peak_bytes - totals.parameter_bytes, rel=0.1)


KEPT = [(x, None, "qwen3_next") for x in ("none", "qkv", "attention", "full")]  # a convolution's neighbours, chunks
KEPT += [("qkv", "all-to-all", "t5"), ("attention", "all-to-all", "bert"), ("full", "ring", "vit"), ("qkv", "ring", "gpt_neox")]
KEPT += [("attention", "all-to-all", "deepseek_v3")]  # values are less wide than keys


@pytest.mark.parametrize(("memory", "strategy", "family"), KEPT)
def test_what_a_family_keeps_is_what_the_plan_says(memory: str, strategy: str | None, family: str) -> None:
    found = traced(family, 2048, strategy, memory)
    totals = found.compiled.plan.totals
    assert totals is not None and held(found) == pytest.approx(totals.activation_bytes, rel=0.1)


# On the host.


def copies(nodes: Iterable[fx.Node], *operators: str) -> list[fx.Node]:
    """To and from the host: "offload", "reload" start one, "wait_copy" ends it."""
    return [n for n in nodes if n.op == "call_function" and str(n.target) in {f"asp.{name}.default" for name in operators}]


def test_a_copy_has_the_values_and_strides_in_other_memory() -> None:
    for x in (torch.randn(3, 2, 4).transpose(0, 2), torch.randn(2, 8, 1, 4).permute(0, 2, 1, 3), torch.randn(5, 0)):
        there = torch.ops.asp.offload(x, [])
        back = torch.ops.asp.reload(there, x.device, [there])
        for copied in (there, back):
            assert torch.equal(copied, x) and copied.stride() == x.stride()
        assert len({t.data_ptr() for t in (x, there, back)}) == 3 or not x.numel()
        assert torch.ops.asp.wait_copy(back, there).data_ptr() == back.data_ptr()
        torch.library.opcheck(torch.ops.asp.offload.default, (x, [x]))
        torch.library.opcheck(torch.ops.asp.reload.default, (there, x.device, []))


def test_an_input_that_a_normalisation_made_waits_on_the_host() -> None:
    """BERT's layers end in one, an operator of three results; before the first stands a dropout that does nothing."""
    found = traced("bert", 96, None, "offload")
    assert [len(copies(found.nodes(i), "offload", "reload")) for i in (0, 1)] == [LAYERS, LAYERS]


@pytest.mark.parametrize(("memory", "each"), [("offload", 1), ("offload-attention", 7), ("offload-qkv", 7)])
def test_copies_leave_nothing_behind_and_come_back_a_layer_ahead(memory: str, each: int) -> None:
    found = trace(*llama(4, 1024), 4, decide=Planner(load("cpu"), *room(memory)), strategy="all-to-all")
    totals, (forward, backward) = found.compiled.plan.totals, found.graphs
    assert totals is not None and "in the host's memory" in str(found.compiled.plan)
    for module in found.graphs:
        overlap(module.graph, communicates)
    waits = [copies(module.graph.nodes, "wait_copy") for module in found.graphs]
    assert [len(x) for x in waits] == [4 * each, 4 * each]
    assert len(copies(forward.graph.nodes, "offload")) == len(copies(backward.graph.nodes, "reload")) == 4 * each
    assert not copies(forward.graph.nodes, "reload") and not copies(backward.graph.nodes, "offload")
    out = forward.graph.output_node().args[0]
    assert set(waits[0]) <= set(out) and sum(n.meta["val"].nbytes for n in waits[0]) == pytest.approx(totals.host_bytes, rel=0.1)
    assert held(found) == pytest.approx(totals.activation_bytes, rel=0.1), "the copied values are not kept as well"
    # While a layer's values are copied, a layer computes: in forward itself, in backward the one that comes before.
    for module, start, computing in ((forward, "offload", 0), (backward, "reload", 1)):
        place = {n: i for i, n in enumerate(module.graph.nodes)}
        starts = copies(module.graph.nodes, start)
        groups = [starts[i : i + each] for i in range(0, 4 * each, each)]
        begun = [place[group[0]] for group in groups]
        done = [max(place[w] for n in group for w in copies(n.users, "wait_copy")) for group in groups]
        work = [place[n] for n in module.graph.nodes if str(n.target).startswith(("aten.mm", "aten.addmm"))]
        for i in range(3):
            assert done[i] < begun[i + 1]
            assert sum(begun[i + computing] < w < done[i + computing] for w in work) >= 6


# Words.


def test_memory_is_a_word_or_an_amount() -> None:
    assert room("auto") == (None, SAVES) and room("none") == (None, SAVES[:1]) and room("offload") == (None, SAVES[6:])
    assert room("qkv") == (None, ("attention operands and output",))
    assert room("40GB") == room(40e9) == (40e9, SAVES)
    with pytest.raises(AmountError, match="or one of auto, none, qkv, attention, full, offload-qkv, offload-attention, offload"):
        autosp.parallelize(lambda x: x, memory="some")


def test_layers_are_computed_again_where_memory_asks_for_it() -> None:
    free = traced("llama", 1024, "ring", "none").compiled.plan
    assert free.totals is not None and not free.saves
    tight = traced("llama", 1024, "ring", free.totals.peak_bytes * 0.8 / 0.97).compiled.plan
    assert tight.saves and set(tight.saves.values()) <= set(SAVES[1:])
    assert {s.layer: s.saved for s in tight.sites if s.layer in tight.saves} == tight.saves
    assert tight.fingerprint != free.fingerprint
