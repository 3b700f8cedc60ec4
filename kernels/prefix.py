"""Scans along a split sequence: cumsum, cumprod, logcumsumexp and any associative operator.

Every rank gets the total of each run of positions that a rank holds (one element a run, in the order of the sequence); a run is
scanned and combined with the fold of the totals before it. y_t = (x_1 ∘ .. ∘ x_a) ∘ (x_{a+1} ∘ .. ∘ x_t) holds for every
associative ∘, so nothing but the order of rounding changes. The only communication is the gather of the totals, whose transpose
is a reduce-scatter; the rest is differentiated as it stands. Every rank holds something: see the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import gather_varying, take, tie
from .layout import Shards, offsets

Combine = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def order(shards: Shards) -> Shards:
    """Who holds the total of which run, runs numbered along the sequence: a layout with one position a run."""
    runs = sorted(run for held in shards for run in held)
    return tuple(tuple((runs.index(run), runs.index(run) + 1) for run in held) for held in shards)


def _runs(x: Tensor, dim: int, shards: Shards, rank: int) -> list[tuple[int, Tensor]]:
    """My runs with their numbers."""
    numbers = [number for number, _ in order(shards)[rank]]
    starts = zip(shards[rank], offsets(shards[rank]), strict=True)
    return [(n, take(x, dim, ((at, at + b - a),))) for n, ((a, b), at) in zip(numbers, starts, strict=True)]


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(pieces), dim) if len(pieces) > 1 else pieces[0]


# Torch's scans ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """The total of all positions, and the scan of a run behind the total of what comes before it."""

    fold: Callable[[Tensor, int], Tensor]
    scan: Callable[[Tensor, int], Tensor]
    behind: Callable[[Tensor, Tensor, int], Tensor]


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """`x.logsumexp(dim, keepdim=True)` whose derivative is 0, not NaN, where all of x is -inf."""
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    total = (x - top).exp().sum(dim, keepdim=True)
    some = total != 0
    return torch.where(some, torch.where(some, total, 1).log() + top, -torch.inf)


def _log_behind(before: Tensor, run: Tensor, dim: int) -> Tensor:
    """In one scan: torch's derivative is NaN while a scan is -inf, as that of a run alone is where the run begins with -inf."""
    return torch.cat([before, run], dim).logcumsumexp(dim).narrow(dim, 1, run.shape[dim])


