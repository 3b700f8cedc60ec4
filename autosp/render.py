"""Reports and plans as tables for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosp.check import Report

COLOURS = {"exact": "green", "mismatch": "red", "refused": "yellow"}


def print_report(report: Report, console: Console) -> None:
    """Per parameter group the largest relative error; then the attention sites, what was gathered, and the verdict."""
    if report.groups:
        console.print(error_table(report))
    for s in _runs(report):
        console.print(Text(f"  {s}"), soft_wrap=True)
    for f in report.fallbacks:
        console.print(Text(f"  gathered for {f['op']}: {f['bytes']} bytes  {f['source_line']}"), soft_wrap=True)
    verdict = Text(report.verdict, style=f"bold {COLOURS[report.verdict]}")
    verdict.append(f" on {report.ranks} ranks ({report.mesh})", style="default not bold")
    if report.reason:
        verdict.append(f": {report.reason}", style="default not bold")
    console.print(verdict, soft_wrap=True)


def error_table(report: Report) -> Table:
    """One row for each parameter group, then all gradients, the loss and the buffers together."""
    table = Table(title=f"largest relative error, {report.dtype}, tolerance {report.tolerance:.0e}", title_justify="left")
    table.add_column("parameter group")
    table.add_column("error", justify="right")
    for name, error in report.groups.items():
        table.add_row(Text(name), _number(error, report.tolerance))
    table.add_section()
    table.add_row("all gradients", _number(report.grad_rel_err, report.tolerance))
    table.add_row("loss", _number(report.loss_rel_err, None))
    if report.buffer_rel_err != 0:
        table.add_row("buffers", _number(report.buffer_rel_err, None))
    return table


def _number(error: float | None, tolerance: float | None) -> Text:
    wrong = error is None or (tolerance is not None and error > tolerance)
    return Text("not finite" if error is None else f"{error:.1e}", style="red" if wrong else "")


def _runs(report: Report) -> list[str]:
    """The sites, those with the same kind and strategy on one line."""
    runs: dict[tuple[str, str], list[str]] = {}
    for site in report.sites:
        runs.setdefault((site["kind"], site["strategy"]), []).append(site["name"])
    return [
        f"{kind} by {strategy}: {names[0]}" + (f" .. {names[-1]} ({len(names)})" if len(names) > 1 else "")
        for (kind, strategy), names in runs.items()
    ]
