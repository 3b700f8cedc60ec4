"""From Dynamo's graph to a functional ATen graph at global shapes, with the facts later passes need.

Pre-dispatch ATen keeps attention, linear, norms and losses whole and autograd still runs on it afterwards.
`aot_export_module(..., pre_dispatch=True)` is torch's private export entry point; it is touched only here.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import TracingContext, detect_fake_mode
from torch.utils.checkpoint import CheckpointPolicy

from ..kernels.errors import AutospError
from . import associative, functions
from .source import CaptureError as CaptureError
from .source import source_line as source_line

aten = torch.ops.aten


@dataclass(frozen=True)
class Input:
    """One input of the graph: a parameter, a buffer, or data of the batch."""

    name: str
    kind: str
    requires_grad: bool
    source: str


@dataclass(frozen=True)
class Captured:
    """A functional graph at global shapes. The first `len(mutated)` outputs are new values of inputs."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    mutated: tuple[int, ...]


def refuse_graph_break(gm: fx.GraphModule) -> None:
    """A graph that is only part of a model would run half parallel: refuse it."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        stack = "".join(traceback.format_list(reason.user_stack)).rstrip()
        raise CaptureError(
            f"the model breaks into several graphs, so it cannot run sequence-parallel as a whole.\n"
            f"Dynamo's reason: {reason.reason}\nat\n{stack}\n"
            f"Fix: rewrite that line so that it can be traced, or call the part that can with autosp.parallelize."
        )


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """The functional pre-dispatch ATen graph of Dynamo's `gm`, normalised to fewer spellings.

    Raises CaptureError where a size depends on data.
    """
    refuse_graph_break(gm)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta.get("example_value", x) for n, x in zip(placeholders, example_inputs, strict=True)]
    for node, value in zip(placeholders, fakes, strict=True):
        if not isinstance(value, Tensor) or any(not isinstance(s, int) for s in value.shape):
            raise CaptureError(f"input {node.name} has a dynamic size; autosp compiles for fixed sizes: use dynamic=False")
    inputs = tuple(_describe(n, v) for n, v in zip(placeholders, fakes, strict=True))
    gm = _inline_checkpoints(gm)
    context = TracingContext.try_get()
    mode = detect_fake_mode(fakes) or (context.fake_mode if context else None)
    assert mode is not None
    with mode, fx.traceback.preserve_node_meta():
        functions.kept(gm, _exported)
        associative.named(gm)
        module, mutated = _exported(gm, fakes)
    _refuse_dynamic_sizes(module.graph)
    functions.refuse_drawing_branches(module)
    module.recompile()
    return Captured(module, inputs, mutated)


def _exported(gm: fx.GraphModule, fakes: list[Tensor]) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A functional ATen graph with few spellings, and which input each of its first outputs is the new value of."""
    try:
        module, signature = aot_export_module(gm, fakes, trace_joint=False, pre_dispatch=True)
    except (AutospError, torch._dynamo.exc.TorchDynamoException):
        raise
    except Exception as reason:  # torch's message ends with the user's lines
        raise CaptureError(f"the model does not become a graph of ATen operators, so it cannot be split.\n{reason}") from reason
    mutated = _mutated(module, signature)
    _normalise(module.graph)
    return module, mutated


def _refuse_dynamic_sizes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(not isinstance(s, int) and not s.node.is_constant() for s in value.shape):
            raise CaptureError(
                f"a size depends on the values of a tensor\nat {source_line(node)}\n"
                "autosp compiles for fixed sizes. Fix: keep the size and mask what does not count (torch.where)."
            )


def _describe(node: fx.Node, value: Tensor) -> Input:
    source = ""
    if "grapharg" in node.meta and node.meta["grapharg"] is not None:
        name = node.meta["grapharg"].source.name
        source = name() if callable(name) else name
    if isinstance(value, torch.nn.Parameter):
        kind = "parameter"
    elif "_buffers" in source or (source and not source.startswith("L[")):
        kind = "buffer"
    else:
        kind = "data"
    return Input(node.name, kind, value.requires_grad, source)


