"""Four gloo ranks that live as long as the test session.

Starting processes and importing torch costs more than most tests: the ranks are started once and given one task
after another. A task is a module-level function `task(mesh, *args)`; it runs on every rank of the mesh asked for.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autosp import launch

WORLD = 4
SHAPES: dict[str, tuple[tuple[str, int], ...]] = {
    "1": (("sp", 1),),
    "2": (("sp", 2),),
    "3": (("sp", 3),),
    "4": (("sp", 4),),
    "2x2": (("dp", 2), ("sp", 2)),
}
# A rank that fails leaves the others in a collective: they get this long to fail as well before the ranks are restarted.
GRACE_SECONDS = 5.0
# Compiled code is never quite freed: past this size the ranks are replaced between two tests.
RESIDENT_LIMIT_BYTES = 2 << 30


class RemoteTraceback(Exception):
    """The traceback of a rank, as text: the cause of the exception raised in the test."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class RankHung(RuntimeError):
    """Some rank gave no answer in time, or died."""


@dataclass
class Failure:
    error: BaseException | None  # None if it could not be pickled
    summary: str
    text: str


class Pool:
    """`run` a function on some of four ranks. Restarts the ranks after a death, a hang or a one-sided failure."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, task: Callable[..., Any], *args: Any, on: int | str = WORLD, timeout: float = 120.0) -> list[Any]:
        """`task(mesh, *args)` on the ranks of mesh `on` (1, 2, 3, 4 or "2x2"); their results in rank order.

        Raises what the task raised on the lowest rank that was first to fail, with that rank's traceback as the cause;
        `RankHung` after `timeout` seconds or if a rank died.
        """
        ranks = _size(SHAPES[str(on)])
        workers = self._alive()[:ranks]
        try:
            payload = pickle.dumps((task, args))
            for _, conn in workers:
                conn.send((str(on), payload))
            answers = _gather([conn for _, conn in workers], timeout)
        except BaseException:  # a timeout of the test itself too: what the ranks are doing is no longer known
            self.close()
            raise
        failures = [a for a in answers if isinstance(a, Failure)]
        agreed = len(failures) == ranks and len({f.summary for f in failures}) == 1
        if None in answers or (failures and not agreed):
            self.close()
        if failures:
            failure = min(failures, key=lambda f: "Connection closed by peer" in f.text)
            raise (failure.error or RuntimeError(failure.summary)) from RemoteTraceback(failure.text)
        silent = [rank for rank, a in enumerate(answers) if a is None]
        if silent:
            raise RankHung(f"no answer from rank {silent} within {timeout:.0f} s")
        return [a[0] for a in answers]

    def close(self) -> None:
        launch.stop([process for process, _ in self.workers])
        self.workers = []

    def _alive(self) -> list[tuple[Any, Connection]]:
        if any(not p.is_alive() or _resident_bytes(p.pid) > RESIDENT_LIMIT_BYTES for p, _ in self.workers):
            self.close()
        if not self.workers:
            ctx = launch.context()
            store = os.path.join(tempfile.mkdtemp(prefix="autosp-pool-"), "store")
            for rank in range(WORLD):
                here, there = ctx.Pipe()
                process = ctx.Process(target=_worker, args=(rank, store, there), daemon=True)
                process.start()
                there.close()
                self.workers.append((process, here))
        return self.workers


def _gather(conns: list[Connection], timeout: float) -> list[Any]:
    """One answer a rank: `(result,)`, a `Failure`, or None for no answer."""
    answers: list[Any] = [None] * len(conns)
    waiting = {conn: rank for rank, conn in enumerate(conns)}
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for conn in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(conn, Connection)
            rank = waiting.pop(conn)
            try:
                answers[rank] = pickle.loads(conn.recv_bytes())
            except EOFError:
                answers[rank] = Failure(None, f"rank {rank} died", f"rank {rank} died without a word")
            if isinstance(answers[rank], Failure):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return answers


def _worker(rank: int, store: str, conn: Connection) -> None:
    torch.set_num_threads(1)
    launch.join_group(rank, WORLD, store, 600.0)
    # Groups are made on all ranks in the same order, members or not.
    meshes = {key: _mesh(shape) for key, shape in SHAPES.items()}
    while True:
        torch._dynamo.reset()
        gc.collect()
        gc.freeze()  # modules and what compilers keep stay: the next collection need not look through them
        try:
            on, payload = conn.recv()
        except EOFError:
            os._exit(0)
        conn.send_bytes(_answer(meshes[on], payload))


def _mesh(shape: tuple[tuple[str, int], ...]) -> DeviceMesh:
    ranks = torch.arange(_size(shape)).reshape([n for _, n in shape])
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(name for name, _ in shape))


def _answer(mesh: DeviceMesh, payload: bytes) -> bytes:
    """`(result,)` or a `Failure`, by plain pickle: multiprocessing's own would send tensors as shared memory."""
    try:
        task, args = pickle.loads(payload)
        torch.manual_seed(0)
        return pickle.dumps((task(mesh, *args),))
    except BaseException as error:
        failure = Failure(error, f"{type(error).__name__}: {error}", traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(failure.error))
    except Exception:
        failure.error = None
    return pickle.dumps(failure)


def _size(shape: tuple[tuple[str, int], ...]) -> int:
    size = 1
    for _, n in shape:
        size *= n
    return size


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
