"""Data-parallel groups beside sequence-parallel ones, gradients averaged by someone else, and meshes that say nothing."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, loss_of
from models_common import first_layer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from twins import EXACT, distance, gradient_error, gradients, other_batch, step, twins

import autosp
from autosp.check import relative_error, whole_tensor
from autosp.errors import WrappingError
from autosp.mesh import MeshError, flat, resolve
from pool import Pool


def mean_over_batches(plain: nn.Module, inputs: Any, batches: int) -> list[float]:
    """Gradients of the mean loss over the batches of all data-parallel groups, into `plain`; the losses."""
    losses = []
    for seed in range(batches):
        loss = loss_of(plain(**other_batch(inputs, seed)))
        (loss / batches).backward()
        losses.append(loss.item())
    return losses


def two_axes(mesh: DeviceMesh, name: str, strategy: str | None) -> tuple[float, float, list[Any]]:
    """Errors of this group's loss and of the gradients against one device; the plan's gradient collectives."""
    plain, parallel, inputs = twins(name, mesh, strategy=strategy)
    group = mesh.get_local_rank("dp")
    losses = mean_over_batches(plain, inputs, 2)
    loss = step(parallel, other_batch(inputs, group))
    return abs(loss - losses[group]), gradient_error(plain, parallel), list(parallel.autosp_plan.collectives)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("nanogpt_sdpa", "ring"),
        ("gqa_sdpa", "gather-kv"),
        ("sdpa_window", "halo"),
        ("sdpa_bool_mask", "balanced-ring"),
        ("moe", None),
        ("cls", None),
        ("unknown_fft", None),
    ],
)
def test_gradients_are_summed_over_sp_and_averaged_over_dp(pool: Pool, name: str, strategy: str | None) -> None:
    """`moe` has means over tokens, `cls` a head that every rank computes whole, `unknown_fft` a replicated layer. Ranks of the
    second group have other numbers in the world than in their ring."""
    for loss_error, error, collectives in pool.run(two_axes, name, strategy, on="2x2"):
        assert loss_error < EXACT and error < EXACT
        buckets = sum(c.count for c in collectives if c.op == "sync")
        assert 1 <= buckets <= 2, "one bucket for parameters of sharded work, one for those of replicated work"


def backward_collectives(mesh: DeviceMesh) -> tuple[int, int]:
    """All-reduces that carry parameter gradients in the backward graph, and parameters."""
    import importlib

    module = importlib.import_module("autosp.dynamo_backend")
    reshape, graphs = module._reshape, []
    module._reshape = lambda gm: graphs.append(gm) or reshape(gm)
    try:
        _, parallel, inputs = twins("gqa_sdpa", mesh)
        step(parallel, inputs)
    finally:
        module._reshape = reshape
    reduces = [n for n in graphs[-1].graph.nodes if n.target is torch.ops._c10d_functional.all_reduce.default]
    return len(reduces), len(list(parallel.parameters()))


@pytest.mark.parametrize("on", [2, "2x2"])
def test_gradients_travel_in_buckets(pool: Pool, on: int | str) -> None:
    reduces, parameters = pool.run(backward_collectives, on=on)[0]
    assert reduces <= 2 and parameters > 10


# Someone else averages.


def averages_by_hand(mesh: DeviceMesh) -> float:
    plain, parallel, inputs = twins("nanogpt_sdpa", mesh, grad_sync="external")
    dp = "dp" in mesh.mesh_dim_names
    mean_over_batches(plain, inputs, 2 if dp else 1)
    step(parallel, other_batch(inputs, mesh.get_local_rank("dp") if dp else 0))
    averaged = {}
    for name, grad in gradients(parallel).items():
        averaged[name] = grad.clone()
        for axis in range(mesh.ndim):
            dist.all_reduce(averaged[name], group=mesh.get_group(axis))
        averaged[name] /= mesh.size()
    assert distance(gradients(parallel), averaged) > 1e-3, "nothing was left to average"
    return distance(averaged, gradients(plain))


@pytest.mark.parametrize("on", [3, "2x2"])
def test_with_external_sync_the_mean_over_all_ranks_is_the_gradient(pool: Pool, on: int | str) -> None:
    assert max(pool.run(averages_by_hand, on=on)) < EXACT


def trains_under_ddp(mesh: DeviceMesh, bucket_cap_mb: float) -> tuple[float, int]:
    plain, parallel, inputs = twins("gqa_sdpa", mesh, grad_sync="external")
    wrapped = DistributedDataParallel(parallel, bucket_cap_mb=bucket_cap_mb)
    group = mesh.get_local_rank("dp")
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        plain.zero_grad()
        wrapped.zero_grad()
        mean_over_batches(plain, inputs, 2)
        step(wrapped, other_batch(inputs, group))
    return gradient_error(plain, parallel), len(parallel.autosp_plan.sites)


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.01])
def test_ddp_around_a_parallel_model_averages(pool: Pool, bucket_cap_mb: float) -> None:
    """Dynamo splits a graph at DDP's buckets by default; autosp's must stay whole."""
    for error, sites in pool.run(trains_under_ddp, bucket_cap_mb, on="2x2"):
        assert error < EXACT and sites == 1


def trains_under_fsdp(mesh: DeviceMesh, along: str, first: bool) -> list[float]:
    """The largest relative errors of losses, gradient norms, gradients and parameters over steps under `fully_shard`."""
    plain, inputs = MODELS["gqa_sdpa"](33, 2, torch.float64)
    model, averaged_over = copy.deepcopy(first_layer(plain)), flat(mesh) if along == "all" else mesh
    if first:
        fully_shard(model, mesh=averaged_over)
    autosp.parallelize(model, mesh, compiler="aot_eager", grad_sync="external")
    if not first:
        fully_shard(model, mesh=averaged_over, reshard_after_forward=True)
    groups = mesh.size() // mesh["sp"].size()
    group, errors = mesh.get_local_rank("dp") if groups > 1 else 0, []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for _ in range(2):
        losses = mean_over_batches(plain, inputs, groups)
        loss = step(model, other_batch(inputs, group))
        norms = [whole_tensor(nn.utils.clip_grad_norm_(m.parameters(), 0.5)) for m in (plain, model)]
        errors += [abs(loss / losses[group] - 1), float(abs(norms[1] / norms[0] - 1))]
        grads = [{n: whole_tensor(p.grad) for n, p in m.named_parameters()} for m in (plain, model)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        values = [{n: whole_tensor(p.data) for n, p in m.named_parameters()} for m in (plain, model)]
        errors += [distance(grads[1], grads[0]), distance(values[1], values[0])]
    assert all(isinstance(p, DTensor) for p in model.parameters()) and len(model.autosp_plan.sites) == 1
    return errors


@pytest.mark.parametrize(("on", "along", "first"), [(2, "mesh", True), ("2x2", "mesh", False), ("2x2", "all", True)])
def test_fsdp_around_a_parallel_model_averages(pool: Pool, on: int | str, along: str, first: bool) -> None:
    """Parts over all ranks, or over sp with copies over dp; in either order with `parallelize`."""
    assert max(max(errors) for errors in pool.run(trains_under_fsdp, along, first, on=on)) < EXACT


def wraps_wrongly(mesh: DeviceMesh, case: str) -> str:
    plain, inputs = MODELS["gqa_sdpa"](33, 2, torch.float64)
    model = autosp.parallelize(plain, mesh, compiler="aot_eager", grad_sync="external")
    if case == "inside":
        for block in model.backbone.blocks:
            fully_shard(block, mesh=flat(mesh))
    fully_shard(model, mesh=mesh["sp"] if case == "part" else flat(mesh))
    if mesh.get_rank() > 0:  # a rank that waited for the others would wait in vain
        return ""
    try:
        step(model, inputs)
    except WrappingError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("inside", r"fully_shard is around backbone.blocks.0 and 1 more modules inside .* fix: .*\(model, mesh, zero=3\)"),
        (
            "part",
            r"grad_sync='external' leaves .* all 4 ranks of the mesh to FSDP, but fully_shard split .* over 2. fix: fully_shard",
        ),
    ],
)
def test_fsdp_that_cannot_be_right_is_refused_before_anything_is_sent(pool: Pool, case: str, text: str) -> None:
    message = pool.run(wraps_wrongly, case, on="2x2", timeout=60)[0]
    assert re.match(text, message), message


# Meshes.


def refused(mesh: DeviceMesh, names: tuple[str, ...] | None, shape: tuple[int, ...]) -> str:
    ranks = torch.arange(4).reshape(shape)
    bad = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    model, inputs = MODELS["gqa_sdpa"](33, 2, torch.float64)
    try:
        autosp.parallelize(model, bad, compiler="aot_eager")(**inputs)
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("names", "shape", "text"),
    [
        (("dp",), (4,), r"the mesh has axes \('dp',\); autosp needs one called 'sp'.*fix: init_device_mesh\(device, \(dp, sp\)"),
        (("dp", "tp"), (2, 2), r"the mesh has axes \('dp', 'tp'\); autosp needs one called 'sp' and at most one more"),
        (("tp", "sp"), (2, 2), r"the mesh has axes \('tp', 'sp'\); autosp needs one called 'sp'"),
        (None, (2, 2), r"the mesh has axes without names; autosp needs one called 'sp'"),
        (("sp", "dp"), (2, 2), r"the mesh has sp before dp; fix: make sp the last axis"),
    ],
)
def test_a_mesh_that_does_not_say_which_ranks_share_a_sequence_is_refused(
    pool: Pool, names: tuple[str, ...] | None, shape: tuple[int, ...], text: str
) -> None:
    for message in pool.run(refused, names, shape):
        assert re.match(text, message), message


def accepted(mesh: DeviceMesh, names: tuple[str, ...] | None) -> tuple[int, int]:
    world = resolve(DeviceMesh("cpu", torch.arange(4), mesh_dim_names=names), "autosp")
    return world.spread.rank, world.spread.ranks


@pytest.mark.parametrize("names", [("sp",), ("seq",), None])
def test_the_only_axis_is_the_sequences(pool: Pool, names: tuple[str, ...] | None) -> None:
    assert pool.run(accepted, names) == [(r, 4) for r in range(4)]


def place_in_two_axes(mesh: DeviceMesh) -> tuple[int, int, int, int]:
    world = resolve(mesh, "autosp")
    return world.dp_rank, world.spread.dp, world.spread.rank, world.spread.ranks


def test_ranks_of_one_sequence_are_neighbours(pool: Pool) -> None:
    assert pool.run(place_in_two_axes, on="2x2") == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]


def test_several_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match=r"there is no process group; fix: call torch.distributed.init_process_group\(\)"):
        resolve(None, "autosp")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert resolve(None, "autosp").everyone is None


def test_one_process_runs_without_a_group() -> None:
    plain, inputs = MODELS["gqa_sdpa"](33, 2, torch.float64)
    parallel = autosp.parallelize(copy.deepcopy(plain), compiler="aot_eager")
    assert relative_error(loss_of(parallel(**inputs)).detach(), loss_of(plain(**inputs)).detach(), 0.0) < EXACT
    assert parallel.autosp_plan.ranks == 1


def test_use_mesh_ends_with_its_block(pool: Pool) -> None:
    assert pool.run(uses_mesh, on=2) == [(2, 4)] * 2


def uses_mesh(mesh: DeviceMesh) -> tuple[int, int]:
    with autosp.use_mesh(mesh):
        inside = resolve(None, "autosp").spread.ranks
    return inside, dist.get_world_size()