KINDS = {
    "cumsum": Kind(lambda x, d: x.sum(d, keepdim=True), torch.cumsum, lambda p, x, d: p + x.cumsum(d)),
    # Right at zeros too: a product of polynomials, each with torch's derivative.
    "cumprod": Kind(lambda x, d: x.prod(d, keepdim=True), torch.cumprod, lambda p, x, d: p * x.cumprod(d)),
    "logcumsumexp": Kind(log_sum_exp, torch.logcumsumexp, _log_behind),
}


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`, in the type to add up in: partial results are not rounded to 16 bits."""
    return x.to(dtype).to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)


def totals(x: Tensor, dim: int, kind: str, dtype: torch.dtype, shards: Shards, rank: int, group: str) -> Tensor:
    """x: my part of the sequence along `dim` -> the totals of all ranks' runs along `dim`, in the order of the sequence."""
    mine = [KINDS[kind].fold(run, dim) for _, run in _runs(_widened(x, dtype), dim, shards, rank)]
    return gather_varying(_joined(mine, dim), dim, order(shards), 1, 1, rank, group)


def scanned(x: Tensor, totals: Tensor, dim: int, kind: str, dtype: torch.dtype, shards: Shards, rank: int) -> Tensor:
    """My part of the scan `kind` of the sequence, with result type `dtype`."""
    rule, results = KINDS[kind], []
    runs = _runs(_widened(x, dtype), dim, shards, rank)
    for number, run in runs:
        before = rule.fold(totals.narrow(dim, 0, number), dim) if number else None
        results.append(rule.scan(run, dim) if before is None else rule.behind(before, run, dim))
    result = _joined(results, dim)
    return (result if any(number for number, _ in runs) else tie(result, totals)).to(dtype)


# Any associative operator -------------------------------------------------------------------------

_COMBINES: dict[str, Callable[..., Sequence[Tensor]]] = {}  # a custom op takes strings, not callables


def register(key: str, combine: Callable[..., Sequence[Tensor]]) -> None:
    """`combine(*left, *right, *extra)` on single positions gives the new values first; `key` is the name that graphs carry."""
    _COMBINES[key] = combine


def _combine(key: str, extra: Sequence[Tensor], prefix: bool = False) -> Combine:
    """The operator on many positions at once, along dimension 0; of a prefix there is one for all of them."""

    def combine(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        batch = (*([None if prefix else 0] * len(left)), *([0] * len(right)), *([None] * len(extra)))
        return list(torch.vmap(lambda *xs: tuple(_COMBINES[key](*xs))[: len(left)], batch)(*left, *right, *extra))

    return combine


def scan(xs: Sequence[Tensor], combine: Combine) -> list[Tensor]:
    """Inclusive scan along dimension 0 of all xs: pairs are combined, their scan gives every second result.

    Blelloch, "Prefix sums and their applications" (1990): O(n) combinations in O(log n) steps.
    """
    xs = list(xs)
    n = xs[0].shape[0]
    if n < 2:
        return xs
    odd = scan(combine([x[: n - 1 : 2] for x in xs], [x[1::2] for x in xs]), combine)
    if n == 2:
        return [torch.cat([x[:1], o]) for x, o in zip(xs, odd, strict=True)]
    even = combine([o[: (n - 1) // 2] for o in odd], [x[2::2] for x in xs])
    return [_interleaved(torch.cat([x[:1], e]), o) for x, e, o in zip(xs, even, odd, strict=True)]


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """[e0, o0, e1, o1, ..]; there is one odd element fewer where the length is odd."""
    n = odd.shape[0]
    pairs = torch.stack([even[:n], odd], 1).flatten(0, 1)
    return torch.cat([pairs, even[n:]])


def associative_scan(xs: Sequence[Tensor], extra: Sequence[Tensor], key: str) -> list[Tensor]:
    """The whole scan on one device."""
    return scan(xs, _combine(key, extra))


def scan_runs(xs: Sequence[Tensor], extra: Sequence[Tensor], key: str, shards: Shards, rank: int) -> list[Tensor]:
    """xs: [my part of the sequence, ...] each -> each of my runs scanned by itself."""
    runs = zip(*(_runs(x, 0, shards, rank) for x in xs), strict=True)
    results = [scan([x for _, x in run], _combine(key, extra)) for run in runs]
    return [_joined(pieces, 0) for pieces in zip(*results, strict=True)]


def associative_totals(xs: Sequence[Tensor], shards: Shards, rank: int, group: str) -> list[Tensor]:
    """xs: runs that were scanned -> the last elements of all ranks' runs, in order; one exchange for each type."""
    wholes: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in xs):
        mine = [i for i, x in enumerate(xs) if x.dtype == dtype]
        last = [_joined([run[-1:] for _, run in _runs(xs[i], 0, shards, rank)], 0).flatten(1) for i in mine]
        whole = gather_varying(torch.cat(last, 1), 0, order(shards), 1, 1, rank, group)
        for i, piece in zip(mine, whole.split([x.shape[1] for x in last], 1), strict=True):
            wholes[i] = piece.reshape(piece.shape[0], *xs[i].shape[1:])
    return [wholes[i] for i in range(len(xs))]


def behind(
    xs: Sequence[Tensor], totals: Sequence[Tensor], extra: Sequence[Tensor], key: str, shards: Shards, rank: int
) -> list[Tensor]:
    """Runs that were scanned by themselves -> my part of the scan of the whole sequence."""
    folded = scan(totals, _combine(key, extra))
    ahead, results = _combine(key, extra, prefix=True), []
    runs = list(zip(*(_runs(x, 0, shards, rank) for x in xs), strict=True))
    for run in runs:
        number, pieces = run[0][0], [x for _, x in run]
        results.append(ahead([f[number - 1] for f in folded], pieces) if number else pieces)
    joined = [_joined(pieces, 0) for pieces in zip(*results, strict=True)]
    used = any(number for run in runs for number, _ in run)
    return joined if used else [tie(x, *totals, *extra) for x in joined]


@torch.library.custom_op("asp::associative_scan", mutates_args=())
def _op(xs: list[Tensor], extra: list[Tensor], key: str) -> list[Tensor]:
    """What captured graphs hold in place of torch's higher-order operator; the rules replace it by the functions above."""
    return [x.clone() for x in associative_scan(xs, extra, key)]


@_op.register_fake
def _(xs: list[Tensor], extra: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
