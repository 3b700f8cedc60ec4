"""The op list of a site, forward or backward, for each softmax attention strategy: who computes which pairs and who sends what to
whom, one row a strategy in `PROGRAMS`, beside `prices.COSTS`.

Forward [q, k, v] become out; backward [dout] becomes [dq, dk, dv]. Uneven work and lengths are those of the ranks, not the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import work
from .hardware import Hardware
from .messages import Ops, Size, Started
from .prices import rates
from .simulator import Op
from .steps import Blocks, Travel, blocks, column_bytes, travel
from .volumes import Attention, contiguous, counted, head_tail, in_turns, needed_heads, shares, visible_pairs


@dataclass(frozen=True)
class Site:
    """One direction of an attention of sizes `a`: the op list so far and what kernels do. rate: FLOP/s; call: seconds to call
    one; memory: bytes/s."""

    ops: Ops
    a: Attention
    back: bool
    rate: float
    call: float
    memory: float

    @property
    def way(self) -> str:
        return "backward" if self.back else "forward"

    def seconds(self, pairs: float, heads: int, calls: int = 1) -> float:
        """A kernel over `pairs` of each of `heads` heads, in so many calls; nothing where there are none."""
        a = self.a
        flop = work.attention_backward if self.back else work.attention_forward
        each = flop(a.batch, 1, a.head_dim, a.value_dim, 1)
        return calls * self.call + pairs * heads * each / self.rate if pairs * heads else 0.0

    @property
    def merged(self) -> float:
        """Seconds to add a block's result to a rank's own: read twice, written once."""
        a = self.a
        rows, columns = a.q_seq / a.ranks * a.batch * a.q_heads, a.kv_seq / a.ranks * a.batch * a.kv_heads
        numbers = rows * a.head_dim + columns * (a.head_dim + a.value_dim) if self.back else rows * a.value_dim
        return 3 * a.accumulator * numbers / self.memory


# All-to-all ---------------------------------------------------------------------------------------


def _exchanged(site: Site, near: int, coming: bool, q: Sequence[int], kv: Sequence[int]) -> Started:
    """Each `near` neighbours begin to exchange heads, of which each computes `q` and needs `kv`: what is `coming` to whole
    positions of some heads, or what goes back."""
    a = site.a
    rows, columns = shares(a.q_seq, a.ranks), shares(a.kv_seq, a.ranks)
    numbers = {"queries": a.head_dim, "keys": a.head_dim, "values": a.value_dim, "results": a.value_dim}
    sizes: dict[str, Size] = {}
    for name in ("results",) if site.back == coming else ("queries", "keys", "values"):
        heads, tokens = (q, rows) if name in ("queries", "results") else (kv, columns)
        number = a.batch * a.itemsize * numbers[name]

        def size(sender: int, to: int, heads: Sequence[int] = heads, tokens: list[int] = tokens, number: int = number) -> float:
            where, whose = (sender, to) if coming else (to, sender)
            return tokens[where] * heads[whose % near] * number

        if any(heads):
            what = f"gradients of {name}" if site.back else name
            sizes[f"{site.way}: {what} to {'heads' if coming else 'positions'}"] = size
    return site.ops.start([range(first, first + near) for first in range(0, a.ranks, near)], sizes)


def _all_to_all(site: Site) -> None:
    """What comes for all turns travels in their order, and a turn's results follow when it is computed; they are waited for at
    the end. Backward takes the turns the other way round."""
    a, ops = site.a, site.ops
    whole = a.work if a.work is not None else float(visible_pairs(a, contiguous(a.q_seq, 1), contiguous(a.kv_seq, 1)).sum())
    calls = counted("all-to-all", a).calls
    dealt = in_turns(a.q_heads, a.kv_heads, a.ranks, a.turns)
    assert dealt is not None
    turns = [*zip(*dealt, strict=True)][:: -1 if site.back else 1]
    coming, going = [_exchanged(site, a.ranks, True, *turn) for turn in turns], []
    for turn, came in zip(turns, coming, strict=True):
        ops.land(came)
        for rank, heads in enumerate(turn[0]):
            ops.compute(rank, f"{site.way}: {heads} of {a.q_heads} heads", site.seconds(whole, heads, calls))
        going.append(_exchanged(site, a.ranks, False, *turn))
    for went in going:
        ops.land(went)


# Gather -------------------------------------------------------------------------------------------


def _gather_kv(site: Site) -> None:
    a, ops, moved = site.a, site.ops, counted("gather-kv", site.a)
    hold = head_tail if a.folded else contiguous
    pairs = visible_pairs(a, hold(a.q_seq, a.ranks), contiguous(a.kv_seq, 1))[:, 0].astype(float)
    if a.work is not None:
        pairs *= a.work / max(1.0, pairs.max())
    each = column_bytes(a, a.kv_heads) * moved.columns / a.ranks / max(1, a.ranks - 1)
    shares = {"keys": a.head_dim / (a.head_dim + a.value_dim), "values": a.value_dim / (a.head_dim + a.value_dim)}
    for name, share in shares.items():
        ops.around(f"{site.way}: {name} from everyone", "all_gather", each * share)
    for rank in range(a.ranks):
        ops.compute(rank, f"{site.way}: rows of rank {rank}", site.seconds(float(pairs[rank]), a.q_heads, moved.calls))
    for name, share in shares.items() if site.back else ():
        ops.around(f"{site.way}: gradients of {name} to everyone", "reduce_scatter", each * share)


# Blocks that travel -------------------------------------------------------------------------------


def _travelling(site: Site, strategy: str) -> None:
    """kernels/travel.py: in turn n a rank waits for the messages of the turn before, posts what step n + 1 needs and the
    results of step n − 1, and computes step n. A rank's messages of a turn start when both ends have posted them."""
    a, ops, steps = site.a, site.ops, travel(strategy, site.a)
    near = a.ranks // steps.places
    q, kv = shares(a.q_heads, near), needed_heads(a.q_heads, a.kv_heads, near)
    sizes = [blocks(a, site.back, q[i], kv[i]) for i in range(near)]
    there, back = ([_moved(steps, size, results) for size in sizes] for results in (False, True))
    count = len(steps.distances)
    for turn in range(count + 1 if count > 1 else 1):
        posted = list(ops.at)
        for rank in range(a.ranks):
            calls = 1 if turn else counted(strategy, a).calls
            if turn < count and (seconds := site.seconds(float(steps.work[turn, rank // near]), q[rank % near], calls)):
                more = site.merged if count > 1 else 0.0
                ops.compute(rank, f"{site.way}: block {turn + 1} of {count}", seconds + more)
        landed: list[list[int]] = [[] for _ in range(a.ranks)]
        if turn + 1 < count:
            _post(site, f"block {turn + 2} of {count}", steps.distances[turn + 1], there, turn + 1, posted, landed, near)
        if turn > 1:
            _post(site, f"results of block {turn}", -steps.distances[turn - 1], back, turn - 1, posted, landed, near)
        for rank in range(a.ranks):
            ops.join(rank, landed[rank])


def _moved(steps: Travel, size: Blocks, results: bool) -> np.ndarray:
    """[step, place]: bytes that a place receives of a step's blocks, or sends back of its results."""
    column, row = (size.column_back, size.row_back) if results else (size.column, size.row)
    return steps.columns * column + steps.rows * row


def _post(
    site: Site,
    name: str,
    distance: int,
    sizes: Sequence[np.ndarray],
    step: int,
    posted: Sequence[int],
    landed: list[list[int]],
    near: int,
) -> None:
    """Blocks from the place `distance` before a rank's own, or results back to the place −`distance` before it. Ranks that have
    the same heads are `near` apart."""
    ranks = site.a.ranks
    for rank in range(ranks):
        size = float(sizes[rank % near][step, rank // near])
        other = (rank - abs(distance) * near) % ranks
        sender, to = (other, rank) if distance > 0 else (rank, other)
        if size > 0:
            number = site.ops.hop(f"{site.way}: {name}", sender, to, size, (posted[sender], posted[to]))
            landed[sender].append(number)
            landed[to].append(number)


def _ring_a2a(site: Site) -> None:
    a, ops = site.a, site.ops
    own = shares(a.q_heads, a.inner), needed_heads(a.q_heads, a.kv_heads, a.inner)
    ops.land(_exchanged(site, a.inner, True, *own))
    _travelling(site, "ring-a2a")
    ops.land(_exchanged(site, a.inner, False, *own))


PROGRAMS: dict[str, Callable[[Site], None]] = {
    "all-to-all": _all_to_all,
    "gather-kv": _gather_kv,
    "halo": lambda site: _travelling(site, "halo"),
    "ring": lambda site: _travelling(site, "ring"),
    "balanced-ring": lambda site: _travelling(site, "balanced-ring"),
    "ring-a2a": _ring_a2a,
}


def attention_ops(strategy: str, a: Attention, back: bool, hardware: Hardware, dtype: str) -> list[Op]:
    """Raises HardwareError where the machine's table lacks a number."""
    kernel = "attention_backward" if back else "attention_forward"
    ops = Ops(hardware, a.ranks)
    call, memory = hardware.seconds_per_call(kernel), hardware.bandwidth.value
    rate = rates(a, hardware, dtype)[back]
    PROGRAMS[strategy](Site(ops, a, back, rate, call, memory))
    return ops.ops
