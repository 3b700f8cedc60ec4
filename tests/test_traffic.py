"""What attention by blocks really posts, keeps and runs: bytes on the wire, receive buffers, kernels."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_bytes import OneAttention
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autosp
from autosp.kernels import flash, travel
from pool import Pool

STRATEGIES = ("ring", "balanced-ring", "ring-a2a", "halo")
SEQ = 48


class Watch:
    """Counts what the executor does while it is in force, by pass ("forward", "backward").

    sent: bytes of posted isends. kernels: calls of the block kernels, by (pass, kernel). peak: the most bytes of receive buffers
    and of results for other ranks that exist at once.
    """

    def __init__(self) -> None:
        self.stage = "forward"
        self.sent = {"forward": 0, "backward": 0}
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.peak = {"forward": 0, "backward": 0}
        self.now = 0
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Watch:
        self._wrap(dist, "batch_isend_irecv", self._post)
        self._wrap(flash, "forward", lambda run, *a: self._kernel(run, "forward", *a))
        self._wrap(flash, "backward", lambda run, *a: self._kernel(run, "backward", *a))
        self._wrap(travel, "receive_buffer", self._buffer)
        return self

    def __exit__(self, *_: object) -> None:
        for where, name, before in reversed(self._before):
            setattr(where, name, before)

    def _wrap(self, where: Any, name: str, act: Callable[..., Any]) -> None:
        before = getattr(where, name)
        self._before.append((where, name, before))
        setattr(where, name, lambda *args: act(before, *args))

    def _post(self, run: Any, ops: list[dist.P2POp]) -> Any:
        self.sent[self.stage] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return run(ops)

    def _kernel(self, run: Any, which: str, *args: Any) -> Any:
        self.kernels[self.stage, which] += 1
        return run(*args)

    def _buffer(self, run: Any, *args: Any) -> Tensor:
        x = run(*args)
        self.now += x.nbytes
        self.peak[self.stage] = max(self.peak[self.stage], self.now)
        weakref.finalize(x, self._gone, x.nbytes)
        return x

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


def watched(
    mesh: DeviceMesh, strategy: str, mask: str | int, heads: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[Watch, Any]:
    """One step of one attention on this rank."""
    torch.manual_seed(0)
    module, ids = OneAttention(*heads, mask).to(dtype), torch.randint(7, (2, SEQ))
    model = autosp.parallelize(module, mesh, compiler="aot_eager", strategy=strategy)
    watch = Watch()
    with watch:
        loss = model(ids)
        watch.stage = "backward"
        loss.backward()
    watch._before.clear()  # they cannot be sent to the test
    assert all(p.grad is not None for p in model.parameters())
    return watch, model.autosp_plan


CASES = [
    (2, "ring", "causal", (8, 2)),
    (2, "halo", 5, (8, 8)),
    (3, "ring", "none", (8, 8)),
    (3, "balanced-ring", "causal", (8, 2)),
    (3, "halo", 20, (8, 2)),
    (4, "ring", "causal", (8, 1)),
    (4, "balanced-ring", "causal", (8, 8)),
    (4, "balanced-ring", 9, (8, 2)),
    (4, "ring", 30, (8, 2)),
    (4, "ring-a2a", "causal", (8, 2)),
    (4, "ring-a2a", 30, (8, 4)),
]


@pytest.mark.parametrize(("ranks", "strategy", "mask", "heads"), CASES)
def test_posted_bytes_are_those_of_the_plan(
    pool: Pool, ranks: int, strategy: str, mask: str | int, heads: tuple[int, int]
) -> None:
    """Summed over ranks, forward and backward: key/value heads travel as they are, never one for each query head; backward
    sends its own and nothing of the forward pass a second time, and runs no forward kernel."""
    everyone = pool.run(watched, strategy, mask, heads, on=ranks)
    plan = everyone[0][1]
    (site,), (row,) = plan.sites, [c for c in plan.collectives if c.op == "block_attention"]
    assert site.strategy == strategy and row.count == 1
    for stage, planned in (("forward", row.bytes_forward), ("backward", row.bytes_backward)):
        sent = sum(watch.sent[stage] for watch, _ in everyone)
        assert sent // ranks == planned and sent > 0, stage
    for watch, _ in everyone:
        assert set(watch.kernels) == {("forward", "forward"), ("backward", "backward")}
    if mask in ("none", "causal") and strategy == "ring":
        shares = ranks - 1 if mask == "none" else 0.75 * (ranks - 1)
        block = 2 * (SEQ // ranks) * heads[1] * 2 * 16 * 4  # [2, H_kv, S/P, 16] of keys and of values, float32
        assert row.bytes_forward == shares * block and row.bytes_backward == 2 * shares * block


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["ring", "balanced-ring"])
def test_few_blocks_are_received_at_once(pool: Pool, ranks: int, strategy: str) -> None:
    """In KV blocks, whatever the number of ranks. A ring: the block that is computed and the one in flight; backward also three
    of gradients: one being summed, one on its way out, one on its way back. A balanced ring has queries and results too."""
    block = 2 * -(-SEQ // ranks) * 8 * 2 * 16 * 4
    most = {"ring": {"forward": 2, "backward": 5}, "balanced-ring": {"forward": 3, "backward": 6}}[strategy]
    for watch, _ in pool.run(watched, strategy, "causal", (8, 8), on=ranks):
        for stage, limit in most.items():
            assert 0 < watch.peak[stage] <= limit * block, (stage, watch.peak[stage] / block)
        assert watch.now == 0, "all of them are freed"
