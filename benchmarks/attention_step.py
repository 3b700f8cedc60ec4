"""How much slower than its own arithmetic is one attention, forward and backward, when ranks have slow links between them?

    emulated_cluster.sh 4 500mbit python benchmarks/attention_step.py      # one process a rank; torchrun does as well

Causal attention of 8 query heads and 8 or 2 key/value heads, S=4096, D=64, batch 1, float32. Each round times each contender
once, all in one process group: a barrier, forward and backward, the slowest rank's milliseconds. Medians and quartiles over
the rounds that other processes left alone (`FOREIGN`); ratios are to "compute alone", the faster of

    heads   H/P heads over all positions: what all-to-all computes when nothing has to travel
    tiles   the blocks of the head-tail ring with their merges, as if all of them had arrived

with all ranks computing at once, as in the other rows. Both are 1/P of the work, the same on each rank. Ours are compiled by
`autosp.parallelize`, with three scalar parameters for which there is a backward pass (under 1 % of the step). The peer is
torch's own ring attention, on the CPU kernel. Every contender's output is compared with plain attention before it is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

import autosp
from autosp.kernels import flash
from autosp.kernels.comm import take
from autosp.kernels.layout import Layout, contiguous, head_tail
from autosp.kernels.schedule import Tile, Tiling, owner_computes
from autosp.kernels.sight import Causal
from benchmarks.timing import arguments, finish, measure, rows, table

aten = torch.ops.aten
SEQ, HEADS, HEAD_DIM = 4096, 8, 64
TOLERANCE = 1e-4  # of an output or gradient, relative to the largest value: float32 sums in another order
STRATEGIES = {
    "all-to-all": contiguous,
    "all-to-all, 2 turns": contiguous,
    "gather-kv": contiguous,
    "ring": head_tail,
    "balanced-ring": contiguous,
    "ring-a2a": head_tail,
}
ALONE = ("heads alone", "tiles alone")
PEER = "torch ring template"


@dataclass(frozen=True)
class Contender:
    """`step` is the forward and backward pass. After one, `result` gives this rank's rows of the output, in `layout`, and the
    derivatives of the cotangent's product with it when q, k and v grow by a common factor, [3].
    """

    step: Callable[[], object]
    layout: Layout | None = None
    result: Callable[[], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class Problem:
    """The same random q [1, H, S, D], k and v [1, H_kv, S, D], and cotangent on every rank."""

    kv_heads: int
    rank: int
    ranks: int

    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seeded = torch.Generator().manual_seed(self.kv_heads)
        q, k, v, grad = (torch.randn(1, h, SEQ, HEAD_DIM, generator=seeded) for h in (HEADS, self.kv_heads, self.kv_heads, HEADS))
        return q, k, v, grad

    def mine(self, x: Tensor, layout: Layout) -> Tensor:
        return take(x, 2, layout.shards[self.rank]).contiguous()

    @functools.cached_property
    def plain(self) -> tuple[Tensor, Tensor]:
        """What contenders give, from plain attention: the whole output, and the derivatives."""
        *qkv, grad = self.values()
        leaves = [x.requires_grad_() for x in qkv]
        out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, grad)
        return out.detach(), torch.stack([(x * g).sum() for x, g in zip(leaves, grads, strict=True)]).detach()

    def check(self, name: str, contender: Contender) -> None:
        contender.step()
        if contender.layout is None or contender.result is None:
            return
        out, slopes = self.plain
        for found, right in zip(contender.result(), (self.mine(out, contender.layout), slopes), strict=True):
            error = ((found - right).abs().max() / right.abs().max()).item()
            if not error < TOLERANCE:
                raise SystemExit(f"{name}, {self.kv_heads} key/value heads, rank {self.rank}: wrong by {error:.1e}")


# Compute alone ------------------------------------------------------------------------------------


def heads_alone(problem: Problem) -> Contender:
    q, k, v, grad = (x[:, : max(1, x.shape[1] // problem.ranks)].contiguous() for x in problem.values())
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def step() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return Contender(step)


def tiles_alone(problem: Problem) -> Contender:
    """Columns of other ranks are this rank's: only their number matters."""
    layout = head_tail(SEQ, problem.ranks)
    q, k, v, grad = (problem.mine(x, layout) for x in problem.values())
    schedule = owner_computes(Causal(), layout, layout, Tiling(True, 1 << 22))
    tiles = [tile for t in schedule.steps for job in schedule.jobs(t, problem.rank) for tile in job.tiles]

    def cut(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        return q[:, :, slice(*tile.rows)], k[:, :, slice(*tile.cols)], v[:, :, slice(*tile.cols)]

    def step() -> None:
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for t in tiles:
            rows = slice(*t.rows)
            flash.merge_(out[:, :, rows], lse[:, :, rows], *flash.forward(*cut(t), t.kind == "causal", None, None))
        delta = (grad * out).sum(-1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for t in tiles:
            rows, cols = slice(*t.rows), slice(*t.cols)
            saved = grad[:, :, rows], *cut(t), lse[:, :, rows], delta[:, :, rows]
            grads = flash.backward(*saved, t.kind == "causal", None, None)
            for total, part, at in zip((dq, dk, dv), grads, (rows, cols, cols), strict=True):
                total[:, :, at].add_(part)

    return Contender(step)


# Contenders ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention of q, k and v, each times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.ones(())) for _ in range(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * self.q, k * self.k, v * self.v, is_causal=True, enable_gqa=True)


def ours(problem: Problem, name: str, mesh: DeviceMesh) -> Contender:
    *qkv, whole = problem.values()
    layout = STRATEGIES[name](SEQ, problem.ranks)
    grad, outs = problem.mine(whole, layout), list[Tensor]()
    strategy, _, turns = name.partition(", ")
    options = {"compiler": "aot_eager", "seq_dim": {"q": 2, "k": 2, "v": 2}, "check_batch": False}
    model = autosp.parallelize(Attention(), mesh, strategy=strategy, **options)
    if strategy == "all-to-all":
        model(*qkv)
        planned = dataclasses.replace(model.autosp_plan.sites[0], params={"turns": int(turns[0])} if turns else {})
        model = autosp.parallelize(Attention(), mesh, plan=dataclasses.replace(model.autosp_plan, sites=(planned,)), **options)

    def step() -> None:
        model.zero_grad()
        outs[:] = [model(*qkv)]
        outs[0].backward(grad)

    step()
    plan = model.autosp_plan
    assert [site.strategy for site in plan.sites] == [strategy] and not plan.fallbacks, str(plan)
    return Contender(step, layout, lambda: (outs[0], torch.stack([p.grad for p in model.parameters()])))


class TorchRing(torch.autograd.Function):
    """torch's private ring attention for the head-tail layout, over its CPU kernel; it takes as many key/value as query heads."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        op = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torch_ring._templated_ring_attention(dist.group.WORLD, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        def op(is_causal: bool, **saved: Tensor) -> tuple[Tensor, ...]:
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(dropout_p=0.0, is_causal=is_causal, **saved)

        saved = ctx.saved_tensors
        ring = torch_ring._templated_ring_attention_backward
        return ring(dist.group.WORLD, 2, op, grad, "grad_out", *saved, is_causal=True)[:3]


def peer(problem: Problem) -> Contender:
    layout = head_tail(SEQ, problem.ranks)
    *qkv, grad = (problem.mine(x, layout) for x in problem.values())
    leaves, outs, groups = [x.requires_grad_() for x in qkv], list[Tensor](), HEADS // problem.kv_heads

    def step() -> None:
        for x in leaves:
            x.grad = None
        q, k, v = leaves
        if groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        outs[:] = [TorchRing.apply(q, k, v)]
        outs[0].backward(grad)

    def result() -> tuple[Tensor, Tensor]:
        slopes = torch.stack([(x * x.grad).sum() for x in leaves]).detach()
        dist.all_reduce(slopes)
        return outs[0], slopes

    return Contender(step, layout, result)


# Timing -------------------------------------------------------------------------------------------


def contenders(problem: Problem, mesh: DeviceMesh, only: Sequence[str]) -> dict[str, Contender]:
    """Each is checked first."""
    found = {ALONE[0]: heads_alone(problem), ALONE[1]: tiles_alone(problem)}
    for name in STRATEGIES:
        if not only or name in only:
            found[name] = ours(problem, name, mesh)
    if not only or PEER in only:
        found[PEER] = peer(problem)
    for name, contender in found.items():
        problem.check(name, contender)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--only", nargs="+", default=[], help="contenders beside compute alone")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    found: list[dict[str, Any]] = []
    for kv_heads in args.kv_heads:
        problem = Problem(kv_heads, dist.get_rank(), dist.get_world_size())
        steps = {name: contender.step for name, contender in contenders(problem, mesh, args.only).items()}
        found += rows(measure(steps, args.rounds, args.patience), ALONE, kv_heads=kv_heads)
    heads = {n: f"H_kv={n}" for n in args.kv_heads}
    title = f"S={SEQ}, H={HEADS}, D={HEAD_DIM}, float32"
    finish(table(title, found, "kv_heads", heads, "compute alone"), found, args.out)


if __name__ == "__main__":
    main()
