"""How good is the planner's choice on this machine? Every strategy that applies is timed, over a grid of settings.

    torchrun --nproc_per_node 4 -m autosp.cli calibrate --out cpu4.toml
    torchrun --nproc_per_node 4 benchmarks/regret.py --hardware cpu4.toml --out regret4.jsonl
    python benchmarks/regret.py --show regret2.jsonl regret4.jsonl

A setting is one attention or linear attention of a kind, a length and a number of heads, forward and backward, batch 1, float32,
head size 64 (states 64 × 64). Contenders of a setting are timed in turns; the regret is the median of the strategy
that the planner takes ÷ the least median, less one. Predicted and measured times stand side by side.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import normalize, scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

import autosp
import autosp.kernels.linear  # registers the operators
from autosp.passes.recurrence import RECURRENT
from autosp.passes.strategies import LOWERINGS
from benchmarks.timing import arguments, measure

SIZE, WINDOW, GOOD = 64, 256, 0.10
LENGTHS = (1024, 2048, 4096)
SOFTMAX = {"causal": (8, 8), "causal, GQA": (8, 2), "causal, MQA": (8, 1), "no mask": (8, 4), "window 256": (8, 4)}
LINEAR = {"scalar decay": 8, "decay per row": 8, "delta rule": 4}


@dataclass(frozen=True)
class Setting:
    kind: str
    seq: int

    @property
    def linear(self) -> bool:
        return self.kind in LINEAR

    @property
    def heads(self) -> tuple[int, int]:
        return (LINEAR[self.kind],) * 2 if self.linear else SOFTMAX[self.kind]


class Softmax(nn.Module):
    """One attention of q, k and v, each times a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v = (nn.Parameter(torch.ones(())) for _ in range(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = None
        if self.kind.startswith("window"):
            position = torch.arange(q.shape[2])
            offset = position[None, :] - position[:, None]
            seen = (offset <= 0) & (offset > -WINDOW)
        causal = self.kind.startswith("causal")
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q * self.q, k * self.k, v * self.v, seen, is_causal=causal, enable_gqa=grouped)


class Linear(nn.Module):
    """One linear attention, its operands each times a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v = (nn.Parameter(torch.ones(())) for _ in range(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decay = -(k[..., 0] if self.kind == "scalar decay" else k).sigmoid() / 16
        k, remove = k * self.k, None
        if self.kind == "delta rule":
            decay, remove = decay[..., 0], normalize(k, dim=-1)
        return torch.ops.asp.linear_attention(q * self.q, k, v * self.v, decay, remove, None, None, SIZE**-0.5, False)


def inputs(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    heads, few = setting.heads
    if setting.linear:
        return tuple(torch.randn(1, setting.seq, heads, SIZE, generator=draw) for _ in range(3))  # type: ignore[return-value]
    return tuple(torch.randn(1, h, setting.seq, SIZE, generator=draw) for h in (heads, few, few))  # type: ignore[return-value]


def contender(setting: Setting, mesh: DeviceMesh, strategy: str | None, hardware: str) -> tuple[Callable[[], object], Any]:
    """A step, and the plan's site. None lets the planner choose."""
    dim = 1 if setting.linear else 2
    model = (Linear if setting.linear else Softmax)(setting.kind)
    options = {"compiler": "aot_eager", "seq_dim": dict.fromkeys("qkv", dim), "check_batch": False, "hardware": hardware}
    autosp.parallelize(model, mesh, strategy=strategy, **options)
    values, grads = inputs(setting), list[Tensor]()

    def step() -> None:
        model.zero_grad()
        out = model(*values)
        if not grads:
            grads.append(torch.randn_like(out))
        out.backward(grads[0])

    step()
    return step, model.autosp_plan.sites[0]


def measured(setting: Setting, mesh: DeviceMesh, hardware: str, rounds: int, patience: float) -> dict[str, Any]:
    """Each applicable strategy's median and predicted milliseconds, and the one that the planner takes."""
    chosen = contender(setting, mesh, None, hardware)[1]
    steps, predicted = {}, {}
    for strategy in RECURRENT if setting.linear else LOWERINGS:
        step, site = contender(setting, mesh, strategy, hardware)
        if site.strategy == strategy:
            steps[strategy], predicted[strategy] = step, 1e3 * site.seconds.total
    timings = measure(steps, rounds, patience)
    torch._dynamo.reset()  # it would count the next setting as one more version of this one
    ms = {name: statistics.median(t.ms for t in each) for name, each in timings.items()}
    spread = {name: statistics.quantiles([t.ms for t in each], n=4) for name, each in timings.items()}
    return {
        "kind": setting.kind,
        "seq": setting.seq,
        "heads": setting.heads,
        "ranks": mesh.size(),
        "chosen": chosen.strategy,
        "ms": ms,
        "quartiles": spread,
        "predicted": predicted,
        "regret": ms[chosen.strategy] / min(ms.values()) - 1,
    }


def shown(found: Sequence[dict[str, Any]]) -> Iterator[Table | str]:
    table = Table(title="planner's choice against every strategy measured")
    for head in ("kind", "S", "heads", "P", "chosen", "ms (predicted)", "fastest", "ms (predicted)", "regret"):
        table.add_column(head)
    for row in found:
        best = min(row["ms"], key=row["ms"].get)
        times = [f"{row['ms'][s]:.1f} ({row['predicted'][s]:.1f})" for s in (row["chosen"], best)]
        heads = "/".join(map(str, row["heads"]))
        cells = [row["kind"], str(row["seq"]), heads, str(row["ranks"]), row["chosen"], times[0], best, times[1]]
        table.add_row(*cells, f"{100 * row['regret']:.0f} %")
    yield table
    good = sum(row["regret"] <= GOOD for row in found)
    yield f"within 10 % of the best measured: {good} of {len(found)} settings ({100 * good / len(found):.0f} %)"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--hardware", help="a file of `autosp calibrate` for this number of ranks")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--kinds", nargs="+", default=[*SOFTMAX, *LINEAR])
    parser.add_argument("--show", type=Path, nargs="+", help="print the table of files written before")
    args = parser.parse_args()
    if args.show:
        found = [json.loads(line) for path in args.show for line in path.read_text().splitlines()]
        for part in shown(found):
            Console(width=160).print(part)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    found = []
    for kind in args.kinds:
        for seq in args.lengths:
            found.append(measured(Setting(kind, seq), mesh, args.hardware, args.rounds, args.patience))
            if dist.get_rank() == 0:
                print(json.dumps(found[-1]), flush=True)
                if args.out:
                    args.out.write_text("".join(json.dumps(row) + "\n" for row in found))
    if dist.get_rank() == 0:
        for part in shown(found):
            Console(width=160).print(part)
    dist.barrier()  # a rank that leaves early takes its connections with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
