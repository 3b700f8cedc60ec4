"""Linear attention: chunked kernels against the token-by-token oracle, and All-Scan on ranks against one device."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FULL
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from autosp.cost_model import states
from autosp.kernels import all_scan, linear, linear_torch, reference
from autosp.kernels.all_scan import ALGORITHMS, ALONE, Scan
from autosp.kernels.layout import contiguous
from pool import Pool

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import gpu_linear

Operands = list[Tensor | None]
KINDS = [(decay, remove) for decay in (None, "scalar", "vector") for remove in (False, True)]


def operands(
    length: int,
    decay: str | None,
    remove: bool,
    starts: Sequence[int] = (),
    groups: int = 1,
    initial: bool = True,
    dtype: torch.dtype = torch.float64,
    steepest: float = 3.0,
) -> Operands:
    """q, k, v, decay, remove, starts, initial: two sequences, four heads, states of 6 x 5."""
    b, h, k, v = 2, 4, 6, 5
    draw = torch.Generator().manual_seed(length + 7 * groups)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=dtype)

    marks = torch.zeros(b, length, dtype=torch.bool)
    marks[:, list(starts)] = True
    gates = {None: None, "scalar": (b, length, h), "vector": (b, length, h, k)}[decay]
    return [
        normal(b, length, h // groups, k),
        normal(b, length, h // groups, k) / 2,
        normal(b, length, h, v),
        None if gates is None else -steepest * torch.rand(gates, generator=draw, dtype=dtype),
        normal(b, length, h, k) / 3 if remove else None,
        marks if len(starts) else None,
        normal(b, h, k, v) if initial else None,
    ]


def wanted(xs: Operands) -> list[Tensor]:
    return [x.requires_grad_() for x in xs if x is not None and x.is_floating_point()]


def expected(xs: Operands, exclusive: bool) -> tuple[list[Tensor], list[Tensor]]:
    """[o, last state] of the oracle and the gradients of its operands for fixed cotangents."""
    given = wanted(xs)
    out = reference.linear_attention(*xs, scale=0.7, exclusive=exclusive)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out, given, cotangents(out), allow_unused=True)
    return list(out), [torch.zeros_like(x) if g is None else g for x, g in zip(given, grads, strict=True)]


def cotangents(out: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape) for x in out]


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(float((a - b).norm() / (b.norm() + 1e-3)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("decay", "remove"), KINDS)
@pytest.mark.parametrize("keep", [True, False])
def test_chunks_equal_tokens(decay: str | None, remove: bool, keep: bool) -> None:
    for length, exclusive, starts, groups in itertools.product((1, 64, 150), (False, True), ((), (0, 37, 101)), (1, 2)):
        xs = operands(length, decay, remove, [s for s in starts if s < length], groups)
        out, grads = expected(xs, exclusive)
        got = linear.LinearAttention.apply(*xs, None, 0.7, exclusive, ALONE, keep)
        back = torch.autograd.grad(got, wanted(xs), cotangents(got))
        assert worst([*got, *back], [*out, *grads]) < 1e-11, (length, exclusive, starts, groups)


@pytest.mark.parametrize(("decay", "remove"), KINDS)
def test_the_operators_differentiate_by_themselves(decay: str | None, remove: bool) -> None:
    """What another compiler, or nobody, makes of the graph."""
    xs = operands(101, decay, remove, (37,))

    def both(*values: Any) -> list[Tensor]:
        return [op(*values, 0.7, False) for op in (torch.ops.asp.linear_attention, torch.ops.asp.linear_state)]

    want = [x for part in expected(xs, False) for x in part]
    for run in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        out = run(*xs)
        assert worst([*out, *torch.autograd.grad(out, wanted(xs), cotangents(out))], want) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("remove", [False, True])
def test_extreme_gates_are_finite_and_right(decay: str, remove: bool, dtype: torch.dtype) -> None:
    """exp(−5·64) is no float32, and neither is its inverse: no exponent may be positive."""
    exact = operands(130, decay, remove, steepest=0)
    exact[3] = torch.full_like(exact[3], -5.0)  # type: ignore[arg-type]
    exact[3][:, ::9] = -80.0
    exact = [x if x is None else x.to(dtype).double() for x in exact]
    out, grads = expected(exact, False)
    xs = [x if x is None else x.detach().to(dtype) for x in exact]
    given = wanted(xs)
    got = linear.LinearAttention.apply(*xs, None, 0.7, False, ALONE, True)
    tangents = [c.to(x.dtype) for c, x in zip(cotangents(out), got, strict=True)]
    back = torch.autograd.grad(got, given, tangents)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    assert all(bool(x.isfinite().all()) for x in (*got, *back))
    assert worst([x.double() for x in (*got, *back)], [*out, *grads]) < bound


def test_memory_behind_the_end_does_not_matter() -> None:
    xs = operands(70, "vector", True)
    out, _ = expected(xs, False)
    out = [x.detach() for x in out]
    poisoned = []
    for x in xs[:5]:
        room = torch.full((2, 80, *x.shape[2:]), torch.nan, dtype=x.dtype)  # type: ignore[union-attr]
        room[:, :70] = x.detach()  # type: ignore[union-attr]
        poisoned.append(room[:, :70])
    got = linear.LinearAttention.apply(*poisoned, None, xs[6], None, 0.7, False, ALONE, True)
    assert worst(got, out) < 1e-11


def test_the_gpu_check_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (gpu_linear.Kind("vector", True, 16, 8, 2, True), gpu_linear.Kind(key_size=16, value_size=8))
    monkeypatch.setattr(gpu_linear, "KINDS", kinds)
    assert [good for _, good in gpu_linear.checked("cpu", 0)] == [True, True]
    finish = linear.finish
    monkeypatch.setattr(linear, "finish", lambda q, *rest: finish(q, *rest) * (1 + (q.dtype == torch.bfloat16) / 8))
    assert [good for _, good in gpu_linear.checked("cpu", 0)] == [False, False]


# On ranks -----------------------------------------------------------------------------------------


def on_ranks(mesh: DeviceMesh, cases: list[dict[str, Any]]) -> list[float]:
    """Largest relative error of each case on this rank: o, the last state, and gradients of this rank's part."""
    errors = []
    for case in cases:
        rank, ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name
        scan = Scan(case["algorithm"], rank, ranks, group, case.get("blocks", 3), case.get("node", 2))
        starts = case.get("starts", ())
        xs = operands(case["length"], case["decay"], case["remove"], starts, case.get("groups", 1), case.get("initial", True))
        out, grads = expected(xs, case.get("exclusive", False))
        shards = contiguous(case["length"], ranks).shards
        (a, b), last = shards[rank][0], rank == ranks - 1
        linked = torch.tensor([s[0][0] not in starts for s in shards[1:]]) if starts else None
        mine = [x if x is None or i == 6 else x[:, a:b].detach().clone() for i, x in enumerate(xs)]
        mine[6] = None if mine[6] is None else mine[6].detach().clone()
        given, tangents = wanted(mine), cotangents(out)
        got = linear.LinearAttention.apply(*mine, linked, 0.7, case.get("exclusive", False), scan, case.get("keep", True))
        back = torch.autograd.grad(got, given, [tangents[0][:, a:b], tangents[1] * last])
        want = [g if x is mine[6] else g[:, a:b] for g, x in zip(grads, given, strict=True)]
        if mine[6] is not None and rank:
            want[-1] = torch.zeros_like(want[-1])  # its gradient is the first rank's
        pairs = [(got[0], out[0][:, a:b]), *zip(back, want, strict=True)] + ([(got[1], out[1])] if last else [])
        errors.append(worst(*zip(*pairs, strict=True)))
    return errors


