"""Which ranks share a sequence: the `sp` axis of a DeviceMesh, with an optional `dp` axis beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .kernels.errors import AutospError
from .passes.spread import Spread

_default: list[DeviceMesh] = []


class MeshError(AutospError):
    """The mesh does not say which ranks share a sequence."""


@contextlib.contextmanager
def _until_exit(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    try:
        yield mesh
    finally:
        if mesh in _default:
            _default.remove(mesh)


def use_mesh(mesh: DeviceMesh) -> contextlib.AbstractContextManager[DeviceMesh]:
    """Make `mesh` the one that models without a mesh of their own take at their first call.

    Effective at once; used as a context manager it ends with the block.
    """
    _default.append(mesh)
    return _until_exit(mesh)


@dataclass(frozen=True)
class World:
    """A resolved mesh: the place of this rank, the group of all its ranks (None for one rank), and their device. mesh: the one
    it was resolved from; None without a process group."""

    spread: Spread
    everyone: dist.ProcessGroup | None
    device: torch.device
    dp_rank: int = 0
    mesh: DeviceMesh | None = None


def resolve(mesh: DeviceMesh | None, grad_sync: str) -> World:
    """The mesh of the argument, else of `use_mesh`, else one axis over the default process group.

    Raises MeshError for unknown axis names, and where several processes run without a process group.
    """
    external = grad_sync == "external"
    if mesh is None and _default:
        mesh = _default[-1]
    if mesh is None:
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise MeshError(
                    "several processes run but there is no process group; fix: call torch.distributed.init_process_group() "
                    "before the first call of the model, or pass mesh=init_device_mesh(...)"
                )
            return World(Spread(0, 1, "", external=external), None, torch.device("cpu"))
        kind = "cuda" if "nccl" in dist.get_backend() else "cpu"
        mesh = dist.device_mesh.init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("sp",))
    return _world(mesh, external)


def _world(mesh: DeviceMesh, external: bool) -> World:
    names = mesh.mesh_dim_names or (("sp",) if mesh.ndim == 1 else ())
    if mesh.ndim == 1 and names != ("dp",):
        names = ("sp",)  # a one-axis mesh is the sequence's, whatever its name
    if "sp" not in names or set(names) - {"sp", "dp"}:
        raise MeshError(
            f"the mesh has axes {names or 'without names'}; autosp needs one called 'sp' and at most one more, 'dp', before it. "
            "fix: init_device_mesh(device, (dp, sp), mesh_dim_names=('dp', 'sp'))"
        )
    if tuple(names).index("sp") != mesh.ndim - 1:
        raise MeshError("the mesh has sp before dp; fix: make sp the last axis, so that neighbours in a sequence are neighbours")
    group = mesh.get_group(mesh.ndim - 1)
    index = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    device = torch.device(mesh.device_type, index)
    spread = Spread(dist.get_rank(group), dist.get_world_size(group), group.group_name, external=external)
    if mesh.ndim == 1:
        return World(spread, group if spread.ranks > 1 else None, device, mesh=mesh)
    dp, whole = mesh.get_group(0), flat(mesh).get_group()
    dp_rank = dist.get_rank(dp)
    spread = Spread(
        spread.rank, spread.ranks, spread.group, dist.get_world_size(dp), dp.group_name, whole.group_name, external, dp_rank
    )
    return World(spread, whole if mesh.size() > 1 else None, device, dp_rank, mesh)


def flat(mesh: DeviceMesh) -> DeviceMesh:
    """All the mesh's ranks along one axis, in row-major order. `_flatten` is DeviceMesh's own, not yet public, way to it."""
    if mesh.ndim == 1:
        return mesh
    if mesh.size() == dist.get_world_size() and mesh.mesh.flatten().tolist() == list(range(mesh.size())):
        world = dist.group.WORLD
        assert world is not None
        return DeviceMesh.from_group(world, mesh.device_type, mesh_dim_names=("autosp_all",))
    return mesh._flatten("autosp_all")
