"""Hardware as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from autosp.cost_model import amounts
from autosp.cost_model.hardware import Hardware, Number


def shown(number: Number) -> str:
    """With three digits and a prefix: "3.35 TB/s", "1.90 µs"; shares as they are."""
    return f"{number.value:.3g}" if number.unit == "share" else amounts.shown(number.value, number.unit)


def machines_table(machines: Sequence[Hardware]) -> Table:
    """One row a machine: memory, its bandwidth, the first dtype's peak, and what a rank sends to a neighbour on each level."""
    table = Table(title="hardware: `autosp hardware NAME` shows every number and where it comes from", title_justify="left")
    for head in ("name", "memory", "bandwidth", "peak", "links (ranks: bytes a rank sends to a neighbour)"):
        table.add_column(head)
    for machine in machines:
        dtype, peak = next(iter(machine.peak.items()), ("", None))
        links = [f"{level.name} ({level.ranks or 'all'}): {shown(level.link('p2p').bandwidth)}" for level in machine.levels]
        rate = f"{shown(peak)} {dtype}" if peak else ""
        table.add_row(Text(machine.name), shown(machine.memory), shown(machine.bandwidth), rate, Text("\n".join(links)))
    return table


def hardware_table(machine: Hardware, sources: bool = True) -> Table:
    """Every number of a machine with its unit and, if asked for, its source."""
    table = Table(title=Text(f"{machine.name}: {machine.description}"), title_justify="left")
    table.add_column("number", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    if sources:
        table.add_column("source")
    reach = {
        level.name: (f"{level.ranks or 'all'} ranks", f"{level.ports} port{'s' * (level.ports > 1)} a rank")
        for level in machine.levels
    }
    group = ""
    for place, number in machine.numbers():
        top, within = place.partition(".")[0], place.rpartition(".")[0]
        if within != group:
            table.add_section()
        if top in reach:
            table.add_row(top, *reach.pop(top)[: 1 + sources])
        group = within
        table.add_row(place, shown(number), *[Text(number.source)] * sources)
    return table
