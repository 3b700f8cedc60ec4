"""Exchanges start as early and are waited for as late as what depends on them allows, in graphs that PyTorch's partitioner made.

Exchanges keep their order, so ranks still meet in the same one. Between two of them first comes what the next one needs; what it
does not need is computed while that one travels. So gradients of weights hide an exchange on the way to the layer before, and
the rest of backward hides the reduction of a bucket of gradients. Parameters in parts are gathered one layer ahead. Copies to and
from the host start where `host.to_host` puts them, and keep their place among exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from . import host
from .parts import of_parameters


def overlap(graph: fx.Graph, communicates: Callable[[object], bool]) -> None:
    """Put the nodes of a functional graph into such an order, in place. communicates: whether ranks wait for each other in an
    operator."""
    nodes = list(graph.nodes)
    body = [n for n in nodes if n.op not in ("placeholder", "output") and not _writes(n)]
    order = _Order(body)
    pending: list[fx.Node] = []
    gathered: list[fx.Node] = []
    for node in body:
        pending.append(node)
        if communicates(node.target) or _draws(node) or host.starts(node):
            if of_parameters(node):  # these could all start at once, and every layer's parameters would be whole together
                for wait in gathered:
                    order.place(wait)
                gathered = [x for x in node.users if _waits(x)]
            if not any(_waits(x) for x in node.users):  # nothing travels beside it: what can end before it takes no memory
                order.put_ready(pending)
            order.place(node)
            order.put_ready(pending)
            pending = [n for n in pending if n not in order.placed]
    for node in pending:
        if not _waits(node):
            order.place(node)
    for node in pending:
        order.place(node)
    inputs = [n for n in nodes if n.op == "placeholder"]
    last = inputs[-1] if inputs else None
    for node in [*order.sequence, *(n for n in nodes if _writes(n) and n.op != "output")]:
        if last is None:
            graph.output_node().prepend(node)
        else:
            last.append(node)
        last = node
    graph.lint()


class _Order:
    """Nodes placed so far. A wait is placed with the first node that needs it."""

    def __init__(self, body: Iterable[fx.Node]) -> None:
        self._position = {n: i for i, n in enumerate(body)}
        self.placed: set[fx.Node] = set()
        self.sequence: list[fx.Node] = []

    def put(self, node: fx.Node) -> None:
        self.placed.add(node)
        self.sequence.append(node)

    def put_ready(self, nodes: Iterable[fx.Node]) -> None:
        """Of some nodes in order, those that no wait is missing for."""
        for node in nodes:
            inputs = node.all_input_nodes
            if node not in self.placed and not _waits(node) and all(x in self.placed or x not in self._position for x in inputs):
                self.put(node)

    def place(self, node: fx.Node) -> None:
        """With all that it needs and has no place yet, in the order in which that was."""
        needed, stack = set[fx.Node](), [node]
        while stack:
            x = stack.pop()
            if x in self._position and x not in self.placed and x not in needed:
                needed.add(x)
                stack += x.all_input_nodes
        for x in sorted(needed, key=self._position.__getitem__):
            if not _waits(x) or x is node:
                self._put_after_waits(x)

    def _put_after_waits(self, node: fx.Node) -> None:
        for x in node.all_input_nodes:
            if x in self._position and x not in self.placed:
                self._put_after_waits(x)
        if node not in self.placed:
            self.put(node)


def _waits(node: fx.Node) -> bool:
    return node.op == "call_function" and "wait" in str(node.target)


def _writes(node: fx.Node) -> bool:
    """Into an input, whose old value others read: stays behind them."""
    return node.target is torch.ops.aten.copy_.default


def _draws(node: fx.Node) -> bool:
    """From torch's random stream, in which every draw has its turn. (Attention is marked so too, and does not.)"""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and "scaled_dot_product" not in str(node.target)


__all__ = ["overlap"]
