"""Calibration: fits find what made the timings, and what is measured is a table that can be read."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autosp.calibrate import calibrate, fit, hardware
from autosp.cost_model import work
from autosp.cost_model.hardware import COLLECTIVES, KERNELS, Hardware, HardwareError, load, to_toml
from autosp.measure import Call, Samples, Settings, Transfer, measured, partitions
from pool import Pool

QUICK = Settings(
    rounds=1,
    seconds=0.002,
    matmul=((32, 32, 32), (128, 128, 128)),
    attention=((1, 64, 64, 32, False), (2, 128, 128, 32, True)),
    linear=((1, 64, 32, 32), (2, 128, 32, 32)),
    pointwise=1 << 20,
    messages=(1 << 10, 1 << 16, 1 << 18),
)


# Fits ---------------------------------------------------------------------------------------------


def test_a_fit_recovers_what_made_the_timings() -> None:
    rows = [(1, messages, size) for messages in (1, 3, 7) for size in (10.0, 1e4, 1e6, 1e8)]
    true = (2e-5, 3e-6, 1 / 5e9)
    seconds = [sum(c * x for c, x in zip(true, row, strict=True)) * (1.02 if i % 2 else 0.98) for i, row in enumerate(rows)]
    found, error = fit(rows, seconds)
    assert found == pytest.approx(true, rel=0.1)
    assert 0 < error < 0.03


def test_a_fit_has_no_negative_coefficients() -> None:
    found, _ = fit([(1, 1.0), (1, 10.0), (1, 100.0)], [1.0, 20.0, 300.0])  # a straight line would start below 0
    assert found[0] == 0 and found[1] > 0


LAUNCH, RATES = 2e-5, dict(zip(KERNELS, (50e9, 30e9, 20e9, 10e9, 12e9), strict=True))
LATENCY, MESSAGE, BANDWIDTH = 1e-4, 4e-5, 2e9


def synthetic(counts: tuple[int, ...]) -> Samples:
    """Timings of a machine that is exactly as the formulas say."""

    def transfers(kind: str) -> list[Transfer]:
        found = []
        for ranks in counts[-1:] if kind == "p2p" else counts:
            for size in (1 << 10, 1 << 16, 1 << 20, 1 << 22):
                messages, sent = work.messages(kind, ranks), work.sent(kind, size, ranks)
                seconds = LATENCY * (kind != "p2p") + messages * MESSAGE + sent / BANDWIDTH
                found.append(Transfer(ranks, messages, sent, seconds))
        return found

    return Samples(
        kernels={k: [Call("a shape", f, LAUNCH + f / RATES[k]) for f in (10**4, 10**6, 10**8, 10**9)] for k in KERNELS},
        links={"node": {kind: transfers(kind) for kind in COLLECTIVES}},
        reach={"node": counts[-1]},
        pointwise=(300, 100 / 3e9),
        overlap=0.75,
        memory=8 << 30,
        others=0.0,
        sharing=2.0,
        device="a CPU",
        dtype="float32",
        dtypes={"float64": 0.5},
        how="4 ranks at once",
        host=(1000, 100e-9),
    )


def test_a_table_has_what_made_the_timings() -> None:
    found = hardware(synthetic((2, 4)), "mine", "2026-11-30")
    assert {k: found.rate(k, "float32") for k in KERNELS} == pytest.approx(RATES, rel=1e-3)
    assert {k: found.seconds_per_call(k) for k in KERNELS} == pytest.approx(dict.fromkeys(KERNELS, LAUNCH), rel=1e-3)
    assert found.peak["float32"].value == pytest.approx(50e9, rel=1e-3) and found.efficiency["matmul"].value == 1
    assert found.peak["float64"].value == pytest.approx(25e9, rel=1e-3)
    assert found.bandwidth.value == pytest.approx(9e9, rel=1e-3)
    assert found.overlap.value == pytest.approx(0.75) and found.alone.value == 2
    assert found.host is not None and found.host.value == pytest.approx(10e9, rel=1e-3)
    assert found.level(4).ranks == 4
    for kind, link in found.levels[0].links.items():
        assert link.latency.value == pytest.approx(LATENCY if kind != "p2p" else 0, rel=1e-2), kind
        assert link.message.value == pytest.approx(MESSAGE, rel=1e-2), kind
        assert link.bandwidth.value == pytest.approx(BANDWIDTH, rel=1e-2), kind
        assert "median error 0%" in link.latency.source and "measured 2026-11-30, 4 ranks at once" in link.latency.source
    assert "among 2 and 4 ranks" in found.levels[0].link("all_to_all").message.source


def test_with_one_number_of_ranks_a_message_is_a_hop_s() -> None:
    found = hardware(synthetic((2,)), "mine", "2026-11-30").levels[0]
    for kind, link in found.links.items():
        calls = (kind != "p2p") * LATENCY + work.messages(kind, 2) * MESSAGE
        assert link.latency.value + work.messages(kind, 2) * link.message.value == pytest.approx(calls, rel=1e-2), kind
        assert link.message.value == pytest.approx(MESSAGE, rel=1e-2), kind
    assert "one number of ranks: a message is taken to cost what a hop does" in found.link("all_gather").message.source


def test_a_table_says_when_others_used_the_machine() -> None:
    found = hardware(dataclasses.replace(synthetic((2, 4)), others=0.3), "mine", "2026-11-30")
    assert "while other processes had 30% of the cores" in found.peak["float32"].source


# Groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "local"), [(2, 2), (4, 4), (6, 6), (3, 3), (4, 1), (8, 4), (6, 2)])
def test_groups_cover_all_ranks_once(ranks: int, local: int) -> None:
    found = partitions(ranks, local)
    assert list(found) == ["node"] * (local > 1) + ["cluster"] * (local < ranks)
    for kinds in found.values():
        assert set(kinds) == set(COLLECTIVES) and len(kinds["p2p"]) == 1
        for choices in kinds.values():
            for parts in choices:
                assert sorted(r for part in parts for r in part) == list(range(ranks))
                assert len({len(part) for part in parts}) == 1


def test_groups_of_two_nodes() -> None:
    found = partitions(8, 4)
    assert found["node"]["p2p"] == [((0, 1, 2, 3), (4, 5, 6, 7))]
    assert found["node"]["all_gather"][0] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found["cluster"]["all_to_all"] == [((0, 4), (1, 5), (2, 6), (3, 7))], "ranks of different nodes only"
    assert found["cluster"]["all_gather"] == [(tuple(range(8)),)]


# Real ranks ---------------------------------------------------------------------------------------


def check(found: Hardware, path: Path, levels: list[tuple[str, int]]) -> None:
    path.write_text(to_toml(found))
    assert load(path) == found
    assert [(level.name, level.ranks) for level in found.levels] == levels
    assert set(found.efficiency) == set(found.launch) == set(KERNELS)
    assert set(found.peak) == {"float32", "float64", "bfloat16", "float16"}
    for place, number in found.numbers():
        assert math.isfinite(number.value) and number.value >= 0, place
        assert number.value > 0 or place.rpartition(".")[2] in ("latency", "message", "overlap") or place.startswith("launch"), (
            place
        )
        assert "measured" in number.source and torch.__version__ in number.source, place
    assert all(level.link(kind).bandwidth.value > 1e5 for level in found.levels for kind in COLLECTIVES)


def test_two_ranks_of_this_machine(tmp_path: Path) -> None:
    found = calibrate(2, "quick", settings=QUICK)
    assert found is not None
    check(found, tmp_path / "quick.toml", [("node", 2)])
    assert "2 ranks at once, gloo" in found.description


def on_rank(mesh: DeviceMesh, local: int) -> Samples:
    return measured(QUICK, "float32", torch.device("cpu"), local)


def test_two_nodes_of_two_ranks(pool: Pool, tmp_path: Path) -> None:
    samples = pool.run(on_rank, 2)
    assert samples[0].links == samples[1].links and samples[0].kernels == samples[3].kernels, (
        "all ranks know the slowest one's time"
    )
    check(hardware(samples[0], "nodes", "2026-11-30"), tmp_path / "nodes.toml", [("node", 2), ("cluster", 4)])


def test_one_launched_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(HardwareError, match="one rank has no links to measure; fix: launch two or more"):
        calibrate(4, "mine")
