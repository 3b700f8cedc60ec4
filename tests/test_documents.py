"""Masks that rings meet: packed documents, prefixes, windows, padding. What rows see decides what is computed and what is sent.

Documents come with the batch: their schedule is made anew for each batch, of the same compiled graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import FULL
from direct import Lowered
from models_common import HEAD_DIM, VOCAB, Attention, Backbone, LanguageModel, relative, sdpa_mask, token_labels
from test_traffic import Watch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step

import autosp
from pool import Pool

STRATEGIES = ("all-to-all", "gather-kv", "ring", "balanced-ring", "ring-a2a", "halo")

Mask = Callable[[Tensor, Tensor | None], Tensor]


def document_mask(x: Tensor, documents: Tensor | None) -> Tensor:
    """[batch, 1, seq, seq], true for an earlier key of the same document."""
    assert documents is not None
    return ((documents[:, :, None] == documents[:, None, :]) & (relative(x) <= 0))[:, None]


def document_scores(x: Tensor, documents: Tensor | None) -> Tensor:
    """The same as a number to add, as transformers' eager attention has it."""
    return torch.zeros((), dtype=x.dtype).masked_fill(~document_mask(x, documents), torch.finfo(x.dtype).min)


def position_mask(x: Tensor, positions: Tensor | None) -> Tensor:
    """Documents told by positions that start again, as transformers finds them in `position_ids`."""
    assert positions is not None
    starts = F.pad(positions.diff(dim=-1) != 1, (1, 0), value=False).long().cumsum(-1)
    return document_mask(x, starts)


def padding_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Neither keys nor rows of padding: a row of padding sees nothing at all, and SDPA gives 0 there."""
    assert mask is not None
    visible = mask.bool()
    return (visible[:, :, None] & visible[:, None, :])[:, None]


def window(width: int, causal: bool = True) -> Mask:
    def mask(x: Tensor, documents: Tensor | None) -> Tensor:
        offset = relative(x)
        return (offset <= 0) & (offset > -width) if causal else offset.abs() < width

    return mask


def counted_columns(x: Tensor, documents: Tensor | None) -> Tensor:
    """Every other column of a window, told by a running count over the columns: no block of columns can be told alone."""
    ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.long)
    return window(12)(x, documents) & (ones.cumsum(-1) % 2 == 1)


def prefix(length: int) -> Mask:
    """The first `length` tokens see each other, the others what is before them (prefix-LM)."""

    def mask(x: Tensor, documents: Tensor | None) -> Tensor:
        position = torch.arange(x.shape[1])
        return (relative(x) <= 0) | (position[None, :] < length)

    return mask


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.softmax(q @ k.mT * HEAD_DIM**-0.5 + mask, dim=-1) @ v


def model(mask: Mask, mix: Any = sdpa_mask, layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(Backbone(lambda: Attention(mix, 4, 4 if mix is eager else 2), mask, layers)).double()


def gqa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def packed(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def batch(*rows: Tensor, seed: int = 1) -> dict[str, Tensor]:
    """Tokens whose documents (positions, padding) are `rows`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), len(rows[0]))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        labels = token_labels(shape[1], shape[0])
    return {"ids": torch.randint(VOCAB, shape, generator=generator), "labels": labels, "documents": torch.stack(rows)}


def plain_step(module: nn.Module, inputs: dict[str, Tensor]) -> tuple[nn.Module, float]:
    plain = copy.deepcopy(module)
    return plain, step(plain, inputs)


Case = tuple[Mask, Any, tuple[Tensor, ...]]


def around(border: int, length: int) -> Tensor:
    """Two documents, parted at `border`."""
    return packed(border, length - border)


