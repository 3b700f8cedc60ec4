"""The verifier: run after lowering, always.

It runs the local graph on fake tensors and checks that every version of every value has exactly the shape its placement
promises on this rank, and that no value was promised and not emitted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..kernels.errors import AutospError
from .capture import Captured, source_line
from .lower import Lowering
from .placement import Placement, Shard
from .relation import shape


class VerificationError(AutospError):
    """The compiler broke its own invariant: a bug in a rule, reported instead of a wrong result."""


class _Shapes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["val"] = result
        return result


def verify(module: fx.GraphModule, captured: Captured, low: Lowering, fake_mode: Any) -> None:
    """Raise VerificationError unless every emitted version has the local shape of its placement."""
    module.graph.lint()
    fakes = [x.meta["val"] for x in low.inputs.values()]
    with fake_mode:
        for what in low.extras:
            seed = torch.empty((), dtype=torch.int64, device=fakes[0].device)
            fakes.append(seed if isinstance(what, str) else torch.empty_like(what.example))
    with fake_mode, torch.no_grad():
        _Shapes(module).run(*fakes)
    for (node, placement), emitted in low.env.items():
        value = emitted.meta.get("val")
        if isinstance(value, Tensor) and isinstance(node.meta.get("val"), Tensor):
            expected = _expected(node, placement, low.rank)
            if tuple(value.shape) != expected:
                raise VerificationError(
                    f"internal error: {node.target} as {placement} should be {expected} on rank {low.rank} but is "
                    f"{tuple(value.shape)}\nat {source_line(node)}\nPlease report this with the model."
                )


def _expected(node: fx.Node, placement: Placement, rank: int) -> tuple[int, ...]:
    return tuple(placement.local_shape(shape(node), rank)) if isinstance(placement, Shard) else shape(node)
