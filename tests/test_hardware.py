"""Tables of machines: all numbers are there with unit and source, mistakes are named, and files come back as they went out."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autosp.cli import app
from autosp.cost_model import work
from autosp.cost_model.hardware import ALIASES, KERNELS, Hardware, HardwareError, Number, from_dict, load, names, to_toml
from autosp.tables import shown

GPUS = ("a100-40", "a100-80", "b200", "h100", "h200", "l40s", "mi300x")
UNIT_OF = {
    "memory": "B", "bandwidth": "B/s", "overlap": "share", "peak": "FLOP/s", "efficiency": "share", "launch": "s",
    "latency": "s", "message": "s", "alone": "times", "host": "B/s",
}  # fmt: skip


def raw(name: str = "h100") -> dict[str, Any]:
    return tomllib.loads(to_toml(load(name)))


def test_the_machines_that_we_promise_are_there() -> None:
    assert set(GPUS) <= set(names())
    assert all(load(short) == load(long) for short, long in ALIASES.items())
    assert load("H100") == load("h100")


@pytest.mark.parametrize("name", names())
def test_every_number_has_its_unit_and_a_source(name: str) -> None:
    machine = load(name)
    numbers = dict(machine.numbers())
    assert len(numbers) >= 25 and machine.name == name and machine.description
    for place, number in numbers.items():
        last, first = place.rpartition(".")[2], place.partition(".")[0]
        assert number.unit == (UNIT_OF.get(first) or UNIT_OF[last]), place
        assert len(number.source) > 10, place
        assert number.value > 0 or last in ("latency", "message", "overlap"), place
    assert set(machine.efficiency) == set(machine.launch) == set(KERNELS)
    assert {"bfloat16", "float16", "float32", "float64"} == set(machine.peak)


@pytest.mark.parametrize("name", GPUS)
def test_ratios_are_those_of_real_machines(name: str) -> None:
    machine = load(name)
    rate = {k: machine.rate(k, "bfloat16") for k in KERNELS}
    assert rate["matmul"] > rate["attention_forward"] > rate["attention_backward"] > rate["linear_forward"] > 0
    assert machine.peak["bfloat16"] == dataclasses.replace(machine.peak["float16"], source=machine.peak["bfloat16"].source)
    assert 100 < machine.peak["bfloat16"].value / machine.bandwidth.value < 600, "FLOP a byte of memory"
    assert 2 < machine.peak["bfloat16"].value / machine.peak["float32"].value < 50
    node, *wider = machine.levels
    assert node.ranks == 8 and [level.name for level in machine.levels][-1] == "cluster" and machine.levels[-1].ranks == 0
    for level in wider:
        assert node.link("all_to_all").bandwidth.value * node.ports > level.link("all_to_all").bandwidth.value
        assert node.link("p2p").message.value < level.link("p2p").message.value
    for level in machine.levels:
        assert all(link.latency.value + link.message.value < 1e-4 for link in level.links.values())


def test_newer_machines_are_faster() -> None:
    order = [load(name) for name in ("a100-80", "h100", "h200", "b200")]
    for earlier, later in itertools.pairwise(order):
        assert earlier.bandwidth.value < later.bandwidth.value and earlier.memory.value <= later.memory.value
        assert earlier.rate("attention_forward", "bfloat16") <= later.rate("attention_forward", "bfloat16")
    assert load("a100-40").memory.value < load("a100-80").memory.value


@pytest.mark.parametrize("name", names())
def test_a_table_is_read_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.toml"
    path.write_text(to_toml(load(name)))
    assert load(path) == load(str(path)) == load(name)


def test_prefixes_move_the_decimal_point() -> None:
    given = raw()
    given["memory"] = {"value": 80.5, "unit": "GB", "source": "a book"}
    given["launch"]["matmul"] = {"value": 4.7, "unit": "us", "source": "a book"}
    machine = from_dict(given, "h100")
    assert machine.memory == Number(80.5e9, "B", "a book")
    assert machine.seconds_per_call("matmul") == 4.7e-6


# Levels -------------------------------------------------------------------------------------------


def test_the_nearest_level_that_connects_all_ranks_is_taken() -> None:
    machine = load("h100")
    assert [machine.level(n).name for n in (2, 8, 9, 256, 257, 100_000)] == ["node", "node", "pod", "pod", "cluster", "cluster"]
    assert machine.node == 8 and machine.with_node(4).node == 4
    assert machine.with_node(4).level(5).name == "pod"


def test_a_collective_that_is_not_given_has_the_nearest_one_s_link() -> None:
    node = load("h100").levels[0]
    assert node.link("reduce_scatter") == node.links["all_gather"]
    bare = dataclasses.replace(node, links={"p2p": node.links["p2p"]})
    assert bare.link("reduce_scatter") == bare.link("all_to_all") == node.links["p2p"]


def test_more_ranks_than_a_machine_connects() -> None:
    machine = load("h100")
    small = dataclasses.replace(machine, levels=machine.levels[:1])
    with pytest.raises(HardwareError, match=r"h100 connects 8 ranks, 16 were asked for; fix: add a level"):
        small.level(16)


# Mistakes -----------------------------------------------------------------------------------------


def test_an_unknown_machine() -> None:
    with pytest.raises(
        HardwareError, match=r"no hardware is called 'h10'; did you mean 'h100'\? known: a100-40, .*fix: one of these"
    ):
        load("h10")
    with pytest.raises(HardwareError, match=r"no hardware is called 'zzz'; known: a100-40"):
        load("zzz")


def test_a_file_that_is_missing_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(
        HardwareError, match=r"no such hardware file: .*mine.toml; fix: `autosp calibrate --out .*mine.toml` writes one"
    ):
        load(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text("name = ")
    with pytest.raises(HardwareError, match=r"mine.toml is not TOML: "):
        load(tmp_path / "mine.toml")


def test_a_number_that_a_table_lacks() -> None:
    machine = load("h100")
    few = dataclasses.replace(machine, peak={"bfloat16": machine.peak["bfloat16"]}, launch={})
    with pytest.raises(
        HardwareError, match=r"h100 has no peak.float64 \(it has bfloat16\); fix: add it .* or measure it with `autosp calib"
    ):
        few.rate("matmul", "float64")
    with pytest.raises(HardwareError, match=r"has no efficiency.sort"):
        few.rate("sort", "bfloat16")
    with pytest.raises(HardwareError, match=r"has no launch.matmul \(it has none\)"):
        few.seconds_per_call("matmul")


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: Any) -> None:
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: Any) -> None:
        for key in keys[:-1]:
            table = table[key]
        del table[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("memory"), r"hardware mine lacks memory"),
        (drop("peak"), r"hardware mine lacks peak"),
        (drop("overlap", "source"), r"overlap needs a value, a unit and a source, it is \{"),
        (put("overlap", "source", value=" "), r"overlap needs a value, a unit and a source"),
        (put("memory", value=80e9), r"memory needs a value, a unit and a source, it is 8"),
        (put("memory", "value", value="80"), r"memory needs a value, a unit and a source"),
        (put("memory", "unit", value="GiB"), r"memory is in 'GiB'; fix: B, or that with a prefix, such as G or u"),
        (put("launch", "matmul", "unit", value="FLOP/s"), r"launch.matmul is in 'FLOP/s'; fix: s, or"),
        (put("overlap", "value", value=1.5), r"overlap is 1.5, which is no share"),
        (put("bandwidth", "value", value=0), r"bandwidth is 0, which is no amount"),
        (put("bandwidth", "value", value=float("nan")), r"bandwidth is nan, which is no amount"),
        (put("peak", "bf16", value={}), r"peak.bf16 is not known; .*known: bfloat16"),
        (put("efficiency", "attention_foward", value={}), r"attention_foward is not known; did you mean 'attention_forward'\?"),
        (drop("levels", 0, "p2p"), r"level 'node' needs a name, ranks \(0: .*\), a table p2p and at most all_to_all"),
        (drop("levels", 0, "ranks"), r"level 'node' needs a name, ranks"),
        (put("levels", 0, "all_two_all", value={}), r"it has .*all_two_all"),
        (drop("levels", 1, "all_gather", "message"), r"pod.all_gather.message needs a value, a unit and a source, it is None"),
    ],
)
def test_mistakes_in_a_table_are_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    given = raw()
    change(given)
    with pytest.raises(HardwareError, match=message):
        from_dict(given, "mine")


# Work ---------------------------------------------------------------------------------------------


def test_work_is_counted_as_the_formulas_say() -> None:
    assert work.matmul(2, 3, 5) == 60
    assert [work.pairs(3, 3, True), work.pairs(5, 3, True), work.pairs(3, 5, True), work.pairs(3, 5, False)] == [6, 12, 6, 15]
    assert work.pairs(5, 3, True) == sum(j <= i for i in range(5) for j in range(3))
    assert work.attention_forward(2, 3, 8, 16, 10) == 2 * 2 * 3 * 24 * 10
    assert work.attention_backward(2, 3, 8, 16, 10) == 2 * 2 * 3 * (3 * 8 + 2 * 16) * 10
    assert work.linear_forward(1, 2, 64, 16, 32) == 2 * 64 * (2 * 64 * 48 + 4 * 16 * 32)
    assert work.linear_backward(1, 2, 64, 16, 32) == 2.5 * work.linear_forward(1, 2, 64, 16, 32)
    assert work.linear_forward(1, 2, 64, 16, 32, remove=True) > work.linear_forward(1, 2, 64, 16, 32)


@pytest.mark.parametrize(
    ("collective", "messages", "sent"),
    [("p2p", 1, 800), ("all_to_all", 3, 600), ("all_gather", 3, 2400), ("all_reduce", 6, 1200), ("reduce_scatter", 3, 600)],
)
def test_messages_and_bytes_of_a_collective_among_four_ranks(collective: str, messages: int, sent: int) -> None:
    assert (work.messages(collective, 4), work.sent(collective, 800, 4)) == (messages, sent)


# The command --------------------------------------------------------------------------------------


def hardware(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["hardware", *args], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_the_command_lists_machines_and_shows_one() -> None:
    code, text = hardware()
    assert code == 0 and all(name in text for name in names()) and "989 TFLOP/s bfloat16" in text
    code, text = hardware("h100-sxm")
    assert code == 0
    for part in (
        "efficiency.attention_forward",
        "0.55",
        "2407.08608",
        "node.p2p.bandwidth",
        "371 GB/s",
        "256 ranks",
        "1 port a rank",
    ):
        assert part in text, text
    code, text = hardware("h10")
    assert code == 2 and "did you mean 'h100'?" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3.35e12, "B/s", "3.35 TB/s"), (8.4e-6, "s", "8.40 µs"), (0.0, "s", "0 s"), (0.9, "share", "0.9"), (80e9, "B", "80.0 GB"),
        (1.2, "s", "1.20 s"),
    ],
)  # fmt: skip
def test_numbers_are_shown_with_a_prefix(value: float, unit: str, text: str) -> None:
    assert shown(Number(value, unit, "")) == text


def test_every_number_is_in_the_shown_table() -> None:
    machine: Hardware = load("l40s")
    _, text = hardware("l40s")
    assert all(place in text for place, _ in machine.numbers())
