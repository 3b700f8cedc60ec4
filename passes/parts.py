"""Parameters of which each rank holds a part (ZeRO-3): which they are, and what is gathered together.

What is gathered, and what is computed from parameters alone, is marked to be computed again in backward: a whole parameter is
in memory while its layer runs, and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..kernels import parts
from ..kernels.errors import AutospError
from .capture import Captured
from .facts import Facts, is_random
from .place import Decisions
from .relation import operands, shape
from .spread import Spread
from .workload import units

# PyTorch's partitioner keeps what a later checkpoint region reads: to it, parameters belong to a region after all others.
AGAIN: Mapping[str, Any] = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": sys.maxsize}


class ChangedParameterError(AutospError):
    """The model writes into a parameter that is held in parts."""


@dataclass
class Parts:
    """buckets: by parameter, those that are gathered with it. derived: what depends on nothing but parameters."""

    buckets: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    derived: frozenset[fx.Node] = frozenset()


def is_part(node: fx.Node, facts: Facts, spread: Spread) -> bool:
    """Is it a parameter, of which this rank holds a part?"""
    held = spread.zero and node.op == "placeholder" and facts.inputs[node].kind == "parameter"
    return held and parts.split_dim(shape(node), spread.world) is not None


def local_value(node: fx.Node, facts: Facts, spread: Spread) -> torch.Tensor:
    """What stands for an input in the local graph: as fake value, a rank's part of a parameter, or the input itself."""
    value: torch.Tensor = node.meta["val"]
    if not is_part(node, facts, spread):
        return value
    return value.new_empty(parts.part_shape(shape(node), spread.world, spread.place))


def find(captured: Captured, facts: Facts, decisions: Decisions, spread: Spread) -> Parts:
    """Parameters that are used, in buckets of one unit, dtype, device and need of a gradient."""
    nodes = list(captured.module.graph.nodes)
    held = [n for n in nodes if is_part(n, facts, spread)]
    written = [facts.inputs[nodes[i]].source for i in captured.mutated if nodes[i] in held]
    if written:
        raise ChangedParameterError(
            f"the model changes a parameter while it runs ({written[0]}), of which each rank holds a part only; "
            "fix: make it a buffer, or parallelize without zero=3"
        )
    demanded = {x for versions in decisions.versions.values() for recipe in versions.values() for x, _ in recipe.demands}
    demanded |= {x for x, _ in decisions.outputs}
    groups: dict[object, list[fx.Node]] = {}
    for node, unit in units(captured, facts).items():
        if node in demanded and node in held:
            value = node.meta["val"]
            groups.setdefault((unit, value.dtype, value.device, node in facts.differentiable), []).append(node)
    derived: set[fx.Node] = set(held)
    for node in nodes:
        alone = node.op == "call_function" and node not in facts.from_data and not is_random(node)
        if alone and any(x in derived for x in operands(node)):
            derived.add(node)
    buckets = {node: tuple(group) for group in groups.values() for node in group}
    return Parts(buckets, frozenset(derived))


def of_parameters(node: fx.Node) -> bool:
    """Whether a node, also of a graph that PyTorch's partitioner made, gathers parameters or computes from them alone."""
    return node.meta.get("ac_graph_id") == AGAIN["ac_graph_id"]


def again(node: fx.Node) -> fx.Node:
    node.meta.update(AGAIN)
    return node
