"""Is the parallel run exact? Compare its loss and every gradient with those of the plain module.

`check_on_rank` runs on every rank of a mesh. Rank 0 first runs the plain module eagerly on the whole batch (on each
data-parallel batch in turn, where the mesh has a "dp" axis) and sends the result to all; then every rank runs the
parallelized module and compares what it holds itself. The report has the worst error over all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autosp.cost_model.errors import PlanningError
from autosp.cost_model.plan import numbered
from autosp.kernels.errors import AutospError
from autosp.reference import Build, Float64, Reference, call, loss_of, reference_run

# A gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise: errors are measured against
# the parameter's own norm, but never against less than this share of the whole gradient's norm.
NORM_FLOOR = 1e-6
GRAD_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Report:
    """What `autosp check` found. `verdict` is "exact", "mismatch" or "refused" (then `reason` says why).

    `loss_rel_err`, `grad_rel_err` and `groups` (parameter group: error) are the largest relative errors over all ranks,
    None where they are not finite or nothing ran. A float64 model is checked in float64 throughout (`reference.Float64`).
    """

    verdict: str
    loss_rel_err: float | None = None
    grad_rel_err: float | None = None
    sites: tuple[dict[str, str], ...] = ()
    fallbacks: tuple[dict[str, Any], ...] = ()
    ranks: int = 0
    seq_len: int | None = None
    groups: dict[str, float | None] = dataclasses.field(default_factory=dict)
    buffer_rel_err: float | None = None
    reason: str = ""
    tolerance: float | None = None
    dtype: str = ""
    mesh: str = ""

    @property
    def exit_code(self) -> int:
        return {"exact": 0, "mismatch": 1}.get(self.verdict, 2)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


def check_or_refuse(mesh: DeviceMesh, build: Build, options: dict[str, Any]) -> Report:
    """`check_on_rank`, but a refusal is raised (`Refused`): the ranks that did not refuse may be waiting for this one."""
    report = check_on_rank(build, mesh, **options)
    if report.verdict == "refused":
        raise Refused(report.reason)
    return report


def check_on_rank(build: Build, mesh: DeviceMesh, **options: Any) -> Report:
    """Run the check on this rank; every rank of `mesh` must call it, and gets the same report.

    `options` go to `autosp.parallelize` (the compiler is aot_eager if not given). A refusal (`AutospError`) becomes the
    verdict "refused"; any other exception passes through.
    """
    import autosp

    names = mesh.mesh_dim_names or ()
    batches = mesh["dp"].size() if "dp" in names else 1
    mine = mesh.get_local_rank("dp") if batches > 1 else 0
    described = {"ranks": mesh.size(), "mesh": ",".join(f"{n}={mesh[n].size()}" for n in names)}
    try:
        module, inputs = build(mine)
        reference = _shared_reference(build, batches, mesh)
        options = {"compiler": "aot_eager", **options}
        model = autosp.parallelize(module, mesh, **options)
        torch.manual_seed(0)
        with Float64() if reference.casts else contextlib.nullcontext():
            loss = loss_of(call(model, inputs))
        loss.backward()
    except Exception as error:
        refusal = refusal_in(error)
        if refusal is None:
            raise
        return Report("refused", reason=str(refusal), **described)
    errors = _errors(model, loss, reference, mine, batches)
    return _report(_worst_over_ranks(errors, mesh), model, described)


def refusal_in(error: BaseException) -> AutospError | PlanningError | None:
    """The error of ours that `error` is or was caused by (Dynamo wraps what a backend raises), if any."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        e = queue.pop()
        if e is None or id(e) in seen:
            continue
        if isinstance(e, AutospError | PlanningError):
            return e
        seen.add(id(e))
        queue += [getattr(e, "inner_exception", None), e.__cause__, e.__context__]
    return None


def _shared_reference(build: Build, batches: int, mesh: DeviceMesh) -> Reference:
    """The reference run of rank 0, on every rank. Its failure is an error on every rank too, so that none waits."""
    box: list[Any] = [None]
    if not any(mesh.get_coordinate() or ()):
        try:
            box = [reference_run(build, batches)]
        except Exception as error:
            box = [f"{type(error).__name__}: {error}"]
    # From rank (0, 0) along the last axis, then along the one before: no group of the whole mesh is needed.
    for axis in reversed(range(mesh.ndim)):
        dist.broadcast_object_list(box, group=mesh.get_group(axis), group_src=0)
    if isinstance(box[0], str):
        raise ReferenceFailed(f"the plain model fails on one device already: {box[0]}")
    assert isinstance(box[0], Reference)
    return box[0]


