"""Kernels and links timed on all ranks of a process group at once, as they are used in training.

Ranks that share cores or links slow each other down: a timing repeats a call on every rank for `Settings.seconds`, the slowest
rank counts, and of several rounds the lower quartile, as other processes only ever add. Kernels are those that autosp runs,
collectives the operators of its graphs.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autosp.cost_model import work
from autosp.cost_model.hardware import COLLECTIVES, DTYPES, KERNELS
from autosp.kernels import flash, host, linear
from autosp.kernels.all_scan import ALONE

MOST_CALLS = 2000  # of one timing
_c10d = torch.ops._c10d_functional
Step = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """How long, and on what. seconds: of a timing; rounds: how many of them.

    matmul: (rows, inner, columns); attention: (heads, rows, columns, size of a head, causal); linear: (heads, tokens, K, V);
    pointwise: bytes of each of three tensors; messages: bytes of what a collective works on.
    """

    rounds: int = 7
    seconds: float = 0.03
    matmul: tuple[tuple[int, int, int], ...] = ((64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 512, 2048))
    attention: tuple[tuple[int, int, int, int, bool], ...] = (
        (2, 64, 64, 64, False),
        (4, 512, 512, 64, True),
        (4, 512, 512, 64, False),
        (4, 1024, 1024, 64, False),
        (4, 2048, 2048, 64, True),
    )
    linear: tuple[tuple[int, int, int, int], ...] = ((2, 64, 64, 64), (4, 512, 64, 64), (4, 1024, 128, 128))
    pointwise: int = 1 << 26
    messages: tuple[int, ...] = (1 << 10, 1 << 15, 1 << 19, 1 << 22)


GPU = Settings(
    matmul=((256, 256, 256), (2048, 2048, 2048), (8192, 4096, 4096), (8192, 8192, 8192)),
    attention=(
        (8, 512, 512, 128, True),
        (16, 4096, 4096, 128, True),
        (16, 4096, 4096, 128, False),
        (16, 8192, 8192, 64, True),
        (16, 16384, 16384, 128, True),
    ),
    linear=((8, 512, 128, 128), (16, 8192, 128, 128), (32, 16384, 128, 128)),
    pointwise=1 << 30,
    messages=(1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27),
)


@dataclass(frozen=True)
class Call:
    """What a timed kernel did: its shape in words, its FLOP, its seconds."""

    shape: str
    flop: int
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """What a timed collective did among `ranks`: messages and bytes that a rank sent, seconds."""

    ranks: int
    messages: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class Samples:
    """All that was timed.

    pointwise: bytes read and written, seconds; overlap: share of a hop that costs nothing while a rank computes; memory: bytes
    a rank has; others: share of the cores that other processes had meanwhile; sharing: ranks for each core or GPU; dtypes: rates
    of a matrix product as shares of that in `dtype`. links and reach (ranks) are by level, nearest first. host: bytes copied to
    the host and back, seconds; None where a device's memory is the host's.
    """

    kernels: Mapping[str, Sequence[Call]]
    links: Mapping[str, Mapping[str, Sequence[Transfer]]]
    reach: Mapping[str, int]
    pointwise: tuple[int, float]
    overlap: float
    memory: int
    others: float
    sharing: float
    device: str
    dtype: str
    dtypes: Mapping[str, float]
    how: str
    host: tuple[int, float] | None = None


# On every rank ------------------------------------------------------------------------------------


class Bench:
    """Timings on all ranks of the process group at once."""

    def __init__(self, settings: Settings, device: torch.device, dtype: torch.dtype, local: int) -> None:
        self.settings, self.device, self.dtype, self.local = settings, device, dtype, local
        self.ranks = dist.get_world_size()
        places: list[str] = [""] * self.ranks
        dist.all_gather_object(places, _machine())
        self.sharing = places.count(_machine())  # ranks on this machine, in whatever nodes a launcher says they are

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def over_ranks(self, op: dist.ReduceOp, *numbers: float) -> list[float]:
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op)
        return found.tolist()

    def run(self, step: Step, calls: int, busy: bool) -> float:
        """Seconds until the slowest rank has made so many calls.

        busy: they only compute. On a CPU that is the core time they took, spread over the cores: what others take does not count.
        """
        self.sync()
        dist.barrier()
        start, core = time.perf_counter(), time.process_time()
        for _ in range(calls):
            step()
        self.sync()
        wall, core = time.perf_counter() - start, time.process_time() - core
        if not busy or self.device.type != "cpu":
            return self.over_ranks(dist.ReduceOp.MAX, wall)[0]
        (longest,), (total,) = self.over_ranks(dist.ReduceOp.MAX, core), self.over_ranks(dist.ReduceOp.SUM, core)
        return max(longest / torch.get_num_threads(), total / self.ranks * self.sharing / cores())

    def time(self, step: Step, busy: bool = False) -> float:
        """Seconds of a call: the lower quartile over rounds. Every rank makes the same number of calls."""
        self.run(step, 1, busy)  # the first call allocates and connects
        once = max(1e-9, self.run(step, 2, busy) / 2)
        calls = min(MOST_CALLS, max(1, round(self.settings.seconds / once)))
        rounds = min(
            self.settings.rounds, max(3, round(4 * self.settings.rounds * self.settings.seconds / once))
        )  # fewer long ones
        found = [self.run(step, calls, busy) / calls for _ in range(rounds)]
        return statistics.quantiles(found, n=4, method="inclusive")[0] if len(found) > 1 else found[0]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    # Kernels

    def matmul(self) -> list[Call]:
        found = []
        for rows, inner, columns in self.settings.matmul:
            x, y = self.normal(rows, inner), self.normal(inner, columns)
            seconds = self.time(lambda x=x, y=y: x @ y, busy=True)  # type: ignore[misc]
            found.append(Call(f"{rows}x{inner}x{columns}", work.matmul(rows, inner, columns), seconds))
        return found

    def dtypes(self) -> dict[str, float]:
        """Rates of a matrix product in each type, as shares of that in `dtype`."""
        rows, inner, columns = self.settings.matmul[1]

        def seconds(dtype: torch.dtype) -> float:
            x, y = self.normal(rows, inner).to(dtype), self.normal(inner, columns).to(dtype)
            return self.time(lambda: x @ y, busy=True)

        unit = seconds(self.dtype)
        return {name: unit / seconds(getattr(torch, name)) for name in DTYPES if getattr(torch, name) != self.dtype}

    def attention(self) -> tuple[list[Call], list[Call]]:
        forward, backward = [], []
        for heads, rows, columns, size, causal in self.settings.attention:
            q, k, v = (self.normal(1, heads, n, size) for n in (rows, columns, columns))
            out, lse = flash.forward(q, k, v, causal, None, None)
            grad = torch.randn_like(out)
            delta = (grad * out).sum(-1)
            shape = f"{heads} heads {rows}x{columns}x{size}{' causal' * causal}"
            sizes = (1, heads, size, size, work.pairs(rows, columns, causal))
            seconds = self.time(lambda xs=(q, k, v, causal, None, None): flash.forward(*xs), busy=True)  # type: ignore[misc]
            forward.append(Call(shape, work.attention_forward(*sizes), seconds))
            given = (grad, q, k, v, lse, delta, causal, None, None)
            seconds = self.time(lambda xs=given: flash.backward(*xs), busy=True)  # type: ignore[misc]
            backward.append(Call(shape, work.attention_backward(*sizes), seconds))
        return forward, backward

    def linear(self) -> tuple[list[Call], list[Call]]:
        """With a decay for each head and token, and without `remove`."""
        forward, backward = [], []
        for heads, tokens, keys, values in self.settings.linear:
            leaves = [self.normal(1, tokens, heads, n).requires_grad_() for n in (keys, keys, values)]
            leaves.append((-torch.rand(1, tokens, heads, device=self.device) / 8).to(self.dtype).requires_grad_())

            def run(xs: Sequence[Tensor] = leaves, scale: float = keys**-0.5) -> tuple[Tensor, Tensor]:
                return linear.LinearAttention.apply(*xs, None, None, None, None, scale, False, ALONE, True)

            out, end = run()
            grads = torch.randn_like(out), torch.randn_like(end)
            shape, sizes = f"{heads} heads {tokens} tokens {keys}x{values}", (1, heads, tokens, keys, values)
            forward.append(Call(shape, work.linear_forward(*sizes), self.time(run, busy=True)))
            given = ((out, end), leaves, grads, True)
            seconds = self.time(lambda xs=given: torch.autograd.grad(*xs), busy=True)  # type: ignore[misc]
            backward.append(Call(shape, work.linear_backward(*sizes), seconds))
        return forward, backward

    def pointwise(self) -> tuple[int, float]:
        a, b, out = (torch.ones(self.settings.pointwise // 4, device=self.device) for _ in range(3))
        return 3 * self.settings.pointwise, self.time(lambda: torch.add(a, b, out=out), busy=True)

    def host(self) -> tuple[int, float] | None:
        """A copy to the host and one back, with the operators that graphs have."""
        if self.device.type == "cpu":
            return None
        x = torch.ones(self.settings.pointwise // 4, device=self.device)

        def there_and_back() -> None:
            there = host.wait_copy(host.offload(x, []), x)
            host.wait_copy(host.reload(there, x.device, []), there)

        return 2 * x.nbytes, self.time(there_and_back)

    # Links

    def collective(self, kind: str, size: int, group: dist.ProcessGroup) -> Step:
        """A call on `size` bytes as `work.sent` counts them, with the operators that lowered graphs have."""
        ranks, name = dist.get_world_size(group), group.group_name
        x = torch.zeros(max(1, size // 4 // ranks) * ranks, device=self.device)
        part = [x.numel() // ranks] * ranks
        calls: dict[str, Step] = {
            "all_to_all": lambda: _c10d.wait_tensor(_c10d.all_to_all_single(x, part, part, name)),
            "all_gather": lambda: _c10d.wait_tensor(_c10d.all_gather_into_tensor(x, ranks, name)),
            "all_reduce": lambda: _c10d.wait_tensor(_c10d.all_reduce(x, "sum", name)),
            "reduce_scatter": lambda: _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "sum", ranks, name)),
        }
        return calls[kind] if kind in calls else lambda: _wait(self.hop(size, group))

    def hop(self, size: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """A ring's step in flight: two tensors, as keys and values are, to the next rank and from the one before."""
        me, ranks = dist.get_rank(group), dist.get_world_size(group)
        mine, theirs = (torch.zeros(2, max(1, size // 8), device=self.device) for _ in range(2))
        ops = [dist.P2POp(dist.irecv, x, group=group, group_peer=(me - 1) % ranks) for x in theirs]
        ops += [dist.P2POp(dist.isend, x, group=group, group_peer=(me + 1) % ranks) for x in mine]
        return dist.batch_isend_irecv(ops)

    def links(self) -> dict[str, dict[str, list[Transfer]]]:
        groups = {
            parts: self.group(parts)
            for kinds in partitions(self.ranks, self.local).values()
            for choices in kinds.values()
            for parts in choices
        }
        return {
            level: {
                kind: [t for parts in choices for t in self.transfers(kind, groups[parts])] for kind, choices in kinds.items()
            }
            for level, kinds in partitions(self.ranks, self.local).items()
        }

    def transfers(self, kind: str, group: dist.ProcessGroup) -> list[Transfer]:
        ranks = dist.get_world_size(group)
        found = []
        for size in self.settings.messages:
            seconds = self.time(self.collective(kind, size, group))
            found.append(Transfer(ranks, work.messages(kind, ranks), work.sent(kind, size, ranks), seconds))
        return found

    def group(self, parts: Parts) -> dist.ProcessGroup:
        mine = dist.group.WORLD
        if len(parts) > 1:
            mine = dist.new_subgroups_by_enumeration([list(ranks) for ranks in parts])[0]
        assert mine is not None
        return mine

    def overlap(self) -> float:
        """Attention with the largest hop in flight: what of the hop's time that takes less than one after the other.

        The three are timed side by side, so that others' load is the same for all; the median over rounds.
        """
        world, size = dist.group.WORLD, self.settings.messages[-1]
        assert world is not None
        heads, rows, columns, head, causal = self.settings.attention[len(self.settings.attention) // 2]
        q, k, v = (self.normal(1, heads, n, head) for n in (rows, columns, columns))
        alone = self.collective("p2p", size, world)
        count = max(1, round(1.5 * self.time(alone) / self.time(lambda: flash.forward(q, k, v, causal, None, None))))

        def compute() -> None:
            for _ in range(count):
                flash.forward(q, k, v, causal, None, None)

        def both() -> None:
            flight = self.hop(size, world)
            compute()
            _wait(flight)

        def share() -> float:
            computing, moving, together = (self.run(step, 3, False) for step in (compute, alone, both))
            return (computing + moving - together) / moving

        return min(1.0, max(0.0, statistics.median(share() for _ in range(self.settings.rounds))))


def _wait(requests: Sequence[dist.Work]) -> None:
    for request in requests:
        request.wait()


Parts = tuple[tuple[int, ...], ...]  # ranks by group: all groups work at once


def partitions(ranks: int, local: int) -> dict[str, dict[str, list[Parts]]]:
    """By level and collective, the groups to time one after another, for `local` neighbouring ranks a node.

    A level's ranks are cut into groups of several sizes, so that what a message costs can be told from what a call does. Between
    nodes a hop and an all-to-all are among ranks of different nodes only; other collectives are among all ranks.
    """

    def cut(step: int, count: int) -> list[Parts]:
        """Groups of s out of `count` ranks, `step` apart, for up to three divisors s."""
        sizes = [s for s in range(2, count + 1) if count % s == 0]
        block = step * count
        found = []
        for s in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
            starts = [b + i + j * step * s for b in range(0, ranks, block) for j in range(count // s) for i in range(step)]
            found.append(tuple(tuple(range(a, a + step * s, step)) for a in sorted(starts)))
        return found

    def level(exchanges: list[Parts], others: list[Parts]) -> dict[str, list[Parts]]:
        return {k: exchanges[-1:] if k == "p2p" else exchanges if k == "all_to_all" else others for k in COLLECTIVES}

    found = {}
    if local > 1:
        found["node"] = level(cut(1, local), cut(1, local))
    if local < ranks:
        whole: list[Parts] = cut(1, ranks) if local == 1 else [(tuple(range(ranks)),)]
        found["cluster"] = level(cut(local, ranks // local), whole)
    return found


def measured(settings: Settings, dtype: str, device: torch.device, local: int) -> Samples:
    """Samples of the process group at hand; every rank calls it, and all get the same."""
    torch.manual_seed(0)
    before = _used()
    bench = Bench(settings, device, getattr(torch, dtype), local)
    pointwise, (attention, attention_back), (states, states_back) = bench.pointwise(), bench.attention(), bench.linear()
    kernels = dict(zip(KERNELS, (bench.matmul(), attention, attention_back, states, states_back), strict=True))
    backend = dist.get_backend()
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name = f"CPU, {bench.sharing} ranks on {cores()} cores"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // bench.sharing
    links, overlap = bench.links(), bench.overlap()
    seconds, everyone, own = (now - then for now, then in zip(_used(), before, strict=True))
    ours = torch.tensor([own], dtype=torch.float64, device=device)
    dist.all_reduce(ours)
    return Samples(
        kernels=kernels,
        links=links,
        reach={level: local if level == "node" else bench.ranks for level in partitions(bench.ranks, local)},
        pointwise=pointwise,
        overlap=overlap,
        memory=memory,
        others=max(0.0, everyone - ours.item()) / seconds / (os.cpu_count() or 1) if bench.sharing == bench.ranks else 0.0,
        sharing=1.0 if device.type == "cuda" else max(1.0, bench.sharing * torch.get_num_threads() / cores()),
        device=name,
        dtype=dtype,
        dtypes=bench.dtypes(),
        how=f"{bench.ranks} ranks at once, {backend}, torch {torch.__version__}",
        host=bench.host(),
    )


def _machine() -> str:
    """The same for all processes of this machine, also in containers and network namespaces of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _used() -> tuple[float, float, float]:
    """Seconds: the clock; of cores that anyone used or the hypervisor took (Linux; else 0); of cores that this process used.

    Time in the system's kernel is not counted: whose it is cannot be told.
    """
    stat = Path("/proc/stat")
    user, nice, *_, steal = stat.read_text().split()[1:9] if stat.exists() else ["0"] * 8
    return time.perf_counter(), (int(user) + int(nice) + int(steal)) / os.sysconf("SC_CLK_TCK"), os.times().user
