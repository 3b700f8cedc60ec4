"""Dropout: decided by seed, site and position, whoever computes the element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import FULL
from direct import Lowered
from models import DROPOUT_MODELS, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, distance, gradients

import autosp
from autosp.check import relative_error
from autosp.kernels import random
from pool import Pool

Run = tuple[float, dict[str, Tensor]]


def run(mesh: DeviceMesh, name: str, seeds: tuple[int, ...], strategy: str | None = None) -> list[Run]:
    """Loss and gradients under each seed."""
    model, inputs = DROPOUT_MODELS[name](33, 2, torch.float64)
    parallel: Any = autosp.parallelize(model, mesh, compiler="aot_eager", strategy=strategy)
    out = []
    for seed in seeds:
        parallel.zero_grad()
        torch.manual_seed(seed)
        loss = loss_of(parallel(**inputs))
        loss.backward()
        out.append((loss.item(), {k: g.clone() for k, g in gradients(parallel).items()}))
    return out


def same(a: Run, b: Run) -> bool:
    return relative_error(torch.tensor(a[0]), torch.tensor(b[0]), 0.0) < 1e-6 and distance(a[1], b[1]) < EXACT


@pytest.mark.parametrize("name", ["dropout_mlp", "dropout_attention"])
def test_the_seed_decides_on_any_number_of_ranks(pool: Pool, name: str) -> None:
    alone = pool.run(run, name, (3, 3, 4), on=1)[0]
    assert same(alone[0], alone[1]) and not same(alone[0], alone[2])
    for results in pool.run(run, name, (3, 4), "ring", on=2):
        assert same(results[0], alone[0]) and same(results[1], alone[2])


STRATEGIES = ("all-to-all", "gather-kv", "ring", "balanced-ring", "ring-a2a")


def under_every_strategy(mesh: DeviceMesh, name: str, seeds: tuple[int, ...]) -> dict[str, list[Run]]:
    model, inputs = DROPOUT_MODELS[name](33, 2, torch.float64)
    lowered, found = Lowered(model, mesh, STRATEGIES), {}
    for strategy in STRATEGIES:
        lowered.strategy, found[strategy] = strategy, []
        for lowered.seed in seeds:
            model.zero_grad()
            loss = loss_of(lowered(**inputs))
            loss.backward()
            found[strategy].append((loss.item(), {k: g.clone() for k, g in gradients(model).items()}))
        assert {site.strategy for site in lowered.plan.sites} == {strategy}
    return found


@pytest.mark.parametrize("name", DROPOUT_MODELS)
def test_the_same_weights_are_dropped_by_every_strategy(pool: Pool, name: str) -> None:
    """Whoever computes a block, of whosever queries and keys: dropout knows a weight by its head, row and column."""
    alone = pool.run(under_every_strategy, name, (3, 4), on=1)
    expected = alone[0]["all-to-all"]
    assert not same(*expected)
    others = (2, 3, 4) if FULL else (3, 4) if list(DROPOUT_MODELS).index(name) % 2 else (2,)
    for ranks in (1, *others):
        for found in alone if ranks == 1 else pool.run(under_every_strategy, name, (3, 4), on=ranks):
            for strategy, runs in found.items():
                assert same(runs[0], expected[0]) and same(runs[1], expected[1]), (ranks, strategy)


def seeds_of_ranks(mesh: DeviceMesh) -> list[Run]:
    """Every rank has another seed: that of the first rank holds for all."""
    torch.distributed.barrier(mesh.get_group())
    return run(mesh, "dropout_mlp", (3 + 5 * mesh.get_local_rank("sp"),))


def test_the_first_ranks_seed_holds_for_all(pool: Pool) -> None:
    first, second = pool.run(seeds_of_ranks, on=2)
    assert same(first[0], second[0]) and same(first[0], pool.run(run, "dropout_mlp", (3,), on=2)[0][0])


def two_groups(mesh: DeviceMesh) -> float:
    model, inputs = DROPOUT_MODELS["dropout_mlp"](33, 2, torch.float64)
    torch.manual_seed(0)
    return loss_of(autosp.parallelize(model, mesh, compiler="aot_eager")(**inputs)).item()


def test_data_parallel_groups_drop_other_elements(pool: Pool) -> None:
    losses = pool.run(two_groups, on="2x2")
    assert losses[0] == losses[1] and losses[2] == losses[3] and abs(losses[0] - losses[2]) > 1e-6


class Dropped(nn.Module):
    """Returns what dropout leaves, and its loss is linear in it: the gradient of x shows the mask again."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.scale = p, nn.Parameter(torch.ones(2, 64, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.nn.functional.dropout(x * self.scale, self.p)
        second = torch.nn.functional.dropout(x * self.scale, self.p)
        return (first + 0 * second).sum(), first, second


