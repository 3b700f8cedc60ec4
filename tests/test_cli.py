"""The commands as a user runs them: output and exit codes, once of a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from autosp.cli import app, parse_mesh

HERE = Path(__file__).parent
FACTORIES = HERE / "factories.py"


def autosp(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def check(*args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `autosp check ... --json`; anything else on standard output fails here."""
    done = autosp("check", *args, "--json")
    return done.exit_code, json.loads(done.stdout)


def test_a_process_says_nothing_but_json_of_a_factory_in_a_package_on_a_mesh() -> None:
    """The factory prints, also in the ranks. -P as for the installed script: the folder that one stands in is not searched."""
    args = ("check", "factories:shouting", "--mesh", "dp=2,sp=2", "--strategy", "gather-kv", "--json")
    command = [sys.executable, "-P", "-m", "autosp.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=HERE)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["mesh"], report["ranks"]) == (0, "exact", "dp=2,sp=2", 4), report
    assert [site["strategy"] for site in report["sites"]] == ["gather-kv"] and "building" in done.stderr


def test_a_factory_in_a_file_with_positional_inputs_is_exact_and_the_json_has_every_key() -> None:
    code, report = check(f"{FACTORIES}:positional", "--ranks", "2")
    assert (code, report["verdict"]) == (0, "exact"), report
    assert report["grad_rel_err"] <= 1e-9 and report["loss_rel_err"] <= 1e-9
    assert (report["ranks"], report["seq_len"], report["mesh"], report["dtype"]) == (2, 11, "sp=2", "float64")
    assert [set(site) for site in report["sites"]] == [{"name", "kind", "strategy"}]
    assert all(set(f) == {"op", "source_line", "bytes"} for f in report["fallbacks"])
    assert set(report["groups"]) == {"qkv", "out"}


def test_a_transformers_type_prints_a_table_and_exits_with_0() -> None:
    done = autosp("check", "qwen3", "--ranks", "2", "--seq-len", "37", "--batch", "1", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    for text in ("model.layers.1", "lm_head", "all gradients", "float32", "exact on 2 ranks (sp=2)"):
        assert text in done.stdout


def test_a_mismatch_exits_with_1() -> None:
    code, report = check(f"{FACTORIES}:doubling", "--ranks", "2")
    assert (code, report["verdict"]) == (1, "mismatch")
    assert report["grad_rel_err"] == pytest.approx(1.0) and report["loss_rel_err"] == pytest.approx(1.0)
    assert "gradients are off" in report["reason"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((f"{FACTORIES}:short", "--ranks", "4"), "3"),
        ((f"{FACTORIES}:breaking", "--ranks", "2"), "if loss > 0"),
        ((f"{FACTORIES}:dies", "--ranks", "2"), "died without a word"),
        ((f"{FACTORIES}:sleeps", "--ranks", "2", "--timeout", "2"), "no answer from rank 0, 1 within 2 s"),
        (("no_such_family", "--ranks", "1"), "Give a transformers model type (llama"),
        (("llama", "--ranks", "2", "--strategy", "telepathy"), "telepathy"),
    ],
)
def test_a_refusal_exits_with_2_and_says_why(args: tuple[str, ...], reason: str) -> None:
    code, report = check(*args)
    assert (code, report["verdict"]) == (2, "refused")
    assert reason in report["reason"]
    assert report["grad_rel_err"] is None and report["sites"] == []


@pytest.mark.parametrize(
    "args",
    [("check",), ("check", "llama", "--dtype", "int8"), ("check", "llama", "--mesh", "tp=2"), ("check", "llama", "--ranks", "0")],
)
def test_usage_errors_exit_with_2(args: tuple[str, ...]) -> None:
    done = autosp(*args)
    assert done.exit_code == 2 and "Usage:" in done.stderr


def test_the_mesh_option() -> None:
    assert parse_mesh(None, None) == {"sp": 4}
    assert parse_mesh(None, 3) == {"sp": 3}
    assert list(parse_mesh("dp=2, sp=3", None).items()) == [("dp", 2), ("sp", 3)]
    assert parse_mesh("sp=2", 2) == {"sp": 2}
    for text, ranks in (("sp=2", 3), ("sp=2,dp=2", None), ("2", None), ("sp=x", None), ("sp=0", None), ("", None)):
        with pytest.raises(typer.BadParameter):
            parse_mesh(text, ranks)


def test_the_demo_compares_two_runs_and_saves_the_curves(tmp_path: Path) -> None:
    done = autosp("demo", "--steps", "2", "--seq-len", "128", "--ranks", "2", "--out", str(tmp_path / "curve.png"))
    assert done.exit_code == 0, done.output
    assert "autosp plan" in done.stdout
    last = done.stdout.rstrip().replace("\n", " ").split("largest relative difference")[-1]
    loss, grads = (float(word) for word in last.replace(",", " ").split() if word[0].isdigit() and "e" in word)
    assert loss < 1e-5 and grads < 1e-4
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
