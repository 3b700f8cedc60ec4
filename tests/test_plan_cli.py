"""`autosp plan`, `explain` and `diff`: what they print, what they write, how they refuse."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from factories import Attention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step
from typer.testing import CliRunner

import autosp
from autosp.cli import app
from autosp.cost_model.plan import Plan, PlanError
from autosp.cost_model.retold import kept
from pool import Pool

FACTORIES = Path(__file__).parent / "factories.py"
MILLION = 1 << 20
# Few heads, so that 64 ranks have too many: what a plan must say the price of.
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
}  # fmt: skip


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)


def planned(where: Path, name: str, *args: object) -> tuple[Result, Plan]:
    """What `autosp plan` prints, and the plan it wrote."""
    result = run("plan", *args, "--json", where / f"{name}.json")
    assert result.exit_code == 0, result.output
    return result, Plan.from_json((where / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


@pytest.fixture(scope="module")
def million(where: Path) -> tuple[Result, Plan]:
    args = (where, "--seq-len", "1M", "--ranks", 64, "--hardware", "h200", "--html", where / "million.html")
    return planned(where, "million", *args)


# plan -------------------------------------------------------------------------------------------


def test_one_row_for_layers_that_are_alike_then_the_step(million: tuple[Result, Plan]) -> None:
    result, plan = million
    assert plan.sequence == (MILLION,) and plan.mesh == {"dp": 1, "sp": 64} and plan.node == 8 and plan.hardware == "h200"
    lines = [line for line in result.output.splitlines() if line.startswith("│ model.layers.")]
    assert len(lines) == 1 and "model.layers.0-1.self_attn" in lines[0] and "softmax attention" in lines[0]
    for text in (plan.fingerprint, "sequence 1M", plan.sites[0].strategy, "best alternative", "step", "tokens/s a device", "%"):
        assert text in result.output, text


def test_too_few_heads_are_said_where_they_cost(million: tuple[Result, Plan]) -> None:
    """2 key/value heads never drive an all-to-all of 64 ranks without its price and the reason."""
    _, plan = million
    (line,) = {line for line in str(plan).splitlines() if "not all-to-all" in line}
    assert re.search(r"not all-to-all: takes [\d.]+ times as long \([\d.]+ m?s, [\d.]+ [MG]B\)", line), line
    assert "8 heads leave 56 of 64 ranks without one" in line and "each of 2 key/value heads goes to 4 of 64 ranks" in line


def test_the_json_has_every_key_and_comes_back(million: tuple[Result, Plan], where: Path) -> None:
    _, plan = million
    raw = json.loads((where / "million.json").read_text())
    assert {"layout", "sites", "totals", "hardware", "mesh", "fingerprint"} <= set(raw)
    assert [site["name"] for site in raw["sites"]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for site in raw["sites"]:
        assert {"name", "kind", "strategy", "params", "seconds", "bytes_sent", "saved", "rejected"} <= set(site)
        assert set(site["seconds"]) == {"compute", "communication", "exposed"}
        assert all({"strategy", "seconds", "reason"} <= set(r) and r["reason"] for r in site["rejected"])
    assert {"step_s", "tokens_per_s_per_device", "efficiency", "peak_bytes"} <= set(raw["totals"])
    assert plan.to_json() == Plan.from_json(plan.to_json()).to_json()


def test_totals_are_those_of_the_rows(million: tuple[Result, Plan]) -> None:
    _, plan = million
    totals = plan.totals
    assert totals is not None
    assert sum(s.seconds.total for s in plan.sites) < totals.step_s and 0 < totals.efficiency <= 1
    assert totals.tokens_per_s_per_device == pytest.approx(MILLION / 64 / totals.step_s)
    assert sum(kept(plan).values()) <= totals.activation_bytes <= totals.peak_bytes


def test_options_reach_the_plan(where: Path) -> None:
    args = (where, "--seq-len", "32K", "--mesh", "dp=2,sp=8", "--hardware", "h100", "--per-node", 4, "--batch", 3)
    result, plan = planned(where, "options", *args, "--strategy", "gather-kv", "--dtype", "float32", "--memory", "40GiB")
    assert plan.sites[0].batch == 3 and plan.sequence == (1 << 15,) and plan.mesh == {"dp": 2, "sp": 8}
    assert {s.strategy for s in plan.sites} == {"gather-kv"} and "8 ranks x 2 data-parallel" in result.output
    assert plan.node == 4 and plan.beside is not None and plan.beside.dtype == "float32"
    assert plan.totals is not None and plan.totals.budget_bytes < 40 * 2**30
    assert run("explain", where / "options.json").exit_code == 0


def test_the_report_is_one_page_with_plots(million: tuple[Result, Plan], where: Path) -> None:
    text = (where / "million.html").read_text()
    assert not re.search(r"https?:|<script|<link|<img|@import|url\((?!#)", text)
    assert text.count("<svg") == 5 and "currentColor" in text and "prefers" not in text.partition("<body>")[2]
    for said in (
        "<table>",
        million[1].fingerprint,
        "model.layers.0-1.self_attn",
        "times as long",
        "sending",
        "rank 7",
        "peak",
        "ring-a2a",
    ):
        assert said in text, said
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', text)) <= set(ids)


# A plan made before --------------------------------------------------------------------------------


class Two(nn.Module):
    """Another model: its attentions have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def given(mesh: DeviceMesh, file: str, make: Callable[[], nn.Module]) -> tuple[float, str, str]:
    """The largest error of a step that follows a plan, its fingerprint, and the strategy it took."""
    plain, x = make().double(), torch.randn(2, 10, 12, dtype=torch.float64)
    parallel = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager", plan=file)
    loss = abs(step(parallel, {"x": x}) - step(plain, {"x": x}))
    plan = parallel.autosp_plan
    return max(loss, gradient_error(plain, parallel)), plan.fingerprint, plan.sites[0].strategy


