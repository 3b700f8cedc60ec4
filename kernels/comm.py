"""Collectives and their transposes, as functional collectives that a compiler can see.

The pairs are those of the design's table: what a value is (replicated, varying, sharded, partial) fixes
which collective the cotangent needs. Every function here is differentiable, takes the group by name and
static Python numbers for everything else, and does nothing on one rank.

x: any shape; the sharded dimension is `dim`, which may carry the sequence merged with others as
[outer, sequence, inner].
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Interval, Intervals, Layout, Shards, joined, lacking, offsets, size

_c10d = torch.ops._c10d_functional


def _wait(x: Tensor) -> Tensor:
    return _c10d.wait_tensor(x)


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _wait(_c10d.all_reduce(x.contiguous(), "sum", group))


# Sequence axis ------------------------------------------------------------------------------------


def take(x: Tensor, dim: int, intervals: Intervals) -> Tensor:
    """The positions of `intervals` along `dim`, in their order."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in intervals]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)


def _on_axis(x: Tensor, dim: int, length: int, outer: int, inner: int, act: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply `act(x, axis)` to the sequence axis of a merged dimension and merge it again."""
    if outer == inner == 1:
        return act(x, dim)
    shape = list(x.shape)
    y = act(x.reshape(*shape[:dim], outer, length, inner, *shape[dim + 1 :]), dim + 1)
    return y.reshape(*shape[:dim], outer * y.shape[dim + 1] * inner, *shape[dim + 1 :])


def _padded_rows(x: Tensor, rows: int) -> Tensor:
    """x: [n, ...] with n <= rows, zero rows added at the end."""
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def _all_gather(x: Tensor, dim: int, shards: Shards, group: str) -> Tensor:
    """The whole axis from each rank's intervals; uneven shards are padded to the longest."""
    ranks, most = len(shards), max(map(size, shards))
    rows = _padded_rows(x.movedim(dim, 0), most)
    whole = _wait(_c10d.all_gather_into_tensor(rows, ranks, group))
    held = []
    for rank, intervals in enumerate(shards):
        at = rank * most
        for start, stop in intervals:
            held.append((start, at, stop - start))
            at += stop - start
    in_order = [(at, count) for _, at, count in sorted(held)]
    runs: list[Interval] = []
    for at, count in in_order:
        if runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + count)
        else:
            runs.append((at, at + count))
    return take(whole, 0, tuple(runs)).movedim(0, dim)


def _reduce_scatter(x: Tensor, dim: int, shards: Shards, rank: int, group: str) -> Tensor:
    """The sum over ranks of the whole axis, of which each rank keeps its own intervals."""
    most = max(map(size, shards))
    rows = x.movedim(dim, 0)
    packed = torch.cat([_padded_rows(take(rows, 0, s), most) for s in shards])
    mine = _wait(_c10d.reduce_scatter_tensor(packed, "sum", len(shards), group))
    return mine.narrow(0, 0, size(shards[rank])).movedim(0, dim)


