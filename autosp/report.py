"""A plan as one HTML page that needs nothing from elsewhere: the table, where a step's time goes, memory, alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autosp import plots
from autosp.cost_model.crossover import axes
from autosp.cost_model.hardware import Hardware
from autosp.cost_model.plan import Plan
from autosp.cost_model.plan_text import priced_alike, summary
from autosp.cost_model.retold import price, sizes
from autosp.explain import crossovers, strategies
from autosp.plan_tables import COLUMNS, NUMBERS, run_rows, title, total_rows

PLOTTED = 6  # runs with plots of their own, the longest first

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
td { white-space: pre-line; overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; }
.total td { font-weight: 600; }
figure { display: inline-block; margin: 0.5rem 1rem 0.5rem 0; break-inside: avoid; }
figcaption { font-size: 0.85rem; } svg { max-width: 100%; height: auto; }
li, p { overflow-wrap: anywhere; }
@media print { body { margin: 0; max-width: none; } }
"""


def report(plan: Plan, hardware: Hardware) -> str:
    """The page. Raises PlanError where the machine is not the one that was planned for."""
    dtype = plan.beside.dtype if plan.beside else "bfloat16"
    heading = f"{escape(title(plan))}"
    body = [f"<h1>{heading}</h1>"]
    if plan.totals is not None:
        body.append(f"<p>A step takes {escape(summary(plan.totals, plan.ranks))}.</p>")
    body.append(_table(plan))
    body += _list("gathered and run replicated", [f"{f.op}: {f.reason} ({f.source_line})" for f in plan.fallbacks])
    body += _list("notes", plan.notes)
    if plan.totals is not None and plan.sites:
        body += ["<h2>A step's time</h2>", _figure(plots.spent(plan, "spent"), "Layers that are alike, together.")]
        body += ["<h2>Memory</h2>", _figure(plots.memory(plan, "memory"), "At the peak, on each device.")]
    body += _others(plan, hardware, dtype)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>autosp: {heading}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _table(plan: Plan) -> str:
    def row(cells: Sequence[str], tag: str = "td", kind: str = "") -> str:
        said = (
            f"<{tag}{' class=number' if head in NUMBERS else ''}>{escape(cell)}</{tag}>"
            for head, cell in zip(COLUMNS, cells, strict=True)
        )
        return f"<tr{kind}>{''.join(said)}</tr>"

    lines = [row(COLUMNS, "th"), *map(row, run_rows(plan)), *(row(cells, kind=" class=total") for cells in total_rows(plan))]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _list(head: str, lines: Sequence[str]) -> list[str]:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return [f"<h2>{escape(head.capitalize())}</h2><ul>{items}</ul>"] if lines else []


def _figure(drawing: str, caption: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def _others(plan: Plan, hardware: Hardware, dtype: str) -> list[str]:
    """For the runs that take longest: each strategy's time over length and ranks, and where another wins."""
    longest = sorted(priced_alike(plan.sites), key=lambda run: -len(run.sites) * run.site.seconds.total)[:PLOTTED]
    body = []
    for i, run in enumerate(longest):
        site = run.site
        of = sizes(site)
        price(site, hardware, dtype)
        ways, _ = strategies(site, hardware, dtype)
        body.append(f"<h2>{escape(run.name)}: {escape(site.kind)} by {escape(site.strategy)}</h2>")
        for j, axis in enumerate(axes(of, hardware)[:2]):
            drawing = plots.over(axis, ways, site.strategy, dtype, plan.layout, f"over{i}{j}")
            body.append(_figure(drawing, f"Over {axis.name}; dotted: this plan; dashed lines need the other layout."))
        drawing = plots.timeline(site.strategy, of, hardware, dtype, f"time{i}")
        body.append(_figure(drawing, f"Forward, then backward, on the first of {of.ranks} ranks, simulated."))
        body += ["<ul>", *(f"<li>{escape(line)}</li>" for line in crossovers(plan, run, hardware, dtype)), "</ul>"]
    return body
