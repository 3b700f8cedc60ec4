"""The tiny models keep what makes their family, give the same bits again, and every family runs exactly in parallel."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import FULL
from direct import Lowered
from torch.distributed.device_mesh import DeviceMesh

import autosp
from autosp import check, zoo
from autosp.check import Report, check_on_rank
from autosp.model_spec import ModelSpec
from autosp.reference import Float64, call, loss_of
from pool import Pool

STRATEGIES = ("all-to-all", "gather-kv", "ring", "balanced-ring", "ring-a2a", "halo")
LENGTHS = (96, 101)
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
WINDOWED = ("mistral", "phi3", "qwen3", "gemma2", "gemma3_text", "gpt_oss")  # some layers at least


def every_strategy() -> list[tuple[str, int, int]]:
    """(family, ranks, length). Each family once, on 2, 3 or 4 ranks in turn."""
    if FULL:
        return [(f, r, s) for f in zoo.FAMILIES for r in (1, 2, 3, 4) for s in LENGTHS]
    return [(family, 2 + i % 3, LENGTHS[i % 2]) for i, family in enumerate(zoo.FAMILIES)]


def strategies_for(family: str) -> tuple[str, ...]:
    """Three in turn, and the window's own where there is one."""
    turn = zoo.FAMILIES.index(family) % 2
    return (
        STRATEGIES
        if FULL
        else tuple(s for i, s in enumerate(STRATEGIES) if i % 2 == turn or (s == "halo" and family in WINDOWED))
    )


def run_all(mesh: DeviceMesh, family: str, length: int, strategies: Sequence[str]) -> dict[str, tuple[float, Any]]:
    """By strategy: the largest relative error of loss, gradients and buffers on this rank, and the plan."""
    build = ModelSpec(family, length)
    module, inputs = build(0)
    reference = check._shared_reference(build, 1, mesh)
    lowered, found = Lowered(module, mesh, strategies), {}
    for strategy in strategies:
        lowered.strategy = strategy
        module.zero_grad()
        torch.manual_seed(0)
        with Float64() if reference.casts else contextlib.nullcontext():
            loss = loss_of(call(lowered, inputs))
        loss.backward()
        found[strategy] = max(check._errors(module, loss, reference, 0, 1).values()), lowered.plan
    return found


@pytest.mark.parametrize(("family", "ranks", "length"), every_strategy())
def test_families_are_exact_under_every_strategy(pool: Pool, family: str, ranks: int, length: int) -> None:
    everyone = pool.run(run_all, family, length, strategies_for(family), on=ranks, timeout=280)
    tolerance = check.GRAD_TOLERANCE[zoo.default_dtype(family)]
    assert {s: e for rank in everyone for s, (e, _) in rank.items() if not e <= tolerance} == {}
    for strategy, (_, plan) in everyone[0].items():
        taken = {site.strategy for site in plan.sites}
        if strategy == "halo":
            assert "halo" in taken or family not in WINDOWED, (family, plan)
        else:
            assert strategy in taken and all(site.strategy == strategy or site.note for site in plan.sites), (family, plan)
        if family in EXPERTS:
            assert plan.fallbacks == (), "expert dispatch is token-local: nothing is gathered for it"


def compiled() -> list[tuple[str, int, int, str, str]]:
    """(family, ranks, length, strategy, memory). Every third family once on 2 ranks, strategies and what is kept in turn, and
    llama on one."""
    turns = ("ring", "all-to-all", "balanced-ring", "gather-kv", "ring-a2a")
    kept = ("attention", "full", "none", "offload-attention", "qkv")
    if FULL:
        return [(f, r, s, k, m) for f in zoo.FAMILIES for r in (2, 3) for s in LENGTHS for k in STRATEGIES[:5] for m in kept]
    few = [("llama", 1, 101, "ring", "attention")]
    return few + [(f, 2, LENGTHS[i % 2], turns[i % len(turns)], kept[i % len(kept)]) for i, f in enumerate(zoo.FAMILIES[::3])]


def run(mesh: DeviceMesh, family: str, length: int, strategy: str | None, memory: str = "none") -> Report:
    return check_on_rank(ModelSpec(family, length), mesh, strategy=strategy, memory=memory)