def every_case(ranks: int) -> list[dict[str, Any]]:
    cases = []
    for i, ((decay, remove), algorithm) in enumerate(itertools.product(KINDS, ALGORITHMS)):
        for length in (96, 101) if FULL else (101,):
            length = 128 if i % 3 == 1 else length  # packed: 37, 51 and 40 tokens
            documents: tuple[tuple[int, ...], ...] = ((), (37, 88), tuple(s[0][0] for s in contiguous(length, ranks).shards[1:]))
            for starts in documents if FULL else documents[i % 3 : i % 3 + 1]:
                case = {"algorithm": algorithm, "decay": decay, "remove": remove, "length": length, "starts": starts}
                case |= {"blocks": (1, 3, 16)[i % 3], "node": 1 + i % 3, "groups": 1 + i % 2, "exclusive": i % 5 == 0}
                cases.append(case | {"keep": i % 2 == 0, "initial": i % 4 != 1})
    return cases


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_gets_exactly_its_state(pool: Pool, ranks: int) -> None:
    cases = every_case(ranks)
    everyone = pool.run(on_ranks, cases, on=ranks)
    assert [(c, e) for c, e in zip(cases, map(max, zip(*everyone, strict=True)), strict=True) if not e < 1e-11] == []


def test_shards_may_be_shorter_than_a_chunk(pool: Pool) -> None:
    cases = [{"algorithm": "chain", "decay": "vector", "remove": True, "length": 5}]
    assert max(map(max, pool.run(on_ranks, cases, on=4))) < 1e-11


