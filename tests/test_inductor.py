"""Inductor under autosp's settings keeps what Inductor alone would lose."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import FULL
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy
from twins import EXACT, gradient_error, step, twins

import autosp
from autosp.check import check_on_rank
from autosp.inductor import Partition, settings
from autosp.model_spec import ModelSpec
from autosp.passes import host
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
    compiled = torch.compile(scattered, dynamic=False, options=settings(fx.Graph()))
    torch.testing.assert_close(compiled(*args), scattered(*args), rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_what_waits_on_the_host_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank and without attention: what Inductor makes of the operators."""
    moved: list[str] = []

    def watched(forward: fx.GraphModule, backward: fx.GraphModule, returned: int) -> None:
        host.to_host(forward, backward, returned)
        moved.extend(str(n.target) for module in (forward, backward) for n in module.graph.nodes if host.starts(n))

    monkeypatch.setattr("autosp.inductor.host", SimpleNamespace(to_host=watched, STARTS=host.STARTS))
    torch.manual_seed(0)
    plain, x = Stack(), torch.randn(2, 12, 8)
    parallel = autosp.parallelize(copy.deepcopy(plain), memory="offload")
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for model in (plain, parallel):
            model(x).backward()
    assert sorted(moved) == ["asp.offload.default", "asp.reload.default"], (
        "the second layer's input; the first one's is the user's"
    )
    for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_graphs_with_other_tags_have_another_key() -> None:
    """PyTorch's own leaves them out: with other memory= a model would get the graphs that are in its cache."""
    keys = set()
    for policy in (None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):
        graph = fx.Graph()
        graph.call_function(torch.relu, (graph.placeholder("x"),)).meta["recompute"] = policy
        keys.add(Partition(graph).uuid())
    assert len(keys) == 3


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