def test_a_plan_given_back_is_followed_and_exact(pool: Pool, where: Path) -> None:
    args = (f"{FACTORIES}:attention", "--ranks", 2, "--hardware", "h200", "--dtype", "float64", "--strategy", "balanced-ring")
    _, plan = planned(where, "small", *args)
    for error, fingerprint, strategy in pool.run(given, str(where / "small.json"), Attention, on=2):
        assert error < EXACT and fingerprint == plan.fingerprint and strategy == "balanced-ring"


@pytest.mark.parametrize(("ranks", "make", "reason"), [(3, Attention, "for 2 ranks"), (2, Two, "another model")])
def test_a_plan_for_something_else_is_refused(pool: Pool, where: Path, ranks: int, make: Any, reason: str) -> None:
    planned(where, "small", f"{FACTORIES}:attention", "--ranks", 2, "--hardware", "h200", "--dtype", "float64")
    with pytest.raises(PlanError, match=reason):
        pool.run(given, str(where / "small.json"), make, on=ranks)


# explain ------------------------------------------------------------------------------------------


def test_explain_has_formulas_numbers_sources_and_crossings(million: tuple[Result, Plan], where: Path) -> None:
    result = run("explain", where / "million.json", "--layer", 1)
    assert result.exit_code == 0, result.output
    for text in (
        "model.layers.0-1.self_attn (2): softmax attention by ring-a2a",
        "2⋅B⋅N⋅(D + Dᵥ)",
        "forward: ",
        "hidden, taken off",
        "NVIDIA H200 datasheet",
        "counted from the mask",
        "of the model",
        "best alternative: ",
        "between nodes (",
        "inside a node",
        "P = ",
    ):
        assert text in result.output, text
    assert re.search(r"wins (below|from) [\d.,]+ [GM]B/s between nodes \((solved|found by bisection)", result.output)


def test_explain_says_which_layers_there_are(million: tuple[Result, Plan], where: Path) -> None:
    result = run("explain", where / "million.json", "--layer", 7)
    assert result.exit_code == 2 and result.stderr == "error: the plan has no attention in layer 7; fix: one of 0 to 1\n"


def test_explain_wants_the_machine_that_was_planned_for(million: tuple[Result, Plan], where: Path) -> None:
    result = run("explain", where / "million.json", "--hardware", "a100")
    assert result.exit_code == 2 and "was made with other numbers; fix: --hardware" in result.stderr


# diff ---------------------------------------------------------------------------------------------


def test_diff_of_the_same_decisions(million: tuple[Result, Plan], where: Path) -> None:
    _, plan = million
    assert plan.totals is not None
    slower = dataclasses.replace(plan, totals=dataclasses.replace(plan.totals, step_s=2 * plan.totals.step_s), hardware="h300")
    (where / "slower.json").write_text(slower.to_json())
    result = run("diff", where / "million.json", where / "slower.json")
    assert result.exit_code == 0 and "the same decisions" in result.output
    assert "h300" in result.output and "2 sites are the same in both" in result.output
    assert (
        run("diff", where / "million.json", where / "million.json").output == "2 sites are the same in both\nthe same decisions\n"
    )


def test_diff_of_other_decisions(million: tuple[Result, Plan], where: Path) -> None:
    _, plan = million
    ring = {"strategy": "ring", "params": {}, "bytes_forward": 1}
    changed = (plan.sites[0], dataclasses.replace(plan.sites[1], **ring))
    (where / "other.json").write_text(dataclasses.replace(plan, sites=changed, layout="contiguous").to_json())
    result = run("diff", where / "million.json", where / "other.json")
    assert result.exit_code == 1 and "other decisions" in result.output and "1 sites are the same" in result.output
    assert re.search(r"model.layers.1.self_attn +│ ring-a2a \(inner \d+\) → ring", result.output), result.output
    assert re.search(r"layout +│ head-tail +│ contiguous", result.output)


