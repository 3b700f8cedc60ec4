"""Tiny transformers models, built so that a family's structure survives.

`build("qwen3_moe", seq_len=96)` gives a two-layer model of that family with random weights, and inputs whose
loss can be differentiated. What makes the family what it is stays: grouped key/value heads, sliding windows,
alternating layer types, experts and their auxiliary loss, low-rank attention, soft-capping, sinks. Every
dropout probability is 0, so that two runs can be compared.

Needs transformers (`pip install autosp[hf]`).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autosp.kernels.errors import AutospError

VOCAB = 97
WINDOW = 32
LAYERS = 2
FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "olmo2",
    "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "bert", "vit", "t5",
)  # fmt: skip
# With recurrences or short convolutions, most of them between layers of attention.
LINEAR_FAMILIES = (
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "minimax", "mamba2", "bamba", "nemotron_h", "granitemoehybrid",
    "falcon_h1", "zamba2", "mamba", "falcon_mamba", "jamba", "lfm2", "recurrent_gemma", "rwkv", "xlstm",
)  # fmt: skip

Inputs = dict[str, torch.Tensor]

# Applied to any family whose configuration has the name (a name or one of the family's own aliases for it).
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "d_kv": 12,
    "d_ff": 80,
    "ffn_dim": 80,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "num_decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "query_pre_attn_scalar": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 16,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}

# What the rules above would lose or get wrong in one family.
FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": None},
    "gemma2": {"attn_implementation": "eager"},  # sdpa drops the soft-capping of the attention logits
    "gemma3_text": {"_sliding_window_pattern": 2},
    "phi3": {"sliding_window": WINDOW},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "head_dim": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "attn_implementation": "eager",  # attention sinks exist only in the eager spelling
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 6, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "bamba": {"attn_layer_indices": [1]},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": None,
        "n_routed_experts": 0,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "rescale_prenorm_residual": False,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 32,
        "num_local_experts": 0,
        "output_router_logits": False,
    },
    "falcon_h1": {"mamba_d_ssm": 96},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 6, "chunk_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "minimax": {"block_size": 16},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {"hidden_size": 24},
    "xlstm": {"num_heads": 4, "chunk_size": 16, "ffn_round_up_to_multiple_of": 16},
    "vit": {"pooler_output_size": 48},
    "t5": {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8},
}


def default_dtype(model_type: str) -> torch.dtype:
    """float64, or float32 for a family with experts: transformers' grouped matmul has no float64."""
    config = tiny_config(model_type, seq_len=1)
    experts = any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    return torch.float32 if experts else torch.float64


