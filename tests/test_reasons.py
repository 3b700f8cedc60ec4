"""A strategy that cannot be taken says why, in the plan: every reason there is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from direct import Lowered
from lowered import trace
from models import MODELS
from models_common import HIDDEN, VOCAB, Attention, Backbone, LanguageModel, relative
from test_bytes import OneAttention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step

from autosp.cost_model.plan import Plan, Site
from pool import Pool

Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(relative(q) > 0, float("-inf"))


def cut_in_front(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The sink stands before the scores."""
    sink = q.new_zeros(q.shape[0], q.shape[1], q.shape[2], 1)
    return torch.cat([sink, scores(q, k)], -1).softmax(-1)[..., 1:] @ v


def sink_of_a_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.cat([scores(q, k), q[..., :1]], -1).softmax(-1)[..., :-1] @ v


def doubled_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return (scores(q, k).softmax(-1) * 2) @ v


def heads_between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scores [batch, rows, heads, columns]."""
    s = torch.einsum("bhqd,bhkd->bqhk", q, k)
    return torch.einsum("bqhk,bhkd->bhqd", s.softmax(-1), v)


def heads_last(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scores [batch, rows, columns, heads]."""
    s = torch.einsum("bhqd,bhkd->bqkh", q, k)
    return torch.einsum("bqkh,bhkd->bhqd", s.softmax(2), v)


# What a block of columns cannot know: each of these is a softmax whose scores look at all columns of a row.


def running_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return (scores(q, k) + 0.1 * (q @ k.mT).cumsum(-1)).softmax(-1) @ v