@pytest.mark.parametrize(("family", "ranks", "length", "strategy", "memory"), compiled())
def test_family_is_exact(pool: Pool, family: str, ranks: int, length: int, strategy: str, memory: str) -> None:
    """The whole way, through PyTorch's partitioner."""
    report = pool.run(run, family, length, strategy, memory, on=ranks, timeout=280)[0]
    assert report.verdict == "exact", report
    assert report.sites and ranks == report.ranks


@pytest.mark.parametrize(("family", "strategy"), [("llama", "all-to-all"), ("t5", "ring")])
def test_family_is_exact_with_data_parallel_groups(pool: Pool, family: str, strategy: str) -> None:
    report = pool.run(run, family, 101, strategy, on="2x2", timeout=280)[0]
    assert report.verdict == "exact" and report.mesh == "dp=2,sp=2", report


def router_logits(mesh: DeviceMesh, called_before: bool) -> int:
    model, inputs = zoo.build("mixtral", 33)
    if called_before:
        model(**inputs)
    return len(autosp.parallelize(model, mesh, compiler="aot_eager")(**inputs).router_logits)


@pytest.mark.parametrize("called_before", [False, True])
def test_outputs_of_layers_are_recorded_once(pool: Pool, called_before: bool) -> None:
    """transformers installs its recording hooks at a model's first call, autosp before capture: not both."""
    assert pool.run(router_logits, called_before, on=1) == [zoo.LAYERS]


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_building_twice_gives_the_same_bits_and_every_parameter_a_gradient(family: str) -> None:
    (model, inputs), (again, inputs_again) = zoo.build(family, 33), zoo.build(family, 33)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert all(torch.equal(x, inputs_again[name]) for name, x in inputs.items())
    other = zoo.build(family, 33, input_seed=1)[1]
    assert any(not torch.equal(x, other[name]) for name, x in inputs.items())
    loss = model(**inputs).loss
    loss.backward()
    for name, p in model.named_parameters():
        assert p.dtype == zoo.default_dtype(family) and p.grad is not None and p.grad.norm() > 0, name
    assert torch.equal(again(**inputs).loss, loss), "no dropout is left"


def config_of(family: str) -> Any:
    return zoo.build(family, 33)[0].config


def test_structure_is_kept() -> None:
    assert config_of("llama").num_key_value_heads < config_of("llama").num_attention_heads
    for family in ("mistral", "phi3", "qwen3", "gemma2", "gemma3_text", "gpt_oss"):
        assert config_of(family).sliding_window == zoo.WINDOW, family
    for family in ("qwen3", "gemma2", "gemma3_text", "gpt_oss"):
        assert set(config_of(family).layer_types) == {"sliding_attention", "full_attention"}, family
    assert config_of("gemma2").attn_logit_softcapping and config_of("gemma2")._attn_implementation == "eager"
    for family in ("mixtral", "qwen3_moe", "gpt_oss"):
        assert config_of(family).output_router_logits, family
    deepseek = config_of("deepseek_v3")
    assert deepseek.qk_nope_head_dim + deepseek.qk_rope_head_dim != deepseek.v_head_dim
    assert deepseek.first_k_dense_replace == 1 and deepseek.num_hidden_layers == 2


def test_inputs_are_uneven() -> None:
    labels = zoo.build("llama", 96)[1]["labels"]
    ignored = (labels == -100).view(2, 4, 24).sum(-1)
    assert len(set(ignored.flatten().tolist())) > 2
    t5 = zoo.build("t5", 96)[1]
    assert t5["labels"].shape[1] != t5["input_ids"].shape[1]
    vit, pixels = zoo.build("vit", 101)
    assert vit.vit.embeddings(pixels["pixel_values"]).shape[1] == 101


@pytest.mark.parametrize("name", ["no_such_family", "clip"])
def test_an_unknown_type_says_what_to_give(name: str) -> None:
    with pytest.raises(zoo.UnknownModelType, match=r"Give a transformers model type \(llama, .*file\.py:factory"):
        zoo.build(name)
