"""The tiny models keep what makes their family, give the same bits again, and every family runs exactly in parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FULL
from torch.distributed.device_mesh import DeviceMesh

import autosp
from autosp import zoo
from autosp.check import Report, check_on_rank
from autosp.model_spec import ModelSpec
from pool import Pool

STRATEGIES = ("all-to-all", "gather-kv")
LENGTHS = (96, 101)
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def cases() -> list[tuple[str, int, int, str]]:
    """Every family with every rank count, length and strategy; without `FULL` a subset that has each pair of them.

    The subset: each family on 2 and 4 ranks or on 3 and 4 in turn, once with either strategy and either length; and
    each family once on one rank in the full matrix only, except llama.
    """
    if FULL:
        return [(f, r, s, k) for f in zoo.FAMILIES for r in (1, 2, 3, 4) for s in LENGTHS for k in STRATEGIES]
    few = [("llama", 1, 101, "all-to-all")]
    for i, family in enumerate(zoo.FAMILIES):
        first, second = STRATEGIES if i % 2 else STRATEGIES[::-1]
        few += [(family, 3 if i % 4 < 2 else 2, 101, first), (family, 4, LENGTHS[(i // 2) % 2], second)]
    return few


def check(mesh: DeviceMesh, family: str, length: int, strategy: str) -> Report:
    return check_on_rank(ModelSpec(family, length), mesh, strategy=strategy)


@pytest.mark.parametrize(("family", "ranks", "length", "strategy"), cases())
def test_family_is_exact(pool: Pool, family: str, ranks: int, length: int, strategy: str) -> None:
    report = pool.run(check, family, length, strategy, on=ranks, timeout=280)[0]
    assert report.verdict == "exact", report
    assert report.sites and ranks == report.ranks
    if family in EXPERTS:
        assert report.fallbacks == (), "expert dispatch is token-local: nothing is gathered for it"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "t5"])
def test_family_is_exact_with_data_parallel_groups(pool: Pool, family: str) -> None:
    report = pool.run(check, family, 101, "all-to-all", on="2x2", timeout=280)[0]
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
