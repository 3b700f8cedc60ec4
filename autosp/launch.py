"""Run a function on several gloo ranks of this machine, and never hang.

The ranks are forked from one helper process that has imported torch already: a start costs a fraction of a second
instead of several seconds of imports for each rank.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autosp.check import refusal_in

# After the first failure the other ranks get this long to report their own, then they are ended.
GRACE_SECONDS = 5.0
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers",
    "autosp.check",
    "autosp.zoo",
    "autosp.dynamo_backend",
]


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time. `refused` tells that an `AutospError` said no; its text is the message."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def run_ranks(
    function: Callable[..., Any],
    shape: dict[str, int],
    *args: Any,
    timeout: float = 600.0,
    threads: int = 1,
    on_message: Callable[[Any], None] | None = None,
) -> list[Any]:
    """`function(mesh, *args)` on every rank of a CPU mesh of `shape` ({"dp": 2, "sp": 2}); the results in rank order.

    `function` and `args` are pickled, so `function` lives at module level. With `on_message`, rank 0 is also given
    `send=...`, and what it sends while running is passed to `on_message` here.
    Raises `RankFailed` with the rank's traceback if one raises or dies, or after `timeout` seconds; no process survives.
    """
    ranks = functools.reduce(lambda a, b: a * b, shape.values(), 1)
    with tempfile.TemporaryDirectory(prefix="autosp-") as folder:
        workers = [
            _start(rank, ranks, shape, f"{folder}/store", threads, timeout, function, args, on_message is not None)
            for rank in range(ranks)
        ]
        try:
            return _collect([conn for _, conn in workers], timeout, on_message)
        finally:
            stop([process for process, _ in workers])


def context() -> Any:
    """The forkserver context with torch loaded; one OpenMP thread a rank, as several ranks share the cores."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(PRELOAD)
    # PYTHONSAFEPATH: the helper must import the installed packages, not folders of the same name where it happens to start.
    changed = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return ctx


def join_group(rank: int, ranks: int, store: str, timeout: float) -> None:
    """Make this process rank `rank` of a gloo group that meets in the file `store`."""
    if "tqdm" in sys.modules:
        # torch's graph interpreter makes a progress bar, whose default lock is a semaphore that outlives an ended rank.
        sys.modules["tqdm"].tqdm.set_lock(threading.RLock())
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )


def stop(processes: list[Any]) -> None:
    """End the processes, politely for two seconds and then not."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + 2
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _start(
    rank: int, ranks: int, shape: dict[str, int], store: str, threads: int, timeout: float, *work: Any
) -> tuple[Any, Connection]:
    ctx = context()
    here, there = ctx.Pipe(duplex=False)
    process = ctx.Process(target=_rank_main, args=(rank, ranks, shape, store, threads, timeout, there, *work), daemon=True)
    process.start()
    there.close()
    return process, here


def _rank_main(
    rank: int,
    ranks: int,
    shape: dict[str, int],
    store: str,
    threads: int,
    timeout: float,
    conn: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    talks: bool,
) -> None:
    os.dup2(2, 1)  # the parent's standard output belongs to the report
    torch.set_num_threads(threads)
    try:
        join_group(rank, ranks, store, timeout)
        mesh: DeviceMesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        extra = {"send": lambda message: _send(conn, "message", message)} if talks and rank == 0 else {}
        _send(conn, "done", function(mesh, *args, **extra))
    except BaseException as error:
        refusal = refusal_in(error)
        _send(conn, *(("refused", str(refusal)) if refusal else ("failed", traceback.format_exc())))
    finally:
        conn.close()
        # Threads of the group may wait for ranks that are gone: leave without them.
        sys.stderr.flush()
        os._exit(0)


def _collect(conns: list[Connection], timeout: float, on_message: Callable[[Any], None] | None) -> list[Any]:
    """Every rank's result; on the first failure the others only get `GRACE_SECONDS` more."""
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, str]] = {}
    waiting = {conn: rank for rank, conn in enumerate(conns)}
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for conn in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(conn, Connection)
            kind, value = _receive(conn)
            if kind == "message":
                if on_message:
                    on_message(value)
                continue
            rank = waiting.pop(conn)
            if kind == "done":
                results[rank] = value
            else:
                failures[rank] = (kind, value)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        # A rank that stops takes its neighbours' connections down: name the cause, not the consequence.
        rank = min(failures, key=lambda r: (failures[r][0] != "refused", "Connection closed by peer" in failures[r][1], r))
        kind, text = failures[rank]
        raise RankFailed(text, refused=True) if kind == "refused" else RankFailed(f"rank {rank} failed: {text}")
    if waiting:
        silent = ", ".join(str(r) for r in sorted(waiting.values()))
        raise RankFailed(f"no answer from rank {silent} within {timeout:.0f} s")
    return [results[rank] for rank in range(len(conns))]


def _send(conn: Connection, kind: str, value: Any) -> None:
    """Bytes made by plain pickle: multiprocessing's own sends tensors as handles, which die with this process."""
    conn.send_bytes(pickle.dumps((kind, value)))


def _receive(conn: Connection) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(conn.recv_bytes())
    except EOFError:
        return "failed", "the process died without a word (out of memory?)"
    return kind, value
