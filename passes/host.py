"""What backward finds in the host's memory: in the graphs that PyTorch's partitioner made, copies of what layers read.

Nodes of a layer whose values wait there are marked. Of what forward keeps for backward, it returns a copy if such a layer reads
it from outside, or made it to be kept; backward brings the copy back. A layer's copies start when those of the layer before it
are waited for: backward fetches what the next layer needs while it is in this one, and two layers' at most are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ..kernels import host  # noqa: F401  registers the operators
from .relation import behind_views, is_view

aten = torch.ops.aten
MARK = "autosp: on host"  # in meta["custom"], which AOTAutograd hands on: (layer, role)
INSIDE, READS, KEPT = "inside", "reads", "kept"  # of the layer; reads what enters it; is kept for its backward
STARTS = (torch.ops.asp.offload.default, torch.ops.asp.reload.default)


def mark(node: fx.Node, layer: str, role: str) -> None:
    node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: (layer, role)}


def starts(node: fx.Node) -> bool:
    """Whether a node starts a copy to or from the host."""
    return node.target in STARTS


def to_host(forward: fx.GraphModule, backward: fx.GraphModule, returned: int) -> None:
    """Put copies into a partitioned graph, in place. returned: how many of forward's outputs the user has."""
    result = forward.graph.output_node()
    values = list(result.args[0])  # type: ignore[arg-type]
    there = set(values[returned:]) - set(values[:returned])
    found = {n.name: n for n in backward.graph.nodes if n.op == "placeholder" and n.users}
    kept = {n: layer for n in forward.graph.nodes if n in there and n.name in found and (layer := _layer(n))}
    if not kept:
        return
    copies = _offload(forward.graph, kept)
    result.args = ((*values[:returned], *(copies.get(n, n) for n in values[returned:])),)
    _reload(backward.graph, [(found[n.name], copies[n], layer) for n, layer in kept.items()])
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _layer(node: fx.Node) -> str:
    """The layer that is to find a value on the host, the last if there are several; "" if none is."""
    value, source = node.meta.get("val"), behind_views(node)
    if source.op != "call_function" or not isinstance(value, torch.Tensor) or not value.is_floating_point() or not _dense(value):
        return ""  # a parameter, or no activation
    layer, role = _marked(node)
    layers = [layer] if role == KEPT else [x for x in _readers(node) if x != _marked(source)[0]]
    return layers[-1] if layers else ""


def _marked(node: fx.Node) -> tuple[str, str]:
    found: tuple[str, str] = (node.meta.get("custom") or {}).get(MARK, ("", ""))
    return found


def _readers(node: fx.Node) -> Iterator[str]:
    """Layers that read a value, or a view that no layer made of it."""
    for user in node.users:
        layer, role = _marked(user)
        if role == READS:
            yield layer
        elif not role and is_view(user):
            yield from _readers(user)


def _dense(x: torch.Tensor) -> bool:
    """Without gaps and overlaps: a copy with x's strides is no larger."""
    compact = zip(x.shape, x.stride(), torch.empty_like(x).stride(), strict=True)
    return all(stride == dense or size == 1 for size, stride, dense in compact)


def _offload(graph: fx.Graph, kept: Mapping[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """Each value's copy, waited for before the first of another layer starts, or at the end. kept: for which layer."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    made = {n: _made(n) for n in kept}
    copies: dict[fx.Node, fx.Node] = {}
    after: list[fx.Node] = []
    under_way: list[tuple[fx.Node, fx.Node]] = []
    last = ""

    def wait() -> list[fx.Node]:
        copies.update({x: _call(graph, torch.ops.asp.wait_copy.default, copy, made[x]) for x, copy in under_way})
        done = [copies[x] for x, _ in under_way]
        under_way.clear()
        return done

    for x in sorted(kept, key=lambda n: position[made[n]]):
        with graph.inserting_after(made[x]):
            start = _call(graph, torch.ops.asp.offload.default, made[x], [])
        if under_way and kept[x] != last:
            with graph.inserting_before(start):
                after = wait()
        start.args = (made[x], after)
        last = kept[x]
        under_way.append((x, start))
    with graph.inserting_before(graph.output_node()):
        wait()
    return copies


def _made(node: fx.Node) -> fx.Node:
    """The value of which a node is but another name, which may come long after it."""
    while node.target in (aten.detach.default, aten.alias.default):
        node = node.all_input_nodes[0]
    return node


def _reload(graph: fx.Graph, kept: Iterable[tuple[fx.Node, fx.Node, str]]) -> None:
    """A layer's values come back one layer before they are read. kept: placeholders, the copies that they now are, the layers."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    layers: dict[str, list[fx.Node]] = {}
    device = {}
    first: dict[str, fx.Node] = {}
    for x, copy, layer in kept:
        device[x] = x.meta["val"].device
        layers.setdefault(layer, []).append(x)
        reader = min(x.users, key=position.__getitem__)
        first[layer] = min(first.get(layer, reader), reader, key=position.__getitem__)
        x.meta = {**x.meta, "val": copy.meta["val"]}
        x.meta.pop("tensor_meta", None)
    order = sorted(layers, key=lambda layer: position[first[layer]])
    started: list[tuple[fx.Node, fx.Node]] = []
    for layer, following in zip(order, [*order[1:], None], strict=True):
        with graph.inserting_before(first[layer]):
            if not started:
                started = [(x, _call(graph, torch.ops.asp.reload.default, x, device[x], [])) for x in layers[layer]]
            waits = []
            for x, start in started:
                readers = [u for u in x.users if u is not start]
                waits.append(_call(graph, torch.ops.asp.wait_copy.default, start, x))
                for reader in readers:
                    reader.replace_input_with(x, waits[-1])
            if following:
                started = [(x, _call(graph, torch.ops.asp.reload.default, x, device[x], waits)) for x in layers[following]]


def _call(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    """With its value, a fake one as its arguments' are."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
    return node


__all__ = ["INSIDE", "KEPT", "READS", "STARTS", "mark", "starts", "to_host"]