def _errors(model: nn.Module, loss: torch.Tensor, reference: Reference, mine: int, batches: int) -> dict[str, float]:
    """This rank's relative errors: "loss", "buffers" and one "grad NAME" for each parameter; infinite where not a number."""
    whole = math.sqrt(sum(float(g.double().norm()) ** 2 for g in reference.grads.values()))
    expected = reference.losses[mine]
    errors = {"loss": relative_error(loss.detach(), expected, 0.0), "buffers": 0.0}
    grads = {name: whole_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for name in grads.keys() | reference.grads.keys():
        grad = grads.get(name)
        ref = reference.grads.get(name)
        zeros = torch.zeros_like(ref if ref is not None else grad)
        errors[f"grad {name}"] = relative_error(
            zeros if grad is None else grad, zeros if ref is None else ref, NORM_FLOOR * whole
        )
    if batches == 1:  # with several batches a running statistic has seen other data than the reference's
        buffers = dict(model.named_buffers())
        for name, ref in reference.buffers.items():
            if ref.is_floating_point():
                errors["buffers"] = max(errors["buffers"], relative_error(buffers[name], ref, 0.0))
    return errors


def relative_error(value: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    """norm(value - reference) / max(norm(reference), floor); infinite for NaN or for a wrong shape."""
    if value.shape != reference.shape:
        return math.inf
    distance = float((value.double() - reference.double()).norm())
    scale = max(float(reference.double().norm()), floor)
    if math.isnan(distance) or math.isnan(scale):
        return math.inf
    return 0.0 if distance == 0 else distance / scale if scale else math.inf


def whole_tensor(x: torch.Tensor) -> torch.Tensor:
    """What ranks hold in parts, whole on each of them: a collective. Anything else as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _worst_over_ranks(errors: dict[str, float], mesh: DeviceMesh) -> dict[str, float]:
    for axis in range(mesh.ndim):
        everyone: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(everyone, errors, group=mesh.get_group(axis))
        errors = {name: max(e.get(name, math.inf) for e in everyone) for name in set().union(*everyone)}
    return errors


def _report(errors: dict[str, float], model: nn.Module, described: dict[str, Any]) -> Report:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    tolerance = GRAD_TOLERANCE.get(dtype, GRAD_TOLERANCE[torch.float32])
    grads = {name.removeprefix("grad "): e for name, e in errors.items() if name.startswith("grad ")}
    groups: dict[str, float] = {}
    for name, e in grads.items():
        groups[group_of(name)] = max(groups.get(group_of(name), 0.0), e)
    wrong = [name for name, e in sorted(grads.items(), key=lambda item: -item[1]) if not e <= tolerance]
    reasons = [f"{len(wrong)} of {len(grads)} gradients are off, the worst is {wrong[0]}"] if wrong else []
    reasons += ["the loss is off"] if not errors["loss"] <= tolerance else []
    reasons += ["a buffer is off"] if not errors["buffers"] <= tolerance else []
    plan = getattr(model, "autosp_plan", None)
    return Report(
        verdict="mismatch" if reasons else "exact",
        loss_rel_err=_finite(errors["loss"]),
        grad_rel_err=_finite(max(grads.values(), default=0.0)),
        sites=tuple({"name": s.name, "kind": s.kind, "strategy": s.strategy} for s in plan.sites) if plan else (),
        fallbacks=tuple({"op": f.op, "source_line": f.source_line, "bytes": f.bytes} for f in plan.fallbacks) if plan else (),
        seq_len=max(plan.sequence, default=None) if plan else None,
        groups={name: _finite(e) for name, e in sorted(groups.items(), key=lambda item: _natural(item[0]))},
        buffer_rel_err=_finite(errors["buffers"]),
        reason="; ".join(reasons),
        tolerance=tolerance,
        dtype=str(dtype).removeprefix("torch."),
        **described,
    )


def group_of(parameter: str) -> str:
    """The layer a parameter belongs to: its name up to the first number, else all but the last part."""
    return numbered(parameter) or parameter.rpartition(".")[0] or parameter


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


class ReferenceFailed(AutospError):
    """Nothing to compare with: the plain module itself raised."""


class Refused(AutospError):
    """One rank refused to run."""
