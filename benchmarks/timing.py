"""Steps timed on all ranks at once, in rounds that other processes left alone."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

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


# A benchmark's command -----------------------------------------------------------------------------


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for others to be quiet")
    parser.add_argument("--out", type=Path, help="a file that takes one JSON line for each row")
    return parser


def table(title: str, found: Sequence[dict[str, Any]], key: str, heads: Mapping[Any, str], unit: str) -> Table:
    """A row for each contender; for each value of the label `key` its milliseconds and their ratio to `unit`."""
    shown = Table(title=f"{title}, {dist.get_world_size()} ranks: median (quartiles)")
    shown.add_column("")
    for head in heads.values():
        shown.add_column(f"{head}, ms", justify="right")
        shown.add_column(f"÷ {unit}", justify="right")
    for name in dict.fromkeys(row["name"] for row in found):
        cells = []
        for value in heads:
            row = next(row for row in found if (row["name"], row[key]) == (name, value))
            (a, b, c), (x, y, z) = row["ms"], row["ratio"]
            cells += [f"{b:.0f} ({a:.0f}..{c:.0f})", f"{y:.2f} ({x:.2f}..{z:.2f})"]
        shown.add_row(name, *cells)
    return shown


def finish(shown: Table, found: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Print and write on rank 0, and leave together."""
    if dist.get_rank() == 0:
        Console(width=150).print(shown)
        if out is not None:
            out.write_text("".join(json.dumps(row) + "\n" for row in found))
    dist.barrier()  # a rank that leaves early takes its connections with it
    dist.destroy_process_group()
