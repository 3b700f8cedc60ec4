"""What each strategy of a softmax attention moves and computes, counted.

Uneven lengths and heads are counted exactly, with the same intervals the runtime uses: a key/value head goes to each rank that
needs it. `prices` turns counts into bytes and seconds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Attention:
    """Sizes of one attention: heads [H, H_kv], lengths [S, T], sizes [D, D_v], bytes an element, ranks.

    Row i sees at most the columns [i − before, i + after]: (T, 0) is causal, (W − 1, 0) a window, None no limit.
    `inner` ranks exchange heads in ring × all-to-all; `turns` in which all-to-all computes a rank's heads. `latent` is the bytes
    of one position's keys and values where they travel as something smaller that they are computed from (0: they do not).
    `folded`: ranks hold the model's sequence in head-tail layout. `by_rows`: no one kernel covers it; blocks of rows are
    computed with a mask made for each, and again before their gradients are. What has been counted on the mask at hand takes the
    place of what follows from the band: `moved`, rows and columns sent over all ranks; `work`, pairs of the busiest rank for
    each head; `steps`; `calls` of the kernel for a rank's own block.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_seq: int
    kv_seq: int
    head_dim: int
    value_dim: int
    itemsize: int
    ranks: int
    before: int | None = None
    after: int | None = None
    inner: int = 1
    turns: int = 1
    latent: int = 0
    folded: bool = False
    by_rows: bool = False
    moved: tuple[int, int] | None = None
    work: float | None = None
    steps: int | None = None
    calls: int | None = None

    @property
    def accumulator(self) -> int:
        """Bytes of a number that is summed up."""
        return max(4, self.itemsize)

    @property
    def banded(self) -> Attention:
        """The same without what was counted on a mask: it may stand for other lengths and ranks."""
        return replace(self, moved=None, work=None, steps=None, calls=None)

    @property
    def causal(self) -> bool:
        return self.after == 0 and self.before is not None and self.before >= self.kv_seq - 1 and self.q_seq == self.kv_seq


@dataclass(frozen=True)
class Counts:
    """Over all ranks: `rows` and `columns` that travel, (position, head) pairs of queries and of keys `exchanged`, and of those
    the `keys`; `own_keys`: 1 where each turn has its own. Of the busiest rank: `work`, the (query, key, head) triples it
    computes. `kv_heads`: heads in which columns travel. `steps` in which they do. `calls` of the kernel for a rank's own block.
    """

    work: float
    rows: int = 0
    columns: int = 0
    exchanged: int = 0
    kv_heads: int = 0
    steps: int = 0
    calls: int = 1
    keys: int = 0
    own_keys: int = 0


Runs = np.ndarray  # [ranks, runs, 2]: the intervals of positions each rank holds


def _split(count: int, parts: int) -> np.ndarray:
    cuts = np.arange(parts + 1, dtype=np.int64) * count // parts
    return np.stack([cuts[:-1], cuts[1:]], -1)


def shares(count: int, parts: int) -> list[int]:
    """Sizes of the parts of `count`, as the runtime cuts it."""
    return [int(last - first) for first, last in _split(count, parts)]


def contiguous(length: int, ranks: int) -> Runs:
    return _split(length, ranks)[:, None]


def head_tail(length: int, ranks: int) -> Runs:
    runs = _split(length, 2 * ranks)
    return np.stack([runs[:ranks], runs[: ranks - 1 : -1]], 1) if length >= 2 * ranks else contiguous(length, ranks)


def visible_pairs(a: Attention, rows: Runs, cols: Runs) -> np.ndarray:
    """[row rank, column rank]: pairs that the band leaves."""

    def below(delta: int | None) -> np.ndarray | int:
        """Pairs with column − row <= delta."""
        if delta is None:
            delta = a.kv_seq
        s, t = (rows[:, None, :, None, i] for i in (0, 1))
        c, d = (cols[None, :, None, :, i] for i in (0, 1))
        wide = d - c

        def summed(v: np.ndarray) -> np.ndarray:
            inside = np.clip(v, 0, wide)
            return inside * (inside - 1) // 2 + np.maximum(0, v - wide) * wide

        shift = delta + 1 - c
        return summed(t + shift) - summed(s + shift)

    hidden = below(-a.before - 1) if a.before is not None else 0
    return np.asarray(below(a.after) - hidden).sum((2, 3))


