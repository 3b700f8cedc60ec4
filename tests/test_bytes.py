"""Bytes on the wire are those of the textbook formulas, to the byte."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import FULL
from direct import PLANNER, only
from lowered import trace
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from autosp import zoo
from autosp.cost_model import prices
from autosp.cost_model.plan import Plan
from autosp.cost_model.prices import COSTS
from autosp.cost_model.volumes import Attention

RANKS, SEQ, BATCH, HEAD_DIM, WIDE = 4, 8192, 1, 16, 320


class OneAttention(nn.Module):
    """q, k, v projections, one attention, a mean: nothing else that communicates. mask: "causal", "none" or a window's width.

    What keys and values are projected from is wider than they are, so that it does not travel in their place.
    """

    def __init__(self, heads: int, kv_heads: int, mask: str | int = "causal") -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDE)
        self.heads, self.kv_heads, self.mask = heads, kv_heads, mask
        self.q = nn.Linear(WIDE, heads * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDE, kv_heads * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDE, kv_heads * HEAD_DIM, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, seen = self.embed(ids), None
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if isinstance(self.mask, int):
            position = torch.arange(ids.shape[1])
            offset = position[None, :] - position[:, None]
            seen = (offset <= 0) & (offset > -self.mask)
        grouped = self.heads != self.kv_heads
        return scaled_dot_product_attention(q, k, v, seen, is_causal=self.mask == "causal", enable_gqa=grouped).square().mean()


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


WINDOW = 50
HEADS = ((8, 8), (8, 2), (8, 1))
MASKS: tuple[str | int, ...] = ("none", "causal", WINDOW)


def sizes() -> list[tuple[int, str | int, tuple[int, int]]]:
    """(ranks, mask, heads); without `FULL` each pair of two of them once."""
    ranks = (2, 4, 8)
    if FULL:
        return list(itertools.product(ranks, MASKS, HEADS))
    return [(p, m, HEADS[(i + j) % 3]) for i, p in enumerate(ranks) for j, m in enumerate(MASKS)]


def one_site(strategy: str, ranks: int, mask: str | int, heads: tuple[int, int]) -> Plan:
    ids = torch.zeros(BATCH, 768, dtype=torch.long)
    decide = only(inner=attention(strategy, ranks, mask, heads).inner) if strategy == "ring-a2a" else PLANNER
    module = OneAttention(*heads, mask)
    return trace(module, {"ids": ids}, ranks, ranks - 1, backward=False, decide=decide, strategy=strategy).compiled.plan


@pytest.mark.parametrize("strategy", sorted(COSTS))
def test_a_site_is_priced_at_what_its_collectives_send(strategy: str) -> None:
    """Sizes that divide. What rings move under a window, to level the work, is a linear program's answer and no formula."""
    more = [(6, m, (6, h)) for m, h in zip(MASKS, (6, 2, 1), strict=True)] if strategy == "ring-a2a" else []
    for ranks, mask, heads in [*sizes(), *more]:
        if strategy == "halo" and mask != WINDOW:
            continue
        plan = one_site(strategy, ranks, mask, heads)
        (site,), own = plan.sites, [c for c in plan.collectives if c.op not in ("sync", "psum")]
        sent = sum(c.bytes_forward for c in own), sum(c.bytes_backward for c in own)
        priced = site.bytes_forward, site.bytes_backward
        of = replace(attention(strategy, ranks, mask, heads), inner=site.params.get("inner", 1))
        assert site.strategy == strategy and priced == prices.sent(strategy, of), site
        if mask != WINDOW or strategy not in ("ring", "balanced-ring", "ring-a2a"):
            assert priced == sent, (ranks, mask, heads, own)


def attention(strategy: str, ranks: int, mask: str | int, heads: tuple[int, int]) -> Attention:
    before, after = {"none": (None, None), "causal": (768, 0)}.get(str(mask), (WINDOW - 1, 0))
    even = [u for u in range(2, ranks) if ranks % u == 0 and heads[1] % u == 0]
    inner = (max(even) if even else 2) if strategy == "ring-a2a" else 1
    return Attention(BATCH, *heads, 768, 768, HEAD_DIM, HEAD_DIM, 4, ranks, before, after, inner)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("heads", HEADS)
