"""A model captured once and lowered for many strategies, whose local graphs run as they are.

Capturing and PyTorch's partitioner take most of the time of a small model's first step. What strategies differ in is the local
graph, which is differentiable by itself: run without the partitioner, it shows any mistake of a rule, a schedule or a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autosp.cost_model.hardware import load
from autosp.cost_model.planner import Planner
from autosp.cost_model.problem import Decide, Decision, Problem
from autosp.mesh import resolve
from autosp.parallelizer import tracing
from autosp.passes import recognise
from autosp.passes.capture import capture
from autosp.passes.pipeline import Compiled, Settings, compile_captured

aten = torch.ops.aten
PLANNER = Planner(load("cpu"))


def only(planner: Planner = PLANNER, /, **params: int) -> Decide:
    """A planner, left with those candidates of a strategy that have these parameters, where any has."""

    def decide(problem: Problem) -> Decision:
        sites = []
        for s in problem.sites:
            having = {c.strategy for c in s.candidates if dict(c.params) == params}
            kept = tuple(c for c in s.candidates if c.strategy not in having or dict(c.params) == params)
            sites.append(replace(s, candidates=kept))
        return planner(replace(problem, sites=tuple(sites)))

    return decide


def _write(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return buffer.copy_(value)


class Lowered:
    """`module` under each of `strategies` in turn: set `strategy`, and `seed` where it draws, then call. One batch shape only.

    `options` are those of `Settings`.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, strategies: Sequence[str | None], decide: Decide = PLANNER, **options: Any
    ) -> None:
        self.module, self.mesh, self.strategies, self.strategy = module, mesh, strategies, strategies[0]
        self.seed, self.decide, self.options = 0, decide, options
        self.compiled: dict[str | None, Compiled] = {}
        recognise.install()
        recognise.prepare(module._call_impl)
        self._run = torch.compile(module, backend=self._backend, fullgraph=True, dynamic=False)

    def __call__(self, **inputs: Any) -> Any:
        with tracing():
            return self._run(**inputs)

    @property
    def plan(self) -> Any:
        return self.compiled[self.strategy].plan

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        captured, spread = capture(gm, example_inputs), resolve(self.mesh, "autosp").spread
        for strategy in self.strategies:
            settings = Settings(strategy, compiler="aot_eager", **self.options)
            self.compiled[strategy] = compile_captured(captured, spread, settings, self.decide)
            module = self.compiled[strategy].module
            for node in module.graph.nodes:
                if node.target is aten.copy_.default:  # the partitioner leaves a running statistic out of the gradient
                    node.target = _write
            module.recompile()
        return self._step

    def _step(self, *args: Any) -> Any:
        compiled = self.compiled[self.strategy]
        extras = [torch.tensor(self.seed) if isinstance(what, str) else what(args) for what in compiled.extras]
        return compiled.module(*args, *extras)
