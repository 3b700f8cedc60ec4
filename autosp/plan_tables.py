"""Plans as tables for the terminal: one, and two side by side."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autosp.cost_model.amounts import length, shown
from autosp.cost_model.compare import Difference, Row
from autosp.cost_model.plan import Plan, Site
from autosp.cost_model.plan_text import best_rejected, heads, runs, summary, way
from autosp.cost_model.retold import kept, kept_in

WIDTH = 140  # columns where nobody says how wide the output is, as in a pipe or a log


def console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def print_plan(plan: Plan, to: Console) -> None:
    """The table of runs, what a step takes, what was gathered, notes, and what too few heads mean."""
    if to.width < NARROW:
        to.print(Text("\n".join([title(plan), *plan_lines(plan)])), soft_wrap=True)
    else:
        to.print(plan_table(plan))
    if plan.totals is not None:
        to.print(Text(f"a step takes {summary(plan.totals, plan.ranks)}"), soft_wrap=True)
    for f in plan.fallbacks:
        to.print(Text(f"gathered for {f.op}: {shown(f.bytes, 'B')} ({f.reason})  {f.source_line}"), soft_wrap=True)
    for note in plan.notes:
        to.print(Text(f"note: {note}"), soft_wrap=True)


NARROW = 120  # columns that a table needs; with fewer, lines
NAME_WIDTH = 34  # columns that names of layers take at most, so that most are not broken
COLUMNS = ("layers", "kind", "strategy", "time each", "waiting", "kept each", "best alternative")
NUMBERS = ("time each", "waiting", "kept each")


def title(plan: Plan) -> str:
    where = f"{plan.ranks} ranks" + (f" x {plan.mesh['dp']} data-parallel" if plan.mesh.get("dp", 1) > 1 else "")
    lengths = " and ".join(map(length, plan.sequence)) or "-"
    return f"{where}, sequence {lengths}, {plan.layout} layout, {plan.hardware}: plan {plan.fingerprint}"


def plan_table(plan: Plan) -> Table:
    """One row for each run of layers that are alike, one for all else, and the step."""
    table = Table(title=Text(title(plan)), title_justify="left")
    rows, totals = run_rows(plan), total_rows(plan)
    name = min(NAME_WIDTH, max(len(row[0]) for row in [COLUMNS, *rows, *totals]))
    for head in COLUMNS:
        numeric = head in NUMBERS
        wide = name if head == "layers" else None
        table.add_column(head, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold", width=wide)
    for each in (rows, totals):
        for row in each:
            table.add_row(*map(Text, row))
        table.add_section()
    return table


def plan_lines(plan: Plan) -> list[str]:
    """The same below one another."""
    lines = []
    for name, kind, strategy, time, waiting, held, best in run_rows(plan):
        lines.append(f"{name}: {kind} by {strategy.replace(chr(10), ', ')}")
        lines.append(f"  {time} each, {waiting} of it waiting; {held} kept each; best alternative {best}")
    for what, _, _, time, waiting, held, _ in total_rows(plan):
        numbers = [time, f"{waiting} of it waiting" if waiting else "", held]
        lines.append(f"{what}: {', '.join(n for n in numbers if n)}")
    return lines


def run_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS` for each run."""
    by_site = kept(plan)
    return [
        (
            run.name,
            run.site.kind,
            _chosen(run.site, plan.ranks),
            shown(run.site.seconds.total, "s"),
            shown(run.site.seconds.exposed, "s"),
            shown(kept_in(run, by_site) / len(run.sites), "B"),
            alternative(run.site, plan.ranks),
        )
        for run in runs(plan.sites)
    ]


def total_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells of `COLUMNS` for what is no site, for what is held, and for the step."""
    totals = plan.totals
    if totals is None:
        return []
    time = max(0.0, totals.step_s - sum(s.seconds.total for s in plan.sites))
    waiting = max(0.0, totals.exposed_s - sum(s.seconds.exposed for s in plan.sites))
    again = " and computed again" if any(s.saved != "everything" for s in plan.sites) else ""
    held = shown(totals.parameter_bytes, "B")
    parted = any(c.op == "unshard" for c in plan.collectives)
    holder = "a rank's part of all, one layer's whole" if parted else "every rank holds all of them"
    return [
        (f"all else{again}", "", "", shown(time, "s"), shown(waiting, "s"), "", ""),
        ("parameters, gradients, Adam", "", "", "", "", held, holder),
        ("step", "", "", shown(totals.step_s, "s"), shown(totals.exposed_s, "s"), shown(totals.peak_bytes, "B"), ""),
    ]


def _chosen(site: Site, ranks: int) -> str:
    """The strategy with its parameters, and what they mean where that is more than the price."""
    lines = [way(site.strategy, site.params), heads(site, site.strategy, site.params, ranks), site.note]
    if site.saved != "everything":
        lines.append(f"keeps {site.saved}")
    return "\n".join(line for line in lines if line)


def alternative(site: Site, ranks: int) -> str:
    """The best that was rejected, with its price, or why it cannot apply."""
    best = best_rejected(site)
    if best is None:
        return "there is none"
    if best.seconds is None:
        return f"{best.strategy}: {best.reason}"
    note = heads(site, best.strategy, best.params, ranks)
    return f"{way(best.strategy, best.params)}, {shown(best.seconds, 's')}: {best.reason}" + (f"; {note}" if note else "")


# Two plans ----------------------------------------------------------------------------------------


def print_difference(found: Difference, a: str, b: str, to: Console) -> None:
    """What differs, first of the plans, then of their sites; the verdict last."""
    if found.facts or found.totals:
        table = Table()
        for head in ("", a, b):
            table.add_column(head and Text(head))
        for group in (found.facts, found.totals):
            for row in group:
                table.add_row(*map(Text, row))
            table.add_section()
        to.print(table)
    if found.rows:
        to.print(_sites_table(found.rows))
    if found.alike:
        to.print(f"{found.alike} sites are the same in both", highlight=False)
    verdict = "the same decisions" if found.same_decisions else "other decisions"
    to.print(Text(verdict, style="bold green" if found.same_decisions else "bold yellow"))


def _sites_table(rows: tuple[Row, ...]) -> Table:
    table = Table()
    for head in ("layers", "strategy", "time each", "sends", "keeps"):
        table.add_column(head)
    for row in rows:
        sides = (row.a, row.b)
        table.add_row(
            Text(row.name),
            _change(*(_chosen_briefly(s) for s in sides)),
            _change(*(shown(s.seconds.total, "s") if s else "-" for s in sides)),
            _change(*(shown(s.bytes_sent, "B") if s else "-" for s in sides)),
            _change(*(shown(k, "B") if s else "-" for s, k in zip(sides, (row.kept_a, row.kept_b), strict=True))),
        )
    return table


def _chosen_briefly(site: Site | None) -> str:
    if site is None:
        return "-"
    return way(site.strategy, site.params) + ("" if site.saved == "everything" else f", keeps {site.saved}")


def _change(a: str, b: str) -> Text:
    return Text(a) if a == b else Text(f"{a} → {b}", style="bold")
