"""The local graph of one rank, emitted version by version from the decisions."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..kernels import comm, parts
from . import remat
from .capture import Captured
from .facts import Facts
from .mask import Extra
from .parts import Parts, again, find, is_part, local_value
from .place import Decisions
from .placement import Placement, R, Replicate, Shard, V, Varying
from .relation import shape
from .rules.base import Builder, OnRank, rerun
from .spread import Spread

aten = torch.ops.aten
BUCKET_BYTES = 32 << 20  # gradients reduced together: large enough for bandwidth, small enough to start early


@dataclass
class Lowering(OnRank):
    """A rank's graph under construction; rules emit into it."""

    captured: Captured
    facts: Facts
    spread: Spread
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[tuple[fx.Node, Placement], fx.Node] = field(default_factory=dict)
    inputs: dict[fx.Node, fx.Node] = field(default_factory=dict)
    synced: dict[tuple[fx.Node, Placement], fx.Node] = field(default_factory=dict)
    extras: dict[str | Extra, fx.Node] = field(default_factory=dict)  # inputs made anew for each step
    parts: Parts = field(default_factory=Parts)
    current: fx.Node | None = None

    # What rules use -----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.spread.rank

    @property
    def ranks(self) -> int:
        return self.spread.ranks

    @property
    def group(self) -> str:
        return self.spread.group

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        if self.current is not None:
            node.meta = {k: v for k, v in self.current.meta.items() if k in _KEPT}
            if self.current in self.parts.derived:
                again(node)
        return node

    def run(self, node: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
        if node.op == "placeholder":
            if self.changed(node):  # its old value may be read after the new one is written back
                return self.call(aten.clone.default, self.inputs[node])
            return self.synced.get((node, R), self.inputs[node])
        if node.op == "get_attr":
            return self.graph.get_attr(str(node.target))
        return rerun(self, node, values)

    def seed(self) -> fx.Node:
        return self._extra("seed", "seed")

    def of_batch(self, what: Extra) -> fx.Node:
        return self._extra(what, f"of_batch_{len(self.extras)}")

    def _extra(self, what: str | Extra, name: str) -> fx.Node:
        if what not in self.extras:
            last = [*self.inputs.values(), *self.extras.values()][-1]
            with self.graph.inserting_after(last):
                self.extras[what] = self.graph.placeholder(name)
        return self.extras[what]

    def changed(self, node: fx.Node) -> bool:
        """An input that the graph mutates (running statistics)."""
        return any(list(self.inputs)[i] is node for i in self.captured.mutated)

    # Conversions --------------------------------------------------------------------------------------

    def parameter(self, node: fx.Node) -> fx.Node:
        return self.synced.get((node, V), self.inputs[node])

    def collective(self, op: Callable[..., Any], node: fx.Node, x: fx.Node) -> fx.Node:
        """vary or psum of a whole value."""
        return self.call(op, x, self.group) if self.ranks > 1 else x

    def resharded(self, op: Callable[..., Any], node: fx.Node, x: fx.Node, s: Shard) -> fx.Node:
        """shard, cut, gather or gather_varying between a whole value and `s`."""
        if self.ranks == 1:
            return x
        if op is comm.cut:
            return self.call(op, x, s.dim, s.layout.shards, s.outer, s.inner, self.rank)
        return self.call(op, x, s.dim, s.layout.shards, s.outer, s.inner, self.rank, self.group)

    def relaid(self, node: fx.Node, x: fx.Node, have: Shard, want: Shard) -> fx.Node:
        if have.layout.shards == want.layout.shards or self.ranks == 1:
            return x
        return self.call(
            comm.relayout, x, have.dim, have.layout.shards, want.layout.shards, have.outer, have.inner, self.rank, self.group
        )


_KEPT = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id", "custom")


def lower(captured: Captured, facts: Facts, decisions: Decisions, spread: Spread) -> tuple[fx.GraphModule, Lowering]:
    """The local graph: same inputs as the global one (and a seed, if anything is random), local computation."""
    low = Lowering(captured, facts, spread)
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            low.inputs[node] = low.graph.placeholder(str(node.target))
            low.inputs[node].meta = {"val": local_value(node, facts, spread)}
    _emit_buckets(low, decisions)
    if spread.zero:
        low.parts = find(captured, facts, decisions, spread)
    for node in captured.module.graph.nodes:
        if node in low.parts.buckets:
            continue  # gathered where it is first used
        for placement in decisions.versions.get(node, {}):
            _emit(low, decisions, node, placement)
    outputs = [_emit(low, decisions, *key) for key in decisions.outputs]
    placeholders = list(low.inputs.values())
    for index, new in zip(captured.mutated, outputs, strict=False):
        low.call(aten.copy_.default, placeholders[index], new)
    kept = iter(outputs)
    result = next(iter(reversed(captured.module.graph.nodes))).args[0]
    values = [next(kept) if isinstance(x, fx.Node) else x for x in result]
    low.graph.output(tuple(values[len(captured.mutated) :]))
    low.graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or n.target is aten.copy_.default)
    return fx.GraphModule(captured.module, low.graph), low


