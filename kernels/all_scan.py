"""All-Scan: every rank gets exactly the state it starts from, while it computes what needs no state.

A recurrence S' = A S + B is cut over ranks; `start` sends states on their way and `wait` gives this rank the one it starts
from. Forward they travel from rank 0 up, backward down (the cotangent's recurrence is the same with Aᵀ). Algorithms:

    chain       rank r waits for r−1, in blocks of heads or state columns, so that hops overlap (ZeCO, arXiv 2507.01004)
    log-step    ⌈log₂ P⌉ exchanges of (A, B) with ranks 1, 2, 4, .. away
    two-level   a chain within nodes, (A, B) between them
    gather      everyone gets every (A, B) (LASP-2, arXiv 2502.07563)

A chain sends one state per rank and direction, in float32 (float64 for float64 inputs), and none over a link that no document
crosses. Where A is a matrix (`remove`) it stays at home: the chain's step is then the pass of the state through the rank's
own chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import linear_torch
from .layout import Interval, split

TAG = 0x5CA  # between two ranks, blocks of attention may be in flight at the same time
ALGORITHMS = ("chain", "log-step", "two-level", "gather")


@dataclass(frozen=True)
class Scan:
    """Where this rank stands in a scan. A chain cuts its state into `blocks`; each `node` neighbouring ranks are close."""

    algorithm: str
    rank: int
    ranks: int
    group: str
    blocks: int = 8
    node: int = 1
    reverse: bool = False

    @classmethod
    def at(cls, algorithm: str, places: Sequence[int], group: str) -> Scan:
        """places: (rank, ranks, blocks, node), and whether it goes backward."""
        rank, ranks, blocks, node, *reverse = places
        return cls(algorithm, rank, ranks, group, blocks, node, bool(reverse and reverse[0]))

    def back(self) -> Scan:
        """The scan of the cotangents."""
        return replace(self, reverse=not self.reverse)

    @property
    def place(self) -> int:
        """How many ranks a state has passed before it comes here."""
        return self.ranks - 1 - self.rank if self.reverse else self.rank

    def peer(self, place: int) -> int:
        return self.ranks - 1 - place if self.reverse else place

    def crosses(self, linked: Sequence[bool] | None, place: int) -> bool:
        """Whether a state goes from `place` to the next; `linked[r]` says so of ranks r and r + 1."""
        if not 0 <= place < self.ranks - 1:
            return False
        return linked is None or linked[self.ranks - 2 - place if self.reverse else place]


ALONE = Scan("chain", 0, 1, "")


# Programs: what a rank does to a state that comes by ----------------------------------------------

Run = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Program:
    """`run(*inputs, state)` gives results, the last of which is the state handed on.

    Inputs and results are [B, H, ..]; `columns[i]` says whether input i has the state's columns as its last dimension, as
    all results have.
    """

    run: Run
    columns: tuple[bool, ...]


def _affine(kept: Tensor, added: Tensor, state: Tensor) -> list[Tensor]:
    return [torch.addcmul(added, kept, state)]


def _matrix(kept: Tensor, added: Tensor, state: Tensor) -> list[Tensor]:
    return [added + kept @ state]


def stages(x: Tensor) -> ModuleType:
    """The kernels for a tensor: Triton's on a GPU, which know no float64."""
    if x.device.type == "cuda" and x.dtype != torch.float64:
        from . import linear_triton

        return linear_triton
    return linear_torch


def _stage(name: str) -> Run:
    def run(*values: Tensor) -> list[Tensor]:
        # A block of a chain is a cut of what kernels take as contiguous.
        return getattr(stages(values[0]), name)(*(x.contiguous() for x in values))

    return run


PROGRAMS = {
    "affine": Program(_affine, (False, True)),  # kept [B, H, 1 or K, 1], added [B, H, K, V]
    "matrix": Program(_matrix, (False, True)),  # kept [B, H, K, K]
    "carry": Program(_stage("carry"), (False, True, False, False)),
    "carry back": Program(_stage("carry_back"), (False, False, False, True, True)),
}


