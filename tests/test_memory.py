"""No rank ever builds rows x columns of a long sequence, neither when it runs nor when it plans."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import FULL
from lowered import trace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import autosp
from autosp import launch
from autosp.kernels import attend

WINDOW = 1024
LIMIT_GB = 1.5
FAMILIES = {"causal": "llama", "window": "mistral"}


def one_layer(mask: str, seq_len: int, heads: int = 2) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """One layer of hidden size 64 with the mask that transformers builds, in float32."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 1}
    window = {"sliding_window": WINDOW} if mask == "window" else {}
    config = AutoConfig.for_model(
        FAMILIES[mask], num_attention_heads=heads, use_cache=False, max_position_embeddings=seq_len, **sizes, **window
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (1, seq_len))
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


def peak_gb() -> float:
    """Of this program: what `getrusage` says starts from the process that it was forked from."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / (1 << 20)


def in_fresh_processes(target: Any, count: int, *args: Any, timeout: float = 280.0) -> list[Any]:
    """`target(rank, count, port, *args)` in processes of its own, so that peaks are its own; their results."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with launch.context().Pool(count) as pool:
        return pool.starmap_async(target, [(r, count, port, *args) for r in range(count)], chunksize=1).get(timeout)


def step_peak(rank: int, ranks: int, port: int, mask: str, strategy: str, seq_len: int) -> tuple[float, float, bool]:
    """Peak memory of one training step, its loss, and whether every gradient is finite."""
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, inputs = one_layer(mask, seq_len)
    model = autosp.parallelize(module, strategy=strategy, compiler="aot_eager")
    loss = model(**inputs).loss
    loss.backward()
    assert model.autosp_plan.sites[0].strategy == strategy
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    dist.destroy_process_group()
    return peak_gb(), loss.item(), finite


LONG = [("window", "all-to-all"), ("window", "halo"), ("causal", "balanced-ring")]
if FULL:
    LONG += [(mask, s) for mask in ("causal", "window") for s in ("all-to-all", "gather-kv", "ring", "balanced-ring")]


@pytest.mark.parametrize(("mask", "strategy"), LONG)
def test_a_long_step_stays_under_the_limit(mask: str, strategy: str) -> None:
    """A boolean mask of 32,768 x 32,768 alone would be 1.1 GB, one of 65,536 x 65,536 4.3 GB."""
    results = in_fresh_processes(step_peak, 2, mask, strategy, 1 << 16 if FULL else 1 << 15)
    assert all(peak < (LIMIT_GB if FULL else 1.0) for peak, _, _ in results), results
    assert all(finite and 3 < loss < 6 for _, loss, finite in results), results
    assert len({loss for _, loss, _ in results}) == 1


class Largest(TorchDispatchMode):
    """The most elements any operator's result has had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, list | tuple) else [result]:
            if isinstance(x, Tensor):
                Largest.elements = max(Largest.elements, x.numel())
        return result


@pytest.mark.parametrize("mask", FAMILIES)
def test_the_largest_tensor_is_a_block_of_rows(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted inside the blocks of a whole step, and over every value of the forward and backward graphs."""
    seq_len = 8192
    block = attend.RowProgram.block

    def counted(self: attend.RowProgram, leaves: list[Tensor], at: attend.Block) -> Tensor:
        with Largest():
            return block(self, leaves, at)

    Largest.elements = 0
    monkeypatch.setattr(attend.RowProgram, "block", counted)
    module, inputs = one_layer(mask, seq_len)
    autosp.parallelize(module, strategy="gather-kv", compiler="aot_eager")(**inputs).loss.backward()
    if mask == "window":  # the causal mask of a whole sequence is the attention kernel's own
        assert 0 < Largest.elements <= attend.BLOCK_ELEMENTS
    traced = trace(*one_layer(mask, seq_len), 2, strategy="gather-kv")
    values = [n.meta["val"] for graph in (0, 1) for n in traced.nodes(graph) if isinstance(n.meta.get("val"), Tensor)]
    assert max(v.numel() for v in values) <= seq_len * 64


def plan_peak(rank: int, ranks: int, port: int, mask: str, strategy: str) -> tuple[float, str]:
    traced = trace(*one_layer(mask, 1 << 20, heads=64), 64, 17, backward=False, strategy=strategy)
    return peak_gb(), traced.compiled.plan.sites[0].sees


@pytest.mark.parametrize(("mask", "strategy"), [("causal", "gather-kv"), ("window", "all-to-all")])
def test_a_million_tokens_are_planned_without_allocating_them(mask: str, strategy: str) -> None:
    """One mask of a million rows and columns would be a terabyte."""
    peak, seen = in_fresh_processes(plan_peak, 1, mask, strategy)[0]
    assert peak < LIMIT_GB
    assert seen == ("mask causal" if mask == "causal" else "mask by rows")
