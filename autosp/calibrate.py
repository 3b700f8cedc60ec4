"""Measure this machine or cluster, and write what was found as a hardware table.

    a kernel       seconds = launch + FLOP ÷ rate, over several shapes
    a collective   seconds = latency + messages · message + bytes sent ÷ bandwidth, over several sizes and numbers of ranks

Both are fitted by least squares of the relative error, with no coefficient below 0.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autosp.cost_model.hardware import Hardware, HardwareError, Level, Link, Number
from autosp.measure import GPU, Samples, Settings, Transfer, measured

DISTURBED = 0.05  # share of the cores: a table says so where other processes had more

# From samples to a table ------------------------------------------------------------------------------


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients ≥ 0 of seconds ≈ Σ coefficient · column, by least squares of the relative error, and its median."""
    from scipy.optimize import nnls

    relative = np.asarray(rows, float) / np.asarray(seconds, float)[:, None]
    scale = relative.max(0)
    scale[scale == 0] = 1
    found = nnls(relative / scale, np.ones(len(seconds)))[0] / scale
    return found.tolist(), float(np.median(np.abs(relative @ found - 1)))


def hardware(samples: Samples, name: str, date: str) -> Hardware:
    """The table that a planner reads."""
    how = f"measured {date}, {samples.how}"
    if samples.others > DISTURBED:
        how += f", while other processes had {samples.others:.0%} of the cores"

    def number(value: float, unit: str, what: str) -> Number:
        return Number(float(f"{value:.4g}"), unit, f"{how}: {what}")

    rates, launch, fits = {}, {}, {}
    for kernel, calls in samples.kernels.items():
        (each, per_flop), error = fit([(1, c.flop) for c in calls], [c.seconds for c in calls])
        rates[kernel] = 1 / per_flop if per_flop else max(c.flop / c.seconds for c in calls)
        fits[kernel] = (
            f"{samples.dtype}, seconds = launch + FLOP / rate for {', '.join(c.shape for c in calls)}; median error {error:.0%}"
        )
        launch[kernel] = number(each, "s", fits[kernel])
    peak = max(rates.values())
    best = max(rates, key=lambda k: rates[k])
    peaks = {samples.dtype: number(peak, "FLOP/s", f"the fastest kernel's rate, {best}: {fits[best]}")}
    for dtype, share in samples.dtypes.items():
        peaks[dtype] = number(peak * share, "FLOP/s", f"a matrix product's rate is {share:.2g} of that in {samples.dtype}")
    size, seconds = samples.pointwise
    return Hardware(
        name=name,
        description=f"{samples.device}; {samples.how}",
        memory=number(samples.memory, "B", "what the system reports, shared by the ranks of a node on a CPU"),
        bandwidth=number(size / seconds, "B/s", f"c = a + b on float32 tensors of {size // 3} bytes, three times their bytes"),
        peak=peaks,
        efficiency={k: number(rate / peak, "share", f"of the peak; {fits[k]}") for k, rate in rates.items()},
        launch=launch,
        overlap=number(samples.overlap, "share", "(attention + hop - both at once) / hop, a hop of the largest message; median"),
        levels=tuple(
            Level(level, samples.reach[level], 1, links_of(transfers, number)) for level, transfers in samples.links.items()
        ),
        alone=number(samples.sharing, "times", "ranks for each core or GPU, at least 1"),
        host=number(samples.host[0] / samples.host[1], "B/s", f"{samples.host[0]} bytes, half of them each way")
        if samples.host
        else None,
    )


def links_of(transfers: Mapping[str, Sequence[Transfer]], number: Callable[[float, str, str], Number]) -> dict[str, Link]:
    links: dict[str, Link] = {}
    for kind, found in transfers.items():
        seconds, counts = [t.seconds for t in found], sorted({t.ranks for t in found})
        messages = max(t.messages for t in found)
        sent = sorted(t.sent for t in found)
        said = f"{kind} among {' and '.join(map(str, counts))} ranks, {sent[0]} to {sent[-1]} bytes sent"
        if kind == "p2p":
            (message, per_byte), error = fit([(1, t.sent) for t in found], seconds)
            latency, split = 0.0, "a hop of two tensors; all that it costs beside its bytes is its message"
        elif len(counts) > 1:
            (latency, message, per_byte), error = fit([(1, t.messages, t.sent) for t in found], seconds)
            split = "what grows with the number of ranks is the messages'"
        else:
            (call, per_byte), error = fit([(1, t.sent) for t in found], seconds)
            message = min(links["p2p"].message.value, call / messages)
            latency = max(0.0, call - message * messages)
            split = "one number of ranks: a message is taken to cost what a hop does, at most"
        rate = 1 / per_byte if per_byte else max(t.sent / t.seconds for t in found)
        what = f"{said}; median error {error:.0%}; {split}"
        links[kind] = Link(number(latency, "s", what), number(message, "s", what), number(rate, "B/s", what))
    return links


# The command ------------------------------------------------------------------------------------------


def _on_rank(mesh: Any, settings: Settings, dtype: str, ranks: int) -> Samples:
    return measured(settings, dtype, torch.device("cpu"), ranks)


def launched() -> bool:
    """Whether this process is a rank already: torchrun, or another launcher that says so the same way."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def calibrate(
    ranks: int, name: str, dtype: str = "float32", settings: Settings | None = None, timeout: float = 600.0
) -> Hardware | None:
    """Measure on the ranks that were launched, else on `ranks` gloo ranks of this machine. None on ranks other than the first.

    Raises HardwareError if one rank was launched, `RankFailed` if one of this machine's fails.
    """
    date = datetime.date.today().isoformat()
    if not launched():
        from autosp.launch import run_ranks

        found = run_ranks(_on_rank, {"sp": ranks}, settings or Settings(), dtype, ranks, timeout=timeout)[0]
        return hardware(found, name, date)
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise HardwareError("one rank has no links to measure; fix: launch two or more, or none and give --ranks")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        # Ranks in network namespaces of their own say nothing of LOCAL_WORLD_SIZE.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        samples = measured(settings or (GPU if cuda else Settings()), dtype, device, local)
        dist.barrier()  # a rank that leaves early takes its connections with it
        return hardware(samples, name, date) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
