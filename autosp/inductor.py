"""What Inductor must be told, in the one place that touches its private parts. Tested in tests/test_inductor.py.

To fuse loops of different shape, Inductor's CPU backend computes a node's dependencies anew, and up to torch 2.13 a read of a
scatter's result then names the buffer before the scatter: it is read too early and the scatter is lost, silently
(pytorch/pytorch#185509; the gradient of a router's top-k, for one). `KeepOrder` gives such a read its name back. A torch
without the fault finds nothing left to rename.

Inductor keeps the order of collectives that it knows, and moves our own operators freely. What it fuses differs from rank to
rank (the first has nothing before it), so ranks would come to run one halo before and one after a reduce-scatter, and wait for
each other. `KeepOrder` makes each operator that communicates, or starts a copy to or from the host, wait for the one before.

`Partition` stands in PyTorch's partitioner's place, with Inductor and without, and calls it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch.utils._ordered_set import OrderedSet

from .passes import host

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # an older torch takes a plain function, and keys its cache with that
    CustomSchedulerPass = object  # type: ignore[assignment, misc]


class KeepOrder(CustomSchedulerPass):
    """A pass before fusion: what reads a buffer stays behind what writes into it in place, and exchanges keep their order."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        _chain(nodes)
        for node in nodes:
            for part in node.get_nodes():
                if isinstance(part, SchedulerNode):
                    part.recompute_size_and_body = _keep_order(part)  # type: ignore[method-assign]
        return nodes

    def uuid(self) -> str:
        return "autosp: keep order 3"  # part of Inductor's cache key: code that was compiled without it is not taken


# Operators in which ranks wait for each other, by the start of their names.
COMMUNICATES = ("_c10d_functional", "asp.block_attention", "asp.scan_start", "asp.halo")


def communicates(operator: object) -> bool:
    return str(operator).startswith(COMMUNICATES) and "wait" not in str(operator)


def _chain(nodes: list[BaseSchedulerNode]) -> None:
    ordered = [(n, getattr(n.node, "op_overload", None)) for n in nodes]
    talking = [n for n, op in ordered if communicates(op) or op in host.STARTS]
    for before, after in itertools.pairwise(talking):
        mine = next(iter(after.get_buffer_names()))
        for buffer in before.get_buffer_names():
            after.add_fake_dep(WeakDep(buffer, mutating_buf=mine, is_fake=True))
    if talking:
        talking[0].scheduler.compute_ancestors()  # by which fusion sees what would become a cycle


def _keep_order(node: SchedulerNode) -> Callable[..., None]:
    recompute = node.recompute_size_and_body

    def run(*args: Any, **options: Any) -> None:
        added = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, WeakDep | StarDep))
        recompute(*args, **options)
        node.set_read_writes(node.read_writes.with_read(added).rename(node.mutation_renames))

    return run


class Partition(CustomPartitionerFn):
    """PyTorch's partitioner; what backward is to find in the host's memory is then copied there.

    Nodes' tags decide what it does, and PyTorch's key for compiled graphs leaves them out: they are in this one's.
    """

    def __init__(self, graph: fx.Graph) -> None:
        tags = [tuple(n.meta.get(key) for key in ("recompute", "ac_graph_id", "custom")) for n in graph.nodes]
        self._tags = hashlib.sha256(repr(tags).encode()).hexdigest()

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        host.to_host(forward, backward, options["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> str:
        return f"autosp: host copies 1, {self._tags}"


def settings(graph: fx.Graph) -> dict[str, Any]:
    """`config_patches` for `compile_fx` of a graph: without `KeepOrder` where this torch has no such hook."""
    order = {"_pre_fusion_custom_pass": KeepOrder()} if hasattr(torch._inductor.config, "_pre_fusion_custom_pass") else {}
    return {"custom_partitioner_fn": Partition(graph), **order}
