"""A step as events: what ranks compute and send, one op after what it waits for, on streams and ports.

An op is a computation on a stream of its rank, a message from a rank to another, or a pause. A stream runs its computations in
order. A message takes a sender's and a receiver's port of its level for as long as it lasts, its latency included. Each port has
lanes, which share it equally: a collective is a lane, hops between two ranks are another. In a lane one message follows another,
the first in the list first. Ports send and receive at once, and levels work at once.

What shares a rank slows down. The compute stream stands still while another stream of its rank computes, whose work was posted
first; k of those take k times as long. Of a message and a computation that run at the same time on a rank each goes
1 / (2 − φ) as fast. Alone they would take t and w seconds: together that is t + w − φ·min(t, w), so the share φ of what coincides
costs nothing, as `prices` counts it. A message is slowed where either of its ends computes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .errors import PlanningError

COMPUTE = "compute"
SAME = 1e-13  # of the time: what ends within it ends at once, whatever rounding did


@dataclass(frozen=True, slots=True)
class Op:
    """`seconds` if nothing else ran; `after`: numbers of ops in the list that must have ended. A message has a receiver `to`, the
    level of its link as `stream`, and a lane; a pause has no stream and takes none."""

    name: str
    rank: int
    seconds: float
    after: tuple[int, ...] = ()
    stream: str = ""
    to: int = -1
    lane: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """When an op ran. Of a message, `rank` sends and `to` receives."""

    rank: int
    stream: str
    name: str
    start: float
    stop: float
    to: int = -1


class SimulationError(PlanningError):
    """Ops that wait for one another."""


@dataclass(frozen=True)
class Timeline:
    """Computations and messages in order of their start, and when each rank was done, in seconds."""

    events: tuple[Event, ...]
    ends: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.ends)

    @cached_property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computed."""
        spent, until = [0.0] * self.ranks, [0.0] * self.ranks
        for e in self.events:
            if e.to < 0 and e.stop > until[e.rank]:
                spent[e.rank] += e.stop - max(e.start, until[e.rank])
                until[e.rank] = e.stop
        return tuple(spent)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds in which each rank did not, until the last one was done."""
        return tuple(self.makespan - b for b in self.busy)


def simulate(ops: Sequence[Op], ranks: int, overlap: float = 1.0, start: Sequence[float] | None = None) -> Timeline:
    """When each op runs, if it runs as soon as it can. overlap: φ. start: when each rank begins (0).

    Raises SimulationError where ops wait for one another.
    """
    return _Run(ops, ranks, overlap, start or [0.0] * ranks).run()


Port = tuple[int, str, bool]  # rank, level, whether it sends
Lane = tuple[int, str, bool, str]


class _Run:
    def __init__(self, ops: Sequence[Op], ranks: int, overlap: float, start: Sequence[float]) -> None:
        self.ops, self.ranks, self.slow = ops, ranks, 1 / (2 - overlap)
        self.start, self.now = start, 0.0
        count = len(ops)
        self.missing = [len(op.after) for op in ops]
        self.followers: list[list[int]] = [[] for _ in ops]
        self.queues: dict[tuple[int, str], list[int]] = {}  # computations of a stream, the last one first
        for i, op in enumerate(ops):
            for before in op.after:
                self.followers[before].append(i)
            if op.stream and op.to < 0:
                self.queues.setdefault((op.rank, op.stream), []).append(i)
        for queue in self.queues.values():
            queue.reverse()
        self.left = [op.seconds for op in ops]
        self.rate, self.since, self.version = [0.0] * count, [0.0] * count, [0] * count
        self.begun, self.ended = [-1.0] * count, [-1.0] * count
        self.computing: list[set[int]] = [set() for _ in range(ranks)]
        self.moving: list[set[int]] = [set() for _ in range(ranks)]
        self.waiting: dict[Lane, list[int]] = {}
        self.load: Counter[Port] = Counter()  # messages that pass it now
        self.taken: set[Lane | tuple[int, str]] = set()
        self.heap: list[tuple[float, int, int]] = []  # end, op, version; version −1: a rank begins

    def run(self) -> Timeline:
        for i, op in enumerate(self.ops):
            if not op.after:
                begins = max(self.start[rank] for rank in _ends(op))
                heapq.heappush(self.heap, (begins, i, -1))
        while self.heap:
            self.now = self.heap[0][0]
            until = self.now * (1 + SAME)
            ready: list[int] = []
            free: set[Lane] = set()
            changed: set[int] = set()
            while self.heap and self.heap[0][0] <= until:
                _, i, version = heapq.heappop(self.heap)
                if version < 0:
                    ready.append(i)
                elif version == self.version[i] and self.ended[i] < 0:
                    self._end(i, ready, free, changed)
            self._begin(ready, free, changed)
            for rank in changed:
                self._reprice(rank)
        return self._timeline()

    def _end(self, i: int, ready: list[int], free: set[Lane], changed: set[int]) -> None:
        op = self.ops[i]
        self.ended[i] = self.now
        if op.to >= 0:
            self.moving[op.rank].discard(i)
            self.moving[op.to].discard(i)
            for lane in _lanes(op):
                self.taken.discard(lane)
                self.load[lane[:3]] -= 1
                free.add(lane)
            changed.update((op.rank, op.to))
        elif op.stream:
            self.computing[op.rank].discard(i)
            self.taken.discard((op.rank, op.stream))
            changed.add(op.rank)
            queue = self.queues[op.rank, op.stream]
            if queue and not self.missing[queue[-1]]:
                ready.append(queue[-1])
        for follower in self.followers[i]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                ready.append(follower)

    def _begin(self, ready: list[int], free: set[Lane], changed: set[int]) -> None:
        """Start what can: computations and pauses that are ready, and messages, the first in the list first."""
        while ready:
            i = ready.pop()
            op = self.ops[i]
            if op.to >= 0:
                for lane in _lanes(op):
                    heapq.heappush(self.waiting.setdefault(lane, []), i)
                    free.add(lane)
            elif op.stream:
                self._compute(i, changed)
            elif op.seconds > 0:
                self._go(i, 1.0)
            else:
                self.begun[i] = self.now
                self._end(i, ready, free, changed)
        for lane in sorted(free):
            if lane not in self.taken:
                self._serve(lane, changed)

    def _compute(self, i: int, changed: set[int]) -> None:
        stream = self.ops[i].rank, self.ops[i].stream
        queue = self.queues[stream]
        if stream not in self.taken and queue and queue[-1] == i:
            queue.pop()
            self.taken.add(stream)
            self.computing[stream[0]].add(i)
            changed.add(stream[0])
            self._go(i, 0.0)

    def _serve(self, lane: Lane, changed: set[int]) -> None:
        """Start the first message waiting for a free lane whose other end is free."""
        queue, aside = self.waiting.get(lane, []), []
        while queue:
            i = heapq.heappop(queue)
            op = self.ops[i]
            if self.begun[i] >= 0:
                continue
            lanes = _lanes(op)
            if any(x in self.taken for x in lanes):
                aside.append(i)
                continue
            self.taken.update(lanes)
            self.load.update(x[:3] for x in lanes)
            self.moving[op.rank].add(i)
            self.moving[op.to].add(i)
            changed.update((op.rank, op.to))
            self._go(i, 0.0)
            break
        for i in aside:
            heapq.heappush(queue, i)

    def _go(self, i: int, rate: float) -> None:
        self.begun[i] = self.since[i] = self.now
        self.rate[i] = rate
        if rate:
            heapq.heappush(self.heap, (self.now + self.left[i], i, 0))

    def _reprice(self, rank: int) -> None:
        """How fast what runs on a rank now goes."""
        computing, moving = self.computing[rank], self.moving[rank]
        first = [i for i in computing if self.ops[i].stream != COMPUTE] or computing
        for i in computing:
            self._pace(i, (self.slow if moving else 1.0) / len(first) if i in first else 0.0)
        for i in moving:
            op = self.ops[i]
            passing = max(self.load[op.rank, op.stream, True], self.load[op.to, op.stream, False])
            self._pace(i, (self.slow if self.computing[op.rank] or self.computing[op.to] else 1.0) / passing)

    def _pace(self, i: int, rate: float) -> None:
        if rate == self.rate[i]:
            return
        self.left[i] = max(0.0, self.left[i] - (self.now - self.since[i]) * self.rate[i])
        self.since[i], self.rate[i] = self.now, rate
        self.version[i] += 1
        if rate:
            heapq.heappush(self.heap, (self.now + self.left[i] / rate, i, self.version[i]))

    def _timeline(self) -> Timeline:
        stuck = [op.name for op, ended in zip(self.ops, self.ended, strict=True) if ended < 0]
        if stuck:
            raise SimulationError(f"{len(stuck)} of {len(self.ops)} ops wait for one another, the first is {stuck[0]!r}")
        ends, events = list(self.start), []
        for op, begun, ended in zip(self.ops, self.begun, self.ended, strict=True):
            for rank in _ends(op):
                ends[rank] = max(ends[rank], ended)
            if op.stream:
                events.append(Event(op.rank, op.stream, op.name, begun, ended, op.to))
        events.sort(key=lambda e: (e.start, e.rank, e.stream, e.to))
        return Timeline(tuple(events), tuple(ends))


def _ends(op: Op) -> tuple[int, ...]:
    """Ranks that an op keeps."""
    return (op.rank, op.to) if op.to >= 0 else (op.rank,)


def _lanes(op: Op) -> tuple[Lane, Lane]:
    return (op.rank, op.stream, True, op.lane), (op.to, op.stream, False, op.lane)