def _mutated(module: fx.GraphModule, signature: Any) -> tuple[int, ...]:
    """Which placeholder each leading output is the new value of."""
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    changed = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    output = next(iter(reversed(module.graph.nodes)))
    return tuple(names.index(changed[n.name]) for n in output.args[0] if isinstance(n, fx.Node) and n.name in changed)[
        : len(changed)
    ]


def _inline_checkpoints(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace `torch.utils.checkpoint` regions by their nodes, tagged for PyTorch's partitioner.

    A checkpoint inside a checkpoint belongs to the outer region.
    """
    region = 0
    while (hop := next((n for n in gm.graph.nodes if _is_checkpoint(n)), None)) is not None:
        region += 1
        _replace_results(hop, _inlined(gm, hop, region))
        gm.graph.erase_node(hop)  # nothing else is removed here: torch-IR still mutates in place
    gm.recompile()
    return gm


def _inlined(gm: fx.GraphModule, hop: fx.Node, region: int) -> Any:
    """Copy a region's body before its call, tagged; gives the body's results."""
    inner = getattr(gm, hop.args[0].target)  # type: ignore[union-attr, arg-type]
    body = fx.GraphModule(inner, inner.graph)
    values: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), hop.args[1:], strict=True))
    _copy_attributes(body, gm, region)
    with gm.graph.inserting_before(hop):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copied = gm.graph.node_copy(node, lambda n: values[n])
            if node.op == "get_attr":
                copied.target = f"checkpoint_{region}_{node.target}".replace(".", "_")
            copied.meta.setdefault("recompute", hop.meta.get("recompute", CheckpointPolicy.PREFER_RECOMPUTE))
            copied.meta.setdefault("ac_graph_id", hop.meta.get("ac_graph_id", region))
            values[node] = copied
    return fx.map_arg(body.graph.output_node().args[0], lambda n: values[n])


def _is_checkpoint(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint"


def _copy_attributes(body: fx.GraphModule, gm: fx.GraphModule, region: int) -> None:
    for node in body.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(body)
            setattr(gm, f"checkpoint_{region}_{node.target}".replace(".", "_"), value)


def _replace_results(hop: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        hop.replace_all_uses_with(result)
        return
    for user in list(hop.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(result[user.args[1]])
        user.graph.erase_node(user)


# Fewer spellings ----------------------------------------------------------------------------------


def _normalise(graph: fx.Graph) -> None:
    """Rewrite operators whose result depends on an operand's shape or type only, and splits, to plain ones."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.name.startswith("aten::_assert") or node.target is aten.sym_constrain_range_for_size.default:
            graph.erase_node(node)
            continue
        rewrite = _REWRITES.get(node.target.overloadpacket)
        if rewrite is not None:
            with graph.inserting_before(node):
                rewrite(node)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or _is_mode(n))


def _is_mode(node: fx.Node) -> bool:
    return (
        node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem
    )


