"""Derivatives that a user wrote are kept: `torch.autograd.Function` and hooks on tensors become `asp::custom_function`.

Dynamo makes each a higher-order operator with two graphs. The export of the whole graph would trace the forward one only, and
its operators would then be differentiated instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..kernels import custom_function
from ..kernels.custom_function import Bodies
from .source import CaptureError, source_line

aten = torch.ops.aten
Export = Callable[[fx.GraphModule, list[Tensor]], tuple[fx.GraphModule, tuple[int, ...]]]

APPLY, HOOK = "autograd_function_apply", "register_hook"  # torch 2.11 makes the first of a hook, too


@torch._dynamo.allow_in_graph
def undefined_cotangents() -> Tensor:
    """Stands in the forward of a function that asked for None instead of zeros."""
    return torch.zeros(())


def _set_materialize_grads(ctx: Any, value: bool) -> None:
    ctx.materialize_grads = value
    if torch.compiler.is_compiling() and not value:
        undefined_cotangents()


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Functions that ask for None instead of zeros say so in what Dynamo traces meanwhile; it gives zeros to all."""
    context: Any = torch.autograd.function.FunctionCtx
    before, context.set_materialize_grads = context.set_materialize_grads, _set_materialize_grads
    try:
        yield
    finally:
        context.set_materialize_grads = before


def kept(gm: fx.GraphModule, export: Export) -> None:
    """Replace every such node of Dynamo's graph by one operator. `export(body, fakes)` gives a functional ATen graph and which
    of its inputs it changes in place; their new values are its first outputs.

    Raises CaptureError, with the user's line, for what cannot be kept.
    """
    casts: list[tuple[Any, ...]] = []
    for node in list(gm.graph.nodes):
        name = _name(node)
        if name == "_enter_autocast":
            casts.append(node.args)
        elif name == "_exit_autocast":
            casts.pop()
        elif name in (APPLY, HOOK):
            with _autocast(casts):
                _keep(gm, node, export)
        else:
            _refuse_inside(gm, node)
    gm.recompile()


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


