"""Who computes which block of attention, and in which step: a schedule as data, for every strategy in which blocks travel.

Rows (queries) and columns (keys, values) are held by ranks as two `Layout`s. The block of rank i's rows and rank j's columns is
computed by i, to which j sends its columns, or by j, to which i sends its rows; what was computed for what travelled goes
back. In step t rank r hears from rank r − t only, so a step is one exchange between pairs. Only what a mask lets some
row see travels or is computed.

    ring            head-tail layout: under a causal mask equal work, every rank computes for its own rows
    balanced ring   contiguous layout, idle ranks compute for busy ones (DistFlashAttn, arXiv 2310.03294, algorithm 2)
    halo            a window's blocks on the contiguous layout: most pairs of ranks have none

Nothing here knows tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .layout import Interval, Intervals, Layout, size
from .sight import Causal, Everything, Sight

BALANCED = 1.05  # the slowest rank's work over the mean, up to which a schedule counts as balanced
LEAST_SHARE = 0.02  # of a block; less is not worth a message
STRIP_ROWS = 1024  # most rows of a partly visible block that share one look at which columns they see
LEAST_STRIP = {"cpu": 128}  # fewest, where calls are cheap beside the pairs that they save
SAVING = 0.85  # strips are halved while that leaves at most this share of the pairs to go through
SAMPLES = 16  # strips looked at to tell


# What is computed ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """One call of a block kernel: rows and columns as local indices of their owners, and where the first of each stands.

    kind: "full" (every pair is visible), "causal" (as "full", below the diagonal), "mask" (the mask must be looked at).
    """

    rows: Interval
    cols: Interval
    kind: str
    at: tuple[int, int]

    @property
    def pairs(self) -> int:
        """Multiply-adds per value of a head, as the kernels do them."""
        high, wide = self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]
        return high * (high + 1) // 2 if self.kind == "causal" else high * wide


@dataclass(frozen=True)
class Job:
    """What one rank does in one step: `tiles` of `row_owner`'s rows and `col_owner`'s columns, one of which is itself."""

    row_owner: int
    col_owner: int
    tiles: tuple[Tile, ...]

    @functools.cached_property
    def rows(self) -> Intervals:
        """The owner's local rows that are touched, in order."""
        return _union([t.rows for t in self.tiles])

    @functools.cached_property
    def cols(self) -> Intervals:
        return _union([t.cols for t in self.tiles])


def least_strip(device: str) -> int:
    return LEAST_STRIP.get(device, STRIP_ROWS)


@functools.lru_cache(maxsize=256)
def strip_rows(sight: Sight, rows: int, cols: int, least: int) -> int:
    """How many rows share one look: STRIP_ROWS, and half as many as often as that saves enough."""
    high, through = STRIP_ROWS, _through(sight, rows, cols, STRIP_ROWS)
    while high // 2 >= least and (fewer := _through(sight, rows, cols, high // 2)) <= SAVING * through:
        high, through = high // 2, fewer
    return high


@functools.lru_cache(maxsize=256)
def looked_at(sight: Sight, rows: int, cols: int, least: int) -> float:
    """Pairs that strips go through ÷ those that are visible."""
    visible = sum(sight.pairs(strip, (0, cols)) for strip in _samples(rows))
    return max(1.0, _through(sight, rows, cols, strip_rows(sight, rows, cols, least)) / visible) if visible else 1.0


def _through(sight: Sight, rows: int, cols: int, high: int) -> int:
    """Pairs that strips of `high` rows go through, of some strips of STRIP_ROWS."""
    strips = [(a, min(a + high, stop)) for start, stop in _samples(rows) for a in range(start, stop, high)]
    return sum((z - a) * size((sight.seen((a, z), (0, cols)),)) for a, z in strips)


