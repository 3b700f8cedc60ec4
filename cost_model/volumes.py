"""Bytes a rank sends for one attention, by strategy: the textbook formulas, as the mean over ranks.

U_q = B·(S/P)·H·D·e is one rank's queries, U_k = B·(T/P)·H_kv·D·e its keys. Uneven lengths and heads are counted
exactly with the same intervals the runtime uses: a key/value head goes to each rank that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

Runs = list[list[tuple[int, int]]]  # per rank, the positions it holds


@dataclass(frozen=True)
class Attention:
    """Sizes of one attention: heads [H, H_kv], lengths [S, T], sizes [D, D_v], bytes an element, ranks.

    Row i sees at most the columns [i − before, i + after]: (T, 0) is causal, (W − 1, 0) a window, None no limit.
    `inner` ranks exchange heads in ring × all-to-all. `latent` is the bytes of one position's keys and values where they travel
    as something smaller that they are computed from (0: they do not). `moved` is how many rows and columns are sent over all
    ranks, where that has been counted on the mask at hand. `accumulator` is the bytes of a number that is summed up.
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
    latent: int = 0
    moved: tuple[int, int] | None = None

    @property
    def accumulator(self) -> int:
        return max(4, self.itemsize)

    @property
    def kv_bytes(self) -> int:
        """Of one position's keys and values."""
        return self.latent or self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize


def _runs(count: int, ranks: int) -> list[tuple[int, int]]:
    return [(r * count // ranks, (r + 1) * count // ranks) for r in range(ranks)]


def _contiguous(length: int, ranks: int) -> Runs:
    return [[run] for run in _runs(length, ranks)]


def _head_tail(length: int, ranks: int) -> Runs:
    runs = _runs(length, 2 * ranks)
    return [[runs[r], runs[-1 - r]] for r in range(ranks)] if length >= 2 * ranks else _contiguous(length, ranks)


def _needed(a: Attention, rows: Sequence[tuple[int, int]], cols: Sequence[tuple[int, int]]) -> int:
    """How many of the columns some row sees."""
    total = 0
    for c, d in cols:
        low, high = d, c
        for s, t in rows:
            first = c if a.before is None else max(c, s - a.before)
            last = d if a.after is None else min(d, t + a.after)
            if s < t and first < last:
                low, high = min(low, first), max(high, last)
        total += max(0, high - low)
    return total


def _owner_computes(a: Attention, hold: Callable[[int, int], Runs], ranks: int) -> int:
    """Columns sent by all ranks together, where everyone computes its own rows."""
    rows, cols = hold(a.q_seq, ranks), hold(a.kv_seq, ranks)
    return sum(_needed(a, rows[i], cols[j]) for i in range(ranks) for j in range(ranks) if i != j)


def _both_ways(a: Attention, rows: int, columns: int, kv_bytes: int) -> tuple[int, int]:
    """Keys and values of `columns`, queries of `rows` and their results travel forward; backward the same with the cotangent
    and two statistics in place of the results, and gradients, in the accumulator's type, the other way."""
    query, statistic = a.batch * a.q_heads * a.head_dim, a.batch * a.q_heads * a.accumulator
    out = a.batch * a.q_heads * a.value_dim
    forward = columns * kv_bytes + rows * (query * a.itemsize + out * a.accumulator + statistic)
    gradients = Fraction(columns * kv_bytes * a.accumulator, a.itemsize) + rows * query * a.accumulator
    backward = columns * kv_bytes + rows * (query * a.itemsize + out * a.itemsize + 2 * statistic) + gradients
    return round(Fraction(forward, a.ranks)), round(backward / a.ranks)


def all_to_all(a: Attention) -> tuple[int, int]:
    """(P−1)/P·(2U_q + 2r·U_k) when everything divides, r = max(1, P/H_kv); the same backward."""
    sent = round(_exchanged(a, a.ranks))
    return sent, sent


def _exchanged(a: Attention, near: int) -> Fraction:
    """Heads exchanged within groups of `near` ranks, mean over ranks."""
    groups = max(1, a.q_heads // max(1, a.kv_heads))
    heads = _runs(a.q_heads, near)
    kv = [(lo // groups, -(-hi // groups)) if lo < hi else (0, 0) for lo, hi in heads]
    total = 0
    for length, runs in ((a.q_seq, heads), (a.kv_seq, kv)):
        for source, (s, t) in enumerate(_runs(length, a.ranks)):
            total += sum((hi - lo) * (t - s) for d, (lo, hi) in enumerate(runs) if d != source % near)
    return Fraction(total * (a.head_dim + a.value_dim) * a.batch * a.itemsize, a.ranks)


def gather_kv(a: Attention) -> tuple[int, int]:
    """2(P−1)U_k forward; backward reduce-scatters dK and dV, and gathers K and V again: 4(P−1)U_k."""
    most = -(-a.kv_seq // a.ranks)
    once = (a.ranks - 1) * most * a.batch * a.kv_heads * (a.head_dim + a.value_dim) * a.itemsize
    return once, 2 * once


def ring(a: Attention) -> tuple[int, int]:
    """2(P−1)U_k forward without a mask, 1.5(P−1)U_k under a causal one; backward the same and dK, dV back."""
    return _both_ways(a, *(a.moved or (0, _owner_computes(a, _head_tail, a.ranks))), a.kv_bytes)


def halo(a: Attention) -> tuple[int, int]:
    """2(W−1)·(P−1)/P positions' keys and values for a window W ≤ S/P; backward the same and dK, dV back."""
    return _both_ways(a, *(a.moved or (0, _owner_computes(a, _contiguous, a.ranks))), a.kv_bytes)


def ring_a2a(a: Attention) -> tuple[int, int]:
    """(u−1)/u·(2U_q + 2U_k) for the heads, then a ring of P/u groups over u times as long shards of 1/u of the heads."""
    exchanged = _exchanged(a, a.inner)
    groups = max(1, a.q_heads // max(1, a.kv_heads))
    kv = sum(-(-hi // groups) - lo // groups for lo, hi in _runs(a.q_heads, a.inner))  # with heads that several need
    moved = a.moved or (0, _owner_computes(a, _head_tail, a.ranks // a.inner) if a.inner < a.ranks else 0)
    forward, backward = _both_ways(a, *moved, a.kv_bytes // a.kv_heads * kv)
    return round(exchanged + forward), round(exchanged + backward)


def balanced_ring(a: Attention) -> tuple[int, int]:
    """Causal: (¾P − ½)U_k of keys and values up to half way round, queries there and results back beyond it, the block half way
    split in two. Other masks are taken to be level already: 2(P−1)U_k.
    """
    if a.moved or a.after != 0 or a.before is None or a.before < a.kv_seq - 1 or a.q_seq != a.kv_seq:
        return halo(a)
    lengths = [t - s for s, t in _runs(a.kv_seq, a.ranks)]
    columns = rows = 0
    for i in range(a.ranks):
        for j in range(i):
            if 2 * (i - j) <= a.ranks:
                columns += lengths[j]
            if 2 * (i - j) > a.ranks:
                rows += lengths[i]
            elif 2 * (i - j) == a.ranks:
                rows += lengths[i] // 2
    return _both_ways(a, rows, columns, a.kv_bytes)


COSTS: dict[str, Callable[[Attention], tuple[int, int]]] = {
    "all-to-all": all_to_all,
    "gather-kv": gather_kv,
    "halo": halo,
    "ring": ring,
    "balanced-ring": balanced_ring,
    "ring-a2a": ring_a2a,
}
