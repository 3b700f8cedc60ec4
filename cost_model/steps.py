"""Who computes and receives what in each step, for strategies in which blocks travel: the runtime's schedules, as counts.

In a step each place of the ring hears from the place a distance before it. `kernels/schedule.py` makes the schedules from a mask;
here they follow from the band, and where something was counted on the mask at hand, that much is spread as the band has it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from .volumes import Attention, contiguous, head_tail, needed_columns, visible_pairs


@dataclass(frozen=True, eq=False)
class Travel:
    """Of step i every place of a ring hears from the place `distances[i]` before it; the first step is its own block. [step,
    place]: `work`, pairs for each head that the place computes; `columns` and `rows`, positions that it receives.
    """

    distances: tuple[int, ...]
    work: np.ndarray
    columns: np.ndarray
    rows: np.ndarray

    @property
    def places(self) -> int:
        return int(self.work.shape[1])


@functools.lru_cache(maxsize=1024)
def travel(strategy: str, a: Attention) -> Travel:
    """The steps of "ring", "halo", "balanced-ring" or "ring-a2a"; of the last, for groups that have exchanged heads."""
    places = a.ranks // a.inner if strategy == "ring-a2a" else a.ranks
    if strategy == "balanced-ring" and a.causal:
        whole = _halfway(a, places)
    else:
        hold = contiguous if strategy in ("halo", "balanced-ring") else head_tail
        queries, keys = hold(a.q_seq, places), hold(a.kv_seq, places)
        whole = _by_distance(visible_pairs(a, queries, keys), needed_columns(a, queries, keys))
    return _as_counted(whole, a)


def _by_distance(work: np.ndarray, columns: np.ndarray) -> Travel:
    """Every place computes its own rows. work, columns: [row place, column place]."""
    places = len(work)
    own = np.arange(places)
    steps = [(t, work[own, (own - t) % places], columns[own, (own - t) % places]) for t in range(places)]
    steps = [(t, w, c if t else 0 * c) for t, w, c in steps if t == 0 or w.any() or c.any()]
    many = np.array([c for _, _, c in steps], dtype=float)
    return Travel(tuple(t for t, _, _ in steps), np.array([w for _, w, _ in steps], dtype=float), many, 0 * many)


def _halfway(a: Attention, places: int) -> Travel:
    """A causal mask in contiguous order (DistFlashAttn): own rows up to half way around, those of others beyond it; the block
    half way, of an even number of places, is split in two."""
    held = contiguous(a.q_seq, places)
    whole, length = visible_pairs(a, held, held), (held[:, 0, 1] - held[:, 0, 0]).astype(float)
    steps = places // 2 + 1
    work, columns, rows = (np.zeros((steps, places)) for _ in range(3))
    for t in range(steps):
        for r in range(places):
            other = (r - t) % places
            share = 0.5 if t and 2 * t == places else 1.0
            if r >= t:
                work[t, r] = whole[r, other] * share
                columns[t, r] = length[other] if t else 0.0
            else:
                work[t, r] = whole[other, r] * share
                rows[t, r] = length[other] * share // 1
    return Travel(tuple(range(steps)), work, columns, rows)


def _as_counted(whole: Travel, a: Attention) -> Travel:
    """With as many steps, pairs of the busiest place and positions in all as were counted on the mask at hand."""
    steps = len(whole.distances) if a.steps is None else min(len(whole.distances), a.steps + 1)
    work, columns, rows = whole.work[:steps], whole.columns[:steps], whole.rows[:steps]
    if a.work is not None:
        work = work * (a.work / max(1.0, work.sum(0).max()))
    if a.moved is not None:
        moved_rows, moved_columns = a.moved
        rows = (rows if rows.any() else columns) * (moved_rows / max(1.0, (rows if rows.any() else columns).sum()))
        columns = columns * (moved_columns / max(1.0, columns.sum()))
    return Travel(whole.distances[:steps], work, columns, rows)


# Bytes --------------------------------------------------------------------------------------------


def column_bytes(a: Attention, heads: int) -> float:
    """Of one position's keys and values on their way, of so many of their heads."""
    return a.latent or a.batch * heads * (a.head_dim + a.value_dim) * a.itemsize


@dataclass(frozen=True)
class Blocks:
    """Bytes of a position on its way to where it is computed and of its results on their way back: of columns, of rows."""

    column: float
    row: float
    column_back: float
    row_back: float


def blocks(a: Attention, back: bool, q: int, kv: int) -> Blocks:
    """For q and kv heads. Results and gradients travel in the type they are summed in."""
    rows, column, acc = a.batch * q, column_bytes(a, kv), a.accumulator
    if not back:
        return Blocks(column, rows * a.head_dim * a.itemsize, 0.0, rows * (a.value_dim + 1) * acc)
    asked = rows * ((a.head_dim + a.value_dim) * a.itemsize + 2 * acc)  # queries, gradients of results, two statistics
    return Blocks(column, asked, column * acc / a.itemsize, rows * a.head_dim * acc)


@dataclass(frozen=True)
class Loads:
    """Bytes that the busiest port passes, as the mean over steps: of a step's blocks on the way there, of its results on the way
    back, and of both in the turns in which blocks of one step and results of another pass at once."""

    there: float
    back: float
    both: float


def loads(steps: Travel, size: Blocks, node: int, share: float) -> Loads:
    """Of blocks of `size`. Bytes between `node` neighbouring places, which pass ports of their own, count as that `share`
    of bytes between others."""
    count = len(steps.distances) - 1
    if not count:
        return Loads(0.0, 0.0, 0.0)
    own = np.arange(steps.places)
    near = np.array([own // node == (own - t) % steps.places // node for t in steps.distances]) & (steps.places > node)
    there = np.where(near, share, 1.0) * (steps.columns * size.column + steps.rows * size.row)
    back = np.where(near, share, 1.0) * (steps.columns * size.column_back + steps.rows * size.row_back)
    both = []
    for turn in range(2, count):
        come, go = steps.distances[turn + 1], steps.distances[turn - 1]
        passed = []
        for level in (near, ~near):
            coming, going = there[turn + 1] * level[turn + 1], back[turn - 1] * level[turn - 1]
            passed += [coming + np.roll(going, -go), np.roll(coming, -come) + going]  # received, sent
        both.append(np.max(passed))
    first, last = (float(x[1:].max(1).mean()) for x in (there, back))
    return Loads(first, last, float(np.mean(both)) if both else first + last)
