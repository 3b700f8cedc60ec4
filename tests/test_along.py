"""Operators that work along a split sequence, on real ranks: convolutions, scans, flips and rolls, in any layout.

Each rank knows the whole value and the whole cotangent, so it can say what its part of both must be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered import trace
from test_comm import LAYOUTS, seen, values
from test_rules import node_of, piece
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step, twins

from autosp.kernels import prefix
from autosp.kernels.layout import contiguous
from autosp.passes.capture import Captured, Input
from autosp.passes.facts import Facts
from autosp.passes.lower import Lowering
from autosp.passes.placement import Placement, R, Shard, Varying
from autosp.passes.rules import rule_of
from autosp.passes.rules.base import Recipe
from autosp.passes.rules.sequence import Flip
from autosp.passes.spread import Spread
from pool import Pool

aten = torch.ops.aten
X, LINE, IMAGE = values(2, 6, 13, seed=0), values(13, seed=1), values(2, 3, 13, 5, seed=2)  # 13 positions each
HOLES = torch.where(torch.arange(13) % 3 == 1, X, -torch.inf)
HOLES[0, 0, 0] = 1.0
HOLES[:, :, 0] = 0.5
ZEROS = X * (torch.arange(13) % 5 != 4)


def weight(*shape: int) -> Tensor:
    return values(*shape, seed=7)


prefix.register("affine", lambda a, b, c, d: (a * c, c * b + d))
prefix.register("product", lambda a, b, scale: (a @ b * scale,))
MAPS = [values(13, 2, 3, seed=3), values(13, 2, 3, seed=4)]

# The operator and its arguments; the first operand, and others of its shape, are split along the dimension of size 13.
SAMPLES: dict[str, tuple[Any, ...]] = {
    "causal": (aten.conv1d.default, X, weight(6, 1, 4), weight(6), [1], [3], [1], 6),
    "valid": (aten.conv1d.default, X, weight(4, 3, 4), None, [1], [0], [2], 2),
    "wide": (aten.conv1d.default, X, weight(6, 1, 11), weight(6), [1], [5], [1], 6),
    "longer than the sequence": (aten.conv1d.default, X, weight(6, 1, 20), weight(6), [1], [19], [1], 6),
    "padded with more than it reads": (aten.conv1d.default, X, weight(2, 6, 2), weight(2), [1], [4]),
    "same": (aten.conv1d.padding, X, weight(4, 6, 4), weight(4), [1], "same", [3]),
    "without batch": (aten.conv1d.default, X[0], weight(4, 6, 3), weight(4), [1], [1]),
    "image": (aten.conv2d.default, IMAGE, weight(4, 3, 3, 3), weight(4), [1, 2], [1, 0]),
    "image, same": (aten.conv2d.padding, IMAGE, weight(4, 3, 2, 3), None, [1, 1], "same"),
    "convolution": (aten.convolution.default, X, weight(4, 3, 4), weight(4), [1], [2], [2], False, [0], 2),
    "cumsum": (aten.cumsum.default, X, 2),
    "cumsum of a line": (aten.cumsum.default, LINE, 0),
    "cumsum of integers": (aten.cumsum.default, (X > 0).int(), -1),
    "cumprod": (aten.cumprod.default, X, 2),
    "cumprod of a line": (aten.cumprod.default, LINE, 0),
    "cumprod with zeros": (aten.cumprod.default, ZEROS, 2),
    "logcumsumexp": (aten.logcumsumexp.default, X, 2),
    "logcumsumexp with -inf": (aten.logcumsumexp.default, HOLES, 2),
    "associative": (torch.ops.asp.associative_scan.default, MAPS, [], "affine"),
    "matrices": (torch.ops.asp.associative_scan.default, [values(13, 2, 2, seed=5)], [weight(1)], "product"),
    "flip": (aten.flip.default, X, [2, 0]),
    "roll": (aten.roll.default, X, [4, 1], [2, 1]),
}


def on_rank(node: fx.Node, recipe: Recipe, leaves: list[Tensor], mesh: DeviceMesh) -> Tensor:
    """What this rank computes from its pieces of the operands."""
    rank, ranks, group = seen(mesh)
    module = fx.GraphModule(nn.Module(), node.graph)
    inputs = tuple(Input(n.name, "data", False, "") for n in node.graph.find_nodes(op="placeholder"))
    facts = Facts({}, frozenset(), frozenset(), frozenset(), {}, ranks)
    low = Lowering(Captured(module, inputs, ()), facts, Spread(rank, ranks, group))
    taken = [low.graph.placeholder(f"x{i}") for i in range(len(recipe.demands))]
    low.graph.output(recipe.emit(low, taken))
    return last(fx.GraphModule(nn.Module(), low.graph)(*leaves))


def last(value: Any) -> Tensor:
    """The last result, which for an affine recurrence depends on everything."""
    return value[-1] if isinstance(value, tuple | list) else value


def compare(mesh: DeviceMesh, layout_name: str) -> None:
    for name in SAMPLES:
        try:
            _compare(mesh, name, layout_name)
        except Exception as reason:
            raise RuntimeError(f"{name}: {reason}") from reason


def _compare(mesh: DeviceMesh, name: str, layout_name: str) -> None:
    rank, ranks, _ = seen(mesh)
    node, tensors = node_of(*SAMPLES[name])
    split = Shard(tensors[0].shape.index(13), LAYOUTS[layout_name](13, ranks))
    ins: list[Placement] = [split if x.shape == tensors[0].shape else R for x in tensors]
    rule = rule_of(node)
    assert rule is not None
    recipe = rule.native(node, ins)
    if not all(split.layout.shards) and not isinstance(rule, Flip):
        assert recipe is None, "gathered"
        return
    assert recipe is not None and isinstance(recipe.out, Shard)
    wholes = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    it = iter(wholes)
    args, _ = fx.map_arg((node.args, {}), lambda _: next(it))
    runs = prefix.associative_scan if node.target is torch.ops.asp.associative_scan.default else node.target
    want = last(runs(*args))
    assert len(recipe.demands) == len(tensors)
    leaves = [
        piece(w.detach(), p, rank).requires_grad_(w.requires_grad) for w, (_, p) in zip(wholes, recipe.demands, strict=True)
    ]
    got = on_rank(node, recipe, leaves, mesh)
    torch.testing.assert_close(got, piece(want, recipe.out, rank), rtol=1e-12, atol=1e-12)
    if not got.is_floating_point():
        return
    upstream = values(*want.shape, seed=9)
    grads = torch.autograd.grad(want, wholes, upstream)
    mine = torch.autograd.grad(got, leaves, piece(upstream, recipe.out, rank))
    for grad, part, (_, placement) in zip(grads, mine, recipe.demands, strict=True):
        if isinstance(placement, Varying):
            torch.distributed.all_reduce(part, group=mesh.get_group("sp"))
        torch.testing.assert_close(part, piece(grad, placement, rank), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on", (2, 3, 4))
def test_values_and_gradients_are_those_of_the_whole(pool: Pool, on: int, layout: str) -> None:
    """Also where a rank holds fewer positions than a kernel reads; gathered where it holds none."""
    pool.run(compare, layout, on=on)


def partitioned(mesh: DeviceMesh, name: str) -> float:
    plain, parallel, inputs = twins(name, mesh, 33)
    loss = abs(step(plain, inputs) - step(parallel, inputs))
    return max(loss, gradient_error(plain, parallel))


@pytest.mark.parametrize("name", ["recurrence_checkpointed", "logcumsumexp", "both_ways", "unknown_prefix_conv"])
def test_the_first_rank_exchanges_what_others_do(pool: Pool, name: str) -> None:
    """Nothing comes before it, but PyTorch's partitioner leaves it each exchange where the other ranks have it."""
    assert max(pool.run(partitioned, name, on=4)) < EXACT


