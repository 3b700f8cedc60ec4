"""Six ranks: not a power of two, and a ring of groups that may be 2 × 3 or 3 × 2."""

from __future__ import annotations

import copy

import torch
from direct import PLANNER, Lowered, only
from models import MODELS
from models_common import first_layer
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step

from autosp.kernels import blocks
from autosp.launch import run_ranks

# (model, strategies, ranks of a group that exchange heads): 2 and 3 key/value heads.
CASES = (
    ("gqa_sdpa", ("ring", "balanced-ring"), None),
    ("gqa_sdpa", ("ring-a2a",), 2),
    ("odd_gqa", ("ring-a2a",), 3),
    ("sdpa_window", ("halo",), None),
)


def all_of_it(mesh: DeviceMesh) -> tuple[dict[str, float], list[int]]:
    """Errors on this rank by model and strategy taken; and how each ring-a2a was: the places of its ring."""
    errors, rings = {}, []
    for name, strategies, near in CASES:
        plain, inputs = MODELS[name](101, 2, torch.float64)
        module = copy.deepcopy(first_layer(plain))
        lowered, want = Lowered(module, mesh, strategies, only(inner=near) if near else PLANNER), step(plain, inputs)
        for strategy in strategies:
            lowered.strategy = strategy
            module.zero_grad()
            loss = abs(step(lowered, inputs) - want)
            errors[f"{name} {lowered.plan.sites[0].strategy}"] = max(loss, gradient_error(plain, module))
        if near:
            nodes = lowered.compiled["ring-a2a"].module.graph.nodes
            names = [str(n.args[2]) for n in nodes if n.target is torch.ops.asp.block_attention.default]
            rings.append(len(blocks.registered(names[0]).route.ring))
    return errors, rings


def test_six_ranks_are_exact() -> None:
    for errors, rings in run_ranks(all_of_it, {"sp": 6}, timeout=280):
        assert {k: e for k, e in errors.items() if not e <= EXACT} == {}
        assert set(errors) == {f"{name} {strategy}" for name, strategies, _ in CASES for strategy in strategies}
        assert rings == [3, 2], "groups of 2 and of 3"
