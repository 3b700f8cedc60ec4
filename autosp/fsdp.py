"""FSDP2 (`fully_shard`) around a parallel model: its hooks gather the parameters before the graph runs and free them after it.

The hooks are on the model itself. They hide behind `torch.compiler.disable`, so they cannot be a part of the graph: where FSDP is
around a model, what is compiled is the model's `forward`, and the hooks run around that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .kernels.errors import AutospError


class WrappingError(AutospError):
    """FSDP is around a model in a way that cannot be run in parallel, or not rightly."""


def is_around(module: Any) -> bool:
    return isinstance(module, FSDPModule)


def refuse_inside(module: nn.Module) -> None:
    """Raises WrappingError where `fully_shard` is around parts of the model: before anything is sent."""
    inside = [name for name, m in module.named_modules() if m is not module and is_around(m)]
    if inside:
        more = f" and {len(inside) - 1} more modules" if len(inside) > 1 else ""
        raise WrappingError(
            f"fully_shard is around {inside[0]}{more} inside the parallel model, whose hooks would break its graph there. fix: "
            "fully_shard(model) alone, around all of it; or, to hold no more than a layer or two whole, no fully_shard but "
            "autosp.parallelize(model, mesh, zero=3), which gathers layer by layer inside the graph"
        )


def refuse_part_of_the_ranks(module: nn.Module, ranks: int) -> None:
    """Raises WrappingError unless FSDP averages gradients over all `ranks` of the mesh, dp x sp."""
    for name, p in module.named_parameters():
        if isinstance(p, DTensor) and p.device_mesh.size() != ranks:
            raise WrappingError(
                f"grad_sync='external' leaves averaging gradients over all {ranks} ranks of the mesh to FSDP, but fully_shard "
                f"split {name} over {p.device_mesh.size()}. fix: fully_shard(model, mesh=mesh) with the mesh (dp, sp), or "
                "grad_sync='autosp'"
            )


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` runs `forward` instead of its own, between its hooks."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
