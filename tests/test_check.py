"""The check itself: what it measures, what it calls exact, what it refuses. Parallelization is replaced by known mistakes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autosp
from autosp.check import Report, check_on_rank, group_of, refusal_in, relative_error
from autosp.kernels.errors import AutospError
from autosp.reference import Float64, NoLoss, loss_of
from pool import Pool


class Tiny(nn.Module):
    """Mean squared output of a linear layer with a batch norm, and one parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.blocks[1](self.blocks[0](x)) ** 3).mean() * 1.5}


def build(batch_index: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Tiny().double()
    torch.manual_seed(10 + batch_index)
    return model, {"x": torch.randn(8, 3, dtype=torch.float64)}


def unchanged(model: Any, mesh: DeviceMesh) -> None:
    """What a replicated run is: right without any communication."""


def scaled_gradient_on_last_rank(model: Any, mesh: DeviceMesh) -> None:
    if dist.get_rank() == mesh.size() - 1:
        model.blocks[0].weight.register_hook(lambda g: g * (1 + 1e-7))


def nan_gradient(model: Any, mesh: DeviceMesh) -> None:
    model.blocks[0].weight.register_hook(lambda g: g * math.nan)


def wrong_loss(model: Any, mesh: DeviceMesh) -> None:
    model.register_forward_hook(lambda m, args, out: {"loss": out["loss"] + 1e-6})


def stale_buffer(model: Any, mesh: DeviceMesh) -> None:
    model.blocks[1].momentum = 0.0


def averaged_over_dp(model: Any, mesh: DeviceMesh) -> None:
    def average(g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        dist.all_reduce(g, group=mesh.get_group("dp"))
        return g / mesh["dp"].size()

    for p in model.parameters():
        p.register_hook(average)


def refusing_rank(model: Any, mesh: DeviceMesh) -> None:
    raise RuntimeError("wrapped") from AutospError("the sequence is too short")


def run_with(mesh: DeviceMesh, change: Callable[[Any, DeviceMesh], None]) -> Report:
    def parallelize(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
        assert options["compiler"] == "aot_eager"
        change(model, mesh)
        return model

    before, autosp.parallelize = autosp.parallelize, parallelize  # type: ignore[assignment]
    try:
        return check_on_rank(build, mesh)
    finally:
        autosp.parallelize = before


@pytest.mark.parametrize(("on", "change"), [(1, unchanged), (3, unchanged), ("2x2", averaged_over_dp)])
def test_a_right_run_is_exact(pool: Pool, on: int | str, change: Any) -> None:
    for report in pool.run(run_with, change, on=on):
        assert report.verdict == "exact" and report.reason == "", report
        assert report.loss_rel_err is not None and report.loss_rel_err <= 1e-15
        assert report.grad_rel_err is not None and report.grad_rel_err <= 1e-14
        assert report.exit_code == 0 and report.dtype == "float64" and report.tolerance == 1e-9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled_gradient_on_last_rank, "1 of 4 gradients are off, the worst is blocks.0.weight"),
        (nan_gradient, "1 of 4 gradients are off, the worst is blocks.0.weight"),
        (wrong_loss, "the loss is off"),
        (stale_buffer, "a buffer is off"),
    ],
)
def test_a_wrong_run_is_a_mismatch_on_every_rank(pool: Pool, change: Any, reason: str) -> None:
    for report in pool.run(run_with, change, on=3):
        assert report.verdict == "mismatch" and report.exit_code == 1
        assert report.reason == reason


def test_unaveraged_gradients_over_dp_are_a_mismatch(pool: Pool) -> None:
    assert {r.verdict for r in pool.run(run_with, unchanged, on="2x2")} == {"mismatch"}


def test_a_refusal_inside_another_exception_is_found(pool: Pool) -> None:
    report = pool.run(run_with, refusing_rank, on=2)[0]
    assert (report.verdict, report.reason, report.exit_code) == ("refused", "the sequence is too short", 2)


def test_json_is_json_even_where_errors_are_not_finite(pool: Pool) -> None:
    report = json.loads(pool.run(run_with, nan_gradient, on=1)[0].to_json())
    assert {"verdict", "loss_rel_err", "grad_rel_err", "sites", "fallbacks", "ranks", "seq_len"} <= report.keys()
    assert report["grad_rel_err"] is None and report["groups"]["blocks.0"] is None


def test_relative_error_is_measured_against_the_norm_or_the_floor() -> None:
    one, two = torch.ones(4), torch.full((4,), 2.0)
    assert relative_error(two, one, 0.0) == 1.0
    assert relative_error(one, torch.zeros(4), 8.0) == 0.25
    assert relative_error(torch.zeros(4), torch.zeros(4), 0.0) == 0.0
    assert relative_error(one, torch.zeros(4), 0.0) == math.inf
    assert relative_error(one * math.nan, one, 0.0) == math.inf
    assert relative_error(one, one * math.nan, 0.0) == math.inf
    assert relative_error(torch.ones(1), one, 0.0) == math.inf


def test_a_float64_model_is_checked_in_float64_throughout() -> None:
    x = torch.full((2,), 1 + 1e-12, dtype=torch.float64)
    with Float64() as mode:
        assert (x * 2).dtype == torch.float64 and not mode.used
        assert (x.float() - 1).max() > 0 and mode.used
    with Float64() as mode:
        assert (x.to(torch.float32) - 1).max() > 0 and mode.used
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float64


def test_the_loss_is_found() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = x.sum()
    assert loss_of({"logits": x, "loss": loss}) == loss and loss_of(loss) == loss and loss_of((x, loss)) == loss
    for output in (x, (loss, loss), {"loss": None, "logits": x}, None):
        with pytest.raises(NoLoss, match="scalars to differentiate"):
            loss_of(output)


def test_parameter_groups_are_layers() -> None:
    assert group_of("model.layers.0.self_attn.q_proj.weight") == "model.layers.0"
    assert group_of("lm_head.weight") == "lm_head" and group_of("scale") == "scale"


def test_a_refusal_is_found_through_causes_and_contexts() -> None:
    inner = AutospError("no")
    outer = ValueError("x")
    outer.__context__ = inner
    outer.__cause__ = outer
    assert refusal_in(inner) is inner and refusal_in(outer) is inner and refusal_in(ValueError()) is None
