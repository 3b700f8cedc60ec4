"""Scans along a split sequence: cumsum, cumprod, logcumsumexp and any associative operator.

Each rank scans the runs of positions it holds, all ranks get the total of every run (one element of each, in the order of the
sequence), and a run is combined with the fold of the totals before it. y_t = (x_1 ∘ .. ∘ x_a) ∘ (x_{a+1} ∘ .. ∘ x_t) holds for
every associative ∘, so nothing but the order of rounding changes. The only communication is the gather of the totals, whose
transpose is a reduce-scatter; the rest is differentiated as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .comm import gather_varying, take, tie
from .layout import Shards, offsets

Combine = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def order(shards: Shards) -> Shards:
    """Who holds the total of which run, runs numbered along the sequence: a layout with one position a run."""
    runs = sorted(run for held in shards for run in held)
    return tuple(tuple((runs.index(run), runs.index(run) + 1) for run in held) for held in shards)


def _runs(x: Tensor, dim: int, shards: Shards, rank: int) -> list[Tensor]:
    return [take(x, dim, ((at, at + b - a),)) for (a, b), at in zip(shards[rank], offsets(shards[rank]), strict=True)]


def _joined(pieces: Sequence[Tensor], x: Tensor, dim: int) -> Tensor:
    """What a rank has along `dim`; nothing of x where it holds no run."""
    return torch.cat(list(pieces), dim) if len(pieces) > 1 else pieces[0] if pieces else x.narrow(dim, 0, 0)


def _totals(x: Tensor, totals: Sequence[Tensor], dim: int, shards: Shards, rank: int, group: str) -> Tensor:
    """The totals of all runs along `dim`, in the order of the sequence; mine have size 1 there. x gives shape and type."""
    return gather_varying(_joined(totals, x, dim), dim, order(shards), 1, 1, rank, group)


def _numbers(shards: Shards, rank: int) -> list[int]:
    return [number for number, _ in order(shards)[rank]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to add up in: partial results are not rounded to 16 bits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cumsum(x: Tensor, dim: int, dtype: torch.dtype, shards: Shards, rank: int, group: str) -> Tensor:
    """x: any shape, my part of the sequence along `dim` -> the same part of `x.cumsum(dim, dtype=dtype)`."""
    return _cumulative(x, dim, dtype, torch.cumsum, torch.sum, torch.add, shards, rank, group)


def cumprod(x: Tensor, dim: int, dtype: torch.dtype, shards: Shards, rank: int, group: str) -> Tensor:
    """As `cumsum`, of `x.cumprod`. Right at zeros too: its pieces are polynomials with torch's derivatives at zeros."""
    return _cumulative(x, dim, dtype, torch.cumprod, torch.prod, torch.mul, shards, rank, group)


def _cumulative(
    x: Tensor,
    dim: int,
    dtype: torch.dtype,
    scan: Callable[..., Tensor],
    fold: Callable[..., Tensor],
    combine: Callable[[Tensor, Tensor], Tensor],
    shards: Shards,
    rank: int,
    group: str,
) -> Tensor:
    x = x.to(dtype).to(wide(dtype))
    runs = [scan(run, dim) for run in _runs(x, dim, shards, rank)]
    totals = _totals(x, [run.narrow(dim, run.shape[dim] - 1, 1) for run in runs], dim, shards, rank, group)
    before = [fold(totals.narrow(dim, 0, number), dim, keepdim=True) for number in _numbers(shards, rank)]
    results = [combine(total, run) for total, run in zip(before, runs, strict=True)]
    result = _joined(results, x, dim)
    return (result if runs else tie(result, totals)).to(dtype)


def logcumsumexp(x: Tensor, dim: int, shards: Shards, rank: int, group: str) -> Tensor:
    """As `cumsum`, of `x.logcumsumexp(dim)`.

    A run is scanned behind what comes before it and not combined afterwards: torch's derivative is not a number where the
    scan is still -inf, as it is at the start of a run that begins with -inf.
    """
    dtype = x.dtype
    x = x.to(wide(dtype))
    runs = _runs(x, dim, shards, rank)
    totals = _totals(x, [log_sum_exp(run, dim) for run in runs], dim, shards, rank, group)
    results = []
    for number, run in zip(_numbers(shards, rank), runs, strict=True):
        before = [log_sum_exp(totals.narrow(dim, 0, number), dim)] if number else []
        scanned = torch.cat([*before, run], dim).logcumsumexp(dim)
        results.append(scanned.narrow(dim, len(before), run.shape[dim]))
    result = _joined(results, x, dim)
    return (result if any(_numbers(shards, rank)) else tie(result, totals)).to(dtype)


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """`x.logsumexp(dim, keepdim=True)` whose derivative is 0, not NaN, where all of x is -inf."""
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    total = (x - top).exp().sum(dim, keepdim=True)
    some = total != 0
    return torch.where(some, torch.where(some, total, 1).log() + top, -torch.inf)


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


def split_associative_scan(
    xs: Sequence[Tensor], extra: Sequence[Tensor], key: str, shards: Shards, rank: int, group: str
) -> list[Tensor]:
    """xs: [my part of the sequence, ...] each -> my part of each result."""
    combine, ahead = _combine(key, extra), _combine(key, extra, prefix=True)
    runs = [scan(run, combine) for run in zip(*(_runs(x, 0, shards, rank) for x in xs), strict=True)]
    wholes = _packed_totals(xs, [[x[-1:] for x in run] for run in runs], shards, rank, group)
    folded = scan(wholes, combine)
    results = []
    for number, run in zip(_numbers(shards, rank), runs, strict=True):
        results.append(ahead([f[number - 1] for f in folded], run) if number else run)
    joined = [_joined([run[i] for run in results], x, 0) for i, x in enumerate(xs)]
    return joined if any(_numbers(shards, rank)) else [tie(x, *wholes, *extra) for x in joined]


def _packed_totals(
    xs: Sequence[Tensor], totals: Sequence[Sequence[Tensor]], shards: Shards, rank: int, group: str
) -> list[Tensor]:
    """`_totals` of several tensors along dimension 0, in one exchange a type."""
    wholes: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in xs):
        mine = [i for i, x in enumerate(xs) if x.dtype == dtype]
        widths = [xs[i].shape[1:].numel() for i in mine]
        last = [_joined([run[i] for run in totals], xs[i], 0) for i in mine]
        flat = torch.cat([x.reshape(x.shape[0], w) for x, w in zip(last, widths, strict=True)], 1)
        whole = gather_varying(flat, 0, order(shards), 1, 1, rank, group)
        for i, piece in zip(mine, whole.split(widths, 1), strict=True):
            wholes[i] = piece.reshape(piece.shape[0], *xs[i].shape[1:])
    return [wholes[i] for i in range(len(xs))]


@torch.library.custom_op("asp::associative_scan", mutates_args=())
def _op(xs: list[Tensor], extra: list[Tensor], key: str) -> list[Tensor]:
    """What captured graphs hold in place of torch's higher-order operator; the rules replace it by the functions above."""
    return [x.clone() for x in associative_scan(xs, extra, key)]


@_op.register_fake
def _(xs: list[Tensor], extra: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