def restarted(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def kept(length: int, *numbers: int) -> tuple[Tensor, ...]:
    return tuple((torch.arange(length) < n).long() for n in numbers)


CASES: dict[str, Case] = {
    "three documents": (document_mask, gqa, (packed(37, 51, 40), packed(1, 127))),
    "at every border": (document_mask, gqa, (packed(32, 32, 32, 32), packed(64, 64))),
    "before and after borders": (document_mask, gqa, (packed(31, 34, 31, 32), packed(33, 30, 33, 32))),
    "a document a token": (document_mask, gqa, (torch.arange(101), packed(101))),
    "restarting positions": (position_mask, gqa, (restarted(37, 51, 13), restarted(101))),
    "added to scores": (document_scores, eager, (packed(37, 51, 13), packed(1, 100))),
    "padding": (padding_mask, gqa, kept(101, 101, 23)),  # of the second row some ranks hold only padding
    "padding everywhere but at one token": (padding_mask, gqa, kept(101, 1, 60)),
    "prefix": (prefix(30), gqa, (packed(101),) * 2),
    "window of 1": (window(1), gqa, (packed(101),) * 2),
    "window of 12": (window(12), gqa, (packed(101),) * 2),
    "window wider than the sequence": (window(200), gqa, (packed(101),) * 2),
    "window over two shards": (window(40), gqa, (packed(101),) * 2),
    "window to both sides": (window(7, causal=False), gqa, (packed(101),) * 2),
    "every other column of a window": (counted_columns, gqa, (packed(101),) * 2),
}
BY_BATCH = {name for name, (mask, *_) in CASES.items() if mask in (document_mask, position_mask, padding_mask)}


def run_cases(mesh: DeviceMesh, names: Sequence[str]) -> dict[str, dict[str, tuple[float, Any]]]:
    found = {}
    for name in names:
        mask, mix, rows = CASES[name]
        module, inputs = model(mask, mix), batch(*rows)
        plain, want = plain_step(module, inputs)
        lowered, found[name] = Lowered(module, mesh, STRATEGIES), {}
        for strategy in STRATEGIES:
            lowered.strategy = strategy
            module.zero_grad()
            loss = abs(step(lowered, inputs) - want) / abs(want)
            found[name][strategy] = max(loss, gradient_error(plain, module)), lowered.plan
        torch._dynamo.reset()
    return found


def spread() -> list[tuple[int, list[str]]]:
    names = list(CASES)
    if FULL:
        return [(ranks, names[i : i + 5]) for ranks in (2, 3, 4) for i in range(0, len(names), 5)]
    return [(4, names[:4]), (3, names[4:9]), (2, names[9:]), (4, names[6:7] + names[12:13]), (3, names[2:3] + names[10:11])]


@pytest.mark.parametrize(("ranks", "names"), spread())
def test_masks_are_exact_under_every_strategy(pool: Pool, ranks: int, names: list[str]) -> None:
    everyone = pool.run(run_cases, names, on=ranks, timeout=280)
    for name in names:
        assert {(name, s): e for rank in everyone for s, (e, _) in rank[name].items() if not e <= EXACT} == {}
        for strategy, (_, plan) in everyone[0][name].items():
            (site,) = plan.sites
            blockwise = name != "every other column of a window" or strategy in ("all-to-all", "gather-kv")
            assert site.strategy == strategy or strategy == "halo" or not blockwise, (name, strategy, site)
            assert plan.fallbacks == ()
            assert (site.sees == "mask by batch") == (name in BY_BATCH), (name, site.sees)


# One graph, many batches.


def other_documents(mesh: DeviceMesh, strategy: str, check_batch: bool) -> tuple[list[float], list[int], int]:
    """Errors of three steps with other documents each, what this rank posted in each, and how often anything was compiled."""
    module = model(document_mask, gqa, layers=2)
    parallel = autosp.parallelize(copy.deepcopy(module), mesh, compiler="aot_eager", strategy=strategy, check_batch=check_batch)
    errors, sent, plans = [], [], set()
    for rows in ((packed(128),) * 2, (packed(32, 32, 32, 32),) * 2, (packed(37, 51, 40), packed(1, 127))):
        inputs = batch(*rows)
        parallel.zero_grad()
        with Watch() as watch:
            loss = step(parallel, inputs)
        plain, want = plain_step(module, inputs)
        errors.append(max(abs(loss - want), gradient_error(plain, parallel)))
        sent.append(sum(watch.sent.values()))
        plans.add(id(parallel.autosp_plan))
    assert {s.sees for s in parallel.autosp_plan.sites} == {"mask by batch"}
    return errors, sent, len(plans)


@pytest.mark.parametrize(
    ("ranks", "strategy", "check_batch"), [(4, "ring", True), (4, "balanced-ring", False), (2, "balanced-ring", True)]
)
def test_each_batch_sends_what_its_documents_need(pool: Pool, ranks: int, strategy: str, check_batch: bool) -> None:
    """One document is causal attention. Documents that end where shards do need no other rank's keys under the contiguous layout:
    nothing at all is sent."""
    everyone = pool.run(other_documents, strategy, check_batch, on=ranks, timeout=200)
    assert max(max(errors) for errors, *_ in everyone) < EXACT
    assert {plans for *_, plans in everyone} == {1}
    one, borders, some = (sum(rank[1][i] for rank in everyone) for i in range(3))
    assert one > some > 0
    if strategy == "balanced-ring":
        assert borders == 0, "blocks between documents are neither computed nor sent"
    else:
        assert borders < one


def accumulates(mesh: DeviceMesh, strategy: str) -> float:
    """Two forward passes, then two backward passes, with other documents in each: every one keeps its own schedule."""
    module = model(document_mask, gqa)
    parallel = autosp.parallelize(copy.deepcopy(module), mesh, compiler="aot_eager", strategy=strategy)
    batches = [batch(packed(37, 51, 40), packed(1, 127)), batch(packed(128), packed(64, 64), seed=2)]
    for m in (module, parallel):
        losses = [m(**inputs)["loss"] for inputs in batches]
        for loss in losses:
            (loss / 2).backward()
    return gradient_error(module, parallel)


@pytest.mark.parametrize("strategy", ["ring", "balanced-ring"])
def test_two_forward_passes_before_their_backward_passes(pool: Pool, strategy: str) -> None:
    assert max(pool.run(accumulates, strategy, on=3)) < EXACT


def leaks(mesh: DeviceMesh, strategy: str) -> tuple[float, float]:
    """How much the loss of the second document moves when tokens of the first, or of the second, are others."""
    module = model(document_mask, gqa)
    parallel = autosp.parallelize(module, mesh, compiler="aot_eager", strategy=strategy)
    inputs = batch(packed(50, 51), packed(50, 51))
    inputs["labels"][:, :50] = -100
    with torch.no_grad():
        before = parallel(**inputs)["loss"].item()
        out = []
        for span in (slice(0, 50), slice(50, 100)):
            changed = {**inputs, "ids": inputs["ids"].clone()}
            changed["ids"][:, span] = (changed["ids"][:, span] + 7) % VOCAB
            out.append(abs(parallel(**changed)["loss"].item() - before))
    return out[0], out[1]


@pytest.mark.parametrize("strategy", ["ring", "balanced-ring"])
def test_documents_do_not_leak(pool: Pool, strategy: str) -> None:
    for first, second in pool.run(leaks, strategy, on=3):
        assert first == 0 and second > 1e-3


def rows_of_nothing(mesh: DeviceMesh) -> dict[str, float]:
    """The largest attention output of a row that sees nothing, where `out` has no bias; NaN where anything is not a number."""
    module = model(padding_mask, gqa)
    module.backbone.blocks[0].attention.out.bias = None
    inputs = batch(*kept(101, 101, 23))
    lowered, found = Lowered(Outputs(module), mesh, STRATEGIES), {}
    for strategy in STRATEGIES:
        lowered.strategy = strategy
        module.zero_grad()
        out = lowered(**inputs)
        out["loss"].backward()
        grads = torch.cat([p.grad.flatten() for p in module.parameters()])
        found[strategy] = float(out["rows"]) if bool(grads.isfinite().all()) else torch.nan
    return found


class Outputs(nn.Module):
    """The sum of squares of the first attention's output over rows of padding, beside the loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor) -> dict[str, Tensor]:
        backbone = self.inner.backbone
        x = backbone.embed(ids)
        mask = backbone.mask(x, documents)
        mixed = backbone.blocks[0].attention(backbone.blocks[0].norm1(x), mask)
        hidden = (mixed * (documents == 0)[..., None]).square().sum()
        return {"loss": self.inner(ids, labels, documents)["loss"], "rows": hidden.detach()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_that_see_nothing_are_zero(pool: Pool, ranks: int) -> None:
    """Merging two blocks of nothing gives no NaN, on ranks that hold nothing but padding too."""
    for found in pool.run(rows_of_nothing, on=ranks, timeout=200):
        assert found == dict.fromkeys(STRATEGIES, 0.0)