class _Pair(torch.autograd.Function):
    """A linear map with its transpose given by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(grad), None, None


def _pair(x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return _Pair.apply(x, forth, back) if x.is_floating_point() or x.is_complex() else forth(x)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def vary(x: Tensor, group: str) -> Tensor:
    """Replicated value into local use: identity; the cotangent is summed over ranks."""
    return _pair(x, _same, lambda g: _all_reduce(g, group))


def psum(x: Tensor, group: str) -> Tensor:
    """Partial into replicated: the sum over ranks; the cotangent passes as it is."""
    return _pair(x, lambda v: _all_reduce(v, group), lambda g: g)


def shard(x: Tensor, dim: int, shards: Shards, outer: int, inner: int, rank: int, group: str) -> Tensor:
    """Replicated into sharded: a local cut; the cotangent is gathered."""
    length = sum(map(size, shards))
    return _pair(
        x,
        lambda v: _on_axis(v, dim, length, outer, inner, lambda y, d: take(y, d, shards[rank]).contiguous()),
        lambda g: _on_axis(g, dim, size(shards[rank]), outer, inner, lambda y, d: _all_gather(y, d, shards, group)),
    )


def cut(x: Tensor, dim: int, shards: Shards, outer: int, inner: int, rank: int) -> Tensor:
    """Varying into sharded: a local cut whose cotangent stays partial, for whoever made the value vary."""
    length = sum(map(size, shards))
    return _on_axis(x, dim, length, outer, inner, lambda y, d: take(y, d, shards[rank]))


def gather(x: Tensor, dim: int, shards: Shards, outer: int, inner: int, rank: int, group: str) -> Tensor:
    """Sharded into replicated: all-gather; each rank keeps its own cut of the cotangent."""
    length = sum(map(size, shards))
    return _pair(
        x,
        lambda v: _on_axis(v, dim, size(shards[rank]), outer, inner, lambda y, d: _all_gather(y, d, shards, group)),
        lambda g: _on_axis(g, dim, length, outer, inner, lambda y, d: take(y, d, shards[rank]).contiguous()),
    )


def gather_varying(x: Tensor, dim: int, shards: Shards, outer: int, inner: int, rank: int, group: str) -> Tensor:
    """Sharded into varying: all-gather; cotangents differ by rank, so they are reduce-scattered."""
    length = sum(map(size, shards))
    return _pair(
        x,
        lambda v: _on_axis(v, dim, size(shards[rank]), outer, inner, lambda y, d: _all_gather(y, d, shards, group)),
        lambda g: _on_axis(g, dim, length, outer, inner, lambda y, d: _reduce_scatter(y, d, shards, rank, group)),
    )


def broadcast(x: Tensor, group: str) -> Tensor:
    """Rank 0's value on every rank (for operators that draw random numbers); not differentiable."""
    return _wait(_c10d.broadcast(x.detach().contiguous(), 0, group))


# All-to-all ---------------------------------------------------------------------------------------


def _column(x: Tensor) -> Tensor:
    """All elements as [n, 1]. Not [n]: torch skips a [0] in a cat and gives it a gradient that depends on nothing, so a rank
    that sends nothing would leave the backward exchange."""
    return x.reshape(x.numel(), 1)


def _all_to_all(flat: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """flat: [sum(sent), 1] -> [sum(received), 1], in elements; the transpose swaps the two."""
    return _pair(
        flat,
        lambda v: _wait(_c10d.all_to_all_single(v.contiguous(), received, sent, group)),
        lambda g: _wait(_c10d.all_to_all_single(g.contiguous(), sent, received, group)),
    )


def relayout(x: Tensor, dim: int, source: Shards, target: Shards, outer: int, inner: int, rank: int, group: str) -> Tensor:
    """Sharded into sharded in another order: each position goes straight to its new holder."""
    length = sum(map(size, source))
    src, dst = Layout(length, source), Layout(length, target)

    def move(y: Tensor, axis: int) -> Tensor:
        return _exchange(y.movedim(axis, 0), src, dst, rank, group).movedim(0, axis)

    return _on_axis(x, dim, src.size(rank), outer, inner, move)


def _exchange(rows: Tensor, src: Layout, dst: Layout, rank: int, group: str) -> Tensor:
    """My rows of `src` -> my rows of `dst`. What several ranks hold in `dst` goes to each of them, their cotangents are added."""
    rest = rows.shape[1:].numel()
    out, into = _pieces(src, dst, rank)
    sent = torch.cat([_column(take(rows, 0, tuple((a, a + n) for a, _, n in pieces))) for pieces in out])
    got = _all_to_all(sent, _counts(out, rest), _counts(into, rest), group)
    placed, at = [], 0
    for pieces in into:
        for _, there, count in pieces:
            placed.append((there, at, at + count))
            at += count
    order = tuple((a, b) for _, a, b in sorted(placed))
    # Also a rank that receives nothing goes through the exchange, so that it takes part in the transposed one.
    return take(got.reshape(at, *rows.shape[1:]), 0, order)


Pieces = list[list[tuple[int, int, int]]]  # by rank: (position here, position there, count)


def _pieces(src: Layout, dst: Layout, rank: int) -> tuple[Pieces, Pieces]:
    """What a rank sends to and receives from each, in the order in which it lies in `dst`."""
    out = [sorted(src.overlap(rank, dst, r), key=lambda p: p[1]) for r in range(src.ranks)]
    into = [sorted(src.overlap(r, dst, rank), key=lambda p: p[1]) for r in range(src.ranks)]
    return out, into


def _counts(pieces: list[list[tuple[int, int, int]]], rest: int) -> list[int]:
    return [sum(n for _, _, n in row) * rest for row in pieces]


def halo(x: Tensor, dim: int, shards: Shards, windows: Shards, rank: int, group: str) -> Tensor:
    """The positions of `windows[rank]` along `dim`: my own from memory, the others from the ranks that hold them.

    Windows may overlap and reach beyond the sequence, where the value is zero. What a rank needs and does not hold is sent to
    it once, whoever holds it; its cotangent comes back and is added to the holder's own.
    """
    # One operator, whose operand and result are never empty: what a rank does not send or receive would be a constant for a
    # compiler, which moves and merges exchanges of constants on that rank alone.
    return torch.ops.asp.halo(x, dim, repr((shards, windows)), rank, group)


@torch.library.custom_op("asp::halo", mutates_args=())
def _halo(x: Tensor, dim: int, places: str, rank: int, group: str) -> Tensor:
    shards, windows, needed = _places(places)
    sources = {"own": x.movedim(dim, 0)}
    if any(needed):
        sources["got"] = _exchange(sources["own"], _layout(shards), _layout(needed, shards), rank, group)
    near = x.new_zeros(size(windows[rank]), *sources["own"].shape[1:])
    for which, at, window, count in _copies(shards[rank], needed[rank], windows[rank]):
        near[window : window + count] = sources[which][at : at + count]
    return near.movedim(0, dim).contiguous()


@_halo.register_fake
def _(x: Tensor, dim: int, places: str, rank: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:dim], size(_places(places)[1][rank]), *x.shape[dim + 1 :])


