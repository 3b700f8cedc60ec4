"""A simulated step as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing draw: a process is a rank, a
thread one of its streams or ports, times are microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from .simulator import COMPUTE, Event
from .training_step import Step

MICRO = 1e6
Row = dict[str, Any]


def trace(step: Step, drawn: int) -> str:
    """JSON of the first `drawn` ranks; messages from or to others are on the end that is drawn."""
    count = min(drawn, step.ranks)
    rows = list(_rows(step.events(), count))
    told = {"ranks": step.ranks, "ranks drawn": count, "seconds": step.makespan}
    return json.dumps({"displayTimeUnit": "ms", "otherData": told, "traceEvents": rows})


def _rows(events: Iterable[Event], ranks: int) -> Iterator[Row]:
    threads: dict[tuple[int, str], int] = {}  # (rank, name): number
    ends: dict[tuple[int, str], list[float]] = {}  # of a port's messages: when each of its threads is free
    for rank in range(ranks):
        yield _meta("process_name", rank, 0, name=f"rank {rank}")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        yield from _thread(threads, rank, COMPUTE)
    for e in sorted(events, key=lambda e: (e.start, e.stop, e.rank, e.stream, e.to)):
        for rank, name, other in _places(e):
            if rank >= ranks:
                continue
            if e.to >= 0:
                name = _free(ends.setdefault((rank, name), []), name, e)
            yield from _thread(threads, rank, name)
            row: Row = {"ph": "X", "name": e.name, "cat": "message" if e.to >= 0 else "compute", "pid": rank}
            start, stop = round(e.start * MICRO, 3), round(e.stop * MICRO, 3)
            row |= {"tid": threads[rank, name], "ts": start, "dur": round(stop - start, 3)}
            yield row | ({"args": other} if other else {})


def _places(e: Event) -> list[tuple[int, str, Row]]:
    """(Rank, thread, what it says) of an event: a message is drawn at both ends."""
    if e.to < 0:
        return [(e.rank, e.stream, {})]
    return [(e.rank, f"send, {e.stream}", {"to rank": e.to}), (e.to, f"receive, {e.stream}", {"from rank": e.rank})]


def _free(ends: list[float], name: str, e: Event) -> str:
    """Messages that pass a port at the same time are drawn on threads of their own."""
    number = next((i for i, end in enumerate(ends) if end <= e.start), len(ends))
    ends[number : number + 1] = [e.stop]
    return name if number == 0 else f"{name} ({number + 1})"


def _thread(threads: dict[tuple[int, str], int], rank: int, name: str) -> Iterator[Row]:
    if (rank, name) not in threads:
        threads[rank, name] = sum(1 for r, _ in threads if r == rank)
        yield _meta("thread_name", rank, threads[rank, name], name=name)
        yield _meta("thread_sort_index", rank, threads[rank, name], sort_index=threads[rank, name])


def _meta(kind: str, rank: int, thread: int, **args: Any) -> Row:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}