def masks(mesh: DeviceMesh, p: float) -> tuple[Tensor, Tensor, Tensor]:
    model: Any = autosp.parallelize(Dropped(p), mesh, compiler="aot_eager", outputs="gather")
    loss, first, second = model(torch.ones(2, 64, 8, dtype=torch.float64))
    loss.backward()
    return model.scale.grad, first.detach(), second.detach()


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_the_backward_pass_uses_the_mask_of_the_forward_pass(pool: Pool, p: float) -> None:
    for grad, first, second in pool.run(masks, p, on=3):
        assert torch.equal(grad, first)
        kept = 1 / (1 - p) if p < 1 else 0.0
        assert set(first.unique().tolist()) == ({0.0, kept} if 0 < p < 1 else {kept})
        assert torch.equal(first, second) == (p in (0.0, 1.0)), "two sites draw independently"


# The generator itself.

SEED = torch.tensor(12345)


def mask(shape: tuple[int, ...], p: float, seed: Tensor = SEED, salt: int = 0) -> Tensor:
    """True where an element of a value of `shape` is kept."""
    return random.dropout(torch.ones(shape, dtype=torch.float64), p, seed, salt, shape, [0] * len(shape)) > 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("salt", [0, 1, 77])
def test_the_share_of_kept_elements_is_right(p: float, salt: int) -> None:
    kept = mask((4, 250, 100), p, salt=salt).double()
    assert abs(kept.mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / kept.numel())


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of the correlation of independent masks."""
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()) * math.sqrt(a.numel()))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_heads_sites_and_seeds_are_uncorrelated(p: float) -> None:
    m = mask((2, 8, 128, 96), p)
    pairs = [(m[:, :, 1:], m[:, :, :-1]), (m[..., 1:], m[..., :-1]), (m[:, 1:], m[:, :-1]), (m[1:], m[:-1])]
    pairs += [(m[:, :, :64], m[:, :, 64:]), (m, mask(m.shape, p, salt=1)), (m, mask(m.shape, p, SEED + 1))]
    pairs += [(m, mask(m.shape, p, SEED + 0x9E3779B97F4A7C15 % (1 << 62)))]
    for a, b in pairs:
        assert abs(correlation(a, b)) < 4.5


def test_a_piece_has_the_mask_of_the_whole() -> None:
    shape = (2, 40, 6)
    whole, x = mask(shape, 0.3), torch.ones(2, 40, 6, dtype=torch.float64)
    run = random.dropout(x[:, 10:25, 2:], 0.3, SEED, 0, shape, [0, 10, 2]) > 0
    assert torch.equal(run, whole[:, 10:25, 2:])
    index = random.positions([(30, 40), (3, 8)], x.device)
    assert torch.equal(random.dropout(x[:, index], 0.3, SEED, 0, shape, [0, index, 0]) > 0, whole[:, index])


def test_kept_elements_are_scaled_and_differentiable() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: random.dropout(x, 0.4, SEED, 3, (5, 7), [0, 0]), x)
    y = random.dropout(x, 0.4, SEED, 3, (5, 7), [0, 0])
    kept = mask((5, 7), 0.4, salt=3)
    torch.testing.assert_close(y, torch.where(kept, x / 0.6, 0.0), rtol=0, atol=1e-15)
