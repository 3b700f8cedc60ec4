"""A derivative that a user wrote is the one that is used, on part of the sequence where that is right."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import FULL
from direct import Lowered
from models_functions import MODELS
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step

from pool import Pool


def lowered(mesh: DeviceMesh, names: Sequence[str], length: int) -> dict[str, tuple[float, Any]]:
    """By model: the largest relative error of its loss and gradients on this rank, and its plan."""
    found = {}
    for name in names:
        plain, inputs = MODELS[name](length, 2, torch.float64)
        module = copy.deepcopy(plain)
        run = Lowered(module, mesh, (None,))
        try:
            want, got = step(plain, inputs), step(run, inputs)
        except Exception as reason:
            raise RuntimeError(f"{name}: {reason}") from reason
        found[name] = max(abs(got - want) / abs(want), gradient_error(plain, module)), run.plan
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize("ranks", (1, 2, 3, 4) if FULL else (1, 3))
def test_own_derivatives_are_exact(pool: Pool, ranks: int) -> None:
    everyone = pool.run(lowered, list(MODELS), 37, on=ranks, timeout=280)
    errors = {name: max(found[name][0] for found in everyone) for name in MODELS}
    for n in MODELS:
        print(n, errors[n], [(f.op, f.reason) for f in everyone[0][n][1].fallbacks])
    assert {name: e for name, e in errors.items() if not e <= EXACT} == {}
