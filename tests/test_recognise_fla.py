"""Functions of flash-linear-attention, seen by Dynamo as our operator: against that library's own readable references."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_recognise import compiled, errors, gradients

from autosp.reference import Float64

pytest.importorskip("fla.ops", reason="flash-linear-attention is a dev dependency: pip install fla-core")

import fla.ops
from fla.modules import ShortConvolution
from fla.ops.comba.naive import naive_recurrent_comba as comba
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule as gated
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.generalized_delta_rule.iplr.naive import iplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.hgrn.naive import naive_recurrent_hgrn as hgrn
from fla.ops.kda.gate import naive_kda_gate
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.linear_attn.naive import naive_recurrent_linear_attn as linear
from fla.ops.retention.naive import naive_retention
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla as simple

Tensors = dict[str, torch.Tensor]
B, T, H, K, V = 2, 128, 2, 6, 5
DOCUMENTS = (37, 51, 40)


def sized(*names: str) -> Callable[[torch.Generator, int], Tensors]:
    """Operands by name: decays are logarithms ≤ 0, β is in (0, 1), keys have length 1, as the functions ask for."""

    def make(generator: torch.Generator, batch: int) -> Tensors:
        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        made: Tensors = {}
        for name in names:
            base, _, heads = name.partition(":")
            shape = {"": (batch, T, H, K), "V": (batch, T, H, V), "1": (batch, T, H)}[heads]
            shape = {"u": (H, K), "x": (batch, T, 6), "A_log": (H,), "dt_bias": (H * K,)}.get(base, shape)
            x = normal(*shape)
            if base in ("g", "gk", "w") and "A_log" not in names:
                x = -0.2 * x.exp()
            if base in ("k", "p"):
                x = x / x.norm(dim=-1, keepdim=True)
            if base == "beta":
                x = x.sigmoid()
            made[base] = x
        if "a" in made:  # rwkv7's and the generalized rule's: what is taken away stays smaller than the state
            made["b"] = -0.5 * made["a"].sigmoid() * (direction := made["b"] / made["b"].norm(dim=-1, keepdim=True))
            made["a"] = direction
        return made

    return make


def heads_first(function: Callable[..., Any], order: str, first: bool = True) -> Callable[..., Any]:
    """A reference that takes [batch, heads, seq, ..] positionally in `order`, and what of it is the output."""

    def run(initial_state: Any = None, output_final_state: bool = False, **x: torch.Tensor) -> Any:
        operands = [x[name].transpose(1, 2) if x[name].dim() > 2 else x[name] for name in order.split()]
        if not first:
            return function(*operands).transpose(1, 2), None
        out, state = function(*operands, initial_state=initial_state, output_final_state=output_final_state)
        return out.transpose(1, 2), state

    return run


def renamed(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    return lambda **x: function(**{names.get(name, name): value for name, value in x.items()})


def lightning(**x: Any) -> Any:
    gamma = -(8 / H * (1 - x.pop("layer_idx") / x.pop("num_layers"))) * torch.arange(H, dtype=torch.float64)
    return simple(**x, g=gamma.expand(*x["v"].shape[:2], H))


def kda_gated(A_log: torch.Tensor, dt_bias: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **x: Any) -> Any:
    for flag in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_qk_l2norm_in_kernel"):
        assert x.pop(flag)
    for name in "qk":
        x[name] = x[name] / (x[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    gate = naive_kda_gate(g, A_log, dt_bias)
    return naive_recurrent_kda(g=gate, beta=2 * beta.sigmoid(), **x)


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    taps = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0)).unfold(-1, weight.shape[1], 1)
    out = torch.nn.functional.silu((taps * weight[:, None]).sum(-1) + bias[:, None]).transpose(1, 2)
    return out + residual


KDA_FLAGS = dict.fromkeys(
    ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_qk_l2norm_in_kernel"), True
)
QKV = ("q", "k", "v:V")
# Function, reference, operands, options. Several functions of a family share a translator: one of them stands for all.
CASES: dict[str, tuple[str, Callable[..., Any], Callable[..., Tensors], dict[str, Any]]] = {
    "gla": ("chunk_gla", renamed(naive_recurrent_gla, g="gk"), sized(*QKV, "g"), {}),
    "simple_gla": ("chunk_simple_gla", simple, sized(*QKV, "g:1"), {"scale": 0.7}),
    "retention": ("chunk_retention", heads_first(naive_retention, "q k v", False), sized(*QKV), {}),
    "lightning": ("chunk_lightning_attn", lightning, sized(*QKV), {"layer_idx": 1, "num_layers": 4}),
    "linear_attn": ("fused_recurrent_linear_attn", linear, sized(*QKV), {}),
    "normalized": ("chunk_linear_attn", linear, sized("w", "k", "v:V"), {"normalize": True}),
    "delta_rule": ("chunk_delta_rule", lambda **x: gated(g=torch.zeros_like(x["beta"]), **x), sized(*QKV, "beta:1"), {}),
    "gated_delta_rule": ("chunk_gated_delta_rule", gated, sized(*QKV, "g:1", "beta:1"), {}),
    "kda": ("fused_recurrent_kda", kda_gated, sized(*QKV, "g", "beta:1", "A_log", "dt_bias"), KDA_FLAGS),
    "comba": ("fused_recurrent_comba", comba, sized(*QKV, "p", "g:1", "beta:1"), {}),
    "hgrn": ("fused_recurrent_hgrn", hgrn, sized("x", "g"), {}),
    "rwkv6": ("chunk_rwkv6", heads_first(naive_recurrent_rwkv6, "r k v w u"), sized("r", "k", "v:V", "w", "u"), {}),
    "rwkv7": (
        "chunk_rwkv7",
        heads_first(dplr_recurrence, "r k v a b w"),
        sized("r", "w", "k", "v:V", "a", "b"),
        {"scale": K**-0.5},
    ),
    "iplr": ("chunk_iplr_delta_rule", heads_first(iplr_recurrence, "q k v a b"), sized(*QKV, "a", "b"), {}),
}
STATELESS = ("retention",)  # the reference has no states


def operands(case: str, batch: int) -> Tensors:
    made = CASES[case][2](torch.Generator().manual_seed(0), batch)
    if case == "hgrn":
        made["g"] = -made["x"].flip(1).exp()
    if case == "normalized":  # a feature map: the sum that divides is not near zero
        made = {"q": made.pop("w").abs() + 0.1, "k": made["k"].abs(), "v": made["v"]}
    return made


def call(case: str) -> tuple[Callable[..., Any], dict[str, int]]:
    """The public function as user code calls it: found in its module at the call."""
    return compiled(lambda **x: getattr(fla.ops, CASES[case][0])(**x))


@pytest.mark.parametrize("case", CASES)
def test_with_states(case: str) -> None:
    _, reference, _, options = CASES[case]
    x = {name: y.requires_grad_() for name, y in operands(case, B).items()}
    if case not in STATELESS:
        generator, shape = torch.Generator().manual_seed(1), (B, 6) if case == "hgrn" else (B, H, K, V)
        x["initial_state"] = torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        options = {**options, "output_final_state": True}
    run, counts = call(case)
    with Float64():
        expected = gradients(reference(**x, **{n: o for n, o in options.items() if n != "scale" or case == "simple_gla"}), x)
        found = gradients(run(**x, **options), x)
    assert counts.get("asp.linear_attention") == 1
    assert errors(found, expected) < 1e-10


@pytest.mark.parametrize("case", CASES)
def test_documents(case: str) -> None:
    _, reference, _, options = CASES[case]
    x = {name: y.requires_grad_() for name, y in operands(case, 1).items()}
    ends = torch.tensor([0, *DOCUMENTS]).cumsum(0)
    plain = {n: o for n, o in options.items() if n != "scale" or case == "simple_gla"}
    run, counts = call(case)
    with Float64():
        parts = [{n: y if y.shape[0] != 1 else y[:, i:j] for n, y in x.items()} for i, j in itertools.pairwise(ends)]
        expected = gradients([torch.cat([reference(**part, **plain)[0] for part in parts], 1)], x)
        found = gradients([run(**x, **options, cu_seqlens=ends)[0]], x)
    assert counts.get("asp.linear_attention") == 1
    assert errors(found, expected) < 1e-10


def test_values_with_more_heads_than_keys_and_states_the_other_way_round() -> None:
    x = {
        name: y.requires_grad_() for name, y in sized("q", "k", "v:V", "g", "beta:1")(torch.Generator().manual_seed(0), B).items()
    }
    x |= {name: torch.cat([x[name], x[name] / 2], 2).detach().requires_grad_() for name in ("v", "g", "beta")}
    state = torch.randn(B, 2 * H, V, K, dtype=torch.float64)
    run, _ = compiled(lambda **y: fla.ops.chunk_kda(**y))
    with Float64():
        out, last = naive_recurrent_kda(**x, initial_state=state.transpose(-1, -2), output_final_state=True)
        expected = gradients((out, last.transpose(-1, -2)), x)
        found = gradients(run(**x, initial_state=state, output_final_state=True, state_v_first=True), x)
    assert errors(found, expected) < 1e-10


def test_transformers_functions_that_call_this_library() -> None:
    """There documents count, and the result has the type of the input; arguments of neither are dropped."""
    module = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")  # not a family of the zoo
    x = operands("gated_delta_rule", 1)
    x["g"] = x["g"][..., None].expand(-1, -1, -1, K)
    ends = torch.tensor([0, *DOCUMENTS]).cumsum(0)
    run, counts = compiled(lambda q, k, v, **y: module.chunk_kimi_delta_attention(q, k, v, **y))
    with Float64():
        out, state = run(**x, initial_state=None, cu_seqlens=ends, output_router_logits=True)
        parts = [naive_recurrent_kda(**{n: y[:, i:j] for n, y in x.items()})[0] for i, j in itertools.pairwise(ends)]
    assert counts == {"asp.linear_attention": 1} and state is None
    assert errors([out], [torch.cat(parts, 1)]) < 1e-10
    half = run(**{n: y.bfloat16() for n, y in x.items()}, initial_state=None)[0]
    assert half.dtype == torch.bfloat16


def test_short_convolution() -> None:
    module = ShortConvolution(6, 4, bias=True, activation="silu").double()
    assert module.bias is not None
    x, residual = (torch.randn(1, T, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves = {"x": x, "residual": residual, **dict(module.named_parameters())}
    ends = torch.tensor([0, *DOCUMENTS]).cumsum(0)

    def expected(i: Any, j: Any) -> torch.Tensor:
        assert module.bias is not None
        return convolution(x[:, i:j], module.weight[:, 0], module.bias, residual[:, i:j])

    run, _ = compiled(lambda **options: module(x, residual, **options))
    assert errors(gradients(run(), leaves), gradients(expected(0, T), leaves)) < 1e-10
    packed = torch.cat([expected(i, j) for i, j in itertools.pairwise(ends)], 1)
    assert errors(gradients(run(cu_seqlens=ends), leaves), gradients(packed, leaves)) < 1e-10