def sent(mesh: DeviceMesh, algorithm: str, decay: str, starts: tuple[int, ...], remove: bool = False) -> tuple[int, int]:
    """Bytes this rank posts forward and backward."""
    posted, send = [0], all_scan._send

    def counted(scan: Scan, x: Tensor, place: int) -> Any:
        posted[0] += x.nbytes
        return send(scan, x, place)

    all_scan._send = counted
    try:
        rank, ranks = mesh.get_local_rank(), mesh.size()
        xs = operands(96, decay, remove, starts, initial=False, dtype=torch.bfloat16)
        a, b = contiguous(96, ranks).shards[rank][0]
        mine = [x if x is None else x[:, a:b].detach().clone() for x in xs]
        given = wanted(mine)
        linked = torch.tensor([s[0][0] not in starts for s in contiguous(96, ranks).shards[1:]])
        scan = Scan(algorithm, rank, ranks, mesh.get_group().group_name, 3, 2)
        out, _ = linear.LinearAttention.apply(*mine, linked, 1.0, False, scan, True)
        forward = posted[0]
        torch.autograd.grad(out.float().sum(), given)
        return forward, posted[0] - forward
    finally:
        all_scan._send = send


STATE = 2 * 4 * 6 * 5 * 4  # bytes of a float32 state


def test_a_chain_sends_one_state_a_rank_and_direction(pool: Pool) -> None:
    assert pool.run(sent, "chain", "vector", (), on=4) == [(STATE, 0), (STATE, STATE), (STATE, STATE), (0, STATE)]


def test_nothing_is_sent_between_documents(pool: Pool) -> None:
    """Documents begin at the first token of ranks 1 and 3: only rank 1's state goes on."""
    assert pool.run(sent, "chain", "scalar", (24, 72), on=4) == [(0, 0), (STATE, 0), (0, STATE), (0, 0)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_sent_is_what_the_plan_says(pool: Pool, algorithm: str) -> None:
    """The formulas of the cost model, with A a number, a diagonal and a matrix."""
    for decay, remove in (("scalar", False), ("vector", False), ("vector", True)):
        posted = pool.run(sent, algorithm, decay, (), remove, on=4)
        sizes = states.LinearAttention(2, 4, 4, 4, 96, 6, 5, 6 if decay == "vector" else 1, remove, 2, 4, 2)
        assert (
            tuple(sum(each) // 4 for each in zip(*posted, strict=True))
            == (states.bytes_sent(states.ALGORITHMS[algorithm], sizes),) * 2
        )


def flops(mesh: DeviceMesh, remove: bool) -> tuple[int, int]:
    """Of a rank's step on its tokens: with All-Scan, and as if they were all there are."""
    found = []
    rank, ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name
    for scan in (Scan("chain", rank, ranks, group), ALONE):
        xs = operands(256, "vector", remove, initial=False)
        given = wanted(xs)
        with counted() as counter:
            out, _ = linear.LinearAttention.apply(*xs, None, 1.0, False, scan, True)
            torch.autograd.grad(out.sum(), given)
        found.append(counter.get_total_flops())
    return found[0], found[1]


@contextlib.contextmanager
def counted() -> Iterator[FlopCounterMode]:
    """Counts what is inside our operators too: they run as the plain functions that they are, in the calling thread."""
    stages = [name for name in vars(linear) if callable(getattr(linear_torch, name, None)) and name not in ("accumulator", "cut")]

    class Landed:
        def __init__(self, *scanned: Any) -> None:
            self.results = all_scan._scanned(*scanned)

        def wait(self) -> list[Tensor]:
            return self.results

    with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter:
        for name in stages:
            patch.setattr(linear, name, getattr(linear_torch, name))
        patch.setattr(all_scan, "start", Landed)
        yield counter


@pytest.mark.parametrize("remove", [False, True])
def test_all_scan_does_no_work_twice(pool: Pool, remove: bool) -> None:
    """A rank's multiplications are those of one device on as many tokens."""
    for here, alone in pool.run(flops, remove, on=3):
        assert alone > 1e6 and here <= 1.05 * alone, (here, alone)


def test_blocks_cover_a_state() -> None:
    for rows, columns, count in itertools.product((1, 3, 8), (1, 5, 64), (1, 4, 16)):
        blocks = all_scan.blocks_of(rows, columns, count)
        cells = [(r, c) for (a, b), (s, t) in blocks for r in range(a, b) for c in range(s, t)]
        assert sorted(cells) == list(itertools.product(range(rows), range(columns)))
        assert len(blocks) <= max(count, 1) + rows
