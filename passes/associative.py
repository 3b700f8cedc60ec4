"""`torch.associative_scan` kept whole: one operator of a captured graph, with its function under a name.

Dynamo inlines combine_mode="generic" as a tree of slices under vmap, which cannot be captured, and refuses "pointwise" on a CPU.
While a model is traced for autosp, both become torch's higher-order `scan`, whose function may be anything and may read other
tensors; capture turns that into `asp::associative_scan`. Other users of torch.compile see no difference.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from ..kernels import prefix

# Modules that have the names of functions beside them, which `import .. as` would find instead.
_frontend: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
_scan: Any = importlib.import_module("torch._higher_order_ops.scan")
_function = _frontend.associative_scan
_original = types.FunctionType(_function.__code__, _function.__globals__, _function.__name__, _function.__defaults__)


class _Tracing:
    on = False


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Scans stay whole in what Dynamo traces meanwhile."""
    before, _Tracing.on = _Tracing.on, True
    try:
        yield
    finally:
        _Tracing.on = before


@torch._dynamo.allow_in_graph
def combined(x: Tensor) -> Tensor:
    """A result of an associative function; tells its graph from that of any other scan."""
    return x.clone(memory_format=torch.contiguous_format)


def _whole(combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
    """What Dynamo traces in place of `associative_scan`; in both modes `combine_fn` is of single positions."""
    if not _Tracing.on:
        return _original(combine_fn, xs, dim, reverse, combine_mode)
    leaves, tree = pytree.tree_flatten(xs)
    dim = dim % leaves[0].ndim
    leaves = [torch.movedim(x, dim, 0) for x in leaves]
    if reverse:
        leaves = [torch.flip(x, [0]) for x in leaves]

    def step(carry: list[Tensor], x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        new = pytree.tree_leaves(combine_fn(pytree.tree_unflatten(carry, tree), pytree.tree_unflatten(x, tree)))
        return [combined(n) for n in new], [combined(n) for n in new]

    flat = pytree.tree_structure(leaves)
    combine = functools.partial(
        _scan.wrap_combine_fn_flat,
        combine_fn=step,
        spec_init=flat,
        spec_xs=flat,
        num_init_leaves=len(leaves),
        num_inp_leaves=len(leaves),
    )
    start = [torch.empty_like(x[0], memory_format=torch.contiguous_format) for x in leaves]
    _, results = _scan.scan_op(combine, start, leaves, additional_inputs=())
    if reverse:
        results = [torch.flip(x, [0]) for x in results]
    return pytree.tree_unflatten([torch.movedim(x, 0, dim) for x in results], tree)


torch.compiler.substitute_in_graph(_function, skip_signature_check=True)(_whole)


def named(gm: fx.GraphModule) -> None:
    """Scans of Dynamo's graph that `_whole` made become `asp::associative_scan`, their functions named by a digest of their code.

    The name is the same on every rank and at every compilation.
    """
    for node in gm.graph.find_nodes(op="call_function", target=_scan.scan_op):
        holder, start, xs, extra = node.args
        combine = getattr(gm, holder.target)
        if not any(n.target is combined for n in combine.graph.nodes):
            continue
        key = hashlib.sha256(combine.code.encode()).hexdigest()
        prefix.register(key, combine)
        node.target = torch.ops.asp.associative_scan.default
        node.args = (list(xs), list(extra), key)
        for user in list(node.users):
            assert user.target is operator.getitem
            if not user.users:
                gm.graph.erase_node(user)
            else:  # the last carries come first
                user.args = (node, user.args[1] - len(start))
    gm.recompile()