@torch.library.custom_op("asp::halo_back", mutates_args=())
def _halo_back(grad: Tensor, dim: int, places: str, rank: int, group: str) -> Tensor:
    """The transpose: cotangents go back to the ranks that hold the positions, and are added there."""
    shards, windows, needed = _places(places)
    rows = grad.movedim(dim, 0)
    sums = {
        "own": rows.new_zeros(size(shards[rank]), *rows.shape[1:]),
        "got": rows.new_zeros(size(needed[rank]), *rows.shape[1:]),
    }
    for which, at, window, count in _copies(shards[rank], needed[rank], windows[rank]):
        sums[which][at : at + count] += rows[window : window + count]
    if any(needed):
        rest = rows.shape[1:].numel()
        out, into = _pieces(_layout(shards), _layout(needed, shards), rank)
        sent = torch.cat(
            [_column(sums["got"][there : there + n]) for row in into for _, there, n in row] or [rows.new_zeros(0, 1)]
        )
        got, at = _all_to_all(sent, _counts(into, rest), _counts(out, rest), group).reshape(-1, *rows.shape[1:]), 0
        for row in out:
            for here, _, n in row:
                sums["own"][here : here + n] += got[at : at + n]
                at += n
    return sums["own"].movedim(0, dim).contiguous()


@_halo_back.register_fake
def _(grad: Tensor, dim: int, places: str, rank: int, group: str) -> Tensor:
    return grad.new_empty(*grad.shape[:dim], size(_places(places)[0][rank]), *grad.shape[dim + 1 :])


def _halo_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.places = inputs[1:]


_halo.register_autograd(lambda ctx, grad: (_halo_back(grad, *ctx.places), None, None, None, None), setup_context=_halo_setup)


@functools.cache
def _places(text: str) -> tuple[Shards, Shards, Shards]:
    """Shards, windows and what each rank lacks of its windows; operators take no nested numbers."""
    shards, windows = ast.literal_eval(text)
    return shards, windows, lacking(sum(map(size, shards)), shards, windows)


def halo_counts(places: str, rank: int) -> tuple[list[int], list[int]]:
    """By rank, the positions that this one sends for windows and receives (backward the other way round)."""
    shards, _, needed = _places(places)
    out, into = _pieces(_layout(shards), _layout(needed, shards), rank)
    return _counts(out, 1), _counts(into, 1)


