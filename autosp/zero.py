"""ZeRO-3 as a user sees it: the module's parameters become DTensors, of which each rank of the mesh holds its part.

Dynamo traces no mixture of DTensors and plain tensors. While the module is called, a *stand-in* is in the place of each
parameter: a plain one of the whole shape, whose memory all share and nobody reads. The compiled step gets the parts instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from .kernels import agree
from .kernels.errors import AutospError
from .kernels.parts import part_of, split_dim
from .mesh import MeshError, World, flat


class ShardError(AutospError):
    """A parameter cannot be split over the ranks, or is no longer what it was split into."""


class Zero3:
    """The parameters of a module in parts; every rank of `world` builds it together.

    Raises ShardError where one cannot be split, DisagreementError where ranks start from different ones, MeshError without ranks.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        if world.mesh is None:
            raise MeshError("zero=3 splits parameters over ranks, and there is no process group; fix: init_process_group() first")
        self._mesh, self._places = flat(world.mesh), list(_places(module))
        self._stand_ins: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._standing: dict[int, nn.Parameter] = {}  # by stand-in, the parameter it stands for
        for owner, name in self._places:
            _refuse(owner, name)
        _compare(module, world)
        made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for owner, name in self._places:
            whole = _at(owner, name)
            if id(whole) not in made:
                made[id(whole)] = self._split(whole)
            owner._parameters[name] = made[id(whole)]

    def _split(self, whole: nn.Parameter) -> nn.Parameter:
        parted = nn.Parameter(self._parts_of(whole), whole.requires_grad)
        vars(parted).update(vars(whole))  # marks that models leave for optimizers, such as no weight decay
        if whole.grad is not None:
            parted.grad = self._parts_of(whole.grad)
        whole.data, whole.grad = whole.data.new_empty(0), None
        whole.__class__ = _Replaced
        return parted

    def _parts_of(self, x: Tensor) -> DTensor:
        mesh, dim = self._mesh, split_dim(x.shape, self._mesh.size())
        local = part_of(x.detach(), mesh.size(), mesh.get_local_rank())
        placement = Replicate() if dim is None else Shard(dim)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=x.shape, stride=_strides(x.shape))

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Plain parameters of the whole shapes in the module, without values."""
        inside = [(owner, name, self._checked(owner, name)) for owner, name in self._places]
        chosen: dict[int, nn.Parameter] = {}
        for owner, name, parameter in inside:
            if id(parameter) not in chosen:
                chosen[id(parameter)] = self._stand_in((owner, name), parameter)
        self._standing = {id(chosen[id(p)]): p for _, _, p in inside}
        try:
            for owner, name, parameter in inside:
                owner._parameters[name] = chosen[id(parameter)]
            yield
        finally:
            for owner, name, parameter in inside:
                owner._parameters[name] = parameter

    def set_apart(self, gm: fx.GraphModule) -> None:
        """Memory of its own for each parameter in what Dynamo traced, as the module's have."""
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            if isinstance(value, nn.Parameter):
                with value.fake_mode:  # type: ignore[attr-defined]
                    node.meta["example_value"] = nn.Parameter(torch.empty_like(value), value.requires_grad)

    def part(self, stand_in: Tensor) -> Tensor:
        """This rank's part of the parameter that is stood in for; its gradient goes to that. Raises ShardError for another."""
        if id(stand_in) not in self._standing:
            raise ShardError(
                f"the model has a parameter of shape {tuple(stand_in.shape)} that was not there when it was parallelized with "
                "zero=3; fix: parallelize after everything is added to the model"
            )
        return self._standing[id(stand_in)].to_local()  # type: ignore[attr-defined]

    def returned(self, result: Any) -> Any:
        """A call's result. Raises ShardError where a parameter is part of it, for which Dynamo gives the stand-in."""
        if any(id(x) in self._standing for x in pytree.tree_leaves(result)):
            raise ShardError(
                "the model returns one of its parameters, of which each rank holds a part; fix: return a clone of it"
            )
        return result

    def _checked(self, owner: nn.Module, name: str) -> nn.Parameter:
        p = owner._parameters.get(name)
        if not isinstance(p, DTensor) or not self._as_split(p):
            raise ShardError(
                f"{name} of a {type(owner).__name__} is no longer what zero=3 made of it, parts over the ranks; fix: change its "
                "values in place (load_state_dict, torch.distributed.checkpoint), or parallelize after replacing it"
            )
        return p

    def _as_split(self, x: DTensor) -> bool:
        dim = split_dim(x.shape, self._mesh.size())
        return x.device_mesh == self._mesh and x.placements == ((Replicate() if dim is None else Shard(dim)),)

    def _stand_in(self, place: tuple[nn.Module, str], p: nn.Parameter) -> nn.Parameter:
        made = self._stand_ins.get(place)
        if made is None or (made.shape, made.dtype, made.device) != (p.shape, p.dtype, p.device):
            made = self._stand_ins[place] = nn.Parameter(self._valueless(p), p.requires_grad)
        if made.requires_grad != p.requires_grad:
            made.requires_grad_(p.requires_grad)
        return made

    def _valueless(self, p: Tensor) -> Tensor:
        key = (p.dtype, p.device)
        if key not in self._memory:
            alike = [x.numel() for x in (_at(*place) for place in self._places) if (x.dtype, x.device) == key]
            # Whatever should read it shows that: not a number, where the type has one.
            self._memory[key] = torch.full(
                (max(alike),), math.nan if p.is_floating_point() else 0, dtype=p.dtype, device=p.device
            )
        return self._memory[key][: p.numel()].view(p.shape)


class _Replaced(nn.Parameter):
    """What a parameter becomes that was split. Whoever still holds it, an optimizer or another module, is told so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardError(
            "this parameter was split over the ranks by autosp.parallelize(zero=3) and is no longer the model's; fix: build the "
            "optimizer after parallelize, and parallelize the module that contains everything that shares its parameters"
        )


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                yield owner, name


def _at(owner: nn.Module, name: str) -> nn.Parameter:
    p = owner._parameters[name]
    assert p is not None
    return p


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(torch.Size(shape[d + 1 :]).numel() for d in range(len(shape)))


def _refuse(owner: nn.Module, name: str) -> None:
    p = _at(owner, name)
    if isinstance(p, _Replaced | DTensor):
        raise ShardError(f"{name} of a {type(owner).__name__} is split already; fix: one parallelize(zero=3), no fully_shard")
    if isinstance(p, nn.parameter.UninitializedTensorMixin):
        raise ShardError(f"{name} of a {type(owner).__name__} has no shape yet; fix: run the lazy module once before")
    if type(p) is not nn.Parameter:
        raise ShardError(
            f"{name} of a {type(owner).__name__} is a {type(p).__name__}, which its parts would not be; fix: nn.Parameter"
        )
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        raise ShardError(f"{name} of a {type(owner).__name__} has hooks, which expect it whole; fix: register them afterwards")


def _compare(module: nn.Module, world: World) -> None:
    """Raises DisagreementError unless all ranks start from the same weights: what is split can no longer be compared."""
    tensors = [x for x in (*module.parameters(), *module.buffers()) if not x.is_meta]
    if world.everyone is not None:
        message = [agree.READY, 0, 0, agree.batch_hash(tensors), 0, 0]
        agree.judge(agree.exchange(message, world.everyone, world.device), world.spread.ranks)
