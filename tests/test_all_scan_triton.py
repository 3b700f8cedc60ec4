"""The device-side chain against a plain loop, with ranks that are parts of one launch or launches of their own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no build for this platform")

from test_flash_triton import POINTERS, SHARED_LIMIT, interpreter, usage

from autosp.kernels import all_scan_triton
from autosp.kernels.all_scan_triton import Mailbox, addresses, chain
from autosp.kernels.flash_triton import Launch

__all__ = ["interpreter"]  # a fixture, taken by name


@dataclass(frozen=True)
class Case:
    ranks: int
    key_size: int = 5
    value_size: int = 40  # two blocks of columns
    per_key: bool = False
    initial: bool = False
    reverse: bool = False
    apart: bool = False  # a launch for every rank, as if each were a process

    @property
    def state(self) -> tuple[int, ...]:
        return 1, 2, self.key_size, self.value_size


def expected(total: Tensor, end: Tensor, initial: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    state = torch.zeros_like(end[0]) if initial is None else initial
    found, last = torch.empty_like(end), torch.empty_like(end)
    for rank in reversed(range(len(end))) if reverse else range(len(end)):
        found[rank] = state
        last[rank] = state = total[rank] * state + end[rank]
    return found, last


def run(case: Case, epochs: int = 4, device: str = "cpu") -> bool:
    generator = torch.Generator(device).manual_seed(0)
    states = case.state[0] * case.state[1]
    boxes: list[Mailbox | None] = [Mailbox.empty(states, *case.state[2:], device) for _ in range(case.ranks)]
    for box in boxes:
        assert box is not None
        box.inbox.fill_(torch.nan)
    row = [None, *boxes[1:], None]
    for epoch in range(1, epochs + 1):
        kept = (case.ranks, *case.state[:2], case.key_size if case.per_key else 1, 1)
        total = torch.rand(kept, generator=generator, device=device)
        end = torch.randn(case.ranks, *case.state, generator=generator, device=device)
        initial = torch.randn(case.state, generator=generator, device=device) if case.initial else None
        if case.apart:
            parts = {}
            for place in range(case.ranks):  # in the interpreter a launch is over before the next begins
                rank = case.ranks - 1 - place if case.reverse else place
                own = slice(rank, rank + 1)
                parts[rank] = chain(addresses(row[place : place + 2], device), total[own], end[own], initial, epoch, case.reverse)
            got = tuple(torch.cat([parts[r][i] for r in range(case.ranks)]) for i in range(2))
        else:
            got = chain(addresses(row, device), total, end, initial, epoch, case.reverse)
        for a, b in zip(got, expected(total, end, initial, case.reverse), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for box in row[1:-1]:
        assert box is not None and (box.flags == epochs).all()
    return True


CASES = [
    *(Case(ranks) for ranks in (1, 2, 3, 4, 8)),
    *(Case(ranks, per_key=True, initial=True, reverse=True) for ranks in (1, 2, 3, 4, 8)),
    Case(3, key_size=130, value_size=16, per_key=True),  # two blocks of rows
    Case(4, apart=True),
    Case(3, apart=True, reverse=True, initial=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chain(case: Case, interpreter: ProcessPoolExecutor) -> None:
    """Inboxes hold NaN before, flags are never reset."""
    assert interpreter.submit(run, case).result()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chain_on_a_gpu(case: Case) -> None:
    assert run(case, 50, "cuda")


def slots() -> list[Tensor]:
    box = Mailbox.empty(1, 2, 2, "cpu")
    box.inbox.fill_(torch.nan)
    for epoch in (1, 2):
        chain(addresses([None, box], "cpu"), torch.zeros(1, 1, 1, 1, 1), torch.full((1, 1, 1, 2, 2), float(epoch)), None, epoch)
    return [*box.inbox.flatten(1).unbind(), *box.flags.unbind()]


def test_a_rank_may_be_one_epoch_ahead(interpreter: ProcessPoolExecutor) -> None:
    """Two epochs were sent and none taken: both still lie there."""
    even, odd, arrived, taken = interpreter.submit(slots).result()
    assert (even == 2).all() and (odd == 1).all() and (arrived == 2).all() and (taken == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    end, total = torch.zeros(2, 1, 1, 3, 4), torch.zeros(2, 1, 1, 1, 1)
    table = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"total must be \[ranks, B, H, 1 or K, 1\]"):
        chain(table, total[:, :, :, 0], end, None, 1)
    with pytest.raises(ValueError, match="states travel as float32"):
        chain(table, total, end.double(), None, 1)
    with pytest.raises(ValueError, match="2 ranks need the addresses of 3 mailboxes"):
        chain(table[:2], total, end, None, 1)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("reverse", [False, True])
def test_nothing_spills_and_flags_are_fences(size: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_flash_triton import compiled

    POINTERS.setdefault(torch.int64, "*i64")
    found: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch: found.append(launch))
    end = torch.empty(1, 1, 16, size, size, device="meta")
    total = torch.empty(1, 1, 16, size if reverse else 1, 1, device="meta")
    chain(torch.empty(2, 2, dtype=torch.int64, device="meta"), total, end, end[0], 1, reverse)
    used = usage(found[0])
    assert used.stack_bytes == 0 and used.shared_bytes <= SHARED_LIMIT, used
    text = compiled(found[0]).asm["ptx"]
    assert ".sys.acquire" in text and ".sys.release" in text and "ld.global.cg.v4" in text
    print(
        f"\nchain {size}: {used.registers} registers {used.stack_bytes} B stack {used.shared_bytes / 1024:.1f} KiB shared", end=""
    )


def test_blocks_are_shared_out() -> None:
    assert all_scan_triton._blocks(128, 128) == 4 and all_scan_triton._blocks(256, 256) == 16
