"""What rows see of the columns: the three answers a schedule asks for, whatever the mask is."""

from __future__ import annotations

import bisect
import functools
import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .layout import Interval


class Sight(Protocol):
    """Which columns rows see; all intervals are of global positions."""

    @property
    def key(self) -> str:
        """Equal for equal sights."""
        ...

    def __hash__(self) -> int: ...

    def seen(self, rows: Interval, cols: Interval) -> Interval:
        """The part of `cols` outside which `rows` certainly see nothing; empty if they see nothing at all."""
        ...

    def strips(self, rows: Interval, high: int, cols: Interval) -> tuple[list[Interval], list[Interval]]:
        """Of `rows` in strips of `high`, those that see anything, and the `cols` that `seen` gives for any of them."""
        ...

    def every(self, rows: Interval, cols: Interval) -> bool:
        """Certainly every pair is visible, and no mask changes its score."""
        ...

    def pairs(self, rows: Interval, cols: Interval) -> float:
        """How many pairs are visible, as far as is known."""
        ...

    def table(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """`pairs` of each of some intervals of rows, [m, 2], and of columns, [n, 2]: [m, n]."""
        ...


@dataclass(frozen=True)
class Everything:
    """No mask."""

    key = "everything"

    def seen(self, rows: Interval, cols: Interval) -> Interval:
        return cols

    def strips(self, rows: Interval, high: int, cols: Interval) -> tuple[list[Interval], list[Interval]]:
        return [rows], [cols]

    def every(self, rows: Interval, cols: Interval) -> bool:
        return True

    def pairs(self, rows: Interval, cols: Interval) -> float:
        return float((rows[1] - rows[0]) * (cols[1] - cols[0]))

    def table(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        return np.outer(np.diff(rows), np.diff(cols)).astype(float)


@dataclass(frozen=True)
class Causal:
    """Row i sees column j if j <= i, and nothing else masks it."""

    key = "causal"

    def seen(self, rows: Interval, cols: Interval) -> Interval:
        return (cols[0], max(cols[0], min(cols[1], rows[1])))

    def strips(self, rows: Interval, high: int, cols: Interval) -> tuple[list[Interval], list[Interval]]:
        if rows[1] <= cols[0]:
            return [], []
        blind = max(0, cols[0] - rows[0]) // high * high  # a strip that ends at the first column sees none
        return [(rows[0] + blind, rows[1])], [self.seen(rows, cols)]

    def every(self, rows: Interval, cols: Interval) -> bool:
        return cols[1] - 1 <= rows[0]

    def pairs(self, rows: Interval, cols: Interval) -> float:
        return float(self.table(np.array([rows]), np.array([cols])).item())

    def table(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        first, wide = cols[None, :, 0], np.diff(cols)[None, :, 0]

        def below(row: np.ndarray) -> np.ndarray:  # pairs of rows [0, row) and columns of the interval
            over = np.maximum(0, row[:, None] - first)
            inside = np.minimum(over, wide)
            return inside * (inside + 1) // 2 + (over - inside) * wide

        return (below(rows[:, 1]) - below(rows[:, 0])).astype(float)


class Grid:
    """Any mask, known on a grid of cells: 0 nothing of the cell is visible, 1 something may be, 2 everything is.

    row_cuts: [m + 1] and col_cuts: [n + 1] positions, cells: int8 [m, n]. A cell that is known in part counts half its pairs.
    """

    def __init__(self, row_cuts: np.ndarray, col_cuts: np.ndarray, cells: np.ndarray) -> None:
        self._rows, self._cols, self.cells = row_cuts, col_cuts, cells
        self._ends = row_cuts.tolist(), col_cuts.tolist()  # a list is searched ten times as fast for one position

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def key(self) -> str:
        return hashlib.sha256(b"".join(x.tobytes() for x in (self._rows, self._cols, self.cells))).hexdigest()

    @functools.cached_property
    def band(self) -> tuple[int, int]:
        """How far before and after itself some row sees."""
        i, j = np.nonzero(self.cells)
        if not len(i):
            return 0, 0
        before, after = (self._rows[i + 1] - 1 - self._cols[j]).max(), (self._cols[j + 1] - 1 - self._rows[i]).max()
        return max(0, int(before)), max(0, int(after))

    def of(self, cells: np.ndarray) -> Grid:
        """Other cells between the same cuts; int8, in any shape."""
        return Grid(self._rows, self._cols, cells.reshape(self.cells.shape))

    def _cells(self, rows: Interval, cols: Interval) -> tuple[np.ndarray, int, int]:
        a, b = _around(self._ends[0], rows)
        c, d = _around(self._ends[1], cols)
        return self.cells[a:b, c:d], a, c

    def seen(self, rows: Interval, cols: Interval) -> Interval:
        cells, _, c = self._cells(rows, cols)
        hit = np.flatnonzero((cells > 0).any(0))
        if not len(hit):
            return (cols[0], cols[0])
        return max(cols[0], int(self._cols[c + hit[0]])), min(cols[1], int(self._cols[c + hit[-1] + 1]))

    def strips(self, rows: Interval, high: int, cols: Interval) -> tuple[list[Interval], list[Interval]]:
        starts = np.arange(*rows, high)
        stops = np.minimum(starts + high, rows[1])
        touched = np.stack([np.searchsorted(self._rows, starts, "right"), np.searchsorted(self._rows, stops, "left")])
        # Strips that touch the same cells see the same; neighbours do.
        first = np.flatnonzero(np.diff(touched, prepend=-1).any(0))
        seen = [self.seen((int(starts[i]), int(stops[i])), cols) for i in first]
        last = [*stops[first[1:] - 1], rows[1]]
        found = [((int(starts[i]), int(z)), c) for i, z, c in zip(first, last, seen, strict=True) if c[0] < c[1]]
        return [r for r, _ in found], [c for _, c in found]

    def every(self, rows: Interval, cols: Interval) -> bool:
        return bool((self._cells(rows, cols)[0] == 2).all())

    def pairs(self, rows: Interval, cols: Interval) -> float:
        return float(self.table(np.array([rows]), np.array([cols])).item())

    def table(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        if not rows.size or not cols.size:
            return np.zeros((len(rows), len(cols)))
        cells, a, c = self._cells((rows.min(), rows.max()), (cols.min(), cols.max()))
        high = _overlaps(self._rows[a : a + cells.shape[0] + 1], rows)
        wide = _overlaps(self._cols[c : c + cells.shape[1] + 1], cols)
        single = (high == 1).astype(float) @ (cells == 1) @ (wide == 1).astype(float).T  # a single pair is visible or not
        return (high @ cells @ wide.T + single) / 2


def _overlaps(cuts: np.ndarray, intervals: np.ndarray) -> np.ndarray:
    """How many positions of each cell lie in each interval: [intervals, cells]."""
    return np.diff(np.clip(cuts[None, :], intervals[:, :1], intervals[:, 1:])).astype(float)


def _around(cuts: list[int], interval: Interval) -> tuple[int, int]:
    """The cells that touch an interval."""
    if interval[0] >= interval[1]:
        return 0, 0
    return bisect.bisect_right(cuts, interval[0]) - 1, bisect.bisect_left(cuts, interval[1])