def _state_of(program: str, inputs: Sequence[Tensor]) -> Tensor:
    """Zeros in the shape [B, H, K, V], type and place of the state."""
    if program == "carry":
        read, values = inputs[:2]
        return read.new_zeros(*read.shape[:2], read.shape[-1], values.shape[-1])
    if program == "carry back":
        return torch.zeros_like(inputs[3][:, :, 0])
    return torch.zeros_like(inputs[1])


# The operators ------------------------------------------------------------------------------------

_pending: dict[int, Future[list[Tensor]]] = {}
_tickets = itertools.count(1)
_runner: ThreadPoolExecutor | None = None


@torch.library.custom_op("asp::scan_start", mutates_args=())
def scan_start(
    inputs: list[Tensor],
    initial: Tensor | None,
    linked: Tensor | None,
    program: str,
    algorithm: str,
    group: str,
    numbers: list[int],
) -> Tensor:
    """Send states on their way; the result is a ticket for `scan_wait`. `numbers` are those of `Scan`.

    initial [B, H, K, V]: what the first rank starts from (None: zeros). linked [P − 1], bool, on the host: the links that
    some document crosses (None: all). Every rank calls it at the same point of its program.
    """
    scan = Scan.at(algorithm, numbers, group)
    crossing = None if linked is None else linked.tolist()
    ticket = next(_tickets)
    _pending[ticket] = _launched(
        lambda: [x.contiguous() for x in _scanned(scan, program, inputs, initial, crossing)], inputs[0].device
    )
    return torch.tensor(ticket)


