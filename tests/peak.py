"""Bytes that one rank's step allocates at its peak, counted by the allocator. The rank runs its graphs alone: exchanges take room
for what would arrive, and nothing does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from lowered import Traced
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosp.dynamo_backend import _reshape
from autosp.inductor import communicates
from autosp.passes.overlap import overlap


def peak_bytes(traced: Traced, ranks: int, rank: int = 0) -> int:
    """Of forward and backward, above parameters and the batch; gradients of parameters count as soon as they are there."""
    forward, backward = traced.graphs
    for graph in traced.graphs:
        overlap(graph.graph, communicates)
        _reshape(graph)
    given = [_filled(n) for n in forward.graph.nodes if n.op == "placeholder"]
    with _alone(ranks, rank), torch.no_grad():
        _step(forward, backward, given, traced.saved)  # programs are set up, buffers of libraries filled
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            _step(forward, backward, given, traced.saved)
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _step(forward: fx.GraphModule, backward: fx.GraphModule, given: list[Tensor], count: int) -> None:
    results = _run(forward, [*given])
    returned, saved = results[:-count], results[-count:]
    del results
    saved += [_filled(n) for n in backward.graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")]
    _run(backward, saved)
    del returned  # by whoever called the model


def _run(graph: fx.GraphModule, values: list[Tensor]) -> list[Tensor]:
    return list(fx.Interpreter(graph).boxed_run(values))


def _filled(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.ones(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _alone(ranks: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    torch._C._distributed_c10d._register_process_group("nobody", dist.group.WORLD)  # as `lowered.trace` names it
    try:
        yield
    finally:
        torch._C._distributed_c10d._unregister_process_group("nobody")
        dist.destroy_process_group()
