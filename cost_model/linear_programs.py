"""The op list of a linear attention, forward or backward, for each strategy: one row in `LINEAR_PROGRAMS`, beside
`prices.LINEAR_COSTS`.

A rank begins with what needs no state, computes `inside` while states travel (kernels/linear.py), and finishes with the state it
found. States go from rank 0 up, backward from the last rank down. A delta rule's chain passes them through each rank's chunks,
on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import prices, symbols
from .hardware import Hardware
from .messages import Ops, halvings
from .simulator import Op
from .states import LinearAttention
from .volumes import contiguous, head_tail, needed_heads, shares
from .work import CHUNK

SCAN = "scan"


@dataclass(frozen=True)
class Site:
    """One direction of a linear attention of sizes `a`, in seconds of a rank: `begin` and `finish` its own tokens, `inside`
    between them, `carry` a state through its chunks, `more` to know what it does to any state, `join` to do that to one,
    `add` where that is no matrix; `call` to call all kernels."""

    ops: Ops
    a: LinearAttention
    back: bool
    begin: float
    inside: float
    finish: float
    carry: float
    more: float
    join: float
    add: float
    call: float

    @property
    def way(self) -> str:
        return "backward" if self.back else "forward"

    def rank(self, place: int) -> int:
        """Which rank a state comes by as the `place`-th."""
        return self.a.ranks - 1 - place if self.back else place

    def hop(self, name: str, place: int, to: int, size: float, after: Sequence[int]) -> int:
        return self.ops.hop(f"{self.way}: {name}", self.rank(place), self.rank(to), size, after)

    def joined(self, place: int, count: float, after: Sequence[int]) -> int:
        """What has arrived, put together."""
        return self.ops.beside(self.rank(place), f"{self.way}: join", count * self.join, after, SCAN)


Scan = Callable[[Site, list[int]], list[list[int]]]
"""From what each place begins after, to what each place's state needs before it is there."""


def _scanned(site: Site, scan: Scan, early: bool) -> None:
    """early: a rank's own passage through its chunks happens while the state travels."""
    ops, ranks = site.ops, site.a.ranks
    _reordered(site, coming=True)
    third = site.call / 3
    for rank in range(ranks):
        ops.compute(rank, f"{site.way}: begin", site.begin + third + (0.0 if early else site.more * (ranks > 1)))
    found = scan(site, [ops.at[site.rank(place)] for place in range(ranks)])
    late = 0.0 if early else site.carry
    for place in range(ranks):
        rank = site.rank(place)
        ops.compute(rank, f"{site.way}: while states travel", site.inside + third)
        ops.join(rank, found[place])
        ops.compute(rank, f"{site.way}: finish", site.finish + third + late)
    _reordered(site, coming=False)


def _chain(site: Site, begun: list[int]) -> list[list[int]]:
    """Place p waits for p − 1, block by block."""
    a = site.a
    found: list[list[int]] = [[] for _ in range(a.ranks)]
    came: list[int | None] = [None] * a.blocks
    for place in range(a.ranks):
        leaving: list[int | None] = []
        for block, before in enumerate(came):
            name, after = f"block {block + 1} of {a.blocks}", [begun[place], *([] if before is None else [before])]
            passed = (site.carry + site.add) / a.blocks / (site.ops.hardware.alone.value if a.ranks > 1 else 1)
            after = [site.ops.beside(site.rank(place), f"{site.way}: {name} of the state", passed, after, SCAN)]
            found[place] += after
            if place + 1 < a.ranks:
                leaving.append(site.hop(f"{name} of the state", place, place + 1, a.state / a.blocks, [*after, begun[place + 1]]))
                found[place].append(leaving[-1])  # type: ignore[arg-type]
        came = leaving
    return found


