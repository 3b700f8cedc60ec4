"""The commands as a user runs them: output and exit codes of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from autosp.cli import parse_mesh

HERE = Path(__file__).parent
FACTORIES = HERE / "factories.py"


def autosp(*args: str, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    # -P as for the installed script: the folder one happens to stand in is not searched for packages.
    command = [sys.executable, "-P", "-m", "autosp.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)


def check(*args: str, cwd: Path = HERE) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `autosp check ... --json`; anything else on standard output fails here."""
    done = autosp("check", *args, "--json", cwd=cwd)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_factory_in_a_file_is_exact_and_the_json_has_every_key() -> None:
    code, report = check(f"{FACTORIES}:shouting", "--ranks", "2")
    assert (code, report["verdict"]) == (0, "exact"), report
    assert report["grad_rel_err"] <= 1e-9 and report["loss_rel_err"] <= 1e-9
    assert (report["ranks"], report["seq_len"], report["mesh"], report["dtype"]) == (2, 10, "sp=2", "float64")
    assert [set(site) for site in report["sites"]] == [{"name", "kind", "strategy"}]
    assert all(set(f) == {"op", "source_line", "bytes"} for f in report["fallbacks"])
    assert set(report["groups"]) == {"qkv", "out"}


def test_a_factory_in_a_package_positional_inputs_a_strategy_and_a_mesh() -> None:
    code, report = check("factories:positional", "--mesh", "dp=2,sp=2", "--strategy", "gather-kv")
    assert (code, report["verdict"], report["mesh"], report["ranks"]) == (0, "exact", "dp=2,sp=2", 4), report
    assert [site["strategy"] for site in report["sites"]] == ["gather-kv"]


def test_a_transformers_type_prints_a_table_and_exits_with_0() -> None:
    done = autosp("check", "qwen3", "--ranks", "3", "--seq-len", "37", "--batch", "1", "--dtype", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("model.layers.1", "lm_head", "all gradients", "float32", "exact on 3 ranks (sp=3)"):
        assert text in done.stdout


def test_a_mismatch_exits_with_1() -> None:
    code, report = check("factories.py:doubling", "--ranks", "2")
    assert (code, report["verdict"]) == (1, "mismatch")
    assert report["grad_rel_err"] == pytest.approx(1.0) and report["loss_rel_err"] == pytest.approx(1.0)
    assert "gradients are off" in report["reason"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("factories.py:short", "--ranks", "4"), "3"),
        (("factories.py:breaking", "--ranks", "2"), "if loss > 0"),
        (("factories.py:dies", "--ranks", "2"), "died without a word"),
        (("factories.py:sleeps", "--ranks", "2", "--timeout", "12"), "no answer from rank 0, 1 within 12 s"),
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
    assert done.returncode == 2 and "Usage:" in done.stderr


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
    assert done.returncode == 0, done.stdout + done.stderr
    assert "autosp plan" in done.stdout
    last = done.stdout.rstrip().replace("\n", " ").split("largest relative difference")[-1]
    loss, grads = (float(word) for word in last.replace(",", " ").split() if word[0].isdigit() and "e" in word)
    assert loss < 1e-5 and grads < 1e-4
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
