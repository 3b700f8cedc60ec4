"""What each strategy of a linear attention moves, counted: states, pairs (A, state), or heads of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .volumes import contiguous, head_tail, needed_heads, shares

Shape = Sequence[int]


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of one linear attention: heads of values, queries and keys, length T, a state [K, V] a head, ranks.

    `decays` are the numbers a token and head has for them (0, 1 or K); with `remove` a rank's step on a state is a matrix. `node`
    neighbouring ranks are close; a chain sends a state in `blocks`. `relaid`: tokens come from, and go back to, a head-tail
    layout.
    """

    batch: int
    heads: int
    query_heads: int
    key_heads: int
    seq: int
    key_dim: int
    value_dim: int
    decays: int
    remove: bool
    itemsize: int
    ranks: int
    node: int = 1
    blocks: int = 8
    relaid: bool = False

    @classmethod
    def of(
        cls, q: Shape, k: Shape, v: Shape, decay: Shape | None, remove: Shape | None, itemsize: int, ranks: int, node: int = 1
    ) -> LinearAttention:
        """From the shapes of operands: [B, T, heads, K or V], decay also [B, T, heads]."""
        decays = 0 if decay is None else 1 if len(decay) == 3 else decay[3]
        return cls(v[0], v[2], q[2], k[2], v[1], k[3], v[3], decays, remove is not None, itemsize, ranks, node)

    @property
    def state(self) -> int:
        """Bytes of a state: float32, or float64 with float64 inputs."""
        return self.batch * self.heads * self.key_dim * self.value_dim * max(4, self.itemsize)

    @property
    def pair(self) -> int:
        """Bytes of what a rank does to any state: S' = A S + B."""
        width = self.key_dim**2 if self.remove else max(1, self.decays)
        return self.state + self.batch * self.heads * width * max(4, self.itemsize)


@dataclass(frozen=True)
class Counts:
    """Over all ranks and in one direction: `states` and `pairs` that travel; `numbers` of tokens and results that change
    hands, for each sequence."""

    states: int = 0
    pairs: int = 0
    numbers: int = 0


def all_scan(a: LinearAttention) -> Counts:
    """A chain: one state over each of P − 1 links, and no more of it where A is a matrix."""
    return Counts(states=a.ranks - 1)


def log_step(a: LinearAttention) -> Counts:
    """⌈log₂ P⌉ exchanges of (A, B): rank r sends to r + 1, r + 2, r + 4, .."""
    total, step = 0, 1
    while step < a.ranks:
        total, step = total + a.ranks - step, 2 * step
    return Counts(pairs=total)


def two_level(a: LinearAttention) -> Counts:
    """(A, B) down each node, one state from node to node, and one to each rank of a node."""
    sizes = [min(a.node, a.ranks - start) for start in range(0, a.ranks, a.node)]
    inside = sum(n - 1 for n in sizes)
    return Counts(states=len(sizes) - 1 + inside, pairs=inside)


def gather_states(a: LinearAttention) -> Counts:
    """Every (A, B) to every later rank: half of an all-gather (LASP-2)."""
    return Counts(pairs=a.ranks * (a.ranks - 1) // 2)


def all_to_all(a: LinearAttention) -> Counts:
    """Heads of everything a token has, and of the result, change hands: (P − 1)/P of each."""
    heads, tokens = shares(a.heads, a.ranks), shares(a.seq, a.ranks)
    queries, keys = (needed_heads(a.heads, shared, a.ranks) for shared in (a.query_heads, a.key_heads))
    wide = 2 * a.value_dim + a.decays + (a.key_dim if a.remove else 0)
    each = [heads[to] * wide + (queries[to] + keys[to]) * a.key_dim for to in range(a.ranks)]
    return Counts(numbers=sum((a.seq - tokens[to]) * each[to] for to in range(a.ranks)))


def reordered(seq: int, ranks: int) -> float:
    """The share of positions that a head-tail layout leaves to another rank than contiguous order."""
    folded, straight = head_tail(seq, ranks), contiguous(seq, ranks)
    here = np.minimum(folded[..., 1], straight[..., 1]) - np.maximum(folded[..., 0], straight[..., 0])
    return 1 - float(np.maximum(0, here).sum()) / seq


LINEAR_COUNTS: dict[str, Callable[[LinearAttention], Counts]] = {
    "all-scan": all_scan,
    "log-step": log_step,
    "two-level": two_level,
    "gather-states": gather_states,
    "all-to-all": all_to_all,
}

# Parameters ---------------------------------------------------------------------------------------

BLOCKS = (1, 2, 4, 8, 16, 32, 64)  # into how many pieces a chain may cut a state


def chains(a: LinearAttention) -> list[int]:
    """As many blocks as a state has rows of heads and columns, at most; one rank has none to send."""
    most = a.batch * a.heads * a.value_dim if a.ranks > 1 else 1
    return [k for k in BLOCKS if k <= most]


def nodes(ranks: int) -> list[int]:
    """Ranks of a node, where there are two levels."""
    return [n for n in range(2, ranks) if ranks % n == 0]


# What the runtime calls the exchanges of All-Scan.
ALGORITHMS = {"chain": "all-scan", "log-step": "log-step", "two-level": "two-level", "gather": "gather-states"}


def bytes_sent(strategy: str, a: LinearAttention) -> int:
    """What a rank sends in one direction, as the mean over ranks."""
    moved = LINEAR_COUNTS[strategy](a)
    total = moved.states * a.state + moved.pairs * a.pair + moved.numbers * a.batch * a.itemsize
    return round(Fraction(total, a.ranks))
