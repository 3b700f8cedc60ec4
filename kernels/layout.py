"""Who holds which positions of a sequence.

A `Layout` lists, for each rank, the half-open intervals of global positions it holds, in the order
in which they lie in its local tensor. Everything that cuts, joins or pads a sharded dimension is
arithmetic on these intervals; nothing here touches a tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
Shards = tuple[Intervals, ...]


def size(intervals: Intervals) -> int:
    """Number of positions in `intervals`."""
    return sum(stop - start for start, stop in intervals)


def offsets(intervals: Intervals) -> tuple[int, ...]:
    """Where each interval begins in the local tensor."""
    return tuple(size(intervals[:i]) for i in range(len(intervals)))


def lacking(length: int, shards: Shards, windows: Shards) -> Shards:
    """Per rank, in ascending order, the positions in [0, length) that its windows cover and it does not hold itself."""
    return tuple(_without(_union(w, length), held) for w, held in zip(windows, shards, strict=True))


def _union(windows: Intervals, length: int) -> list[Interval]:
    """The positions that any window covers, as disjoint ascending intervals."""
    out: list[Interval] = []
    for a, b in sorted((max(a, 0), min(b, length)) for a, b in windows):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        elif a < b:
            out.append((a, b))
    return out


def _without(intervals: list[Interval], held: Intervals) -> Intervals:
    left = intervals
    for c, d in held:
        left = [(lo, hi) for a, b in left for lo, hi in ((a, min(b, c)), (max(a, d), b)) if lo < hi]
    return tuple(left)


def joined(intervals: list[Interval]) -> Intervals:
    """The same positions in the same order, with neighbours joined and empty intervals dropped."""
    out: list[Interval] = []
    for start, stop in intervals:
        if start >= stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


@dataclass(frozen=True)
class Layout:
    """`length` positions spread over `len(shards)` ranks; every position is held exactly once."""

    length: int
    shards: Shards

    @property
    def ranks(self) -> int:
        return len(self.shards)

    def size(self, rank: int) -> int:
        return size(self.shards[rank])

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size(s) for s in self.shards)

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1

    def __str__(self) -> str:
        held = " ".join("+".join(f"[{a},{b})" for a, b in s) or "-" for s in self.shards)
        return f"{self.length} over {self.ranks} ranks: {held}"

    def sliced(self, start: int, stop: int, step: int = 1) -> tuple[Layout, Shards]:
        """Layout of `x[start:stop:step]`, and the strided local index ranges each rank keeps.

        The second value gives, per rank, `(first, last)` local indices to cut with the same `step`.
        """
        kept: list[list[Interval]] = []
        local: list[list[Interval]] = []
        for intervals in self.shards:
            kept.append([])
            local.append([])
            offset = 0
            for a, b in intervals:
                lo, hi = max(a, start), min(b, stop)
                first = start + -(-(lo - start) // step) * step  # first kept position at or after lo
                if first < hi:
                    kept[-1].append(((first - start) // step, -(-(hi - start) // step)))
                    local[-1].append((offset + first - a, offset + hi - a))
                offset += b - a
        length = max(0, -(-(stop - start) // step))
        return (
            Layout(length, tuple(joined(k) for k in kept)),
            tuple(tuple(cuts) for cuts in local),
        )

    def padded(self, left: int, right: int) -> Layout:
        """Layout after `left` new positions before the first and `right` after the last one.

        The holder of the first position gets those on the left, the holder of the last position those
        on the right. Negative amounts are cut with `sliced`, not here.
        """
        shards = []
        for intervals in self.shards:
            moved = [(a + left, b + left) for a, b in intervals]
            if left and moved and moved[0][0] == left and intervals[0][0] == 0:
                moved[0] = (0, moved[0][1])
            if right and moved and intervals[-1][1] == self.length:
                moved[-1] = (moved[-1][0], moved[-1][1] + right)
            shards.append(tuple(moved))
        return Layout(self.length + left + right, tuple(shards))

    def reversed(self) -> Layout:
        """Layout of the sequence backwards, where each rank turns around what it holds."""
        return Layout(self.length, tuple(tuple((self.length - b, self.length - a) for a, b in s[::-1]) for s in self.shards))

    def rolled(self, shift: int) -> tuple[Layout, Shards]:
        """Layout of the sequence moved on by `shift` around its end, and the local index ranges each rank puts in order."""
        shards, local = [], []
        for intervals in self.shards:
            moved = []
            for (a, b), at in zip(intervals, offsets(intervals), strict=True):
                for lo, hi, turn in ((a, b, 0), (a, b, self.length)):  # before and behind the end
                    lo, hi = max(lo, turn - shift % self.length), min(hi, turn + self.length - shift % self.length)
                    if lo < hi:
                        moved.append((lo + shift % self.length - turn, hi - lo, at + lo - a))
            moved.sort()
            shards.append(joined([(first, first + count) for first, count, _ in moved]))
            local.append(tuple((at, at + count) for _, count, at in moved))
        return Layout(self.length, tuple(shards)), tuple(local)

    def overlap(self, src: int, other: Layout, dst: int) -> list[tuple[int, int, int]]:
        """Positions held by `src` here and by `dst` in `other`: (local start here, local start there, count)."""
        pieces = []
        here = 0
        for a, b in self.shards[src]:
            there = 0
            for c, d in other.shards[dst]:
                lo, hi = max(a, c), min(b, d)
                if lo < hi:
                    pieces.append((here + lo - a, there + lo - c, hi - lo))
                there += d - c
            here += b - a
        return pieces


def contiguous(length: int, ranks: int) -> Layout:
    """Rank r holds [r·length/ranks, (r+1)·length/ranks), rounded down: sizes differ by at most one."""
    cuts = split(length, ranks)
    return Layout(length, tuple(((a, b),) if a < b else () for a, b in cuts))


def head_tail(length: int, ranks: int) -> Layout:
    """Of 2·ranks runs, rank r holds the r-th and the r-th from the end (zigzag): under a causal mask all have equal work.

    A sequence shorter than that is held contiguously, so that every rank holds a position.
    """
    if length < 2 * ranks:
        return contiguous(length, ranks)
    runs = split(length, 2 * ranks)
    return Layout(length, tuple(joined([runs[r], runs[-1 - r]]) for r in range(ranks)))


def concatenated(parts: list[Layout]) -> Layout:
    """Layout of the local concatenation of `parts`, in order."""
    shards: list[list[Interval]] = [[] for _ in parts[0].shards]
    offset = 0
    for part in parts:
        for rank, intervals in enumerate(part.shards):
            shards[rank] += [(a + offset, b + offset) for a, b in intervals]
        offset += part.length
    return Layout(offset, tuple(joined(s) for s in shards))


def split(count: int, ranks: int) -> tuple[Interval, ...]:
    """`count` things cut into `ranks` runs whose sizes differ by at most one (some may be empty)."""
    return tuple((r * count // ranks, (r + 1) * count // ranks) for r in range(ranks))


def in_turns(heads: Sequence[Interval], turns: int) -> tuple[tuple[Interval, ...], ...]:
    """[turn][rank]: each rank's interval of heads, cut into as many."""
    cut = [[(a + first, a + last) for first, last in split(b - a, turns)] for a, b in heads]
    return tuple(zip(*cut, strict=True))


def in_a_row(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """As long, each where the one before ends, from 0."""
    ends = itertools.accumulate((b - a for a, b in intervals), initial=0)
    return tuple(itertools.pairwise(ends))


def kv_heads(q_heads: Interval, groups: int) -> Interval:
    """The key/value heads that the query heads [a, b) read, `groups` query heads to a key/value head."""
    a, b = q_heads
    return (a // groups, -(-b // groups)) if a < b else (a // groups, a // groups)
