"""Six ranks: not a power of two, and a ring of groups that may be 2 × 3 or 3 × 2."""

from __future__ import annotations

import copy

import torch
from direct import Lowered, only
from models import MODELS
from test_zoo import run_all as run_family
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step

from autosp.kernels import blocks
from autosp.launch import run_ranks

STRATEGIES = {"llama": ("ring", "balanced-ring", "ring-a2a"), "mistral": ("halo",)}


def all_of_it(mesh: DeviceMesh) -> tuple[dict[str, float], dict[str, tuple[str, int]]]:
    """Errors by model and strategy on this rank; and how ring-a2a was taken: the places of its ring."""
    errors, rings = {}, {}
    for family, strategies in STRATEGIES.items():
        for strategy, (error, plan) in run_family(mesh, family, 101, strategies).items():
            errors[f"{family} {strategy} {sorted({s.strategy for s in plan.sites})}"] = error
    for name, near in (("gqa_sdpa", 2), ("odd_gqa", 3)):  # 2 and 3 key/value heads
        plain, inputs = MODELS[name](101, 2, torch.float64)
        module = copy.deepcopy(plain)
        lowered = Lowered(module, mesh, ("ring-a2a",), only(inner=near))
        loss = abs(step(lowered, inputs) - step(plain, inputs))
        errors[name] = max(loss, gradient_error(plain, module))
        nodes = lowered.compiled["ring-a2a"].module.graph.nodes
        names = [str(n.args[2]) for n in nodes if n.target is torch.ops.asp.block_attention.default]
        rings[name] = lowered.plan.sites[0].strategy, len(blocks.registered(names[0]).route.ring)
    return errors, rings


def test_six_ranks_are_exact() -> None:
    for errors, rings in run_ranks(all_of_it, {"sp": 6}, timeout=280):
        assert {k: e for k, e in errors.items() if not e <= EXACT} == {}
        assert "mistral halo ['halo']" in errors and all(f"llama {s} ['{s}']" in errors for s in STRATEGIES["llama"])
        assert rings == {"gqa_sdpa": ("ring-a2a", 3), "odd_gqa": ("ring-a2a", 2)}, "groups of 2 and of 3"
