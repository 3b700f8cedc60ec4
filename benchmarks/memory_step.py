"""Steps that keep different things for backward: time and peak memory of a small Llama, forward and backward.

    torchrun --nproc_per_node 4 benchmarks/memory_step.py --out memory_step.jsonl

float32, one sequence, causal attention. "qkv" keeps layers' inputs and what attentions read and gave, "attention" inputs and what
attentions gave, "full" inputs alone, "none" computes nothing again. Memory is the process's peak over the step above what it held
before; gradients are made in it, parameters are not.
"""

from __future__ import annotations

import argparse
import ctypes
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

KEPT = ("qkv", "attention", "full", "none")
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def model(args: argparse.Namespace) -> torch.nn.Module:
    """In the proportions of Llama 3."""
    config = AutoConfig.for_model(
        "llama", hidden_size=args.hidden, intermediate_size=args.hidden * 7 // 2, num_hidden_layers=args.layers, vocab_size=256,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=args.seq, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def mapped_from(size: int) -> None:
    """Memory of so many bytes and more goes back to the system when it is freed, and is not there for the next to take."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size)


def peak_above(step: Callable[[], object]) -> float:
    """MB that a step takes at its peak above what the process holds before it (Linux; of the rank with the most)."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
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
    mapped_from(1 << 16)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    ids = torch.randint(0, 256, (1, args.seq), generator=torch.Generator().manual_seed(0))
    steps: dict[str, Callable[[], object]] = {}
    for kept in KEPT:
        net = model(args)
        autosp.parallelize(
            net, mesh, compiler="aot_eager", memory=kept, strategy=args.strategy, outputs="loss", check_batch=False
        )

        def step(net: torch.nn.Module = net) -> None:
            net(input_ids=ids, labels=ids).loss.backward()
            net.zero_grad()

        steps[kept] = step
    peaks = {kept: peak_above(step) for kept, step in steps.items()}
    mapped_from(1 << 30)  # else each step would be given its memory anew
    timings = measure(steps, args.rounds, args.patience)
    found = rows(timings, ["full"], seq=args.seq)
    for row in found:
        row["peak_mb"] = peaks[row["name"]]
    shown = table(f"S = {args.seq}, {args.strategy}", found, "seq", {args.seq: f"S = {args.seq}"}, "full")
    if dist.get_rank() == 0:
        print("peak of a step, MB:", ", ".join(f"{row['name']} {row['peak_mb']:.0f}" for row in found))
    finish(shown, found, args.out)


if __name__ == "__main__":
    main()
