"""Steps that keep different things for backward: time and peak memory of a small Llama, forward and backward.

    torchrun --nproc_per_node 4 benchmarks/memory_step.py --out memory_step.jsonl

float32, one sequence, causal attention. "attention" keeps layers' inputs and attentions' outputs, "full" layers' inputs alone,
"none" computes nothing again. Memory is the process's peak over the step, above what it holds before it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import autosp
from benchmarks.timing import arguments, finish, measure, rows, table

KEPT = ("attention", "full", "none")


def model(hidden: int, layers: int, seq: int) -> torch.nn.Module:
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=256, max_position_embeddings=seq, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def peak_above(step: Callable[[], object]) -> float:
    """MB that a step takes at its peak above what the process holds before it (Linux; the slowest rank's, as the most)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _status("VmRSS")
    step()
    most = torch.tensor(_status("VmHWM") - before)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item() / 1024


def _status(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return float(line.split()[1])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--strategy", default="balanced-ring")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    ids = torch.randint(0, 256, (1, args.seq), generator=torch.Generator().manual_seed(0))
    steps: dict[str, Callable[[], object]] = {}
    for kept in KEPT:
        net = model(args.hidden, args.layers, args.seq)
        autosp.parallelize(
            net, mesh, compiler="aot_eager", memory=kept, strategy=args.strategy, outputs="loss", check_batch=False
        )

        def step(net: torch.nn.Module = net) -> None:
            net.zero_grad()
            net(input_ids=ids, labels=ids).loss.backward()

        step()
        steps[kept] = step
    peaks = {kept: [peak_above(step) for _ in range(3)] for kept, step in steps.items()}
    timings = measure(steps, args.rounds, args.patience)
    found = rows(timings, ["full"], seq=args.seq)
    for row in found:
        row["peak_mb"] = sorted(peaks[row["name"]])[1]
    shown = table(f"S = {args.seq}, {args.strategy}", found, "seq", {args.seq: f"S = {args.seq}"}, "full")
    if dist.get_rank() == 0:
        print("peak of a step, MB:", ", ".join(f"{row['name']} {row['peak_mb']:.0f}" for row in found))
    finish(shown, found, args.out)


if __name__ == "__main__":
    main()
