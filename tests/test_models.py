"""Every small model gives the single-device loss and gradients, and its plan says what was done."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import models_attention
import models_loss
import models_mixing
import models_recurrent
import pytest
import torch
from conftest import FULL
from direct import Lowered
from models import MODELS
from models_common import Backbone, first_layer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, distance, gradient_error, step, twins

import autosp
from autosp.check import relative_error
from autosp.passes import recurrence
from autosp.passes.strategies import LOWERINGS
from pool import Pool

STRATEGIES = ("all-to-all", "gather-kv", "ring", "balanced-ring", "ring-a2a", "halo")
RECURRENT = list(models_recurrent.MODELS)
ATTENTION = [n for n in MODELS if n not in models_loss.MODELS and n not in models_mixing.MODELS and n not in RECURRENT]
TOGETHER = 6  # models checked one after the other by one task

# Sites of models whose every layer is one softmax attention with nothing beside it gathered.
SITES = {
    **dict.fromkeys(models_attention.MODELS, 2),
    "cross_attention": 6,
    "cross_attention_eager": 6,
    "nanogpt": 2,
    "nanogpt_sdpa": 2,
}
SITES |= {"learned_position": 2, "learned_position_eager": 2, "checkpointed": 2, "vit_like": 2, "seq_first": 1, "mha": 1}
SITES.pop("sdpa_doubled"), SITES.pop("sdpa_running_mask")  # their rows cannot be cut into blocks: gathered
SITES.pop("bmm_attention")  # batch and heads are one dimension, which the shared mask splits again: gathered, and noted
# Their softmax is spelled by hand: one pairwise region, or two products with the keys.
PAIRWISE = {"manual_softmax": SITES.pop("manual_softmax"), "late_normaliser": SITES.pop("late_normaliser") // 2}
UNKNOWN = {
    "unknown_fft": ("aten.fft_rfft", "torch.fft.rfft(x, dim=1)"),
    "unknown_strided_conv": ("aten.conv1d", "self.down(x.transpose(1, 2))"),
    "unknown_prefix_conv": ("aten.conv1d", "self.conv(x[:, :7].mT)"),
    "unknown_token_mixing": ("aten.linear", "self.mix(x.transpose(1, 2))"),
    "unknown_sort": ("aten.sort", "self.value(x).sort(dim=1)"),
}

# What works along the sequence without a fallback, and the exchange it takes.
ALONG = {
    **dict.fromkeys((name for name in models_mixing.MODELS if name.startswith("conv")), "halo"),
    **dict.fromkeys((name for name in models_mixing.MODELS if name.startswith("token_shift")), "relayout"),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), "totals"),
    **dict.fromkeys(
        ("affine_recurrence", "affine_recurrence_reverse", "recurrence_checkpointed", "products"), "associative_totals"
    ),
    **{"flip": "relayout", "roll": "relayout", "both_ways": "halo"},
}


def batched(rows: list[tuple[int, int, list[str]]]) -> list[tuple[int, int, list[str]]]:
    return [(r, s, names[i : i + TOGETHER]) for r, s, names in rows for i in range(0, len(names), TOGETHER)]


def every_strategy() -> list[tuple[int, int, list[str]]]:
    """(ranks, length, names). Each model once: a quarter on 4 ranks, where rings of groups and two levels are, half on 3, others
    on 2."""
    if FULL:
        return batched([(r, s, list(MODELS)) for r in (1, 2, 3, 4) for s in (96, 101)])
    others = [name for name in MODELS if name not in ATTENTION and name not in RECURRENT]
    rows = [(4, 101, ATTENTION[::4]), (3, 101, ATTENTION[1::2]), (2, 101, [*ATTENTION[2::4], *others])]
    return batched([*rows, (4, 101, RECURRENT[::2]), (3, 96, RECURRENT[1::2])])


def strategies_for(name: str) -> tuple[str | None, ...]:
    """Three in turn for attention; models that are about something else in autosp's choice and in head-tail layout."""
    if name in RECURRENT:
        return (*recurrence.RECURRENT, "ring")
    if FULL:
        return (None, *STRATEGIES)
    turn = ATTENTION.index(name) % 2 if name in ATTENTION else None
    return (None, "ring") if turn is None else STRATEGIES[turn::2]


def run_all(
    mesh: DeviceMesh, names: Sequence[str], length: int, batch: int = 2
) -> dict[str, dict[str | None, tuple[float, Any]]]:
    """By model and strategy: the largest relative error of its loss, gradients and buffers on this rank, and its plan."""
    results = {}
    for name in names:
        try:
            plain, inputs = MODELS[name](length, batch, torch.float64)
            module = copy.deepcopy(plain if FULL else first_layer(plain))
            buffers = {n: b.clone() for n, b in plain.named_buffers()}
            want = step(plain, inputs)
            lowered, found = Lowered(module, mesh, strategies_for(name)), {}
            for strategy in lowered.strategies:
                lowered.strategy = strategy
                module.zero_grad()
                for n, b in module.named_buffers():
                    b.copy_(buffers[n])
                found[strategy] = _error(plain, module, want, step(lowered, inputs)), lowered.plan
            results[name] = found
        except Exception as reason:
            raise RuntimeError(f"{name}: {reason}") from reason
        torch._dynamo.reset()
    return results


