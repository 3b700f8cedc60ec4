"""Attention by blocks as numbers: rounding, empty rows, sizes that coincide, equal bits.

"What goes wrong elsewhere", and where it is tested here:

    bf16 partial outputs: error grows with P                     test_rounding_does_not_grow_with_blocks, test_bfloat16_on_ranks
    merging two empty rows gives NaN                             test_nothing_merged_with_nothing, test_documents (padding)
    loss averaged over local token counts, times the SP degree   test_models (uneven ignored labels), test_zoo
    labels shifted after slicing, positions restarted per rank   test_models (ce_shift_*, nanogpt, learned_position) under "ring"
    packed documents leaking, `cu_seqlens // P`                  test_documents: documents_do_not_leak, CASES
    window, sinks, scale, dropout ignored                        test_models (sdpa_window, sinks, sdpa_scale), test_dropout
    KV replicated per query group on the wire                    test_traffic, test_bytes (8/2 and 8/1 heads)
    a rank holding only padding                                  test_documents (padding)
    global rank used inside a sub-group                          test_mesh (2x2 with ring, halo), test_zoo (dp)
    ranks disagreeing on the number of tiles                     test_schedule: the_best_split_is_the_same
    right at B=1 only, H == S or S == D hiding a transposition   test_sizes_that_coincide; everything else has B=2
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from direct import Lowered
from test_bytes import OneAttention
from test_models import STRATEGIES, run_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from twins import EXACT, gradients, step, twins

from autosp.check import relative_error
from autosp.kernels import flash
from pool import Pool

MARGIN = 1.1  # measured: out 0.75, dq 0.70, dk and dv 0.33 on any number of blocks; a whole model on 2 or 4 ranks 0.93 to 1.00


def operands(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the cotangent of the output, rounded to `dtype`."""
    torch.manual_seed(0)
    shapes = [(1, 4, rows, 32), (1, 2, rows, 32), (1, 2, rows, 32), (1, 4, rows, 32)]
    return [torch.randn(s).to(dtype) for s in shapes]


def whole(dtype: torch.dtype, rows: int = 512) -> list[Tensor]:
    """(out, dq, dk, dv) of torch's own attention, of operands rounded to bfloat16."""
    *qkv, grad = (x.to(dtype) for x in operands(rows, torch.bfloat16))
    leaves = [x.requires_grad_() for x in qkv]
    out = scaled_dot_product_attention(*leaves, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_blocks(blocks: int, rows: int = 512) -> list[Tensor]:
    """The same, columns cut into `blocks`, rounded to bfloat16 at the very end."""
    q, k, v, grad = operands(rows, torch.bfloat16)
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -torch.inf)
    cuts = list(zip(k.chunk(blocks, 2), v.chunk(blocks, 2), strict=True))
    for key, value in cuts:
        flash.merge_(out, lse, *flash.forward(q, key, value, False, None, None))
    rounded = out.bfloat16()
    delta = (grad.float() * rounded.float()).sum(-1)
    dq, dk, dv = torch.zeros(q.shape), [], []
    for key, value in cuts:
        part = flash.backward(grad, q, key, value, lse, delta, False, None, None)
        dq += part[0]
        dk.append(part[1])
        dv.append(part[2])
    return [rounded, *(x.bfloat16() for x in (dq, torch.cat(dk, 2), torch.cat(dv, 2)))]


@pytest.mark.parametrize("blocks", [1, 2, 4, 8, 16, 64])
def test_rounding_does_not_grow_with_blocks(blocks: int) -> None:
    exact, own = whole(torch.float64), whole(torch.bfloat16)
    limits = [relative_error(a, b, 0.0) for a, b in zip(own, exact, strict=True)]
    errors = [relative_error(a, b, 0.0) for a, b in zip(by_blocks(blocks), exact, strict=True)]
    assert min(limits) > 1e-4, "bfloat16 was used"
    assert all(e <= MARGIN * limit for e, limit in zip(errors, limits, strict=True)), (errors, limits)


