"""Bytes on the wire are those of the textbook formulas, to the byte."""

from __future__ import annotations

import pytest
import torch
from lowered import trace
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from autosp.cost_model.volumes import COSTS, Attention

RANKS, SEQ, BATCH, HEAD_DIM = 4, 8192, 1, 16


class OneAttention(nn.Module):
    """q, k, v projections, one causal attention, a mean: nothing else that communicates."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 32)
        self.heads, self.kv_heads = heads, kv_heads
        self.q = nn.Linear(32, heads * HEAD_DIM, bias=False)
        self.k = nn.Linear(32, kv_heads * HEAD_DIM, bias=False)
        self.v = nn.Linear(32, kv_heads * HEAD_DIM, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads).square().mean()


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_all_to_all_sends_the_formula(heads: int, kv_heads: int, rank: int) -> None:
    """(P-1)/P (2 U_q + 2 r U_k) forward and backward, r = max(1, P / H_kv)."""
    traced = trace(
        OneAttention(heads, kv_heads), {"ids": torch.zeros(BATCH, SEQ, dtype=torch.long)}, RANKS, rank, strategy="all-to-all"
    )
    u_q, u_k = (BATCH * SEQ // RANKS * h * HEAD_DIM * 4 for h in (heads, kv_heads))
    r = max(1, RANKS // kv_heads)
    expected = (RANKS - 1) * (2 * u_q + 2 * r * u_k) // RANKS
    assert traced.sent(0, RANKS, rank)["all-to-all"] == traced.sent(1, RANKS, rank)["all-to-all"] == expected
    site = traced.compiled.plan.sites[0]
    assert (site.bytes_forward, site.bytes_backward) == (expected, expected)
    assert "all-gather" not in traced.sent(0, RANKS, rank) + traced.sent(1, RANKS, rank)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 1)])
def test_gather_kv_sends_the_formula(heads: int, kv_heads: int) -> None:
    """2(P-1) U_k forward; gathered again and reduce-scattered backward: 4(P-1) U_k."""
    traced = trace(OneAttention(heads, kv_heads), {"ids": torch.zeros(BATCH, SEQ, dtype=torch.long)}, RANKS, strategy="gather-kv")
    u_k = BATCH * SEQ // RANKS * kv_heads * HEAD_DIM * 4
    forward, backward = traced.sent(0, RANKS, 0), traced.sent(1, RANKS, 0)
    assert forward["all-gather"] == 2 * (RANKS - 1) * u_k
    assert backward["all-gather"] + backward["reduce-scatter"] == 4 * (RANKS - 1) * u_k
    site = traced.compiled.plan.sites[0]
    assert (site.bytes_forward, site.bytes_backward) == (2 * (RANKS - 1) * u_k, 4 * (RANKS - 1) * u_k)


@pytest.mark.parametrize("strategy", sorted(COSTS))
def test_the_plan_of_a_whole_model_counts_what_its_graphs_send(strategy: str) -> None:
    traced = trace(*_llama(SEQ, layers=2), RANKS, strategy=strategy)
    forward, backward = traced.sent(0, RANKS, 0), traced.sent(1, RANKS, 0)
    plan = traced.compiled.plan
    assert sum(c.bytes_forward for c in plan.collectives) == sum(forward.values())
    assert sum(c.bytes_backward for c in plan.collectives) == sum(backward.values())
    parameters = sum(p.nbytes for p in _llama(8, layers=2)[0].parameters())
    assert backward["all-reduce"] == 2 * (RANKS - 1) * parameters // RANKS


def test_uneven_sizes_are_counted_as_they_are_sent() -> None:
    """Three heads, one key/value head, 101 positions on 4 ranks: the mean over ranks of what each sends."""
    model, inputs = OneAttention(3, 1), {"ids": torch.zeros(2, 101, dtype=torch.long)}
    traced = [trace(model, inputs, RANKS, rank, strategy="all-to-all") for rank in range(RANKS)]
    sent = sum(t.sent(0, RANKS, rank)["all-to-all"] for rank, t in enumerate(traced))
    assert round(sent / RANKS) == traced[0].compiled.plan.sites[0].bytes_forward
    assert traced[0].compiled.plan == traced[3].compiled.plan


def test_formulas_when_everything_divides() -> None:
    sizes = Attention(2, 16, 4, 64, 64, 8, 8, 2, 8)
    u_q, u_k = 2 * 8 * 16 * 8 * 2, 2 * 8 * 4 * 8 * 2
    assert COSTS["all-to-all"](sizes)[0] == 7 * (2 * u_q + 2 * 2 * u_k) // 8
    assert COSTS["gather-kv"](sizes) == (2 * 7 * u_k, 4 * 7 * u_k)


def _llama(seq_len: int, layers: int = 1, **changes: object) -> tuple[nn.Module, dict[str, Tensor]]:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False, max_position_embeddings=seq_len, **changes,
    )  # fmt: skip
    ids = torch.zeros(1, seq_len, dtype=torch.long)
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}
