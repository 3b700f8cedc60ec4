"""Functions with a derivative of their own: split where both their graphs are, each operator by its own rule."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...kernels import comm, custom_function
from ...kernels.custom_function import Bodies
from ..placement import P, Partial, Placement, R, Replicate, Shard, V
from ..relation import Dims, operands, shape
from .base import Builder, OnRank, Recipe, Rule, is_split, rerun

aten = torch.ops.aten


class _NotLocal(Exception):
    """The function cannot run on a part of the sequence; the message says why."""


@dataclass(frozen=True)
class CustomFunction(Rule):
    """asp::custom_function(args, key).

    A user's backward need not be linear in the cotangent (it may clip it), so it has to see the cotangent of its split result,
    or all of it: the node is never computed as a varying value, nor in two versions that would share its cotangent.
    """

    def linear(self, node: fx.Node) -> bool:
        return False

    def relation(self, node: fx.Node) -> Dims:
        return Dims(tuple((None,) * len(shape(x)) for x in operands(node)))

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        try:
            return _split(node, ins)
        except _NotLocal:
            return None

    def version(self, node: fx.Node, want: Shard) -> Recipe | None:
        return None

    def why(self, node: fx.Node, ins: Sequence[Placement]) -> str:
        try:
            _split(node, ins)
        except _NotLocal as reason:
            return f"{custom_function.bodies(str(node.args[1])).name}: {reason}"
        raise AssertionError(f"{node} is split")

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        return b.call(custom_function.call, list(values), node.args[1])


def _split(node: fx.Node, ins: Sequence[Placement]) -> Recipe:
    """The function on a part of the sequence.

    The versions of whole arguments follow from their cotangents: computed in full on each rank it belongs to a replicated value,
    a sum of each rank's own terms to a varying one.
    """
    found = custom_function.bodies(str(node.args[1]))
    given: list[Placement] = [p if is_split(p) else R for p in ins]
    forward = _typed(found.forward.graph, given)
    made = [forward[x].out for x in _outputs(found.forward.graph)]
    results, saved = made[: found.results], made[found.results :]
    out = results[0]
    if not isinstance(out, Shard) or any(p != out for p in results):
        raise _NotLocal("its results are not split in one way")
    if P in saved:
        raise _NotLocal("it saves a sum over the sequence for its backward")
    backward = _typed(found.backward.graph, [*[p for i, p in enumerate(results) if i not in found.fixed], *saved])
    cotangents = iter(_outputs(found.backward.graph))
    wanted: list[Placement | None] = []
    demands: list[tuple[fx.Node, Placement]] = []
    for x, p, is_given in zip(operands(node), given, found.given, strict=True):
        g = next(cotangents) if is_given else None
        want, demand = _joined(x, p, g, backward[g].out) if g is not None else (None, p if is_split(p) else V)
        wanted += [want] if g is not None else []
        demands.append((x, demand))

    def local(rank: int) -> Bodies:
        part = _Part(rank, out.layout.ranks)
        return replace(
            found,
            forward=part.build(found.forward, forward, made),
            backward=part.build(found.backward, backward, wanted),
        )

    def emit(b: Builder, values: Sequence[fx.Node]) -> fx.Node:
        mine = local(b.rank)
        key = hashlib.sha256(f"{node.args[1]} {mine.text}".encode()).hexdigest()
        custom_function.register(key, mine)
        return b.call(custom_function.call, list(values), key)

    local(0)  # raises where an operator would exchange something
    return Recipe(out, tuple(demands), emit)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _joined(x: fx.Node, p: Placement, g: fx.Node, have: Placement) -> tuple[Placement, Placement]:
    """(what the cotangent `g`, typed `have`, is to be; the argument's version). Autograd sums it over broadcast dimensions."""
    size, made = shape(x), shape(g)
    lead = len(made) - len(size)
    if isinstance(p, Shard):
        want = p.at(p.dim + lead)
        if have not in (want, R) or size[p.dim] != made[p.dim + lead]:
            raise _NotLocal("its backward gives a split argument a cotangent that is not split like it")
        return want, p
    if isinstance(have, Replicate):
        return R, R
    if isinstance(have, Shard) and have.dim >= lead and size[have.dim - lead] == made[have.dim]:
        raise _NotLocal("its backward gives a whole argument a cotangent that is split")
    return have, V


# Types inside -------------------------------------------------------------------------------------


def _typed(graph: fx.Graph, given: Sequence[Placement]) -> dict[fx.Node, Recipe]:
    """Every value of a body, from whole and split ones, where no rank needs anything of another. Nothing is differentiated
    here, so a whole value is as good as a varying one.
    """
    from . import rule_of

    types: dict[fx.Node, Recipe] = {}
    placeholders = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            types[node] = Recipe(next(placeholders), (), _given(node))
        elif node.op == "get_attr":
            types[node] = Recipe(R, (), _given(node))
        elif node.op == "call_function":
            xs = operands(node)
            ins = [types[x].out for x in xs if x in types]
            known = rule_of(node)
            if P in ins:
                types[node] = _of_sum(node, ins)
            elif not any(map(is_split, ins)):
                types[node] = known.whole(node, R) if known else Recipe(R, tuple((x, R) for x in xs), _given(node))
            else:
                recipe = known.native(node, ins) if known else None
                if recipe is None:
                    raise _NotLocal(f"{node.target} {'works along the sequence' if known else 'has no rule'}")
                types[node] = recipe
        if node in types and not isinstance(types[node].out, (Replicate, Shard, Partial)):
            raise _NotLocal(f"{node} has the sequence along two dimensions")
    return types


def _given(node: fx.Node) -> Callable[[Builder, Sequence[fx.Node]], fx.Node]:
    return lambda b, values: b.run(node, values)


def _of_sum(node: fx.Node, ins: Sequence[Placement]) -> Recipe:
    """A linear operator on a sum over ranks: each rank applies it to its own term."""
    op = getattr(node.target, "overloadpacket", None)
    alone, first = [p for p in ins if p != R] == [P], ins[0] == P and isinstance(node.args[0], fx.Node)
    value = node.meta["val"]
    linear = (op in _LINEAR and len(ins) == 1) or (op is aten.mul and alone) or (op is aten.div and alone and first)
    rounded = node.kwargs.get("rounding_mode") is not None or not (value.is_floating_point() or value.is_complex())
    if not linear or rounded:
        raise _NotLocal(f"{node.target} needs a whole sum over the sequence")
    return Recipe(P, tuple(zip(operands(node), ins, strict=True)), _given(node))


_LINEAR = {aten.neg, aten._to_copy, aten.to, aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze}
_LINEAR |= {aten.clone, aten.contiguous, aten.alias, aten.detach, aten.sum, aten.transpose, aten.permute, aten.t, aten.expand}


# The local graphs ---------------------------------------------------------------------------------


@dataclass
class _Part(OnRank):
    """A body on one rank; rules emit into it."""

    rank: int
    ranks: int
    graph: fx.Graph = field(default_factory=fx.Graph)

    def build(self, body: fx.GraphModule, types: dict[fx.Node, Recipe], outs: Sequence[Placement | None]) -> fx.GraphModule:
        self.graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in body.graph.nodes:
            if node.op == "placeholder":
                env[node] = self.graph.placeholder(str(node.target))
            elif node in types:
                recipe = types[node]
                env[node] = recipe.emit(self, [self._as(x, types[x].out, p, env) for x, p in recipe.demands])
        results = zip(_outputs(body.graph), outs, strict=True)
        self.graph.output(tuple(self._as(x, types[x].out, p or types[x].out, env) for x, p in results))
        return fx.GraphModule(body, self.graph)

    def _as(self, x: fx.Node, have: Placement, want: Placement, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """A value as an operator wants it: whole values are cut, the rest is as it is."""
        if have == want or (have == R and want == V):
            return env[x]
        if have == R and isinstance(want, Shard):
            return self.call(comm.cut, env[x], want.dim, want.layout.shards, want.outer, want.inner, self.rank)
        raise _NotLocal(f"it needs {x} as {want} and has it as {have}")

    @property
    def group(self) -> str:
        raise _NotLocal("it works along the sequence")

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def run(self, node: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
        if node.op == "get_attr":
            return self.graph.get_attr(str(node.target))
        return rerun(self, node, values)

    def seed(self) -> fx.Node:
        raise _NotLocal("it draws random numbers")

    def of_batch(self, what: Any) -> fx.Node:
        raise _NotLocal("it attends")


RULES: dict[object, Rule] = {torch.ops.asp.custom_function: CustomFunction()}
