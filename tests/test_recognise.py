"""Known functions become our operators while Dynamo traces, and compute what they did: values and every gradient."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FULL
from torch._dynamo.backends.debugging import aot_eager

from autosp import check, zoo
from autosp.parallelizer import tracing
from autosp.passes import recognise, translators
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


def tensors(**sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Seeded operands, by name; decays are logarithms ≤ 0."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(*size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    return {name: (-0.2 * x.exp() if name in ("g", "A") else x).requires_grad_() for name, x in made.items()}


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, tuple | list):
        return [x for value in values for x in flat(value)]
    return [] if values is None else [values]


def gradients(outputs: Any, leaves: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """All outputs, and the gradients of one number made of them."""
    found = flat(outputs)
    total = sum((x * torch.linspace(1, 7, x.numel(), dtype=x.dtype).reshape(x.shape).cos()).sum() for x in found)
    return [*(x.detach() for x in found), *torch.autograd.grad(total, list(leaves.values()))]


B, H, K, V, C = 2, 4, 6, 5, 7
RULE = {"query": (B, LENGTH, H, K), "key": (B, LENGTH, H, K), "value": (B, LENGTH, H, V), "beta": (B, LENGTH, H)}
STATES = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
SCAN = {"x": (B, LENGTH, H, V), "dt": (B, LENGTH, H), "A": (H,), "B": (B, LENGTH, 2, K), "C": (B, LENGTH, 2, K)}
CHANNELS = {"u": (B, C, LENGTH), "dt": (B, C, LENGTH), "A": (C, K), "B": (B, K, LENGTH), "C": (B, K, LENGTH)}
# Module, function, operands, options: states in and out, and options that the families leave alone.
FUNCTIONS: dict[str, tuple[str, str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "gated delta rule": (
        "qwen3_next", "torch_chunk_gated_delta_rule", {**RULE, "g": (B, LENGTH, H), "initial_state": (B, H, K, V)}, STATES,
    ),
    "token by token": ("qwen3_next", "torch_recurrent_gated_delta_rule", {**RULE, "g": (B, LENGTH, H)}, {}),
    "kda": (
        "kimi_linear", "chunk_kimi_delta_attention", {**RULE, "g": (B, LENGTH, H, K), "initial_state": (B, H, K, V)}, STATES,
    ),
    "mamba2": (
        "mamba2", "mamba2_chunk_scan", {**SCAN, "D": (H,), "dt_bias": (H,), "initial_states": (B, H, V, K)},
        {"chunk_size": 16, "dt_softplus": True, "dt_limit": (0.1, 1.0), "return_final_states": True},
    ),
    "mamba": (
        "mamba", "mamba_selective_scan", {**CHANNELS, "D": (C,), "z": (B, C, LENGTH), "delta_bias": (C,)},
        {"delta_softplus": True, "return_last_state": True},
    ),
    "rwkv": (
        "rwkv", "rwkv_linear_attention", {"time_decay": (C,), "time_first": (C,), "key": (B, LENGTH, C), "value": (B, LENGTH, C)},
        {"return_state": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_with_states(case: str) -> None:
    family, name, sizes, options = FUNCTIONS[case]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    leaves = tensors(**sizes)
    operands = {"hidden_states" if name in ("x", "u") else name: x for name, x in leaves.items()}
    if case == "rwkv":
        with torch.no_grad():
            leaves["key"].mul_(30)  # sums that would overflow if they were not kept relative to their largest term
    run, counts = compiled(lambda **x: getattr(module, name)(**x))
    with Float64():
        expected = gradients(getattr(module, name)(**operands, **options), leaves)
        found = gradients(run(**operands, **options), leaves)
    assert counts["asp.linear_attention"] == 1 and len(found) == len(expected)
    assert errors(found, expected) < 1e-10


def test_what_only_kernels_of_mamba_take() -> None:
    """`seq_idx` numbers documents, `z` gates: transformers' own functions drop both, so nothing here calls them."""
    x = {name: y.detach().double() for name, y in tensors(**SCAN, z=(B, LENGTH, H, V)).items()}
    x["dt"] = x["dt"].sigmoid()
    ends = (0, 20, 21, LENGTH)
    documents = torch.bucketize(torch.arange(LENGTH), torch.tensor(ends[1:]), right=True).expand(B, -1)

    def part(i: int, j: int) -> torch.Tensor:
        operands = {name: y if name == "A" else y[:, i:j] for name, y in x.items()}
        gate = torch.nn.functional.silu(operands.pop("z"))
        return translators.mamba_chunk_scan(**operands, chunk_size=8) * gate

    with Float64():
        whole = translators.mamba_chunk_scan(**x, chunk_size=8, seq_idx=documents)
        expected = torch.cat([part(i, j) for i, j in itertools.pairwise(ends)], 1)
    assert errors([whole], [expected]) < 1e-12
    assert translators.mamba_chunk_scan(**x, chunk_size=8, cu_seqlens=documents) is NotImplemented


def test_what_a_translator_does_not_know_is_traced_as_it_stands() -> None:
    import transformers.models.rwkv.modeling_rwkv as module

    leaves = tensors(time_decay=(C,), time_first=(C,), key=(B, 5, C), value=(B, 5, C))
    state = [torch.zeros(B, C, dtype=torch.float64) for _ in range(3)]
    run, counts = compiled(lambda **x: module.rwkv_linear_attention(**x, state=state))
    with Float64():
        expected = gradients(module.rwkv_linear_attention(**leaves, state=state), leaves)
        assert errors(gradients(run(**leaves), leaves), expected) < 1e-10
    assert counts == {}


def test_only_the_very_function_is_replaced() -> None:
    """Wherever a module holds it; a function that merely has its name stays."""
    import transformers.models.qwen3_next.modeling_qwen3_next as library

    recognise.install()
    wrapper = library.torch_chunk_gated_delta_rule
    original = wrapper._autosp

    def torch_chunk_gated_delta_rule(*_: Any, **__: Any) -> str:
        return "the user's own"

    user = types.ModuleType("user_code")
    user.rule, user.torch_chunk_gated_delta_rule = original, torch_chunk_gated_delta_rule  # type: ignore[attr-defined]
    sys.modules["user_code"] = user
    try:
        library.torch_chunk_gated_delta_rule = original  # as if both had been imported just now
        recognise.install()
        assert user.rule is library.torch_chunk_gated_delta_rule and user.rule._autosp is original
        assert user.torch_chunk_gated_delta_rule is torch_chunk_gated_delta_rule
        again = library.torch_chunk_gated_delta_rule
        recognise.install()
        assert library.torch_chunk_gated_delta_rule is again
    finally:
        del sys.modules["user_code"]