# Refusals -----------------------------------------------------------------------------------------

MODEL = ("plan", str(FACTORIES) + ":attention", "--hardware", "h200")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("plan", "llamma", "--ranks", 4, "--hardware", "h200"), "did you mean llama"),
        (("plan", "no.such:factory", "--ranks", 4, "--hardware", "h200"), "cannot import no.such"),
        (("plan", "llama", "--ranks", 4, "--hardware", "h20"), "did you mean 'h200'? known: a100-40"),
        (("plan", "llama", "--ranks", 4, "--hardware", "none.toml"), "fix: `autosp calibrate --out none.toml`"),
        ((*MODEL, "--ranks", 64, "--mesh", "dp=3"), "64 ranks do not divide into dp=3; fix: dp=2 or dp=4"),
        ((*MODEL, "--ranks", 64, "--mesh", "dp=8,sp=16"), "dp=8,sp=16 has 128 ranks, --ranks says 64; fix: --ranks 128"),
        ((*MODEL, "--mesh", "tp=8"), "'tp=8' is no mesh; fix: sp=64, or dp=8,sp=64"),
        ((*MODEL, "--ranks", 12), "12 ranks do not divide into nodes of 8; fix: 8 or 16 ranks"),
        (MODEL, "over how many ranks? fix: --ranks 64"),
        (
            (*MODEL, "--ranks", 4, "--seq-len", "1Q"),
            "'1Q' is no sequence length; fix: a number of positions such as 131072, 128K or 1M",
        ),
        ((*MODEL, "--ranks", 4, "--memory", "much"), "'much' is no amount of memory; fix: bytes, or a number with kB"),
        ((*MODEL, "--ranks", 4, "--dtype", "int8"), "dtype 'int8' is not one of bfloat16"),
        ((*MODEL, "--ranks", 4, "--strategy", "telepathy"), "'telepathy' is not known; choose from"),
        ((*MODEL, "--ranks", 64), "10 positions, fewer than the 64 ranks"),
        ((*MODEL, "--ranks", 2, "--memory", "1000"), "parameters, gradients and Adam's moments alone take"),
        (
            ("explain", "nothing.json"),
            "cannot read the plan nothing.json: No such file or directory; fix: `autosp plan MODEL --json",
        ),
        (("diff", FACTORIES, FACTORIES), "this is not a plan that autosp wrote"),
    ],
)
def test_a_refusal_is_one_message_with_its_fix(args: tuple[Any, ...], reason: str) -> None:
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == ""
    assert reason in result.stderr and result.stderr.startswith("error: "), result.stderr
    assert "Traceback" not in result.stderr and ("fix: " in result.stderr or "choose from" in result.stderr), result.stderr


def test_a_number_that_a_machine_lacks(where: Path) -> None:
    from autosp.cost_model.hardware import load, to_toml

    machine = load("h200")
    peak = {key: n for key, n in machine.peak.items() if key != "float16"}
    (where / "half.toml").write_text(to_toml(dataclasses.replace(machine, peak=peak)))
    result = run("plan", where, "--ranks", 8, "--hardware", where / "half.toml", "--dtype", "float16")
    assert result.exit_code == 2 and "has no peak.float16" in result.stderr and "fix: add it to the table" in result.stderr


def test_what_does_not_fit_says_what_would(where: Path) -> None:
    result = run("plan", where, "--seq-len", "4M", "--ranks", 8, "--hardware", "h200", "--memory", "1GB")
    assert result.exit_code == 2 and result.stdout == ""
    needs = re.search(
        r"the plan needs ([\d.]+) GB a device, 1.0 GB are there; fix: a sequence of about (\d+) positions, or about (\d+) ranks",
        result.stderr,
    )
    assert needs is not None, result.stderr
    assert float(needs[1]) > 1 and 0 < int(needs[2]) < 4 * MILLION and int(needs[3]) > 8


def test_a_changed_plan_and_an_unwritable_file(million: tuple[Result, Plan], where: Path) -> None:
    text = (where / "million.json").read_text()
    (where / "changed.json").write_text(text.replace("head-tail", "contiguous"))
    assert "the plan was changed" in run("explain", where / "changed.json").stderr
    (where / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert run("diff", where / "binary.json", where / "million.json").exit_code == 2
    result = run(*MODEL, "--ranks", 2, "--json", where / "no" / "such.json")
    assert result.exit_code == 2 and "cannot write" in result.stderr and "fix: " in result.stderr
