"""ZeRO-3: parameters in parts, the same loss and gradients, optimizers and checkpoints on the parts."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from conftest import FULL
from lowered import trace
from models import MODELS
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from twins import EXACT, distance, other_batch, step
from typer.testing import CliRunner

import autosp
from autosp import zoo
from autosp.check import Report, check_on_rank, relative_error, whole_tensor
from autosp.cli import app
from autosp.cost_model.hardware import load
from autosp.cost_model.plan import Plan
from autosp.cost_model.planner import MemoryShort, Planner
from autosp.cost_model.problem import Layer, Problem
from autosp.errors import AutospError, ChangedParameterError, DisagreementError, MeshError, ShardError, StrategyError
from autosp.inductor import communicates
from autosp.kernels.parts import part, part_shape, split_dim
from autosp.model_spec import ModelSpec
from autosp.passes.overlap import overlap
from autosp.plan_tables import total_rows
from autosp.planning import room
from pool import Pool

FACTORIES = str(Path(__file__).parent / "factories.py")
VOCAB, WIDTH = 50, 12


class Mixed(nn.Module):
    """A scalar, a parameter used by whole work only, one by both, one that is unused, one that is frozen, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.BatchNorm1d(WIDTH)
        self.frozen, self.both = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.whole, self.unused = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 2))
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        x = self.both(self.frozen(x).tanh()) * self.temperature
        loss = F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), labels.flatten())
        return loss + self.both.weight.square().mean() + (self.whole.T @ self.whole).exp().mean()


def mixed(batch_index: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Mixed().double()
    torch.manual_seed(batch_index + 1)
    return model, {"ids": torch.randint(VOCAB, (2, 21)), "labels": torch.randint(VOCAB, (2, 21))}


# Who holds what.


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 3), 4, 0), ((97, 64), 4, 0), ((1, 1, 768), 4, 2), ((4, 9), 3, 1), ((3, 2), 2, 1), ((3,), 4, 0),
        ((), 2, None), ((0, 3), 2, None),
    ],
)  # fmt: skip
def test_a_parameter_is_split_where_it_divides(shape: tuple[int, ...], ranks: int, dim: int | None) -> None:
    assert split_dim(shape, ranks) == dim
    if dim is not None:
        parts = [part(shape[dim], ranks, r) for r in range(ranks)]
        chunks = [c.tolist() for c in torch.arange(shape[dim]).chunk(ranks)]
        assert [list(range(*p)) for p in parts if p[0] < p[1]] == chunks
        assert sum(math.prod(part_shape(shape, ranks, r)) for r in range(ranks)) == math.prod(shape)


# Exact.


def check(mesh: DeviceMesh, build: Any, options: dict[str, Any]) -> Report:
    return check_on_rank(build, mesh, zero=3, **options)


