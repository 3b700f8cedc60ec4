"""What backward computes again, said to PyTorch's partitioner as torch.utils.checkpoint says it: by tags on nodes.

A layer that is computed again is a region: its nodes prefer to be recomputed, and what leaves it for the next region is saved.
Where its attention's output is kept, what came from other ranks and from its attention's kernel must be saved, so backward
repeats neither (DistFlashAttn, arXiv 2310.03294, section 3.3). Where its operands are, those must be saved as they are before
heads are exchanged, which is then done again. Values that are gathered whole are gathered again: they are as long as the
sequence. What a layer is to find in the host's memory is marked (`host.mark`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..cost_model.problem import on_host, with_operands
from ..kernels import attend, blocks, comm  # noqa: F401  registers the operators
from . import host
from .detect import SDPA, layer_of
from .relation import operands

KEEPS = "keeps"  # in the meta of global nodes of a layer whose attention's output is kept: `Keeps`
_REPEATED = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
_SAVED = (
    comm.to_heads,
    comm.to_sequence,
    comm.halo,
    comm.relayout,
    comm.psum,
    SDPA,
    torch.ops.asp.block_attention.default,
    torch.ops.asp.attend.default,
)
_WHOLE = (comm.gather, comm.gather_varying)  # as long as the sequence: never kept


@dataclass(frozen=True)
class Keeps:
    """Of what a global node becomes: whether its result must be saved as one of attention's operands, whether heads that were
    exchanged must be, and the layer that finds all this in the host's memory, if one does. part: the result shares the memory of
    something larger, and is copied for that."""

    result: bool
    exchanged: bool
    layer: str
    part: bool = False


def tag(graph: fx.Graph, saves: Mapping[str, str], moving: Collection[fx.Node], read: Mapping[fx.Node, bool]) -> None:
    """Tag the nodes of layers by what backward finds of each (`problem.SAVES`; a layer not named: everything).

    moving: values that a batch and a gradient go through; of what enters a layer, these may wait in the host's memory. read:
    attention's operands, and whether each is part of something larger.

    What the model itself checkpoints keeps its tags. Regions are numbered anew, in order: a value between two of the model's is
    saved by the partitioner if the second has the larger number.
    """
    regions: dict[object, int] = {}
    ours: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name, own = layer_of(node), node.meta.get("ac_graph_id")
        save = saves.get(name, "everything")
        if save.startswith("attention"):
            before = with_operands(save)
            found = before and node in read
            node.meta[KEEPS] = Keeps(found, not before, name if on_host(save) else "", found and read[node])
        if on_host(save):
            reads = any(x in moving and layer_of(x) != name for x in operands(node))
            host.mark(node, name, host.READS if reads else host.INSIDE)
        if own is None and name in saves:
            ours.append(node)
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = regions.setdefault(name, len(regions) + 1)
        elif own is not None:
            node.meta["ac_graph_id"] = regions.setdefault(("checkpoint", own), len(regions) + 1)
    for node in ours:
        if any(user.op == "call_function" and user.meta.get("ac_graph_id") != node.meta["ac_graph_id"] for user in node.users):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # else all of a layer would run again for the next


def keep(made: Iterable[fx.Node], result: fx.Node, keeps: Keeps) -> None:
    """Of the local nodes that a node of such a layer became: what attention gave must be saved, and what it read."""
    for node in made:
        given = node.target in _SAVED and (keeps.exchanged or node.target is not comm.to_heads)
        read = keeps.result and node is result and node.target not in _WHOLE
        if "recompute" in node.meta and (given or read):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if keeps.layer:
                host.mark(node, keeps.layer, host.KEPT)


def repeated(node: fx.Node) -> bool:
    """Whether backward computes a local node again."""
    return node.meta.get("recompute") in _REPEATED


__all__ = ["KEEPS", "Keeps", "keep", "repeated", "tag"]
