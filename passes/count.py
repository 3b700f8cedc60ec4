"""Bytes a rank sends for each collective of its local graph, counted from the graph itself, as the mean over ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from ..cost_model import states
from ..cost_model.plan import Collective
from ..kernels import blocks, comm, linear, parts, prefix
from ..kernels.layout import Layout, Shards, lacking, size
from . import remat
from .lower import Lowering
from .placement import V
from .relation import shape

aten = torch.ops.aten


def collectives(low: Lowering) -> tuple[Collective, ...]:
    """Equal collectives together, in order of first use. Ring all-reduce sends 2(P−1)/P of its bytes."""
    rows: Counter[tuple[str, str, int, int]] = Counter()
    for node in low.graph.nodes:
        count = _COUNTS.get(node.target) if node.op == "call_function" else None
        if count is not None:
            forward, backward = count(node, low)
            backward += forward if _repeated(node) else 0
            name = node.target.__name__.removesuffix(".default")
            rows[(name, _PURPOSE[name], forward, backward)] += 1
    return tuple(Collective(op, purpose, n, forward * n, backward * n) for (op, purpose, forward, backward), n in rows.items())


_PURPOSE = {
    "vary": "gradient of a replicated value",
    "psum": "sum over ranks",
    "shard": "gradient of a value cut locally",
    "gather": "value needed whole",
    "gather_varying": "keys and values for every rank",
    "relayout": "sequence in another order",
    "halo": "positions around each rank's own",
    "totals": "totals of a scan",
    "associative_totals": "totals of a scan",
    "to_heads": "sequence to heads",
    "to_sequence": "heads to sequence",
    "sync": "parameter gradients",
    "unshard": "parameters of a layer, gathered; their gradients",
    "block_attention": "blocks of attention",
    "on_rank": "states of linear attention",
}


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _reduced(low: Lowering, value: Any) -> int:
    return 2 * (low.ranks - 1) * _bytes(value) // low.ranks


def _gathered(node: fx.Node, low: Lowering, backward: str) -> tuple[int, int]:
    whole: Tensor = node.meta["val"] if node.target is not comm.shard else node.args[0].meta["val"]  # type: ignore[union-attr]
    shards = node.args[2]
    length = sum(map(size, shards))  # type: ignore[arg-type]
    shard = whole.nbytes // max(1, length) * max(map(size, shards))  # type: ignore[arg-type]
    moved = (low.ranks - 1) * shard
    return {"nothing": (moved, 0), "scatter": (moved, moved), "gather": (0, moved)}[backward]


def _exchanged(node: fx.Node, low: Lowering) -> tuple[int, int]:
    """Mean over ranks: rank r sends its positions of the heads that others compute, and the reverse on the way back."""
    value: Tensor = (node.args[0] if node.target is comm.to_heads else node).meta["val"]  # type: ignore[union-attr]
    heads, shards = node.args[3], node.args[4]
    lengths = [size(s) for s in shards]  # type: ignore[union-attr]
    counts = [b - a for a, b in heads]  # type: ignore[union-attr]
    held = max(1, value.shape[node.args[1]] * value.shape[node.args[2]])  # type: ignore[index]
    inner = len(node.args[7]) if len(node.args) > 7 else low.ranks  # type: ignore[arg-type]
    pairs = sum(n * m for r, n in enumerate(lengths) for d, m in enumerate(counts) if r != d and r // inner == d // inner)
    sent = pairs * (value.nbytes // held) // low.ranks
    return sent, sent


def _relaid(node: fx.Node, low: Lowering) -> tuple[int, int]:
    """Mean over ranks of the positions that change hands."""
    x: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    source, target = node.args[2], node.args[3]
    length = sum(map(size, source))  # type: ignore[arg-type]
    a, b = Layout(length, source), Layout(length, target)  # type: ignore[arg-type]
    per = x.nbytes // max(1, a.size(low.rank))
    moved = sum(n for r in range(a.ranks) for d in range(a.ranks) if d != r for _, _, n in a.overlap(r, b, d))
    return moved * per // low.ranks, moved * per // low.ranks


def _around(node: fx.Node, low: Lowering) -> tuple[int, int]:
    """Mean over ranks of the positions that a rank's windows cover and it does not hold."""
    x: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    dim, shards, windows = node.args[1:4]
    needed = lacking(sum(map(size, shards)), shards, windows)  # type: ignore[arg-type]
    moved = sum(map(size, needed)) * _position(x, dim) // low.ranks  # type: ignore[arg-type]
    return moved, moved


