"""What Inductor must be told, in the one place that touches its private parts. Tested in tests/test_inductor.py.

To fuse loops of different shape, Inductor's CPU backend computes a node's dependencies anew, and up to torch 2.13 a read of a
scatter's result then names the buffer before the scatter: it is read too early and the scatter is lost, silently
(pytorch/pytorch#185509; the gradient of a router's top-k, for one). `KeepOrder` gives such a read its name back. A torch
without the fault finds nothing left to rename.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch.utils._ordered_set import OrderedSet

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # an older torch takes a plain function, and keys its cache with that
    CustomSchedulerPass = object  # type: ignore[assignment, misc]


class KeepOrder(CustomSchedulerPass):
    """A pass before fusion: what reads a buffer stays behind what writes into it in place."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        for node in nodes:
            for part in node.get_nodes():
                if isinstance(part, SchedulerNode):
                    part.recompute_size_and_body = _keep_order(part)  # type: ignore[method-assign]
        return nodes

    def uuid(self) -> str:
        return "autosp: keep order 1"  # part of Inductor's cache key: code that was compiled without it is not taken


def _keep_order(node: SchedulerNode) -> Callable[..., None]:
    recompute = node.recompute_size_and_body

    def run(*args: Any, **options: Any) -> None:
        added = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, WeakDep | StarDep))
        recompute(*args, **options)
        node.set_read_writes(node.read_writes.with_read(added).rename(node.mutation_renames))

    return run


def settings() -> dict[str, Any]:
    """`config_patches` for `compile_fx`: nothing where this torch has no such hook."""
    return {"_pre_fusion_custom_pass": KeepOrder()} if hasattr(torch._inductor.config, "_pre_fusion_custom_pass") else {}