def rounded(mesh: DeviceMesh) -> float:
    """Largest error of a bfloat16 cumsum against float32."""
    rank, ranks, group = seen(mesh)
    x, layout = torch.rand(3, 4096, generator=torch.Generator().manual_seed(0)).bfloat16(), contiguous(4096, ranks)
    (a, b), exact = layout.shards[rank][0], x.float().cumsum(1)
    kind = (1, "cumsum", torch.bfloat16, layout.shards, rank)
    got = prefix.scanned(x[:, a:b], prefix.totals(x[:, a:b], *kind, group), *kind)
    assert got.dtype == torch.bfloat16
    return float(((got.float() - exact[:, a:b]) / exact[:, a:b]).abs().max())


def test_totals_are_not_rounded_to_16_bits(pool: Pool) -> None:
    assert max(pool.run(rounded, on=4)) <= 2**-8, "half a unit in the last place"


def test_a_scan_of_one_position_and_of_odd_lengths() -> None:
    for n in (1, 2, 3, 7, 8):
        xs = [x[:n] for x in MAPS]
        a, b = prefix.associative_scan(xs, [], "affine")
        h = torch.zeros(2, 3, dtype=torch.float64)
        for t in range(n):
            h = xs[0][t] * h + xs[1][t]
            torch.testing.assert_close(b[t], h)
        torch.testing.assert_close(a, xs[0].cumprod(0))


