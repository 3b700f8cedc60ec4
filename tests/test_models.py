"""Every small model of the zoo gives the single-device loss and gradients, and its plan says what was done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import models_attention
import models_memory
import pytest
import torch
from conftest import FULL
from models import MODELS
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, distance, gradient_error, step, twins

import autosp
from autosp.check import relative_error
from pool import Pool

STRATEGIES = ("all-to-all", "gather-kv")
UNEVEN = [name for name in MODELS if name in models_attention.MODELS or name in models_memory.MODELS]
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
    "unknown_cumsum": ("aten.cumsum", "torch.cumsum(self.value(x), dim=1)"),
    "unknown_conv1d": ("aten.conv1d", "self.conv(x.transpose(1, 2))"),
    "unknown_token_mixing": ("aten.linear", "self.mix(x.transpose(1, 2))"),
    "unknown_flip": ("aten.flip", "self.value(x).flip(1)"),
    "unknown_roll": ("aten.roll", "torch.roll(self.value(x), shifts=5, dims=1)"),
    "unknown_sort": ("aten.sort", "self.value(x).sort(dim=1)"),
}


def cases() -> list[tuple[int, int, str | None, list[str]]]:
    """(ranks, length, strategy, names): each model on 3 ranks; attention also by gather-kv on 2 or 4 ranks."""
    names = list(MODELS)
    if FULL:
        rows = [(r, s, k, names) for r in (1, 2, 3, 4) for s in (96, 101) for k in STRATEGIES]
    else:
        rows = [(3, 101, None, names), (2, 96, "gather-kv", UNEVEN[::2]), (4, 101, "gather-kv", UNEVEN[1::4])]
    return [(r, s, k, few[i : i + TOGETHER]) for r, s, k, few in rows for i in range(0, len(few), TOGETHER)]


def check(mesh: DeviceMesh, names: Sequence[str], length: int, strategy: str | None) -> dict[str, tuple[float, Any]]:
    """By model: the largest relative error of its loss, gradients and buffers on this rank, and its plan."""
    results = {}
    for name in names:
        try:
            plain, parallel, inputs = twins(name, mesh, length, strategy=strategy)
            losses = torch.tensor([step(model, inputs) for model in (plain, parallel)], dtype=torch.float64)
            buffers = distance(dict(parallel.named_buffers()), dict(plain.named_buffers()))
            error = max(relative_error(*losses, 0.0), gradient_error(plain, parallel), buffers)
            results[name] = error, parallel.autosp_plan
        except Exception as reason:
            raise RuntimeError(f"{name}: {reason}") from reason
        torch._dynamo.reset()
    return results


@pytest.mark.parametrize(("ranks", "length", "strategy", "names"), cases())
def test_models_are_exact(pool: Pool, ranks: int, length: int, strategy: str | None, names: list[str]) -> None:
    everyone = pool.run(check, names, length, strategy, on=ranks, timeout=280)
    errors = {name: max(results[name][0] for results in everyone) for name in names}
    assert {name: e for name, e in errors.items() if not e <= EXACT} == {}
    for name, (_, plan) in everyone[0].items():
        explains(name, plan, ranks, strategy)


def explains(name: str, plan: Any, ranks: int, strategy: str | None) -> None:
    """The plan has the attentions there are, by the strategy asked for, and a fallback for what nobody has a rule for."""
    sites = [s for s in plan.sites if s.kind == "softmax attention"]
    if name in SITES:
        assert (name, len(sites), plan.fallbacks) == (name, SITES[name], ())
    if name in PAIRWISE:
        assert (len(plan.sites), {s.kind for s in plan.sites}, plan.fallbacks) == (PAIRWISE[name], {"pairwise"}, ()), name
    for site in sites:
        assert strategy in (None, site.strategy) or site.note.startswith(f"{strategy} cannot apply: "), site
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
