"""Random numbers that depend on the element, not on who computes it.

A mask drawn from (seed, site, global index of the element) is the same on any number of ranks, in any
layout, and again when a backward pass recomputes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MIX1, _MIX2 = -49064778989728563, -4265267296055464877  # the constants of splitmix64's finaliser, as int64


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def bits(index: Tensor, seed: Tensor, salt: int) -> Tensor:
    """24 random bits for each int64 `index` (splitmix64's finaliser over index and seed)."""
    x = (index + 1) * -7046029254386353131 + seed + salt * 2862933555777941757 % (1 << 63)
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    x = x ^ _shift(x, 31)
    return _shift(x, 40)


def positions(pieces: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The integers of half-open `pieces`, in order: int64 [sum of their lengths]."""
    runs = [torch.arange(a, b, device=device) for a, b in pieces]
    return torch.cat(runs) if len(runs) != 1 else runs[0]


def dropout(x: Tensor, p: float, seed: Tensor, salt: int, shape: Sequence[int], where: Sequence[Tensor | int]) -> Tensor:
    """Dropout of a local piece `x` of a value of global `shape`.

    `where[d]` says which global indices dimension d of x holds: the first one of a run, or an int64 tensor.
    """
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    for d, at in enumerate(where):
        if isinstance(at, int):
            at = torch.arange(at, at + x.shape[d], device=x.device)
        index = index * shape[d] + at.reshape(-1, *[1] * (x.dim() - d - 1))
    keep = bits(index, seed, salt) >= round(p * (1 << 24))
    return torch.where(keep, x / (1 - p), torch.zeros((), dtype=x.dtype, device=x.device)) if p < 1 else x * 0
