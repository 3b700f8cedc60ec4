"""All-Scan's chain on a GPU: states go from rank to rank by stores into the next rank's memory, inside one kernel.

Every rank finds a state X and hands on total ⊙ X + end, which the next one finds (`all_scan`, program "affine"). A state is cut
into blocks of one head, some rows and some columns. Each is one program and waits for its own flag: hops of different blocks
overlap (ZeCO, arXiv 2507.01004).

Each rank owns a mailbox: an inbox of two slots, and two flags per block, the last epoch that arrived and the last that was
taken. Epochs count up, from 1, and their parity is the slot. So flags are never reset, and a rank that is two epochs ahead
waits before it writes over what was not taken yet. The kernel is given addresses: they may be of a peer's memory (symmetric
memory, CUDA IPC), and several ranks may be run by one launch ("virtual ranks").

Programs start in the order of their numbers, and within a launch a program only waits for one with a lower number, of the rank
before. Under TRITON_INTERPRET=1 they run in that order, one after the other, on CPU tensors.
"""

# A kernel's arguments are pointers and traced values, for which triton has no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .flash_triton import Launch

SLOTS = tl.constexpr(2)
ROWS, COLUMNS = 128, 32  # of a block: 16 KiB travel at a time, 32 values in each of 128 threads


@triton.jit
def _wait(flag, epoch):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
        pass


