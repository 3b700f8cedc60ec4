"""The plan: what autosp decided for one captured graph. Frozen data, JSON both ways, no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rejected:
    """A strategy that was not chosen for a site, and why. `bytes_sent` is None where it cannot apply."""

    strategy: str
    reason: str
    bytes_sent: int | None = None


@dataclass(frozen=True)
class Site:
    """One attention of the model, at global shapes.

    `name` is the module path, `kind` is "softmax attention", "pairwise", "linear attention" or "last state"; `sees` says
    what rows see ("mask causal") or what becomes of the state ("state a decay per head"). A state is [head_dim, value_dim]
    a head.
    `bytes_forward` and `bytes_backward` are what one rank sends, as the mean over ranks.
    """

    name: str
    kind: str
    strategy: str
    source_line: str
    batch: int
    q_heads: int
    kv_heads: int
    q_seq: int
    kv_seq: int
    head_dim: int
    value_dim: int
    sees: str
    bytes_forward: int
    bytes_backward: int
    note: str = ""
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class Fallback:
    """An operator run replicated because no sharded rule applies; `bytes` were gathered for it."""

    op: str
    source_line: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Collective:
    """`count` equal collectives of the lowered forward graph; bytes one rank sends in each direction."""

    op: str
    purpose: str
    count: int
    bytes_forward: int
    bytes_backward: int


@dataclass(frozen=True)
class Plan:
    """Everything that was decided for one graph. Printed, it explains itself."""

    ranks: int
    sequence: tuple[int, ...]
    layout: str
    sites: tuple[Site, ...]
    fallbacks: tuple[Fallback, ...]
    collectives: tuple[Collective, ...]
    outputs: tuple[str, ...]
    compiler: str
    grad_sync: str
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of all decisions; ranks that disagree on it must not run together. Where files lie does not matter."""
        raw = dataclasses.asdict(self)
        for row in (*raw["sites"], *raw["fallbacks"]):
            row["source_line"] = ""
        return hashlib.sha256(json.dumps({**raw, "notes": ()}, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        raw: dict[str, Any] = json.loads(text)
        for key, kind in (("fallbacks", Fallback), ("collectives", Collective)):
            raw[key] = tuple(kind(**row) for row in raw[key])
        raw["sites"] = tuple(Site(**{**row, "rejected": tuple(Rejected(**r) for r in row["rejected"])}) for row in raw["sites"])
        for key in ("sequence", "outputs", "notes"):
            raw[key] = tuple(raw[key])
        return cls(**raw)

    def __str__(self) -> str:
        lines = [
            f"autosp plan {self.fingerprint}: {self.ranks} ranks, sequence {' and '.join(map(str, self.sequence)) or '-'}, "
            f"{self.layout} layout, {self.compiler}"
        ]
        lines += _sites(self.sites)
        lines.append("gathered and run replicated:" if self.fallbacks else "gathered and run replicated: nothing")
        lines += [f"  {f.op}: {_bytes(f.bytes)} ({f.reason})  {f.source_line}" for f in self.fallbacks]
        lines.append("collectives, bytes sent by a rank (forward / backward):")
        lines += [
            f"  {c.count} x {c.op}: {_bytes(c.bytes_forward)} / {_bytes(c.bytes_backward)}  {c.purpose}" for c in self.collectives
        ]
        lines.append("outputs: " + "; ".join(self.outputs))
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


def _sites(sites: tuple[Site, ...]) -> list[str]:
    """One line per run of sites that differ only in name."""
    lines: list[str] = []
    runs: list[list[Site]] = []
    for site in sites:
        same = runs and dataclasses.replace(site, name="", source_line="") == dataclasses.replace(
            runs[-1][0], name="", source_line=""
        )
        if same:
            runs[-1].append(site)
        else:
            runs.append([site])
    for run in runs:
        s = run[0]
        name = s.name if len(run) == 1 else f"{s.name} .. {run[-1].name} ({len(run)})"
        lines.append(
            f"  {name}: {s.kind}, {s.strategy}; {s.q_heads}/{s.kv_heads} heads x {s.head_dim}/{s.value_dim}, "
            f"{s.q_seq} x {s.kv_seq}, {s.sees}; sends {_bytes(s.bytes_forward)} / {_bytes(s.bytes_backward)}"
        )
        if s.note:
            lines.append(f"      {s.note}")
        lines += [
            f"      not {r.strategy}: {r.reason}" + (f" ({_bytes(r.bytes_sent)})" if r.bytes_sent is not None else "")
            for r in s.rejected
        ]
        lines.append(f"      {s.source_line}")
    return lines or ["  no attention found"]


def _bytes(n: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n} B"
