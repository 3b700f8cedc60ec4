"""Each communication and its transpose against plain torch on whole tensors, in real processes.

Every rank knows the whole value (the same seed) and all ranks' cotangents, so it can compute by itself what it should
receive. The oracles are one line each: what a rank holds, and how the cotangents of all ranks come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autosp.kernels import comm
from autosp.kernels.layout import Layout, contiguous, kv_heads, size, split
from pool import Pool

LENGTH, OUTER, INNER = 13, 2, 3  # the sequence merged with others in one dimension: [2 * 13 * 3]


def head_tail(length: int, ranks: int) -> Layout:
    cuts = split(length, 2 * ranks)
    return Layout(length, tuple((cuts[r], cuts[2 * ranks - 1 - r]) for r in range(ranks)))


def short(length: int, ranks: int) -> Layout:
    """Everything on the first rank, as after slicing a prefix."""
    return Layout(length, (((0, length),), *((),) * (ranks - 1)))


LAYOUTS = {"contiguous": contiguous, "head-tail": head_tail, "first rank only": short}


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def held(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """whole: [2, 2 * 13 * 3, 5], its part on `rank`."""
    here = [p for a, b in layout.shards[rank] for p in range(a, b)]
    return whole[:, [(o * LENGTH + p) * INNER + i for o in range(OUTER) for p in here for i in range(INNER)]]


def spread(parts: list[Tensor], layout: Layout) -> Tensor:
    """The whole from all parts."""
    whole = torch.zeros(2, OUTER * LENGTH * INNER, 5, dtype=torch.float64)
    for rank, part in enumerate(parts):
        index = held(torch.arange(whole.shape[1]).expand(2, -1), layout, rank)[0]
        whole[:, index] = part
    return whole


def pull(f: Callable[[Tensor], Tensor], x: Tensor, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """f(x) and the gradient of x under the cotangent."""
    x = x.clone().requires_grad_()
    y = f(x)
    (grad,) = torch.autograd.grad(y, x, cotangent(y))
    return y.detach(), grad


def seen(mesh: DeviceMesh) -> tuple[int, int, str]:
    group = mesh.get_group("sp")
    return dist.get_rank(group), dist.get_world_size(group), group.group_name


def whole_values(mesh: DeviceMesh) -> None:
    """vary, psum: x: [4, 3]."""
    rank, ranks, group = seen(mesh)
    mine = [values(4, 3, seed=r) for r in range(ranks)]
    y, grad = pull(lambda x: comm.vary(x, group), mine[0], lambda y: mine[rank])
    torch.testing.assert_close((y, grad), (mine[0], sum(mine)))
    y, grad = pull(lambda x: comm.psum(x, group), mine[rank], lambda y: mine[0])
    torch.testing.assert_close((y, grad), (sum(mine), mine[0]))
    assert torch.equal(comm.broadcast(mine[rank], group), mine[0])
    count = comm.psum(torch.tensor(rank + 1), group)
    assert count.dtype == torch.int64 and count == ranks * (ranks + 1) // 2


def sequences(mesh: DeviceMesh, name: str) -> None:
    """shard, cut, gather, gather_varying along a merged dimension. whole: [2, 78, 5]."""
    rank, ranks, group = seen(mesh)
    layout = LAYOUTS[name](LENGTH, ranks)
    where = (1, layout.shards, OUTER, INNER, rank)
    whole = values(2, OUTER * LENGTH * INNER, 5, seed=0)
    mine = held(whole, layout, rank)
    cotangents = [values(*held(whole, layout, r).shape, seed=1 + r) for r in range(ranks)]
    wholes = [values(*whole.shape, seed=1 + r) for r in range(ranks)]

    y, grad = pull(lambda x: comm.shard(x, *where, group), whole, lambda y: cotangents[rank])
    torch.testing.assert_close((y, grad), (mine, spread(cotangents, layout)))
    y, grad = pull(lambda x: comm.cut(x, *where), whole, lambda y: cotangents[rank])
    torch.testing.assert_close((y, comm.psum(grad, group)), (mine, spread(cotangents, layout)))
    y, grad = pull(lambda x: comm.gather(x, *where, group), mine, lambda y: wholes[0])
    torch.testing.assert_close((y, grad), (whole, held(wholes[0], layout, rank)))
    y, grad = pull(lambda x: comm.gather_varying(x, *where, group), mine, lambda y: wholes[rank])
    torch.testing.assert_close((y, grad), (whole, held(sum(wholes), layout, rank)))


def relayouts(mesh: DeviceMesh, source: str, target: str) -> None:
    rank, ranks, group = seen(mesh)
    src, dst = LAYOUTS[source](LENGTH, ranks), LAYOUTS[target](LENGTH, ranks)
    whole, back = values(2, OUTER * LENGTH * INNER, 5, seed=0), values(2, OUTER * LENGTH * INNER, 5, seed=1)
    y, grad = pull(
        lambda x: comm.relayout(x, 1, src.shards, dst.shards, OUTER, INNER, rank, group),
        held(whole, src, rank),
        lambda y: held(back, dst, rank),
    )
    torch.testing.assert_close((y, grad), (held(whole, dst, rank), held(back, src, rank)))


WINDOWS: dict[str, Callable[[int, int], tuple[tuple[int, int], ...]]] = {
    "before": lambda a, b: ((a - 3, b),),
    "around": lambda a, b: ((a - 1, b + 2),),
    "far": lambda a, b: ((a - 9, b + LENGTH),),
    "apart and overlapping": lambda a, b: ((a - 4, a + 1), (a - 2, b + 1), (LENGTH, LENGTH + 2), (-5, -2)),
    "own only": lambda a, b: ((a, b),),
    "shifted": lambda a, b: ((a + 2, b + 2),),
}


def halos(mesh: DeviceMesh, name: str) -> None:
    """Windows around what each rank holds; a rank that holds nothing asks for zeros in front. whole: [2, 13, 5]."""
    rank, ranks, group = seen(mesh)
    layout = LAYOUTS[name](LENGTH, ranks)
    whole, back = values(2, LENGTH, 5, seed=0), [values(2, 200, 5, seed=1 + r) for r in range(ranks)]
    outside = 2 * LENGTH
    for make in WINDOWS.values():
        windows = tuple(tuple(w for a, b in held for w in make(a, b)) or ((-3, 0),) for held in layout.shards)
        index = [torch.tensor([p for a, b in held for p in range(a, b)]) for held in windows]
        wide = torch.cat([whole.new_zeros(2, outside, 5), whole, whole.new_zeros(2, outside, 5)], 1)
        total = torch.zeros_like(wide)
        for i, cotangent in zip(index, back, strict=True):
            total.index_add_(1, i + outside, cotangent[:, : len(i)])
        y, grad = pull(
            lambda x, w=windows: comm.halo(x, 1, layout.shards, w, rank, group),
            torch.cat([whole[:, a:b] for a, b in layout.shards[rank]] or [whole[:, :0]], 1),
            lambda y: back[rank][:, : y.shape[1]],
        )
        summed = total[:, outside : outside + LENGTH]
        mine = torch.cat([summed[:, a:b] for a, b in layout.shards[rank]] or [summed[:, :0]], 1)
        torch.testing.assert_close((y, grad), (wide[:, index[rank] + outside], mine))


def rows(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """whole: [batch, heads, seq, width]."""
    return torch.cat([whole[:, :, a:b] for a, b in layout.shards[rank]] or [whole[:, :, :0]], 2)


def head_exchange(mesh: DeviceMesh, q_heads: int, groups: int, name: str, length: int) -> None:
    """Query heads there and back again, key/value heads there. whole: [2, heads, length, 5]."""
    rank, ranks, group = seen(mesh)
    layout, heads = LAYOUTS[name](length, ranks), split(q_heads, ranks)
    wanted = tuple(kv_heads(h, groups) for h in heads)
    for runs, count in ((heads, q_heads), (wanted, q_heads // groups)):
        whole = values(2, count, length, 5, seed=0)
        cotangents = [values(2, b - a, length, 5, seed=1 + r) for r, (a, b) in enumerate(runs)]
        total = torch.zeros_like(whole)
        for (a, b), cotangent in zip(runs, cotangents, strict=True):
            total[:, a:b] += cotangent
        first, last = runs[rank]
        y, grad = pull(
            lambda x, runs=runs: comm.to_heads(x, 1, 2, runs, layout.shards, rank, group),
            rows(whole, layout, rank),
            lambda y, c=cotangents: c[rank],
        )
        torch.testing.assert_close((y, grad), (whole[:, first:last], rows(total, layout, rank)))
    whole, back = values(2, q_heads, length, 5, seed=0), values(2, q_heads, length, 5, seed=1)
    first, last = heads[rank]
    y, grad = pull(
        lambda x: comm.to_sequence(x, 1, 2, heads, layout.shards, rank, group),
        whole[:, first:last],
        lambda y: rows(back, layout, rank),
    )
    torch.testing.assert_close((y, grad), (rows(whole, layout, rank), back[:, first:last]))


def parameters(mesh: DeviceMesh) -> None:
    rank, ranks, group = seen(mesh)
    shapes = [(3,), (2, 4), ()]
    grads = [[values(*s, seed=10 * r + i) for i, s in enumerate(shapes)] for r in range(ranks)]
    for chosen, name, scale in ((shapes, group, 0.5), (shapes[:1], group, 1.0), (shapes, None, 2.0)):
        params = [torch.zeros(s, dtype=torch.float64, requires_grad=True) for s in chosen]
        got = torch.autograd.grad(comm.sync(params, name, scale), params, grads[rank][: len(chosen)])
        contributors = grads if name is not None else [grads[rank]]
        torch.testing.assert_close(got, tuple(scale * sum(g[i] for g in contributors) for i in range(len(chosen))))


RANKS = (1, 2, 3, 4)


@pytest.mark.parametrize("on", RANKS)
def test_whole_values_and_parameters(pool: Pool, on: int) -> None:
    pool.run(whole_values, on=on)
    pool.run(parameters, on=on)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("on", RANKS)
def test_sequences_are_cut_and_gathered(pool: Pool, on: int, name: str) -> None:
    pool.run(sequences, name, on=on)


@pytest.mark.parametrize(("source", "target"), [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b])
@pytest.mark.parametrize("on", (2, 3, 4))
def test_positions_move_to_their_new_holders(pool: Pool, on: int, source: str, target: str) -> None:
    pool.run(relayouts, source, target, on=on)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("on", RANKS)
def test_windows_are_filled_by_whoever_holds_the_positions(pool: Pool, on: int, name: str) -> None:
    pool.run(halos, name, on=on)


@pytest.mark.parametrize(("q_heads", "groups"), [(4, 1), (3, 1), (4, 4), (6, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("on", RANKS)
def test_heads_are_exchanged_for_positions(pool: Pool, on: int, q_heads: int, groups: int) -> None:
    """Even and uneven heads, one key/value head for all ranks, fewer heads than ranks; as many positions on each rank, or not."""
    for name, length in (("contiguous", LENGTH), ("contiguous", 12), ("head-tail", LENGTH)):
        pool.run(head_exchange, q_heads, groups, name, length, on=on)


def sent_bytes(mesh: DeviceMesh, q_heads: int, groups: int) -> list[int]:
    """Elements sent to each rank by to_heads for key/value heads."""
    rank, ranks, group = seen(mesh)
    layout = contiguous(LENGTH, ranks)
    wanted = tuple(kv_heads(h, groups) for h in split(q_heads, ranks))
    sizes: list[int] = []
    original, comm._all_to_all = comm._all_to_all, lambda flat, sent, *rest: sizes.extend(sent) or original(flat, sent, *rest)
    try:
        comm.to_heads(values(2, q_heads // groups, layout.size(rank), 5, seed=0), 1, 2, wanted, layout.shards, rank, group)
    finally:
        comm._all_to_all = original
    return [s // (2 * 5 * size(layout.shards[rank])) for s in sizes]


def halo_elements(mesh: DeviceMesh, before: int, after: int) -> list[int]:
    """Positions sent to each rank for a halo of one element a position."""
    rank, ranks, group = seen(mesh)
    shards = contiguous(LENGTH, ranks).shards
    windows = tuple(((a - before, b + after),) for ((a, b),) in shards)
    sizes: list[int] = []
    original, comm._all_to_all = comm._all_to_all, lambda flat, sent, *rest: sizes.extend(sent) or original(flat, sent, *rest)
    try:
        comm.halo(values(size(shards[rank]), seed=0), 0, shards, windows, rank, group)
    finally:
        comm._all_to_all = original
    return sizes


def test_a_halo_sends_what_is_needed_and_nothing_else(pool: Pool) -> None:
    assert pool.run(halo_elements, 2, 0, on=4) == [[0, 2, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2], [0, 0, 0, 0]]
    assert pool.run(halo_elements, 1, 1, on=3) == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert pool.run(halo_elements, 5, 0, on=4) == [[0, 3, 2, 0], [0, 0, 3, 2], [0, 0, 0, 3], [0, 0, 0, 0]], "from two ranks"
    assert pool.run(halo_elements, 0, 0, on=4) == [[]] * 4, "no exchange"


def test_a_key_value_head_goes_only_where_it_is_needed(pool: Pool) -> None:
    assert pool.run(sent_bytes, 8, 4, on=4) == [[1, 1, 1, 1]] * 4, "of two heads each rank gets one"
    assert pool.run(sent_bytes, 6, 2, on=3) == [[1, 1, 1]] * 3, "of three heads too"


def unequal(mesh: DeviceMesh) -> Any:
    rank, _, group = seen(mesh)
    return comm.gather(torch.full((rank + 1, 2), float(rank)), 0, (((0, 1),), ((1, 3),)), 1, 1, rank, group)


def test_uneven_parts_are_gathered_without_padding(pool: Pool) -> None:
    for whole in pool.run(unequal, on=2):
        assert whole.tolist() == [[0, 0], [1, 1], [1, 1]]
