"""The tests' own ranks: results in order, exceptions with tracebacks, deaths and hangs noticed, work afterwards."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pool import Pool, RankHung, RemoteTraceback


def total(mesh: DeviceMesh, axis: str) -> tuple[int, float]:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x, group=mesh.get_group(axis))
    return dist.get_rank(), x.item()


def raise_on(mesh: DeviceMesh, rank: int | None) -> None:
    if rank in (None, dist.get_rank()):
        raise KeyError("nothing here")
    dist.barrier(mesh.get_group())


def die_on(mesh: DeviceMesh, rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def hang(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def pid(mesh: DeviceMesh) -> int:
    return os.getpid()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_come_in_rank_order(pool: Pool, ranks: int) -> None:
    assert pool.run(total, "sp", on=ranks) == [(r, ranks * (ranks + 1) / 2) for r in range(ranks)]


def test_a_two_axis_mesh_has_both_groups(pool: Pool) -> None:
    assert [s for _, s in pool.run(total, "sp", on="2x2")] == [3, 3, 7, 7]
    assert [s for _, s in pool.run(total, "dp", on="2x2")] == [4, 6, 4, 6]


def test_an_exception_on_all_ranks_keeps_the_ranks(pool: Pool) -> None:
    before = pool.run(pid)
    with pytest.raises(KeyError, match="nothing here") as caught:
        pool.run(raise_on, None)
    assert isinstance(caught.value.__cause__, RemoteTraceback) and "raise_on" in str(caught.value.__cause__)
    assert pool.run(pid) == before


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_on_one_rank_is_raised_and_the_pool_recovers(pool: Pool, rank: int) -> None:
    with pytest.raises(KeyError, match="nothing here"):
        pool.run(raise_on, rank)
    assert pool.run(total, "sp") == [(r, 10.0) for r in range(4)]


def test_a_death_is_an_error_and_the_pool_recovers(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="rank 3 died"):
        pool.run(die_on, 3)
    assert len(pool.run(pid, on=2)) == 2


def test_a_hang_is_an_error_and_the_pool_recovers(pool: Pool) -> None:
    with pytest.raises(RankHung, match=r"rank \[1\]"):
        pool.run(hang, timeout=2)
    assert len(pool.run(pid)) == 4