def _samples(rows: int) -> list[Interval]:
    starts = range(0, rows, STRIP_ROWS)
    return [(a, min(a + STRIP_ROWS, rows)) for a in starts[:: max(1, len(starts) // SAMPLES)]]


def _union(intervals: Sequence[Interval]) -> Intervals:
    out: list[Interval] = []
    for a, b in sorted(intervals):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return tuple(out)


@dataclass(frozen=True)
class Tiling:
    """How blocks are cut into tiles.

    flash: the kernel needs no scores in memory, so visible tiles may have any size; otherwise, and under a mask, a tile has at
    most `largest` pairs and `high` rows. joined: neighbouring visible tiles become one, which need not know where it stands.
    least: rows that a strip has at least, where the sight would make it lower.
    """

    flash: bool
    largest: int
    joined: bool = True
    least: int = STRIP_ROWS
    high: int = STRIP_ROWS

    def fitted(self, sight: Sight, rows: int, cols: int) -> Tiling:
        """For what rows of that many see."""
        return replace(self, high=strip_rows(sight, rows, cols, self.least))

    def cut(self, sight: Sight, rows: Sequence[Placed], cols: Sequence[Placed]) -> tuple[Tile, ...]:
        tiles = [tile for r in rows for c in cols for tile in self._block(sight, r, c)]
        return tuple(_joined(tiles)) if self.flash and self.joined and len(tiles) > 1 else tuple(tiles)

    def _block(self, sight: Sight, r: Placed, c: Placed) -> list[Tile]:
        seen = sight.seen(r.interval, c.interval)
        if seen[0] >= seen[1] or r.empty:
            return []
        kind = self._whole(sight, r.interval, seen)
        if kind is not None:
            return [_tile(r, r.interval, c, seen, kind)]
        tiles, high = [], self._strip(seen)
        for start in range(*r.interval, high):
            strip = (start, min(start + high, r.interval[1]))
            visible = sight.seen(strip, seen)
            if visible[0] < visible[1]:
                tiles.append(_tile(r, strip, c, visible, "full" if sight.every(strip, visible) else "mask"))
        return tiles

    def _strip(self, cols: Interval) -> int:
        return max(1, min(self.high, self.largest // (cols[1] - cols[0])))

    def _whole(self, sight: Sight, rows: Interval, cols: Interval) -> str | None:
        """The kind of tile that a block is as a whole, if it is one."""
        if self.flash and sight.every(rows, cols):
            return "full"
        return "causal" if self.flash and isinstance(sight, Causal) and rows == cols else None

    def touched(self, sight: Sight, rows: Sequence[Placed], cols: Sequence[Placed]) -> tuple[Intervals, Intervals]:
        """The local rows and columns that the tiles of `cut` cover, of which there may be millions."""
        of_rows, of_cols = list[Interval](), list[Interval]()
        for r in rows:
            for c in cols:
                seen = sight.seen(r.interval, c.interval)
                if seen[0] >= seen[1] or r.empty:
                    continue
                one = self._whole(sight, r.interval, seen) is not None
                here, there = ([r.interval], [seen]) if one else sight.strips(r.interval, self._strip(seen), seen)
                of_rows += map(r.local, here)
                of_cols += map(c.local, there)
        return _union(of_rows), _union(of_cols)


@dataclass(frozen=True)
class Placed:
    """Positions [start, stop) of the sequence, which their owner holds from local index `at` on."""

    interval: Interval
    at: int

    @property
    def empty(self) -> bool:
        return self.interval[0] >= self.interval[1]

    def local(self, interval: Interval) -> Interval:
        shift = self.at - self.interval[0]
        return interval[0] + shift, interval[1] + shift


def placed(intervals: Intervals) -> list[Placed]:
    """A rank's intervals with where it holds them."""
    out, at = [], 0
    for a, b in intervals:
        out.append(Placed((a, b), at))
        at += b - a
    return out


def _tile(r: Placed, rows: Interval, c: Placed, cols: Interval, kind: str) -> Tile:
    return Tile(r.local(rows), c.local(cols), kind, (rows[0], cols[0]))


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """Neighbouring full tiles as one: fewer and larger kernels."""
    full = [t for t in tiles if t.kind == "full"]
    rest = [t for t in tiles if t.kind != "full"]
    for along, across in (("cols", "rows"), ("rows", "cols")):
        runs: list[Tile] = []
        for t in sorted(full, key=lambda t: (getattr(t, across), getattr(t, along))):
            last = runs[-1] if runs else None
            if last and getattr(last, across) == getattr(t, across) and getattr(last, along)[1] == getattr(t, along)[0]:
                span = (getattr(last, along)[0], getattr(t, along)[1])
                sides = {along: span, across: getattr(t, across)}
                runs[-1] = Tile(sides["rows"], sides["cols"], "full", last.at)
            else:
                runs.append(t)
        full = runs
    return full + rest


# Schedules ----------------------------------------------------------------------------------------


class Schedule:
    """Every rank's jobs by step. `moved[i, j]` is the share of block (i, j)'s rows that j computes for i."""

    def __init__(self, sight: Sight, rows: Layout, cols: Layout, tiling: Tiling, moved: np.ndarray) -> None:
        self.ranks = rows.ranks
        self._sight, self._rows, self._cols, self._moved = sight, rows, cols, moved
        self._tiling = tiling.fitted(sight, rows.length, cols.length)
        self._held = [[placed(shard) for shard in layout.shards] for layout in (rows, cols)]
        self._jobs: dict[tuple[int, int], tuple[Job, ...]] = {}
        self._counts: dict[tuple[int, int, bool], int] = {}

    @functools.cached_property
    def steps(self) -> tuple[int, ...]:
        """The distances t at which some rank has something to compute, 0 first."""
        work = [0]
        for t in range(1, self.ranks):
            if any(
                self._sent(r, (r - t) % self.ranks, True) or self._sent((r - t) % self.ranks, r, False) for r in range(self.ranks)
            ):
                work.append(t)
        return tuple(work)

    def jobs(self, t: int, rank: int) -> tuple[Job, ...]:
        """What `rank` computes at distance t: for its own rows, and for the rows of rank − t."""
        if (t, rank) not in self._jobs:
            peer = (rank - t) % self.ranks
            pairs = ((rank, peer, True), (peer, rank, False))[: 2 if t else 1]
            made = [Job(i, j, self._tiling.cut(self._sight, self._part(i, j, own), self._held[1][j])) for i, j, own in pairs]
            self._jobs[t, rank] = tuple(job for job in made if job.tiles)
        return self._jobs[t, rank]

    def _part(self, i: int, j: int, own: bool) -> Sequence[Placed]:
        """The rows of i for which i itself computes the block of j's columns, or those for which j does."""
        moved = self._moved[i, j]
        if moved == (1 if own else 0):
            return ()
        if moved in (0, 1):
            return self._held[0][i]
        held = self._rows.size(i)
        kept = self._kept(self._held[0][i], held, self._cols.shards[j], 1 - float(moved))
        return _clipped(self._held[0][i], 0, kept) if own else _clipped(self._held[0][i], kept, held)

    def _kept(self, rows: Sequence[Placed], held: int, cols: Intervals, share: float) -> int:
        """How many of the rows, the first in local order, stay with their owner: those with `share` of the visible pairs."""

        def visible(n: int) -> float:
            return _pairs(self._sight, tuple(p.interval for p in _clipped(rows, 0, n)), cols)

        low, high, wanted = 0, held, share * visible(held)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if visible(middle) < wanted else (low, middle)
        return low

    def work(self, rank: int) -> int:
        """Pairs the kernels of a rank go through."""
        return sum(tile.pairs for t in self.steps for job in self.jobs(t, rank) for tile in job.tiles)

    @functools.cached_property
    def busiest(self) -> float:
        """Visible pairs that the rank with most of them computes."""
        return float(_load(_all_pairs(self._sight, self._rows, self._cols), self._moved).max())

    @functools.cached_property
    def travelling(self) -> tuple[int, int]:
        """Positions of rows, and of columns, that are sent to another rank, over all ranks."""
        pairs = [(i, j) for i in range(self.ranks) for j in range(self.ranks) if i != j]
        rows, cols = (sum(self._sent(*pair, own) for pair in pairs) for own in (False, True))
        return rows, cols

    def _sent(self, i: int, j: int, own: bool) -> int:
        """Positions of j's columns that i needs for rows that it computes itself, or of i's rows that j computes."""
        if (i, j, own) not in self._counts:
            part = self._part(i, j, own)
            touched = self._tiling.touched(self._sight, part, self._held[1][j]) if part else ((), ())
            self._counts[i, j, own] = size(touched[1 if own else 0])
        return self._counts[i, j, own]


def _clipped(rows: Sequence[Placed], start: int, stop: int) -> list[Placed]:
    """The rows with local index in [start, stop)."""
    out = []
    for p in rows:
        n = p.interval[1] - p.interval[0]
        a, b = max(start, p.at), min(stop, p.at + n)
        if a < b:
            out.append(Placed((p.interval[0] + a - p.at, p.interval[0] + b - p.at), a))
    return out


def owner_computes(sight: Sight, rows: Layout, cols: Layout, tiling: Tiling) -> Schedule:
    """Every rank computes its own rows: columns travel, nothing else."""
    return Schedule(sight, rows, cols, tiling, np.zeros((rows.ranks, rows.ranks)))


def level_by_layout(sight: Sight, rows: Layout, cols: Layout, tiling: Tiling) -> Schedule:
    """For a layout under which everyone's own rows are equal work, without a mask and under a causal one; else `balanced`."""
    level = isinstance(sight, (Everything, Causal))
    return (owner_computes if level else balanced)(sight, rows, cols, tiling)


def balanced(sight: Sight, rows: Layout, cols: Layout, tiling: Tiling) -> Schedule:
    """Work levelled over the ranks on the mask at hand.

    Tried in this order, until the slowest rank is within `BALANCED` of the mean: everyone computes its own rows; ranks compute
    their own blocks up to half way around the ring and those of others beyond it, the block half way (of an even number
    of ranks) being split, which is ⌊P/2⌋ + 1 steps for a causal mask; the best split of every block between its two ends.
    """
    ranks = rows.ranks
    pairs = _all_pairs(sight, rows, cols)
    distance = (np.arange(ranks)[:, None] - np.arange(ranks)[None, :]) % ranks
    halfway = np.where(2 * distance > ranks, 1.0, np.where(2 * distance == ranks, 0.5, 0.0))
    for moved in (np.zeros_like(pairs), halfway):
        load = _load(pairs, moved)
        if load.max() <= BALANCED * load.mean():
            return Schedule(sight, rows, cols, tiling, moved)
    return Schedule(sight, rows, cols, tiling, _levelled(pairs))


def _all_pairs(sight: Sight, rows: Layout, cols: Layout) -> np.ndarray:
    """[row rank, column rank]"""
    (of_rows, rows_by_rank), (of_cols, cols_by_rank) = _runs(rows), _runs(cols)
    return rows_by_rank @ sight.table(of_rows, of_cols) @ cols_by_rank.T


def _runs(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """All ranks' intervals, [n, 2], and which are whose, [ranks, n]."""
    owner = np.array([r for r, shard in enumerate(layout.shards) for _ in shard])
    runs = np.array([run for shard in layout.shards for run in shard]).reshape(-1, 2)
    return runs, (owner == np.arange(layout.ranks)[:, None]).astype(float)


def _pairs(sight: Sight, rows: Intervals, cols: Intervals) -> float:
    return sum(sight.pairs(r, c) for r in rows for c in cols)


def _load(pairs: np.ndarray, moved: np.ndarray) -> np.ndarray:
    return (pairs * (1 - moved)).sum(1) + (pairs * moved).sum(0)


def _levelled(pairs: np.ndarray) -> np.ndarray:
    """The shares that make the most loaded rank's work least, then move least: a linear program with a share for each block."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    ranks = len(pairs)
    i, j = np.nonzero(pairs * (1 - np.eye(ranks)))
    weight, own = pairs[i, j], pairs.sum(1)
    scale = max(1.0, own.sum())
    column = np.arange(len(i))
    bound = coo_array(
        (
            np.concatenate([-weight, weight, np.full(ranks, -scale)]) / scale,
            (np.concatenate([i, j, np.arange(ranks)]), np.concatenate([column, column, np.full(ranks, len(i))])),
        ),
        shape=(ranks, len(i) + 1),
    )
    cost = np.concatenate([1e-4 * weight / scale, [1.0]])
    solved = linprog(cost, A_ub=bound.tocsr(), b_ub=-own / scale, bounds=[(0, 1)] * len(i) + [(0, None)], method="highs")
    share = np.round(solved.x[:-1], 6)
    moved = np.zeros_like(pairs)
    moved[i, j] = np.where(share < LEAST_SHARE, 0, np.where(share > 1 - LEAST_SHARE, 1, share))
    return moved


def members(layout: Layout, inner: int) -> Layout:
    """The layout of groups of `inner` neighbouring ranks, each holding what its ranks hold, in order of position."""
    groups = [layout.shards[r : r + inner] for r in range(0, layout.ranks, inner)]
    return Layout(layout.length, tuple(_union([i for shard in g for i in shard]) for g in groups))