@contextlib.contextmanager
def _autocast(casts: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """The state in which the model calls the function, which decides the types of its results."""
    entered = torch.amp.autocast_mode._enter_autocast(*casts[-1]) if casts else None
    try:
        yield
    finally:
        if entered is not None:
            torch.amp.autocast_mode._exit_autocast(entered)


def _refuse_inside(gm: fx.GraphModule, node: fx.Node) -> None:
    """In a branch of torch.cond or a loop the operator would have to be differentiated by somebody else's rules."""
    for inner in _inside(gm, node):
        for n in inner.graph.nodes:
            if _name(n) in (APPLY, HOOK):
                raise _refused(n, f"it is called inside {_name(node)}", "call it outside, or write the branch with torch.where")
            _refuse_inside(inner, n)


def refuse_drawing_branches(gm: fx.GraphModule) -> None:
    """Of a captured graph: nobody makes the ranks draw the same inside a branch of torch.cond, or a loop."""
    for node in gm.graph.nodes:
        for inner in _inside(gm, node):
            drawn = next((n for n in inner.graph.nodes if _draws(n)), None)
            if drawn is not None:
                raise CaptureError(
                    f"{_name(node)} draws random numbers inside ({drawn.target}), and ranks could not draw the same\n"
                    f"at {source_line(node)}\nFix: draw them outside and pass them in."
                )
            refuse_drawing_branches(inner)


def _inside(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    for x in node.all_input_nodes if node.op == "call_function" else ():
        inner = operator.attrgetter(x.target)(gm) if x.op == "get_attr" else None  # type: ignore[arg-type]
        if isinstance(inner, fx.GraphModule):
            yield inner


def _refused(node: fx.Node, reason: str, fix: str) -> CaptureError:
    return CaptureError(
        f"the derivative that {_called(node)} gives cannot be kept: {reason}\nat {source_line(node)}\nFix: {fix}."
    )


def _is_hook(node: fx.Node) -> bool:
    return _name(node) == HOOK or "register_hook(" in source_line(node)


def _called(node: fx.Node) -> str:
    found = re.search(r"(\w+)\.apply\(", source_line(node))
    return "a hook" if _is_hook(node) else f"torch.autograd.Function {found[1]}" if found else "a torch.autograd.Function"


@dataclass(frozen=True)
class _Call:
    """One call: its arguments, the results that are used, and both functions; results and saved values as fakes."""

    args: tuple[fx.Node, ...]
    results: dict[int, Tensor]
    fixed: tuple[int, ...]
    saved: list[Tensor]
    given: tuple[bool, ...]
    forward: fx.GraphModule
    backward: fx.GraphModule


def _keep(gm: fx.GraphModule, node: fx.Node, export: Export) -> None:
    if not node.users and _name(node) == APPLY:
        gm.graph.erase_node(node)
        return
    call = _hooked(gm, node) if _name(node) == HOOK else _applied(gm, node)
    args, saved = [_like(x.meta["example_value"]) for x in call.args], [_like(x) for x in call.saved]
    results = list(call.results.values())
    cotangents = [_like(x).contiguous() for i, x in enumerate(results) if i not in call.fixed]
    forward = _exported(node, call.forward, args, 0, export)
    backward = _exported(node, call.backward, [*cotangents, *saved], len(cotangents), export)
    _refuse_changes(node, call, forward)
    bodies = Bodies(_called(node), forward, backward, tuple(results), call.fixed, call.given)
    key = _key(bodies, [*args, *cotangents, *saved])
    custom_function.register(key, bodies)
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(torch.ops.asp.custom_function.default, (list(call.args), key))
        pieces = [gm.graph.call_function(operator.getitem, (new, i)) for i in range(len(results))]
        pieces = [gm.graph.call_method("detach", (x,)) if i in call.fixed else x for i, x in enumerate(pieces)]
        for x, value in ((new, None), *zip(pieces, results, strict=True)):
            x.meta = {**node.meta, "example_value": value, "hooked": _is_hook(node)}
    if _name(node) == HOOK:
        node.replace_all_uses_with(pieces[0])
    else:
        position = dict(zip(call.results, pieces, strict=True))
        for user in list(node.users):
            user.replace_all_uses_with(position[user.args[1]])
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)


def _like(x: Tensor) -> Tensor:
    """A value of Dynamo's graph in the fake mode of the capture, which is another."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _applied(gm: fx.GraphModule, node: fx.Node) -> _Call:
    """autograd_function_apply(forward, backward, *args): forward gives (results, saved), backward takes a cotangent of each
    result, then what is saved. Results that nobody uses are left out; of them and of fixed ones backward sees zeros.
    """
    forward, backward = (operator.attrgetter(x.target)(gm) for x in node.args[:2])  # type: ignore[union-attr, arg-type]
    args, (outs, saved) = node.args[2:], forward.graph.output_node().args[0]
    grads = backward.graph.output_node().args[0]
    takes = backward.graph.find_nodes(op="placeholder")
    used = sorted({user.args[1] for user in node.users})
    plain = all(isinstance(x, fx.Node) for x in (*args, *(outs[i] for i in used), *saved))
    if not plain or len(grads) != len(args) or len(takes) != len(outs) + len(saved):
        raise _refused(node, "it takes, returns or saves something that is no tensor", "return and save tensors only")
    fakes = {i: outs[i].meta["example_value"] for i in used}
    ignored = {i for i, x in fakes.items() if not (x.is_floating_point() or x.is_complex())}
    ignored |= set(node.kwargs.get("non_differentiable_idx", ()))  # type: ignore[arg-type]
    free = [takes[i] for i in used if i not in ignored]
    zeros = {x: outs[i].meta["example_value"] for i, x in enumerate(takes[: len(outs)]) if x not in free and x.users}
    if zeros and any(_name(n) == undefined_cotangents.__name__ for n in forward.graph.nodes):
        raise _refused(
            node, "it asks for None in place of zeros (set_materialize_grads), which Dynamo does not give", "take zeros"
        )
    given = [g for g in grads if g is not None]
    return _Call(
        args,
        fakes,
        tuple(at for at, i in enumerate(used) if i in ignored),
        [x.meta["example_value"] for x in saved],
        tuple(g is not None for g in grads),
        _graph(forward, forward.graph.find_nodes(op="placeholder"), {}, [*(outs[i] for i in used), *saved]),
        _graph(backward, [*free, *takes[len(outs) :]], zeros, given),
    )


def _hooked(gm: fx.GraphModule, node: fx.Node) -> _Call:
    """register_hook(x, hook, *extra): x itself, whose cotangent is hook(cotangent, *extra), or stays where that is None."""
    x, hook, *extra = node.args
    module = operator.attrgetter(hook.target)(gm)  # type: ignore[union-attr, arg-type]
    takes, made = module.graph.find_nodes(op="placeholder"), module.graph.output_node().args[0]
    made = made[0] if isinstance(made, (tuple, list)) else made
    same = fx.Graph()
    same.output(tuple([same.placeholder(f"x{i}") for i in range(1 + len(extra))]))
    return _Call(
        (x, *extra),  # type: ignore[arg-type]
        {0: x.meta["example_value"]},  # type: ignore[union-attr]
        (),
        [e.meta["example_value"] for e in extra],  # type: ignore[union-attr]
        (True, *(False,) * len(extra)),
        fx.GraphModule(module, same),
        _graph(module, takes, {}, [takes[0] if made is None else made]),
    )


def _graph(
    module: fx.GraphModule, takes: Sequence[fx.Node], zeros: dict[fx.Node, Tensor], gives: Sequence[fx.Node]
) -> fx.GraphModule:
    """A body as a graph of tensors from `takes` to `gives`. Neither function is differentiated, so grad modes mean nothing."""
    graph = fx.Graph()
    new = {x: graph.placeholder(x.name) for x in takes}
    for x, like in zeros.items():
        new[x] = graph.call_function(torch.zeros, (list(like.shape),), {"dtype": like.dtype, "device": like.device})
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output") and _name(node) != "_set_grad_enabled":
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[x] for x in gives))
    return fx.GraphModule(module, graph)


def _exported(node: fx.Node, body: fx.GraphModule, takes: list[Tensor], own: int, export: Export) -> fx.GraphModule:
    """The body as a functional ATen graph. Of what it takes it may change the first `own` in place."""
    with torch.no_grad():
        module, changed = export(body, takes)
    if any(i >= own for i in changed):
        raise _refused(node, "it changes an argument in place", "let it return a new tensor")
    for n in list(module.graph.nodes):
        if _name(n) == "_set_grad_enabled":
            module.graph.erase_node(n)
        elif _draws(n):
            reason = f"it draws random numbers ({n.target}), and ranks could not draw the same"
            raise _refused(node, reason, "draw them outside, as torch.rand_like(x.detach()), and pass them as an argument")
    output = module.graph.output_node()
    output.args = (tuple(output.args[0])[len(changed) :],)
    module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or "_autocast" in _name(n))
    module.recompile()
    return module


def _draws(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return node.target is not aten.dropout.default or (node.args[1] != 0 and bool(node.args[2]))


# In place -----------------------------------------------------------------------------------------


def _refuse_changes(node: fx.Node, call: _Call, forward: fx.GraphModule) -> None:
    """The operator's results share no memory with its arguments: where they should, neither may be changed afterwards.

    A hook sees the whole cotangent of its tensor, so nothing may have used the tensor before, and of two hooks the first comes
    first.
    """
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    if _is_hook(node) and any(order[user] < order[node] for user in call.args[0].users):
        raise _refused(node, "the tensor was used before it was hooked", "call register_hook before its first use")
    if _is_hook(node) and call.args[0].meta.get("hooked"):
        raise _refused(node, "the tensor has one already", "do both in one hook")
    outs = forward.graph.output_node().args[0][: len(call.results)]  # type: ignore[index]
    if not any(_viewed(x) for x in outs):  # type: ignore[union-attr]
        return
    results = [node] if _name(node) == HOOK else list(node.users)
    for x in (*call.args, *results):
        for user in x.users:
            if order[user] > order[node] and _changes(user, x):
                raise _refused(user, "it returns its argument, which is changed in place later", "change a clone")


def _viewed(x: fx.Node) -> bool:
    """Is the value an argument, or possibly a view of one?"""
    while x.op == "call_function":
        schema = getattr(x.target, "_schema", None)
        aliases = schema is not None and any(r.alias_info is not None for r in schema.returns)
        if not x.all_input_nodes or not (aliases or getattr(x.target, "overloadpacket", None) in _MAYBE_VIEWS):
            return False
        x = x.all_input_nodes[0]
    return x.op == "placeholder"


_MAYBE_VIEWS = {aten.reshape, aten.contiguous, aten.to, aten.flatten}


def _changes(user: fx.Node, x: fx.Node) -> bool:
    """Does it change x in place? (Of Dynamo's graph, in torch's spellings.)"""
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    plain = name.endswith("_") and not name.endswith("__")
    own = bool(user.args) and user.args[0] is x
    return (own and (plain or name in _IN_PLACE or bool(user.kwargs.get("inplace")))) or user.kwargs.get("out") is x


_IN_PLACE = {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"}


# Names --------------------------------------------------------------------------------------------


def _key(bodies: Bodies, values: Sequence[Tensor]) -> str:
    """A digest of all that decides what the functions compute, but for the number of a rank's device: the same on all ranks."""
    digest = hashlib.sha256(re.sub(r"index=\d+", "index", bodies.text).encode())
    digest.update(repr([(tuple(x.shape), x.dtype, x.device.type) for x in values]).encode())
    for module in (bodies.forward, bodies.backward):
        for node in module.graph.find_nodes(op="get_attr"):
            constant = operator.attrgetter(node.target)(module)
            digest.update(repr((node.name, constant.dtype, constant.tolist())).encode())
    return digest.hexdigest()
