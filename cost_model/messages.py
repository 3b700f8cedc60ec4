"""Op lists in the making, and collectives as the messages they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .hardware import Hardware, Level, Link
from .simulator import COMPUTE, Op

Size = Callable[[int, int], float]  # bytes from a sender to a receiver


@dataclass(frozen=True)
class Started:
    """All-to-alls that ranks have begun, by name; for each rank the last messages it waits for."""

    groups: Sequence[Sequence[int]]
    sizes: Mapping[str, Size]
    messages: Sequence[Sequence[int]]


class Ops:
    """An op list in which every rank does one thing after another: `at[rank]` is what its next op waits for.

    A message takes a port for the link's seconds a message and its bytes ÷ bandwidth, of all ports if it is part of a
    collective, of one if it is a hop.
    """

    def __init__(self, hardware: Hardware, ranks: int) -> None:
        self.hardware, self.ranks = hardware, ranks
        self.ops: list[Op] = []
        self.at = [self._add(Op("begin", rank, 0.0)) for rank in range(ranks)]
        self.begun: list[list[int]] = [[] for _ in range(ranks)]  # what a rank's next all-to-all waits for beside that

    def _add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def join(self, rank: int, after: Sequence[int], seconds: float = 0.0) -> int:
        """Nothing, when `after` and `at` have ended, for so long."""
        self.at[rank] = self._add(Op("join", rank, seconds, (self.at[rank], *after)))
        return self.at[rank]

    def compute(self, rank: int, name: str, seconds: float, after: Sequence[int] = ()) -> int:
        """On the rank's own stream, when `after` and `at` have ended."""
        self.at[rank] = self._add(Op(name, rank, seconds, (self.at[rank], *after), COMPUTE))
        return self.at[rank]

    def beside(self, rank: int, name: str, seconds: float, after: Sequence[int], stream: str) -> int:
        """On another stream of the rank; what comes next does not wait for it."""
        return self._add(Op(name, rank, seconds, tuple(after), stream))

    def pause(self, rank: int, seconds: float, after: Sequence[int]) -> int:
        """What comes next does not wait for it."""
        return self._add(Op("pause", rank, seconds, tuple(after)))

    def level(self, one: int, other: int) -> Level:
        """The nearest level that connects two ranks."""
        near = (x for x in self.hardware.levels if x.ranks == 0 or one // x.ranks == other // x.ranks)
        return next(near, self.hardware.levels[-1])

    def hop(self, name: str, sender: int, to: int, size: float, after: Sequence[int]) -> int:
        """One message of `size` bytes."""
        level = self.level(sender, to)
        lane = f"{sender} to {to}"
        return self._add(Op(name, sender, _seconds(level.link("p2p"), size, 1), tuple(after), level.name, to, lane))

    def message(self, name: str, sender: int, to: int, seconds: float, level: Level, after: Sequence[int]) -> int:
        """One of a collective's."""
        return self._add(Op(name, sender, seconds, tuple(after), level.name, to))

    # Collectives: each rank begins when it is there, and goes on when its own messages have come and gone.

    def exchange(self, name: str, groups: Sequence[Sequence[int]], size: Size) -> None:
        """All-to-all in each group, beside which nothing else happens."""
        self.land(self.start(groups, {name: size}))

    def start(self, groups: Sequence[Sequence[int]], sizes: Mapping[str, Size]) -> Started:
        """All-to-alls in each group, by name, put in order; then they begin one after another, after those begun before, pair by
        pair, and ranks go on."""
        self._ordered(groups, sizes, coming=False)
        among = max(map(len, groups))
        latency = self.hardware.level(among).link("all_to_all").latency.value  # of a rank's first message on each level
        for name, size in sizes.items():
            before = [[self.at[rank], *self.begun[rank]] for rank in range(self.ranks)]
            mine: list[list[int]] = [[] for _ in range(self.ranks)]
            first = set[tuple[int, str]]()
            for sender, to in (pair for group in groups for pair in self._rounds(group)):
                if not (many := size(sender, to)):
                    continue
                level = self.level(sender, to)
                seconds = _seconds(level.link("all_to_all"), many, level.used(among))
                if (sender, level.name) not in first:
                    first.add((sender, level.name))
                    seconds += latency
                number = self.message(name, sender, to, seconds, level, (*before[sender], *before[to]))
                mine[sender].append(number)
                mine[to].append(number)
            self.begun = [own or self.begun[rank] for rank, own in enumerate(mine)]
        return Started(groups, sizes, self.begun)

    def land(self, started: Started) -> None:
        """A rank waits for its own messages of all-to-alls, and puts in order what came."""
        for rank, messages in enumerate(started.messages):
            self.join(rank, messages)
        self._ordered(started.groups, started.sizes, coming=True)

    def _ordered(self, groups: Sequence[Sequence[int]], sizes: Mapping[str, Size], coming: bool) -> None:
        for name, size in sizes.items():
            for group in (g for g in groups if len(g) > 1):
                for rank in group:
                    moved = sum(size(other, rank) if coming else size(rank, other) for other in group)
                    self.compute(rank, f"{name}: in order", 2 * moved / self.hardware.bandwidth.value)

    def around(self, name: str, collective: str, size: float) -> None:
        """All-gather or reduce-scatter of all ranks around a ring: P − 1 messages of `size` bytes to the next rank."""
        everyone = range(self.ranks)
        before, level = self._called([everyone], collective), self.hardware.level(self.ranks)
        seconds = _seconds(level.link(collective), size, level.used(self.ranks))
        mine: list[list[int]] = [[] for _ in everyone]
        for step in range(self.ranks - 1):
            for rank in everyone:
                to = (rank + 1) % self.ranks
                came = mine[rank][-1:] if step else []
                text = f"{name}, {step + 1} of {self.ranks - 1}"
                mine[rank].append(self.message(text, rank, to, seconds, level, (before[rank], before[to], *came)))
            mine = [[mine[(rank - 1) % self.ranks][-1]] for rank in everyone]  # what has just come is sent on
        for rank in everyone:
            self.join(rank, [*mine[rank], *mine[(rank + 1) % self.ranks]])

    def whole(self, name: str, seconds: float) -> None:
        """A collective of all ranks that is not looked into: the same seconds for everyone, once everyone is there."""
        if self.ranks == 1:
            self.join(0, (), seconds)
            return
        level, before = self.hardware.level(self.ranks), tuple(self.at)
        sent = [self.message(name, r, (r + 1) % self.ranks, seconds, level, before) for r in range(self.ranks)]
        for rank in range(self.ranks):
            self.join(rank, [sent[rank], sent[rank - 1]])

    def _called(self, groups: Sequence[Sequence[int]], collective: str) -> list[int]:
        for group in (g for g in groups if len(g) > 1):
            latency = self.hardware.level(len(group)).link(collective).latency.value
            for rank in group:
                self.join(rank, (), latency)
        return list(self.at)

    def _rounds(self, group: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Every pair of a group, in rounds in which each rank sends once and receives once. Where nodes have equally many of its
        ranks, a round is within nodes or between them, so that neither waits for the other."""
        count = len(group)
        near = sum(self.level(group[0], rank) is self.hardware.levels[0] for rank in group)
        step = near if count % near == 0 else count
        for block in range(0, count, step):
            for turn in range(step):
                for i, sender in enumerate(group):
                    base, place = i - i % step, i % step
                    to = group[(base + block) % count + (place + turn) % step]
                    if sender != to:
                        yield sender, to


def _seconds(link: Link, size: float, ports: int) -> float:
    return link.message.value + size / (link.bandwidth.value * ports)


def halvings(ranks: int) -> list[int]:
    """1, 2, 4, .. below `ranks`."""
    return [2**i for i in range(math.ceil(math.log2(max(1, ranks))))]
