"""A region in the form softmax(scores) · values, which may be computed block by block and merged (FlashAttention).

Between the softmax and the product may stand what acts on single weights in a way that blocks can repeat: dropout, a cast, and
the removal of a sink, one more logit for each row whose value is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..kernels.layout import Layout
from .detect import SDPA, Region, Use
from .place import rule
from .placement import Shard
from .relation import operands, shape
from .rules.base import argument

aten = torch.ops.aten
ALONG = "looks at several of its columns at once"
_SOFTMAX = (aten.softmax, aten._softmax, aten._safe_softmax)
_PASSING = (aten._to_copy, aten.to, aten.clone, aten.contiguous, aten.alias, aten.type_as, aten.detach)


@dataclass(frozen=True)
class Form:
    """scores: the logits of the region (None: those of scaled_dot_product_attention), values: what is averaged.

    dropout: the node that drops weights. sink: a value that broadcasts to [.., heads, 1, 1]. `value_dims` permutes the values to
    [*batch, columns, D_v] (None: a new dimension of size 1) and `out_dims` the product back to the closing node's order.
    """

    scores: Use | None
    values: Use
    dropout: fx.Node | None = None
    sink: fx.Node | None = None
    value_dims: tuple[int | None, ...] | None = None
    out_dims: tuple[int, ...] | None = None


class NotASoftmax(Exception):
    """The region has another form; the message says which part."""


def form(region: Region) -> Form:
    """The region's form. Raises NotASoftmax."""
    found, me = _form(region), (region.closing, region.axes)
    ends = [found.scores, found.values] if found.scores else [region.reads[(me, i)] for i in range(len(operands(region.closing)))]
    _refuse_along_columns(region, ends)
    return found


def along_columns(region: Region) -> bool:
    """Some operator of the region other than its softmax looks at several columns at once: it must have them all."""
    try:
        form(region)
    except NotASoftmax as e:
        return str(e).endswith(ALONG)
    return False


def _refuse_along_columns(region: Region, ends: Sequence[Use]) -> None:
    """Before the softmax nothing may look at several columns (a norm, a running sum, the k largest): a block has only some."""
    seen, stack = set[Use](), list(ends)
    while stack:
        use = stack.pop()
        use = region.repeated.get(use, use)
        if use in seen or use not in region.interior:
            continue
        seen.add(use)
        relation = rule(use[0]).relation(use[0])
        for i, x in enumerate(operands(use[0])):
            below = region.reads[(use, i)]
            stack.append(below)
            col = below[1].col
            if col is None or shape(x)[col] != region.columns:
                continue
            out = relation.forward(i, Shard(col, Layout(region.columns, ((),))))
            if not isinstance(out, Shard) or out.merged or out.dim != use[1].col:
                raise NotASoftmax(f"{use[0].target} {ALONG}")


def _form(region: Region) -> Form:
    node, me = region.closing, (region.closing, region.axes)
    if node.target is SDPA:
        dropped = argument(node, "dropout_p", 0.0)
        return Form(None, region.reads[(me, 2)], node if dropped else None)
    value_dims, out_dims = _product(node)
    use, dropout, cut = region.reads[(me, 0)], None, False
    while (packet := getattr(use[0].target, "overloadpacket", None)) not in _SOFTMAX:
        if use not in region.interior:
            raise NotASoftmax("what it multiplies the values with is no softmax over its columns")
        below = region.reads[(use, 0)]
        if packet is aten.dropout and dropout is None:
            dropout = use[0] if argument(use[0], "train") and argument(use[0], "p") else None
        elif (
            packet is aten.slice
            and not cut
            and use[1].col is not None
            and argument(use[0], "dim") % len(shape(use[0])) == use[1].col
        ):
            if shape(below[0])[use[1].col] != shape(use[0])[use[1].col] + 1 or argument(use[0], "start"):
                raise NotASoftmax("weights are cut off after its softmax")
            cut = True
        elif not (packet in _PASSING or (packet in (aten.view, aten.reshape, aten.expand) and shape(below[0]) == shape(use[0]))):
            raise NotASoftmax(f"{packet or use[0].target} stands between its softmax and its product")
        use = below
    rank = len(shape(use[0]))
    if argument(use[0], "dim") % rank != rank - 1 or (use[1].row, use[1].col) != (rank - 2, rank - 1):
        raise NotASoftmax("its softmax is not over the last dimension of [.., rows, columns]")
    scores = _unshifted(region, region.reads[(use, 0)])
    sink = None
    if cut:
        scores, sink = _without_sink(region, scores)
    return Form(scores, region.reads[(me, 1)], dropout, sink, value_dims, out_dims)


def _unshifted(region: Region, use: Use) -> Use:
    """Scores less something that is the same for all columns of a row (their maximum, as a rule) have the same softmax."""
    if getattr(use[0].target, "overloadpacket", None) is aten.sub and use in region.interior and len(operands(use[0])) == 2:
        whole, shift = (region.reads[(use, i)] for i in range(2))
        if shape(shift[0])[-1:] == (1,) and shape(whole[0]) == shape(use[0]):
            return whole
    return use


def _without_sink(region: Region, use: Use) -> tuple[Use, fx.Node]:
    """The operands of `cat([scores, sink], -1)`."""
    if use[0].target is not aten.cat.default or use not in region.interior or len(operands(use[0])) != 2:
        raise NotASoftmax("weights are cut off after its softmax")
    scores, sink = (region.reads[(use, i)] for i in range(2))
    node, rank = sink[0], len(shape(use[0]))
    while node.target is aten.expand.default:
        node = operands(node)[0]
    size = (1,) * (rank - len(shape(node))) + shape(node)
    if size[-2:] != (1, 1):
        raise NotASoftmax("its sink differs from row to row")
    return scores, node


def _product(node: fx.Node) -> tuple[tuple[int | None, ...] | None, tuple[int, ...] | None]:
    """How an einsum is a matmul of [*batch, rows, columns] and [*batch, columns, D_v]; (None, None) for a matmul."""
    if node.target in (aten.matmul.default, aten.bmm.default):
        return None, None
    if node.target is not aten.einsum.default:
        raise NotASoftmax(f"{node.target} closes it")
    terms, out = str(node.args[0]).replace(" ", "").split("->")
    left, right = terms.split(",")
    inner = [label for label in right if label not in left]
    if len(inner) != 1 or sorted(out) != sorted([*left[:-1], *inner]) or any(x not in left for x in right if x != inner[0]):
        raise NotASoftmax(f"einsum {node.args[0]} is no product of weights and values")
    value_dims = tuple(right.index(x) if x in right else None for x in (*left[:-2], left[-1], *inner))
    product = [*left[:-1], *inner]
    return value_dims, tuple(product.index(x) for x in out)
