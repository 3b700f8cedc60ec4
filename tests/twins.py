"""A plain module and its parallel twin: the same weights, the same batch, compared gradient by gradient."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from models import MODELS, OUTSIDE_LOSS, loss_of
from models_common import first_layer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autosp
from autosp.check import NORM_FLOOR, relative_error

EXACT = 1e-9


Inputs = dict[str, Tensor]


def twins(
    name: str, mesh: DeviceMesh | None, seq_len: int = 33, whole: bool = False, **options: Any
) -> tuple[nn.Module, Any, Inputs]:
    """(plain, parallel, inputs) of a model of MODELS in float64, with the first of its layers alone unless it is to be whole."""
    plain, inputs = {**MODELS, **OUTSIDE_LOSS}[name](seq_len, 2, torch.float64)
    plain = plain if whole else first_layer(plain)
    return plain, autosp.parallelize(copy.deepcopy(plain), mesh, **{"compiler": "aot_eager", **options}), inputs


def other_batch(inputs: Inputs, seed: int = 1) -> Inputs:
    """Token ids and labels of the same shapes and ranges, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(int(x.max()) + 1, x.shape, generator=generator) for name, x in inputs.items()}


def step(model: nn.Module, inputs: Inputs) -> float:
    """Forward and backward; the loss."""
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def gradient_error(plain: nn.Module, parallel: nn.Module) -> float:
    """Largest relative error of a gradient; infinite if only one twin has it."""
    return distance(gradients(parallel), gradients(plain))


def distance(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> float:
    """Largest relative error among named tensors, measured as `autosp check` does; infinite where one is missing."""
    whole = math.sqrt(sum(float(x.double().norm()) ** 2 for x in want.values() if x is not None))
    worst = 0.0
    for name in got.keys() | want.keys():
        a, b = got.get(name), want.get(name)
        if a is None or b is None:
            worst = worst if a is b else math.inf
        else:
            worst = max(worst, relative_error(a.detach(), b.detach(), NORM_FLOOR * whole))
    return worst