def _log_step(site: Site, begun: list[int]) -> list[list[int]]:
    """With the places 1, 2, 4, .. before and after."""
    a = site.a
    at = [[b] for b in begun]
    for step in halvings(a.ranks):
        messages: list[list[int]] = [[] for _ in range(a.ranks)]
        for place in range(a.ranks - step):
            after = [*at[place], *at[place + step]]
            sent = site.hop(f"what {step} ranks do to a state", place, place + step, a.pair, after)
            messages[place].append(sent)
            messages[place + step].append(sent)
        for place in range(a.ranks):
            joins = 2 * a.pair / a.state if place >= step else 0.0
            at[place] = [site.joined(place, joins, messages[place] or at[place])] if joins else [*at[place], *messages[place]]
    return at


def _two_level(site: Site, begun: list[int]) -> list[list[int]]:
    """What ranks do goes down each node; a node's last rank passes the state on, and hands it round. In the first node that is
    the first rank, which knows the state."""
    a = site.a
    through, found = [[b] for b in begun], [list[int]() for _ in begun]
    arrived = [begun[0]]
    for base in range(0, a.ranks, a.node):
        last = min(base + a.node, a.ranks) - 1
        for place in range(base, last):
            after = [*through[place], begun[place + 1]]
            found[place].append(site.hop("what a node's ranks do to a state", place, place + 1, a.pair, after))
            through[place + 1] = [site.joined(place + 1, a.pair / a.state, found[place][-1:])]
        source = last if base else 0
        entering = {source: arrived}
        for place in (p for p in range(base, last + 1) if p != source):
            entering[place] = [site.hop("the state", source, place, a.state, [*arrived, begun[source], begun[place]])]
            found[source] += entering[place]
        if last + 1 < a.ranks:
            after = [site.joined(last, 1.0, [*through[last], *entering[last]])]
            beyond = min(last + a.node, a.ranks - 1)
            arrived = [site.hop("the state", last, beyond, a.state, [*after, begun[beyond]])]
            found[last] += arrived
        for place in range(base, last + 1):
            found[place] += entering[place] if place == base else [site.joined(place, 1.0, [*through[place], *entering[place]])]
    return found


def _gathered(site: Site, begun: list[int]) -> list[list[int]]:
    """Everyone gets what every earlier rank does."""
    a, ops = site.a, site.ops
    level = ops.hardware.level(a.ranks)
    link = level.link("all_gather")
    begun = [ops.pause(site.rank(p), link.latency.value if a.ranks > 1 else 0.0, [b]) for p, b in enumerate(begun)]
    seconds = link.message.value + a.pair / (link.bandwidth.value * level.used(a.ranks))
    got: list[list[int]] = [[] for _ in range(a.ranks)]
    for step in range(1, a.ranks):
        for place in range(a.ranks - step):
            text, after = f"{site.way}: what a rank does to a state", [begun[place], begun[place + step]]
            sent = ops.message(text, site.rank(place), site.rank(place + step), seconds, level, after)
            got[place].append(sent)
            got[place + step].append(sent)
    return [[site.joined(p, p, got[p])] if p else [begun[p], *got[p]] for p in range(a.ranks)]


# Tokens that change hands -------------------------------------------------------------------------


def _coming(a: LinearAttention) -> dict[str, tuple[int, int]]:
    """By name: heads and numbers a head of what tokens have."""
    found = {"queries": (a.query_heads, a.key_dim), "keys": (a.key_heads, a.key_dim), "values": (a.heads, a.value_dim)}
    if a.decays:
        found["decays"] = (a.heads, a.decays)
    return found | ({"what they remove": (a.key_heads, a.key_dim)} if a.remove else {})


def _exchanges(site: Site, coming: bool, size: Callable[[str, int, int], float], what: str) -> None:
    """All-to-alls, before or after: forward of what tokens have and then of results, backward of gradients the other way."""
    names = list(_coming(site.a)) if coming != site.back else ["results"]
    for name in names:
        text = f"{site.way}: {'gradients of ' * site.back}{name} to {what}"
        site.ops.exchange(text, [range(site.a.ranks)], lambda sender, to, name=name: size(name, sender, to))  # type: ignore[misc]