def build(
    model_type: str,
    seq_len: int = 96,
    batch: int = 2,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    input_seed: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """A tiny model in train mode and one batch for it.

    The weights depend on `seed` only, the batch on `input_seed` (`seed` where it is None): same seeds, same bits.
    `dtype` None is `default_dtype(model_type)`. `inputs` holds the labels, so the output has a `loss`.

    Raises `UnknownModelType` if transformers has no such type, or no head for it that gives a loss.
    """
    config = tiny_config(model_type, seq_len)
    make_inputs = _INPUTS.get(model_type, _seq2seq if config.is_encoder_decoder else _causal)
    model_class = _auto_class(model_type, config)
    devices: list[int] = []
    with torch.random.fork_rng(devices), readable():
        torch.manual_seed(seed)
        model = model_class.from_config(config)
        _randomise_constants(model)
    generator = torch.Generator().manual_seed(1 + (seed if input_seed is None else input_seed))
    dtype = dtype or default_dtype(model_type)
    inputs = {
        name: x.to(dtype) if x.is_floating_point() else x for name, x in make_inputs(config, seq_len, batch, generator).items()
    }
    return model.to(dtype).train(), inputs


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Without a GPU, transformers does not find the libraries whose functions need one, and takes its own instead.

    It chooses when it first imports a family's module.
    """
    hidden = [] if torch.cuda.is_available() else ["fla", "mamba_ssm", "causal_conv1d"]
    found = {name: sys.modules.pop(name) for name in hidden if name in sys.modules}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is how an import is told to fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(found)


def tiny_config(model_type: str, seq_len: int) -> Any:
    """The family's configuration at a tiny size, long enough for `seq_len` tokens."""
    config_class = _config_class(model_type)
    aliases = dict(config_class.attribute_map)
    known = _field_names(config_class)
    family = FAMILY.get(model_type, {})
    settled = {aliases.get(name, name) for name in family}
    generic = {**TINY, **_lengths(model_type, seq_len)}
    overrides = {name: value for name, value in generic.items() if name in known and aliases.get(name, name) not in settled}
    default = config_class()
    if getattr(default, "sliding_window", None):
        overrides["sliding_window"] = WINDOW
    types = [name for name in ("layer_types", "mlp_layer_types") if name in known and getattr(default, name, None)]
    overrides |= {name: _two_kinds(getattr(default, name)) for name in types}
    overrides |= {name: 0.0 for name in known if _is_dropout(name) and getattr(default, name, None)}
    if "output_router_logits" in known:
        overrides["output_router_logits"] = True
    overrides |= family
    config = config_class(**{name: value for name, value in overrides.items() if value is not None or name == "layer_types"})
    if model_type in ("bert", "vit"):
        config.num_labels = 5
    return config


def _lengths(model_type: str, seq_len: int) -> dict[str, Any]:
    """Position tables that fit `seq_len`; for images the size and patch that give about `seq_len` tokens."""
    if model_type == "vit":
        rows = max(1, int((seq_len - 1) ** 0.5))
        return {"patch_size": 4, "image_size": (4 * rows, 4 * max(1, (seq_len - 1) // rows))}
    return {"max_position_embeddings": max(128, seq_len), "n_positions": max(128, seq_len)}


def _two_kinds(layer_types: list[str]) -> list[str]:
    """`LAYERS` entries that show the family's first two different layer types, or its only one."""
    kinds = list(dict.fromkeys(layer_types))[:LAYERS]
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


def _is_dropout(name: str) -> bool:
    return ("dropout" in name or name.endswith("pdrop")) and not name.startswith("_")


def _randomise_constants(model: nn.Module) -> None:
    """Move zeros (biases) and ones (norm weights) off their initial value, so that a lost gradient or term shows."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
                p.add_(0.1 * torch.randn_like(p))
        for name, p in model.named_parameters():
            if name.endswith("A_log"):  # decays that leave something of a state after a hundred tokens
                p.uniform_(0.02, 0.2).log_()


def _causal(config: Any, seq_len: int, batch: int, generator: torch.Generator) -> Inputs:
    """`input_ids`, `labels`: [batch, seq]; a fifth of the first half's labels and one run near the end are ignored."""
    ids = _tokens(seq_len, batch, generator)
    return {"input_ids": ids, "labels": _ignore_unevenly(ids, generator)}


def _seq2seq(config: Any, seq_len: int, batch: int, generator: torch.Generator) -> Inputs:
    """Encoder length `seq_len`, with padding; the decoder is about two thirds as long and never equal to it."""
    ids = _tokens(seq_len, batch, generator)
    target = _tokens(max(1, 2 * seq_len // 3 + 1), batch, generator)
    return {"input_ids": ids, "attention_mask": _padding(ids), "labels": _ignore_unevenly(target, generator)}


def _bert(config: Any, seq_len: int, batch: int, generator: torch.Generator) -> Inputs:
    """Padded `input_ids`: [batch, seq]; `labels`: [batch], one class per sequence."""
    ids = _tokens(seq_len, batch, generator)
    segments = (torch.arange(seq_len) >= seq_len // 3).long().expand(batch, -1).contiguous()
    labels = torch.randint(0, config.num_labels, (batch,), generator=generator)
    return {"input_ids": ids, "attention_mask": _padding(ids), "token_type_ids": segments, "labels": labels}


def _vit(config: Any, seq_len: int, batch: int, generator: torch.Generator) -> Inputs:
    """`pixel_values`: [batch, 3, height, width]; `labels`: [batch]. The tokens are born in the model's convolution."""
    height, width = config.image_size
    labels = torch.randint(0, config.num_labels, (batch,), generator=generator)
    return {"pixel_values": torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64), "labels": labels}


_INPUTS: dict[str, Callable[[Any, int, int, torch.Generator], Inputs]] = {"bert": _bert, "vit": _vit}


def _tokens(seq_len: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Ids without the special ones: some models look for the padding or end token by value."""
    return torch.randint(3, VOCAB, (batch, seq_len), generator=generator)


def _ignore_unevenly(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`ids` as labels with -100 in places that differ between sequence shards and batch rows."""
    batch, length = ids.shape
    labels = ids.clone()
    half = length // 2
    labels[:, :half][torch.rand(batch, half, generator=generator) < 0.2] = -100
    labels[0, 3 * length // 4 : 3 * length // 4 + max(1, length // 8)] = -100
    return labels


def _padding(ids: torch.Tensor) -> torch.Tensor:
    """A 0/1 mask whose rows end at different places: row b drops its last 3b + 2 tokens (never all of them)."""
    batch, length = ids.shape
    kept = torch.tensor([max(1, length - 2 - 3 * (b % 4)) for b in range(batch)])
    return (torch.arange(length) < kept[:, None]).long()


def _field_names(config_class: Any) -> set[str]:
    """Names a configuration class takes, those of the attribute map included."""
    names = {name for cls in config_class.__mro__ for name in getattr(cls, "__annotations__", {})}
    names |= set(inspect.signature(config_class.__init__).parameters)
    return names | {alias for alias, name in config_class.attribute_map.items() if name in names}


def _config_class(model_type: str) -> Any:
    transformers = library()
    try:
        return transformers.CONFIG_MAPPING[model_type]
    except KeyError:
        raise UnknownModelType(model_type, "transformers has no such model type") from None


def _auto_class(model_type: str, config: Any) -> Any:
    """The head that gives a loss: classification for bert and vit, else seq2seq or causal language model."""
    transformers = library()
    name = {"bert": "AutoModelForSequenceClassification", "vit": "AutoModelForImageClassification"}.get(model_type)
    name = name or ("AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM")
    auto = getattr(transformers, name)
    if type(config) not in auto._model_mapping:
        raise UnknownModelType(model_type, f"transformers has no {name} for it")
    return auto


def library() -> Any:
    try:
        import transformers
    except ImportError:
        raise UnknownModelType("a model type", "transformers is not installed: pip install 'autosp[hf]'") from None
    return transformers


class UnknownModelType(AutospError):
    """No tiny model can be built from the name given."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"cannot build {name!r}: {reason}. Give a transformers model type ({', '.join(FAMILIES)}, or another causal language "
            f"model), or a factory that returns (module, inputs): file.py:factory or package.module:factory"
        )
