"""Operators that multiply and sum: linear, matmul, bmm, einsum. One relation over labelled dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..relation import Dims, Link, Summed, broadcast, operand_shape, operands, shape
from .base import Related, Rule

aten = torch.ops.aten


def contracted(labels: Sequence[Sequence[object]], out: Sequence[object], biased: bool = False) -> Dims:
    """Relation of a contraction whose dimensions carry labels; None labels must be whole.

    With a bias added (`biased`), a partial sum would count the bias once per rank, so the sum must be whole.
    """
    order = {label: d for d, label in enumerate(out) if label is not None}
    sums = sorted({str(label) for row in labels for label in row if label is not None and label not in order})

    def link(label: object) -> Link:
        if label in order:
            return order[label]
        return None if label is None or biased else Summed(sums.index(str(label)))

    return Dims(tuple(tuple(link(label) for label in row) for row in labels))


def linear(node: fx.Node) -> Dims:
    rank = len(shape(node))
    x = [*range(rank - 1), "k"]
    labels = [x, [rank - 1, "k"], [rank - 1]][: len(operands(node))]
    return contracted(labels, range(rank), biased=len(labels) == 3)


def matmul(node: fx.Node) -> Dims:
    a, b = operand_shape(node, 0), operand_shape(node, 1)
    rank = max(len(a), len(b), 2)
    batch = rank - 2

    def lead(operand: Sequence[int], other: Sequence[int]) -> list[object]:
        dims: list[object] = []
        for d in range(len(operand) - 2):
            at = d + rank - len(operand)
            there = at - (rank - len(other))
            stretched = operand[d] == 1 and there >= 0 and there < len(other) - 2 and other[there] != 1
            dims.append(None if stretched else ("b", at))
        return dims

    left = ["k"] if len(a) == 1 else [*lead(a, b), "m", "k"]
    right = ["k"] if len(b) == 1 else [*lead(b, a), "k", "n"]
    out: list[object] = [("b", d) for d in range(batch)]
    out += ["m"] if len(a) > 1 else []
    out += ["n"] if len(b) > 1 else []
    return contracted([left, right], out)


def _added(node: fx.Node) -> Dims:
    """addmm and baddbmm: bias + a @ b."""
    rank = len(shape(node))
    batch = [("b", d) for d in range(rank - 2)]
    product = contracted([[*batch, "m", "k"], [*batch, "k", "n"]], [*batch, "m", "n"], biased=True)
    return Dims(broadcast([operand_shape(node, 0)], shape(node)).links + product.links)


def _einsum(node: fx.Node) -> Dims:
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation or "->" not in equation or any(len(set(t)) != len(t) for t in equation.split("->")[0].split(",")):
        return Dims(tuple((None,) * len(shape(x)) for x in operands(node)))
    terms, out = equation.split("->")
    labels = [list(term) for term in terms.split(",")]
    sizes: dict[str, int] = {}
    for x, term in zip(operands(node), labels, strict=True):
        for label, size in zip(term, shape(x), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    stretched = [
        [label if size == sizes[label] else None for label, size in zip(term, shape(x), strict=True)]
        for x, term in zip(operands(node), labels, strict=True)
    ]
    return contracted(stretched, list(out))


def _outer(node: fx.Node) -> Dims:
    return Dims(((0,), (1,)))


RULES: dict[object, Rule] = {
    aten.linear: Related(linear),
    aten.matmul: Related(matmul),
    aten.bmm: Related(matmul),
    aten.mm: Related(matmul),
    aten.mv: Related(matmul),
    aten.dot: Related(matmul),
    aten.addmm: Related(_added),
    aten.baddbmm: Related(_added),
    aten.einsum: Related(_einsum),
    aten.outer: Related(_outer),
}