def needed_columns(a: Attention, rows: Runs, cols: Runs) -> np.ndarray:
    """[row rank, column rank]: columns that some row sees, as one interval for each run of columns."""
    total = np.zeros((len(rows), len(cols)), dtype=np.int64)
    for run in range(cols.shape[1]):
        c, d = (cols[None, :, run, i] for i in (0, 1))
        low, high = d + 0 * rows[:, :1, 0], c + 0 * rows[:, :1, 0]
        for part in range(rows.shape[1]):
            s, t = (rows[:, None, part, i] for i in (0, 1))
            first = c if a.before is None else np.maximum(c, s - a.before)
            last = d if a.after is None else np.minimum(d, t + a.after)
            seen = (s < t) & (first < last)
            low, high = np.where(seen, np.minimum(low, first), low), np.where(seen, np.maximum(high, last), high)
        total += np.maximum(0, high - low)
    return total


def _busiest(a: Attention, hold: Callable[[int, int], Runs], ranks: int) -> float:
    """Pairs for each head of the rank with most rows to compute."""
    if a.work is not None:
        return a.work
    return float(visible_pairs(a, hold(a.q_seq, ranks), hold(a.kv_seq, ranks)).sum(1).max())


def _all_pairs(a: Attention) -> float:
    return float(visible_pairs(a, contiguous(a.q_seq, 1), contiguous(a.kv_seq, 1)).sum())


