"""Models of real size through the compiler without weights: what is captured, what it costs, what is refused."""

from __future__ import annotations

import json
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosp.dry_run import dry_run
from autosp.errors import CaptureError, SequenceError
from autosp.model_spec import BadModel, RealSpec
from autosp.passes.pipeline import Compiled, Settings
from autosp.planning import Planning

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
FACTORIES = Path(__file__).parent / "factories.py"
MILLION = 1 << 20


def directory(path: Path, source: str = "llama-3-8b", **changed: Any) -> str:
    """A configuration with two layers, and what else is changed."""
    config = json.loads((CONFIGS / source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, **changed}))
    return str(path)


def compiled(name: str, seq_len: int = MILLION, ranks: int = 64, dtype: str = "bfloat16", **options: Any) -> Compiled:
    return dry_run(RealSpec(name, seq_len, dtype=dtype), ranks, Settings(compiler="aot_eager", **options), Planning("h100"))


def strategies(found: Compiled) -> Counter[tuple[str, str]]:
    return Counter((site.kind, site.strategy) for site in found.plan.sites)


def parameters(found: Compiled) -> list[torch.Tensor]:
    nodes = [n for n in found.captured.module.graph.nodes if n.op == "placeholder"]
    return [n.meta["val"] for n, item in zip(nodes, found.captured.inputs, strict=True) if item.kind == "parameter"]


def test_a_directory_of_real_width_is_captured_at_a_million_tokens(tmp_path: Path) -> None:
    """Two layers of Llama 3 8B with their embedding and head are 1.5 billion parameters; none of them has memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = compiled(directory(tmp_path))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert grown < 0.5
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert sum(p.numel() for p in parameters(found)) == 2 * layer + 2 * 128256 * 4096 + 4096
    assert {p.dtype for p in parameters(found)} == {torch.bfloat16}
    assert found.plan.ranks == 64 and found.plan.sequence == (MILLION,)
    assert not found.plan.fallbacks
    assert [site.name for site in found.plan.sites] == [f"model.layers.{i}.self_attn" for i in range(2)]
    outputs = [n.meta["val"] for n in found.module.graph.output_node().args[0]]
    assert outputs[0].shape == () and outputs[1].shape == (1, MILLION // 64, 128256)


@pytest.mark.parametrize(("strategy", "ranks"), [("ring", 64), ("balanced-ring", 64), ("ring-a2a", 8), ("all-to-all", 128)])
def test_every_strategy_that_is_asked_for_compiles_at_that_length(tmp_path: Path, strategy: str, ranks: int) -> None:
    found = compiled(directory(tmp_path), ranks=ranks, strategy=strategy)
    assert strategies(found) == {("softmax attention", strategy): 2}
    assert found.plan.layout == ("head-tail" if strategy in ("ring", "ring-a2a") else "contiguous")


def test_a_hybrid_keeps_its_recurrences_whole(tmp_path: Path) -> None:
    """Chunk by chunk, a million tokens of one gated delta rule would be 16,384 steps of the graph."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next", "num_hidden_layers": 4}))
    found = compiled(str(tmp_path))
    kinds = Counter(site.kind for site in found.plan.sites)
    assert kinds == {"linear attention": 3, "softmax attention": 1}
    assert not found.plan.fallbacks and len(found.module.graph.nodes) < 1000


def test_a_model_type_has_the_size_of_its_configuration_class() -> None:
    spec = RealSpec("nemotron_h", seq_len=4096, batch=3)
    module, inputs = spec()
    assert module.training and isinstance(inputs, dict)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == dict.fromkeys(("input_ids", "labels"), (3, 4096))
    assert sum(p.numel() for p in module.parameters()) > 1e9


def test_a_factory_gives_its_own_shapes() -> None:
    """An attention of three heads, 10 positions; its inputs are a tuple or a dict."""
    for name in ("attention", "positional"):
        found = compiled(f"{FACTORIES}:{name}", ranks=4)
        assert found.plan.sequence == ((10,) if name == "attention" else (11,))
        assert len(found.plan.sites) == 1 and {p.dtype for p in parameters(found)} == {torch.bfloat16}
    assert {p.dtype for p in parameters(compiled(f"{FACTORIES}:attention", ranks=4, dtype="float32"))} == {torch.float32}


class Odd(nn.Module):
    """Shares a weight, holds a tensor that is no buffer and makes tensors as it runs."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.table = rate, torch.arange(8, dtype=torch.bfloat16)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.second(self.first(x)) + self.table) * torch.arange(8) * self.rate).sum()


def odd() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Odd(0.1), (torch.randn(1, 32, 8),)


def reads() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Odd(float(torch.linspace(0, 0.1, 2)[1])), (torch.randn(1, 32, 8),)


@pytest.mark.parametrize(("name", "kind"), [("odd", "FakeTensor"), ("reads", "Tensor")])
def test_a_factory_that_reads_values_is_built_with_them_and_any_other_without(name: str, kind: str) -> None:
    spec = RealSpec(f"{__name__}:{name}")
    module, _ = spec()
    assert {type(p.data).__name__ for p in module.parameters()} == {kind}
    found = dry_run(spec, 2, Settings(compiler="aot_eager"), Planning("h100"))
    assert len(parameters(found)) == 3  # the shared weight once
    assert found.plan.outputs == ("scalar Replicate",)


def test_what_parallelize_refuses_is_refused() -> None:
    with pytest.raises(CaptureError, match="does not trace into one graph"):
        compiled(f"{FACTORIES}:breaking", ranks=2)
    with pytest.raises(SequenceError, match="3 positions, fewer than the 4 ranks"):
        compiled(f"{FACTORIES}:short", ranks=4)


def test_a_rotary_model_runs_beyond_its_maximum_and_one_that_recomputes_frequencies_is_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 500000.0, "original_max_position_embeddings": 4096}
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "intermediate_size": 64}
    assert compiled(directory(tmp_path, **small, rope_parameters=yarn), 32768, 8).plan.sequence == (32768,)
    dynamic = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 500000.0}
    with pytest.raises(CaptureError, match=r"modeling_rope_utils|Data-dependent"):
        compiled(directory(tmp_path, **small, rope_parameters=dynamic), 32768, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama", "no directory and no model type of transformers .*; did you mean .*llama.*\nfix: a model type such as llama"),
        ("no/such/place", "'no/such/place' is no directory and no model type"),
        (str(CONFIGS), r"has no config.json; fix: name the directory"),
        ("vit", "vit is no causal language model; name a factory"),
        (
            "gpt2",
            r"gpt2 has a table of 1024 positions \(transformer.wpe\), fewer than the 1048576 .*; fix: .*max_position",
        ),
        (f"{FACTORIES}:not_a_pair", r"must return \(module, inputs\), it returned Attention"),
    ],
)
def test_a_wrong_name_is_an_error_that_says_what_is_wrong(name: str, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        RealSpec(name, MILLION)()


def test_a_wrong_configuration_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(BadModel, match=r"config.json is no configuration that transformers reads: .*lama"):
        RealSpec(str(tmp_path))()
    with pytest.raises(BadModel, match="dtype 'int8' is not one of float64, float32, bfloat16, float16"):
        RealSpec("llama", dtype="int8")()
