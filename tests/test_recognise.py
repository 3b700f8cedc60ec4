"""Known functions become our operators while Dynamo traces, and compute what they did: values and every gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FULL
from torch._dynamo.backends.debugging import aot_eager

from autosp import check, zoo
from autosp.parallelizer import tracing
from autosp.passes import recognise
from autosp.reference import Float64, call, loss_of

# Layers whose recurrence must be one operator. Short convolutions alone (lfm2) have none.
RECURRENCES = dict.fromkeys(zoo.LINEAR_FAMILIES, 1)
RECURRENCES |= {"lfm2": 0} | dict.fromkeys(
    ("mamba2", "falcon_h1", "zamba2", "mamba", "falcon_mamba", "rwkv", "xlstm"), zoo.LAYERS
)
# One family for each translator; the others call the same functions of another module.
FAMILIES = "qwen3_next olmo_hybrid kimi_linear minimax mamba2 falcon_h1 mamba lfm2 recurrent_gemma rwkv xlstm".split()
LENGTH = 75


def compiled(target: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, int]]:
    """`target` in one graph, and how often that graph calls each of our operators."""
    counts: dict[str, int] = {}

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        counts.clear()
        for node in graph.graph.nodes:
            name = str(node.target)
            if name.startswith("asp."):
                counts[name] = counts.get(name, 0) + 1
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    recognise.install()
    recognise.prepare(target)
    return torch.compile(target, fullgraph=True, backend=backend, dynamic=False), counts


def errors(values: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    whole = sum(float(g.double().norm()) ** 2 for g in reference) ** 0.5
    return max(check.relative_error(x, y, check.NORM_FLOOR * whole) for x, y in zip(values, reference, strict=True))


@pytest.mark.parametrize("family", zoo.LINEAR_FAMILIES if FULL else FAMILIES)
def test_families(family: str) -> None:
    model, inputs = zoo.build(family, LENGTH)
    dtype, keep = zoo.default_dtype(family), Float64()
    with keep if dtype == torch.float64 else contextlib.nullcontext():
        reference = loss_of(call(model, inputs))
    reference.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and g.norm() > 0 for g in grads.values())
    model.zero_grad()
    run, counts = compiled(model)
    with tracing(), Float64() if keep.used else contextlib.nullcontext():
        loss = loss_of(call(run, inputs))
    loss.backward()
    assert counts.get("asp.linear_attention", 0) == RECURRENCES[family]
    tolerance = check.GRAD_TOLERANCE[dtype]
    assert check.relative_error(loss, reference, 0.0) < tolerance
    assert errors([p.grad for p in model.parameters()], list(grads.values())) < tolerance