def needed_heads(heads: int, shared: int, parts: int) -> list[int]:
    """How many of `shared` heads, each of which several of `heads` share, each part of these needs."""
    groups = max(1, heads // max(1, shared))
    return [int(-(-last // groups) - first // groups) if first < last else 0 for first, last in _split(heads, parts)]


@functools.lru_cache(maxsize=4096)
def in_turns(heads: int, kv_heads: int, ranks: int, turns: int) -> tuple[list[list[int]], list[list[int]]] | None:
    """[turn][rank]: heads that are computed, and key/value heads that come for them; those that every turn needs come for the
    first. None where only some turns of a rank share one, which would come twice."""
    groups = max(1, heads // max(1, kv_heads))
    own = [[(a + c, a + d) for c, d in _split(b - a, turns)] for a, b in _split(heads, ranks)]
    needed = [[(c // groups, -(-d // groups)) if c < d else (c // groups, c // groups) for c, d in each] for each in own]
    shared = all(len(set(each)) == 1 for each in needed)
    if not shared and any(b > c for (_, b), (c, _) in itertools.pairwise(itertools.chain(*needed))):
        return None
    queries, keys = ([[int(b - a) for a, b in each] for each in zip(*x, strict=True)] for x in (own, needed))
    return queries, [keys[0], *([0] * ranks for _ in range(turns - 1))] if shared else keys


def head_turns(heads: int, kv_heads: int, ranks: int) -> list[int]:
    """In how many turns, beside one, ranks may compute their heads: each has some in every turn."""
    return [t for t in (2, 4) if 1 < ranks <= heads // t and in_turns(heads, kv_heads, ranks, t)]


def _exchanged(a: Attention, near: int) -> tuple[int, int]:
    """(Position, head) pairs of queries and of keys that change hands within groups of `near` ranks, over all ranks."""
    heads, kv = np.diff(_split(a.q_heads, near))[:, 0], np.array(needed_heads(a.q_heads, a.kv_heads, near))

    def moved(length: int, counts: np.ndarray) -> int:
        tokens = np.diff(_split(length, a.ranks))[:, 0]
        return int((tokens * (counts.sum() - counts[np.arange(a.ranks) % near])).sum())

    return moved(a.q_seq, heads), moved(a.kv_seq, kv)


def _ring(a: Attention, hold: Callable[[int, int], Runs]) -> Counts:
    ranks = a.ranks
    needed = needed_columns(a, hold(a.q_seq, ranks), hold(a.kv_seq, ranks))
    moved = a.moved or (0, int(needed.sum() - np.trace(needed)))
    return Counts(_busiest(a, hold, ranks) * a.q_heads, *moved, 0, a.kv_heads, _steps(a, needed))


def _steps(a: Attention, needed: np.ndarray) -> int:
    """Distances at which some rank needs something."""
    if a.steps is not None:
        return a.steps
    ranks = len(needed)
    away = (np.arange(ranks)[:, None] - np.arange(ranks)) % ranks
    return len(np.unique(away[(needed > 0) & (away > 0)]))


def all_to_all(a: Attention) -> Counts:
    most = -(-a.q_heads // a.ranks)
    queries, keys = _exchanged(a, a.ranks)
    dealt = in_turns(a.q_heads, a.kv_heads, a.ranks, a.turns)
    assert dealt is not None
    work = (_all_pairs(a) if a.work is None else a.work) * most
    return Counts(work, exchanged=queries + keys, keys=keys, own_keys=int(a.turns > 1 and any(dealt[1][-1])))


def gather_kv(a: Attention) -> Counts:
    columns = a.ranks * (a.ranks - 1) * -(-a.kv_seq // a.ranks)
    rows, cols = (head_tail if a.folded else contiguous)(a.q_seq, a.ranks), contiguous(a.kv_seq, 1)
    work = float(visible_pairs(a, rows, cols).max()) if a.work is None else a.work
    return Counts(work * a.q_heads, 0, columns, 0, a.kv_heads, min(1, a.ranks - 1))


def ring(a: Attention) -> Counts:
    return replace(_ring(a, head_tail), calls=_folded_calls(a, a.ranks))


def _folded_calls(a: Attention, places: int) -> int:
    """Under a causal mask a rank's own two runs are three tiles: two below the diagonal, and one between them."""
    return 3 if a.causal and places > 1 and a.q_seq >= 2 * places else 1


def halo(a: Attention) -> Counts:
    return _ring(a, contiguous)


def ring_a2a(a: Attention) -> Counts:
    """Heads in groups of u, then a ring of P/u groups over u times as long shards of 1/u of the heads."""
    kv = sum(needed_heads(a.q_heads, a.kv_heads, a.inner))  # with heads that several need
    places = a.ranks // a.inner
    needed = (
        needed_columns(a, head_tail(a.q_seq, places), head_tail(a.kv_seq, places)) if places > 1 else np.zeros((1, 1), dtype=int)
    )
    moved = a.moved or (0, int(needed.sum() - np.trace(needed)))
    work = _busiest(a, head_tail, places) * -(-a.q_heads // a.inner)
    steps = _steps(a, needed) if places > 1 else 0
    return Counts(work, *moved, sum(_exchanged(a, a.inner)), kv, steps, _folded_calls(a, places))


def balanced_ring(a: Attention) -> Counts:
    """Causal: keys and values up to half way round, queries there and results back beyond it, the block half way split in two.
    Other masks are taken to be level already.
    """
    if a.moved or not a.causal:
        return halo(a)
    lengths = np.diff(_split(a.kv_seq, a.ranks))[:, 0]
    i, j = np.meshgrid(np.arange(a.ranks), np.arange(a.ranks), indexing="ij")
    away = 2 * (i - j)
    columns = int(lengths[j[(i > j) & (away <= a.ranks)]].sum())
    rows = int(lengths[i[(i > j) & (away > a.ranks)]].sum() + (lengths[i[(i > j) & (away == a.ranks)]] // 2).sum())
    work = _all_pairs(a) / a.ranks if a.work is None else a.work
    return Counts(work * a.q_heads, rows, columns, 0, a.kv_heads, a.ranks // 2)


COUNTS: dict[str, Callable[[Attention], Counts]] = {
    "all-to-all": all_to_all,
    "gather-kv": gather_kv,
    "halo": halo,
    "ring": ring,
    "balanced-ring": balanced_ring,
    "ring-a2a": ring_a2a,
}


def head_groups(ranks: int, heads: int) -> list[int]:
    """How many ranks may exchange heads before a ring: divisors of the ranks up to the heads; all ranks only if no other is."""
    fitting = [u for u in range(2, ranks + 1) if ranks % u == 0 and u <= heads]
    return [u for u in fitting if u < ranks] or fitting


@functools.lru_cache(maxsize=4096)
def counted(strategy: str, sizes: Attention) -> Counts:
    """What a strategy moves and computes for an attention of these sizes."""
    found = COUNTS[strategy](sizes)
    return found if sizes.calls is None else replace(found, calls=sizes.calls)