@scan_start.register_fake
def _(inputs: list[Tensor], *rest: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("asp::scan_wait", mutates_args=())
def scan_wait(ticket: Tensor, inputs: list[Tensor], initial: Tensor | None, program: str) -> list[Tensor]:
    """The state this rank starts from, [B, H, K, V], and what its program made of it. What `start` took lives until here."""
    return _pending.pop(int(ticket)).result()


@scan_wait.register_fake
def _(ticket: Tensor, inputs: list[Tensor], initial: Tensor | None, program: str) -> list[Tensor]:
    state = _state_of(program, inputs)
    if program in ("affine", "matrix"):
        return [state, torch.empty_like(state)]
    return [state, *carried(inputs[1] if program == "carry" else inputs[4], state)]


def carried(columns: Tensor, state: Tensor) -> list[Tensor]:
    """Results of `carry` and `carry_back` as fakes: states of chunks, [B, H, N, C, V] like `columns`, and a state."""
    states = state.new_empty(*columns.shape[:3], *state.shape[-2:])
    return [states, columns.new_empty(columns.shape), torch.empty_like(state)]


@dataclass(frozen=True)
class Flight:
    """States on their way to this rank."""

    ticket: Tensor
    inputs: list[Tensor]
    initial: Tensor | None
    program: str

    def wait(self) -> list[Tensor]:
        """The state this rank starts from, and the results of its program."""
        return torch.ops.asp.scan_wait(self.ticket, self.inputs, self.initial, self.program)


def start(scan: Scan, program: str, inputs: list[Tensor], initial: Tensor | None, linked: Tensor | None) -> Flight:
    numbers = [scan.rank, scan.ranks, scan.blocks, scan.node, int(scan.reverse)]
    ticket = torch.ops.asp.scan_start(inputs, initial, linked, program, scan.algorithm, scan.group, numbers)
    return Flight(ticket, inputs, initial, program)


def _launched(work: Callable[[], list[Tensor]], device: torch.device) -> Future[list[Tensor]]:
    """On the host a thread of its own, which blocks while messages are on their way; on a GPU a stream of its own."""
    global _runner
    if device.type == "cuda":
        return _on_stream(work, device)
    if _runner is None:
        _runner = ThreadPoolExecutor(1, "autosp-scan")  # one: scans start in the same order on every rank, and run in it
    return _runner.submit(_without_grad, work)


def _without_grad(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    with torch.no_grad():
        return work()


_streams: dict[torch.device, torch.cuda.Stream] = {}


class _Streamed(Future[list[Tensor]]):
    """Results on another stream; whoever takes them makes the current stream wait, not the host."""

    def __init__(self, values: list[Tensor], done: torch.cuda.Event) -> None:
        super().__init__()
        self._done = done
        self.set_result(values)

    def result(self, timeout: float | None = None) -> list[Tensor]:
        values = super().result(timeout)
        here = torch.cuda.current_stream(values[0].device)
        here.wait_event(self._done)
        for x in values:
            x.record_stream(here)
        return values


def _on_stream(work: Callable[[], list[Tensor]], device: torch.device) -> Future[list[Tensor]]:
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return _Streamed(_without_grad(work), stream.record_event())


# Algorithms ---------------------------------------------------------------------------------------


def _scanned(
    scan: Scan, program: str, inputs: Sequence[Tensor], initial: Tensor | None, linked: Sequence[bool] | None
) -> list[Tensor]:
    first = _state_of(program, inputs) if initial is None or scan.place else initial.to(inputs[0].dtype, copy=True)
    if scan.ranks == 1:
        return [first.clone(), *PROGRAMS[program].run(*inputs, first)]
    if scan.algorithm == "chain":
        return _chain(scan, PROGRAMS[program], inputs, first, linked)
    assert program in ("affine", "matrix"), "a rank that does not wait for its state must know what it would do to any"
    kept, added = inputs
    found = {"log-step": _log_step, "two-level": _two_level, "gather": _gathered}[scan.algorithm](scan, kept, added, first)
    return [found, *PROGRAMS[program].run(*inputs, found)]


def blocks_of(rows: int, columns: int, count: int) -> list[tuple[Interval, Interval]]:
    """About `count` pieces of a state [rows, K, columns]: by rows, then by columns where rows are too few."""
    parts = min(max(1, count // rows), columns)
    return [(r, c) for r in split(rows, min(rows, count)) for c in split(columns, parts)]


def _chain(scan: Scan, program: Program, inputs: Sequence[Tensor], first: Tensor, linked: Sequence[bool] | None) -> list[Tensor]:
    comes, goes = scan.crosses(linked, scan.place - 1), scan.crosses(linked, scan.place)
    flat = [x.flatten(0, 1) for x in inputs]
    state = first.flatten(0, 1)
    blocks = blocks_of(state.shape[0], state.shape[-1], scan.blocks)
    waiting = []
    for (a, b), (c, d) in blocks if comes else ():
        room = state.new_empty(b - a, state.shape[1], d - c)
        waiting.append((room, _receive(scan, room, scan.place - 1)))
    results, leaving, requests = list[Tensor](), list[Tensor](), list[dist.Work]()
    for i, ((a, b), (c, d)) in enumerate(blocks):
        if comes:
            waiting[i][1].wait()
            found = waiting[i][0]
        else:
            found = state[a:b, :, c:d]
        mine = [x[a:b, ..., c:d] if wide else x[a:b] for x, wide in zip(flat, program.columns, strict=True)]
        made = [found, *(x[0] for x in program.run(*(x[None] for x in mine), found[None]))]
        if goes:
            leaving.append(made[-1].contiguous())  # alive until it has been sent
            requests.append(_send(scan, leaving[-1], scan.place + 1))
        if not results:
            results = [x.new_empty(state.shape[0], *x.shape[1:-1], state.shape[-1]) for x in made]
        for whole, part in zip(results, made, strict=True):
            whole[a:b, ..., c:d] = part
    for request in requests:
        request.wait()
    return [x.unflatten(0, first.shape[:2]) for x in results]


Pair = tuple[Tensor, Tensor]  # A and B of S' = A S + B


def _after(late: Pair, early: Pair) -> Pair:
    """First `early`, then `late`: (A₂A₁, A₂B₁ + B₂)."""
    if late[0].shape[-1] == 1:
        return late[0] * early[0], torch.addcmul(late[1], late[0], early[1])
    return late[0] @ early[0], late[1] + late[0] @ early[1]


def _applied(pair: Pair, state: Tensor) -> Tensor:
    return pair[1] + (pair[0] * state if pair[0].shape[-1] == 1 else pair[0] @ state)


def _log_step(scan: Scan, kept: Tensor, added: Tensor, first: Tensor) -> Tensor:
    """`through` is this rank and those right before it, `before` only those: both twice as many after each step."""
    through: Pair = (kept, _applied((kept, added), first) if scan.place == 0 else added)
    before: Pair | None = None
    step = 1
    while step < scan.ranks:
        requests, out = [], list[Tensor]()
        if scan.place >= step:
            got = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in through)
            requests += [_receive(scan, x, scan.place - step) for x in got]
        if scan.place + step < scan.ranks:
            out = [x.contiguous() for x in through]
            requests += [_send(scan, x, scan.place + step) for x in out]
        for request in requests:
            request.wait()
        if scan.place >= step:
            before = _after(before, got) if before else got  # type: ignore[arg-type]
            through = _after(through, got)  # type: ignore[arg-type]
        step *= 2
    return before[1] if before else first


def _two_level(scan: Scan, kept: Tensor, added: Tensor, first: Tensor) -> Tensor:
    """Within a node each rank learns what those before it in the node do; the node's last one passes states on, and hands
    them round.
    """
    base = scan.place - scan.place % scan.node
    last = min(base + scan.node, scan.ranks) - 1
    before: Pair | None = None
    if scan.place > base:
        before = (torch.empty_like(kept, memory_format=torch.contiguous_format), torch.empty_like(added))
        for x in before:
            _receive(scan, x, scan.place - 1).wait()
    through = _after((kept, added), before) if before else (kept, added)
    requests, out = [], [x.contiguous() for x in through]
    if scan.place < last:
        requests += [_send(scan, x, scan.place + 1) for x in out]
    entering = torch.zeros_like(added)
    if base == 0 and scan.place == 0:
        entering = first.contiguous()
    if scan.place == last:
        if base:
            _receive(scan, entering, base - 1).wait()
        elif scan.place:
            _receive(scan, entering, 0).wait()  # the first rank knows what the model starts from
        if last + 1 < scan.ranks:
            out.append(_applied(through, entering).contiguous())
            requests.append(_send(scan, out[-1], min(last + scan.node, scan.ranks - 1)))
        if base:
            requests += [_send(scan, entering, place) for place in range(base, last)]
    elif base:
        _receive(scan, entering, last).wait()
    elif scan.place == 0:
        requests += [_send(scan, entering, place) for place in range(1, last + 1)]
    if not base and 0 < scan.place < last:
        _receive(scan, entering, 0).wait()
    for request in requests:
        request.wait()
    return _applied(before, entering) if before else entering


def _gathered(scan: Scan, kept: Tensor, added: Tensor, first: Tensor) -> Tensor:
    out = [kept.contiguous(), (_applied((kept, added), first) if scan.place == 0 else added).contiguous()]
    requests, got = [], []
    for place in range(scan.place):
        got.append([torch.empty_like(x) for x in out])
        requests += [_receive(scan, x, place) for x in got[-1]]
    for place in range(scan.place + 1, scan.ranks):
        requests += [_send(scan, x, place) for x in out]
    for request in requests:
        request.wait()
    found = first
    for place, pair in enumerate(got):
        found = pair[1] if place == 0 else _applied((pair[0], pair[1]), found)
    return found


def _send(scan: Scan, x: Tensor, place: int) -> dist.Work:
    group = dist.distributed_c10d._resolve_process_group(scan.group)
    return dist.isend(x, group=group, group_dst=scan.peer(place), tag=TAG)


def _receive(scan: Scan, x: Tensor, place: int) -> dist.Work:
    group = dist.distributed_c10d._resolve_process_group(scan.group)
    return dist.irecv(x, group=group, group_src=scan.peer(place), tag=TAG)
