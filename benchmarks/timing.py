"""Steps timed on all ranks at once, in rounds that other processes left alone."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOREIGN = 0.1  # of the cores' time: a timing during which other processes had more is taken again
LOOK = 0.2  # seconds for which they must have had less before a timing starts


@dataclass(frozen=True)
class Timing:
    """ms: of the slowest rank, all having started together; foreign: the cores' time that other processes' code had meanwhile."""

    ms: float
    foreign: float


def once(step: Callable[[], object], until: float) -> Timing:
    while dist.get_rank() == 0 and time.monotonic() < until:  # the others wait at the barrier
        before = _user_seconds()
        time.sleep(LOOK)
        if _user_seconds() - before < FOREIGN * LOOK * (os.cpu_count() or 1):
            break
    dist.barrier()
    start, everyone, own = time.perf_counter(), _user_seconds(), os.times().user
    step()
    slowest = torch.tensor([time.perf_counter() - start, _user_seconds() - everyone], dtype=torch.float64)
    used = torch.tensor([os.times().user - own], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    seconds, total = slowest.tolist()
    return Timing(seconds * 1e3, max(0.0, total - used.item()) / seconds / (os.cpu_count() or 1))


def _user_seconds() -> float:
    """All processes' time outside the kernel, on all cores, and what the hypervisor took (Linux)."""
    user, nice, *_, steal = Path("/proc/stat").read_text().split()[1:9]
    return (int(user) + int(nice) + int(steal)) / os.sysconf("SC_CLK_TCK")


def measure(steps: Mapping[str, Callable[[], object]], rounds: int, patience: float) -> dict[str, list[Timing]]:
    """Timings by name, each step once a round. For `patience` seconds it waits for quiet, and takes those that others
    disturbed again.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    last = time.monotonic() + patience
    while any(sum(t.foreign <= FOREIGN for t in each) < rounds for each in timings.values()):
        for name, step in steps.items():
            timings[name].append(once(step, last))
        if _agreed(time.monotonic() > last) and len(next(iter(timings.values()))) >= rounds:
            break
    gc.enable()
    return {name: _undisturbed(each, rounds) for name, each in timings.items()}


def _undisturbed(each: list[Timing], rounds: int) -> list[Timing]:
    quiet = [t for t in each if t.foreign <= FOREIGN]
    return quiet if len(quiet) >= rounds else sorted(each, key=lambda t: t.foreign)[:rounds]


def _agreed(mine: bool) -> bool:
    late = torch.tensor(int(mine))
    dist.broadcast(late, 0)
    return bool(late)


def rows(timings: Mapping[str, list[Timing]], alone: Sequence[str], **labels: Any) -> list[dict[str, Any]]:
    """Per contender: lower quartile, median and upper quartile in ms, and the same ÷ the least median of those `alone`."""
    unit = min(statistics.median(t.ms for t in timings[name]) for name in alone)
    out = []
    for name, each in timings.items():
        spread = statistics.quantiles([t.ms for t in each], n=4, method="inclusive") if len(each) > 1 else [each[0].ms] * 3
        ms, ratio = ([round(x / by, 3) for x in spread] for by in (1, unit))
        foreign = round(statistics.mean(t.foreign for t in each), 3)
        out.append({**labels, "name": name, "rounds": len(each), "foreign": foreign, "ms": ms, "ratio": ratio})
    return out