def _layout(shards: Shards, like: Shards | None = None) -> Layout:
    return Layout(sum(map(size, like or shards)), shards)


def _copies(own: Intervals, needed: Intervals, windows: Intervals) -> list[tuple[str, int, int, int]]:
    """What windows are made of: (own or got, first position there, first position in the windows, count); the rest is zero."""
    sources = [("own", run, at) for run, at in zip(own, offsets(own), strict=True)]
    sources += [("got", run, at) for run, at in zip(needed, offsets(needed), strict=True)]
    copies, place = [], 0
    for start, stop in windows:
        for which, (a, b), at in sources:
            lo, hi = max(a, start), min(b, stop)
            if lo < hi:
                copies.append((which, at + lo - a, place + lo - start, hi - lo))
        place += stop - start
    return copies


def tie(x: Tensor, *others: Tensor) -> Tensor:
    """x, which now depends on `others` by the sum of none of their elements: for a rank that has no use for what it received.

    A graph keeps an exchange only if something depends on it, forward and backward, and every rank must take part in both.
    """
    for other in others:
        x = x + other.reshape(-1)[:0].sum().to(x.dtype)
    return x


def _near(heads: Sequence[Interval], shards: Shards, near: Sequence[int] | None) -> tuple[Sequence[Interval], Shards]:
    """Heads and shards by rank, empty for ranks that take no part: one exchange over the whole group, without further groups."""
    if near is None:
        return heads, shards
    part = [r in near for r in range(len(shards))]
    kept = [h if p else (0, 0) for h, p in zip(heads, part, strict=True)]
    return kept, tuple(s if p else () for s, p in zip(shards, part, strict=True))


def to_heads(
    x: Tensor,
    head_dim: int,
    seq_dim: int,
    heads: Sequence[Interval],
    shards: Shards,
    rank: int,
    group: str,
    near: Sequence[int] | None = None,
) -> Tensor:
    """All heads of my positions -> my heads of all positions (of the ranks `near` me, where that is given).

    x: [.., all heads, .., my positions, ..]. `heads[r]` are those that rank r computes; a head that several
    ranks need (fewer key/value heads than ranks) goes to each of them and to nobody else.
    """
    heads, shards = _near(heads, shards, near)
    rows = x.movedim((head_dim, seq_dim), (0, 1))  # [heads, positions, *rest]
    rest = rows.shape[2:].numel()
    held, (first, last) = size(shards[rank]), heads[rank]
    sizes = [(b - a) * held * rest for a, b in heads]
    mine = last - first
    received = [mine * size(s) * rest for s in shards]
    got = _all_to_all(_column(_dealt(rows, heads)), sizes, received, group)
    even = _even(shards)
    if even:
        whole = got.reshape(even[0], mine, even[1], *rows.shape[2:]).movedim(1, 0).flatten(1, 2)
    else:
        whole = _placed(got.split(received), shards, (mine, *rows.shape[2:]))
    return whole.movedim((0, 1), (head_dim, seq_dim))


def _dealt(rows: Tensor, heads: Sequence[Interval]) -> Tensor:
    """rows: [heads, ...], those of each interval in turn. Where each goes to as many ranks, in a few operators for any number."""
    wanted = [h for h in heads if h[0] < h[1]]
    each = list(dict.fromkeys(wanted))
    copies, wide = len(wanted) // len(each), {b - a for a, b in each}
    if copies == 1 or len(wide) > 1 or len(joined(each)) > 1 or wanted != [h for h in each for _ in range(copies)]:
        return take(rows, 0, joined(wanted))
    once = take(rows, 0, joined(each)).unflatten(0, (len(each), 1, *wide))
    return once.expand(-1, copies, *once.shape[2:]).flatten(0, 2)


def _even(shards: Shards) -> tuple[int, int] | None:
    """(ranks that hold anything, positions each holds) where these are as many and one rank's come after another's."""
    holding = [s for s in shards if s]
    if len({size(s) for s in holding}) > 1 or len(joined([i for s in holding for i in s])) > 1:
        return None
    return len(holding), size(holding[0])