def _emit(low: Lowering, decisions: Decisions, node: fx.Node, placement: Placement) -> fx.Node:
    key = (node, placement)
    if key in low.env:
        return low.env[key]
    recipe = decisions.versions[node][placement]
    if node in low.parts.buckets:
        _gather(low, node)
    for x, p in recipe.demands:
        if x is node or x in low.parts.buckets:
            _emit(low, decisions, x, p)
    low.current = node
    values = [low.env[demand] for demand in recipe.demands]
    before = len(low.graph.nodes)
    out = under_modes(low, low.facts, node, lambda: recipe.emit(low, values))
    if (
        node in low.facts.no_grad
        and any(x in low.facts.differentiable for x, _ in recipe.demands)
        and len(low.graph.nodes) > before
    ):
        out = low.call(aten.detach.default, out) if isinstance(node.meta.get("val"), torch.Tensor) else out
    if keeps := node.meta.get(remat.KEEPS):
        out = low.call(aten.clone.default, out) if keeps.part else out
        made = itertools.islice(reversed(low.graph.nodes), len(low.graph.nodes) - before)
        remat.keep(made, out, keeps)
    low.env[key] = out
    low.current = None
    return out


def _gather(low: Lowering, node: fx.Node) -> None:
    """Emit the gathering of a parameter's bucket, unless it is there."""
    if (node, V) in low.synced:
        return
    bucket, spread = low.parts.buckets[node], low.spread
    whole = [low.inputs[n] for n in bucket]
    if spread.world > 1:
        shapes = tuple(shape(n) for n in bucket)
        results = again(low.call(parts.unshard, whole, shapes, spread.world, spread.everyone, 1 / spread.dp))
        whole = [again(low.call(operator.getitem, results, i)) for i in range(len(bucket))]
    for n, x in zip(bucket, whole, strict=True):
        low.synced[(n, V)] = x
        # Replicated work gives every rank of sp the whole gradient, but the bucket sums over them.
        twice = n in low.facts.differentiable and spread.ranks > 1
        low.synced[(n, R)] = again(low.call(parts.share, x, spread.ranks)) if twice else x


def under_modes(b: Builder, facts: Facts, node: fx.Node, emit: Callable[[], fx.Node]) -> fx.Node:
    """Emit under the autocast state the node was recorded in, where it differs from the one around the graph."""
    state = facts.autocast.get(node)
    if state is None:
        return emit()
    entered = b.call(torch.amp.autocast_mode._enter_autocast, *state)
    out = emit()
    b.call(torch.amp.autocast_mode._exit_autocast, entered)
    return out


def _emit_buckets(low: Lowering, decisions: Decisions) -> None:
    """Parameters pass through a few bucketed synchronisations, in the order of their first use."""
    order: dict[tuple[fx.Node, Placement], None] = {}
    for versions in decisions.versions.values():
        for recipe in versions.values():
            for x, p in recipe.demands:
                if _is_synced(low, x) and isinstance(p, (Replicate, Varying)):
                    order[(x, p)] = None
    position = {node: i for i, node in enumerate(low.captured.module.graph.nodes)}
    first_use = {key: min(position[u] for u in key[0].users) for key in order}
    buckets: dict[tuple[Placement, torch.dtype, torch.device], list[list[fx.Node]]] = {}
    for node, placement in sorted(order, key=lambda k: first_use[k]):
        group, scale = low.spread.reduction(placement)
        if group is None and scale == 1.0:
            continue
        value = node.meta["val"]
        open_buckets = buckets.setdefault((placement, value.dtype, value.device), [[]])
        if sum(n.meta["val"].nbytes for n in open_buckets[-1]) + value.nbytes > BUCKET_BYTES and open_buckets[-1]:
            open_buckets.append([])
        open_buckets[-1].append(node)
    for (placement, _, _), lists in buckets.items():
        group, scale = low.spread.reduction(placement)
        for nodes in lists:
            synced = low.call(comm.sync, [low.inputs[n] for n in nodes], group, scale)
            for i, node in enumerate(nodes):
                low.synced[(node, placement)] = low.call(operator.getitem, synced, i)


def _is_synced(low: Lowering, node: fx.Node) -> bool:
    parameter = node.op == "placeholder" and low.facts.inputs[node].kind == "parameter" and node in low.facts.differentiable
    return parameter and not is_part(node, low.facts, low.spread)
