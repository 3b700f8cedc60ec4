"""Every value typed, then every needed version of it decided.

`natural` goes forward: what each value is, given what its operands are. Values that depend on no split value
are *lazy*: whole, and not computed until someone needs them, so a slice that a consumer asks for is
hoisted to the inputs. `decide` goes backward from the outputs: which versions of each value are needed, and the recipe
for each. The two together are the proof that the local graph computes what the global one does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ..kernels import comm
from ..kernels.errors import AutospError
from .capture import Captured, source_line
from .facts import Facts, is_float, is_mode, is_random
from .placement import Pairwise, Partial, Placement, R, Replicate, Shard, V, Varying
from .relation import operands
from .rules import rule_of
from .rules.base import Emit, Recipe, Rule, is_split

aten = torch.ops.aten


Seeds = dict[fx.Node, list[Placement]]  # operand placements with which a sequence starts at a node


@dataclass(frozen=True)
class Gathered:
    """An operator that runs replicated although an operand was split."""

    node: fx.Node
    bytes: int
    reason: str


@dataclass
class Types:
    """The natural recipe of every value, which values are lazy, and what had to be gathered."""

    recipes: dict[fx.Node, Recipe] = field(default_factory=dict)
    lazy: set[fx.Node] = field(default_factory=set)
    gathered: list[Gathered] = field(default_factory=list)

    def of(self, node: fx.Node) -> Placement:
        return self.recipes[node].out

    def seen(self, node: fx.Node) -> Placement:
        """The placement a consumer reasons with: a partial value is summed first."""
        out = self.of(node)
        return R if isinstance(out, (Partial, Varying)) else out


class _Unknown(Rule):
    """No rule: nothing is known, so operands are whole."""

    def native(self, node: fx.Node, ins: Sequence[Placement]) -> Recipe | None:
        return None

    def version(self, node: fx.Node, want: Shard) -> Recipe | None:
        return None


def rule(node: fx.Node) -> Rule:
    return rule_of(node) or _Unknown()


def natural(captured: Captured, facts: Facts, seeds: Seeds) -> Types:
    """Forward typing. `seeds` gives operand placements that start a sequence at a node of lazy operands."""
    types = Types()
    for node in captured.module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            types.recipes[node] = Recipe(R, (), _given(node))
            types.lazy.add(node)
        elif node.op == "call_function" and not is_mode(node):
            _type(node, types, facts, seeds)
    return types


def _given(node: fx.Node) -> Emit:
    return lambda b, values: b.run(node, values)


def _type(node: fx.Node, types: Types, facts: Facts, seeds: Seeds) -> None:
    ins = [types.seen(x) for x in operands(node)]
    if node in seeds:
        ins = [p if is_split(p) else s for p, s in zip(ins, seeds[node], strict=True)]
    if is_random(node):
        _refuse_drawn_gradient(node, facts)
        types.recipes[node] = _drawn(node)
        _report(node, ins, types, "draws random numbers: drawn once and broadcast")
        return
    recipe = rule(node).native(node, ins) if any(map(is_split, ins)) else None
    if recipe is not None:
        types.recipes[node] = recipe
        return
    types.recipes[node] = rule(node).whole(node, R)
    if any(map(is_split, ins)):
        known = rule_of(node)
        _report(node, ins, types, known.why(node, ins) if known is not None else "no rule for this operator")
    elif not _of_whole_tuple(node, types):
        types.lazy.add(node)


def _of_whole_tuple(node: fx.Node, types: Types) -> bool:
    """One of several results that were computed whole: it can be converted, its siblings need not be."""
    return node.target is operator.getitem and operands(node)[0] not in types.lazy


class RandomnessError(AutospError):
    """An operator draws random numbers and passes a gradient through them: ranks could not draw the same."""


def _refuse_drawn_gradient(node: fx.Node, facts: Facts) -> None:
    if node in facts.differentiable:
        raise RandomnessError(
            f"{node.target} draws random numbers and its input takes a gradient\nat {source_line(node)}\n"
            "autosp makes dropout (F.dropout, attention dropout) agree across ranks, other random layers not yet. "
            "Fix: use F.dropout there, or draw the noise separately (torch.rand_like(x.detach())) and multiply."
        )


def _drawn(node: fx.Node) -> Recipe:
    """Rank 0's random numbers on every rank."""
    demands = tuple((x, R) for x in operands(node))
    return Recipe(
        R, demands, lambda b, values: b.call(comm.broadcast, b.run(node, values), b.group) if b.ranks > 1 else b.run(node, values)
    )


def _report(node: fx.Node, ins: Sequence[Placement], types: Types, reason: str) -> None:
    moved = sum(x.meta["val"].nbytes for x, p in zip(operands(node), ins, strict=True) if is_split(p))
    types.gathered.append(Gathered(node, moved, reason))


# Versions -----------------------------------------------------------------------------------------


@dataclass
class Decisions:
    """For each value, the versions that are needed and how each comes about, in an order that can be emitted."""

    versions: dict[fx.Node, dict[Placement, Recipe]]
    outputs: list[tuple[fx.Node, Placement]]