@triton.jit
def _raise(flag, epoch):
    """After what all threads of the program have stored and loaded: one thread's release covers what a barrier put before it."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def _states(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit(do_not_specialize=["epoch", "ranks", "states"])
def chain_kernel(
    mailboxes, total, end, initial, found, last, epoch, ranks, states,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KEPT: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One block of one rank: found = X, last = total ⊙ X + end, which is handed on.

    mailboxes: int64 [ranks + 1, 2], addresses of the inbox [SLOTS, states, K, V] and of the flags [2, blocks], in the order of
    travel; the first of them is the own one of the first rank, 0 where nothing comes from (X is `initial`, or 0) or goes to.
    total [ranks, states, KEPT = 1 or K]; end, found, last [ranks, states, K, V]; initial [states, K, V].
    """
    blocks = states * tl.cdiv(K, BK) * tl.cdiv(V, BV)
    place = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    column = block % tl.cdiv(V, BV) * BV
    row = block // tl.cdiv(V, BV) % tl.cdiv(K, BK) * BK
    state = tl.cast(block // tl.cdiv(V, BV) // tl.cdiv(K, BK), tl.int64)
    rank = ranks - 1 - place if REVERSE else place
    k = row + tl.arange(0, BK)[:, None]
    v = column + tl.arange(0, BV)[None, :]
    inside = (k < K) & (v < V)
    at = state * K * V + k * V + v
    of_rank = tl.cast(rank, tl.int64) * states * K * V
    slot = (epoch % SLOTS) * tl.cast(states, tl.int64) * K * V

    # Before the wait: what is known already.
    kept = tl.load(total + (tl.cast(rank, tl.int64) * states + state) * KEPT + (k if KEPT > 1 else 0 * k), mask=k < K, other=0.0)
    added = tl.load(end + of_rank + at, mask=inside, other=0.0)
    inbox = tl.load(mailboxes + 2 * place)
    flags = tl.load(mailboxes + 2 * place + 1)
    next_inbox = tl.load(mailboxes + 2 * place + 2)
    next_flags = tl.load(mailboxes + 2 * place + 3)

    x = tl.zeros([BK, BV], tl.float32)
    if inbox != 0:
        arrived = flags.to(tl.pointer_type(tl.int32)) + block
        _wait(arrived, epoch)
        # Past the first-level cache, which may remember what lay there.
        x = tl.load(_states(inbox) + slot + at, mask=inside, other=0.0, cache_modifier=".cg")
        _raise(arrived + blocks, epoch)
    elif INITIAL:
        x = tl.load(initial + at, mask=inside, other=0.0)
    y = kept * x + added
    if next_inbox != 0:
        arrived = next_flags.to(tl.pointer_type(tl.int32)) + block
        _wait(arrived + blocks, epoch - SLOTS)
        tl.store(_states(next_inbox) + slot + at, y, mask=inside)
        _raise(arrived, epoch)
    tl.store(found + of_rank + at, x, mask=inside)
    tl.store(last + of_rank + at, y, mask=inside)


@dataclass(frozen=True)
class Mailbox:
    """What one rank owns for one direction of travel. Peers write to `inbox`, peers and itself to `flags`."""

    inbox: Tensor  # [2, states, K, V], float32
    flags: Tensor  # [2, blocks], int32: last epoch that arrived, last that was taken

    @classmethod
    def empty(cls, states: int, key_size: int, value_size: int, device: torch.device | str) -> Mailbox:
        inbox = torch.empty(SLOTS.value, states, key_size, value_size, dtype=torch.float32, device=device)
        return cls(inbox, torch.zeros(2, states * _blocks(key_size, value_size), dtype=torch.int32, device=device))


def addresses(mailboxes: list[Mailbox | None], device: torch.device | str) -> Tensor:
    """The table that `chain` takes: the own mailboxes in the order of travel, then the next rank's; None is nobody."""
    table = [[0, 0] if m is None else [m.inbox.data_ptr(), m.flags.data_ptr()] for m in mailboxes]
    return torch.tensor(table, dtype=torch.int64, device=device)


def _tile(key_size: int, value_size: int) -> tuple[int, int]:
    return min(triton.next_power_of_2(key_size), ROWS), min(triton.next_power_of_2(value_size), COLUMNS)


def _blocks(key_size: int, value_size: int) -> int:
    rows, columns = _tile(key_size, value_size)
    return triton.cdiv(key_size, rows) * triton.cdiv(value_size, columns)


def chain(
    mailboxes: Tensor, total: Tensor, end: Tensor, initial: Tensor | None, epoch: int, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The state that each rank of this launch finds and the one it hands on, [ranks, B, H, K, V], float32.

    mailboxes: see `addresses`, one more than ranks. total [ranks, B, H, 1 or K, 1] and end [ranks, B, H, K, V], float32;
    initial [B, H, K, V], what the first rank of all finds (None: zeros). epoch: 1 in the first call with these mailboxes and
    one more in each that follows, the same on every rank. reverse: the last rank is the first that states come from.
    Raises ValueError for what does not fit.
    """
    ranks, batch, heads, key_size, value_size = end.shape
    if total.shape not in ((ranks, batch, heads, 1, 1), (ranks, batch, heads, key_size, 1)):
        raise ValueError(f"total must be [ranks, B, H, 1 or K, 1] for end {list(end.shape)}; got {list(total.shape)}")
    if any(x.dtype != torch.float32 for x in (total, end, *([] if initial is None else [initial]))):
        raise ValueError("states travel as float32: total, end and initial must be of that type")
    if mailboxes.shape != (ranks + 1, 2) or mailboxes.dtype != torch.int64:
        raise ValueError(f"{ranks} ranks need the addresses of {ranks + 1} mailboxes, int64 [{ranks + 1}, 2]")
    rows, columns = _tile(key_size, value_size)
    found, last = (torch.empty(end.shape, dtype=torch.float32, device=end.device) for _ in range(2))
    arguments: dict[str, Any] = {
        **{"mailboxes": mailboxes.contiguous(), "total": total.contiguous(), "end": end.contiguous()},
        **{"initial": None if initial is None else initial.contiguous(), "found": found, "last": last},
        **{"epoch": epoch, "ranks": ranks, "states": batch * heads},
    }
    constants = {"K": key_size, "V": value_size, "BK": rows, "BV": columns, "KEPT": total.shape[3]}
    constants |= {"INITIAL": initial is not None, "REVERSE": reverse}
    Launch(chain_kernel, ranks * batch * heads * _blocks(key_size, value_size), arguments, constants, 4, 1)()
    return found, last