def _error(plain: nn.Module, other: nn.Module, want: float, got: float) -> float:
    buffers = distance(dict(other.named_buffers()), dict(plain.named_buffers()))
    loss = relative_error(torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64), 0.0)
    return max(loss, gradient_error(plain, other), buffers)


@pytest.mark.parametrize(("ranks", "length", "names"), every_strategy())
def test_models_are_exact_under_every_strategy(pool: Pool, ranks: int, length: int, names: list[str]) -> None:
    everyone = pool.run(run_all, names, length, on=ranks, timeout=280)
    for name in names:
        errors = {s: max(rank[name][s][0] for rank in everyone) for s in strategies_for(name)}
        assert {s: e for s, e in errors.items() if not e <= EXACT} == {}, name
        for strategy, (_, plan) in everyone[0][name].items():
            explains(name, plan, ranks, strategy, removed=0 if FULL else removed(name, length))


def removed(name: str, length: int) -> int:
    """Layers that `first_layer` takes away."""
    stacks = [m.blocks for m in MODELS[name](length, 1, torch.float64)[0].modules() if isinstance(m, Backbone)]
    return sum(len(blocks) - 1 for blocks in stacks)


def compiled() -> list[tuple[int, int, list[str], str | None]]:
    """(ranks, length, names, strategy). A quarter of what uses attention, and some of the others; strategies in turn."""
    names = [*ATTENTION[::4], *[name for name in MODELS if name not in ATTENTION][::8]]
    if FULL:
        rows = [(r, s, list(MODELS), k) for r in (2, 3) for s in (96, 101) for k in (None, *STRATEGIES)]
    else:
        turns = (None, "ring", "balanced-ring", "gather-kv", "ring-a2a", "all-scan", "gather-states")
        rows = [(2, 100, names[i :: len(turns)], strategy) for i, strategy in enumerate(turns)]
    return [(r, s, few[i : i + TOGETHER], k) for r, s, few, k in rows for i in range(0, len(few), TOGETHER)]


def check(mesh: DeviceMesh, names: Sequence[str], length: int, strategy: str | None) -> dict[str, tuple[float, Any]]:
    """By model: the largest relative error of its loss, gradients and buffers on this rank, and its plan."""
    results = {}
    for name in names:
        try:
            plain, parallel, inputs = twins(name, mesh, length, whole=True, strategy=strategy)
            results[name] = _error(plain, parallel, *(step(model, inputs) for model in (plain, parallel))), parallel.autosp_plan
        except Exception as reason:
            raise RuntimeError(f"{name}: {reason}") from reason
        torch._dynamo.reset()
    return results


@pytest.mark.parametrize(("ranks", "length", "names", "strategy"), compiled())
def test_models_are_exact(pool: Pool, ranks: int, length: int, names: list[str], strategy: str | None) -> None:
    """The whole way, through PyTorch's partitioner."""
    everyone = pool.run(check, names, length, strategy, on=ranks, timeout=280)
    errors = {name: max(results[name][0] for results in everyone) for name in names}
    assert {name: e for name, e in errors.items() if not e <= EXACT} == {}
    for name, (_, plan) in everyone[0].items():
        explains(name, plan, ranks, strategy)


def explains(name: str, plan: Any, ranks: int, strategy: str | None, removed: int = 0) -> None:
    """The plan has the attentions there are, by the strategy asked for, and a fallback for what nobody has a rule for."""
    attentions = {n: max(count - removed, 1) for n, count in (SITES | PAIRWISE).items()}
    sites = [s for s in plan.sites if s.kind == "softmax attention"]
    if name in SITES and not (name == "seq_first" and ranks == 2):  # dimension 1 of its transposed ids is a batch of two
        assert (name, len(sites), plan.fallbacks) == (name, attentions[name], ())
    if name in PAIRWISE:
        assert (len(plan.sites), {s.kind for s in plan.sites}, plan.fallbacks) == (attentions[name], {"pairwise"}, ()), name
    for site in sites if strategy in LOWERINGS else ():
        assert strategy in (None, site.strategy) or site.note.startswith(f"{strategy} cannot apply: "), site
    if name in ALONG and ranks > 1:
        assert plan.fallbacks == () and ALONG[name] in {c.op for c in plan.collectives}, (name, plan.fallbacks, plan.collectives)
    if name in UNKNOWN and ranks > 1:
        operator, code = UNKNOWN[name]
        told = [f for f in plan.fallbacks if f.op.startswith(operator)]
        assert told and told[0].bytes > 0, (name, plan.fallbacks)
        assert "models_mixing.py:" in told[0].source_line and code in told[0].source_line


def returned_weights(mesh: DeviceMesh) -> tuple[float, Any]:
    model, inputs = MODELS["returns_weights"](33, 2, torch.float64)
    want = model(**inputs)["weights"].detach()
    parallel = autosp.parallelize(model, mesh, compiler="aot_eager", outputs="gather")
    return float((parallel(**inputs)["weights"] - want).abs().max()), parallel.autosp_plan


def test_attention_weights_that_are_an_output_are_right(pool: Pool) -> None:
    for error, plan in pool.run(returned_weights, on=3):
        assert error < 1e-12 and plan.outputs[1] == "2x33x33 Replicate"
