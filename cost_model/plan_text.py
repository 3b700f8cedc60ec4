"""What plans say of sites, as text: those that are alike in one run, prices in seconds and bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .amounts import shown
from .plan_rows import Rejected, Site, Totals


@dataclass(frozen=True)
class Run:
    """Sites that differ in nothing but where they stand in the model."""

    sites: tuple[Site, ...]

    @property
    def site(self) -> Site:
        return self.sites[0]

    @property
    def name(self) -> str:
        return together([s.name for s in self.sites])


def runs(sites: Iterable[Site]) -> tuple[Run, ...]:
    """In the order of their first sites; members of a run need not be neighbours."""
    found: dict[str, list[Site]] = {}
    for site in sites:
        key = repr(dataclasses.replace(site, name="", source_line="", layer=""))
        found.setdefault(key, []).append(site)
    return tuple(Run(tuple(each)) for each in found.values())


def priced_alike(sites: Iterable[Site]) -> tuple[Run, ...]:
    """Runs of sites that also differ in what is kept of their layers: a price is the same for them."""
    named = {site.name: site for site in sites}
    alike = runs(dataclasses.replace(site, saved="") for site in named.values())
    return tuple(Run(tuple(named[s.name] for s in run.sites)) for run in alike)


def together(names: Sequence[str]) -> str:
    """ "model.layers.0-2, 4 .. 46.mixer (36)": names that differ in one number, or the first and the last."""
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"(?<![^.])(\d+)(?![^.])", name) for name in names]
    varying = {i for each in parts if len(each) == len(parts[0]) for i in range(len(each)) if each[i] != parts[0][i]}
    if len(varying) != 1 or len({len(each) for each in parts}) > 1 or not (at := varying.pop()) % 2:
        return f"{names[0]} .. {names[-1]} ({len(names)})"
    numbers = _ranges([int(each[at]) for each in parts])
    return "".join([*parts[0][:at], numbers, *parts[0][at + 1 :]]) + f" ({len(names)})"


def _ranges(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    said = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ", ".join(said) if len(said) <= 3 else f"{said[0]}, {said[1]} .. {said[-1]}"


def way(strategy: str, params: Mapping[str, int]) -> str:
    """ "ring-a2a (inner 8)"."""
    own = ", ".join(f"{key} {value}" for key, value in params.items())
    return f"{strategy} ({own})" if own else strategy


def best_rejected(site: Site) -> Rejected | None:
    """The fastest that was not chosen; of those that cannot apply, the first."""
    priced = [r for r in site.rejected if r.seconds is not None]
    return min(priced, key=lambda r: r.seconds or 0.0) if priced else next(iter(site.rejected), None)


def heads(site: Site, strategy: str, params: Mapping[str, int], ranks: int) -> str:
    """What too few heads mean for ranks that exchange them, or ""."""
    exchanging = params.get("inner", 1) if strategy == "ring-a2a" else ranks if strategy == "all-to-all" else 1
    said = []
    if 0 < site.q_heads < exchanging:
        said.append(f"{site.q_heads} heads leave {exchanging - site.q_heads} of {exchanging} ranks without one")
    if 0 < site.kv_heads < min(exchanging, site.q_heads):
        copies = f"{min(exchanging, site.q_heads) / site.kv_heads:.3g}"
        said.append(f"each of {site.kv_heads} key/value heads goes to {copies} of {exchanging} ranks")
    return ", ".join(said)


def summary(totals: Totals, ranks: int) -> str:
    """A step's totals in one line."""
    tokens = totals.tokens_per_s_per_device
    speed = f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.4g}"
    gap = f"; no plan is more than {totals.gap:.1%} faster" if totals.gap else ""
    host = f", {shown(totals.host_bytes, 'B')} in the host's memory" if totals.host_bytes else ""
    return (
        f"{shown(totals.step_s, 's')}, {shown(totals.exposed_s, 's')} of it waiting for other ranks; "
        f"{speed} tokens/s a device, efficiency {totals.efficiency:.0%}"
        f"{f' of a device alone with 1/{ranks} of the work' if ranks > 1 else ''}; "
        f"{shown(totals.peak_bytes, 'B')} of {shown(totals.budget_bytes, 'B')}{host}{gap}"
    )


def of_run(run: Run, ranks: int) -> list[str]:
    """Lines on its sites: what they are, what was chosen, and what was not."""
    s = run.site
    keeps = "" if s.saved == "everything" else f", backward keeps its {s.saved}"
    lines = [
        f"  {run.name}: {s.kind}, {way(s.strategy, s.params)}; {s.q_heads}/{s.kv_heads} heads x {s.head_dim}/{s.value_dim}, "
        f"{s.q_seq} x {s.kv_seq}, {s.sees}; takes {shown(s.seconds.total, 's')} ({shown(s.seconds.exposed, 's')} waiting), "
        f"sends {sized(s.bytes_forward)} / {sized(s.bytes_backward)}{keeps}"
    ]
    lines += [f"      {note}" for note in (s.note, heads(s, s.strategy, s.params, ranks)) if note]
    for r in s.rejected:
        numbers = [shown(r.seconds, "s")] if r.seconds is not None else []
        numbers += [sized(r.bytes_sent)] if r.bytes_sent is not None else []
        why = heads(s, r.strategy, r.params, ranks) if numbers else ""
        price = f" ({', '.join(numbers)})" if numbers else ""
        lines.append(f"      not {way(r.strategy, r.params)}: {r.reason}{price}{why and '; ' + why}")
    return [*lines, f"      {s.source_line}"]


def sized(n: int) -> str:
    """ "1.50 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n} B"
