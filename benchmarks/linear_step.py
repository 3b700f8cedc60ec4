"""How much slower than its own arithmetic is one linear attention, forward and backward, when ranks have slow links between them?

    emulated_cluster.sh 4 500mbit python benchmarks/linear_step.py      # one process a rank; torchrun does as well

16 heads with states of 128 x 128, 2048 tokens a rank, batch 1, float32; a decay per head ("scalar"), per row of the state
("vector"), or per head with the delta rule ("delta"). Each round times each contender once: a barrier, forward and backward,
the slowest rank's milliseconds. Medians and quartiles; ratios are to "alone", the same kernels on the same tokens with no
state from elsewhere, all ranks at once. Ours overlap what needs no state with the exchange. The others are what is
published, on the same kernels:

    gather, blocking    every rank gathers all (A, S), folds those before it and goes on (LASP-2; with "delta", A is a matrix)
    chain, blocking     one state from rank to rank in one piece, and everyone waits (LASP-1)

Before it is timed, every contender's output and gradients are compared with the chain's. "Exchange" rows send the same
states forward and backward and compute nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from autosp.kernels import all_scan, linear
from autosp.kernels.all_scan import ALONE, Scan
from benchmarks.timing import arguments, finish, measure, rows, table

HEADS, WIDTH, TOKENS = 16, 128, 2048
KINDS = ("scalar", "vector", "delta")
OURS = {"all-scan": "chain", "log-step": "log-step", "two-level": "two-level", "gather-states": "gather"}
TOLERANCE = 1e-4  # relative to the largest value: float32 sums in another order

Step = Callable[[], list[Tensor]]


def operands(kind: str) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(dist.get_rank())
    size = (1, TOKENS, HEADS, WIDTH)
    q, k, v = (torch.randn(size, generator=draw) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay = -torch.rand(size if kind == "vector" else size[:3], generator=draw) / 64
    remove = k * decay.exp()[..., None] if kind == "delta" else None
    return [x if x is None else x.requires_grad_() for x in (q, k, v, decay, remove)]


def contender(kind: str, scan: Scan, wait_at_once: bool = False) -> Step:
    xs = operands(kind)
    given = [x for x in xs if x is not None]
    grad = torch.randn(1, TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> list[Tensor]:
        launched = all_scan._launched
        if wait_at_once:
            all_scan._launched = _finished
        try:
            out, _ = linear.LinearAttention.apply(*xs, None, None, None, WIDTH**-0.5, False, scan, True)
            return [out.detach(), *torch.autograd.grad(out, given, grad)]
        finally:
            all_scan._launched = launched

    return step


def _finished(work: Callable[[], list[Tensor]], device: torch.device) -> Any:
    """No overlap: the exchange is over before anything else is computed."""
    with torch.no_grad():
        result = work()

    class Done:
        def result(self) -> list[Tensor]:
            return result

    return Done()


def exchange(scan: Scan) -> Step:
    inputs = [torch.rand(1, HEADS, 1, 1), torch.randn(1, HEADS, WIDTH, WIDTH)]

    def step() -> list[Tensor]:
        for each in (scan, scan.back()):
            all_scan.start(each, "affine", inputs, None, None).wait()
        return []

    return step


def contenders(kind: str) -> dict[str, Step]:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    steps = {"alone": contender(kind, ALONE)}
    for name, algorithm in OURS.items():
        steps[name] = contender(kind, Scan(algorithm, rank, ranks, group, blocks=8, node=2))
    steps["gather, blocking"] = contender(kind, Scan("gather", rank, ranks, group), True)
    steps["chain, blocking"] = contender(kind, Scan("chain", rank, ranks, group, blocks=1), True)
    for name, algorithm in (("exchange: all-scan", "chain"), ("exchange: gather", "gather")):
        steps[name] = exchange(Scan(algorithm, rank, ranks, group))
    right = steps["all-scan"]()
    for name in (*OURS, "gather, blocking", "chain, blocking"):
        for found, want in zip(steps[name](), right, strict=True):
            error = ((found - want).abs().max() / want.abs().max()).item()
            if not error < TOLERANCE:
                raise SystemExit(f"{name}, {kind}, rank {rank}: wrong by {error:.1e}")
    return steps


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for kind in args.kinds:
        found += rows(measure(contenders(kind), args.rounds, args.patience), ("alone",), kind=kind)
    title = f"{TOKENS} tokens a rank, {HEADS} heads of {WIDTH} x {WIDTH}, float32"
    finish(table(title, found, "kind", {kind: kind for kind in args.kinds}, "alone"), found, args.out)


if __name__ == "__main__":
    main()
