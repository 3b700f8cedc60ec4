"""The plan: what autosp decided for one captured graph. Frozen data, JSON both ways, no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import PlanningError
from .plan_rows import Beside, Collective, Exchange, Fallback, Layer, Rejected, Seconds, Site, Totals
from .plan_text import of_run, runs, sized, summary, together


@dataclass(frozen=True)
class Plan:
    """Everything that was decided for one graph. Printed, it explains itself. node: ranks of the nearest level, 0: all.
    saves: what backward finds of a layer, by name, where that is not everything. tiles: the layers whose feed-forward blocks are
    computed by tiles."""

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
    mesh: Mapping[str, int] = field(default_factory=dict)
    hardware: str = ""
    totals: Totals | None = None
    beside: Beside | None = None
    node: int = 0
    saves: Mapping[str, str] = field(default_factory=dict)
    tiles: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of the model's sites and all decisions; ranks that disagree on it must not run together. Prices, and where
        files lie, do not matter, nor does the compiler underneath."""
        raw = dataclasses.asdict(self)
        for row in (*raw["sites"], *raw["fallbacks"]):
            for key in _NO_DECISION & row.keys():
                del row[key]
        decided = {key: value for key, value in raw.items() if key not in _NO_DECISION}
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """All of it, `fingerprint` and each site's `bytes_sent` included."""
        raw = dataclasses.asdict(self)
        for row, site in zip(raw["sites"], self.sites, strict=True):
            row["bytes_sent"] = site.bytes_sent
        return json.dumps({**raw, "fingerprint": self.fingerprint}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises PlanError for anything else, and where the text was changed."""
        try:
            raw: dict[str, Any] = json.loads(text)
            printed = raw.pop("fingerprint")
            for key, kind in (("fallbacks", Fallback), ("collectives", Collective)):
                raw[key] = tuple(kind(**row) for row in raw[key])
            raw["sites"] = tuple(_site(row) for row in raw["sites"])
            for key in ("sequence", "outputs", "notes", "tiles"):
                raw[key] = tuple(raw[key])
            raw["totals"] = Totals(**raw["totals"]) if raw["totals"] else None
            raw["beside"] = _beside(raw["beside"]) if raw.get("beside") else None
            plan = cls(**raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(
                f"this is not a plan that autosp wrote ({type(error).__name__}: {error}); fix: `autosp plan --json FILE`"
            ) from None
        if plan.fingerprint != printed:
            raise PlanError(
                f"the plan was changed: its fingerprint is {plan.fingerprint}, it says {printed}; fix: `autosp plan` again"
            )
        return plan

    def __str__(self) -> str:
        lengths = " and ".join(map(str, self.sequence)) or "-"
        machine = f", for {self.hardware}" if self.hardware else ""
        held = f"sequence {lengths}, {self.layout} layout"
        lines = [f"autosp plan {self.fingerprint}: {self.ranks} ranks, {held}, {self.compiler}{machine}"]
        if self.totals is not None:
            lines.append(f"a step takes {summary(self.totals, self.ranks)}")
        for run in runs(self.sites):
            lines += of_run(run, self.ranks)
        if not self.sites:
            lines.append("  no attention found")
        if self.tiles:
            lines.append(f"  feed-forward blocks by tiles: {together(self.tiles)}")
        lines.append("gathered and run replicated:" if self.fallbacks else "gathered and run replicated: nothing")
        lines += [f"  {f.op}: {sized(f.bytes)} ({f.reason})  {f.source_line}" for f in self.fallbacks]
        lines.append("collectives, bytes sent by a rank (forward / backward):")
        lines += [
            f"  {c.count} x {c.op}: {sized(c.bytes_forward)} / {sized(c.bytes_backward)}  {c.purpose}" for c in self.collectives
        ]
        lines.append("outputs: " + "; ".join(self.outputs))
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


def numbered(path: str) -> str:
    """ "model.layers.3" of "model.layers.3.mlp": up to the first number, "" where there is none."""
    parts = path.split(".")
    return next((".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()), "")


class PlanError(PlanningError):
    """A plan that cannot be read, or is for another model."""


# Of a plan, what is no decision.
_NO_DECISION = {
    "source_line", "notes", "note", "seconds", "rejected", "bytes_forward", "bytes_backward", "bytes", "collectives", "compiler",
    "hardware", "totals", "mesh", "reason", "layer", "sizes", "beside", "node",
}  # fmt: skip


def _site(row: dict[str, Any]) -> Site:
    del row["bytes_sent"]
    return Site(
        **{**row, "seconds": Seconds(**row["seconds"]), "rejected": tuple(Rejected(**r) for r in row["rejected"])},
    )


def _beside(row: dict[str, Any]) -> Beside:
    layers, exchanges = (tuple(kind(**r) for r in row[key]) for key, kind in (("layers", Layer), ("exchanges", Exchange)))
    return Beside(**{**row, "layers": layers, "exchanges": exchanges})


__all__ = [
    "Beside", "Collective", "Exchange", "Fallback", "Layer", "Plan", "PlanError", "Rejected", "Seconds", "Site", "Totals",
    "numbered",
]  # fmt: skip