# What travels -------------------------------------------------------------------------------------

RANKS, SEQ, BATCH, WIDE = 4, 103, 2, 8


class Along(nn.Module):
    """`mix` applied to an embedding, and a mean: nothing else communicates."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(7, WIDE), mix

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.embed(ids)).square().mean()


class Causal(nn.Module):
    def __init__(self, size: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDE, WIDE, size, padding=(size - 1) * dilation, dilation=dilation, groups=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT)[..., : x.shape[1]].mT


def rolled(x: Tensor) -> Tensor:
    return torch.roll(x, 1, 1) * (torch.arange(x.shape[1]) > 0)[:, None]


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: nn.functional.pad(x, (0, 0, 1, -1)),
    "cat": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "module": nn.ZeroPad2d((0, 0, 1, -1)),
    "roll": rolled,
}


class Shifted(nn.Module):
    def __init__(self, shift: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift(x)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


def travelled(mix: nn.Module) -> tuple[int, int, list[Any]]:
    """Bytes sent by all ranks forward and backward besides sums of parameters' gradients and losses, and the plan's rows."""
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    traced = [trace(Along(mix), {"ids": ids}, RANKS, rank) for rank in range(RANKS)]
    plans = [t.compiled.plan for t in traced]
    assert all(p == plans[0] for p in plans) and plans[0].fallbacks == ()

    def sent(graph: int) -> int:
        return sum(n for rank, t in enumerate(traced) for k, n in t.sent(graph, RANKS, rank).items() if k != "all-reduce")

    return sent(0), sent(1), [c for c in plans[0].collectives if c.op not in ("sync", "psum")]


@pytest.mark.parametrize(("size", "dilation", "moved"), [(4, 1, 3), (4, 5, 15), (1, 1, 0)])
def test_a_causal_convolution_sends_one_halo(size: int, dilation: int, moved: int) -> None:
    """B·C·d(W-1) elements over each boundary between ranks, and as many back; what follows is in the old layout."""
    forward, backward, rows = travelled(Causal(size, dilation))
    over_boundaries = (RANKS - 1) * moved * BATCH * WIDE * 4
    assert forward == backward == over_boundaries
    priced = [("halo", over_boundaries // RANKS, over_boundaries // RANKS)] if moved else []
    assert [(c.op, c.bytes_forward, c.bytes_backward) for c in rows] == priced


def test_a_kernel_longer_than_a_shard_reads_from_several_ranks() -> None:
    forward, backward, _ = travelled(Causal(60))
    starts = [a for ((a, _),) in contiguous(SEQ, RANKS).shards]
    assert forward == backward == sum(min(a, 59) for a in starts) * BATCH * WIDE * 4


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_token_shift_moves_the_positions_at_boundaries(shift: str) -> None:
    """One position over each boundary; a roll also brings the last one round to the front."""
    forward, backward, rows = travelled(Shifted(SHIFTS[shift]))
    moved = RANKS if shift == "roll" else RANKS - 1
    assert forward == backward == moved * BATCH * WIDE * 4
    assert [(c.op, c.count, c.bytes_forward, c.bytes_backward) for c in rows] == [
        ("relayout", 1, forward // RANKS, backward // RANKS)
    ]


def test_a_scan_sends_one_total_a_rank() -> None:
    """All-gather of B·C elements, reduce-scatter of their cotangents."""
    forward, backward, rows = travelled(Summed())
    assert forward == backward == RANKS * (RANKS - 1) * BATCH * WIDE * 4
    assert [(c.op, c.bytes_forward, c.bytes_backward) for c in rows] == [("totals", forward // RANKS, backward // RANKS)]
