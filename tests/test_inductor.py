"""Inductor under autosp's settings keeps what Inductor alone would lose."""

from __future__ import annotations

import torch
from conftest import FULL
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step, twins

from autosp.check import check_on_rank
from autosp.inductor import settings
from autosp.model_spec import ModelSpec
from pool import Pool


def scattered(x: Tensor, y: Tensor, index: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over rows of 4 and a scatter into zeros, added: loops of different shape that Inductor aligns to fuse them."""
    first = y - x * (x * y).sum(-1, keepdim=True)
    second = torch.zeros(202, 4).scatter(1, index, (a @ w)[:, :2])
    return first + second, first


def test_a_scatter_is_not_read_before_it_is_written() -> None:
    torch.manual_seed(0)
    args = (
        torch.randn(202, 4),
        torch.randn(202, 4),
        torch.randn(202, 4).topk(2).indices,
        torch.randn(202, 3),
        torch.randn(3, 64),
    )
    compiled = torch.compile(scattered, dynamic=False, options=settings())
    torch.testing.assert_close(compiled(*args), scattered(*args), rtol=1e-4, atol=1e-4)


def routed(mesh: DeviceMesh) -> tuple[str, float | None]:
    report = check_on_rank(ModelSpec("gpt_oss", 33), mesh, compiler="inductor")
    return report.verdict, report.grad_rel_err


def both_ways(mesh: DeviceMesh) -> tuple[float, float]:
    plain, parallel, inputs = twins("both_ways", mesh, 33, compiler="inductor")
    return abs(step(plain, inputs) - step(parallel, inputs)), gradient_error(plain, parallel)


if FULL:

    def test_exchanges_of_independent_branches_keep_one_order_on_all_ranks(pool: Pool) -> None:
        """A halo and a scan in each direction: the rank in the middle fuses other loops than those at the ends."""
        for errors in pool.run(both_ways, on=3, timeout=280):
            assert max(errors) < EXACT

    def test_a_routers_gradient_survives_inductor(pool: Pool) -> None:
        for verdict, error in pool.run(routed, on=2, timeout=280):
            assert verdict == "exact", error