@pytest.mark.parametrize(
    ("build", "on", "options"),
    [
        (ModelSpec("llama", 37), "2x2", {"memory": "full"}),
        (ModelSpec("qwen3_moe", 33), 2, {}),
        (ModelSpec("qwen3_next", 33), 2, {}),
        (mixed, 1, {}),
        (mixed, 3, {}),
        (mixed, "2x2", {}),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(pool: Pool, build: Any, on: int | str, options: dict[str, Any]) -> None:
    report = pool.run(check, build, options, on=on)[0]
    assert report.verdict == "exact", report
    if report.dtype == "float64":
        assert max(report.grad_rel_err or 0.0, report.loss_rel_err or 0.0) < EXACT


if FULL:

    def test_inductor_keeps_the_order_of_gathering(pool: Pool) -> None:
        report = pool.run(check, mixed, {"compiler": "inductor"}, on=3, timeout=280)[0]
        assert report.verdict == "exact", report


def recomputes(mesh: DeviceMesh) -> float:
    """Checkpoint regions around layers, whose parameters are gathered inside."""
    plain, inputs = zoo.build("llama", 37, 2, torch.float64)
    model = copy.deepcopy(plain)
    model.gradient_checkpointing_enable()
    autosp.parallelize(model, mesh, compiler="aot_eager", zero=3)
    for each in (plain, model):
        each(**inputs).loss.backward()
    return distance(*(whole_gradients(each) for each in (model, plain)))


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole_tensor(p.grad) for name, p in model.named_parameters()}


def test_checkpoint_regions_gather_their_parameters_again(pool: Pool) -> None:
    assert max(pool.run(recomputes, on=2)) < EXACT


# Held in parts.


def holds(mesh: DeviceMesh) -> tuple[float, bool, bool, list[float]]:
    """Bytes of parameters and gradients here ÷ the whole's, before and after a step; what the state dict has; eval's error."""
    plain, inputs = MODELS["nanogpt_sdpa"](33, 2, torch.float64)
    model = copy.deepcopy(plain)
    next(model.parameters()).no_weight_decay = True  # type: ignore[attr-defined]
    autosp.parallelize(model, mesh, compiler="aot_eager", zero=3)
    assert next(model.parameters()).no_weight_decay  # type: ignore[attr-defined]
    whole = sum(p.nbytes for p in plain.parameters())
    step(model, inputs)
    parts = [x.to_local() for p in model.parameters() for x in (p, p.grad)]  # type: ignore[union-attr]
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts}  # gradients of a layer share theirs
    held = sum(memory.values()) / (2 * whole)
    with torch.no_grad():
        error = relative_error(loss_only(model, inputs), loss_only(plain, inputs), 0.0)
    state = model.state_dict()
    parted = all(isinstance(state[name], DTensor) for name, _ in model.named_parameters())
    tied = [n for n, _ in model.named_parameters(remove_duplicate=False)] != [n for n, _ in model.named_parameters()]
    values = {name: whole_tensor(p).detach() for name, p in model.named_parameters()}
    return held, parted, tied, [error, distance(values, dict(plain.named_parameters()))]  # type: ignore[arg-type]


def loss_only(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs)
    return out["loss"] if isinstance(out, dict) else out


def test_a_rank_holds_its_part_of_parameters_and_gradients(pool: Pool) -> None:
    found = pool.run(holds, on=4)
    assert max(held for held, *_ in found) <= 1.1 / 4
    for _, parted, tied, errors in found:
        assert parted and tied and max(errors) < EXACT


@pytest.mark.parametrize(("rank", "memory"), [(0, "none"), (2, "none"), (1, "attention"), (1, "full")])
def test_no_whole_parameter_is_kept_for_backward_and_the_plan_counts_what_is_sent(rank: int, memory: str) -> None:
    """97 rows on 3 ranks: the last part is padded on the wire."""
    model, inputs = zoo.build("llama", 57, 2, torch.float32)  # 38 tokens a rank: no activation has a parameter's shape
    traced = trace(model, inputs, 3, rank, decide=Planner(load("cpu"), *room(memory)), zero=3, strategy="gather-kv")
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    shapes |= {s[::-1] for s in shapes}
    kept = [tuple(x.meta["val"].shape) for x in traced.graphs[0].graph.output_node().args[0] if hasattr(x, "meta")]  # type: ignore[union-attr]
    assert len(kept) > 10 and not shapes & set(kept)
    forward, backward = traced.sent(0, 3, rank), traced.sent(1, 3, rank)
    plan = traced.compiled.plan
    assert sum(c.bytes_forward for c in plan.collectives) == sum(forward.values())
    assert sum(c.bytes_backward for c in plan.collectives) == sum(backward.values())
    own = [c for c in plan.collectives if c.op == "unshard"]
    assert sum(c.count for c in own) == 4  # embedding, two layers, norm and head


def test_a_layer_is_gathered_when_it_runs() -> None:
    """In both directions products lie between one gathering and the next."""
    model, inputs = zoo.build("llama", 48, 2, torch.float32)
    traced = trace(model, inputs, 2, strategy="all-to-all", zero=3)
    for graph in (0, 1):
        names = [str(n.target) for n in traced.nodes(graph) if n.op == "call_function"]
        marks = "".join("g" if "all_gather" in n else "m" if "mm" in n else "" for n in names)
        assert re.search("gm{5,}gm{5,}", marks), marks