def _placed(parts: Sequence[Tensor], shards: Shards, shape: Sequence[int]) -> Tensor:
    """What each rank sent of its positions, in the order of positions: [heads, positions, *rest], shape: [heads, *rest]."""
    pieces = []
    for part, intervals in zip(parts, shards, strict=True):
        if not intervals:
            continue
        block, at = part.reshape(shape[0], size(intervals), *shape[1:]), 0
        for start, stop in intervals:
            pieces.append((start, block.narrow(1, at, stop - start)))
            at += stop - start
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0])], 1)


def to_sequence(
    x: Tensor,
    head_dim: int,
    seq_dim: int,
    heads: Sequence[Interval],
    shards: Shards,
    rank: int,
    group: str,
    near: Sequence[int] | None = None,
) -> Tensor:
    """My heads of all positions -> all heads of my positions: the way back from `to_heads`.

    x: [.., my heads, .., all positions, ..]. One rank's heads (of the ranks near me) come after another's.
    """
    heads, shards = _near(heads, shards, near)
    rows = x.movedim((head_dim, seq_dim), (0, 1))
    rest = rows.shape[2:].numel()
    mine, held = heads[rank][1] - heads[rank][0], size(shards[rank])
    even = _even(shards)
    if even:
        sent = _column(rows.unflatten(1, even).movedim(1, 0))
    else:
        starts, at = dict[int, int](), 0  # where each interval begins among the positions at hand
        for a, b in sorted(i for s in shards for i in s):
            starts[a], at = at, at + b - a
        sent = torch.cat([_column(take(rows, 1, tuple((starts[a], starts[a] + b - a) for a, b in s))) for s in shards if s])
    sizes = [mine * size(s) * rest for s in shards]
    received = [(b - a) * held * rest for a, b in heads]
    got = _all_to_all(sent, sizes, received, group)
    return got.reshape(sum(b - a for a, b in heads), held, *rows.shape[2:]).movedim((0, 1), (head_dim, seq_dim))


def by_turns(x: Tensor, dim: int, turns: Sequence[Sequence[Interval]]) -> list[Tensor]:
    """All heads along `dim` -> those of each turn, one rank's after another's.

    `turns[i][r]` are those that rank r computes in turn i: one rank's turns follow each other, one rank's heads another's.
    """
    wide = [[b - a for a, b in each] for each in turns]
    if len({w for each in wide for w in each}) == 1:
        parts = x.unflatten(dim, (len(wide[0]), len(wide), wide[0][0])).unbind(dim + 1)
        return [part.flatten(dim, dim + 1) for part in parts]
    pieces = x.split([w for of_rank in zip(*wide, strict=True) for w in of_rank], dim)
    return [torch.cat(pieces[i :: len(wide)], dim) for i in range(len(wide))]


def from_turns(parts: Sequence[Tensor], dim: int, turns: Sequence[Sequence[Interval]]) -> Tensor:
    """The way back from `by_turns`."""
    wide = [[b - a for a, b in each] for each in turns]
    if len({w for each in wide for w in each}) == 1:
        return torch.stack([part.unflatten(dim, (-1, wide[0][0])) for part in parts], dim + 1).flatten(dim, dim + 2)
    pieces = [part.split(each, dim) for part, each in zip(parts, wide, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank], dim)


# Parameters ---------------------------------------------------------------------------------------


class _Sync(torch.autograd.Function):
    """Identity on a bucket of parameters; their cotangents are summed in one coalesced all-reduce."""

    @staticmethod
    def forward(ctx: Any, group: str | None, scale: float, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.scale = group, scale
        return tuple(p.view_as(p) for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        flat = torch.cat([g.reshape(-1) for g in grads]) if len(grads) > 1 else grads[0].contiguous()
        if ctx.group is not None:
            flat = _all_reduce(flat, ctx.group)
        if ctx.scale != 1:
            flat = flat * ctx.scale
        if len(grads) == 1:
            return None, None, flat
        pieces = flat.split([g.numel() for g in grads])
        return None, None, *(p.reshape(g.shape) for p, g in zip(pieces, grads, strict=True))


def sync(params: Sequence[Tensor], group: str | None, scale: float) -> tuple[Tensor, ...]:
    """A bucket of parameters of one dtype, whose gradients are summed over `group` and times `scale`."""
    return _Sync.apply(group, scale, *params)
