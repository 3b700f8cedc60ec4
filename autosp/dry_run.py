"""A model of real size through the compiler in one process, without weights, other ranks or a GPU: what a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .dynamo_backend import Backend
from .mesh import World
from .model_spec import RealSpec
from .parallelizer import Runner
from .passes.pipeline import Compiled, Settings, compile_graph
from .passes.spread import Spread
from .planning import Planning


def dry_run(spec: RealSpec, ranks: int, settings: Settings, planning: Planning | None = None, dp: int = 1) -> Compiled:
    """What `parallelize` would compile for rank 0 of `ranks` that share a sequence, `dp` times; nothing is run.

    Raises `BadModel` where `spec` names no model, and what `parallelize` raises for a model or options it refuses.
    """
    module, inputs = spec()
    backend = _Rehearsal(Spread(0, ranks, "", dp, "", ""), settings, planning)
    call = Runner(module._call_impl, backend)
    try:
        if isinstance(inputs, Mapping):
            call(**inputs)
        else:
            call(*inputs)
    except _Compiled:
        pass
    assert backend.compiled is not None
    return backend.compiled


class _Compiled(BaseException):
    """Leaves Dynamo once there is a result; no `except Exception` on the way takes it for a failure."""


class _Rehearsal(Backend):
    """A backend on a mesh that does not exist, whose first graph is its last."""

    def __init__(self, spread: Spread, settings: Settings, planning: Planning | None) -> None:
        super().__init__(None, settings, check_batch=False, planning=planning)
        self.spread = spread
        self.compiled: Compiled | None = None

    def world(self) -> World:
        return World(self.spread, None, torch.device("cpu"))

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiled = compile_graph(gm, example_inputs, self.spread, self.settings, self.planning.decide(self.world().device))
        raise _Compiled