def largest_five(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(s < s.topk(5, -1).values[..., -1:], float("-inf")).softmax(-1) @ v


def unit_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    s = q @ k.mT
    return (s / (1 + s.square().sum(-1, keepdim=True)).sqrt()).softmax(-1) @ v


def softmax_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return (3 * scores(q, k).softmax(-1)).softmax(-1) @ v


ALONG = {"cumsum": running_sum, "topk": largest_five, "sum": unit_rows, "softmax": softmax_twice}


def along_columns(mesh: DeviceMesh) -> dict[str, float]:
    found = {}
    for name, mix in ALONG.items():
        torch.manual_seed(0)
        module = mixed(mix).double()
        ids = torch.randint(VOCAB, (2, 40))
        plain = copy.deepcopy(module)
        want = step(plain, {"ids": ids, "labels": ids})
        lowered = Lowered(module, mesh, (None, "ring", "balanced-ring", "gather-kv"))
        for strategy in lowered.strategies:
            lowered.strategy = strategy
            module.zero_grad()
            loss = abs(step(lowered, {"ids": ids, "labels": ids}) - want)
            found[f"{name} {strategy}"] = max(loss, gradient_error(plain, module))
            if strategy in ("ring", "balanced-ring"):
                assert "looks at several of its columns at once" in lowered.plan.sites[0].note
        torch._dynamo.reset()
    return found


def test_scores_that_look_along_a_row_are_right(pool: Pool) -> None:
    for found in pool.run(along_columns, on=2, timeout=200):
        assert {k: e for k, e in found.items() if not e <= EXACT} == {}


class OneHead(nn.Module):
    """Of one sequence: q, k and v are [seq, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x[0]).chunk(3, -1)
        return x + scores(q, k).softmax(-1) @ v


def mixed(mix: Mix) -> Any:
    return LanguageModel(Backbone(lambda: Attention(mix), layers=1))


def plan_of(module: nn.Module, strategy: str | None, ranks: int = 4, inputs: Any = None) -> Plan:
    ids = torch.zeros(2, 64, dtype=torch.long)
    inputs = inputs or ({"ids": ids} if isinstance(module, OneAttention) else {"ids": ids, "labels": ids})
    return trace(module, inputs, ranks, backward=False, strategy=strategy).compiled.plan


def model(name: str) -> tuple[nn.Module, Any]:
    return MODELS[name](64, 2, torch.float32)


def small(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    return make(), None


REASONS: dict[str, list[tuple[str, Callable[[], tuple[nn.Module, Any]]]]] = {
    "aten.div stands between its softmax and its product": [("ring", lambda: model("manual_softmax"))],
    "aten.exp stands between its softmax and its product": [("balanced-ring", lambda: model("late_normaliser"))],
    "aten.tril stands between its softmax and its product": [("ring-a2a", lambda: model("linear_masked"))],
    "aten.mul stands between its softmax and its product": [("ring", lambda: small(lambda: mixed(doubled_weights)))],
    "weights are cut off after its softmax": [("ring", lambda: small(lambda: mixed(cut_in_front)))],
    "its sink differs from row to row": [("ring", lambda: small(lambda: mixed(sink_of_a_row)))],
    "its softmax is not over the last dimension of [.., rows, columns]": [("ring", lambda: small(lambda: mixed(heads_between)))],
    "einsum bqkh,bhkd->bhqd is no product of weights and values": [("ring", lambda: small(lambda: mixed(heads_last)))],
    "looks at several of its columns at once": [("ring", lambda: small(lambda: mixed(largest_five)))],
    "its keys are whole on every rank": [("ring", lambda: model("memory_attention"))],
    "it has no head dimension to split": [
        (strategy, lambda: small(lambda: LanguageModel(Backbone(OneHead, layers=1)))) for strategy in ("all-to-all", "ring-a2a")
    ],
    "it has too few heads": [("ring-a2a", lambda: small(lambda: OneAttention(1, 1)))],
    "its queries carry no heads": [("all-to-all", lambda: model("perceiver"))],
    "its mask is no window known beforehand": [
        ("halo", lambda: small(lambda: OneAttention(4, 4))),
        ("halo", lambda: small(lambda: OneAttention(4, 4, "none"))),
        ("halo", lambda: model("sdpa_bool_mask")),
    ],
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_strategy_that_cannot_apply_says_why(reason: str) -> None:
    for strategy, make in REASONS[reason]:
        module, inputs = make()
        plan = plan_of(module, strategy, inputs=inputs)
        told = [s for s in plan.sites if s.note.startswith(f"{strategy} cannot apply: ") and reason in s.note]
        assert told, [(s.strategy, s.note) for s in plan.sites]
        for site in told:
            assert site.strategy != strategy and reason in why(site, strategy) and site.note in str(plan)


def why(site: Site, strategy: str) -> str:
    return next(r.reason for r in site.rejected if r.strategy == strategy)


def test_every_other_strategy_has_a_reason_and_a_price() -> None:
    """Asked for one, the others would have cost; asked for none, they take as long or longer; two layouts exclude each other."""
    asked = plan_of(OneAttention(8, 2), "ring").sites[0]
    assert why(asked, "balanced-ring").startswith("the model's sequence is in head-tail layout")
    assert why(asked, "ring-a2a") == why(asked, "all-to-all") == why(asked, "gather-kv") == "not asked for"
    assert why(plan_of(OneAttention(8, 2), "balanced-ring").sites[0], "ring").startswith("the model's sequence is in contiguous")
    free = plan_of(OneAttention(8, 2), None).sites[0]
    prices = {r.strategy: r.seconds for r in free.rejected if "layout" not in r.reason and r.seconds is not None}
    assert prices and all(free.seconds.total <= p for p in prices.values())
    assert all("times as long" in why(free, s) for s, p in prices.items() if p > free.seconds.total)
    assert all((r.seconds is None) == (r.bytes_sent is None) for r in free.rejected)
    windowed = plan_of(OneAttention(8, 2, 9), None).sites[0]
    assert windowed.strategy in ("halo", "balanced-ring")


def test_a_window_is_cheapest_by_its_neighbours() -> None:
    site = plan_of(OneAttention(8, 8, 5), "halo").sites[0]
    assert (site.strategy, site.sees) == ("halo", "mask by rows") and "cannot apply" not in site.note
    assert site.bytes_forward < 0.2 * min(r.bytes_sent for r in site.rejected if r.strategy in ("all-to-all", "gather-kv"))
