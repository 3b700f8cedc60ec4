"""What `autosp plan` is asked, checked before anything is captured, and its answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .cost_model.amounts import axes
from .cost_model.errors import PlanningError
from .cost_model.hardware import DTYPES, Hardware, HardwareError, load
from .cost_model.plan import Plan
from .cost_model.planner import MemoryShort


class MeshShort(PlanningError):
    """Ranks that do not divide as they were asked to."""


@dataclass(frozen=True)
class Question:
    """model: as `RealSpec` takes it. mesh: {"sp": 64} or {"dp": 8, "sp": 64}. hardware: a machine by name, or a file. per_node:
    devices of the nearest level, where that is not the machine's own number. memory: as for `parallelize`.
    batch: of one data-parallel group. outputs, zero, tile: as for `parallelize`."""

    model: str
    seq_len: int
    mesh: Mapping[str, int]
    hardware: str
    per_node: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    memory: str | float = "auto"
    strategy: str | None = None
    outputs: str = "local"
    zero: int | None = None
    tile: str | int = "auto"

    def machine(self) -> Hardware:
        """Raises HardwareError for a machine that is not known or lacks the dtype, MeshShort for ranks that fill no nodes."""
        if self.dtype not in DTYPES:
            raise HardwareError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}; fix: one of these")
        found = load(self.hardware)
        if self.per_node is not None:
            found = found.with_node(self.per_node)
        found.rate("matmul", self.dtype)
        _whole_nodes(self.mesh, found)
        return found

    def answer(self) -> Plan:
        """The plan; nothing is run, no weight takes memory. Raises what `dry_run` does, MemoryShort where nothing fits."""
        machine = self.machine()

        from .dry_run import dry_run
        from .model_spec import RealSpec
        from .passes.pipeline import Settings
        from .planning import Planning, room

        settings = Settings(self.strategy, self.outputs, zero=self.zero, tile=self.tile)
        planning = Planning(machine, None, *room(self.memory), strict=True)
        spec = RealSpec(self.model, self.seq_len, self.batch, self.dtype)
        try:
            return dry_run(spec, self.mesh["sp"], settings, planning, self.mesh.get("dp", 1)).plan
        except MemoryShort as short:
            raise MemoryShort(f"{short}; to plan as if there were more: --memory 2TB, say") from None


def _whole_nodes(mesh: Mapping[str, int], machine: Hardware) -> None:
    """Every group of a sequence's ranks starts alike in its node, as prices take for granted."""
    sp, ranks, node = mesh["sp"], math.prod(mesh.values()), machine.node
    if not node or ranks <= node or sp % node == 0 or node % sp == 0:
        return
    fits = [n for n in range(1, 2 * sp) if (n % node == 0 or node % n == 0)]
    near = sorted(sorted(fits, key=lambda n: abs(n - sp))[:2])
    raise MeshShort(
        f"sequences over {sp} ranks do not divide into nodes of {node}; fix: {' or '.join(map(str, near))} ranks a sequence, or "
        f"--per-node with a divisor or multiple of {sp}"
    )


def mesh_of(mesh: str | None, ranks: int | None) -> dict[str, int]:
    """From --mesh and --ranks: "dp=8,sp=64", "sp=64", or "dp=8" of all ranks. Raises MeshShort saying what does not fit."""
    if mesh is None:
        if ranks is None:
            raise MeshShort("over how many ranks? fix: --ranks 64, or --mesh dp=8,sp=8")
        return {"sp": ranks}
    shape = axes(mesh)
    if not shape or set(shape) - {"dp", "sp"} or list(shape) == ["sp", "dp"]:
        raise MeshShort(f"{mesh!r} is no mesh; fix: sp=64, or dp=8,sp=64 (sp last)")
    if "sp" not in shape:
        if ranks is None:
            raise MeshShort(f"{mesh} of how many ranks? fix: --ranks, or say sp as well")
        if ranks % shape["dp"]:
            parts = [n for n in range(1, ranks + 1) if ranks % n == 0]
            near = sorted(sorted(parts, key=lambda n: abs(n - shape["dp"]))[:2])
            raise MeshShort(f"{ranks} ranks do not divide into dp={shape['dp']}; fix: dp={' or dp='.join(map(str, near))}")
        shape["sp"] = ranks // shape["dp"]
    if ranks is not None and math.prod(shape.values()) != ranks:
        total = math.prod(shape.values())
        raise MeshShort(f"{mesh} has {total} ranks, --ranks says {ranks}; fix: --ranks {total}, or one of the two alone")
    return shape