def _position(x: Tensor, dim: int) -> int:
    """Bytes of one position, also where the rank holds none."""
    return x.shape[:dim].numel() * x.shape[dim + 1 :].numel() * x.element_size()


def _totalled(node: fx.Node, low: Lowering) -> tuple[int, int]:
    """Each rank sends as many totals as the rank with most runs has, to every other; their cotangents come back."""
    value = node.meta["val"]
    results: list[Tensor] = [value] if isinstance(value, Tensor) else list(value)
    shards: Shards = next(a for a in node.args[1:] if isinstance(a, tuple))
    runs = sum(map(len, shards))
    moved = (low.ranks - 1) * max(map(len, shards)) * sum(x.nbytes for x in results) // runs
    floating = all(x.is_floating_point() or x.is_complex() for x in results)
    return moved, moved if floating else 0


def _travelled(node: fx.Node, low: Lowering) -> tuple[int, int]:
    return blocks.traffic(node.args[2], [x.meta["val"] for x in node.args[0]])  # type: ignore[union-attr, arg-type]


def _state(node: fx.Node, low: Lowering) -> tuple[int, int]:
    """As if every document went on: which do is only known of a batch."""
    q, k, v, decay, remove = (shape(x) if isinstance(x, fx.Node) else None for x in node.args[:5])
    assert q and k and v
    algorithm, (_, ranks, _, close) = node.args[10:12]  # type: ignore[misc]
    width = node.args[2].meta["val"].element_size()  # type: ignore[union-attr]
    sizes = states.LinearAttention.of(q, k, v, decay, remove, width, ranks, close)
    sent = states.bytes_sent(states.ALGORITHMS[algorithm], sizes)
    return sent, sent


def _synced(node: fx.Node, low: Lowering) -> tuple[int, int]:
    if node.args[1] is None:
        return 0, 0
    world = (
        low.ranks * low.spread.dp
        if node.args[1] == low.spread.whole_group
        else (low.spread.dp if node.args[1] == low.spread.dp_group else low.ranks)
    )
    total = sum(_bytes(p.meta["val"]) for p in node.args[0])  # type: ignore[union-attr]
    return 0, 2 * (world - 1) * total // world


def _unsharded(node: fx.Node, low: Lowering) -> tuple[int, int]:
    """Gathered; the gradients of those that have one are reduce-scattered."""
    shapes, ranks = node.args[1], low.spread.world
    width = node.args[0][0].meta["val"].element_size()  # type: ignore[index, union-attr]
    moved = (ranks - 1) * width * sum(math.prod(parts.padded_shape(each, ranks)) for each in shapes)  # type: ignore[union-attr]
    learns = any(low.synced[(n, V)] in node.users for n in low.parts.buckets if n in low.facts.differentiable)
    return moved, moved * learns


def _repeated(node: fx.Node) -> bool:
    """Whether backward runs a collective again: parameters in parts are gathered again if it reads any of them."""
    return remat.repeated(node) and (node.target is not parts.unshard or any(map(_read_in_backward, node.users)))


def _read_in_backward(x: fx.Node) -> bool:
    """Not what is only looked up in, or only added, once: its value is nobody's derivative."""
    for user in x.users:
        if user.target is parts.share:
            read = _read_in_backward(user)
        elif user.target is aten.linear.default:
            read = x in user.args[:2] or remat.repeated(user)
        else:
            read = user.target not in (aten.embedding.default, aten.add.Tensor) or remat.repeated(user)
        if read:
            return True
    return False


_COUNTS: dict[Any, Any] = {
    comm.vary: lambda node, low: (0, _reduced(low, node.meta["val"])),
    comm.psum: lambda node, low: (_reduced(low, node.meta["val"]), 0),
    comm.shard: lambda node, low: _gathered(node, low, "gather"),
    comm.gather: lambda node, low: _gathered(node, low, "nothing"),
    comm.gather_varying: lambda node, low: _gathered(node, low, "scatter"),
    comm.relayout: _relaid,
    comm.halo: _around,
    prefix.totals: _totalled,
    prefix.associative_totals: _totalled,
    comm.to_heads: _exchanged,
    comm.to_sequence: _exchanged,
    comm.sync: _synced,
    parts.unshard: _unsharded,
    torch.ops.asp.block_attention.default: _travelled,
    linear.on_rank: _state,
}
