"""Work that goes token by token, computed a tile of tokens at a time.

`asp::tiled` runs a `TileProgram`: the model's own operators between values that are narrow and values that are narrow again.
What is wide in between (logits of a large vocabulary, the inner width of a feed-forward block) is never larger than one tile,
in the forward pass or in the backward pass, which runs each tile's program again and differentiates it (ALST, arXiv 2506.13996;
Liger Kernel, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .programs import Autocast, Programs, under

TILE_ELEMENTS = 1 << 27  # most elements of the widest value of a tile: 512 MB in float32


@dataclass(frozen=True)
class Along:
    """Where a value carries tokens: dimension `dim`, of size outer·tokens·inner, along its middle factor."""

    dim: int
    outer: int = 1
    inner: int = 1

    def part(self, x: Tensor, tokens: int, start: int, stop: int) -> Tensor:
        """A view of those of the `tokens` tokens of x, [.., outer, stop - start, inner, ..] if outer or inner is not 1."""
        if self.outer == self.inner == 1:
            return x.narrow(self.dim, start, stop - start)
        return x.unflatten(self.dim, (self.outer, tokens, self.inner)).narrow(self.dim + 1, start, stop - start)

    def cut(self, x: Tensor, tokens: int, start: int, stop: int) -> Tensor:
        """As `part`, with the dimensions of x."""
        part = self.part(x, tokens, start, stop)
        return part if part.dim() == x.dim() else part.flatten(self.dim, self.dim + 2)


@dataclass(frozen=True)
class TileProgram:
    """`run(rows, *leaves)` gives the results for as many tokens as the leaves were cut to: `rows` of `tokens`, or what is left.

    Leaf i carries tokens along `leaves[i]` (None: it is whole), result i along `results[i]` (None: it is a sum over tokens).
    `differentiable` are the leaves that take a gradient, `floating` the results that give one.
    """

    run: Callable[..., Sequence[Tensor]]
    key: str
    leaves: tuple[Along | None, ...]
    results: tuple[Along | None, ...]
    tokens: int
    rows: int
    differentiable: tuple[int, ...]
    floating: tuple[int, ...]
    autocast: Autocast | None = None

    def tiles(self) -> list[tuple[int, int]]:
        """The tokens of each tile; no tokens are one empty tile."""
        starts = range(0, self.tokens, self.rows)
        return [(a, min(self.tokens, a + self.rows)) for a in starts] or [(0, 0)]

    def cut(self, leaves: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        return [
            x if along is None else along.cut(x, self.tokens, start, stop) for x, along in zip(leaves, self.leaves, strict=True)
        ]

    def shape(self, part: Tensor, along: Along | None) -> list[int]:
        """Of a result, from that of one tile."""
        size = list(part.shape)
        if along is not None:
            size[along.dim] = along.outer * self.tokens * along.inner
        return size

    def tile(self, leaves: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        with under(self.autocast):
            return self.run(rows, *leaves)


_PROGRAMS = Programs[TileProgram]()


def register(program: TileProgram) -> str:
    """The name under which `asp::tiled` finds `program`; equal programs share one."""
    p = program
    return _PROGRAMS.add(p, p.key, p.leaves, p.results, p.tokens, p.rows, p.differentiable, p.floating, p.autocast)


def program(name: str) -> TileProgram:
    """What is registered under `name`."""
    return _PROGRAMS[name]


def summed_in(x: Tensor) -> torch.dtype:
    """What sums over tiles of values like x are kept in: float32 for narrower floating-point types."""
    return torch.float32 if x.is_floating_point() and x.element_size() < 4 else x.dtype


@torch.library.custom_op("asp::tiled", mutates_args=())
def tiled(leaves: list[Tensor], name: str) -> list[Tensor]:
    p = _PROGRAMS[name]
    whole: list[Tensor] = []
    types: list[torch.dtype] = []
    for start, stop in p.tiles():
        parts = p.tile(p.cut(leaves, start, stop), stop - start)
        if not whole:
            types = [x.dtype for x in parts]
            whole = [_room(x, p.shape(x, along), along) for x, along in zip(parts, p.results, strict=True)]
        for x, along, part in zip(whole, p.results, parts, strict=True):
            _put(x, along, part, p.tokens, start, stop)
        del parts
    return [x.to(dtype) for x, dtype in zip(whole, types, strict=True)]


def _room(like: Tensor, shape: Sequence[int], along: Along | None) -> Tensor:
    """Where what all tiles give goes: zeros for a sum, else a value that each tile writes its part of."""
    if along is None:
        return torch.zeros(shape, dtype=summed_in(like), device=like.device)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _put(whole: Tensor, along: Along | None, part: Tensor, tokens: int, start: int, stop: int) -> None:
    """What one tile gives: added to a sum, else written in its place."""
    if along is None:
        whole += part
    else:
        to = along.part(whole, tokens, start, stop)
        to.copy_(part.reshape(to.shape))


@tiled.register_fake
def _(leaves: list[Tensor], name: str) -> list[Tensor]:
    p = _PROGRAMS[name]
    start, stop = p.tiles()[0]
    parts = p.tile(p.cut(leaves, start, stop), stop - start)
    return [torch.empty(p.shape(x, along), dtype=x.dtype, device=x.device) for x, along in zip(parts, p.results, strict=True)]


@torch.library.custom_op("asp::tiled_backward", mutates_args=())
def tiled_backward(grads: list[Tensor], leaves: list[Tensor], name: str) -> list[Tensor]:
    """Gradients of the differentiable leaves, from those of the floating-point results."""
    p = _PROGRAMS[name]
    made = [_room(leaves[i], list(leaves[i].shape), p.leaves[i]) for i in p.differentiable]
    for start, stop in p.tiles():
        taken = p.cut(leaves, start, stop)
        upstream = [
            g if along is None else along.cut(g, p.tokens, start, stop)
            for g, along in zip(grads, (p.results[i] for i in p.floating), strict=True)
        ]
        found = _tile_gradients(p, taken, stop - start, upstream)
        for i, x, g in zip(p.differentiable, made, found, strict=True):
            _put(x, p.leaves[i], g, p.tokens, start, stop)
        del found
    return [x.to(leaves[i].dtype) for i, x in zip(p.differentiable, made, strict=True)]


def _tile_gradients(p: TileProgram, taken: list[Tensor], rows: int, upstream: list[Tensor]) -> tuple[Tensor, ...]:
    """Run the tile's program again and pull `upstream` back to its differentiable leaves.

    A custom op runs below autograd; `torch.func.vjp` brings its own.
    """

    def of(*wanted: Tensor) -> tuple[Tensor, ...]:
        leaves = list(taken)
        for i, leaf in zip(p.differentiable, wanted, strict=True):
            leaves[i] = leaf
        results = p.tile(leaves, rows)
        return tuple(results[i] for i in p.floating)

    out, pull = torch.func.vjp(of, *(taken[i] for i in p.differentiable))
    return pull(tuple(g.to(x.dtype) for g, x in zip(upstream, out, strict=True)))


@tiled_backward.register_fake
def _(grads: list[Tensor], leaves: list[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(leaves[i], memory_format=torch.contiguous_format) for i in _PROGRAMS[name].differentiable]


def _setup(ctx: object, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    leaves, ctx.name = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*leaves)  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(*[x for x in output if not x.is_floating_point()])  # type: ignore[attr-defined]


def _backward(ctx: object, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    leaves = list(ctx.saved_tensors)  # type: ignore[attr-defined]
    name = ctx.name  # type: ignore[attr-defined]
    p = _PROGRAMS[name]
    out: list[Tensor | None] = [None] * len(leaves)
    for i, g in zip(p.differentiable, tiled_backward([grads[i] for i in p.floating], leaves, name), strict=True):
        out[i] = g
    return out, None


tiled.register_autograd(_backward, setup_context=_setup)