def insert(like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A new node before the insertion point with the metadata of `like` and its own fake value."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _created(op: torch._ops.OpOverload, *fill: str) -> Callable[[fx.Node], None]:
    """new_*(x, size, ...) -> the constructor itself; x gives only dtype and device."""

    def rewrite(node: fx.Node) -> None:
        value: Tensor = node.meta["val"]
        args: list[Any] = [list(value.shape)]
        if fill:
            args.append(node.args[2] if len(node.args) > 2 else node.kwargs[fill[0]])
        _replace(node, insert(node, op, *args, dtype=value.dtype, device=value.device))

    return rewrite


def _cast(node: fx.Node) -> None:
    value: Tensor = node.meta["val"]
    _replace(node, insert(node, aten._to_copy.default, node.args[0], dtype=value.dtype, device=value.device))


def _counted(node: fx.Node) -> None:
    """bincount(x, minlength=n) of values below n -> comparisons and a sum, which have a size and can be split."""
    value: Tensor = node.meta["val"]
    rest = dict(zip(("weights", "minlength"), node.args[1:], strict=False)) | node.kwargs
    if rest.get("weights") is not None or tuple(value.shape) != (rest.get("minlength", 0),):
        return
    column = insert(node, aten.unsqueeze.default, node.args[0], -1)
    classes = insert(node, aten.arange.default, int(value.shape[0]), device=value.device)
    _replace(node, insert(node, aten.sum.dim_IntList, insert(node, aten.eq.Tensor, column, classes), [0]))


def _copied(node: fx.Node) -> None:
    """copy(x, source), what is left of an in-place copy: source in x's type and shape (aten.copy has no derivative)."""
    value: Tensor = node.meta["val"]
    cast = insert(node, aten._to_copy.default, node.args[1], dtype=value.dtype, device=value.device)
    _replace(node, insert(node, aten.expand.default, cast, list(value.shape)))


def _assigned(node: fx.Node) -> None:
    """x[mask] = value, one for all -> where, which looks at each element alone."""
    x, indices, value = node.args[:3]
    mask: Any = indices[0] if len(indices) == 1 else None  # type: ignore[index, arg-type]
    accumulates = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    plain = mask is not None and mask.meta["val"].dtype == torch.bool and mask.meta["val"].shape == node.meta["val"].shape
    if plain and value.meta["val"].dim() == 0 and not accumulates:  # type: ignore[union-attr]
        _replace(node, insert(node, aten.where.self, mask, value, x))


def _shaped(op: torch._ops.OpOverload) -> Callable[[fx.Node], None]:
    return lambda node: _replace(node, insert(node, op, node.args[0], list(node.meta["val"].shape)))


def _split(node: fx.Node) -> None:
    """chunk, split, tensor_split -> one slice an output."""
    rest: dict[str, Any] = {s.name: a for s, a in zip(node.target._schema.arguments, node.args, strict=False)}  # type: ignore[union-attr]
    rest |= node.kwargs
    x = node.args[0]
    dim = rest.get("dim", 0) % x.meta["val"].dim()  # type: ignore[union-attr]
    start = 0
    pieces = []
    for value in node.meta["val"]:
        stop = start + value.shape[dim]
        pieces.append(insert(node, aten.slice.Tensor, x, dim, start, stop))
        start = stop
    _replace_results(node, pieces)
    node.graph.erase_node(node)


def _broadcast(node: fx.Node) -> None:
    """broadcast_tensors -> one expand an operand that needs it."""
    xs = list(node.args[0])  # type: ignore[arg-type]
    size = list(node.meta["val"][0].shape)
    pieces = [x if list(x.meta["val"].shape) == size else insert(node, aten.expand.default, x, size) for x in xs]
    _replace_results(node, pieces)
    node.graph.erase_node(node)


def _unbind(node: fx.Node) -> None:
    x = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % x.meta["val"].dim()  # type: ignore[union-attr, operator]
    pieces = [insert(node, aten.select.int, x, dim, i) for i in range(len(node.meta["val"]))]
    _replace_results(node, pieces)
    node.graph.erase_node(node)


_REWRITES: dict[Any, Callable[[fx.Node], None]] = {
    aten.new_ones: _created(aten.ones.default),
    aten.new_zeros: _created(aten.zeros.default),
    aten.new_empty: _created(aten.empty.memory_format),
    aten.new_full: _created(aten.full.default, "fill_value"),
    aten.type_as: _cast,
    aten.copy: _copied,
    aten.bincount: _counted,
    aten.index_put: _assigned,
    aten.expand_as: _shaped(aten.expand.default),
    aten.view_as: _shaped(aten.reshape.default),
    aten.reshape_as: _shaped(aten.reshape.default),
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.chunk: _split,
    aten.tensor_split: _split,
    aten.unsafe_chunk: _split,
    aten.unbind: _unbind,
    aten.broadcast_tensors: _broadcast,
}