class Stack(nn.Module):
    """Layers in which no rank waits for another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_layer_is_gathered_while_the_one_before_runs_and_no_earlier() -> None:
    traced = trace(Stack(), {"ids": torch.zeros(2, 48, dtype=torch.long)}, 2, zero=3)
    for graph in traced.graphs:
        overlap(graph.graph, communicates)
        names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        marks = "".join(
            "g" if "all_gather" in n else "w" if "wait" in n else "m" if "addmm" in n or ".mm" in n else "" for n in names
        )
        assert "gg" not in marks and re.search("wgm+", marks), marks


# Training.


def train(model: Any, inputs: dict[str, Tensor], optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for i in steps:
        losses.append(step(model, other_batch(inputs, i)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(mesh: DeviceMesh, folder: str, steps: tuple[int, int]) -> list[float]:
    """Losses of some steps, from the checkpoint in `folder` if they are not the first; then one is written."""
    model, inputs = MODELS["nanogpt_sdpa"](33, 2, torch.float64)
    autosp.parallelize(model, mesh, compiler="aot_eager", zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group = mesh.get_group()
    if steps[0]:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = train(model, inputs, optimizer, range(*steps))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, process_group=group)
    return losses


def test_a_run_goes_on_from_a_checkpoint_at_another_rank_count(pool: Pool, tmp_path: Path) -> None:
    """4 ranks, then 3: the losses of one process without a break, with AdamW, clipping and tied weights."""
    plain, inputs = MODELS["nanogpt_sdpa"](33, 2, torch.float64)
    expected = train(plain, inputs, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(6))
    folder, found = str(tmp_path / "checkpoint"), []
    for on, steps in ((4, (0, 3)), (3, (3, 6))):
        found += pool.run(trained, folder, steps, on=on)[0]
    assert found == pytest.approx(expected, rel=EXACT)


# Refused.


class Writes(nn.Module):
    """Into a parameter that learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.layer = nn.Parameter(torch.zeros(4), requires_grad=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return (self.layer(x) + self.count).sum()


class Returns(nn.Module):
    """A parameter computed with, whose gradient comes from outside, and in one case a parameter itself."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.itself, self.embed, self.weight = itself, nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.ones(5, 3))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(ids).sum(), self.weight if self.itself else self.weight.clone()


def returns(mesh: DeviceMesh) -> float:
    plain, ids = Returns(False).double(), torch.arange(20).reshape(2, 10)
    model = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager", zero=3)
    for each in (plain, model):
        loss, weight = each(ids)
        (loss + weight.pow(3).sum()).backward()
    return distance(*(whole_gradients(each) for each in (model, plain)))


def test_a_loss_outside_reaches_what_was_computed_from_parameters(pool: Pool) -> None:
    assert max(pool.run(returns, on=2)) < EXACT


def refused(mesh: DeviceMesh, case: str) -> str:
    model, inputs = mixed()
    if case == "other weights":
        with torch.no_grad():
            model.both.weight[0, 0] += mesh.get_local_rank()
    old = list(model.parameters())
    outside = nn.Linear(WIDTH, VOCAB).double()
    outside.weight = model.embed.weight
    if case == "hooks":
        model.both.weight.register_hook(lambda g: g)
    if case == "writes":
        model, inputs = Writes(), {"x": torch.randn(2, 4)}
    if case == "returned":
        model, inputs = Returns(True), {"ids": torch.zeros(2, 10, dtype=torch.long)}
    try:
        autosp.parallelize(model, mesh, compiler="aot_eager", zero=3)
        if case == "twice":
            autosp.parallelize(model, mesh, zero=3)
        if case == "optimizer":
            torch.optim.SGD(model.parameters(), lr=0.1).step()  # the parts: nothing to refuse
            torch.optim.SGD(old, lr=0.1).step()
        if case == "shared":
            outside(torch.randn(2, WIDTH).double())
        if case == "replaced":
            model.both.weight = nn.Parameter(torch.zeros(WIDTH, 7).double())
        if case == "added":
            model.extra = nn.Linear(WIDTH, WIDTH).double()
            model.norm.register_forward_hook(lambda m, args, out: model.extra(out.transpose(1, 2)).transpose(1, 2))
        model(**inputs)
    except AutospError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("other weights", DisagreementError, "has different weights"),
        ("hooks", ShardError, "weight of a Linear has hooks"),
        ("twice", ShardError, "is split already"),
        ("optimizer", ShardError, "build the optimizer after parallelize"),
        ("shared", ShardError, "parallelize the module that contains everything that shares its parameters"),
        ("replaced", ShardError, "weight of a Linear is no longer what zero=3 made of it"),
        ("added", ShardError, "was not there when it was parallelized"),
        ("returned", ShardError, "the model returns one of its parameters"),
        ("writes", ChangedParameterError, "changes a parameter while it runs"),
    ],
)
def test_what_would_go_wrong_silently_is_refused(pool: Pool, case: str, error: type, text: str) -> None:
    for said in pool.run(refused, case, on=2):
        assert said.startswith(error.__name__) and text in said, said


def test_options_that_do_not_go_together_are_refused_at_once() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match="zero=2 is not known; choose from None, 3"):
        autosp.parallelize(model, zero=2)
    with pytest.raises(StrategyError, match="zero=3 sums gradients into parts itself"):
        autosp.parallelize(model, zero=3, grad_sync="external")
    with pytest.raises(MeshError, match="there is no process group"):
        autosp.parallelize(model, zero=3)
    for target in (nn.Linear, lambda x: x, None):
        with pytest.raises(ShardError, match="splits the parameters of one module"):
            autosp.parallelize(target, zero=3)
    assert isinstance(model.weight, nn.Parameter) and model.weight.shape == (2, 2)


# Planned.


def test_memory_and_exchanges_are_those_of_parts() -> None:
    model, inputs = zoo.build("llama", 48, 2, torch.float32)
    whole = trace(model, inputs, 4, backward=False).compiled.plan
    parts = trace(model, inputs, 4, backward=False, zero=3).compiled.plan
    assert whole.totals and parts.totals and whole.beside and parts.beside
    layer = max(c.bytes_forward // c.count for c in parts.collectives if c.op == "unshard") * 4 // 3
    assert parts.totals.parameter_bytes == pytest.approx(whole.totals.parameter_bytes / 4 + 3 * layer)
    sent = {e.collective: e.sent for e in parts.beside.exchanges}
    parameters = sum(p.nbytes for p in model.parameters())
    assert sent == {"all_gather": 2 * 3 / 4 * parameters, "reduce_scatter": 3 / 4 * parameters}
    assert [e.collective for e in whole.beside.exchanges] == ["all_reduce"] and parts.fingerprint == whole.fingerprint
    assert [total_rows(plan)[1][-1] for plan in (whole, parts)] == [
        "every rank holds all of them", "a rank's part of all, one layer's whole",
    ]  # fmt: skip


def test_parameters_in_parts_fit_where_whole_ones_do_not() -> None:
    whole = Problem(8, "bfloat16", (), (Layer("layers.0", flop=1e12),), trained=28e9)
    planner = Planner(load("h100"), strict=True)
    with pytest.raises(MemoryShort, match=r"split them over the ranks \(zero=3\)"):
        planner(whole)
    assert planner(replace(whole, parts=8, largest_layer=5e8)).totals


# The command line.


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)


def test_check_and_plan_take_the_option(tmp_path: Path) -> None:
    done = run("check", FACTORIES + ":positional", "--zero", 3, "--mesh", "dp=2,sp=2", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["verdict"] == "exact"
    config = zoo.tiny_config("llama", 64)
    config.save_pretrained(tmp_path)
    done = run("plan", tmp_path, "--zero", 3, "--mesh", "dp=2,sp=4", "--hardware", "h200", "--json", tmp_path / "plan.json")
    assert done.exit_code == 0 and "a rank's part of all" in done.stdout
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.beside is not None and {e.collective for e in plan.beside.exchanges} == {"all_gather", "reduce_scatter"}
    assert run("plan", tmp_path, "--zero", 1, "--ranks", 4, "--hardware", "h200").exit_code == 2