def test_formulas_of_rings(ranks: int, heads: tuple[int, int]) -> None:
    """The anchors' formulas; what they leave out is the block half way, split in two, and its statistics."""
    u_q, u_k = (BATCH * 768 // ranks * h * HEAD_DIM * 4 for h in heads)
    stats = BATCH * 768 // ranks * heads[0] * 4
    sized = {m: attention("ring", ranks, m, heads) for m in MASKS}
    assert prices.sent("ring", sized["none"]) == (2 * (ranks - 1) * u_k, 4 * (ranks - 1) * u_k)
    assert prices.sent("ring", sized["causal"]) == (3 * (ranks - 1) * u_k // 2, 3 * (ranks - 1) * u_k)
    shares, moved = (3 * ranks - 2) / 4, ranks / 8  # of 2 U_k each way, and of a shard's rows
    forward = shares * u_k + moved * (2 * u_q + stats)
    backward = 2 * shares * u_k + moved * (3 * u_q + 2 * stats)
    assert prices.sent("balanced-ring", sized["causal"]) == (forward, backward)
    reached = sum(min(WINDOW - 1, r * 768 // ranks) for r in range(ranks)) / ranks
    kv = 2 * heads[1] * HEAD_DIM * 4
    assert prices.sent("halo", sized[WINDOW]) == (round(reached * kv), round(2 * reached * kv))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_results_travel_in_the_accumulators_type(dtype: torch.dtype) -> None:
    """dK and dV come back in float32 whatever the inputs are: summed in bfloat16 their error would grow with the ranks."""
    ids = torch.zeros(BATCH, 512, dtype=torch.long)
    for strategy in ("ring", "balanced-ring", "ring-a2a"):
        plan = trace(OneAttention(8, 2).to(dtype), {"ids": ids}, RANKS, strategy=strategy).compiled.plan
        own = [c for c in plan.collectives if c.op not in ("sync", "psum")]
        (site,) = plan.sites
        assert site.bytes_forward == sum(c.bytes_forward for c in own)
        assert site.bytes_backward == sum(c.bytes_backward for c in own)
        if strategy == "ring":
            assert site.bytes_backward == site.bytes_forward * (1 + 4 // dtype.itemsize)


def test_uneven_sizes_are_counted_as_they_are_sent() -> None:
    """Three heads, one key/value head, 101 positions on 4 ranks: the mean over ranks of what each sends."""
    model, inputs = OneAttention(3, 1), {"ids": torch.zeros(2, 101, dtype=torch.long)}
    traced = [trace(model, inputs, RANKS, rank, strategy="all-to-all") for rank in range(RANKS)]
    posted = sum(t.sent(0, RANKS, rank)["all-to-all"] for rank, t in enumerate(traced))
    assert round(posted / RANKS) == traced[0].compiled.plan.sites[0].bytes_forward
    assert traced[0].compiled.plan == traced[3].compiled.plan


def test_formulas_when_everything_divides() -> None:
    sizes = Attention(2, 16, 4, 64, 64, 8, 8, 2, 8)
    u_q, u_k = 2 * 8 * 16 * 8 * 2, 2 * 8 * 4 * 8 * 2
    assert prices.sent("all-to-all", sizes)[0] == 7 * (2 * u_q + 2 * 2 * u_k) // 8
    assert prices.sent("gather-kv", sizes) == (2 * 7 * u_k, 4 * 7 * u_k)


def _llama(seq_len: int, layers: int = 1, **changes: object) -> tuple[nn.Module, dict[str, Tensor]]:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False, max_position_embeddings=seq_len, **changes,
    )  # fmt: skip
    ids = torch.zeros(1, seq_len, dtype=torch.long)
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_under_a_ring_no_rank_holds_anything_of_the_whole_sequence(family: str) -> None:
    """DeepSeek's keys are written into an empty tensor, which each rank makes as long as its own part or the block at hand."""
    module, inputs = zoo.build(family, 101)
    found = trace(module, inputs, 4, strategy="ring", backward=False)
    values = [n.meta["val"] for n in found.compiled.module.graph.nodes if n.op == "call_function"]
    long = [x.shape for x in values if isinstance(x, torch.Tensor) and 101 in x.shape]
    assert all(x.numel() <= 2 * 101 for x in long), "positions and documents of two batch rows at most"
