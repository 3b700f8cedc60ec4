"""Bytes a rank sends for one attention, by strategy: the textbook formulas, as the mean over ranks.

U_q = B·(S/P)·H·D·e is one rank's queries, U_k = B·(T/P)·H_kv·D·e its keys. Uneven lengths and heads are counted
exactly with the same intervals the runtime uses: a key/value head goes to each rank that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Attention:
    """Sizes of one attention: heads [H, H_kv], lengths [S, T], sizes [D, D_v], bytes an element, ranks."""

    batch: int
    q_heads: int
    kv_heads: int
    q_seq: int
    kv_seq: int
    head_dim: int
    value_dim: int
    itemsize: int
    ranks: int


def _runs(count: int, ranks: int) -> list[tuple[int, int]]:
    return [(r * count // ranks, (r + 1) * count // ranks) for r in range(ranks)]


def all_to_all(a: Attention) -> tuple[int, int]:
    """(P−1)/P·(2U_q + 2r·U_k) when everything divides, r = max(1, P/H_kv); the same backward."""
    groups = max(1, a.q_heads // max(1, a.kv_heads))
    heads = _runs(a.q_heads, a.ranks)
    kv = [(lo // groups, -(-hi // groups)) if lo < hi else (0, 0) for lo, hi in heads]
    total = Fraction(0)
    for source, (s0, s1) in enumerate(_runs(a.q_seq, a.ranks)):
        total += sum((hi - lo) * (s1 - s0) * (a.head_dim + a.value_dim) for d, (lo, hi) in enumerate(heads) if d != source)
    for source, (t0, t1) in enumerate(_runs(a.kv_seq, a.ranks)):
        total += sum((hi - lo) * (t1 - t0) * (a.head_dim + a.value_dim) for d, (lo, hi) in enumerate(kv) if d != source)
    sent = round(total * a.batch * a.itemsize / a.ranks)
    return sent, sent


def gather_kv(a: Attention) -> tuple[int, int]:
    """2(P−1)U_k forward; backward reduce-scatters dK and dV, and gathers K and V again: 4(P−1)U_k."""
    most = -(-a.kv_seq // a.ranks)
    once = (a.ranks - 1) * a.batch * most * a.kv_heads * (a.head_dim + a.value_dim) * a.itemsize
    return once, 2 * once


COSTS: dict[str, Callable[[Attention], tuple[int, int]]] = {"all-to-all": all_to_all, "gather-kv": gather_kv}