def in_bfloat16(mesh: DeviceMesh) -> dict[str, float]:
    """Error of the whole gradient against float64, of parameters rounded to bfloat16, by strategy."""
    torch.manual_seed(0)
    module, ids = OneAttention(8, 2).bfloat16(), torch.randint(7, (2, 192))
    exact = copy.deepcopy(module).double()
    exact(ids).backward()

    def flat(model: nn.Module) -> Tensor:
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    lowered, found = Lowered(module, mesh, ("all-to-all", "ring", "balanced-ring")), {}
    for strategy in lowered.strategies:
        lowered.strategy = strategy
        module.zero_grad()
        lowered(ids=ids).backward()
        found[str(strategy)] = relative_error(flat(module), flat(exact), 0.0)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_bfloat16_on_ranks(pool: Pool, ranks: int) -> None:
    """Beside all-to-all, whose every head is one call of torch's attention (both round the parameters' gradients)."""
    for found in pool.run(in_bfloat16, on=ranks):
        whole = found.pop("all-to-all")
        assert whole > 1e-4 and all(e <= MARGIN * whole for e in found.values()), (whole, found)


@pytest.mark.parametrize("merge", [flash.merge_])
def test_nothing_merged_with_nothing(merge: Callable[..., None]) -> None:
    """(0, −inf) and (0, −inf) stay that; either with something is the something."""
    empty, full = (torch.zeros(1, 1, 1, 3), torch.full((1, 1, 1), -torch.inf)), (torch.ones(1, 1, 1, 3), torch.zeros(1, 1, 1))
    for a, b, expected in ((empty, empty, empty), (empty, full, full), (full, empty, full)):
        out, lse = a[0].clone(), a[1].clone()
        merge(out, lse, *b)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_a_row_that_sees_nothing_is_zero_with_a_gradient_of_zero() -> None:
    q, k, v, grad = operands(8, torch.float64)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    out, lse = flash.forward(q, k, v, False, mask, None)
    assert not out[:, :, 3].any() and (lse[:, :, 3] == -torch.inf).all() and lse[:, :, 4].isfinite().all()
    dq, dk, dv = flash.backward(grad, q, k, v, lse, (grad * out).sum(-1), False, mask, None)
    assert not dq[:, :, 3].any() and all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    for a, b in zip((dq, dk, dv), torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("ranks", "length", "size", "names"),
    [
        (2, 8, 1, ["gqa_sdpa", "sdpa_window", "eager"]),  # positions = head size = 8
        (3, 6, 1, ["gqa_sdpa", "odd_gqa"]),  # positions = heads = 6
        (4, 4, 4, ["sdpa_scale", "sdpa_bool_mask", "softcap"]),  # positions = heads = batch = ranks = 4
        (2, 32, 3, ["sinks", "mla"]),  # positions = hidden size = 32
    ],
)
def test_sizes_that_coincide(pool: Pool, ranks: int, length: int, size: int, names: list[str]) -> None:
    everyone = pool.run(run_all, names, length, size, on=ranks, timeout=200)
    for name in names:
        assert {(name, s): e for rank in everyone for s, (e, _) in rank[name].items() if not e <= EXACT} == {}
        assert all(s == plan.sites[0].strategy or s in (None, "halo") for s, (_, plan) in everyone[0][name].items())


def twice(mesh: DeviceMesh, strategy: str) -> bool:
    """Whether loss and every gradient have the same bits in two runs."""
    _, parallel, inputs = twins("sdpa_bool_mask", mesh, 101, strategy=strategy)
    runs = []
    for _ in range(2):
        parallel.zero_grad()
        loss = step(parallel, inputs)
        runs.append((loss, {n: g.clone() for n, g in gradients(parallel).items()}))
    (loss, one), (again, other) = runs
    return loss == again and all(torch.equal(g, other[n]) for n, g in one.items())


@pytest.mark.parametrize("strategy", STRATEGIES[2:4])
def test_two_runs_have_the_same_bits(pool: Pool, strategy: str) -> None:
    assert pool.run(twice, strategy, on=3) == [True] * 3
