"""Families with recurrences, as transformers has them, run exactly in parallel under every strategy."""

from __future__ import annotations

import pytest
from conftest import FULL
from test_zoo import run, run_all

from autosp import check, zoo
from autosp.passes.recurrence import RECURRENT
from pool import Pool

LENGTHS = (96, 101)
NAMED = ("qwen3_next", "mamba2", "nemotron_h", "bamba", "granitemoehybrid", "lfm2", "falcon_h1", "minimax", "olmo_hybrid")
WITHOUT = ("lfm2",)  # short convolutions only
STRATEGIES = (*RECURRENT, "ring")
TURNS = (("all-scan", "log-step", "ring"), ("gather-states", "all-to-all", "two-level"))


def every_strategy() -> list[tuple[str, int, int]]:
    """(family, ranks, length): each once, on 2, 3 or 4 ranks in turn."""
    if FULL:
        return [(f, r, s) for f in zoo.LINEAR_FAMILIES for r in (1, 2, 3, 4) for s in LENGTHS]
    return [(family, 2 + i % 3, LENGTHS[i % 2]) for i, family in enumerate(NAMED)]


@pytest.mark.parametrize(("family", "ranks", "length"), every_strategy())
def test_families_are_exact_under_every_strategy(pool: Pool, family: str, ranks: int, length: int) -> None:
    strategies = STRATEGIES if FULL else TURNS[ranks % 2]
    everyone = pool.run(run_all, family, length, strategies, on=ranks, timeout=280)
    tolerance = check.GRAD_TOLERANCE[zoo.default_dtype(family)]
    assert {s: e for rank in everyone for s, (e, _) in rank.items() if not e <= tolerance} == {}
    for strategy, (_, plan) in everyone[0].items():
        linear = [site for site in plan.sites if site.kind == "linear attention"]
        assert bool(linear) == (family not in WITHOUT), plan
        assert plan.fallbacks == (), plan
        if strategy in RECURRENT:
            assert all(site.strategy == strategy or site.note for site in linear), plan


@pytest.mark.parametrize(
    ("family", "strategy", "memory"),
    [("qwen3_next", "all-scan", "attention"), ("mamba2", None, "full"), ("falcon_h1", "gather-states", "none")],
)
def test_families_are_exact_the_whole_way(pool: Pool, family: str, strategy: str | None, memory: str) -> None:
    """Through PyTorch's partitioner."""
    report = pool.run(run, family, 101, strategy, memory, on=2, timeout=280)[0]
    assert report.verdict == "exact", report
