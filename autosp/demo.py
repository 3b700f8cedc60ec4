"""`autosp demo`: train a small byte-level Llama on long text, on several ranks and on one, and compare the two runs."""

from __future__ import annotations

import os
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autosp.check import NORM_FLOOR, relative_error
from autosp.launch import run_ranks

VOCAB = 256  # one token a byte
TIMEOUT_SECONDS = 1800.0
Send = Callable[[tuple[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    """Both runs are made from these: the same weights, the same text, the same optimizer."""

    steps: int = 16
    seq_len: int = 8192
    ranks: int = 4
    strategy: str | None = None
    compiler: str = "aot_eager"
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2
    learning_rate: float = 3e-3
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """What one rank saw: a loss for each step, the gradients of the first step, seconds a step after the first."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    first_step_seconds: float
    step_seconds: float


def run_demo(settings: Settings, out: Path, console: Console) -> None:
    """Train twice, print the plan and the differences, save the loss curves as a PNG at `out`."""
    title = f"a byte-level Llama, {settings.layers} layers of width {settings.hidden}, on {settings.seq_len} bytes a step"
    console.print(Text(f"{title}: first on {settings.ranks} ranks, then in one process", style="bold"), soft_wrap=True)
    with _progress(console) as progress:
        parallel = _train(settings, settings.ranks, progress, console)
        single = _train(settings, 1, progress, console)
    save_curves(parallel[0].losses, single[0].losses, settings, out)
    loss, grads = differences(parallel, single[0])
    curves = f"loss {single[0].losses[0]:.3f} to {single[0].losses[-1]:.3f} in {settings.steps} steps, curves in {out}"
    for line in (f"{settings.ranks} ranks: {_timing(parallel[0])}", f"one process: {_timing(single[0])}", curves):
        console.print(Text(line), soft_wrap=True)
    verdict = f"largest relative difference, float32: loss {loss:.1e} over all steps, gradients {grads:.1e} at the first"
    console.print(Text(verdict, style="bold"), soft_wrap=True)


def differences(parallel: list[Run], single: Run) -> tuple[float, float]:
    """Largest relative difference of the losses over all steps, and of the first step's gradients, over all ranks."""
    whole = float(torch.stack([g.double().norm() for g in single.grads.values()]).norm())
    losses = [abs(p - s) / abs(s) for run in parallel for p, s in zip(run.losses, single.losses, strict=True)]
    grads = [relative_error(run.grads[name], g, NORM_FLOOR * whole) for run in parallel for name, g in single.grads.items()]
    return max(losses), max(grads)


def _train(settings: Settings, ranks: int, progress: Progress, console: Console) -> list[Run]:
    name = f"{ranks} ranks" if ranks > 1 else "one process"
    task = progress.add_task(f"{name}: {'capture, plan, first step' if ranks > 1 else 'first step'}", total=settings.steps)

    def show(message: tuple[str, Any]) -> None:
        kind, value = message
        if kind == "plan":
            console.print(Text(value), soft_wrap=True)
        else:
            progress.update(task, advance=1, description=f"{name}: loss {value:.3f}")

    threads = 1 if ranks > 1 else os.cpu_count() or 1
    return run_ranks(train, {"sp": ranks}, settings, timeout=TIMEOUT_SECONDS, threads=threads, on_message=show)


def train(mesh: DeviceMesh, settings: Settings, send: Send | None = None) -> Run:
    """One rank's training run: the plain model on a mesh of one rank, else the parallelized one."""
    import autosp

    model = build_model(settings)
    text = standard_library(settings.steps * settings.seq_len)
    if mesh.size() > 1:
        model = autosp.parallelize(model, mesh, compiler=settings.compiler, strategy=settings.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses, grads, times = [], {}, [time.perf_counter()]
    for step in range(settings.steps):
        ids = text[step * settings.seq_len : (step + 1) * settings.seq_len][None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if step == 0:
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            if send and mesh.size() > 1:
                send(("plan", str(model.autosp_plan)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter())
        if send:
            send(("loss", losses[-1]))
    later = (times[-1] - times[1]) / max(1, settings.steps - 1)
    return Run(losses, grads, times[1] - times[0], later)


def build_model(settings: Settings) -> Any:
    """A transformers Llama in float32 with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=settings.hidden,
        intermediate_size=8 * settings.hidden // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.seq_len,
        use_cache=False,
    )
    torch.manual_seed(settings.seed)
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def standard_library(length: int) -> torch.Tensor:
    """The first `length` bytes of this Python's own library sources, file after file by name: [length], int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= length:
            break
    if not data:
        raise FileNotFoundError(f"no Python sources in {folder}: the demo trains on them")
    data *= -(-length // len(data))  # a long run goes over the text again
    return torch.frombuffer(data[:length], dtype=torch.uint8).long()


def save_curves(parallel: list[float], single: list[float], settings: Settings, out: Path) -> None:
    """Both loss curves, and below them their relative difference, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=[3, 1], layout="constrained")
    steps = range(1, len(single) + 1)
    above.plot(steps, single, color="tab:orange", linewidth=6, alpha=0.4, label="one process")
    above.plot(steps, parallel, color="tab:blue", marker="o", markersize=4, label=f"{settings.ranks} ranks, autosp")
    above.set_ylabel("loss (nats a byte)")
    above.set_title(f"Llama on the Python standard library, {settings.seq_len} bytes a sequence")
    above.legend()
    below.semilogy(
        steps, [max(abs(p - s) / abs(s), 1e-9) for p, s in zip(parallel, single, strict=True)], color="tab:gray", marker="."
    )
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _timing(run: Run) -> str:
    return f"first step {run.first_step_seconds:.1f} s, then {run.step_seconds:.2f} s a step"
