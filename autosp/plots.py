"""A plan's plots as SVG to be put into a page: text and lines take the page's colour, so that light and dark both do."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from autosp.cost_model.amounts import length, shown
from autosp.cost_model.crossover import LAYOUTS, Axis, curve
from autosp.cost_model.hardware import Hardware
from autosp.cost_model.linear_programs import linear_ops
from autosp.cost_model.plan import Plan
from autosp.cost_model.plan_text import runs
from autosp.cost_model.problem import Sizes
from autosp.cost_model.programs import attention_ops
from autosp.cost_model.retold import kept, kept_in
from autosp.cost_model.simulator import simulate
from autosp.cost_model.states import LinearAttention

Span = tuple[float, float]

INK = "#010203"  # drawn with this, shown in the page's colour
COMPUTING, WAITING = "#4e79a7", "#e15759"
RANKS = 8  # of a timeline, at most
MOST = 3.0  # times as long as the fastest: what takes longer is out of the picture
COLOURS = {
    "all-to-all": "#4e79a7", "gather-kv": "#59a14f", "ring": "#e15759", "balanced-ring": "#f28e2b", "ring-a2a": "#b07aa1",
    "halo": "#76b7b2", "all-scan": "#e15759", "log-step": "#f28e2b", "two-level": "#b07aa1", "gather-states": "#59a14f",
}  # fmt: skip
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "autosp", "font.size": 9, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.facecolor": "none", "figure.facecolor": "none",
    "savefig.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "grid.color": INK, "grid.alpha": 0.15, "axes.grid": True, "axes.axisbelow": True,
}  # fmt: skip


def svg(figure: Figure, name: str) -> str:
    """The drawing alone, without the head and links of a file of its own; `name` keeps its ids apart from other drawings'."""
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(font: [\d.]+px) [^;"]*', r"\1 sans-serif", text)
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace(INK, "currentColor").strip()


def over(axis: Axis, ways: Mapping[str, Sizes], chosen: str, dtype: str, layout: str, name: str) -> str:
    """Each strategy's time as a multiple of the fastest's along an axis; dashed where the model would need another layout; a
    line where the plan is. Seconds of the fastest stand below the axis."""
    curves = {strategy: curve(strategy, sizes, axis, dtype) for strategy, sizes in ways.items()}
    fastest = [min((p.seconds for p in column if p), default=math.nan) for column in zip(*curves.values(), strict=True)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.0))
        ax = figure.add_subplot()
        for strategy, points in curves.items():
            here, wide = LAYOUTS.get(strategy, layout) == layout, 2.4 if strategy == chosen else 1.2
            times = [p.seconds / best if p else math.nan for p, best in zip(points, fastest, strict=True)]
            ax.plot(axis.values, times, "-" if here else "--", lw=wide, color=COLOURS.get(strategy), label=strategy)
        ax.axvline(axis.now, color=INK, lw=0.8, ls=":")
        ax.set(
            xscale="log", ylim=(0.97, MOST), xlabel=f"{axis.name}, {axis.unit}; seconds of the fastest", ylabel="times as long"
        )
        marked = _marked(len(axis.values))
        ax.set_xticks(
            [axis.values[i] for i in marked], [f"{_tick(axis, axis.values[i])}\n{_round(fastest[i], 's')}" for i in marked]
        )
        ax.set_xticks([], minor=True)
        ax.legend(fontsize=8)
        return svg(figure, name)


def _marked(count: int) -> range:
    """At most six of the values, evenly apart, the last one of them."""
    step = max(1, math.ceil(count / 6))
    return range((count - 1) % step, count, step)


def _tick(axis: Axis, value: float) -> str:
    return length(round(value)) if axis.unit == "positions" else f"{value:.0f}"


def _round(value: float, unit: str) -> str:
    number, _, prefixed = shown(value, unit).partition(" ")
    return f"{float(number.replace(',', '')):g} {prefixed}"


