"""What a value is on the `sp` axis: the types of the compiler.

The vocabulary is DTensor's, the rules for differentiation those of JAX `shard_map`'s varying/invariant
types. On every rank a value is

    Replicate   the whole value, equal everywhere; so is its cotangent
    Varying     the whole value, equal everywhere; each rank's cotangent is a part of the sum
    Shard       this rank's part of the sequence along one dimension; so is its cotangent
    Partial     a term of a sum over ranks; its cotangent is replicated
    Pairwise    a value with two sequence axes, not computed until a consumer says how
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..kernels.layout import Layout


@dataclass(frozen=True)
class Replicate:
    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True)
class Varying:
    def __str__(self) -> str:
        return "Varying"


@dataclass(frozen=True)
class Partial:
    def __str__(self) -> str:
        return "Partial(sum)"


@dataclass(frozen=True)
class Shard:
    """Dimension `dim`, of global size outer·layout.length·inner, is split along its middle factor."""

    dim: int
    layout: Layout
    outer: int = 1
    inner: int = 1

    def __str__(self) -> str:
        merged = f" of [{self.outer}, {self.layout.length}, {self.inner}]" if self.merged else ""
        return f"Shard({self.dim}{merged})"

    @property
    def merged(self) -> bool:
        return self.outer != 1 or self.inner != 1

    def at(self, dim: int) -> Shard:
        """The same part along another dimension."""
        return Shard(dim, self.layout, self.outer, self.inner)

    def local_size(self, rank: int) -> int:
        return self.outer * self.layout.size(rank) * self.inner

    def local_shape(self, shape: Sequence[int], rank: int) -> list[int]:
        local = list(shape)
        local[self.dim] = self.local_size(rank)
        return local

    @property
    def held_positions(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per rank, the runs of global indices along `dim` that it holds, in local order."""
        runs = []
        for intervals in self.layout.shards:
            runs.append(
                tuple(
                    ((o * self.layout.length + a) * self.inner, (o * self.layout.length + b) * self.inner)
                    for o in range(self.outer)
                    for a, b in intervals
                )
            )
        return tuple(runs)


@dataclass(frozen=True)
class Pairwise:
    """Rows (queries) along one dimension, columns (keys) along another."""

    row: Shard
    col: Shard

    def __str__(self) -> str:
        return f"Pairwise({self.row.dim}, {self.col.dim})"


Placement = Replicate | Varying | Partial | Shard | Pairwise

R = Replicate()
V = Varying()
P = Partial()