def output_placement(node: fx.Node, types: Types) -> Placement:
    """What an output is if nobody asks for more: its own split, or whole."""
    out = types.of(node)
    if isinstance(out, Pairwise):
        return out.row
    return out if isinstance(out, Shard) else R


def decide(captured: Captured, facts: Facts, types: Types, gather_outputs: bool) -> Decisions:
    """Backward from the outputs: the recipe of every version that is needed."""
    graph = captured.module.graph
    result = next(iter(reversed(graph.nodes)))
    wanted: dict[fx.Node, dict[Placement, None]] = {}

    def want(node: fx.Node, placement: Placement) -> Placement:
        placement = normal(node, placement, facts)
        wanted.setdefault(node, {})[placement] = None
        return placement

    outputs = []
    for i, node in enumerate(result.args[0]):
        if isinstance(node, fx.Node):
            whole = gather_outputs or i < len(captured.mutated)
            outputs.append((node, want(node, R if whole else output_placement(node, types))))
    versions: dict[fx.Node, dict[Placement, Recipe]] = {}
    for node in reversed(graph.nodes):
        if node not in wanted:
            continue
        made: dict[Placement, Recipe] = {}
        queue = list(wanted[node])
        while queue:
            placement = queue.pop(0)
            if placement in made:
                continue
            recipe = _choose(node, placement, wanted[node], facts, types)
            demands = tuple((x, normal(x, p, facts)) for x, p in recipe.demands)
            made[placement] = Recipe(recipe.out, demands, recipe.emit)
            for x, p in demands:
                want(x, p)
                if x is node:
                    queue.append(p)
        versions[node] = made
    return Decisions(versions, outputs)


def normal(node: fx.Node, placement: Placement, facts: Facts) -> Placement:
    """Without a gradient there is nothing to vary: Varying is Replicate."""
    return R if isinstance(placement, Varying) and node not in facts.differentiable else placement


def _choose(node: fx.Node, want: Placement, wanted: Iterable[Placement], facts: Facts, types: Types) -> Recipe:
    own = types.recipes[node]
    if node in types.lazy:
        return _lazy_version(node, want, wanted, facts, own)
    if want == own.out:
        return own
    if isinstance(own.out, Pairwise):
        recipe = rule(node).version(node, want) if isinstance(want, Shard) and want in (own.out.row, own.out.col) else None
        return recipe or converted(node, own.out.row, want)
    return converted(node, own.out, want)


def _lazy_version(node: fx.Node, want: Placement, wanted: Iterable[Placement], facts: Facts, own: Recipe) -> Recipe:
    """A whole value that depends on no split one, in the version a consumer needs."""
    if isinstance(want, Replicate):
        return own
    if node in facts.differentiable and not rule(node).linear(node):
        return converted(node, R, want)  # one version sees the whole cotangent
    if node.op == "placeholder" and facts.inputs[node].kind == "parameter" and node in facts.differentiable:
        if isinstance(want, Varying):
            return Recipe(V, (), lambda b, values: b.parameter(node))  # type: ignore[attr-defined]
        assert isinstance(want, Shard)
        return converted(node, V, want)
    if isinstance(want, Varying):
        leaf = node.op != "call_function" or any(isinstance(p, Replicate) for p in wanted)
        return converted(node, R, V) if leaf else rule(node).whole(node, V)
    assert isinstance(want, Shard)
    free = node not in facts.differentiable and any(isinstance(p, Replicate) for p in wanted)
    recipe = None if free or node.op != "call_function" else rule(node).version(node, want)
    return recipe or converted(node, R, want)


def converted(node: fx.Node, have: Placement, want: Placement) -> Recipe:
    """One version of a value from another: the design's table of collectives, and nothing else moves data."""
    demands = ((node, have),)
    if isinstance(have, Replicate) and isinstance(want, Varying):
        return Recipe(want, demands, lambda b, v: b.collective(comm.vary, node, v[0]))  # type: ignore[attr-defined]
    if isinstance(have, (Replicate, Varying)) and isinstance(want, Shard):
        name = comm.shard if isinstance(have, Replicate) and is_float(node) else comm.cut
        return Recipe(want, demands, lambda b, v: b.resharded(name, node, v[0], want))  # type: ignore[attr-defined]
    if isinstance(have, Partial):
        if isinstance(want, Replicate):
            return Recipe(R, demands, lambda b, v: b.collective(comm.psum, node, v[0]))  # type: ignore[attr-defined]
        return converted(node, R, want)
    if isinstance(have, Shard):
        if isinstance(want, (Replicate, Varying)):
            name = comm.gather if isinstance(want, Replicate) else comm.gather_varying
            return Recipe(want, demands, lambda b, v: b.resharded(name, node, v[0], have))  # type: ignore[attr-defined]
        assert isinstance(want, Shard)
        if (have.dim, have.outer, have.inner) == (want.dim, want.outer, want.inner):
            return Recipe(want, demands, lambda b, v: b.relaid(node, v[0], have, want))  # type: ignore[attr-defined]
        return converted(node, R, want)
    raise AssertionError(f"{node}: no way from {have} to {want}")
