"""One small message a step by which ranks find out that they disagree, before any other collective.

Each rank says: did it compile, what is its plan, which collectives do its graphs run in which order, what are its weights
(before the first step only), what is its batch, which seed would it draw. A rank that failed still
says so, so nobody waits for it in a collective it will never reach.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import AutospError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DisagreementError(AutospError):
    """Ranks of one sequence-parallel group hold different batches or plans, or one of them failed."""


def text_hash(text: str) -> int:
    """A 62-bit hash of a string, the same in every process."""
    data = text.encode()
    return (zlib.crc32(data) << 30) ^ zlib.adler32(data)


def batch_hash(tensors: Sequence[Tensor]) -> Tensor:
    """An int64 scalar that depends on every element, its place and the shapes; no host synchronisation."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")
    for i, x in enumerate(tensors):
        x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        flat = x.contiguous().reshape(-1)
        if flat.is_floating_point():
            flat = flat.view(_BITS[flat.element_size()])
        place = torch.arange(flat.numel(), device=flat.device) * 0x9E3779B1 + 0x85EBCA77
        total = total * 31 + (flat.to(torch.int64) * place).sum().to(total.device)
        total = total + text_hash(f"{i} {tuple(x.shape)} {x.dtype}")
    return total


def exchange(message: Sequence[int | Tensor], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's message, by rank of `group`: one all-gather of a few int64."""
    mine = torch.stack([torch.as_tensor(m, dtype=torch.int64, device=device) for m in message])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone).tolist()


FAILED, READY = 1, 0


def judge(messages: Sequence[Sequence[int]], sp_ranks: int) -> None:
    """Raise DisagreementError on every rank if any sp group (consecutive ranks of the mesh) disagrees, or all on weights.

    A message is (status, plan, graphs, weights, batch, seed). The error names ranks by their place in the mesh.
    """
    failed = [r for r, m in enumerate(messages) if m[0] == FAILED]
    if failed:
        raise DisagreementError(f"{_ranks(failed)} could not compile the model; see the error there. No collective was started.")
    report = "this is a mistake of autosp, found before it could hang: please report the model"
    shard = "give every rank of an sp group the same global batch: shard the data over dp, not over sp"
    for field, what, fix, span in (
        (1, "a different plan", "give every rank the same model, options and sequence length", sp_ranks),
        (2, "another order of collectives", report, sp_ranks),
        (3, "different weights", "start every rank from the same seed or checkpoint", len(messages)),
        (4, "a different batch", shard, sp_ranks),
    ):
        for start in range(0, len(messages), span):
            values = [m[field] for m in messages[start : start + span]]
            common = max(set(values), key=lambda v: (values.count(v), -values.index(v)))
            odd = [start + r for r, v in enumerate(values) if v != common]
            rest = [start + r for r, v in enumerate(values) if v == common]
            if odd:
                where = " of the same sp group" if span == sp_ranks else ""
                raise DisagreementError(f"{_ranks(odd)} has {what} from {_ranks(rest)}{where}; fix: {fix}")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
