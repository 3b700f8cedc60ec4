"""Exchanges start as early and are waited for as late as what depends on them allows, in graphs that PyTorch's partitioner made.

Exchanges keep their order, so ranks still meet in the same one. Before each comes what it needs, and of that first what waits for
nothing; before a wait, whatever is ready. So the projection of queries hides an exchange of values, gradients of weights one on
the way to the layer before, some heads of an attention what others exchange, and the rest of backward the reduction of a bucket
of gradients. Parameters in parts are gathered one layer ahead. Copies to and from the host start where `host.to_host` puts them,
and keep their place among exchanges.
"""

from __future__ import annotations

import heapq
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
                order.place(*gathered)
                gathered = [x for x in node.users if _waits(x)]
                order.place(node)
                order.put_ready(pending)
            else:
                # Where nothing travels beside it, what can end before it takes no memory.
                if order.waits_for(node) or not any(_waits(x) for x in node.users):
                    order.put_ready(pending)
                order.place(node)
            pending = [n for n in pending if n not in order.placed]
    order.place(*pending)
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
    """Nodes placed so far."""

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
            if node not in self.placed and not _waits(node) and not self._missing(node):
                self.put(node)

    def waits_for(self, node: fx.Node) -> bool:
        """Whether a wait that has no place yet must come before a node."""
        seen, stack = set[fx.Node](), self._missing(node)
        while stack:
            x = stack.pop()
            if _waits(x):
                return True
            if x not in seen:
                seen.add(x)
                stack += self._missing(x)
        return False

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        return [x for x in node.all_input_nodes if x in self._position and x not in self.placed]

    def place(self, *nodes: fx.Node) -> None:
        """With all that they need and has no place yet, in the order in which that was; but a wait only when nothing is left that
        needs none."""
        needed, stack = dict[fx.Node, int](), [x for x in nodes if x not in self.placed]
        while stack:
            x = stack.pop()
            if x not in needed:
                missing = self._missing(x)
                needed[x] = len(missing)
                stack += missing
        free = [(_waits(x), self._position[x], x) for x, count in needed.items() if not count]
        heapq.heapify(free)
        while free:
            *_, node = heapq.heappop(free)
            self.put(node)
            for user in node.users:
                if user in needed:
                    needed[user] -= 1
                    if not needed[user]:
                        heapq.heappush(free, (_waits(user), self._position[user], user))


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