def _reordered(site: Site, coming: bool) -> None:
    """From a head-tail layout into order, and back."""
    a = site.a
    if not a.relaid or a.ranks == 1:
        return
    ends = head_tail(a.seq, a.ranks), contiguous(a.seq, a.ranks)
    here, there = ends if coming else ends[::-1]
    low = np.maximum(here[:, None, :, None, 0], there[None, :, None, :, 0])
    high = np.minimum(here[:, None, :, None, 1], there[None, :, None, :, 1])
    shared = np.maximum(0, high - low).sum((2, 3))
    numbers = {name: h * n for name, (h, n) in _coming(a).items()} | {"results": a.heads * a.value_dim}

    def size(name: str, sender: int, to: int) -> float:
        return float(shared[sender, to]) * numbers[name] * a.batch * a.itemsize

    _exchanges(site, coming, size, "order" if coming else "the model's layout")


def _by_heads(site: Site) -> None:
    """Every rank computes some heads over all tokens."""
    a = site.a
    heads, tokens = shares(a.heads, a.ranks), shares(a.seq, a.ranks)
    each = _coming(a) | {"results": (a.heads, a.value_dim)}
    needed = {name: needed_heads(a.heads, h, a.ranks) if name in ("queries", "keys") else heads for name, (h, _) in each.items()}

    def moved(coming: bool) -> Callable[[str, int, int], float]:
        def size(name: str, sender: int, to: int) -> float:
            where, whose = (sender, to) if coming else (to, sender)
            return float(tokens[where] * needed[name][whose] * each[name][1] * a.batch * a.itemsize)

        return size

    _reordered(site, coming=True)
    _exchanges(site, True, moved(True), "heads")
    for rank in range(a.ranks):
        share = heads[rank] / max(1, -(-a.heads // a.ranks))
        whole = site.begin + site.inside + site.finish + site.carry
        site.ops.compute(rank, f"{site.way}: {heads[rank]} of {a.heads} heads", whole * share + site.call)
    _exchanges(site, False, moved(False), "positions")
    _reordered(site, coming=False)


LINEAR_PROGRAMS: dict[str, Callable[[Site], None]] = {
    "all-scan": lambda site: _scanned(site, _chain, early=True),
    "log-step": lambda site: _scanned(site, _log_step, early=False),
    "two-level": lambda site: _scanned(site, _two_level, early=False),
    "gather-states": lambda site: _scanned(site, _gathered, early=False),
    "all-to-all": _by_heads,
}


def linear_ops(strategy: str, a: LinearAttention, back: bool, hardware: Hardware, dtype: str) -> list[Op]:
    """Raises HardwareError where the machine's table lacks a number."""
    v = prices.bound(strategy, a, hardware, dtype)
    rate, scale = (v[symbols.F_b], float(prices.BACK)) if back else (v[symbols.F_f], 1.0)
    own, inside, carry = (v[q] * scale / rate for q in (symbols.f, symbols.f_i, symbols.f_s))
    ahead = CHUNK * (3 * a.key_dim + a.value_dim) if a.remove else 2 * a.key_dim * a.value_dim
    begun = ahead / (ahead + 2 * a.value_dim * (a.key_dim + CHUNK))
    rest = own - inside - carry
    add = 3 * a.state / v[symbols.beta_m]
    call = v[symbols.tau_b if back else symbols.tau]
    ops = Ops(hardware, a.ranks)
    more = (v[symbols.f_s] + (0.0 if back else v[symbols.f_A])) / rate
    join = add + v[symbols.f_c] / rate
    site = Site(ops, a, back, rest * begun, inside, rest * (1 - begun), carry, more, join, add, call)
    LINEAR_PROGRAMS[strategy](site)
    return ops.ops