def memory(plan: Plan, name: str) -> str:
    """What fills a device at the peak, against what there is."""
    totals = plan.totals
    assert totals is not None
    by_site = kept(plan)
    parts = [("parameters, gradients, Adam", totals.parameter_bytes)]
    parts += [(f"kept by {run.name}", kept_in(run, by_site)) for run in runs(plan.sites)]
    parts.append(("kept by all else", totals.activation_bytes - sum(size for _, size in parts[1:])))
    parts.append(("working memory of a layer", totals.peak_bytes - totals.parameter_bytes - totals.activation_bytes))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.5 + 0.28 * len(parts)))
        ax = figure.add_subplot()
        at = 0.0
        for i, size in enumerate(max(0.0, size) for _, size in parts):
            ax.barh(i, size, left=at, color=f"C{i % 10}", alpha=0.85)
            ax.annotate(f" {shown(size, 'B')}", (at + size, i), va="center", fontsize=8)
            at += size
        ax.axvline(totals.budget_bytes, color=INK, lw=1, ls="--")
        ax.set_yticks(range(len(parts)), [what for what, _ in parts])
        ax.invert_yaxis()
        ax.set_xlim(0, 1.12 * max(at, totals.budget_bytes))
        ax.xaxis.set_major_formatter(lambda v, _: _round(v, "B") if v else "0")
        ax.set_xlabel(f"bytes of a device; dashed: the {shown(totals.budget_bytes, 'B')} that a plan may take")
        ax.grid(False, axis="y")
        return svg(figure, name)


def spent(plan: Plan, name: str) -> str:
    """A step by what it is spent on: computing, and waiting for other ranks."""
    totals = plan.totals
    assert totals is not None
    rows: list[tuple[str, float, float]] = []
    for run in runs(plan.sites):
        seconds = run.site.seconds
        many = len(run.sites)
        rows.append((f"{run.site.strategy}: {run.name}", many * seconds.compute, many * seconds.exposed))
    computed, waited = sum(row[1] for row in rows), sum(row[2] for row in rows)
    rows.append(("all else", max(0.0, totals.compute_s - computed), max(0.0, totals.exposed_s - waited)))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.7 + 0.28 * len(rows)))
        ax = figure.add_subplot()
        for i, (_, computing, waiting) in enumerate(rows):
            ax.barh(i, computing, color=COMPUTING, label="computing" if not i else None)
            ax.barh(i, waiting, left=computing, color=WAITING, label="waiting for other ranks" if not i else None)
            ax.annotate(f" {shown(computing + waiting, 's')}", (computing + waiting, i), va="center", fontsize=8)
        ax.set_yticks(range(len(rows)), [row[0] for row in rows])
        ax.invert_yaxis()
        ax.set_xlim(0, 1.15 * max(row[1] + row[2] for row in rows))
        ax.set_xlabel("seconds of a step")
        ax.grid(False, axis="y")
        ax.legend(fontsize=8, loc="lower right")
        return svg(figure, name)


def timeline(strategy: str, sizes: Sizes, hardware: Hardware, dtype: str, name: str) -> str:
    """Forward, then backward, of one site as simulated: when ranks compute, and when what they send is under way."""
    shown_ranks = min(sizes.ranks, RANKS)
    computing: list[list[Span]] = [[] for _ in range(shown_ranks)]
    sending: list[list[Span]] = [[] for _ in range(shown_ranks)]
    begin = 0.0
    for back in (False, True):
        if isinstance(sizes, LinearAttention):
            ops = linear_ops(strategy, sizes, back, hardware, dtype)
        else:
            ops = attention_ops(strategy, sizes, back, hardware, dtype)
        found = simulate(ops, sizes.ranks, hardware.overlap.value)
        for event in found.events:
            if event.rank < shown_ranks:
                rows = computing if event.to < 0 else sending
                rows[event.rank].append((begin + float(event.start), begin + float(event.stop)))
        begin += float(found.makespan)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 0.8 + 0.26 * shown_ranks))
        ax = figure.add_subplot()
        for rows, low, height, colour, what in (
            (computing, -0.05, 0.45, COMPUTING, "computing"),
            (sending, -0.35, 0.25, WAITING, "sending"),
        ):
            for rank, spans in enumerate(rows):
                bars = [(start, stop - start) for start, stop in _merged(spans, begin / 2000)]
                ax.broken_barh(bars, (rank + low, height), facecolors=colour, label=None if rank else what)
        ax.set_yticks(range(shown_ranks), [f"rank {i}" for i in range(shown_ranks)])
        ax.invert_yaxis()
        ax.set_xlim(0, begin)
        ax.xaxis.set_major_formatter(lambda v, _: _round(v, "s") if v else "0")
        ax.grid(False, axis="y")
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        return svg(figure, name)


def _merged(spans: Sequence[Span], least: float) -> list[Span]:
    """Without overlaps, nor gaps too short to be seen."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1] + least:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


__all__ = ["memory", "over", "spent", "svg", "timeline"]
