"""Blocks on their way: one loop that runs any schedule, for the forward and for the backward pass.

Each step posts the exchange for the next one before it computes, so one block is in flight while one is computed, and two are
held at most. What was computed for rows or columns that travelled here goes back to their owner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Intervals, Layout, size
from .schedule import Job, Schedule, Tile, Tiling
from .sight import Sight


@dataclass(frozen=True)
class Route:
    """Who computes what, built from a sight: `ring[i]` is the rank in `group` at place i of the schedule, `place` this rank's."""

    make: Callable[[Sight, Layout, Layout, Tiling], Schedule]
    rows: Layout
    cols: Layout
    tiling: Tiling
    place: int
    ring: tuple[int, ...]
    group: str

    def schedule(self, sight: Sight) -> Schedule:
        return _scheduled(self.make, sight, self.rows, self.cols, self.tiling)

    @property
    def key(self) -> tuple[object, ...]:
        return self.make.__name__, self.rows, self.cols, self.tiling, self.place, self.ring, self.group


@functools.lru_cache(maxsize=32)
def _scheduled(
    make: Callable[[Sight, Layout, Layout, Tiling], Schedule], sight: Sight, rows: Layout, cols: Layout, tiling: Tiling
) -> Schedule:
    """One for all layers under a mask."""
    return make(sight, rows, cols, tiling)


@dataclass
class Piece:
    """Some of an owner's rows or columns of several tensors: local positions `runs`, one after another along `dims[i]`."""

    tensors: list[Tensor]
    dims: tuple[int, ...]
    runs: Intervals

    def cut(self, i: int, start: int, stop: int) -> Tensor:
        """The owner's local positions [start, stop) of tensor i; they lie within one run."""
        at = 0
        for a, b in self.runs:
            if a <= start and stop <= b:
                return self.tensors[i].narrow(self.dims[i], at + start - a, stop - start)
            at += b - a
        raise AssertionError(f"[{start}, {stop}) is not in {self.runs}")

    def part(self, runs: Intervals) -> list[Tensor]:
        """Contiguous tensors of just these positions, to be sent."""
        out = []
        for i, dim in enumerate(self.dims):
            cuts = [self.cut(i, a, b) for a, b in runs]
            out.append((torch.cat(cuts, dim) if len(cuts) > 1 else cuts[0]).contiguous())
        return out

    def like(self, runs: Intervals) -> Piece:
        """Room for other positions of the same tensors."""
        return Piece(
            [receive_buffer(x, dim, size(runs)) for x, dim in zip(self.tensors, self.dims, strict=True)], self.dims, runs
        )


def receive_buffer(x: Tensor, dim: int, positions: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = positions
    return x.new_empty(shape)


class Work:
    """What a schedule does with blocks: the forward or the backward pass. Row tensors and column tensors may travel; `row_out`
    and `col_out` are this rank's own results, and `fresh` makes those for another's."""

    rows: Piece
    cols: Piece
    row_out: Piece
    col_out: Piece

    def compute(self, tile: Tile, rows: Piece, cols: Piece, row_out: Piece, col_out: Piece) -> None:
        raise NotImplementedError

    def fresh(self, of: Piece, runs: Intervals) -> Piece:
        raise NotImplementedError

    def merge(self, mine: Piece, back: Piece) -> None:
        raise NotImplementedError


@dataclass
class _Exchange:
    """The messages of one step, in flight."""

    requests: list[dist.Work] = field(default_factory=list)
    sending: list[Tensor] = field(default_factory=list)
    data: dict[Job, Piece] = field(default_factory=dict)
    results: list[tuple[Piece, Piece]] = field(default_factory=list)

    def wait(self) -> None:
        for request in self.requests:
            request.wait()
        self.sending.clear()


def run(schedule: Schedule, route: Route, work: Work) -> None:
    """This rank's part of a schedule. Every rank of `route.ring` runs it at the same point of the program."""
    me, steps = route.place, schedule.steps
    flight, done = _Exchange(), list[Piece]()
    for n in range(len(steps) + 1):
        arrived = _landed(flight, work)
        flight = _post(schedule, route, work, steps[n + 1] if n + 1 < len(steps) else None, steps[n - 1] if n else None, done)
        done = []
        for job in schedule.jobs(steps[n], me) if n < len(steps) else ():
            done += _computed(work, job, arrived, me)
    _landed(flight, work)


def _landed(flight: _Exchange, work: Work) -> dict[Job, Piece]:
    """Wait for a step's messages; results among them are merged, and their room is free for the next ones."""
    flight.wait()
    while flight.results:
        work.merge(*flight.results.pop(0))
    return flight.data


def _computed(work: Work, job: Job, arrived: dict[Job, Piece], me: int) -> list[Piece]:
    """Compute a job; what has to go back to its owner. (A function of its own, so that no local keeps a block that is done.)"""
    own_rows, own_cols = job.row_owner == me, job.col_owner == me
    rows, cols = (work.rows if own_rows else arrived[job]), (work.cols if own_cols else arrived[job])
    row_out = work.row_out if own_rows else work.fresh(work.row_out, job.rows)
    col_out = work.col_out if own_cols else work.fresh(work.col_out, job.cols)
    for tile in job.tiles:
        work.compute(tile, rows, cols, row_out, col_out)
    return [] if own_rows and own_cols else [col_out if own_rows else row_out]


def _post(schedule: Schedule, route: Route, work: Work, coming: int | None, gone: int | None, done: Sequence[Piece]) -> _Exchange:
    """Post what step `coming` needs, and the results of step `gone` on their way back.

    Both ends list a pair's messages in one order, so they need no tags.
    """
    me, flight, sends, receives = route.place, _Exchange(), list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
    if coming is not None:
        customer, source = (me + coming) % schedule.ranks, (me - coming) % schedule.ranks
        for job in schedule.jobs(coming, customer):
            mine, runs = (work.cols, job.cols) if job.col_owner == me else (work.rows, job.rows)
            sends += [(x, customer) for x in mine.part(runs)]
        for job in schedule.jobs(coming, me):
            mine, runs = (work.cols, job.cols) if job.row_owner == me else (work.rows, job.rows)
            flight.data[job] = mine.like(runs)
            receives += [(x, source) for x in flight.data[job].tensors]
    if gone:
        helper, served = (me + gone) % schedule.ranks, (me - gone) % schedule.ranks
        for piece in done:
            sends += [(x, served) for x in piece.tensors]
        for job in schedule.jobs(gone, helper):
            mine, runs = (work.col_out, job.cols) if job.col_owner == me else (work.row_out, job.rows)
            if not mine.tensors:  # the forward pass gives nothing for columns
                continue
            flight.results.append((mine, mine.like(runs)))
            receives += [(x, helper) for x in flight.results[-1][1].tensors]
    if sends or receives:
        group = _group(route.group)
        # Receives first: gloo announces them on the pair's one socket, behind whatever was sent before.
        ops = [dist.P2POp(dist.irecv, x, group=group, group_peer=route.ring[of]) for x, of in receives]
        ops += [dist.P2POp(dist.isend, x, group=group, group_peer=route.ring[to]) for x, to in sends]
        flight.requests = dist.batch_isend_irecv(ops)
        flight.sending = [x for x, _ in sends]
    return flight


def _group(name: str) -> dist.ProcessGroup:
    # Graphs carry groups by name, as torch's own functional collectives do; this is how those find them.
    return dist.distributed_c10d._resolve_process_group(name)
